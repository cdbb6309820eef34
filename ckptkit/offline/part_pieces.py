"""What plain parts of a target take from the slices of their sources, as columns. Pure geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.catalog.targets import Part, Target
from ckptkit.catalog.tiles import pieces, source_layout
from ckptkit.offline.plan import Placement

__all__ = ["PartPieces", "in_source"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PartPieces:
    """What one plain part of a target takes from slices, for all boxes of a placement. One row a piece."""

    entry: TensorEntry
    rows: Int64  # of the placement
    slices: Int64
    starts: Int64
    nbytes: Int64
    targets: Int64
    dense: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, catalog: Catalog, placement: Placement, target: Target, part: Part) -> PartPieces:
        entry = catalog.tensors[part.source]
        if entry.shape and target.shape == part.source_box.sizes == entry.shape and len(placement) == 1:
            copied = cls._copied(entry, placement, target)
            if copied is not None:
                return copied
        rows, lo, hi = _shared(placement, part.target_box)
        offsets, sizes = in_source(part, lo, hi)
        found = pieces(entry, offsets, sizes)
        rows = rows[found.boxes]
        starts, strides = source_layout(entry, found)
        # The same pieces in the target: their first element, and the stride each source dimension has there.
        place = row_major(placement.sizes[rows])
        index, steps = _in_target(part, found.offsets, placement.offsets[rows], place)
        itemsize = dtype_of(target.dtype).itemsize
        return cls(
            entry,
            rows,
            found.rows,
            starts,
            found.numel() * dtype_of(entry.dtype).itemsize,
            placement.starts[rows] + index * itemsize,
            is_dense(found.sizes, strides) & is_dense(found.sizes, steps),
        )

    @classmethod
    def _copied(cls, entry: TensorEntry, placement: Placement, target: Target) -> PartPieces | None:
        """The same where one whole tensor becomes another, from slices of whole rows: what most are, and there may be
        many thousands of them. None where it is otherwise."""
        shape, slices = entry.shape, entry.slices
        if tuple(placement.sizes[0].tolist()) != shape or slices.strides or (slices.sizes[:, 1:] != shape[1:]).any():
            return None
        found = slices.distinct()
        inner = math.prod(shape[1:])
        count = len(found)
        return cls(
            entry,
            np.zeros(count, np.int64),
            found,
            slices.starts[found],
            slices.sizes[found, 0] * (inner * dtype_of(entry.dtype).itemsize),
            placement.starts[0] + slices.offsets[found, 0] * (inner * dtype_of(target.dtype).itemsize),
            np.ones(count, bool),
        )


def _shared(placement: Placement, box: Box) -> tuple[Int64, Int64, Int64]:
    """The rows whose boxes share something with `box`, and what they share, as [lo, hi) in the target."""
    lo = np.maximum(placement.offsets, np.array(box.offsets, np.int64))
    hi = np.minimum(placement.offsets + placement.sizes, np.array(box.stops, np.int64))
    rows = np.flatnonzero((hi > lo).all(axis=1))
    return rows, lo[rows], hi[rows]


def in_source(part: Part, lo: Int64, hi: Int64) -> tuple[Int64, Int64]:
    """Boxes of the target, inside a plain part, as boxes of its source."""
    n = len(lo)
    offsets = np.tile(np.array(part.source_box.offsets, np.int64), (n, 1))
    sizes = np.tile(np.array(part.source_box.sizes, np.int64), (n, 1))
    for dim, source_dim in enumerate(part.source_dims()):
        if source_dim is not None:
            offsets[:, source_dim] += lo[:, dim] - part.target_box.offsets[dim]
            sizes[:, source_dim] = hi[:, dim] - lo[:, dim]
    return offsets, sizes


def _in_target(part: Part, offsets: Int64, origin: Int64, strides: Int64) -> tuple[Int64, Int64]:
    """Where source offsets fall in target boxes that start at `origin` with `strides`: index, stride by source dim."""
    steps = np.zeros_like(offsets)
    index = ((np.array(part.target_box.offsets, np.int64) - origin) * strides).sum(axis=1)
    for dim, source_dim in enumerate(part.source_dims()):
        if source_dim is not None:
            index += (offsets[:, source_dim] - part.source_box.offsets[source_dim]) * strides[:, dim]
            steps[:, source_dim] = strides[:, dim]
    return index, steps
