"""Defines tensor dtypes (name, size, kind) and the casts that an export may make. Does not need torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.errors import UnsupportedFormatError, UsageError


@dataclass(frozen=True, slots=True)
class DType:
    """A tensor dtype.

    Attributes:
        name: torch's name without "torch.": "bfloat16", "float8_e4m3fn", ...
        itemsize: Bytes per element of a torch tensor.
        kind: "float", "float8" (a float of 8 bits or fewer, which is never cast), "int", "bool" or "complex".
        safetensors: The name in a safetensors header. None if the format lacks this dtype.
        bits: Bits per number for dtypes of fewer than 8 bits. 8 for all other dtypes, even larger ones. Numbers of
            fewer than 8 bits share bytes. For such a dtype, the last dimension of torch's shape counts bytes, and the
            last dimension in a safetensors header counts numbers.
    """

    name: str
    itemsize: int
    kind: str
    safetensors: str | None
    bits: int = 8

    def in_bytes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Convert a shape in a safetensors header to torch's shape. The shapes differ only if `bits` is less than 8.

        Raises:
            UnsupportedFormatError: The last dimension does not fill whole bytes.
        """
        if self.bits == 8:
            return tuple(shape)
        if not shape or shape[-1] * self.bits % 8:
            raise UnsupportedFormatError(
                f"safetensors dtype {self.safetensors} of shape {list(shape)}: the last dimension does not fill whole "
                "bytes. safetensors cannot load that into torch either."
            )
        return (*shape[:-1], shape[-1] * self.bits // 8)

    def in_numbers(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Convert torch's shape to a shape in a safetensors header. The shapes differ only if `bits` is less than 8.

        Raises:
            UnsupportedFormatError: The bytes of the last dimension do not hold a whole number of values.
        """
        if self.bits == 8:
            return tuple(shape)
        if not shape or shape[-1] * 8 % self.bits:
            raise UnsupportedFormatError(
                f"{self.name} of shape {list(shape)}: the last dimension does not hold a whole number of "
                f"{self.bits}-bit values."
            )
        return (*shape[:-1], shape[-1] * 8 // self.bits)


# The safetensors names come from its Dtype enum, version 0.8 (safetensors/src/tensor.rs).
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float64", 8, "float", "F64"),
        DType("float32", 4, "float", "F32"),
        DType("float16", 2, "float", "F16"),
        DType("bfloat16", 2, "float", "BF16"),
        DType("float8_e4m3fn", 1, "float8", "F8_E4M3"),
        DType("float8_e5m2", 1, "float8", "F8_E5M2"),
        DType("float8_e8m0fnu", 1, "float8", "F8_E8M0"),
        DType("float8_e4m3fnuz", 1, "float8", "F8_E4M3FNUZ"),
        DType("float8_e5m2fnuz", 1, "float8", "F8_E5M2FNUZ"),
        DType("float4_e2m1fn_x2", 1, "float8", "F4", 4),
        DType("float6_e2m3fn_bytes", 1, "float8", "F6_E2M3", 6),  # our own name: torch has none; 3 bytes per 4 numbers
        DType("float6_e3m2fn_bytes", 1, "float8", "F6_E3M2", 6),
        DType("int64", 8, "int", "I64"),
        DType("int32", 4, "int", "I32"),
        DType("int16", 2, "int", "I16"),
        DType("int8", 1, "int", "I8"),
        DType("uint64", 8, "int", "U64"),
        DType("uint32", 4, "int", "U32"),
        DType("uint16", 2, "int", "U16"),
        DType("uint8", 1, "int", "U8"),
        DType("bool", 1, "bool", "BOOL"),
        DType("complex32", 4, "complex", None),
        DType("complex64", 8, "complex", "C64"),
        DType("complex128", 16, "complex", None),
    )
}
_BY_SAFETENSORS = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "bf16": "bfloat16", "fp16": "float16",
            "fp32": "float32", "fp64": "float64", "long": "int64", "int": "int32", "short": "int16"}  # fmt: skip


def dtype(name: str) -> DType:
    """Look up a dtype by torch's name, with or without "torch.", or by an alias such as "bf16".

    Raises:
        UnsupportedFormatError: The dtype is unknown.
    """
    found = DTYPES.get(name)
    if found is None:
        short = name.removeprefix("torch.")
        found = DTYPES.get(_ALIASES.get(short, short))
    if found is None:
        raise UnsupportedFormatError(f"dtype {name!r} is unknown. Known: {', '.join(DTYPES)}.")
    return found


def from_safetensors(name: str) -> DType:
    """Look up a dtype by its name in safetensors headers.

    Raises:
        UnsupportedFormatError: The name is unknown.
    """
    found = _BY_SAFETENSORS.get(name)
    if found is None:
        raise UnsupportedFormatError(f"safetensors dtype {name!r:.60} is unknown. Known: {', '.join(_BY_SAFETENSORS)}.")
    return found


def export_dtype(source: str, wanted: str) -> str:
    """Return the dtype that a tensor has after an export to `wanted`. Only fp64, fp32, fp16 and bf16 are cast.

    Integers, bools, complex numbers and 8-bit floats keep their dtype, because a cast would change their meaning.

    Args:
        source: The tensor's current dtype.
        wanted: "keep", or a float dtype such as "bf16".

    Raises:
        UsageError: `wanted` is not a float dtype of at least 16 bits.
        UnsupportedFormatError: One of the two dtypes is unknown.
    """
    if wanted == "keep":
        return source
    target = dtype(wanted)
    if target.kind != "float":
        raise UsageError(f"--dtype {wanted}: an export casts to fp64, fp32, fp16 or bf16 only.")
    return target.name if dtype(source).kind == "float" else source
