"""Whole tensors that become whole tensors, from slices of whole rows, taken apart by the thousand: what most are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.catalog.row_cuts import row_cuts
from ckptkit.catalog.targets import Target
from ckptkit.offline.plan import Placement

__all__ = ["Copies", "whole_copies"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Runs, one a slice that is not empty, in the order of the tensors.

    Attributes:
        placements, entries: [t] each written whole, in one place, as it is or cast; `entries` is what it is read from.
        owners: [n] the tensor of each run.
        rows: [n] its slice, counted over the slices of all these tensors, end to end.
        starts, nbytes: [n] what is read.
        files, targets: [n] where it is written.
    """

    placements: Sequence[Placement]
    entries: Sequence[TensorEntry]
    owners: Int64
    rows: Int64
    starts: Int64
    nbytes: Int64
    files: Int64
    targets: Int64


def whole_copies(catalog: Catalog, placements: Sequence[Placement]) -> tuple[Copies | None, list[Placement]]:
    """Return the runs of all placements that are such copies, and the placements that are not."""
    entries = [_copied(catalog, placement) for placement in placements]
    simple = [entry for entry in entries if entry is not None]
    if not simple:
        return None, list(placements)
    cuts = row_cuts(simple)
    verdicts = iter(cuts.cut.tolist())
    taken = [entry is not None and next(verdicts) for entry in entries]
    chosen = [placement for placement, take in zip(placements, taken, strict=True) if take]
    rest = [placement for placement, take in zip(placements, taken, strict=True) if not take]
    if not chosen:
        return None, rest
    kept = np.flatnonzero(cuts.cut)
    members = [simple[index] for index in kept.tolist()]
    counts = np.diff(cuts.bounds)
    inside = np.repeat(cuts.cut, counts)
    offsets, sizes = cuts.offsets[inside], cuts.sizes[inside]
    owners = np.repeat(np.arange(len(kept)), counts[kept])
    read, written = (
        np.array([math.prod(item.shape[1:]) * dtype_of(item.dtype).itemsize for item in items], np.int64)
        for items in (members, [placement.tensor for placement in chosen])
    )
    starts = np.concatenate([entry.slices.starts for entry in members])
    nbytes = sizes * read[owners]
    rows = np.flatnonzero(nbytes)
    owners = owners[rows]
    places = np.concatenate([placement.starts for placement in chosen])
    files = np.concatenate([placement.files for placement in chosen]).astype(np.int64)
    targets = places[owners] + offsets[rows] * written[owners]
    return Copies(chosen, members, owners, rows, starts[rows], nbytes[rows], files[owners], targets), rest


def _copied(catalog: Catalog, placement: Placement) -> TensorEntry | None:
    """What a placement copies, where it is a whole tensor that becomes a whole one, in one place."""
    tensor = placement.tensor
    if not isinstance(tensor, Target) or len(tensor.parts) != 1 or len(placement.starts) != 1:
        return None
    part = tensor.parts[0]
    entry = catalog.tensors[part.source]
    shape = entry.shape
    if not part.is_plain or not tensor.shape == part.source_box.sizes == shape:
        return None
    if tuple(placement.sizes[0].tolist()) != shape or entry.slices.strides or entry.slices.codecs:
        return None
    return entry
