"""Bringing the slices of all ranks into the order of their tensors, a few ranks at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Arranged", "RankSlices", "arrange"]

Int64 = npt.NDArray[np.int64]
_BLOCK = 1 << 16  # rows that are sorted together: what they are gathered from stays in the cache, however many ranks


@dataclass(frozen=True, slots=True)
class RankSlices:
    """What a rank wrote.

    Attributes:
        tensors: [n] the tensor of each slice.
        rows: [n] where each lies, a `ROW` each.
        boxes: The offsets of each slice and then its sizes, end to end.
        first_path: Its files are numbered from here on.
    """

    tensors: Int64
    rows: npt.NDArray[np.void]
    boxes: Int64
    rank: int
    first_path: int


@dataclass(frozen=True, slots=True)
class Arranged:
    """All slices, ordered by tensor; those of one tensor in the order of their ranks.

    Attributes:
        tensor: [n] of each slice.
        stops: [tensors] past the last slice of each.
        columns: [n] "start", "length", "payload", "digest", "rank", "file".
        offsets, sizes: Of each slice, end to end.
    """

    tensor: Int64
    stops: Int64
    columns: dict[str, npt.NDArray[Any]]
    offsets: Int64
    sizes: Int64

    @classmethod
    def empty(cls, counts: Int64, widths: Int64) -> Arranged:
        """Return room for so many slices of each tensor, of so many dimensions."""
        total, elements = int(counts.sum()), int((counts * widths).sum())
        wide = {name: np.empty(total, np.int64) for name in ("start", "length", "payload")}
        small = {name: np.empty(total, np.int32) for name in ("rank", "file")}
        return cls(
            np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            np.cumsum(counts, dtype=np.int64),
            {**wide, "digest": np.empty(total, np.uint64), **small},
            np.empty(elements, np.int64),
            np.empty(elements, np.int64),
        )


def arrange(found: Sequence[RankSlices], widths: Int64) -> Arranged:
    """Return the slices of all ranks by tensor; `widths` are the dimensions of each tensor.

    Not sorted and gathered as a whole: with thousands of ranks each row would come from another page of memory, and
    what is made on the way would be several times the result.
    """
    blocks = list(_blocks(found))
    counts = np.zeros(len(widths), np.int64)
    for block in blocks:
        for_each = np.bincount(_joined([item.tensors for item in block], np.int64), minlength=len(widths))
        counts += for_each
    result = Arranged.empty(counts, widths)
    first = result.stops - counts
    elements = np.cumsum(counts * widths) - counts * widths - first * widths  # plus row * width: where its box begins
    placed = first.copy()
    for block in blocks:
        _place(block, result, widths, elements, placed)
    return result


def _blocks(found: Sequence[RankSlices]) -> Iterator[list[RankSlices]]:
    block: list[RankSlices] = []
    rows = 0
    for item in found:
        block.append(item)
        rows += len(item.rows)
        if rows >= _BLOCK:
            yield block
            block, rows = [], 0
    if block:
        yield block


def _place(block: Sequence[RankSlices], result: Arranged, widths: Int64, elements: Int64, placed: Int64) -> None:
    """Put the slices of some ranks where they belong; `placed`: where the next slice of each tensor does."""
    tensors = _joined([item.tensors for item in block], np.int64)
    if not len(tensors):
        return
    # numpy sorts numbers of 16 bits by their digits, others by comparing.
    order = np.argsort(tensors.astype(np.uint16) if len(widths) <= 1 << 16 else tensors, kind="stable")
    ordered = tensors[order]
    counts = np.bincount(ordered, minlength=len(widths))
    to = np.arange(len(ordered)) + (placed - np.cumsum(counts) + counts)[ordered]
    placed += counts
    rows = np.concatenate([item.rows for item in block])
    lengths = [len(item.rows) for item in block]
    for name in ("start", "length", "payload", "digest"):
        result.columns[name][to] = rows[name][order]
    result.columns["rank"][to] = np.repeat(np.array([item.rank for item in block], np.int32), lengths)[order]
    first_path = np.repeat(np.array([item.first_path for item in block], np.int32), lengths)
    result.columns["file"][to] = (rows["file"] + first_path)[order]
    ndim = widths[tensors]
    begin = (2 * (np.cumsum(ndim) - ndim))[order]  # a row's offsets, then its sizes
    ndim = ndim[order]
    source, target = _ragged(begin, ndim), _ragged(elements[ordered] + to * ndim, ndim)
    boxes = _joined([item.boxes for item in block], np.int64)
    result.offsets[target] = boxes[source]
    result.sizes[target] = boxes[source + np.repeat(ndim, ndim)]


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _ragged(first: Int64, widths: Int64) -> Int64:
    """The indices first[0] ... first[0] + widths[0] - 1, first[1] ..."""
    total = int(widths.sum())
    starts = np.cumsum(widths) - widths
    index: Int64 = np.arange(total, dtype=np.int64) + np.repeat(first - starts, widths)
    return index
