"""Fills local tensors from a checkpoint's slices in any format; reads only the bytes needed and checks them."""

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
    """A local tensor to fill with parts of a checkpoint's tensor.

    Attributes:
        local: Its elements are uninitialised.
        parts: Boxes of the full tensor and their positions in `local`; together they fill it.
    """

    entry: TensorEntry
    local: torch.Tensor
    parts: Sequence[LocalPart]


def add_fill(filler: Filler, entry: TensorEntry, local: torch.Tensor, parts: Sequence[LocalPart]) -> None:
    """Schedule reads that fill `local`.

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
    """Check that each file exists and is large enough for the scheduled reads. Reads no data.

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
    """Name a tensor in errors about files that `filler` reads."""
    names = filler.names()
    try:
        yield
    except (FileNotFoundError, IncompleteCheckpointError) as error:
        missing = next((path for path in sorted(names, key=len, reverse=True) if path in str(error)), None)
        if missing is None or names[missing] in str(error):
            raise
        raise IncompleteCheckpointError(f"tensor {names[missing]!r}, file {missing}: {error}") from error


def share_checks(wanted: Sequence[Sequence[SliceCheck]]) -> list[list[SliceCheck]]:
    """Assign each slice that ranks read only partly to one of them, the one with the least to check so far.

    So every slice is read completely, and checked, by one rank before any rank uses it. No rank checks more than its
    share, and each slice is read at most once more.
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
    """Fill the tensors now and return the bytes read. Partly read slices are checked completely.

    Raises:
        IntegrityError: A checksum does not match; names tensor and file.
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
    """Read full tensors to the CPU."""
    fills = whole_fills(catalog, store.url, names)
    if fills:
        fill(store, fills)
    return {name: item.local for name, item in zip(names, fills, strict=True)}


def whole_fills(catalog: Catalog, url: str, names: Iterable[str]) -> list[Fill]:
    """Return fills for full tensors on the CPU."""
    import torch

    fills = []
    for name in names:
        entry = catalog.tensors.get(name)
        if entry is None:
            raise IncompleteCheckpointError(f"{url}: objects.json refers to a tensor {name!r} that is missing.")
        local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        fills.append(Fill(entry, local, (LocalPart(Box.whole(entry.shape), (0,) * len(entry.shape)),)))
    return fills
