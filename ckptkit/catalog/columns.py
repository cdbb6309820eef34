"""Finds duplicates, overlaps and gaps in arrays of boxes ([n, ndim] offsets and sizes).

A million boxes take about a second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]
_PRIME = np.uint64(2**31 - 1)


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array's distinct values, ascending. `np.unique` would import numpy.ma, which is slow."""
    ordered = np.sort(values, axis=None)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def first_of_equal(table: Int64) -> Int64 | None:
    """Return the index of each distinct row's first occurrence, ascending, or None if all rows are distinct."""
    order = np.lexsort(table.T[::-1])  # stable: equal rows keep their order
    ranked = table[order]
    new = np.ones(len(order), bool)
    new[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    return None if new.all() else np.sort(order[new])


def distinct_boxes(offsets: Int64, sizes: Int64) -> Int64:
    """Return the indices of the non-empty boxes, ascending. Of several equal boxes, only the first is included."""
    rows = np.flatnonzero((sizes != 0).all(axis=1))
    if sizes.shape[1] == 0 or len(rows) < 2:
        return rows[:1]
    offsets = offsets[rows]
    if (offsets[1:, 0] > offsets[:-1, 0]).all():  # the common case: split along dimension 0, in order
        return rows
    first = first_of_equal(np.concatenate([offsets, sizes[rows]], axis=1))
    return rows if first is None else rows[first]


def products(values: npt.NDArray[Any], widths: Int64) -> npt.NDArray[Any]:
    """Return the product of the numbers in each row.

    `values` contains all rows, one after the other. `widths` contains the length of each row.
    """
    found, begins = np.ones(len(widths), values.dtype), np.cumsum(widths) - widths
    for width in np.flatnonzero(np.bincount(widths)).tolist():
        rows = np.flatnonzero(widths == width)
        found[rows] = np.prod(values[begins[rows][:, None] + np.arange(width)], axis=1)
    return found


def row_major(sizes: Int64) -> Int64:
    """Return the row-major strides, in elements, of tensors with these sizes. Both arrays are [n, ndim]."""
    strides = np.ones_like(sizes)
    for dim in range(sizes.shape[1] - 2, -1, -1):
        np.multiply(strides[:, dim + 1], sizes[:, dim + 1], out=strides[:, dim])
    return strides


def is_dense(sizes: Int64, strides: Int64) -> Bool:
    """Return, for each box, whether it is contiguous in row-major order, [n]. Sizes and strides are [n, ndim]."""
    dense = np.ones(len(sizes), bool)
    expected = np.ones(len(sizes), np.int64)
    for dim in range(sizes.shape[1] - 1, -1, -1):
        dense &= (sizes[:, dim] == 1) | (strides[:, dim] == expected)
        expected = expected * sizes[:, dim]
    return dense


def tiles_exactly(offsets: Int64, sizes: Int64, shape: Int64) -> bool:
    """Return whether non-empty boxes cover each element of `shape` exactly once. Takes linear time.

    Every element gets a random weight, and the weights of all boxes must add up to the weight of the whole shape. An
    element's weight is a product of one random factor per dimension, so a box's weight is a product, too. The
    factors change on each call, so no file can be made to provoke a wrong result. By the Schwartz-Zippel lemma, the
    probability of a wrong result is at most (d / 2**31) ** 2 in d dimensions.
    """
    low, high = offsets.astype(np.uint64), (offsets + sizes).astype(np.uint64)
    whole = shape.astype(np.uint64)[None]
    keys = np.frombuffer(os.urandom(16 * len(shape)), np.uint64).reshape(2, -1)
    return all(_weight(low, high, key) == _weight(np.zeros_like(whole), whole, key) for key in keys)


def _weight(low: UInt64, high: UInt64, key: UInt64) -> int:
    """Return the sum of the boxes' weights, modulo a prime below 2**31, so that products fit into 64 bits."""
    weights = np.ones(len(low), np.uint64)
    for dim in range(len(key)):
        factors = _hash(high[:, dim], key[dim : dim + 1]) + _PRIME - _hash(low[:, dim], key[dim : dim + 1])
        weights = weights * (factors % _PRIME) % _PRIME
    return int(weights.sum() % _PRIME)


def _hash(places: UInt64, key: UInt64) -> UInt64:
    z = places + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: UInt64 = (z ^ (z >> np.uint64(31))) % _PRIME
    return found


@dataclass(eq=False, repr=False, slots=True)
class BoxTable:
    """The boxes of several tensors as columns, in the order of the tensors.

    Attributes:
        ndims: [t] the number of dimensions of each tensor.
        stops: [t] the index after each tensor's last box.
        offsets, sizes: Offsets and sizes of each box, concatenated over all boxes.
        starts: [t] the index of each tensor's first box.
        owners: [n] the index of each box's tensor.
        elements: [n + 1] where the numbers of each box start in `offsets` and `sizes`, then the end of the last box.
    """

    ndims: Int64
    stops: Int64
    offsets: Int64
    sizes: Int64
    starts: Int64 = field(init=False)
    owners: Int64 = field(init=False)
    elements: Int64 = field(init=False)

    def __post_init__(self) -> None:
        counts = np.diff(self.stops, prepend=0)
        self.starts, self.owners = self.stops - counts, np.repeat(np.arange(len(counts)), counts)
        self.elements = np.concatenate([[0], np.cumsum(self.ndims[self.owners])])

    def of(self, tensor: int) -> tuple[slice, Int64, Int64]:
        """Return the index range of a tensor's boxes, and their offsets and sizes ([k, ndim])."""
        start, stop = self.starts.item(tensor), self.stops.item(tensor)
        numbers = slice(self.elements.item(start), self.elements.item(stop))
        shape = stop - start, self.ndims.item(tensor)
        return slice(start, stop), self.offsets[numbers].reshape(shape), self.sizes[numbers].reshape(shape)

    def box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the offsets and the sizes of one box."""
        numbers = slice(self.elements.item(row), self.elements.item(row + 1))
        return tuple(self.offsets[numbers].tolist()), tuple(self.sizes[numbers].tolist())

    def owner_of(self, number: int) -> int:
        """Return the index of the tensor to which an item of `offsets` or `sizes` belongs."""
        return self.owners.item(int(np.searchsorted(self.elements, number, side="right")) - 1)

    def take(self, keep: Bool) -> BoxTable:
        """Return a table of the same tensors with only the boxes that the mask `keep` selects."""
        wide, counts = (
            np.repeat(keep, self.ndims[self.owners]),
            np.bincount(self.owners[keep], minlength=len(self.stops)),
        )
        return BoxTable(self.ndims, np.cumsum(counts, dtype=np.int64), self.offsets[wide], self.sizes[wide])

    def extents(self, shapes: Int64) -> Int64:
        """Return, for each item of `sizes`, the size of the whole tensor in the same dimension.

        `shapes` contains the shapes of all tensors, one after the other.
        """
        firsts = np.cumsum(self.ndims) - self.ndims
        steps = firsts[self.owners] - self.elements[:-1]
        found: Int64 = shapes[np.arange(len(self.sizes)) + np.repeat(steps, self.ndims[self.owners])]
        return found

    def in_rows(self, shapes: Int64) -> tuple[Bool, Int64, Int64]:
        """Return, for each tensor, whether its boxes are consecutive blocks of rows that cover the tensor, [t].

        Also returns the first row and the number of rows of each box, [n]. A scalar counts as one row. `shapes`
        contains the shapes of all tensors, one after the other.
        """
        extents, owners, has_rows = self.extents(shapes), self.owners, self.ndims > 0
        cut = np.concatenate([[0], np.cumsum((self.offsets != 0) | (self.sizes != extents))])
        wide, begin = has_rows[owners], self.elements[:-1]
        fits = cut[begin + wide] == cut[self.elements[1:]]  # only the first dimension may be cut
        first, rows, height = np.zeros(len(owners), np.int64), np.ones(len(owners), np.int64), np.ones_like(owners)
        for column, values in ((first, self.offsets), (rows, self.sizes), (height, extents)):
            column[wide] = values[begin[wide]]
        # Don't compare `first + rows` with `height`: the sum could overflow.
        fits &= (first >= 0) & (rows >= 0) & (first <= height) & (rows <= height - first)
        ends, counts = first + rows, self.stops - self.starts
        expected = np.append(0, ends)[:-1]
        expected[self.starts[counts > 0]] = 0
        fits &= first == expected
        found = counts > 0
        found[found] = ends[self.stops[found] - 1] == height[self.stops[found] - 1]
        found[owners[~fits]] = False
        without = has_rows & (counts == 0)
        found[without] = shapes[(np.cumsum(self.ndims) - self.ndims)[without]] == 0
        return found, first, rows
