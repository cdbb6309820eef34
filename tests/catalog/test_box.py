"""Boxes against numpy: their elements, contiguity, tiles and flat ranges."""

import math

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.catalog.box import Box, flat_range_boxes, row_major_strides
from tests.catalog.boxes import boxes_in, index, shapes

with_two = shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape)))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@given(with_two)
def test_an_intersection_is_the_elements_that_both_boxes_hold(case):
    shape, a, b = case
    both = set(numbered(shape)[index(a)].ravel().tolist()) & set(numbered(shape)[index(b)].ravel().tolist())
    shared = a.intersect(b)
    assert both == (set() if shared is None else set(numbered(shape)[index(shared)].ravel().tolist()))


@given(with_two)
def test_a_box_is_contiguous_exactly_when_its_elements_follow_one_another(case):
    shape, box, _ = case
    flat = numbered(shape)[index(box)].ravel()
    assert box.is_contiguous_in(shape) == bool((np.diff(flat) == 1).all())


@given(with_two, st.integers(1, 40))
@example(((3, 4, 5), Box((0, 1, 1), (3, 2, 4)), None), 3)
def test_tiles_of_bounded_size_cover_a_box_in_row_major_order_once(case, max_numel):
    shape, box, _ = case
    tiles = list(box.tiles(max_numel))
    assert all(0 < tile.numel <= max_numel for tile in tiles)
    assert all(tile.relative_to(box).is_contiguous_in(box.sizes) for tile in tiles)
    elements = [numbered(shape)[index(tile)].ravel() for tile in tiles]
    assert np.concatenate([np.zeros(0, int), *elements]).tolist() == numbered(shape)[index(box)].ravel().tolist()


@given(shapes, st.data())
def test_a_flat_range_becomes_few_contiguous_boxes_in_element_order(shape, data):
    start, stop = sorted(data.draw(st.integers(0, math.prod(shape))) for _ in range(2))
    boxes = flat_range_boxes(shape, start, stop)
    elements = [numbered(shape)[index(box)].ravel() for box in boxes]
    assert np.concatenate([np.zeros(0, int), *elements]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.is_contiguous_in(shape) for box in boxes)


@given(shapes)
def test_row_major_strides_are_those_of_a_contiguous_tensor(shape):
    assert row_major_strides(shape) == torch.empty(shape).stride()
