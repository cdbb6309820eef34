"""Finding the pieces of a box in the slices of a tensor."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog import tiles
from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import first_of_equal, is_dense, row_major
from ckptkit.catalog.entry import SliceArray, TensorEntry, TensorSlice
from ckptkit.catalog.tiles import pieces
from tests.catalog.boxes import boxes_in, columns, index, partitions, shapes

cases = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), partitions(shape), st.lists(boxes_in(shape), min_size=1, max_size=4))
)


def stored(shape: tuple[int, ...], boxes: list[Box]) -> tuple[TensorEntry, np.ndarray]:
    """Return a tensor of numbered elements whose slices follow each other in a file, and that file."""
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    slices, file = [], [np.zeros(0, np.int32)]
    at = 0
    for box in boxes:
        file.append(whole[index(box)].ravel())
        slices.append(TensorSlice(box, "f", at * 4, box.numel * 4))
        at += box.numel
    return TensorEntry("t", "int32", shape, SliceArray.of(slices, len(shape))), np.concatenate(file)


@given(cases)
def test_pieces_fill_each_box_once_from_the_right_bytes(case):
    shape, parts, wanted = case
    entry, file = stored(shape, parts)
    found = pieces(entry.slices, *columns(wanted, len(shape)), 4)
    whole = np.arange(math.prod(shape)).reshape(shape)
    for i, box in enumerate(wanted):
        got = np.full(shape, -1)
        for j in np.flatnonzero(found.boxes == i):
            part = Box(tuple(found.offsets[j].tolist()), tuple(found.sizes[j].tolist()))
            assert (got[index(part)] == -1).all()
            start, strides = int(found.starts[j]), [int(s) * 4 for s in found.strides[j]]
            view = np.ndarray(part.sizes, np.int32, file.tobytes(), start, strides)
            got[index(part)] = view
        expected = np.full(shape, -1)
        expected[index(box)] = whole[index(box)]
        assert (got == expected).all()


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


def test_the_first_of_several_replicas_is_used():
    entry, _ = stored((4,), [Box((0,), (4,)), Box((0,), (4,))])
    assert pieces(entry.slices, *columns([Box((1,), (2,))], 1), 4).rows.tolist() == [0]


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


@given(shapes)
def test_a_row_major_box_is_dense(shape):
    sizes = np.array([shape], np.int64).reshape(1, len(shape))
    assert is_dense(sizes, row_major(sizes)).all()


def test_a_box_with_wider_rows_is_not_dense():
    assert not is_dense(np.array([[2, 3]]), np.array([[4, 1]])).any()
