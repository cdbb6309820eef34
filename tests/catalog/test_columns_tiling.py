"""Coverage of a shape by boxes: the sum over corners agrees with counting elements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckptkit.catalog.columns import tiles_exactly
from ckptkit.catalog.entry import TensorEntry
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from tests.catalog.boxes import tensor_of


def cut(rng: random.Random, shape: tuple[int, ...], times: int) -> list[list[list[int]]]:
    """Return boxes [offsets, sizes] that tile a shape, cut at random."""
    boxes = [[[0] * len(shape), list(shape)]]
    for _ in range(times):
        index = rng.randrange(len(boxes))
        offsets, sizes = boxes[index]
        dim = rng.randrange(len(shape))
        if sizes[dim] > 1:
            at = rng.randrange(1, sizes[dim])
            second = [list(offsets), list(sizes)]
            second[0][dim] += at
            second[1][dim] -= at
            boxes[index] = [offsets, [at if d == dim else s for d, s in enumerate(sizes)]]
            boxes.append(second)
    return boxes


def counted(boxes: list[list[list[int]]], shape: tuple[int, ...]) -> bool:
    count = np.zeros(shape, int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


def tiled(boxes: list[list[list[int]]], shape: tuple[int, ...]) -> bool:
    table = np.array(boxes, np.int64)
    return tiles_exactly(table[:, 0], table[:, 1], np.array(shape, np.int64))


@pytest.mark.parametrize("shape", [(12,), (7, 9), (4, 5, 6), (3, 3, 3, 3)])
def test_tiled_agrees_with_counting_elements(shape: tuple[int, ...]) -> None:
    rng = random.Random(str(shape))
    for _ in range(150):
        boxes = cut(rng, shape, rng.randrange(12))
        assert tiled(boxes, shape)
        box = rng.choice(boxes)
        dim = rng.randrange(len(shape))
        kind = rng.randrange(3)
        if kind == 0:
            boxes.append([list(box[0]), list(box[1])])
        elif kind == 1 and len(boxes) > 1:
            boxes.remove(box)
        elif box[0][dim] + box[1][dim] < shape[dim]:
            box[0][dim] += 1
        assert tiled(boxes, shape) == counted(boxes, shape)


def entry(boxes: list[list[list[int]]], shape: tuple[int, ...]) -> TensorEntry:
    table = np.array(boxes, np.int64)
    return tensor_of(shape, table[:, 0], table[:, 1])


def test_many_slices_without_a_grid_are_checked_without_comparing_pairs() -> None:
    """Each box spans all rows: a sweep over rows would compare tens of millions of pairs."""
    n = 8_000
    boxes = [[[0, i], [n, 1]] for i in range(0, n, 2)]
    boxes += [[[0, i], [n - 1, 1]] for i in range(1, n, 2)]
    boxes += [[[n - 1, i], [1, 1]] for i in range(1, n, 2)]
    entry(boxes, (n, n)).check_coverage()
    moved = [[list(o), list(s)] for o, s in boxes]
    moved[1][0][1] += 1
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        entry(moved, (n, n)).check_coverage()
    with pytest.raises(IncompleteCheckpointError):
        entry(boxes[:-1], (n, n)).check_coverage()


def test_an_absurd_number_of_corners_is_refused() -> None:
    shape = (4096,) + (1,) * 30
    boxes = [[[i] + [0] * 30, [1] * 31] for i in range(4096)]
    with pytest.raises(CorruptCheckpointError, match="dimensions"):
        entry(boxes, shape).check_coverage()
