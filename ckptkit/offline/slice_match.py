"""Where the bytes of each source slice lie in a result, where that is in runs. Pure; columns of numbers.

Made from the boxes alone and not by the planner of copies, so that one can prove the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct, first_of_equal, is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import TensorEntry
from ckptkit.offline.plan import Placement

__all__ = ["SliceRuns", "slice_runs"]

Int64 = npt.NDArray[np.int64]
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
