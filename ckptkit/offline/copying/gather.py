"""Assembles any box (rectangular region) of a stored or computed tensor in memory."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.casts import cast_into
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.targets import Target
from ckptkit.errors import UsageError
from ckptkit.formats.sources import UNITS, EntryMap, SourceReader, strided
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.units import format_size

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

_BLOCK = 128  # rows; `rows_at_once` rounds down to a multiple of this
_TILE = 4 << 20
_READ = 64 << 10  # minimum bytes to read from each slice if a tile needs part of every slice
_MOST = 16 << 20  # bytes; larger temporaries leave the cache, and malloc keeps several times their size


@dataclass(slots=True)
class Gatherer:
    """Assembles boxes (rectangular regions) of tensors in memory. Thread-safe.

    Attributes:
        max_bytes: Maximum memory for one computed tensor and its inputs, in bytes.
        small, big: Sizes in bytes of a tile (the box that is assembled at once). A tile normally has `small` bytes. It
            has up to `big` bytes if the source would otherwise be read many times.
    """

    reader: SourceReader
    maps: dict[str, EntryMap]
    max_bytes: int
    small: int = _TILE
    big: int = 0
    _computing: threading.RLock = field(default_factory=threading.RLock)
    _keeping: threading.Lock = field(default_factory=threading.Lock)
    # Small inputs that every tile needs, by `id` (a hash of a `Target` takes as long as its formula), oldest first.
    _kept: OrderedDict[int, tuple[Target, Bytes]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.big = max(self.small, self.big)

    def tile_numel(self, tensor: OutputTensor) -> int:
        """Return how many elements of an output tensor to assemble at once (a tile).

        Tiles are larger if each tile must be read from many places in the source.
        """
        if isinstance(tensor, ComputedTensor):
            rows = self.rows_at_once(tensor, self.small if tensor.by_element else 2 * self.big)
            return max(1, tensor.numel // max(1, tensor.shape[0] if tensor.shape else 1) * rows)
        entries = [self.maps[key].entry for key in tensor.sources]
        widest = max([dtype_of(tensor.dtype).itemsize, *(dtype_of(entry.dtype).itemsize for entry in entries)])
        scattered = any(part.axes and not part.unfold for part in tensor.parts)
        scattered = scattered or any(entry.slices.strides for entry in entries)
        slices = max([0, *(len(entry.slices) for entry in entries)])
        nbytes = self.big if scattered else max(self.small, min(self.big, slices * _READ))
        return max(1, nbytes // widest)

    def make_box(self, tensor: OutputTensor, box: Box, out: Bytes) -> int:
        """Fill `out` with the region `box` of an output tensor, row-major, in the output's dtype.

        Returns how many elements became infinite in the cast to that dtype.
        """
        if isinstance(tensor, ComputedTensor):
            return self._compute(tensor, box, out)
        infinite = 0
        itemsize = dtype_of(tensor.dtype).itemsize
        for part in [piece for whole in tensor.parts for piece in whole.cut(box)]:
            entry = self.maps[part.source].entry
            inside = part.target_box.relative_to(box)
            first, nbytes = inside.flat_start(box.sizes) * itemsize, inside.numel * itemsize
            fits = part.is_plain and inside.is_contiguous_in(box.sizes)
            if fits and entry.dtype == tensor.dtype:
                self.reader.read_box(self.maps[part.source], part.source_box, out[first : first + nbytes])
                continue
            data = np.empty(inside.numel * dtype_of(entry.dtype).itemsize, np.uint8)
            self.reader.read_box(self.maps[part.source], part.source_box, data)
            if entry.dtype != tensor.dtype:
                changed = out[first : first + nbytes] if fits else np.empty(nbytes, np.uint8)
                infinite += cast_into(data, changed, entry.dtype, tensor.dtype)
                if fits:
                    continue
                data = changed
            view: Array = data.view(UNITS[itemsize]).reshape(part.unfold or part.source_box.sizes)
            view = view.transpose(part.axes or tuple(range(view.ndim)))
            target = strided(out, first, inside.sizes, row_major_strides(box.sizes), itemsize)
            target[...] = view.reshape(inside.sizes)
        return infinite

    def rows_at_once(self, tensor: ComputedTensor, most: int) -> int:
        """Return how many rows of a computed tensor to compute at once, so that memory stays limited.

        A computation takes at most `big` bytes, so that all workers can work at the same time. A formula that is not
        element-wise takes at most 16 MB. But if even `_BLOCK` rows of it take more, it takes up to half of `max_bytes`.
        The result and the first input also take at most `most` bytes each.
        """
        rows = tensor.shape[0] if tensor.shape else 1
        if tensor.cut is None:
            return rows
        step, half = rows, self.max_bytes // 2
        while step > 1:
            part = tensor.cut(0, step)
            limit = self.big if tensor.by_element else min(self.big, _MOST) if step > _BLOCK else half
            if _taken(part) <= limit and max(_nbytes(part), _nbytes(part.read[0])) <= most:
                break
            step = max(_BLOCK, (step + 1) // 2) if step > _BLOCK else (step + 1) // 2
        # Use multiples of a block, because matrix kernels may round the rows of a partial block differently.
        return step if step == rows or step < _BLOCK else step // _BLOCK * _BLOCK

    def _compute(self, tensor: ComputedTensor, box: Box, out: Bytes) -> int:
        """Fill `out` with the region `box` of a computed tensor, row-major.

        Computes only the box's rows, or the whole tensor if rows cannot be computed separately.
        """
        first = 0
        if tensor.cut is not None and box.sizes and box.sizes[0] < tensor.shape[0]:
            first = box.offsets[0]
            tensor = tensor.cut(first, first + box.sizes[0])
        if _taken(tensor) > self.max_bytes:
            raise UsageError(
                f"tensor {tensor.name!r} ({tensor.label}) needs {format_size(_taken(tensor))} at once, but "
                f"the memory limit is {format_size(self.max_bytes)}. Pass a larger --max-memory."
            )
        alone = _taken(tensor) > self.big  # several at once could exceed the memory limit
        with self._computing if alone else contextlib.nullcontext():
            if box.numel == tensor.numel:
                return self._values(tensor, out)
            made = np.empty(_nbytes(tensor), np.uint8)
            infinite = self._values(tensor, made)
        unit = UNITS[dtype_of(tensor.dtype).itemsize]
        offsets = (box.offsets[0] - first, *box.offsets[1:])
        part = tuple(slice(o, o + n) for o, n in zip(offsets, box.sizes, strict=True))
        out.view(unit).reshape(box.sizes)[...] = made.view(unit).reshape(tensor.shape)[part]
        return infinite

    def _values(self, tensor: ComputedTensor, out: Bytes) -> int:
        """Compute a whole tensor from its inputs. `compute` may overwrite the inputs."""
        found: list[Bytes] = []
        infinite = 0
        for target in tensor.inputs:
            if isinstance(target, ComputedTensor):
                data = np.empty(_nbytes(target), np.uint8)
                infinite += self._values(target, data)
                found.append(data)
                continue
            data, more = self._input(target, keep=not tensor.by_element and bool(found))
            infinite += more
            found.append(data)
        # Formulas that are not element-wise are torch's, and torch uses all cores for each.
        with contextlib.nullcontext() if tensor.by_element else self._computing:
            return infinite + tensor.compute(found, out)

    def _input(self, target: Target, *, keep: bool) -> tuple[Bytes, int]:
        """Return a whole tensor's bytes, and how many elements became infinite in a cast, which is counted only once.

        With `keep`, a small tensor is kept for the next call, and a copy is returned.
        """
        with self._keeping if keep else contextlib.nullcontext():
            if keep and id(target) in self._kept:
                return self._kept[id(target)][1].copy(), 0
            data = np.empty(_nbytes(target), np.uint8)
            infinite = self.make_box(target, Box.whole(target.shape), data)
            if keep and len(data) <= self.max_bytes // 32:
                self._kept[id(target)] = target, data.copy()
                while sum(len(kept) for _, kept in self._kept.values()) > self.max_bytes // 8:
                    self._kept.popitem(last=False)
        return data, infinite


def _nbytes(tensor: OutputTensor) -> int:
    return tensor.numel * dtype_of(tensor.dtype).itemsize


def _taken(tensor: ComputedTensor) -> int:
    """Return the memory, in bytes, for computing a tensor, including the inputs and the result."""
    inputs = sum(_nbytes(item) if isinstance(item, Target) else _taken(item) for item in tensor.inputs)
    return _nbytes(tensor) + inputs + tensor.scratch
