"""Casts between float dtypes in numpy with torch's rounding (to nearest, ties to even). Does not need torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_EIGHT_BITS = {  # (fraction bits, exponent bias)
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
    "float8_e8m0fnu": (0, 127),
}
_BLOCK = 1 << 16  # elements per block; temporaries stay in the cache
_BEYOND_BFLOAT16 = np.array(0x7F7F8000, np.uint32).view(np.float32)[()]  # the smallest float32 that rounds to infinity


def is_cast(source: str, target: str) -> bool:
    """Return whether the dtypes differ, so that the elements must be cast.

    Raises:
        UnsupportedFormatError: The dtypes differ, and one of them is not float64, float32, float16 or bfloat16.
    """
    if source == target:
        return False
    for name in (source, target):
        if name not in _NUMPY and name != "bfloat16":
            raise UnsupportedFormatError(f"a cast from {source} to {target} is not supported: only floats are cast.")
    return True


def cast_into(source: Bytes, target: Bytes, source_dtype: str, target_dtype: str) -> int:
    """Cast the elements of `source` and store them in `target`. Both buffers are contiguous and contain whole elements.

    float64 is cast to 16 bits through float32, as torch does.

    Returns:
        How many finite elements became infinite because the target's dtype cannot represent them.
    """
    if source_dtype == target_dtype:
        target[:] = source
        return 0
    into = source.view(np.uint16 if source_dtype == "bfloat16" else _NUMPY[source_dtype])
    out = target.view(np.uint16 if target_dtype == "bfloat16" else _NUMPY[target_dtype])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return sum(
            _cast_block(into[start : start + _BLOCK], out[start : start + _BLOCK], source_dtype, target_dtype)
            for start in range(0, len(into), _BLOCK)
        )


def cast(data: Bytes, source_dtype: str, target_dtype: str) -> tuple[Bytes, int]:
    """Return the cast elements of `data`, and how many finite elements became infinite. See `cast_into`."""
    if source_dtype == target_dtype:
        return data, 0
    out = np.empty(len(data) // dtype_of(source_dtype).itemsize * dtype_of(target_dtype).itemsize, np.uint8)
    return out, cast_into(data, out, source_dtype, target_dtype)


def float_values(data: Bytes, dtype: str) -> Array:
    """Return the elements of `data` as float32, or as float64 if `dtype` is float64."""
    if dtype == "float64":
        return data.view(np.float64)
    if dtype in _EIGHT_BITS:
        values: Array = np.empty(len(data), np.float32)
        # Every code is in the table, so clipping changes nothing. The default mode="raise" makes a copy to check
        # bounds, and is five times as slow.
        return np.take(_float8_values(dtype), data, out=values, mode="clip")
    return _to_float32(data.view(np.uint16 if dtype == "bfloat16" else _NUMPY[dtype]), dtype)


def split_pairs(data: Bytes, out: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Convert bfloat16 elements to float32: first all elements at even positions, then all elements at odd positions.

    Writes to `out` and returns it. The number of elements must be even. Two elements are read as one 32-bit word, which
    takes half as long as a conversion in order.
    """
    words = data.view(np.uint32)  # little-endian: the first element is in the low half
    even, odd = out.view(np.uint32).reshape(2, -1)
    np.left_shift(words, 16, out=even)
    np.bitwise_and(words, 0xFFFF0000, out=odd)
    return out


def round_pairs(halves: npt.NDArray[np.float32], out: Bytes) -> int:
    """Round `halves`, a result of `split_pairs`, to bfloat16, and write the elements to `out` in their original order.

    Returns:
        How many finite elements became infinite.
    """
    rounded, infinite = _rounded_to_bfloat16(halves)
    even, odd = rounded.reshape(2, -1)
    even >>= 16
    odd &= 0xFFFF0000
    np.bitwise_or(even, odd, out=out.view(np.uint32))
    return infinite


def _cast_block(source: Array, out: Array, source_dtype: str, target_dtype: str) -> int:
    wide = _to_float32(source, source_dtype)
    infinite = 0
    if source_dtype == "float64":
        infinite = int(np.isinf(wide).sum()) - int(np.isinf(source).sum())
    if target_dtype == "bfloat16":
        rounded, beyond = _rounded_to_bfloat16(wide)
        out[...] = rounded.view(np.uint16)[1::2]  # the upper halves
        return infinite + beyond
    if target_dtype == "float16":
        return infinite + _round_to_float16(wide, out.view(np.uint16))
    out[...] = wide
    return infinite


def _to_float32(source: Array, source_dtype: str) -> Array:
    if source_dtype == "bfloat16":
        bits = source.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if source_dtype == "float16":
        return np.take(_float16_values(), source.view(np.uint16))
    return source.astype(np.float32, copy=False)


@functools.cache
def _float16_values() -> Array:
    """Return all float16 values as float32. A table lookup is four times as fast as numpy's conversion."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values.view(np.uint32)[np.isnan(values)] |= 0x00400000  # make NaNs quiet, as hardware casts do
    return values


@functools.cache
def _float8_values(dtype: str) -> Array:
    """Return, as float32, the value of each of the 256 bytes in an 8-bit float dtype."""
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":
        values = np.ldexp(1.0, code - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    bits, bias = _EIGHT_BITS[dtype]
    exponent, fraction = (code & 0x7F) >> bits, (code & (1 << bits) - 1) / (1 << bits)
    values = np.where(exponent > 0, 1 + fraction, 2 * fraction) * np.ldexp(1.0, exponent - bias)
    values = np.where(code & 0x80, -values, values)
    if dtype.endswith("fnuz"):
        values[0x80] = np.nan
    elif dtype.endswith("fn"):
        values[[0x7F, 0xFF]] = np.nan
    else:  # as IEEE 754 does
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[(code & 0x7F) > 0x7C] = np.nan
    narrow: Array = values.astype(np.float32)
    return narrow


def _rounded_to_bfloat16(source: Array) -> tuple[npt.NDArray[np.uint32], int]:
    """Return 32-bit words whose upper halves are the rounded elements, and how many elements became infinite."""
    bits: npt.NDArray[np.uint32] = source.view(np.uint32)
    rounded = np.right_shift(bits, 16, dtype=np.uint32)
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    if source.max() < _BEYOND_BFLOAT16 and source.min() > -_BEYOND_BFLOAT16:  # also False if there is a NaN
        return rounded, 0
    # c10::BFloat16 maps every NaN to 0x7FC0; rounding could turn a NaN into infinity.
    rounded[np.isnan(source)] = 0x7FC00000
    return rounded, int(((np.abs(source) >= _BEYOND_BFLOAT16) & np.isfinite(source)).sum())


def _round_to_float16(source: Array, out: Array) -> int:
    bits: npt.NDArray[np.uint32] = source.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude - np.uint32(0x38000000)  # exponent bias 127 -> 15; small values wrap around (fixed below)
    odd = rounded >> 13
    odd &= 1
    rounded += odd
    rounded += 0xFFF
    rounded >>= 13
    small = magnitude < 0x38800000  # below 2**-14: subnormal
    if small.any():
        # Adding 0.5 makes the FPU round at float16's last subnormal bit, ties to even.
        rounded[small] = (magnitude[small].view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    large = magnitude >= 0x477FF000  # 65520 and above
    infinite = 0
    if large.any():
        nan = magnitude > 0x7F800000
        rounded[large] = 0x7C00
        rounded[nan] = 0x7E00 | (magnitude[nan] >> 13) & 0x3FF
        infinite = int((large & (magnitude < 0x7F800000)).sum())
    sign = bits >> 16
    sign &= 0x8000
    rounded |= sign
    out[...] = rounded
    return infinite
