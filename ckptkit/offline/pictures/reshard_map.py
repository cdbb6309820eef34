"""Draws a reshard: the bytes of each rank before and after, and ribbons for the bytes that move."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct_boxes
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import SliceArray, TensorEntry
from ckptkit.offline.pictures.page import Panel, colour, escaped, rect, svg, text
from ckptkit.units import format_size

WIDTH, HEIGHT, BAR = 1100.0, 460.0, 26.0
MAX_RANKS = 64  # if there are more, neighbouring ranks are drawn as one


def flows(before: Iterable[TensorEntry], after: Iterable[TensorEntry]) -> npt.NDArray[np.int64]:
    """Return an array whose item [i, j] is the number of bytes that new rank j gets from old rank i.

    Replicas count once.
    """
    old = {_identity(entry): entry for entry in before}
    pairs = [(old[_identity(entry)], entry) for entry in after if _identity(entry) in old]
    ranks = [max(_top(e.slices) for e in side) + 1 for side in zip(*pairs, strict=True)] or [1, 1]
    groups = [min(count, MAX_RANKS) for count in ranks]
    total = np.zeros(groups, np.int64)
    for source, target in pairs:
        itemsize = dtype_of(source.dtype).itemsize
        shared = _overlaps(source.slices, target.slices) * itemsize
        rows = _group(source.slices, ranks[0], groups[0])
        columns = _group(target.slices, ranks[1], groups[1])
        np.add.at(total, (rows[:, None], columns[None, :]), shared)
    return total


def _identity(entry: TensorEntry) -> tuple[str, ...]:
    """Return a key that identifies the tensor in a checkpoint of any format."""
    return (entry.role.value, entry.fqn, entry.state) if entry.fqn else (entry.name,)


def _top(slices: SliceArray) -> int:
    return max(0, int(slices.ranks.max())) if slices.ranks is not None and len(slices) else 0  # -1: not recorded


def _group(slices: SliceArray, ranks: int, groups: int) -> npt.NDArray[np.int64]:
    mine = np.zeros(len(slices), np.int64) if slices.ranks is None else np.maximum(slices.ranks, 0).astype(np.int64)
    return mine * groups // ranks


def _overlaps(a: SliceArray, b: SliceArray) -> npt.NDArray[np.int64]:
    """Return how many elements each slice of `a` (row) shares with each slice of `b` (column).

    Replicas in `a` count once.
    """
    shared = np.ones((len(a), len(b)), np.int64)
    for dim in range(a.offsets.shape[1]):
        low = np.maximum(a.offsets[:, None, dim], b.offsets[None, :, dim])
        high = np.minimum((a.offsets + a.sizes)[:, None, dim], (b.offsets + b.sizes)[None, :, dim])
        shared *= np.maximum(high - low, 0)
    shared[np.setdiff1d(np.arange(len(a)), distinct_boxes(a.offsets, a.sizes))] = 0
    return shared


def reshard_map(before: Iterable[TensorEntry], after: Iterable[TensorEntry]) -> Panel:
    """Draw the map of a reshard. Both sides must have the same tensors."""
    matrix = flows(list(before), list(after))
    total = max(int(matrix.sum()), 1)
    left, right = _tops(matrix.sum(axis=1), total), _tops(matrix.sum(axis=0), total)
    parts = [_side(matrix.sum(axis=1), left, 60.0, "before")]
    parts.append(_side(matrix.sum(axis=0), right, WIDTH - 60.0 - BAR, "after"))
    used_left, used_right = left.copy(), right.copy()
    for i, j in np.argwhere(matrix > 0):
        height = HEIGHT * 0.92 * int(matrix[i, j]) / total
        title = f"rank {i} → rank {j}: {format_size(int(matrix[i, j]))}"
        parts.append(_ribbon(used_left[i], used_right[j], height, colour(int(i), len(left)), title))
        used_left[i] += height
        used_right[j] += height
    words = (
        f"{matrix.shape[0]} ranks to {matrix.shape[1]}: a ribbon shows the bytes that one rank wrote "
        "and another will read."
    )
    return Panel("Before and after", words, svg(WIDTH, HEIGHT, "".join(parts)))


def _tops(nbytes: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.float64]:
    heights = HEIGHT * 0.92 * nbytes / total
    gap = HEIGHT * 0.08 / max(len(nbytes), 1)
    return np.concatenate([[0.0], np.cumsum(heights + gap)[:-1]])


def _side(nbytes: npt.NDArray[np.int64], tops: npt.NDArray[np.float64], x: float, side: str) -> str:
    total = max(int(nbytes.sum()), 1)
    every = max(1, math.ceil(12 * len(nbytes) / HEIGHT))  # if bars are low, label only every n-th one
    parts = []
    for rank, (size, top) in enumerate(zip(nbytes.tolist(), tops.tolist(), strict=True)):
        height, title = HEIGHT * 0.92 * size / total, f"rank {rank} {side}: {format_size(size)}"
        parts.append(rect(x, top, BAR, height, fill=colour(rank, len(nbytes)), title=title))
        if rank % every == 0:
            where, anchor = (x - 6, "end") if side == "before" else (x + BAR + 6, "start")
            parts.append(text(where, max(top + height / 2 + 4, 10.0), f"rank {rank}", anchor=anchor))
    return "".join(parts)


def _ribbon(y0: float, y1: float, height: float, fill: str, title: str) -> str:
    x0, x1 = 60.0 + BAR, WIDTH - 60.0 - BAR
    mid = (x0 + x1) / 2
    path = (
        f"M{x0:.1f} {y0:.2f} C{mid:.1f} {y0:.2f} {mid:.1f} {y1:.2f} {x1:.1f} {y1:.2f} V{y1 + height:.2f} "
        f"C{mid:.1f} {y1 + height:.2f} {mid:.1f} {y0 + height:.2f} {x0:.1f} {y0 + height:.2f} Z"
    )
    return f'<path class="ribbon" d="{path}" fill="{fill}" fill-opacity="0.45"><title>{escaped(title)}</title></path>'
