"""Slices as columns and as views, and the proof that they cover a tensor once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import distinct_boxes
from ckptkit.catalog.entry import Catalog, Codec, Digest, Role, SliceArray, TensorEntry, TensorSlice, contiguous_strides
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from tests.catalog.boxes import columns, partitions, shapes, tensor_of

cut = shapes.flatmap(lambda shape: st.tuples(st.just(shape), partitions(shape)))


def entry_of(shape: tuple[int, ...], boxes: list[Box]) -> TensorEntry:
    return tensor_of(shape, *columns(boxes, len(shape)), name="t")


def test_a_slice_array_returns_the_slices_that_it_was_built_from():
    slices = [
        TensorSlice(Box((0, 0), (2, 3)), "a", 64, 24, None, Digest("crc32", 7, 64, 24), None, 0),
        TensorSlice(Box((2, 0), (1, 3)), "b", 0, 12, (1, 1), Digest("crc32", 8, 0, 40), Codec("zstd", 5, 9), 1),
    ]
    array = SliceArray.of(slices, 2)
    assert list(array) == slices
    assert array[-1] == slices[1]
    assert array[0:1] == slices[:1]
    with pytest.raises(IndexError):
        SliceArray.of([], 1)[0]


@given(cut)
def test_a_partition_covers_its_tensor(case):
    shape, boxes = case
    entry_of(shape, boxes).check_coverage()


@given(cut)
def test_replicas_and_empty_slices_count_as_covered(case):
    shape, boxes = case
    empty = [Box((n, *(0,) * (len(shape) - 1)), (0, *shape[1:])) for n in shape[:1]]
    entry_of(shape, [*boxes, *reversed(boxes), *empty]).check_coverage()


@given(cut, st.data())
def test_a_missing_part_is_found(case, data):
    shape, boxes = case
    lost = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(IncompleteCheckpointError, match="'t'"):
        entry_of(shape, boxes[:lost] + boxes[lost + 1 :]).check_coverage()


@given(cut, st.data())
def test_overlapping_slices_are_found_even_if_the_element_count_is_right(case, data):
    shape, boxes = case
    moved = [
        (i, other)
        for i, a in enumerate(boxes)
        for other in boxes
        if other is not a and other.sizes == a.sizes and a.numel > 1
    ]
    if not moved:
        return
    i, other = data.draw(st.sampled_from(moved))
    dim = max(range(len(shape)), key=lambda d: other.sizes[d])
    step = -1 if other.offsets[dim] else 1
    shifted = Box(tuple(o + step * (d == dim) for d, o in enumerate(other.offsets)), other.sizes)
    if shifted == boxes[i] or not shifted.within(shape):
        return
    with pytest.raises(CorruptCheckpointError):
        entry_of(shape, [*boxes[:i], shifted, *boxes[i + 1 :]]).check_coverage()


@pytest.mark.parametrize("box", [Box((0, 3), (4, 2)), Box((-1, 0), (4, 4)), Box((0, 0), (-4, -4))])
def test_a_slice_outside_of_the_shape_is_corrupt(box):
    with pytest.raises(CorruptCheckpointError, match="outside its shape"):
        entry_of((4, 4), [box]).check_coverage()


def test_a_tensor_without_slices_or_of_huge_sizes_is_incomplete():
    with pytest.raises(IncompleteCheckpointError):
        entry_of((), []).check_coverage()
    with pytest.raises(IncompleteCheckpointError, match=str(2**80)):
        entry_of((2**41, 2**41), [Box((0, 0), (2**40, 2**40))]).check_coverage()


def test_many_boxes_that_all_overlap_are_refused_at_once():
    n = 200_000
    offsets = np.stack([np.zeros(n, np.int64), np.arange(n)], axis=1)
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        tensor_of((3, n + 2), offsets, np.full((n, 2), 3)).check_coverage()


@given(cut)
def test_distinct_rows_keeps_the_first_slice_of_each_box(case):
    shape, boxes = case
    slices = entry_of(shape, [*boxes, *boxes]).slices
    assert distinct_boxes(slices.offsets, slices.sizes).tolist() == list(range(len(boxes)))


def test_a_duplicate_name_in_a_role_is_corrupt():
    entries = [TensorEntry(name, "float32", (), SliceArray.of([], 0), Role.MODEL, "w") for name in ("a", "b")]
    with pytest.raises(CorruptCheckpointError, match="as 'a' and as 'b'"):
        Catalog({e.name: e for e in entries}).by_role(Role.MODEL)


@given(shapes)
def test_strides_of_dimensions_of_size_one_do_not_matter(shape):
    strides = np.empty(shape).strides
    steps = tuple(99 if n == 1 else s // 8 for n, s in zip(shape, strides, strict=True))
    assert contiguous_strides(shape, steps)
