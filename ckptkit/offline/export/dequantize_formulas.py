"""Computes dequantized weights in numpy, as transformers and compressed-tensors do on a CPU, operation by operation.

`functools.partial` binds the keyword arguments of each formula. The result is a function (stored weight, inputs, first
row, out), which fills `out` with the weight in the wanted dtype and returns how many finite elements became infinite.
The stored weight may be only some rows, starting at `first`. Inputs are complete, with one exception: scales with one
row per row of the weight are sliced like the weight.

All formulas share one mechanism, `_decoded`. A quantized element is a code of a few bits, and belongs to a group that
shares a scale. The values of all possible codes are computed once for each group, and then each element is looked up.
This takes a third of the time of decoding, multiplying and rounding each element.

Nothing here imports torch, because torch alone takes more memory than a conversion.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.casts import cast, cast_into, float_values
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError
from ckptkit.formats.sources import UNITS

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Indices: TypeAlias = npt.NDArray[np.intp]

_BLOCK = 1 << 16  # codes at a time; temporaries stay in the cache

# The values of FP4 codes (E2M1) without their sign, which is in bit 3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is stored: row-major bytes.

    Attributes:
        dtype: The dtype's name in torch.
    """

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]

    def rows(self) -> npt.NDArray[np.uint8]:
        """Return the bytes as a matrix with one row for each row of the tensor. For a vector, one row per element."""
        count = math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)
        return self.data.reshape(count, len(self.data) // max(1, count))

    def numbers(self) -> Array:
        """Return the elements in the tensor's shape. Integers keep their dtype. Floats become float32 or float64."""
        if dtype_of(self.dtype).kind in ("float", "float8"):
            return float_values(self.data, self.dtype).reshape(self.shape)
        return self.data.view(self.dtype).reshape(self.shape)


Dequantization: TypeAlias = Callable[[Stored, Sequence[Stored], int, Bytes], int]


def whole(w: Stored, inputs: Sequence[Stored], first: int, out: Bytes, *, dtype: str) -> int:
    """Compute W * scale. Inputs: the tensor's scale."""
    return _scaled(w, inputs[0], np.zeros((len(w.rows()), 1), np.intp), _ONE_COLUMN, out, dtype)


def by_row(w: Stored, inputs: Sequence[Stored], first: int, out: Bytes, *, dtype: str) -> int:
    """Compute W with each row multiplied by its scale. Inputs: the scales of all rows."""
    return _scaled(w, inputs[0], np.arange(first, first + w.shape[0])[:, None], _ONE_COLUMN, out, dtype)


def by_block(w: Stored, inputs: Sequence[Stored], first: int, out: Bytes, *, high: int, wide: int, dtype: str) -> int:
    """Compute W with each block of `high` x `wide` elements multiplied by its scale.

    Inputs: scales, [..., blocks down, blocks across]. If blocks span several rows, these are the scales of the whole
        tensor; otherwise only those of the given rows.
    """
    start = first if len(w.shape) == 2 and high > 1 else 0  # in higher dimensions, only the outermost is sliced
    height, width = w.shape[-2:]
    down, across = inputs[0].shape[-2:]
    row = np.arange(math.prod(w.shape[:-1]))
    block_row = row // height * down + (start + row % height) // high
    return _scaled(w, inputs[0], block_row[:, None] * across, np.arange(width)[None] // wide, out, dtype)


def with_lower_bits(w: Stored, inputs: Sequence[Stored], first: int, out: Bytes, *, dtype: str) -> int:
    """Compute W + bits / (largest value of their dtype) * (half the distance from W to the next number).

    W is the rounded weight. Inputs: the lower bits.

    Follows `reconstruct_fp32_param` in flashoptim.
    """
    values, bits = w.numbers(), inputs[0].numbers()
    digits, least = (7, -126) if w.dtype == "bfloat16" else (10, -14)
    exponent = np.maximum(np.where(values == 0, least, np.frexp(values)[1] - 1), least) - digits - 1
    part = bits.astype(np.float32) / np.float32(np.iinfo(bits.dtype).max)
    half = exponent // 2  # in two steps, because two to the power of `exponent` may be below the smallest float32
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return _round_into(out, values + np.ldexp(np.ldexp(part, half), exponent - half), "", dtype)


def mxfp4(w: Stored, inputs: Sequence[Stored], first: int, out: Bytes, *, dtype: str) -> int:
    """Compute weights [experts, groups * 32, out] from MXFP4 blocks [experts, out, groups, 16].

    Each byte contains two FP4 codes, with the first code in the lower bits. Each value is multiplied by two to the
    power of its group's exponent. Inputs: the exponents plus 127, as bytes [experts, out, groups].

    Follows `convert_moe_packed_tensors` in transformers (integrations/mxfp4.py).
    """
    experts, rows, groups, _ = w.shape
    powers = np.ldexp(1.0, np.arange(256) - 127)  # in float64, because the last one exceeds float32's range
    exponents = inputs[0].data.reshape(-1, 1).astype(np.intp)
    made = np.empty_like(out)
    infinite = _decoded(
        w.rows(), exponents, _ONE_COLUMN, _pairs().astype(np.float64), lambda v, group: v * powers[group], made, dtype
    )
    unit = UNITS[dtype_of(dtype).itemsize]
    values = made.view(unit).reshape(experts, rows, groups * 32)
    turned = out.view(unit).reshape(experts, groups * 32, rows)
    for start in range(0, rows, _ROWS):  # by blocks of rows, because otherwise each element would be a cache miss
        turned[:, :, start : start + _ROWS] = values[:, start : start + _ROWS].transpose(0, 2, 1)
    return infinite


def integers(
    w: Stored,
    inputs: Sequence[Stored],
    first: int,
    out: Bytes,
    *,
    name: str,
    bits: int,
    shape: tuple[int, int],
    group: int,
    by_rows: bool,
    packed: bool,
    packed_zero: bool,
    has_zero: bool,
    has_shape: bool,
    dtype: str,
) -> int:
    """Compute (W - zero point) * scale for a matrix of integers, rounded to the scale's dtype.

    Follows `dequantize` in compressed-tensors (quantization/lifecycle/forward.py). Inputs: scales, then zero points and
    the shape if present.

    Args:
        name: The weight's name, for messages.
        bits: Bits per integer.
        shape: Shape of the weight.
        group: Number of columns that share a scale. 0 means one scale per row or per tensor.
        by_rows: Whether scales have one row per row of the weight.
        packed: Whether integers are packed along rows. Otherwise, each integer takes a byte.
        packed_zero: Whether zero points are packed along columns. Otherwise, each zero point takes a byte.

    Raises:
        UnsupportedFormatError: The stored shape differs from `shape`.
    """
    if has_shape and tuple(inputs[-1].numbers().tolist()) != shape:
        raise UnsupportedFormatError(
            f"{name!r} records the shape {inputs[-1].numbers().tolist()} for its weight, but its scales imply "
            f"{list(shape)}. Keep it with --dtype keep."
        )
    height, width = w.shape[0], shape[1]
    scales = inputs[0].numbers().reshape(-1)
    across = width // group if group else 1  # groups per row
    values = np.arange(1 << bits).astype(scales.dtype) - (1 << bits - 1)
    codes = _unpacked(w.rows(), bits)[:, :width] if packed else np.bitwise_xor(w.rows(), 128, dtype=np.uint8)
    codes = codes.reshape(height, across, -1)
    groups = np.arange(height * across).reshape(height, across, 1) * int(by_rows)
    zero: Array | None = None
    if has_zero and packed_zero:  # along columns
        words = np.ascontiguousarray(inputs[1].numbers().T)
        zero = _unpacked(words.view(np.uint8), bits)[:, : shape[0]].T.astype(scales.dtype) - (1 << bits - 1)
    elif has_zero:
        zero = inputs[1].numbers().astype(scales.dtype)
    if zero is not None:
        zero = (zero.reshape(shape[0], -1)[first : first + height] if by_rows else zero).reshape(-1)

    def product(values: Floats, groups: Indices) -> Floats:
        # Rounds like torch in 16 bits: differences of 8-bit integers are exact in 16 bits, and their products with
        # 16-bit scales are exact in float32.
        made: Floats = (values if zero is None else values - zero[groups]) * scales[groups]
        return made

    return _decoded(codes, groups, _ONE_COLUMN[None], values, product, out, dtype, held=inputs[0].dtype)


def fp4(w: Stored, inputs: Sequence[Stored], first: int, out: Bytes, *, group: int, dtype: str) -> int:
    """Compute W * scale for FP4 (two codes per byte, with the first code in the lower bits), rounded to bfloat16.

    Inputs: one scale for every `group` columns, in FP8 or as a byte (the exponent plus 127). For NVFP4, a second input
    is the number by which all scales are divided. Follows `decompress` in the NVFP4 and MXFP4 compressors of
    compressed-tensors.
    """
    # There are only 256 different scales, so elements are grouped by scale instead of by place.
    scales = _scales(Stored(np.arange(256, dtype=np.uint8), inputs[0].dtype, (256,)))
    if len(inputs) > 1:
        overall = inputs[1]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scales = scales / overall.numbers().reshape(())
        if not overall.shape or overall.dtype == "bfloat16":  # in this case, torch does not divide in float32
            scales = _held(scales, "bfloat16")
    codes = w.data.reshape(w.shape[0], -1, group // 2)
    groups = inputs[0].data.reshape(*codes.shape[:2], 1).astype(np.intp)
    values = _pairs().astype(scales.dtype)
    return _decoded(codes, groups, _ONE_COLUMN[None], values, lambda v, at: v * scales[at], out, dtype, held="bfloat16")


# --- what the formulas share

_ROWS = 64
_ONE_COLUMN: Indices = np.zeros((1, 1), np.intp)


def _scaled(w: Stored, scale: Stored, rows: Indices, columns: Indices, out: Bytes, dtype: str) -> int:
    """Compute W (8-bit floats) * scale in float32, rounded to `dtype`."""
    scales = _scales(scale).reshape(-1)
    values = float_values(np.arange(256, dtype=np.uint8), w.dtype)
    return _decoded(w.rows(), rows, columns, values, lambda v, group: v * scales[group], out, dtype)


def _decoded(
    codes: npt.NDArray[np.uint8],
    rows: Indices,
    columns: Indices,
    values: Floats,
    product: Callable[[Floats, Indices], Floats],
    out: Bytes,
    dtype: str,
    held: str = "",
) -> int:
    """Fill `out` with the values of the codes in `dtype`, and return how many finite elements became infinite.

    Args:
        codes: [rows, ...] the codes. A code stands for one element, or for two neighbouring elements.
        rows, columns: Arrays whose sum is the group number of each code. Both are broadcast to the shape of `codes`,
            and `rows` has as many rows as `codes`.
        values: The value of each code, as an array [codes], or the two values of each code, as an array [codes, 2].
        product: A function (values, groups) that applies each group's scale to the values. Returns float32 or float64.
        held: The dtype to which products are rounded before they are rounded to `dtype`. "" means no such rounding.
    """
    each, itemsize = values.size // len(values), dtype_of(dtype).itemsize
    if not codes.size:
        return 0
    step, infinite = max(1, _BLOCK // codes[0].size), 0
    blocks = [slice(start, start + step) for start in range(0, len(codes), step)]
    nbytes = step * codes[0].size * each * itemsize
    first, last = int(rows.min() + columns.min()), int(rows.max() + columns.max())
    if 2 * len(values) * (last + 1 - first) > codes.size:  # a larger table would cost more than it saves
        for i, block in enumerate(blocks):
            found = np.take(values, codes[block], axis=0, mode="clip").reshape(*codes[block].shape[:-1], -1)
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                found = product(found, rows[block] + columns)
            infinite += _round_into(out[i * nbytes : (i + 1) * nbytes], found, held, dtype)
        return infinite
    groups = np.arange(first, last + 1)[:, None]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        products = product(values.reshape(1, -1), groups)
    table = np.empty(products.size * itemsize, np.uint8)
    beyond = None  # how many elements of each entry became infinite
    if _round_into(table, products, held, dtype):
        beyond = (np.isfinite(products).reshape(-1) & np.isinf(float_values(table, dtype))).reshape(-1, each).sum(1)
    unit = UNITS[each * itemsize]
    table, made = table.view(unit), out.view(unit).reshape(codes.shape)
    # Narrow indices, because most of the time goes into computing them.
    index = np.uint16 if len(table) <= 1 << 16 else np.uint32
    of_rows = ((rows - first) * len(values)).astype(index)
    of_columns = (columns * len(values)).astype(index)
    places = np.empty((step, *codes.shape[1:]), np.intp)
    for block in blocks:
        at = places[: len(codes[block])]
        at[...] = of_rows[block] + of_columns + codes[block]
        # Every index is in the table, so clipping changes nothing. The default mode checks bounds, which is slow.
        np.take(table, at, out=made[block], mode="clip")
        if beyond is not None:
            infinite += int(np.take(beyond, at).sum())
    return infinite


def _round_into(out: Bytes, values: Floats, held: str, dtype: str) -> int:
    """Round values to `held`, if given, then to `dtype`. Return how many finite values became infinite."""
    infinite = 0
    if held not in ("", dtype) and dtype_of(held).itemsize == 2:
        before = np.isfinite(values)
        values = _held(values, held)
        infinite = int((before & np.isinf(values)).sum())
    raw = np.ascontiguousarray(values).reshape(-1)
    return infinite + cast_into(raw.view(np.uint8), out, raw.dtype.name, dtype)


def _held(values: Floats, dtype: str) -> Floats:
    """Return the values, rounded to `dtype`, as float32 (or as float64 if `dtype` is float64)."""
    raw = np.ascontiguousarray(values).reshape(-1)
    data, _ = cast(raw.view(np.uint8), raw.dtype.name, dtype)
    return float_values(data, dtype).reshape(values.shape)


def _unpacked(stored: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return the unsigned integers (2, 4 or 8 bits) in each row of little-endian words, lowest bits first."""
    codes, width = stored, 8
    while width > bits:  # halve the width: the upper half of each byte becomes a byte of its own
        width //= 2
        pairs = codes.astype(np.uint16)
        pairs |= pairs << (8 - width)
        pairs &= ((1 << width) - 1) * 0x101
        codes = pairs.view(np.uint8)
    return codes


def _scales(scale: Stored) -> Floats:
    """Return scales as float32.

    Scales stored as bytes are exponents of two (E8M0). The largest is infinite in float32.
    """
    if scale.dtype != "uint8":
        return scale.numbers().astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        powers: Floats = np.ldexp(1.0, scale.numbers().astype(np.int64) - 127).astype(np.float32)
    return powers


@functools.cache
def _pairs() -> npt.NDArray[np.float32]:
    """Return the two values of each of the 256 bytes, [256, 2]. A byte contains two FP4 codes."""
    codes = np.array((*E2M1, *(-value for value in E2M1)), np.float32)
    byte = np.arange(256)
    return np.stack((codes[byte & 15], codes[byte >> 4]), axis=-1)
