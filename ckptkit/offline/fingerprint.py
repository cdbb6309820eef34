"""A fingerprint of a tensor's bits that is additive over its parts, so that any sharding gives the same one.

F1 = sum of bits, F2 = sum of bits times the row-major index in the whole tensor, both modulo 2^64
(bits: an element as an unsigned number). It finds every flipped bit, swapped rows and shards at the wrong
place; it is no cryptographic digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides

__all__ = ["Fingerprint", "fingerprint_of"]

Bytes = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]

_MODULUS = 1 << 64
_BLOCK = 1 << 14  # elements at a time: what is widened to 64 bits stays in the cache
_RAMP = np.arange(_BLOCK, dtype=np.uint64)
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The sums (f1, f2) of a part of a tensor, or of all of it. `a + b`: of parts that share no element."""

    f1: int = 0
    f2: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.f1 + other.f1) % _MODULUS, (self.f2 + other.f2) % _MODULUS)


def fingerprint_of(data: Bytes, box: Box, shape: tuple[int, ...], itemsize: int) -> Fingerprint:
    """Return the part that a box contributes to the fingerprint of a tensor of this shape.

    Args:
        data: The bytes of the box, row-major.
        itemsize: Of an element. Elements of 16 bytes count as two of 8.
    """
    if itemsize == 16:
        box, shape, itemsize = Box((*box.offsets, 0), (*box.sizes, 2)), (*shape, 2), 8
    if box.numel == 0:
        return Fingerprint()
    bits = data.view(_UNITS[itemsize])
    strides = row_major_strides(shape)
    base = box.flat_start(shape)
    dim = _outer_dims(box, shape)
    run = Box((0,) * (box.ndim - dim), box.sizes[dim:]).numel  # elements that follow one another in the tensor
    if dim == 0 or run >= _BLOCK:
        return _long_runs(bits, base, box.sizes[:dim], strides[:dim], run)
    return _short_runs(bits.reshape(-1, run), base, box.sizes[:dim], strides[:dim])


def _outer_dims(box: Box, shape: tuple[int, ...]) -> int:
    """How many leading dimensions to step through: the rest of the box is one run of the tensor."""
    dim = box.ndim
    while dim > 0 and Box(box.offsets[dim - 1 :], box.sizes[dim - 1 :]).is_contiguous_in(shape[dim - 1 :]):
        dim -= 1
    return dim


def _starts(base: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> UInt64:
    """The index of the first element of each run."""
    starts = np.array([base], np.uint64)
    for size, stride in zip(sizes, strides, strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        starts = (starts[:, None] + steps).reshape(-1)
    return starts


def _long_runs(
    bits: npt.NDArray[Any], base: int, sizes: tuple[int, ...], strides: tuple[int, ...], run: int
) -> Fingerprint:
    f1 = f2 = 0
    for i, start in enumerate(_starts(base, sizes, strides).tolist()):
        for at in range(0, run, _BLOCK):
            block = bits[i * run + at : i * run + min(at + _BLOCK, run)].astype(np.uint64)
            total = int(block.sum())
            f1 += total
            f2 += (start + at) * total + int(np.dot(block, _RAMP[: len(block)]))
    return Fingerprint(f1 % _MODULUS, f2 % _MODULUS)


def _short_runs(rows: npt.NDArray[Any], base: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Fingerprint:
    starts = _starts(base, sizes, strides)
    f1 = f2 = 0
    step = max(1, _BLOCK // rows.shape[1])
    ramp = _RAMP[: rows.shape[1]]
    for at in range(0, len(rows), step):
        block = rows[at : at + step].astype(np.uint64)
        totals = block.sum(axis=1, dtype=np.uint64)
        f1 += int(totals.sum())
        f2 += int(np.dot(totals, starts[at : at + step])) + int(np.dot(block, ramp).sum())
    return Fingerprint(f1 % _MODULUS, f2 % _MODULUS)
