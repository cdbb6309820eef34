"""Tensors whose slices are their rows, in order: most are, and many thousands of them are told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import TensorEntry

__all__ = ["RowCuts", "check_coverage", "row_cuts"]

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowCuts:
    """What is known of some tensors' slices.

    Attributes:
        cut: [t] whether the slices of each are its rows, in order, each once. A scalar has one row.
        bounds: [t + 1] the rows [bounds[i], bounds[i + 1]) of the other columns are the slices of tensor i.
        offsets, sizes: [n] in the first dimension; of tensors that are not cut they mean nothing.
    """

    cut: Bool
    bounds: Int64
    offsets: Int64
    sizes: Int64


def check_coverage(entries: Sequence[TensorEntry]) -> None:
    """Check each entry as `TensorEntry.check_coverage` does, and raise what it raises."""
    for index in np.flatnonzero(~row_cuts(entries).cut).tolist():
        entries[index].check_coverage()


def row_cuts(entries: Sequence[TensorEntry]) -> RowCuts:
    """Tell which tensors are cut in rows, from columns of all of them."""
    counts = np.fromiter((len(entry.slices) for entry in entries), np.int64, len(entries))
    ndims = np.fromiter((len(entry.shape) for entry in entries), np.int64, len(entries))
    bounds = np.concatenate([[0], np.cumsum(counts)])
    offsets, sizes = np.zeros(int(bounds[-1]), np.int64), np.ones(int(bounds[-1]), np.int64)
    cut = (ndims == 0) & (counts == 1)
    for ndim in sorted(set(ndims.tolist()) - {0}):
        chosen = np.flatnonzero(ndims == ndim)
        members = [entries[index] for index in chosen.tolist()]
        try:
            shapes = np.array([entry.shape for entry in members], np.int64)
        except OverflowError:
            continue  # a hostile shape: one by one
        owners = np.repeat(np.arange(len(chosen)), counts[chosen])
        if len(owners):
            low = np.concatenate([entry.slices.offsets for entry in members])
            size = np.concatenate([entry.slices.sizes for entry in members])
        else:
            low = size = np.zeros((0, ndim), np.int64)
        cut[chosen] = _are_rows(owners, low, size, shapes)
        rows = np.repeat(bounds[chosen] - _before(counts[chosen]), counts[chosen]) + np.arange(len(owners))
        offsets[rows], sizes[rows] = low[:, 0], size[:, 0]
    return RowCuts(cut, bounds, offsets, sizes)


def _are_rows(owners: Int64, low: Int64, size: Int64, shapes: Int64) -> Bool:
    """Tell which tensors, of one number of dimensions, are cut in rows."""
    shape = shapes[owners]
    fits = ((low[:, 1:] == 0) & (size[:, 1:] == shape[:, 1:])).all(axis=1)
    begin, height = low[:, 0], shape[:, 0]
    # In this order nothing overflows: every end that is compared is of rows within the shape.
    fits &= (begin >= 0) & (size[:, 0] >= 0) & (begin <= height) & (size[:, 0] <= height - begin)
    ends = begin + size[:, 0]
    first = np.ones(len(owners), bool)
    first[1:] = owners[1:] != owners[:-1]
    fits &= begin == np.where(first, 0, np.append(0, ends[:-1])[: len(ends)])
    last = np.append(first[1:], True)[: len(first)]
    fits &= ~last | (ends == height)
    cut = np.ones(len(shapes), bool)
    cut[owners[~fits]] = False
    empty = np.ones(len(shapes), bool)
    empty[owners] = False
    result: Bool = cut & (~empty | (shapes[:, 0] == 0))
    return result


def _before(counts: Int64) -> Int64:
    result: Int64 = np.cumsum(counts) - counts
    return result
