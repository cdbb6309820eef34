"""Finding the pieces of a box in the slices of a tensor."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog import tiles
from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import first_of_equal
from ckptkit.catalog.entry import SliceArray, TensorEntry, TensorSlice
from ckptkit.catalog.tiles import pieces
from tests.catalog.boxes import boxes_in, columns, partitions, shapes

cases = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), partitions(shape), st.lists(boxes_in(shape), min_size=1, max_size=4))
)


@given(cases)
def test_the_interval_search_finds_the_same_pieces_as_comparing_all_pairs(case):
    shape, parts, wanted = case
    if not shape:
        return
    starts, sizes = columns(parts, len(shape))
    lo, extent = columns(wanted, len(shape))
    split = tiles._splitting_dim(starts, starts + sizes)
    if split is None:
        return
    boxes, rows = tiles._by_intervals(*split, lo[:, split[0]], (lo + extent)[:, split[0]])
    candidates = set(zip(boxes.tolist(), rows.tolist(), strict=True))
    overlapping = {
        (i, j) for i, box in enumerate(wanted) for j, part in enumerate(parts) if box.intersect(part) is not None
    }
    assert overlapping <= candidates


def test_explicit_strides_say_where_a_piece_begins():
    transposed = TensorSlice(Box((0, 0), (2, 3)), "f", 8, 24, strides=(1, 2))
    entry = TensorEntry("t", "float32", (2, 3), SliceArray.of([transposed], 2))
    found = pieces(entry.slices, *columns([Box((1, 2), (1, 1))], 2), 4)
    assert found.starts.tolist() == [8 + 4 * (1 + 2 * 2)]
    assert found.strides.tolist() == [[1, 2]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_first_of_equal_keeps_the_first_of_each_row(rows):
    table = np.array(rows, np.int64).reshape(-1, 2)
    found = first_of_equal(table)
    kept = list(range(len(rows))) if found is None else found.tolist()
    assert kept == [i for i, row in enumerate(rows) if row not in rows[:i]]
