"""Hypothesis strategies for shapes, boxes, and partitions of a tensor into boxes."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from ckptkit.catalog.box import Box, flat_range_boxes
from ckptkit.catalog.entry import SliceArray, TensorEntry

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw a box inside the shape, possibly empty."""
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that cover the shape once: a grid, the boxes of flat ranges (FSDP1, ZeRO), or any others."""
    numel = math.prod(shape)
    kind = draw(st.sampled_from(["grid", "flat", "other"])) if shape else "grid"
    if kind == "flat":
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        return [box for a, b in itertools.pairwise(cuts) for box in flat_range_boxes(shape, a, b)]
    if kind == "other":
        boxes = [Box.whole(shape)]
        for _ in range(draw(st.integers(0, 11))):
            box, dim = boxes.pop(draw(st.integers(0, len(boxes) - 1))), draw(st.integers(0, len(shape) - 1))
            boxes += halves(box, dim, draw(st.integers(1, box.sizes[dim])))
        return boxes
    grid = [Box((), ())]
    for n in shape:
        edges = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})
        steps = list(itertools.pairwise(edges))
        grid = [Box((*b.offsets, a), (*b.sizes, z - a)) for b in grid for a, z in steps]
    return grid


def halves(box: Box, dim: int, at: int) -> list[Box]:
    """Cut a box before the position `at` of a dimension; return the parts that have elements."""
    first, second = list(box.sizes), list(box.sizes)
    first[dim], second[dim] = at, box.sizes[dim] - at
    start = tuple(o + at * (d == dim) for d, o in enumerate(box.offsets))
    return [part for part in (Box(box.offsets, tuple(first)), Box(start, tuple(second))) if part.numel]


def index(box: Box) -> tuple[slice, ...]:
    """Return the numpy index of a box."""
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def columns(boxes: Sequence[Box], ndim: int) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and sizes of boxes, [n, ndim] each."""
    shape = (len(boxes), ndim)
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(shape)
    return offsets, np.array([box.sizes for box in boxes], np.int64).reshape(shape)


def tensor_of(shape: tuple[int, ...], offsets: np.ndarray, sizes: np.ndarray, name: str = "w") -> TensorEntry:
    """Return a tensor whose slices have these boxes; their place in the file does not matter."""
    zeros = np.zeros(len(offsets), np.int64)
    return TensorEntry(name, "float32", shape, SliceArray(["f"], zeros.astype(np.int32), zeros, zeros, offsets, sizes))
