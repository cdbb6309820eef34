"""Runs of bytes in an order in which whole slices, of the target and of the source, come from their start to their end.

So each slice is digested from the bytes that are copied anyway. Pure; columns of numbers, a row a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct, first_of_equal, is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import TensorEntry
from ckptkit.offline.copying.checks import RecordTable
from ckptkit.offline.copying.plan import Placement

__all__ = ["ChainRows", "Chains", "chained", "SliceRuns", "slice_runs"]

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_LEAST = 64 << 10  # bytes of a run, on average: for shorter ones it is quicker to read both sides in long pieces
_STEP = 32 << 20  # bytes that one worker takes at a time


@dataclass(frozen=True, slots=True)
class ChainRows:
    """The runs that fill boxes of one target tensor, before it is known in which order.

    Attributes:
        origins, starts, nbytes: [n] what is read.
        files, targets: [n] where it is written.
        boxes: [n] the box that it is a part of.
        inner: [n] bytes of the box before it.
        slices, slice_starts, slice_nbytes: [n] the slice that it is read from: a number, its bytes in the origin.
        whole: [n] whether all of that slice is read, in order.
    """

    origins: Int64
    starts: Int64
    nbytes: Int64
    files: Int64
    targets: Int64
    boxes: Int64
    inner: Int64
    slices: Int64
    slice_starts: Int64
    slice_nbytes: Int64
    whole: Bool

    def take(self, rows: Int64) -> ChainRows:
        return ChainRows(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Chains:
    """Runs, tensor by tensor: each box comes in one piece, from its first byte to its last, and so does each record.

    Attributes:
        origins, starts, nbytes: [n] what is read.
        files, targets: [n] where it is written.
        records: [n] the digest that the run is a part of, -1 for none that is to be checked here.
        last: [n] whether it is the last of its box.
        steps: [m + 1] rows: between two neighbours lie whole boxes and whole records.
    """

    origins: Int64
    starts: Int64
    nbytes: Int64
    files: Int64
    targets: Int64
    records: Int64
    last: Bool
    steps: Int64

    def __len__(self) -> int:
        return len(self.starts)

    def proves(self, records: int) -> Bool:
        """Return which of so many records are checked here, [records]."""
        result = np.zeros(records, bool)
        result[self.records[self.records >= 0]] = True
        return result

    @classmethod
    def of(cls, tensors: Sequence[ChainRows], records: RecordTable) -> Chains:
        """Join the rows of several tensors, which `chained` has ordered.

        A record that two tensors are read from (tied weights) is checked where the first is.
        """
        if not tensors:
            empty = np.zeros(0, np.int64)
            return cls(empty, empty, empty, empty, empty, empty, empty.astype(bool), np.zeros(1, np.int64))
        joined = ChainRows(*(np.concatenate([getattr(rows, name) for rows in tensors]) for name in ChainRows.__slots__))
        owners = np.repeat(np.arange(len(tensors)), [len(rows.starts) for rows in tensors])
        proves = records.find(joined.origins, joined.slice_starts, joined.slice_nbytes)
        proves = np.where(joined.whole, proves, -1)
        first = np.full(len(records) + 1, len(tensors), np.int64)
        np.minimum.at(first, proves, owners)
        proves = np.where(first[proves] == owners, proves, -1)
        begins = joined.inner == 0
        cuts = begins & ((proves < 0) | (joined.starts == joined.slice_starts))
        return cls(
            joined.origins, joined.starts, joined.nbytes, joined.files, joined.targets, proves,
            np.append(begins[1:], True), _steps(cuts, joined.nbytes),
        )  # fmt: skip


def chained(rows: ChainRows, places: Int64, boxes_nbytes: Int64) -> ChainRows | None:
    """Return the rows in the order of the elements; None where boxes don't come in one piece by it, or in small ones.

    Args:
        places: By box, where its first element is in the tensor.
        boxes_nbytes: By box, its bytes.
    """
    if not len(rows.starts) or rows.nbytes.mean() < _LEAST:
        return None
    ordered = rows.take(np.lexsort((rows.inner, rows.boxes, places[rows.boxes])))
    if not _in_one_piece(ordered.boxes, ordered.inner, ordered.nbytes, boxes_nbytes[ordered.boxes]).all():
        return None
    before = ordered.starts - ordered.slice_starts
    return replace(ordered, whole=_in_one_piece(ordered.slices, before, ordered.nbytes, ordered.slice_nbytes))


def _in_one_piece(owners: Int64, before: Int64, nbytes: Int64, totals: Int64) -> Bool:
    """Tell of each row whether all rows of its owner are the whole of it, in order.

    Args:
        before: The bytes of the owner before a row.
        totals: The bytes of the owner.
    """
    order = np.argsort(owners, kind="stable")
    owners, before, nbytes, totals = owners[order], before[order], nbytes[order], totals[order]
    first = np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))
    ends = before + nbytes
    expected = np.append(0, ends[:-1])
    expected[first] = 0
    fits = before == expected
    last = np.append(first[1:], len(owners)) - 1
    fits[last] &= ends[last] == totals[last]
    result = np.empty(len(owners), bool)
    result[order] = np.repeat(np.logical_and.reduceat(fits, first), np.diff(np.append(first, len(owners))))
    return result


def _steps(cuts: Bool, nbytes: Int64) -> Int64:
    """Group rows into steps of some size that begin at cuts; the first row is one."""
    at = np.flatnonzero(cuts)
    turns = (np.cumsum(nbytes) - nbytes)[at] // _STEP
    begins: Int64 = at[np.append(True, turns[1:] != turns[:-1])]
    return np.append(begins, len(cuts))


# Where the bytes of each source slice lie in a result, where that is in runs. Pure; columns of numbers.
#
# Made from the boxes alone and not by the planner of copies, so that one can prove the other.


_MAX_PAIRS = 1 << 22  # of a slice and a box


@dataclass(frozen=True, slots=True)
class SliceRuns:
    """Runs of bytes, sorted by slice and by their place in it; those of a slice make it up. One row a run.

    Attributes:
        slices: [n] row of the entry's slices.
        inner: [n] where the run starts in the slice.
        files, starts: [n] where it lies in the result.
        nbytes: [n].
    """

    slices: Int64
    inner: Int64
    files: Int64
    starts: Int64
    nbytes: Int64

    def bounds(self) -> list[tuple[int, int]]:
        """Return the rows [a, b) of each slice."""
        first = np.flatnonzero(np.concatenate([[True], self.slices[1:] != self.slices[:-1]]))
        return list(zip(first.tolist(), [*first[1:].tolist(), len(self.slices)], strict=True))


def slice_runs(entry: TensorEntry, placement: Placement) -> SliceRuns | None:
    """Return where the slices of a tensor lie in the boxes it was copied to, as they are.

    None where a slice, or what a box has of it, is no run (column shards, strides); where boxes repeat (replicas);
    where there is nothing; or where slices and boxes are too many to look at every pair.
    """
    slices, itemsize = entry.slices, dtype_of(entry.dtype).itemsize
    rows = slices.distinct()
    boxes = np.concatenate([placement.offsets, placement.sizes], axis=1)
    if (
        slices.strides
        or not entry.shape
        or len(rows) * len(placement) > _MAX_PAIRS
        or first_of_equal(boxes) is not None
    ):
        return None
    lo = np.maximum(slices.offsets[rows][:, None], placement.offsets[None])
    hi = np.minimum((slices.offsets + slices.sizes)[rows][:, None], (placement.offsets + placement.sizes)[None])
    which, box = np.nonzero((hi > lo).all(axis=2))
    lo, sizes, row = lo[which, box], (hi - lo)[which, box], rows[which]
    inside, outside = row_major(slices.sizes[row]), row_major(placement.sizes[box])
    if not len(row) or not (is_dense(sizes, inside) & is_dense(sizes, outside)).all():
        return None
    inner = ((lo - slices.offsets[row]) * inside).sum(axis=1) * itemsize
    starts = placement.starts[box] + ((lo - placement.offsets[box]) * outside).sum(axis=1) * itemsize
    order = np.lexsort((inner, row))
    found = SliceRuns(
        row[order], inner[order], placement.files[box][order].astype(np.int64), starts[order],
        (sizes.prod(axis=1) * itemsize)[order],
    )  # fmt: skip
    return found if _is_whole(found, entry, placement) else None


def _is_whole(runs: SliceRuns, entry: TensorEntry, placement: Placement) -> bool:
    """Whether the runs make up each slice from its first to its last byte, and all that was placed."""
    ends = runs.inner + runs.nbytes
    new = np.concatenate([[True], runs.slices[1:] != runs.slices[:-1]])
    before = np.concatenate([[0], ends[:-1]])
    whole = int(runs.nbytes.sum()) == int(placement.nbytes().sum())
    last = np.concatenate([new[1:], [True]])
    seen = distinct(runs.slices)
    sizes = entry.slices.nbytes[seen]
    return whole and bool((runs.inner == np.where(new, 0, before)).all() and (ends[last] == sizes).all())
