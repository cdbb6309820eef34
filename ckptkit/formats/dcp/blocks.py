"""Computes the blocks of elements that share one value of an inner tensor, such as a scale, and where to cut them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import floordiv

from ckptkit.catalog.box import Box
from ckptkit.errors import SaveError


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of elements that share a value of an inner tensor.

    Attributes:
        name: The inner tensor's name.
        size: The size of a block in each dimension, if the inner tensor has as many dimensions as the tensor (the rule
            "like"). Otherwise (the rule "flat"), a block is a run of `size` elements of the flattened tensor.
        shape: The shape of the whole tensor.
    """

    name: str
    size: list[int] | int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, rule: str, shard: Sequence[int], inner: Sequence[int], shape: Sequence[int]) -> Blocks:
        """Return the blocks of a tensor, given the shapes of a shard and of the shard's inner tensor.

        Args:
            rule: "like" or "flat" (see the attribute `size`).

        Raises:
            SaveError: The shard does not consist of blocks. The message completes the sentence "the tensor ...".
        """
        numel, count = math.prod(shard), math.prod(inner)
        size = blocks_of(shard, inner) if rule == "like" else None
        if rule == "flat" and len(inner) == 1 and numel and count and numel % count == 0:
            return cls(name, numel // count, tuple(shape))
        if size is None:
            raise SaveError(f"has a shard of shape {list(shard)}, not a multiple of its {name} {list(inner)}")
        return cls(name, size, tuple(shape))

    @property
    def steps(self) -> list[int]:
        """For each dimension, the smallest size of a shard that splits no block. See `cut_blocks`."""
        return cut_blocks(self.size, self.shape) if isinstance(self.size, int) else self.size

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape in which the whole inner tensor is stored.

        With the rule "flat", this is [n, values] if dimension 0 of the outer tensor can be cut into n parts that split
        no block. Otherwise, the inner tensor is one-dimensional.
        """
        return self.inner_box(Box.whole(self.shape)).sizes

    def inner_box(self, box: Box) -> Box:
        """Return the region of the inner tensor that belongs to a region (`box`) of the outer tensor.

        Raises:
            SaveError: The region splits a block. The message completes the sentence "the tensor ...".
        """
        steps = self.steps
        for dim, step in enumerate(steps):
            start, stop, size = box.offsets[dim], box.stops[dim], self.shape[dim]
            if (start, stop) != (0, size) and (not step or start % step or stop % step or size % step):
                raise self.split(f"a shard holds [{start}, {stop}) of dimension {dim}")
        if isinstance(self.size, list):
            return Box(tuple(map(floordiv, box.offsets, steps)), tuple(map(floordiv, box.sizes, steps)))
        if not steps or not steps[0] or self.shape[0] % steps[0]:
            return Box.whole((box.numel // self.size,))
        columns = math.prod(box.sizes[1:]) * steps[0] // self.size
        column = box.offsets[1] // self.size if len(steps) > 1 and steps[1] else 0
        return Box((box.offsets[0] // steps[0], column), (box.sizes[0] // steps[0], columns))

    def split(self, where: str) -> SaveError:
        """Return the error for a cut that splits a block. `where` describes the cut, as a clause after "but"."""
        return SaveError(
            f"has the shape {list(self.shape)} and a {self.name} with a value for each block of {self.size} elements, "
            f"but {where}: blocks must not be split between ranks"
        )


def blocks_of(shape: Sequence[int], inner: Sequence[int]) -> list[int] | None:
    """Return, for each dimension, how many elements of a tensor share one element of the inner tensor.

    Returns None if the numbers of dimensions differ, or if a size is not a multiple of the inner tensor's size.
    """
    if len(shape) != len(inner) or any(n != size and (not n or size % n) for size, n in zip(shape, inner, strict=True)):
        return None
    return [1 if n == size else size // n for size, n in zip(shape, inner, strict=True)]


def cut_blocks(run: int, shape: Sequence[int]) -> list[int]:
    """Return, for each dimension, the smallest size of a shard that does not split a run of `run` elements.

    A shard may have any multiple of this size. The size is 0 if the tensor cannot be cut in that dimension.
    """
    rows = run // math.gcd(run, math.prod(shape[1:])) if shape else 0
    return [rows, run if rows == 1 and len(shape) == 2 else 0, *[0] * len(shape)][: len(shape)]
