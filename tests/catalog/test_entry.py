"""Slices as columns and as views, and the proof that they cover a tensor once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.catalog.box import Box, flat_range_boxes
from ckptkit.catalog.columns import distinct_boxes, tiles_exactly
from ckptkit.catalog.entry import Catalog, Codec, Digest, Role, SliceArray, TensorEntry, TensorSlice, contiguous_strides
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from tests.catalog.boxes import columns, index, partitions, shapes, tensor_of
from tests.checkpoint.states import refusal

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
def test_replicas_and_empty_slices_count_as_covered(case):
    shape, boxes = case
    empty = [Box((n, *(0,) * (len(shape) - 1)), (0, *shape[1:])) for n in shape[:1]]
    entry_of(shape, [*boxes, *reversed(boxes), *empty]).check_coverage()


def counted(shape, boxes):
    """Return how many boxes hold each element."""
    times = np.zeros(shape, int)
    for box in boxes:
        times[index(box)] += 1
    return times


@settings(max_examples=200)
@given(cut, st.sampled_from(["drop", "repeat", "move"]), st.data())
def test_coverage_agrees_with_counting_elements(case, change, data):
    """Drop a box, repeat it, or move it by one element, which leaves the number of elements right."""
    shape, boxes = case
    entry_of(shape, boxes).check_coverage()
    box = boxes[place := data.draw(st.sampled_from(range(len(boxes))))]
    changed = [*boxes, box] if change == "repeat" else boxes[:place] + boxes[place + 1 :]
    if change == "move" and shape:
        dim = data.draw(st.sampled_from(range(len(shape))))
        step = 1 if box.offsets[dim] + box.sizes[dim] < shape[dim] else -1
        moved = Box(tuple(o + step * (d == dim) for d, o in enumerate(box.offsets)), box.sizes)
        changed += [moved] if moved.within(shape) else []
    tiled = tiles_exactly(*columns(changed, len(shape)), np.array(shape, np.int64))
    assert tiled == (counted(shape, changed) == 1).all()
    found = counted(shape, set(changed))  # equal boxes are replicas
    error = "IncompleteCheckpointError" if found.sum() < found.size else "CorruptCheckpointError"
    said = refusal(entry_of(shape, changed).check_coverage)
    assert said == "" if (found == 1).all() else said.startswith(f"{error}: tensor 't'")


def test_many_slices_without_a_grid_are_checked_without_comparing_pairs():
    """Each box spans all rows: a sweep over rows would compare tens of millions of pairs."""
    n = 8_000
    even, odd = np.arange(0, n, 2), np.arange(1, n, 2)
    columns = np.concatenate([even, odd, odd])
    rows = np.repeat([0, 0, n - 1], n // 2)
    heights = np.repeat([n, n - 1, 1], n // 2)
    offsets, sizes = np.stack([rows, columns], 1), np.stack([heights, np.ones_like(heights)], 1)
    tensor_of((n, n), offsets, sizes).check_coverage()
    with pytest.raises(IncompleteCheckpointError):
        tensor_of((n, n), offsets[:-1], sizes[:-1]).check_coverage()
    offsets[1, 1] += 1
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        tensor_of((n, n), offsets, sizes).check_coverage()


def test_slices_may_cut_any_number_of_dimensions():
    """A check of every corner would take years: in 40 dimensions, a box has 2**40 corners."""
    shape = (2,) * 40
    boxes = [*flat_range_boxes(shape, 0, 12_345), *flat_range_boxes(shape, 12_345, 2**40)]
    entry_of(shape, boxes).check_coverage()
    moved = Box((1, *boxes[0].offsets[1:]), boxes[0].sizes)
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        entry_of(shape, [moved, *boxes[1:]]).check_coverage()


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
