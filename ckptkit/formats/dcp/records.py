"""Builds the records of a DCP data file. Each record is a torch.save zip around a tensor's bytes, built without torch.

A record is the smallest zip that `torch.load` accepts: `data.pkl`, `version` and the storage `data/0`, uncompressed and
without timestamps. The bytes around the tensor (the frame) therefore depend only on the dtype and sizes. A file is a
sequence of records. Sources for the format: torch/serialization.py (`_save`, `_load`) and the zip specification
(APPNOTE 6.3.10).
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.box import row_major_strides
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.digests import crc32
from ckptkit.formats.pickles.allowed import STORAGE_CLASSES
from ckptkit.formats.pickles.zip import central_header, end_records, local_header

ALIGNMENT = 64  # of large payloads, so that they can be mapped, or copied by the kernel
STREAMED = 64 << 10  # from this size on, the CRC follows the payload, so that one pass can write both
_ALIGNED = 4 << 10
_MAX32 = 0xFFFFFFFF
_ROOT = b"a/"  # torch accepts any name before the slash; a short one keeps records small


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """The bytes around a payload. A record consists of `prefix`, `nbytes` bytes of payload, and `suffix(crc)`.

    Attributes:
        prefix: The bytes before the payload. Unless `streamed`, `head` must fill in the payload's CRC.
        nbytes: Size of the payload in bytes.
        length: Size of the whole record in bytes.
        alignment: The record must start at a multiple of this number in its file, so that the payload is aligned.
        streamed: True if the CRC is stored only after the payload.
        crc_at: Position of the CRC in `prefix`.
        tail: The end of the record, split where the CRC is inserted.
    """

    prefix: bytes
    nbytes: int
    length: int
    alignment: int
    streamed: bool
    crc_at: int
    tail: tuple[bytes, bytes]

    def head(self, crc: int) -> bytes:
        """Return the bytes before the payload, given the payload's CRC-32. If `streamed`, the CRC-32 is ignored."""
        if self.streamed:
            return self.prefix
        return self.prefix[: self.crc_at] + crc.to_bytes(4, "little") + self.prefix[self.crc_at + 4 :]

    def suffix(self, crc: int) -> bytes:
        """Return the bytes after the payload, given the payload's CRC-32."""
        value = crc.to_bytes(4, "little")
        if not self.streamed:
            return self.tail[0] + value + self.tail[1]
        wide = self.nbytes >= _MAX32
        sizes = struct.pack("<QQ" if wide else "<II", self.nbytes, self.nbytes)
        return b"PK\x07\x08" + value + sizes + self.tail[0] + value + self.tail[1]

    def record(self, payload: bytes | bytearray | memoryview) -> bytes:
        """Return the whole record for a payload that is in memory."""
        crc = crc32(payload)
        return b"".join((self.head(crc), payload, self.suffix(crc)))


@functools.lru_cache(maxsize=65536)
def frame_tensor(dtype: str, sizes: tuple[int, ...]) -> RecordFrame:
    """Return the frame that makes a tensor's row-major bytes readable by `torch.load(weights_only=True)`.

    Args:
        dtype: torch's name for the dtype, without "torch.".
    """
    kind = dtype_of(dtype)
    pickled, nbytes = _pickle_tensor(kind.name, sizes, kind.itemsize), math.prod(sizes) * kind.itemsize
    streamed, alignment = nbytes >= STREAMED, ALIGNMENT if nbytes >= _ALIGNED else 1
    pickle_crc, version = crc32(pickled), b"3\n"
    head = local_header(_ROOT + b"data.pkl", pickle_crc, len(pickled)) + pickled
    version_at = len(head)
    head += local_header(_ROOT + b"version", crc32(version), len(version)) + version
    storage_at, name = len(head), _ROOT + b"data/0"
    flags = 0x0008 if streamed else 0  # bit 3: the CRC is in a descriptor after the data
    unpadded = storage_at + len(local_header(name, 0, nbytes))
    padding = -(unpadded + 4) % alignment if unpadded % alignment else None
    head += local_header(name, 0, nbytes, flags=flags, padding=padding)
    directory = central_header(_ROOT + b"data.pkl", pickle_crc, len(pickled), 0)
    directory += central_header(_ROOT + b"version", crc32(version), len(version), version_at)
    crc_in_directory = len(directory) + 16
    directory += central_header(name, 0, nbytes, storage_at, flags=flags)
    descriptor = (24 if nbytes >= _MAX32 else 16) if streamed else 0
    tail = directory + end_records(3, len(directory), len(head) + nbytes + descriptor)
    return RecordFrame(
        prefix=head,
        nbytes=nbytes,
        length=len(head) + nbytes + descriptor + len(tail),
        alignment=alignment,
        streamed=streamed,
        crc_at=storage_at + 14,
        tail=(tail[:crc_in_directory], tail[crc_in_directory + 4 :]),
    )


def frame_object(value: Any) -> bytes:
    """Return the torch.save record of a value that `is_plain` accepts.

    Uses pickle protocol 2, because `torch.load(weights_only=True)` refuses the framing of later protocols.
    """
    body, directory = bytearray(), bytearray()
    for name, data in ((_ROOT + b"data.pkl", pickle.dumps(value, protocol=2)), (_ROOT + b"version", b"3\n")):
        directory += central_header(name, crc32(data), len(data), len(body))
        body += local_header(name, crc32(data), len(data)) + data
    return bytes(body + directory) + end_records(2, len(directory), len(body))


def is_plain(value: Any) -> bool:
    """Return whether a value consists only of None, bools, ints, floats, strings, bytes, lists, tuples and dicts.

    The types must match exactly, because an instance of a subclass could have attributes that would be lost.
    """
    kind = type(value)
    if kind in (bool, int, float, str, bytes, type(None)):
        return kind is not int or -(1 << 1023) < value < 1 << 1023  # LONG1 holds at most 255 bytes
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return False


def _pickle_tensor(name: str, sizes: tuple[int, ...], itemsize: int) -> bytes:
    numel = math.prod(sizes)
    storage = STORAGE_CLASSES.get(name)
    if storage:  # not _rebuild_tensor_v2, whose other arguments would take 36 more bytes per record
        parts = [b"\x80\x02ctorch._utils\n_rebuild_tensor\n((U\x07storage", f"ctorch\n{storage}\n".encode()]
    else:
        parts = [b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n((U\x07storage", b"ctorch.storage\nUntypedStorage\n"]
    # SHORT_BINSTRING (U): a Python 2 string with a one-byte length
    parts += [b"U\x010", b"U\x03cpu", pickled_int(numel if storage else numel * itemsize), b"tQK\x00"]
    parts += [_int_tuple(sizes), _int_tuple(row_major_strides(sizes))]
    if not storage:
        parts.append(b"\x89ccollections\nOrderedDict\n)R")  # requires_grad=False, no backward hooks
        parts.append(b"ctorch\n" + name.encode() + b"\n")
    parts.append(b"tR.")
    return b"".join(parts)


def pickled_int(value: int) -> bytes:
    """Return the opcode and the bytes of an integer below 2**63."""
    if 0 <= value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _int_tuple(values: tuple[int, ...]) -> bytes:
    body = b"".join(map(pickled_int, values))
    if len(values) > 3:
        return b"(" + body + b"t"
    return body + (b")", b"\x85", b"\x86", b"\x87")[len(values)]
