"""One `torch.save` file of a state dict, framed without torch: a zip of stored records, tensors last.

`torch.load(weights_only=True)` reads it, memory-mapped too. Source of the format: torch/serialization.py
(`_save`, `_load`) and the zip specification (APPNOTE 6.3.10); ZIP64 wherever an offset or a size needs it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.catalog.box import row_major_strides
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.formats.dcp.records import ALIGNMENT
from ckptkit.formats.hf.header import TensorToWrite

__all__ = ["TorchFile", "encode_torch_file", "pickle_state_dict"]

# The `data.pkl` of a state dict as torch.save writes it, opcode by opcode, without torch.


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


_ROOT = b"archive/"
_WIDE = 0xFFFFFFFF  # from here on a number stands in a ZIP64 field, and this in its place
_MARK = 0xFFFFFFFF
_MANY = 0xFFFF
_DATE = 0x21  # 1980-01-01
_PADDING_ID = 0x4246


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file laid out.

    Attributes:
        literals: (start, bytes) of all that is no tensor.
        starts: Byte offset of each tensor.
        crcs: For each tensor the two places of its CRC-32: local header and central directory.
        nbytes: Of the whole file.
    """

    literals: tuple[tuple[int, bytes], ...]
    starts: tuple[int, ...]
    crcs: tuple[tuple[int, int], ...]
    nbytes: int


def encode_torch_file(tensors: Sequence[TensorToWrite]) -> TorchFile:
    """Lay out the file of a state dict; every tensor has a storage of its own, aligned to 64 bytes."""
    members: list[tuple[bytes, int, int, int]] = []  # name, crc, nbytes, offset of the local header
    literals: list[tuple[int, bytes]] = []
    head = bytearray()
    shapes = [(t.name, t.dtype, t.shape, row_major_strides(t.shape), t.nbytes) for t in tensors]
    for short, data in (
        (b"data.pkl", pickle_state_dict(shapes)),
        (b"byteorder", b"little"),
        (b"version", b"3\n"),
    ):
        members.append((_ROOT + short, zlib.crc32(data), len(data), len(head)))
        head += _local(*members[-1][:3]) + data
    literals.append((0, bytes(head)))
    at = len(head)
    starts: list[int] = []
    first_crcs: list[int] = []
    for i, tensor in enumerate(tensors):
        name = _ROOT + b"data/%d" % i
        header = _local(name, 0, tensor.nbytes, aligned_from=at)
        literals.append((at, header))
        members.append((name, 0, tensor.nbytes, at))
        first_crcs.append(at + 14)
        starts.append(at + len(header))
        at += len(header) + tensor.nbytes
    directory = bytearray()
    second_crcs = []
    for name, crc, nbytes, offset in members:
        second_crcs.append(at + len(directory) + 16)
        directory += _central(name, crc, nbytes, offset)
    literals.append((at, bytes(directory) + _end(len(members), len(directory), at)))
    nbytes = at + len(literals[-1][1])
    crcs = tuple(zip(first_crcs, second_crcs[len(members) - len(tensors) :], strict=True))
    return TorchFile(tuple(literals), tuple(starts), crcs, nbytes)


def _local(name: bytes, crc: int, nbytes: int, *, aligned_from: int | None = None) -> bytes:
    """A local header; with `aligned_from`, its own offset, it is padded so that the data behind it is aligned."""
    wide = nbytes >= _WIDE
    extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if wide else b""
    if aligned_from is not None:
        room = -(aligned_from + 30 + len(name) + len(extra) + 4) % ALIGNMENT
        extra += struct.pack("<HH", _PADDING_ID, room) + bytes(room)
    size = _narrow(nbytes)
    version = 45 if wide else 20
    fields = (0x04034B50, version, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + name + extra


def _central(name: bytes, crc: int, nbytes: int, offset: int) -> bytes:
    wide = [value for value in (nbytes, nbytes, offset) if value >= _WIDE]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version, size = 45 if wide else 20, _narrow(nbytes)
    fields = (0x02014B50, version, version, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    tail = struct.pack("<HHHII", 0, 0, 0, 0, _narrow(offset))
    return struct.pack("<IHHHHHHIIIHH", *fields) + tail + name + extra


def _end(entries: int, directory_size: int, directory_at: int) -> bytes:
    end = b""
    if entries >= _MANY or directory_size >= _WIDE or directory_at >= _WIDE:
        fields = (0x06064B50, 44, 45, 45, 0, 0, entries, entries, directory_size, directory_at)
        end = struct.pack("<IQHHIIQQQQ", *fields)
        end += struct.pack("<IIQI", 0x07064B50, 0, directory_at + directory_size, 1)
    count = min(entries, _MANY)
    size, at = _narrow(directory_size), _narrow(directory_at)
    return end + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, size, at, 0)


def _narrow(value: int) -> int:
    return _MARK if value >= _WIDE else value
