"""Does arithmetic on boxes (rectangular regions of a tensor) and flat index ranges. Counts elements, never bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: its first index (`offsets`) and its size (`sizes`) in each dimension.

    A 0-dim tensor is `Box((), ())` and has one element. A box is empty if any of its sizes is 0.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box covers a whole tensor of this shape."""
        return self.sizes == shape and not any(self.offsets)

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """The index after the last element of the box in each dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def within(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box lies inside a tensor of this shape."""
        return (
            len(shape) == len(self.sizes)
            and all(o >= 0 and s >= 0 for o, s in zip(self.offsets, self.sizes, strict=True))
            and all(stop <= n for stop, n in zip(self.stops, shape, strict=True))
        )

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of the two boxes, or None if they share no element."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, offsets, strict=True)
        sizes = tuple([min(a + m, b + n) - o for a, m, b, n, o in spans])
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None

    def relative_to(self, outer: Box) -> Box:
        """Return this box with offsets relative to those of `outer`."""
        return Box(tuple(map(operator.sub, self.offsets, outer.offsets)), self.sizes)

    def is_contiguous_in(self, shape: tuple[int, ...]) -> bool:
        """Return whether the box's elements are contiguous in a row-major tensor of this shape."""
        if self.numel <= 1:
            return True
        partial = False  # True after a dimension that the box covers only partly: then all outer sizes must be 1
        for size, extent in zip(reversed(self.sizes), reversed(shape), strict=True):
            if partial and size != 1:
                return False
            partial = partial or size != extent
        return True

    def flat_start(self, shape: tuple[int, ...]) -> int:
        """Return the row-major index of the box's first element in a tensor of this shape."""
        return sum(o * s for o, s in zip(self.offsets, row_major_strides(shape), strict=True))

    def tiles(self, max_numel: int) -> Iterator[Box]:
        """Split the box into tiles of at most `max_numel` elements, in row-major order.

        Each tile is contiguous in a row-major tensor of the box's shape. So a file that holds the box can be written
        tile by tile.
        """
        if self.numel == 0:
            return
        if self.numel <= max_numel or self.ndim == 0:
            yield self
            return
        inner = 1  # elements per index of the dimension to split
        dim = self.ndim - 1
        while inner * self.sizes[dim] <= max_numel:
            inner *= self.sizes[dim]
            dim -= 1
        step = max(1, max_numel // inner)
        for index in _indices(self.sizes[:dim]):
            outer = tuple(o + i for o, i in zip(self.offsets[:dim], index, strict=True))
            for begin in range(0, self.sizes[dim], step):
                length = min(step, self.sizes[dim] - begin)
                yield Box(
                    (*outer, self.offsets[dim] + begin, *self.offsets[dim + 1 :]),
                    (1,) * dim + (length, *self.sizes[dim + 1 :]),
                )


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Convert the elements [start, stop) of a flattened row-major tensor to at most 2 * ndim - 1 boxes, in order.

    Each box is contiguous in the flattened tensor. For example, FSDP1 and ZeRO give each rank such a range.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    head, tail = start - first * inner, stop - last * inner
    if first == last and not (head == 0 and tail == inner):
        return [_lift(box, first) for box in flat_range_boxes(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [_lift(box, first) for box in flat_range_boxes(shape[1:], head, inner)]
        first += 1
    whole_last = last if tail == inner else last - 1
    if whole_last >= first:
        rest = shape[1:]
        boxes.append(Box((first, *(0,) * len(rest)), (whole_last - first + 1, *rest)))
    if tail != inner:
        boxes += [_lift(box, last) for box in flat_range_boxes(shape[1:], 0, tail)]
    return boxes


def _lift(box: Box, index: int) -> Box:
    return Box((index, *box.offsets), (1, *box.sizes))


def _indices(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for head in range(sizes[0]):
        for rest in _indices(sizes[1:]):
            yield (head, *rest)
