"""Finds the slices that contain given boxes (regions) of a tensor, and the positions of their elements in the files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import BoxTable, distinct_boxes, row_major
from ckptkit.catalog.entry import SliceArray, TensorEntry

Int64 = npt.NDArray[np.int64]

_MAX_PAIRS = 1 << 20  # how many (box, slice) pairs are compared at once


@dataclass(frozen=True, slots=True)
class Pieces:
    """The intersections of requested boxes with a tensor's slices: one row per intersection, in the order of the boxes.

    Attributes:
        boxes: [n] index of the requested box.
        rows: [n] index of the slice in the tensor's `SliceArray`.
        offsets, sizes: [n, ndim] the intersection, in elements of the whole tensor.
        starts: [n] byte offset of the intersection's first element in the slice's file, or in the decoded record if
            there is a codec.
        strides: [n, ndim] the strides of the intersection in the file or record, in elements.
    """

    boxes: Int64
    rows: Int64
    offsets: Int64
    sizes: Int64
    starts: Int64
    strides: Int64

    def __len__(self) -> int:
        return len(self.rows)

    def numel(self) -> Int64:
        """Return the number of elements in each intersection, [n]."""
        result: Int64 = np.prod(self.sizes, axis=1, dtype=np.int64)
        return result


def pieces(slices: SliceArray, offsets: Int64, sizes: Int64, itemsize: int | Int64) -> Pieces:
    """Return the intersections of boxes with a tensor's slices. Each element of a box is in exactly one intersection.

    Of several replicas, only the first is used. The slices must cover the tensor without partial overlap
    (`TensorEntry.check_coverage`). The boxes may overlap or be empty.

    One call can search several tensors. Slices and boxes then need one more dimension: its offset is the index of the
    tensor, and its size is 1.

    Args:
        slices: The tensor's slices.
        offsets: The offsets of the boxes, [m, ndim].
        sizes: The sizes of the boxes, [m, ndim].
        itemsize: Bytes per element. For several tensors: an array [m] with one value per box.
    """
    rows = distinct_boxes(slices.offsets, slices.sizes)
    if not slices.sizes.shape[1]:
        count = len(offsets) if len(rows) else 0
        boxes, found = np.arange(count), np.full(count, rows[0] if count else 0, np.int64)
        lo, extent = offsets[:count], sizes[:count]
    else:
        starts, ends = slices.offsets[rows], offsets + sizes
        stops = starts + slices.sizes[rows]
        parts = []
        for boxes, candidates in _candidates(starts, stops, offsets, ends):
            lo = np.maximum(offsets[boxes], starts[candidates])
            extent = np.minimum(ends[boxes], stops[candidates]) - lo
            keep = (extent > 0).all(axis=1)
            parts.append((boxes[keep], rows[candidates[keep]], lo[keep], extent[keep]))
        nothing = np.zeros(0, np.int64)
        parts = parts or [(nothing, nothing, offsets[:0], sizes[:0])]
        boxes, found, lo, extent = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
    strides = row_major(slices.sizes[found])
    if slices.strides:
        explicit = np.isin(found, np.fromiter(slices.strides, np.int64))
        for i in np.flatnonzero(explicit).tolist():
            strides[i] = slices.strides[int(found[i])]
    index = ((lo - slices.offsets[found]) * strides).sum(axis=1)
    scale = itemsize if isinstance(itemsize, int) else itemsize[boxes]
    return Pieces(boxes, found, lo, extent, slices.starts[found] + index * scale, strides)


def _candidates(starts: Int64, stops: Int64, lo: Int64, hi: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Yield (box indices, slice indices): arrays of equal length that list pairs of a box and a slice.

    Every overlapping pair is listed, and possibly pairs that do not overlap. The pairs are in the order of the boxes.
    """
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
    """Find the dimension that splits the slices into the most groups. None if no dimension qualifies.

    A dimension qualifies if the intervals of any two slices along this dimension are equal or disjoint. Slices with the
    same interval form a group.

    Returns (dim, order, first, begins, ends). `order` sorts the slices along the dimension. `first` contains the index
    in `order` at which each group starts, then the number of slices. `begins` and `ends` are the groups' intervals.
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


# Most tensors are split along dimension 0, in order. The code below checks thousands of such tensors at once.


Bool = npt.NDArray[np.bool_]


class Boxes(Protocol):
    """Boxes of one tensor: its slices in a checkpoint, or the boxes that a plan writes.

    `offsets` and `sizes` are [n, ndim], in elements. `is_all_of` returns True if a single box is known to cover a
    tensor of the given shape. False may also mean "unknown", as in `SliceArray.is_all_of`.
    """

    @property
    def offsets(self) -> Int64: ...
    @property
    def sizes(self) -> Int64: ...
    def __len__(self) -> int: ...
    def is_all_of(self, shape: tuple[int, ...]) -> bool: ...


@dataclass(frozen=True, slots=True)
class RowCuts:
    """The boxes of several tensors, reduced to their intervals along dimension 0.

    Attributes:
        cut: [t] whether the boxes of each tensor are consecutive blocks of rows that cover the tensor. A scalar counts
            as one row.
        bounds: [t + 1] the boxes of tensor i are at [bounds[i], bounds[i + 1]) in `offsets` and `sizes`.
        offsets, sizes: [n] the interval of each box along dimension 0. Undefined where `cut` is False.
    """

    cut: Bool
    bounds: Int64
    offsets: Int64
    sizes: Int64


def check_coverage(entries: Sequence[TensorEntry]) -> None:
    """Do the check of `TensorEntry.check_coverage` for all entries. Fast even for thousands of entries."""
    for entry in not_in_rows(entries):
        entry.check_coverage()


def not_in_rows(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors whose slices are not consecutive blocks of rows that cover the tensor."""
    cuts = row_cuts([entry.shape for entry in entries], [entry.slices for entry in entries])
    return [entries[index] for index in np.flatnonzero(~cuts.cut).tolist()]


def row_cuts(shapes: Sequence[tuple[int, ...]], boxes: Sequence[Boxes]) -> RowCuts:
    """Return the `RowCuts` of tensors with these shapes and boxes."""
    counts = np.fromiter(map(len, boxes), np.int64, len(boxes))
    whole = np.array([item.is_all_of(shape) for item, shape in zip(boxes, shapes, strict=True)], bool)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    offsets, sizes = np.zeros(int(bounds[-1]), np.int64), np.ones(int(bounds[-1]), np.int64)
    for index in np.flatnonzero(whole).tolist():
        sizes[bounds[index]] = shapes[index][0] if shapes[index] else 1
    # If a size exceeds 64 bits, the tensor does not count as cut.
    rest = np.array([i for i in np.flatnonzero(~whole).tolist() if max(shapes[i], default=0) >> 63 == 0], np.int64)
    members, nothing = [boxes[i] for i in rest.tolist()], np.zeros(0, np.int64)
    table = BoxTable(
        np.array([len(shapes[i]) for i in rest.tolist()], np.int64),
        np.cumsum(counts[rest]),
        np.concatenate([nothing, *(item.offsets.reshape(-1) for item in members)]),
        np.concatenate([nothing, *(item.sizes.reshape(-1) for item in members)]),
    )
    flat = np.fromiter(chain.from_iterable(shapes[i] for i in rest.tolist()), np.int64)
    cut, examined = whole.copy(), np.zeros(len(boxes), bool)
    examined[rest] = True
    rows = np.repeat(examined, counts)
    cut[rest], offsets[rows], sizes[rows] = table.in_rows(flat)
    return RowCuts(cut, bounds, offsets, sizes)
