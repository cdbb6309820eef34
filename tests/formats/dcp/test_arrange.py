"""The slices of all ranks are sorted by tensor, for any number of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptkit.formats.dcp.files import ROW
from ckptkit.formats.dcp.index import PlannedKey, RankSlices, SaveIndex

FIELDS = ("start", "length", "payload", "digest")


def ranks_of(tensors: int, count: int, seed: int) -> tuple[list[RankSlices], Any]:
    """Return ranks that hold tensors of several dimensions each; one of them holds none."""
    random = np.random.default_rng(seed)
    widths = random.integers(0, 4, tensors)
    made, first_path = [], 0
    for rank in range(count):
        held = np.flatnonzero(random.random(tensors) < 0.6) if rank != 2 else np.zeros(0, np.int64)
        rows = np.zeros(len(held), ROW)
        for name in FIELDS:
            rows[name] = random.integers(0, 1 << 40, len(held))
        rows["file"] = random.integers(0, 3, len(held))
        boxes = random.integers(0, 1 << 40, 2 * int(widths[held].sum()))
        made.append(RankSlices(held, rows, boxes, rank, first_path))
        first_path += 3
    return made, widths


def arrange(ranks: list[RankSlices], widths: Any) -> SaveIndex:
    """Return the index of these ranks, for tensors with so many dimensions."""
    found = SaveIndex()
    found._keys = {str(i): PlannedKey(str(i), "uint8", (1,) * int(n), (), None) for i, n in enumerate(widths)}
    found._arrange(ranks)
    return found


def told(found: SaveIndex) -> list[tuple[Any, ...]]:
    """Return one tuple per slice, in the order of the columns."""
    rows = []
    for tensor, (_, span, offsets, sizes) in enumerate(found.entries()):
        for row, rank, low, size in zip(
            found._rows[span], found._ranks[span].tolist(), offsets.tolist(), sizes.tolist(), strict=True
        ):
            place = tuple(int(row[name]) for name in (*FIELDS, "file"))
            rows.append((tensor, (*place[:-1], rank, place[-1]), tuple(low), tuple(size)))
    return rows


def one_by_one(ranks: list[RankSlices], widths: Any) -> list[tuple[Any, ...]]:
    rows = []
    for item in ranks:
        at = 0
        for tensor, row in zip(item.tensors.tolist(), item.rows, strict=True):
            ndim = int(widths[tensor])
            box = item.boxes[at : at + 2 * ndim].tolist()
            place = (*(int(row[name]) for name in FIELDS), item.ranks, int(row["file"]) + item.first_path)
            rows.append((tensor, place, tuple(box[:ndim]), tuple(box[ndim:])))
            at += 2 * ndim
    return sorted(rows, key=lambda row: row[0])  # stable: by rank within a tensor


def test_slices_are_ordered_by_tensor_and_then_by_rank() -> None:
    ranks, widths = ranks_of(11, 9, seed=7)
    assert told(arrange(ranks, widths)) == one_by_one(ranks, widths)


def test_more_than_65536_tensors_are_ordered() -> None:
    tensors = (1 << 16) + 5
    rows = np.zeros(3, ROW)
    rows["start"] = [1, 2, 3]
    held = np.array([tensors - 1, 4, 1 << 16])
    found = arrange([RankSlices(held, rows, np.zeros(0, np.int64), 0, 0)], np.zeros(tensors, np.int64))
    assert [(tensor, place[0]) for tensor, place, *_ in told(found)] == [(4, 2), (1 << 16, 3), (tensors - 1, 1)]


def test_arranging_no_tensors_returns_no_rows() -> None:
    assert told(arrange([], [])) == []
