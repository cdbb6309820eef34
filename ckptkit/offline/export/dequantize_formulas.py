"""Computes dequantized weights as transformers and compressed-tensors do on a CPU, operation by operation.

Each formula is a function (stored weight, inputs, first row) -> weight in the wanted dtype, as in `merge_formulas`. The
stored weight may be only some rows, starting at `first`. Inputs are complete, but scales with one row per row of the
weight are sliced like it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import UnsupportedFormatError
from ckptkit.offline.export.merge_formulas import Formula

if TYPE_CHECKING:
    import torch

__all__ = ["E2M1", "by_block", "by_row", "fp4", "integers", "mxfp4", "whole"]

_BLOCK = 1 << 14  # elements at a time: temporaries stay in the cache

# The values of FP4 codes (E2M1) without their sign, which is bit 3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def whole(dtype: str) -> Formula:
    """Return W * scale. Inputs: one scale for the tensor."""

    def scaled(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        return _rounded(w.float() * _factors(inputs[0]).reshape(()), dtype)

    return scaled


def by_row(dtype: str) -> Formula:
    """Return W with each row multiplied by its scale. Inputs: the scales of all rows."""

    def scaled(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        return _rounded(w.float() * _factors(inputs[0]).reshape(-1, 1)[first : first + w.shape[0]], dtype)

    return scaled


def by_block(high: int, wide: int, dtype: str) -> Formula:
    """Return W with each block of `high` x `wide` elements multiplied by its scale.

    Inputs: [..., blocks down, blocks across]. If blocks have several rows, the inputs are all scales, otherwise those
    of the given rows.
    """

    def scaled(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        import torch

        scale = _factors(inputs[0])
        start = first if w.ndim == 2 and high > 1 else 0  # with more dimensions, only the outermost is sliced
        rows = torch.arange(start, start + w.shape[-2]) // high
        columns = torch.arange(w.shape[-1]) // wide
        return _rounded(w.float() * scale[..., rows, :][..., columns], dtype)

    return scaled


def mxfp4(dtype: str) -> Formula:
    """Return [experts, groups * 32, out] from blocks [experts, out, groups, 16]. Inputs: [experts, out, groups].

    Each byte of a block has two FP4 codes, the lower one first. An input byte is the exponent of a group plus 127; the
    group's values are multiplied by two to the power of the exponent. As `convert_moe_packed_tensors` of transformers
    (integrations/mxfp4.py).
    """

    def unpacked(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        import torch

        # Two weights depend on only two bytes. Looking them up is many times faster than computing them.
        kind = getattr(torch, dtype)
        codes = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=kind)
        code = torch.arange(256)
        table = torch.stack((codes[code & 15], codes[code >> 4]), dim=-1).repeat(256, 1, 1)
        exponents = torch.arange(256, dtype=torch.int32).reshape(-1, 1, 1) - 127
        torch.ldexp(table, exponents, out=table)
        scales = inputs[0].unsqueeze(-1)
        made = _looked_up(table.reshape(1 << 16, 2), scales, w).reshape(*w.shape[:2], -1)
        return made.transpose(1, 2)

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
) -> Formula:
    """Return (W - zero point) * scale for a matrix of integers, computed in the scale's dtype.

    As `dequantize` of compressed-tensors (quantization/lifecycle/forward.py). Inputs: scales, then zero points and the
    shape if present.

    Args:
        name: For messages.
        bits: Bits per integer.
        shape: Shape of the weight.
        group: Number of columns that share a scale; 0 for one scale per row, or one in all.
        by_rows: Whether scales have one row per row of the weight.
        packed: Whether integers are packed along rows; otherwise each is a byte.
        packed_zero: Whether zero points are packed along columns; otherwise each is a byte.
    """

    def unpacked(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        scale, rows = inputs[0], slice(first, first + w.shape[0])
        if has_shape and tuple(inputs[-1].tolist()) != shape:
            raise UnsupportedFormatError(
                f"{name!r} records the shape {inputs[-1].tolist()} for its weight, but its scales imply "
                f"{list(shape)}. Keep it with --dtype keep."
            )
        made = (_unpacked(w, bits, shape[1]) if packed else w).to(scale.dtype)
        made = made.reshape(len(w), -1, group) if group else made
        zero = inputs[1] if has_zero else None
        if zero is not None and packed_zero:
            zero = _unpacked(zero.T, bits, shape[0]).T
        if zero is not None:
            made -= _of_rows(zero, rows, shape[0], bool(group)).to(scale.dtype)
        made *= scale.unsqueeze(-1) if group else scale.reshape(-1, 1) if by_rows else scale.reshape(())
        return _rounded(made.flatten(start_dim=1), dtype)

    return unpacked


def fp4(group: int, dtype: str) -> Formula:
    """Return W * scale for FP4 (two codes per byte, the lower one first), rounded to bfloat16 like compressed-tensors.

    Inputs: a scale for each `group` columns, in FP8 or as a byte (the exponent plus 127). For NVFP4 also a number that
    divides all scales. Follows `decompress` of compressed-tensors' NVFP4 and MXFP4 compressors.
    """

    def unpacked(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        import torch

        scale = inputs[0].unsqueeze(-1)
        exponents = scale.dtype == torch.uint8
        scale = 2.0 ** (scale.to(torch.int32) - 127).to(torch.bfloat16) if exponents else scale.to(torch.bfloat16)
        if len(inputs) > 1:
            scale = scale / inputs[1]
        codes = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=scale.dtype)
        values = torch.stack((codes[(w & 15).int()], codes[(w >> 4).int()]), dim=-1).reshape(w.shape[0], -1, group)
        return _rounded((values * scale).to(torch.bfloat16).flatten(start_dim=1), dtype)

    return unpacked


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` integers of each row of 32-bit words (2, 4 or 8 bits each, lowest first), as int8."""
    import torch

    stored = words.contiguous().view(torch.uint8)  # little endian, as on every machine that torch supports
    if bits == 8:
        return (stored ^ 128).view(torch.int8)[:, :count]
    codes = torch.stack([stored >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-1)
    return codes.view(torch.int8).flatten(start_dim=1)[:, :count] - (1 << bits - 1)


def _of_rows(values: torch.Tensor, rows: slice, height: int, grouped: bool) -> torch.Tensor:
    """Return the scales or zero points of some rows, shaped to broadcast over all columns or over each group."""
    if grouped:
        return values[rows].unsqueeze(-1)
    return values.reshape(-1, 1)[rows] if values.numel() == height and height > 1 else values.reshape(())


def _looked_up(table: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table at the indices high * 256 + low, which are bytes."""
    import torch

    unit = {4: np.uint32, 8: np.uint64, 16: np.complex128}[table.shape[-1] * table.element_size()]
    entries: npt.NDArray[Any] = table.view(torch.uint8).numpy().reshape(-1).view(unit)
    out: npt.NDArray[Any] = np.empty(low.numel(), unit)
    highs, lows = high.reshape(-1, high.shape[-1]).numpy(), low.reshape(-1, low.shape[-1]).numpy()
    step = max(1, _BLOCK // lows.shape[-1])
    for start in range(0, len(lows), step):  # in steps: indices take eight times the memory of the bytes
        index = highs[start : start + step].astype(np.intp) << 8
        index = (index | lows[start : start + step]).reshape(-1)
        at = start * lows.shape[-1]
        np.take(entries, index, out=out[at : at + len(index)], mode="clip")
    return torch.from_numpy(out.view(np.uint8)).view(table.dtype)


def _factors(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32. Bytes are exponents of two (E8M0)."""
    import torch

    return (scale.to(torch.float32) - 127.0).exp2() if scale.dtype == torch.uint8 else scale.to(torch.float32)


def _rounded(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    import torch

    made: torch.Tensor = tensor.to(getattr(torch, dtype))
    return made
