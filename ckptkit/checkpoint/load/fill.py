"""Local tensors filled from the slices of a checkpoint, of whatever format: only the bytes needed, each checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.errors import IncompleteCheckpointError
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.fill import Filler, SliceCheck

__all__ = ["Fill", "add_fill", "check_sizes", "fill", "naming", "read_whole", "share_checks", "whole_fills"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor to be filled with parts of a checkpoint's tensor.

    Attributes:
        local: Its elements are uninitialised.
        parts: Which boxes of the whole tensor lie where in `local`; together they fill it.
    """

    entry: TensorEntry
    local: torch.Tensor
    parts: Sequence[LocalPart]


def add_fill(filler: Filler, entry: TensorEntry, local: torch.Tensor, parts: Sequence[LocalPart]) -> None:
    """Have `local` filled.

    Raises:
        IncompleteCheckpointError: The slices do not hold every element that is wanted.
    """
    from ckptkit.formats.dcp.fill import add_box

    for part in parts:
        target = local
        if len(parts) > 1:
            for dim, (start, length) in enumerate(zip(part.local_offsets, part.box.sizes, strict=True)):
                target = target.narrow(dim, start, length)
        add_box(filler, entry, part.box, target)


def check_sizes(filler: Filler) -> None:
    """Look whether each file is there and large enough for what is to be read from it. Nothing is read.

    Raises:
        IncompleteCheckpointError: A file is missing or too short; names tensor and file.
    """
    with naming(filler):
        for path, stop in filler.ends().items():
            found = filler.store.info(path)
            if found is None:
                raise FileNotFoundError(f"{path} is missing.")
            if found.size < stop:
                raise IncompleteCheckpointError(
                    f"{path} is truncated: it has {found.size} bytes, expected at least {stop}."
                )


@contextmanager
def naming(filler: Filler) -> Iterator[None]:
    """Name a tensor in errors about the files that `filler` is to read."""
    names = filler.names()
    try:
        yield
    except (FileNotFoundError, IncompleteCheckpointError) as error:
        missing = next((path for path in sorted(names, key=len, reverse=True) if path in str(error)), None)
        if missing is None or names[missing] in str(error):
            raise
        raise IncompleteCheckpointError(f"tensor {names[missing]!r}, file {missing}: {error}") from error


def share_checks(wanted: Sequence[Sequence[SliceCheck]]) -> list[list[SliceCheck]]:
    """Give each slice that ranks read only parts of to one of them, the one with the least to check so far.

    So every slice is read whole by somebody before any rank takes what it has read: no rank checks more than its
    share, and together they read the slices once more at most.
    """
    readers: dict[tuple[str, int], list[int]] = {}
    slices: dict[tuple[str, int], SliceCheck] = {}
    for rank, items in enumerate(wanted):
        for item in items:
            slices[item.path, item.start] = item
            readers.setdefault((item.path, item.start), []).append(rank)
    shares: list[list[SliceCheck]] = [[] for _ in wanted]
    load = [0] * len(wanted)
    for key, item in sorted(slices.items(), key=lambda pair: (-pair[1].nbytes, pair[0])):
        rank = min(readers[key], key=load.__getitem__)
        load[rank] += item.nbytes
        shares[rank].append(item)
    return shares


def fill(store: Store, fills: Iterable[Fill]) -> int:
    """Fill the tensors now and return the bytes read; slices that are read in part are checked whole.

    Raises:
        IntegrityError: Bytes are not those that were written; names tensor and file.
        IncompleteCheckpointError: The slices do not hold every element that is wanted, or a file is missing.
    """
    from ckptkit.formats.dcp.fill import Filler

    filler = Filler(store)
    for item in fills:
        add_fill(filler, item.entry, item.local, item.parts)
    checks = filler.unchecked()
    with naming(filler):
        filler.run()
        return filler.nbytes + filler.check(checks)


def read_whole(catalog: Catalog, store: Store, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU, read now."""
    fills = whole_fills(catalog, store.url, names)
    if fills:
        fill(store, fills)
    return {name: item.local for name, item in zip(names, fills, strict=True)}


def whole_fills(catalog: Catalog, url: str, names: Iterable[str]) -> list[Fill]:
    """Return what reads whole tensors into new ones on the CPU."""
    import torch

    fills = []
    for name in names:
        entry = catalog.tensors.get(name)
        if entry is None:
            raise IncompleteCheckpointError(f"{url}: objects.json refers to a tensor {name!r} that is missing.")
        local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        fills.append(Fill(entry, local, (LocalPart(Box.whole(entry.shape), (0,) * len(entry.shape)),)))
    return fills
