"""Fills local tensors from a checkpoint's slices, in any format. Reads only the necessary bytes, and checks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.errors import IncompleteCheckpointError
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.digests import SliceCheck
    from ckptkit.formats.dcp.fill import Filler


def add_parts(filler: Filler, entry: TensorEntry, local: torch.Tensor, parts: Sequence[LocalPart]) -> None:
    """Schedule reads that fill `local`, which consists of `parts` of the full tensor.

    Raises:
        IncompleteCheckpointError: The slices do not contain all of the elements.
    """
    from ckptkit.formats.dcp.fill import add_box, part_of

    for part in parts:
        if part.box.numel:  # the shape of an empty local tensor need not match
            add_box(filler, entry, part.box, part_of(local, part.local_offsets, part.box.sizes))


def add_whole(filler: Filler, catalog: Catalog, name: str) -> torch.Tensor:
    """Schedule reads of a full tensor into new CPU memory, and return the tensor."""
    import torch

    from ckptkit.formats.dcp.fill import add_box

    entry = catalog.tensors.get(name)
    if entry is None:
        raise IncompleteCheckpointError(
            f"{filler.store.url}: objects.json refers to a tensor {name!r} that is missing."
        )
    local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    add_box(filler, entry, Box.whole(entry.shape), local)
    return local


def check_sizes(filler: Filler) -> None:
    """Check that each file exists and is large enough for the scheduled reads. Reads no data."""
    with naming(filler):
        for path, (stop, _) in filler.last().items():
            found = filler.store.info(path)
            if found is None:
                raise FileNotFoundError(f"{path} is missing.")
            if found.size < stop:
                raise IncompleteCheckpointError(
                    f"{path} is truncated: it has {found.size} bytes, expected at least {stop}."
                )


@contextmanager
def naming(filler: Filler) -> Iterator[None]:
    """Add the tensor's name to errors about the files that `filler` reads."""
    names = {path: name for path, (_, name) in filler.last().items()}
    try:
        yield
    except (FileNotFoundError, IncompleteCheckpointError) as error:
        missing = next((path for path in sorted(names, key=len, reverse=True) if path in str(error)), None)
        if missing is None or names[missing] in str(error):
            raise
        raise IncompleteCheckpointError(f"tensor {names[missing]!r}, file {missing}: {error}") from error


def share_checks(wanted: Sequence[Sequence[SliceCheck]]) -> list[list[SliceCheck]]:
    """Choose one rank to check each slice that ranks read only in part: the reader with the fewest bytes so far.

    That rank reads the whole slice and checks it before any rank uses it. Each slice is read at most one extra time.
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


def fill(filler: Filler) -> int:
    """Run the scheduled reads, and check every slice they touch. Return the number of bytes read.

    To check a slice that was read only in part, the whole slice is read again.

    Raises:
        IntegrityError: A checksum does not match; names tensor and file.
        IncompleteCheckpointError: A file is missing or too short.
    """
    from ckptkit.formats.dcp.digests import check_slices

    checks = filler.unchecked()
    with naming(filler):
        filler.run()
        return filler.nbytes + check_slices(filler.store, checks, filler.workers)


def read_whole(catalog: Catalog, store: Store, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read full tensors into CPU memory, and return them by name."""
    from ckptkit.formats.dcp.fill import Filler

    filler = Filler(store)
    found = {name: add_whole(filler, catalog, name) for name in names}
    fill(filler)
    return found
