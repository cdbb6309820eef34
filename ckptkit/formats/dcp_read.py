"""Loading a sharded state without torch's planners: each rank reads what its own tensors need. No communication."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.errors import CheckpointMismatchError, IncompleteCheckpointError
from ckptkit.formats.dcp_digests import check_bytes
from ckptkit.formats.dcp_exact import ExactReads
from ckptkit.formats.dcp_fill import Filler, Verify
from ckptkit.formats.dcp_objects import check_fits, filled_by, load_objects
from ckptkit.formats.dcp_plan import local_boxes
from ckptkit.formats.dcp_same import Flattened
from ckptkit.storage.store import Store

__all__ = ["ReadPlan", "ReadReport", "Verify", "add_box", "plan_read", "read_sharded"]

_LISTED = 20
_FEW = 16  # slices, up to which a loop is cheaper than numpy
Report = Callable[[str, float, int], None]


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a load did on this rank.

    Attributes:
        missing: Keys of the state that the checkpoint does not have; left as they were.
        unexpected: Keys of the checkpoint that the state does not have.
        nbytes: Bytes of tensor data read.
        seconds: All of it.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a load will do on this rank. Nothing was read or touched yet.

    Attributes:
        objects: By key, where in the state its value goes, and what is there.
    """

    catalog: Catalog
    store: Store
    state_dict: dict[str, Any]
    filler: Filler
    objects: Mapping[str, tuple[tuple[str | int, ...], Any]]
    missing: list[str]
    unexpected: list[str]
    seconds: float

    def run(self, report: Report | None = None) -> ReadReport:
        """Fill the tensors and replace the objects. Raises as `read_sharded` does."""
        started = time.perf_counter()
        values = load_objects(self.store, {name: self.catalog.objects[name] for name in self.objects})
        for name, (_, current) in self.objects.items():
            check_fits(current, values[name], name)
        loaded = time.perf_counter()
        self.filler.run()
        finished = time.perf_counter()
        for name, (path, current) in self.objects.items():
            set_element(self.state_dict, path, filled_by(current, values[name]))
        if report is not None:
            report("plan", self.seconds, 0)
            report("objects", loaded - started, 0)
            report("read", finished - loaded, self.filler.nbytes)
        return ReadReport(self.missing, self.unexpected, self.filler.nbytes, self.seconds + finished - started)


def read_sharded(
    catalog: Catalog,
    store: Store,
    state_dict: dict[str, Any],
    *,
    verify: Verify = Verify.READ,
    cast: bool = False,
    strict: bool = True,
    workers: int = 0,
    report: Report | None = None,
) -> ReadReport:
    """Fill the tensors of a nested or flat state in place, and replace its objects.

    Each rank reads only the bytes its own tensors need, whatever the sharding that wrote them.

    Args:
        verify: Which slices are checked against their digests.
        cast: Convert where a dtype differs; else that is a mismatch.
        strict: A key the checkpoint lacks is an error; else it is left as it is and returned.
        report: Gets (phase, seconds, bytes).

    Raises:
        CheckpointMismatchError: Keys are missing, or shapes, dtypes or kinds differ: all of them are listed, and
            nothing was touched.
        IncompleteCheckpointError: A part of a tensor is not in the checkpoint.
        IntegrityError: Bytes differ from their digest.
        UnsafePickleError: Objects ask for classes that the caller has not allowed: nothing was touched.
    """
    plan = plan_read(catalog, store, state_dict, verify=verify, cast=cast, strict=strict, workers=workers)
    return plan.run(report)


def plan_read(
    catalog: Catalog,
    store: Store,
    state_dict: dict[str, Any],
    *,
    verify: Verify = Verify.READ,
    cast: bool = False,
    strict: bool = True,
    workers: int = 0,
) -> ReadPlan:
    """Return what `read_sharded` will do. Raises its CheckpointMismatchError and IncompleteCheckpointError."""
    started = time.perf_counter()
    flattened = Flattened.of(state_dict)
    if flattened is None:
        flat, by_name = flatten_state_dict(state_dict)
        flattened = Flattened(flat, list(by_name.values()))
    flat, paths = flattened.values, dict(zip(flattened.values, flattened.paths, strict=True))
    exact = ExactReads.of(catalog, store, _Boxes())
    rest = flat if exact is None else exact.take(flat)
    found, missing = _matched(catalog, rest, cast=cast, strict=strict)
    filler = Filler(store, verify=verify, workers=workers, cast=cast)
    for name, entry in found.items():
        if entry is not None:
            for box, target in local_boxes(flat[name]):
                add_box(filler, entry, box, target)
    for nbytes, job in () if exact is None else exact.jobs(store, None if verify is Verify.OFF else check_bytes):
        filler.add_job(nbytes, job)
    objects = {name: (paths[name], flat[name]) for name, entry in found.items() if entry is None}
    unexpected = [name for name in (*catalog.tensors, *catalog.objects) if name not in flat]
    seconds = time.perf_counter() - started
    return ReadPlan(catalog, store, state_dict, filler, objects, missing, unexpected, seconds)


class _Boxes:
    """(offsets, sizes) of what this rank holds of a DTensor, worked out once for all that are cut alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]] | None] = {}

    def __call__(self, value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        spec = value._spec
        key = (value.shape, id(spec.mesh), spec.placements)
        if key not in self._known:
            boxes = local_boxes(value)
            self._known[key] = (boxes[0][0].offsets, boxes[0][0].sizes) if boxes else None
        return self._known[key]


def _matched(
    catalog: Catalog, flat: Mapping[str, Any], *, cast: bool, strict: bool
) -> tuple[dict[str, TensorEntry | None], list[str]]:
    """Return (keys to load, with their tensors; keys that are missing); raise one error with all that does not fit."""
    found: dict[str, TensorEntry | None] = {}
    missing, wrong = [], []
    for name, value in flat.items():
        tensor, entry = isinstance(value, (torch.Tensor, ShardedTensor)), catalog.tensors.get(name)
        if entry is None and name not in catalog.objects:
            missing.append(name)
        elif entry is None:
            found[name] = None  # a tensor among the objects is one that torch.save framed whole
        elif not tensor:
            wrong.append(f"{name}: the checkpoint has a tensor, the state has {type(value).__name__}")
        else:
            problem = _difference(entry, value, cast)
            if problem:
                wrong.append(f"{name}: {problem}")
            found[name] = entry
    if wrong or (missing and strict):
        lines = wrong + [f"{name}: not in the checkpoint" for name in (missing if strict else [])]
        listed = lines[:_LISTED] + ([f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else [])
        raise CheckpointMismatchError(
            f"{len(lines)} keys of the state do not fit the checkpoint; nothing was loaded:\n  " + "\n  ".join(listed)
        )
    return found, missing


def _difference(entry: TensorEntry, value: Any, cast: bool) -> str | None:
    shape = tuple(value.size())
    if shape != entry.shape:
        return f"the checkpoint has shape {list(entry.shape)}, the state has {list(shape)}"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != entry.dtype and not cast:
        return f"the checkpoint has {entry.dtype}, the state has {dtype} (cast=True converts)"
    return None


def add_box(filler: Filler, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
    """Fill `target`, which is this box of the tensor, from the slices that hold it, each element once.

    Raises:
        IncompleteCheckpointError: The slices do not hold all of it.
    """
    if not target.numel():
        return
    seen: set[tuple[int, ...]] = set()
    covered = 0
    for row, offset, size in _overlapping(entry, box):
        shared = Box(offset, size).intersect(box)
        if shared is None or (*shared.offsets, *shared.sizes) in seen:
            continue  # beside it, or a replica
        seen.add((*shared.offsets, *shared.sizes))
        covered += shared.numel
        part = target
        for dim, (start, length) in enumerate(zip(shared.relative_to(box).offsets, shared.sizes, strict=True)):
            if length != part.shape[dim]:
                part = part.narrow(dim, start, length)
        filler.add(entry, row, tuple(a - b for a, b in zip(shared.offsets, offset, strict=True)), part)
    if covered != target.numel():
        raise IncompleteCheckpointError(
            f"tensor {entry.name!r}: the checkpoint holds {covered} of the {target.numel()} elements at "
            f"{list(box.offsets)}, sizes {list(box.sizes)}."
        )


def _overlapping(entry: TensorEntry, box: Box) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (row, offsets, sizes) of the slices that may share elements with a box."""
    offsets, sizes = entry.slices.offsets, entry.slices.sizes
    rows = range(len(offsets))
    if len(offsets) > _FEW:
        low = np.maximum(offsets, box.offsets)
        high = np.minimum(offsets + sizes, box.stops)
        found = np.flatnonzero((high > low).all(axis=1))
        rows, offsets, sizes = found.tolist(), offsets[found], sizes[found]
    for row, offset, size in zip(rows, offsets.tolist(), sizes.tolist(), strict=True):
        yield row, tuple(offset), tuple(size)
