"""Describes how target tensors consist of boxes of source tensors, after splits, transposes and concatenations.

Moves no data. A `Part` means this in numpy notation:

    target[part.target_box] = source[part.source_box].reshape(unfold).transpose(axes).reshape(target_box.sizes)

An empty `unfold` or `axes` skips that step. A part with neither is plain: the elements keep their row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import TensorEntry

NO_SOURCE = ""
"""The `source` of a part that is padding."""


@dataclass(frozen=True, slots=True)
class Part:
    """Fills a box of a target with the elements of a box of one source.

    Attributes:
        target_box: The box of the target to fill.
        source: The source's key in `Catalog.tensors`.
        source_box: The box of the source. It has as many elements as `target_box`. If `unfold` is empty, both boxes
            have the same sizes after `axes` is applied, apart from dimensions of size 1.
        unfold: The shape to which the source box is reshaped before `axes` is applied. () keeps the shape. A part with
            `unfold` is small, because it covers one attention head.
        axes: A permutation as for numpy.transpose. () keeps the order.
    """

    target_box: Box
    source: str
    source_box: Box
    unfold: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the elements keep their row-major order."""
        return not self.unfold and not self.axes

    def moved(self, target_box: Box) -> Part:
        """Return the part with another target box, of the same sizes apart from dimensions of size 1."""
        return Part(target_box, self.source, self.source_box, self.unfold, self.axes)

    def cut(self, box: Box) -> list[Part]:
        """Return the parts that fill the intersection of `target_box` and `box`. [] if the intersection is empty."""
        shared = self.target_box.intersect(box)
        if shared is None:
            return []
        if shared == self.target_box:
            return [self]
        if self.unfold:
            return [piece for row in self.rows() for piece in row.cut(box)]
        offsets = list(self.source_box.offsets)
        sizes = list(self.source_box.sizes)
        for dim, source_dim in enumerate(self.source_dims()):
            if source_dim is not None:
                offsets[source_dim] += shared.offsets[dim] - self.target_box.offsets[dim]
                sizes[source_dim] = shared.sizes[dim]
        return [Part(shared, self.source, Box(tuple(offsets), tuple(sizes)), (), self.axes)]

    def permuted(self, dims: tuple[int, ...]) -> list[Part]:
        """Return the parts that replace this part if the target's new dimension d is the old dimension dims[d]."""
        if self.unfold:
            return [piece for row in self.rows() for piece in row.permuted(dims)]
        matched = self.source_dims()
        order = [matched[d] for d in dims]
        axes = [d for d in order if d is not None]
        axes += [d for d in range(self.source_box.ndim) if d not in axes]
        wide = [d for d in axes if self.source_box.sizes[d] != 1]
        box = Box(tuple(self.target_box.offsets[d] for d in dims), tuple(self.target_box.sizes[d] for d in dims))
        # A permutation that only moves dimensions of size 1 changes nothing.
        return [Part(box, self.source, self.source_box, (), () if wide == sorted(wide) else tuple(axes))]

    def source_dims(self) -> list[int | None]:
        """Return, for each dimension of the target box, the matching dimension of the source box.

        The item is None for a dimension of size 1. `unfold` must be empty.
        """
        axes = self.axes or tuple(range(self.source_box.ndim))
        wide = iter([d for d in axes if self.source_box.sizes[d] != 1])
        return [None if size == 1 else next(wide) for size in self.target_box.sizes]

    def rows(self) -> Iterator[Part]:
        """Split the part into parts of one row each, which need no `unfold` and no `axes`.

        The part must come from `rope_permuted`. So `unfold` is (a, b, *rest), `axes` is (1, 0, *rest), and the part has
        a * b > 1 rows. The row dimension of a box is its first dimension with a size above 1.
        """
        a, b = self.unfold[:2]
        row_dim = next(d for d, size in enumerate(self.source_box.sizes) if size != 1)
        target_dim = next(d for d, size in enumerate(self.target_box.sizes) if size != 1)
        for row in range(a * b):
            origin = (row % a) * b + row // a
            yield Part(
                _index_box(self.target_box, target_dim, row), self.source, _index_box(self.source_box, row_dim, origin)
            )


_source_of = attrgetter("source")


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to write. Its parts cover each element exactly once.

    Attributes:
        name: Name in the result.
        dtype: Dtype in the result. Sources with a different dtype are cast.
        shape: Shape of the whole tensor.
        parts: The parts that fill the tensor, in any order.
        source_dtype: The dtype that all sources share.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    source_dtype: str

    @classmethod
    def of(cls, entry: TensorEntry, name: str | None = None) -> Target:
        """Return a target that copies `entry`."""
        box = Box.whole(entry.shape)
        return cls(
            name or entry.fqn or entry.name, entry.dtype, entry.shape, (Part(box, entry.name, box),), entry.dtype
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def sources(self) -> tuple[str, ...]:
        """The keys of the source tensors, without duplicates."""
        if len(self.parts) == 1:
            return (self.parts[0].source,)
        return tuple(key for key in dict.fromkeys(map(_source_of, self.parts)) if key != NO_SOURCE)

    @property
    def only_part(self) -> Part | None:
        """The part, if the target has exactly one part and this part is plain. None for other targets."""
        return self.parts[0] if len(self.parts) == 1 and self.parts[0].is_plain else None

    @property
    def is_padded(self) -> bool:
        """Whether any part is padding."""
        return any(part.source == NO_SOURCE for part in self.parts)

    def renamed(self, name: str) -> Target:
        return self if name == self.name else Target(name, self.dtype, self.shape, self.parts, self.source_dtype)

    def rows(self, start: int, stop: int) -> Target:
        """Return the rows [start, stop) of the target."""
        return self._along(0, start, stop)

    def resized(self, dim: int, size: int) -> Target:
        """Return the target with size `size` along `dim`. The end of the dimension is cut off or padded."""
        if size <= self.shape[dim]:
            return self._along(dim, 0, size)
        box = Box.whole(tuple(size - n if d == dim else n for d, n in enumerate(self.shape)))
        parts = (Part(box, NO_SOURCE, box),) if box.numel else ()
        return concatenated(self.name, [self, replace(self, shape=box.sizes, parts=parts)], dim)

    def split(self, dim: int, sizes: Sequence[int]) -> list[Target]:
        """Split the target along `dim`. `sizes` must add up to the size of `dim`. All pieces have the target's name."""
        return [self._along(dim, stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]

    def _along(self, dim: int, start: int, stop: int) -> Target:
        """Return the range [start, stop) of a dimension."""
        offsets = tuple(start if d == dim else 0 for d in range(len(self.shape)))
        box = Box(offsets, tuple(stop - start if d == dim else n for d, n in enumerate(self.shape)))
        parts = tuple(p.moved(p.target_box.relative_to(box)) for part in self.parts for p in part.cut(box))
        return replace(self, shape=box.sizes, parts=parts)

    def squeezed(self, dim: int) -> Target:
        """Return the target without dimension `dim`, which must have size 1."""
        parts = tuple(
            p.moved(Box(_without(p.target_box.offsets, dim), _without(p.target_box.sizes, dim))) for p in self.parts
        )
        return Target(self.name, self.dtype, _without(self.shape, dim), parts, self.source_dtype)

    def unsqueezed(self, dim: int) -> Target:
        """Return the target with a dimension of size 1 inserted at `dim`."""
        parts = tuple(
            p.moved(Box(_with(p.target_box.offsets, dim, 0), _with(p.target_box.sizes, dim, 1))) for p in self.parts
        )
        return Target(self.name, self.dtype, _with(self.shape, dim, 1), parts, self.source_dtype)

    def transposed(self, dims: tuple[int, ...]) -> Target:
        """Return the target with permuted dimensions. New dimension d is old dimension dims[d]."""
        parts = tuple(piece for part in self.parts for piece in part.permuted(dims))
        return replace(self, shape=tuple(self.shape[d] for d in dims), parts=parts)

    def rope_permuted(self, heads: int, *, to_halves: bool) -> Target:
        """Return the target with each head's rows reordered from one RoPE layout to the other.

        RoPE rotates pairs of rows. Meta's code and torchtitan store the two rows of a pair next to each other.
        transformers stores the first row in the first half of the head, and the second row in the second half.
        `to_halves=True` converts to the layout of transformers, as `permute` in its llama conversion script does.
        `to_halves=False` converts back.
        """
        rows = self.shape[0] // heads
        a, b = (rows // 2, 2) if to_halves else (2, rows // 2)
        parts: list[Part] = []
        for head in self.split(0, [rows] * heads):
            base = len(parts) and parts[-1].target_box.stops[0]
            parts += [p.moved(_shifted(p.target_box, 0, base)) for p in _rope_head(head, a, b)]
        return replace(self, parts=tuple(parts))


def concatenated(name: str, targets: Sequence[Target], dim: int) -> Target:
    """Concatenate targets along `dim`. Their dtypes and their sizes in all other dimensions must be equal."""
    parts: list[Part] = []
    start = 0
    for target in targets:
        parts += [p.moved(_shifted(p.target_box, dim, start)) for p in target.parts]
        start += target.shape[dim]
    shape = tuple(start if d == dim else n for d, n in enumerate(targets[0].shape))
    return replace(targets[0], name=name, shape=shape, parts=tuple(parts))


def _rope_head(head: Target, a: int, b: int) -> list[Part]:
    """Return the parts of one head after its rows are reshaped to (a, b) and transposed. The head starts at row 0."""
    if (only := head.only_part) is not None and a * b > 1:
        order = (1, 0, *range(2, 1 + len(head.shape)))
        return [replace(only, unfold=(a, b, *head.shape[1:]), axes=order)]
    parts: list[Part] = []
    for row in range(a * b):
        origin = (row % a) * b + row // a
        box = Box((origin, *(0,) * (len(head.shape) - 1)), (1, *head.shape[1:]))
        parts += [p.moved(_shifted(p.target_box, 0, row - origin)) for part in head.parts for p in part.cut(box)]
    return parts


def _index_box(box: Box, dim: int, index: int) -> Box:
    return Box(
        tuple(o + index if d == dim else o for d, o in enumerate(box.offsets)),
        tuple(1 if d == dim else s for d, s in enumerate(box.sizes)),
    )


def _shifted(box: Box, dim: int, by: int) -> Box:
    return Box(tuple(o + by if d == dim else o for d, o in enumerate(box.offsets)), box.sizes)


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])
