"""The `data.pkl` of a state dict as torch.save writes it, opcode by opcode, without torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptkit.catalog.dtypes import dtype as dtype_of

__all__ = ["pickle_state_dict"]

Described = tuple[str, str, tuple[int, ...], tuple[int, ...], int]  # name, dtype, sizes, strides, nbytes

# Storage classes that torch.save names; every other dtype is an UntypedStorage and names its dtype.
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}


def pickle_state_dict(tensors: Sequence[Described]) -> bytes:
    """Return the pickle of a dict of tensors; tensor i lies whole, row-major, in storage i."""
    out = bytearray(b"\x80\x02}(")
    for key, (name, dtype, sizes, strides, nbytes) in enumerate(tensors):
        out += _text(name) + _tensor(str(key), dtype, sizes, strides, nbytes)
    return bytes(out + b"u.")


def _tensor(key: str, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], nbytes: int) -> bytes:
    storage = _STORAGES.get(dtype)
    count = nbytes // dtype_of(dtype).itemsize if storage else nbytes
    parts = [
        b"ctorch._utils\n_rebuild_tensor_v%d\n(" % (2 if storage else 3),
        b"(" + _text("storage"),
        f"ctorch\n{storage}\n".encode() if storage else b"ctorch.storage\nUntypedStorage\n",
        _text(key) + _text("cpu") + _int(count) + b"tQ",  # the persistent id of the storage
        _int(0) + _tuple(sizes) + _tuple(strides),
        b"\x89ccollections\nOrderedDict\n)R",  # requires_grad=False, no backward hooks
    ]
    if not storage:
        parts.append(f"ctorch\n{dtype}\n".encode())
    return b"".join((*parts, b"tR"))


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"
