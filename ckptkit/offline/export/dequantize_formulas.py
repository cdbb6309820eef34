"""Computes dequantized weights in numpy, as transformers and compressed-tensors do on a CPU, operation by operation.

Each formula is a function (stored weight, inputs, first row) -> weight in the wanted dtype. The stored weight may be
only some rows, starting at `first`. Inputs are complete, except that scales with one row per row of the weight are
sliced like the weight.

Nothing here imports torch, because torch alone takes more memory than a conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError
from ckptkit.offline.copying.casts import cast_into, float_values
from ckptkit.offline.copying.plan import Computed

__all__ = ["E2M1", "Dequantization", "Stored", "by_block", "by_row", "fp4", "integers", "mxfp4", "whole"]

Array = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Indices: TypeAlias = npt.NDArray[np.intp]

_BLOCK = 1 << 16  # elements at a time; temporaries stay in the cache

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

    def bytes_of_rows(self) -> npt.NDArray[np.uint8]:
        """Return the bytes as [rows, bytes per row]. A scalar is one row."""
        return self.data.reshape(self.shape[0] if self.shape else 1, -1)

    def numbers(self) -> Array:
        """Return the elements in the tensor's shape. Integers keep their dtype; floats become float32 or float64."""
        if dtype_of(self.dtype).kind in ("float", "float8"):
            return float_values(self.data, self.dtype).reshape(self.shape)
        return self.data.view(self.dtype).reshape(self.shape)


Dequantization: TypeAlias = Callable[[Stored, Sequence[Stored], int], Computed]


def whole(dtype: str) -> Dequantization:
    """Return the formula W * scale. Inputs: the tensor's scale."""

    def scaled(w: Stored, inputs: Sequence[Stored], first: int) -> Computed:
        return _scaled(w, _factors(inputs[0]), lambda rows: np.zeros((1, 1), np.intp), dtype)

    return scaled


def by_row(dtype: str) -> Dequantization:
    """Return the formula that multiplies each row of W by its scale. Inputs: the scales of all rows."""

    def scaled(w: Stored, inputs: Sequence[Stored], first: int) -> Computed:
        return _scaled(
            w, _factors(inputs[0]), lambda rows: np.arange(first + rows.start, first + rows.stop)[:, None], dtype
        )

    return scaled


def by_block(high: int, wide: int, dtype: str) -> Dequantization:
    """Return the formula that multiplies each block of `high` x `wide` elements by its scale.

    Inputs: scales, [..., blocks down, blocks across]. If blocks span several rows, these are all scales; otherwise,
    only the given rows' scales.
    """

    def scaled(w: Stored, inputs: Sequence[Stored], first: int) -> Computed:
        start = first if len(w.shape) == 2 and high > 1 else 0  # in higher dimensions, only the outermost is sliced
        height, width = w.shape[-2:]
        scales = _factors(inputs[0])
        down, across = scales.shape[-2:]
        columns = np.arange(width) // wide

        def of_rows(rows: slice) -> Indices:
            at = np.arange(rows.start, rows.stop)
            at = at // height * down + (start + at % height) // high
            if at[0] == at[-1]:
                at = at[:1]
            index: Indices = at[:, None] * across + columns
            return index

        return _scaled(w, scales, of_rows, dtype)

    return scaled


def mxfp4(dtype: str) -> Dequantization:
    """Return the formula that turns MXFP4 blocks [experts, out, groups, 16] into weights [experts, groups * 32, out].

    Each byte contains two FP4 codes, the lower one first. Each value is multiplied by two to the power of its group's
    exponent. Inputs: the exponents plus 127, as bytes [experts, out, groups].

    Follows `convert_moe_packed_tensors` in transformers (integrations/mxfp4.py).
    """

    def unpacked(w: Stored, inputs: Sequence[Stored], first: int) -> Computed:
        experts, out, groups, _ = w.shape
        # Two weights depend on only two bytes, so looking them up is many times as fast as computing them.
        table, beyond = _pairs_by_exponent(dtype)
        rows, exponents = w.data.reshape(-1, 16), inputs[0].data.reshape(-1, 1)
        made = np.empty(rows.shape, table.dtype)
        infinite = 0
        step = _BLOCK // 4 // 16
        for start in range(0, len(rows), step):  # indices are eight times as wide as these bytes
            index = exponents[start : start + step].astype(np.intp) << 8
            index = index | rows[start : start + step]
            np.take(table, index, out=made[start : start + step], mode="clip")
            if beyond is not None:
                infinite += int(np.take(beyond, index).sum())
        unit = _UNITS[dtype_of(dtype).itemsize]
        values = made.view(unit).reshape(experts, out, groups * 32)
        turned = np.empty((experts, groups * 32, out), unit)
        for start in range(0, out, _ROWS):  # by blocks of rows, because otherwise each element would be a cache miss
            turned[:, :, start : start + _ROWS] = values[:, start : start + _ROWS].transpose(0, 2, 1)
        return turned.reshape(-1).view(np.uint8), infinite

    return unpacked


def integers(
    name: str,
    bits: int,
    shape: tuple[int, int],
    *,
    group: int,
    by_rows: bool,
    packed: bool,
    packed_zero: bool,
    has_zero: bool,
    has_shape: bool,
    dtype: str,
) -> Dequantization:
    """Return the formula (W - zero point) * scale for a matrix of integers, rounded to the scale's dtype.

    Follows `dequantize` in compressed-tensors (quantization/lifecycle/forward.py). Inputs: scales, then zero points and
    the shape if present.

    Args:
        name: The weight's name, for messages.
        bits: Bits per integer.
        shape: Shape of the weight.
        group: Number of columns that share a scale; 0 for one scale per row or per tensor.
        by_rows: Whether scales have one row per row of the weight.
        packed: Whether integers are packed along rows. Otherwise each takes a byte.
        packed_zero: Whether zero points are packed along columns. Otherwise each takes a byte.
    """

    def unpacked(w: Stored, inputs: Sequence[Stored], first: int) -> Computed:
        if has_shape and tuple(inputs[-1].numbers().tolist()) != shape:
            raise UnsupportedFormatError(
                f"{name!r} records the shape {inputs[-1].numbers().tolist()} for its weight, but its scales imply "
                f"{list(shape)}. Keep it with --dtype keep."
            )
        height, width, held = w.shape[0], shape[1], inputs[0].dtype
        scale = inputs[0].numbers()
        scale = scale if group else scale.reshape(-1, 1) if by_rows else scale.reshape(1, 1)
        zero = None
        if has_zero:
            zero = _integers(inputs[1], bits, shape[0], columns=True) if packed_zero else inputs[1].numbers()
            zero = zero.astype(scale.dtype)
            zero = zero[first : first + height] if group else _per_row(zero, first, height, shape[0])
        numbers = _integers(w, bits, width) if packed else w.numbers()
        result = _Result(height * width, dtype)
        for rows in _blocks(height, width):
            # This is exact even in 16 bits: differences of 8-bit integers, and their products in float32.
            made = numbers[rows].astype(scale.dtype)
            made = made.reshape(len(made), -1, group) if group else made
            if zero is not None:
                of_rows = zero if len(zero) == 1 and not group else zero[rows]
                made -= of_rows[:, :, None] if group else of_rows
            of_rows = scale[rows] if len(scale) > 1 or group else scale
            made *= of_rows[:, :, None] if group else of_rows
            result.add(made, held)
        return result.done()

    return unpacked


def fp4(group: int, dtype: str) -> Dequantization:
    """Return the formula W * scale for FP4 (two codes per byte, the lower one first), rounded to bfloat16.

    Inputs: one scale for every `group` columns, in FP8 or as a byte (the exponent plus 127). For NVFP4, a second input
    is the number by which all scales are divided. Follows `decompress` in the NVFP4 and MXFP4 compressors of
    compressed-tensors.
    """

    def unpacked(w: Stored, inputs: Sequence[Stored], first: int) -> Computed:
        exponents = inputs[0].dtype == "uint8"
        scale = _powers()[inputs[0].numbers()] if exponents else inputs[0].numbers()
        if len(inputs) > 1:
            overall = inputs[1]
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                scale = scale / overall.numbers().reshape(())
            if not overall.shape or overall.dtype == "bfloat16":  # in this case, torch does not divide in float32
                scale = _held(scale, "bfloat16")
        height, width = w.shape[0], w.shape[1] * 2
        result = _Result(height * width, dtype)
        codes = w.data.reshape(w.shape)
        for rows in _blocks(height, width):
            pairs = np.empty(codes[rows].shape, np.complex64)
            np.take(_pairs(), codes[rows], out=pairs, mode="clip")
            made = pairs.view(np.float32).astype(scale.dtype, copy=False).reshape(len(pairs), -1, group)
            with np.errstate(invalid="ignore", over="ignore"):
                made *= scale[rows][:, :, None]
            result.add(made, "bfloat16")
        return result.done()

    return unpacked


# --- what the formulas share

_ROWS = 64
_UNITS: dict[int, type[np.unsignedinteger[Any]]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}


class _Result:
    """A result's bytes in its dtype, filled from the first element to the last.

    Attributes:
        infinite: How many finite elements became infinite.
    """

    def __init__(self, numel: int, dtype: str) -> None:
        self._dtype, self._itemsize = dtype, dtype_of(dtype).itemsize
        self._data = np.empty(numel * self._itemsize, np.uint8)
        self._at = self.infinite = 0

    def add(self, values: Floats, held: str = "") -> None:
        """Add the next elements, in float32 or float64. They are first rounded to `held`, if given."""
        if dtype_of(held or self._dtype).itemsize == 2 and held not in ("", self._dtype):
            before = np.isfinite(values)
            values = _held(values, held)
            self.infinite += int((before & np.isinf(values)).sum())
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.infinite += cast_into(raw, self.room(values.size), values.dtype.name, self._dtype)

    def room(self, numel: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the next `numel` elements, for the caller to fill."""
        start, self._at = self._at, self._at + numel * self._itemsize
        return self._data[start : self._at]

    def done(self) -> Computed:
        return self._data, self.infinite


def _scaled(w: Stored, scales: Array, of_rows: Callable[[slice], Indices], dtype: str) -> Computed:
    """Return W times its scales, computed in float32 and rounded to `dtype`.

    Args:
        of_rows: Returns the index of the scale of each of these rows' elements: [rows or 1, columns or 1].
    """
    rows, scales = w.bytes_of_rows() if len(w.shape) < 3 else w.data.reshape(-1, w.shape[-1]), scales.reshape(-1)
    result = _Result(rows.size, dtype)
    products = _Products(scales, w.dtype, dtype)
    for part in _blocks(*rows.shape):
        index = of_rows(part)
        codes, bounds = rows[part], (int(index.min()), int(index.max()) + 1) if index.size else (0, 0)
        if products.are_few(bounds, codes.size):
            result.infinite += products.of(codes, index, bounds, result.room(codes.size))
            continue
        values = float_values(rows[part].reshape(-1), w.dtype).reshape(-1, rows.shape[1])
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            values *= scales[index]
        result.add(values)
    return result.done()


class _Products:
    """All products of an 8-bit float's 256 values and some scales, in the wanted dtype.

    Looking up a product takes a third of the time of decoding, multiplying and rounding.
    """

    def __init__(self, scales: Array, dtype: str, target: str) -> None:
        self._scales, self._dtype, self._target = scales, dtype, target
        self._bounds = (0, 0)  # the scales in the table: [first, stop)
        self._table = self._beyond = np.empty(0)

    def are_few(self, bounds: tuple[int, int], numel: int) -> bool:
        """Return whether a table of these scales' products costs little in comparison with `numel` look-ups."""
        return dtype_of(self._dtype).kind == "float8" and 4 * 256 * (bounds[1] - bounds[0]) <= max(numel, _BLOCK)

    def of(self, codes: Array, index: Indices, bounds: tuple[int, int], out: npt.NDArray[np.uint8]) -> int:
        """Write the products of codes [rows, columns] and their scales; return how many became infinite.

        Args:
            index: Index of each code's scale: [rows or 1, columns or 1].
            bounds: The range [first, stop) of these indices.
        """
        if not codes.size:
            return 0
        if bounds != self._bounds:
            self._make(*bounds)
        at = (index - bounds[0] << 8) + codes
        np.take(self._table, at, out=out.view(self._table.dtype).reshape(codes.shape), mode="clip")
        return int(np.take(self._beyond, at).sum()) if self._beyond.any() else 0

    def _make(self, first: int, stop: int) -> None:
        self._bounds = first, stop
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            values = float_values(np.arange(256, dtype=np.uint8), self._dtype) * self._scales[first:stop, None]
        data = np.empty(values.size * dtype_of(self._target).itemsize, np.uint8)
        cast_into(values.reshape(-1).view(np.uint8), data, "float32", self._target)
        self._beyond = np.isfinite(values).reshape(-1) & np.isinf(float_values(data, self._target))
        self._table = data.view(_UNITS[dtype_of(self._target).itemsize])


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _held(values: Floats, dtype: str) -> Floats:
    """Return the values rounded to `dtype`, as float32 (float64 if `dtype` is float64)."""
    raw = np.ascontiguousarray(values).reshape(-1)
    data = np.empty(raw.size * dtype_of(dtype).itemsize, np.uint8)
    cast_into(raw.view(np.uint8), data, raw.dtype.name, dtype)
    return float_values(data, dtype).reshape(values.shape)


def _integers(words: Stored, bits: int, count: int, *, columns: bool = False) -> Array:
    """Unpack 32-bit words. Return the first `count` integers of each row (or column) as int8.

    An integer has 2, 4 or 8 bits. The lowest bits of a word come first.
    """
    made: Array
    if columns:
        turned = np.ascontiguousarray(words.numbers().T)
        made = _integers(Stored(turned.reshape(-1).view(np.uint8), words.dtype, turned.shape), bits, count).T
        return made
    stored = words.bytes_of_rows()  # little-endian, like every machine that torch runs on
    if bits == 8:
        made = (stored ^ 128).view(np.int8)
        return made[:, :count]
    codes = [stored >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    made = np.stack(codes, axis=-1).view(np.int8).reshape(len(stored), -1)[:, :count]
    made -= np.int8(1 << bits - 1)
    return made


def _per_row(values: Array, first: int, height: int, rows: int) -> Array:
    """Return the zero points of some rows as a column; if all rows share one zero point, return only that."""
    values = values.reshape(-1, 1)
    return values[first : first + height] if len(values) == rows and rows > 1 else values[:1]


def _factors(scale: Stored) -> Array:
    """Return scales as float32. Bytes are exponents of two (E8M0)."""
    return _powers()[scale.numbers()] if scale.dtype == "uint8" else scale.numbers().astype(np.float32, copy=False)


@functools.cache
def _powers() -> npt.NDArray[np.float32]:
    """Return 2 ** (code - 127) for each of the 256 codes in a byte. The last is infinite in float32."""
    with np.errstate(over="ignore"):
        powers: npt.NDArray[np.float32] = np.ldexp(1.0, np.arange(256) - 127).astype(np.float32)
    return powers


@functools.cache
def _pairs() -> npt.NDArray[np.complex64]:
    """Return, for each byte of two FP4 codes, both values as the two halves of a complex number."""
    codes = np.array((*E2M1, *(-value for value in E2M1)), np.float32)
    byte = np.arange(256)
    return np.stack((codes[byte & 15], codes[byte >> 4]), axis=-1).view(np.complex64).reshape(-1)


@functools.cache
def _pairs_by_exponent(dtype: str) -> tuple[Array, npt.NDArray[np.uint8] | None]:
    """Return a table of pairs of values in a dtype, and how many values of each pair are infinite in that dtype.

    The index is (group exponent + 127) * 256 + byte. The second result is None if no value is infinite.
    """
    values = np.ldexp(_pairs().view(np.float32).astype(np.float64), np.arange(-127, 129)[:, None]).reshape(-1)
    data = np.empty(values.size * dtype_of(dtype).itemsize, np.uint8)
    cast_into(values.view(np.uint8), data, "float64", dtype)
    unit = {4: np.uint32, 8: np.uint64, 16: np.complex128}[2 * dtype_of(dtype).itemsize]
    infinite = np.isinf(float_values(data, dtype)).reshape(-1, 2).sum(axis=1).astype(np.uint8)
    return data.view(unit), infinite if infinite.any() else None
