"""Where a load reads to: memory of its own until all is checked; where that would be too much, the live tensors."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.dtypes import DTYPES
from ckptkit.catalog.entry import TensorEntry
from ckptkit.checkpoint.load.fill import Fill
from ckptkit.checkpoint.state.local_part import PartView, part_view
from ckptkit.checkpoint.state.optimizer import new_state_tensor
from ckptkit.formats.dcp.digests import CHECK_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["Place", "Places", "free_memory", "own_budget"]

_MOST_CHECKS = 8
_NOT_TOLD = 4 << 30  # where the system does not tell what is free


@dataclass(slots=True)
class Place:
    """A tensor of the state that is to be loaded.

    Attributes:
        tensor: What the state will hold: the live tensor, or a new one.
        read: Read beside it, and copied into `view` at the end; None where there is nothing to copy.
        view: This rank's part of `tensor`.
        make: A new tensor that can take the live one's place; None: the live one must get what is read.
    """

    entry: TensorEntry
    tensor: torch.Tensor | None
    view: PartView | None = None
    make: Callable[[], torch.Tensor] | None = None
    read: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """What is held beside the live tensor until all is checked."""
        return 0 if self.view is None else self.view.local.numel() * DTYPES[self.entry.dtype].itemsize

    def finish(self) -> None:
        """Copy what was read beside the live tensor into it, and let go of it."""
        import torch

        if self.read is not None and self.view is not None:
            with torch.no_grad():
                self.view.local.copy_(self.read)
            self.read = None


class Places:
    """Collects what is to be loaded, then decides what is read where.

    Args:
        in_place: Read into live tensors at once.
        budget: The most to hold beside live tensors until all is checked; None: all of it.

    Attributes:
        now: What is read first.
        later: What is checked first, and read into live tensors once all ranks have checked all.
        checks: How many slices may be checked at once.
        held: Bytes that are held beside live tensors, once `settle` has decided.
    """

    def __init__(self, rank: int, *, in_place: bool, budget: int | None) -> None:
        self.rank = rank
        self.in_place = in_place
        self.budget = budget
        self.now: list[Fill] = []
        self.later: list[Fill] = []
        self.checks = _MOST_CHECKS
        self.held = 0
        self._live: list[Place] = []

    def weight(self, live: torch.Tensor, entry: TensorEntry) -> Place:
        """Plan to load a live tensor's part of `entry`."""
        place = Place(entry, live, part_view(entry.name, live, self.rank))
        self._live.append(place)
        return place

    def state(self, parameter: torch.Tensor, name: str, entry: TensorEntry, live: object, *, on_device: bool) -> Place:
        """Plan to load one state of a parameter, into a new tensor or, where it is placed alike, into the live one."""
        import torch

        make = functools.partial(
            new_state_tensor, parameter, name, getattr(torch, entry.dtype), entry.shape, on_device=on_device
        )
        if isinstance(live, torch.Tensor) and _is_alike(live, parameter, entry):
            # A new one on an accelerator would need as much of its memory again; the host has more.
            on_host = live.device.type == "cpu"
            place = Place(entry, live, part_view(entry.name, live, self.rank), make if on_host else None)
            self._live.append(place)
            return place
        place = Place(entry, make())
        assert place.tensor is not None
        self.into(place.tensor, entry)
        return place

    def into(self, new: torch.Tensor, entry: TensorEntry) -> None:
        """Plan to read into a new tensor, which nothing else refers to."""
        view = part_view(entry.name, new, self.rank)
        self.now.append(Fill(entry.name, view.local, view.parts))

    def settle(self) -> int:
        """Decide for all live tensors, and return how many bytes are to be read twice."""
        waiting = set() if self.in_place else self._too_much()
        for place in self._live:
            assert place.view is not None
            local, parts = place.view.local, place.view.parts
            if local.device.type != "meta" and (self.in_place or id(place) in waiting):
                (self.now if self.in_place else self.later).append(Fill(place.entry.name, local, parts))
            else:
                self.held += place.nbytes if local.device.type != "meta" else 0
                self.now.append(Fill(place.entry.name, _beside(place, self.rank), parts))
        return sum(place.nbytes for place in self._live if id(place) in waiting)

    def _too_much(self) -> set[int]:
        """Return the ids of the places that are read later: the largest."""
        if self.budget is None or sum(place.nbytes for place in self._live) <= self.budget:
            return set()
        self.checks = max(1, min(_MOST_CHECKS, self.budget // CHECK_BYTES))  # they hold it before the rest is read
        left = self.budget
        chosen: set[int] = set()
        for place in sorted(self._live, key=lambda place: place.nbytes):
            left -= place.nbytes
            if left < 0 and _can_be_checked_first(place.entry):
                chosen.add(id(place))
        return chosen


def _beside(place: Place, rank: int) -> torch.Tensor:
    """Give a place memory beside the live tensor, and return this rank's part of it."""
    import torch

    assert place.view is not None
    if place.make is not None:
        place.tensor = place.make()
        place.view = part_view(place.entry.name, place.tensor, rank)
        return place.view.local
    place.read = torch.empty(tuple(place.view.local.shape), dtype=getattr(torch, place.entry.dtype))
    return place.read


def _is_alike(live: torch.Tensor, parameter: torch.Tensor, entry: TensorEntry) -> bool:
    """Tell whether a live state is what a new one of this parameter would be: of its shape, placed as it is."""
    import torch
    from torch.distributed.tensor import DTensor

    if live.dtype is not getattr(torch, entry.dtype) or live.numel() <= 1 or live.device != parameter.device:
        return False
    if not tuple(live.shape) == entry.shape == tuple(parameter.shape) or live.is_meta:
        return False
    if not isinstance(parameter, DTensor) or not isinstance(live, DTensor):
        return type(live) is torch.Tensor and not isinstance(parameter, DTensor) and _apart(live, parameter)
    same = live.device_mesh == parameter.device_mesh and live.placements == parameter.placements
    return same and _apart(live.to_local(), parameter.to_local())


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.numel():
        return True
    return one.stride() == other.stride() and one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def _can_be_checked_first(entry: TensorEntry) -> bool:
    """Tell whether the digests, if there are any, are of the bytes of the slices as they lie in the files."""
    slices = entry.slices
    if slices.codecs:
        return False
    if slices.digests is None or slices.digest_starts is None or slices.digest_nbytes is None:
        return True
    alike = np.array_equal(slices.digest_starts, slices.starts) and np.array_equal(slices.digest_nbytes, slices.nbytes)
    return bool(alike)


# --- how much there is


def own_budget(max_memory: int | None) -> int:
    """Return the bytes that this rank may hold for a while: `max_memory`, or else half of its share of what is free."""
    if max_memory is not None:
        return max_memory
    free = free_memory()
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return (_NOT_TOLD if free is None else free // 2) // ranks_here


def free_memory() -> int | None:
    """Return the bytes of memory that processes here can still get, the limits of containers counted; None where the
    system does not tell (it is not Linux)."""
    found = [*_system(), *_groups()]
    return max(0, min(found)) if found else None


def _system() -> Iterator[int]:
    for key, value in _table("/proc/meminfo", ":"):
        if key == "MemAvailable":
            yield int(value.split()[0]) << 10


def _groups() -> Iterator[int]:
    """Yield what each control group that this process is in may still use."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, cache = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        here = Path(top, path.lstrip("/"))
        for folder in dict.fromkeys([here, *here.parents, Path(top)]):
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if folder.is_relative_to(top) and most.isdigit() and now.isdigit():
                # What files hold of it makes room as soon as it is asked for.
                files = sum(int(value) for key, value in _table(folder / "memory.stat", " ") if key == cache)
                yield int(most) - int(now) + files


def _table(path: str | Path, separator: str) -> Iterator[tuple[str, Any]]:
    for line in _text(path).splitlines():
        key, _, value = line.partition(separator)
        yield key, value


def _text(path: str | Path) -> str:
    with suppress(OSError, ValueError):
        return Path(path).read_text(encoding="utf-8")
    return ""
