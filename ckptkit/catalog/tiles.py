"""Which slices hold which boxes of a tensor, and how the parts lie in the file: columns, never an object a slice.

Two steps: `pieces` finds the parts (geometry in elements), `source_layout` says where they lie (bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import TensorEntry

__all__ = ["Pieces", "pieces", "source_layout"]

Int64 = npt.NDArray[np.int64]

_MAX_PAIRS = 1 << 20  # (box, slice) pairs that are compared at once


@dataclass(frozen=True, slots=True)
class Pieces:
    """The parts that boxes and slices of a tensor share. One row a part, in the order of the boxes.

    Attributes:
        boxes: [n] row of the requested box.
        rows: [n] row of the slice.
        offsets, sizes: [n, ndim] the part, in elements of the whole tensor.
    """

    boxes: Int64
    rows: Int64
    offsets: Int64
    sizes: Int64

    def __len__(self) -> int:
        return len(self.rows)

    def numel(self) -> Int64:
        """Return the elements of each part, [n]."""
        result: Int64 = np.prod(self.sizes, axis=1, dtype=np.int64)
        return result


def pieces(entry: TensorEntry, offsets: Int64, sizes: Int64) -> Pieces:
    """Return the parts of slices that fill these boxes, [m, ndim] each, every element of a box once.

    Of replicas the first is taken. The slices must cover the tensor without partial overlap
    (`TensorEntry.check_coverage`); boxes may overlap or be empty.
    """
    slices = entry.slices
    rows = slices.distinct()
    if not entry.shape:
        found = np.zeros(len(offsets) if len(rows) else 0, np.int64)
        return Pieces(np.arange(len(found)), found + (rows[0] if len(rows) else 0), offsets[: len(found)], sizes)
    starts, stops = slices.offsets[rows], slices.offsets[rows] + slices.sizes[rows]
    ends = offsets + sizes
    parts = []
    for boxes, candidates in _candidates(starts, stops, offsets, ends):
        lo = np.maximum(offsets[boxes], starts[candidates])
        extent = np.minimum(ends[boxes], stops[candidates]) - lo
        keep = (extent > 0).all(axis=1)
        parts.append((boxes[keep], rows[candidates[keep]], lo[keep], extent[keep]))
    if len(parts) == 1:
        return Pieces(*parts[0])
    ndim = len(entry.shape)
    empty = np.zeros(0, np.int64)
    columns = (
        zip(*parts, strict=True) if parts else ([empty], [empty], [empty.reshape(0, ndim)], [empty.reshape(0, ndim)])
    )
    return Pieces(*(np.concatenate(column) for column in columns))


def _candidates(starts: Int64, stops: Int64, lo: Int64, hi: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Yield (box, slice) index pairs, box by box, among which are all that overlap."""
    n, m = len(starts), len(lo)
    if n * m > 4096:
        split = _splitting_dim(starts, stops)
        if split is not None:
            yield _by_intervals(*split, lo[:, split[0]], hi[:, split[0]])
            return
    step = max(1, _MAX_PAIRS // max(1, n))
    for first in range(0, m, step):
        some = np.arange(first, min(first + step, m))
        yield np.repeat(some, n), np.tile(np.arange(n), len(some))


def _splitting_dim(starts: Int64, stops: Int64) -> tuple[int, Int64, Int64, Int64, Int64] | None:
    """The dimension that tells most slices apart by intervals that are disjoint or equal.

    Returns (dim, order, first, begins, ends): slices sorted by it, where each interval's group begins in
    that order (and the total), and the intervals.
    """
    best = None
    for dim in range(starts.shape[1]):
        order = np.lexsort((stops[:, dim], starts[:, dim]))
        s, e = starts[order, dim], stops[order, dim]
        new = np.concatenate([[True], (s[1:] != s[:-1]) | (e[1:] != e[:-1])])
        first = np.flatnonzero(new)
        begins, ends = s[first], e[first]
        if (begins[1:] >= ends[:-1]).all() and (best is None or len(first) > len(best[3])):
            best = (dim, order, np.append(first, len(order)), begins, ends)
    return best


def _by_intervals(
    _dim: int, order: Int64, first: Int64, begins: Int64, ends: Int64, lo: Int64, hi: Int64
) -> tuple[Int64, Int64]:
    a = first[np.searchsorted(ends, lo, side="right")]
    b = first[np.searchsorted(begins, hi, side="left")]
    counts = np.maximum(b - a, 0)
    boxes = np.repeat(np.arange(len(lo)), counts)
    within = np.arange(len(boxes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return boxes, order[np.repeat(a, counts) + within]


def source_layout(entry: TensorEntry, parts: Pieces) -> tuple[Int64, Int64]:
    """Return where parts lie: the byte of the first element, [n], and the strides in elements, [n, ndim].

    Bytes count in the slice's file, or in its decoded record where the slice has a codec.
    """
    slices = entry.slices
    strides = row_major(slices.sizes[parts.rows])
    if slices.strides:
        explicit = np.isin(parts.rows, np.fromiter(slices.strides, np.int64))
        for i in np.flatnonzero(explicit).tolist():
            strides[i] = slices.strides[int(parts.rows[i])]
    index = ((parts.offsets - slices.offsets[parts.rows]) * strides).sum(axis=1)
    return slices.starts[parts.rows] + index * dtype_of(entry.dtype).itemsize, strides
