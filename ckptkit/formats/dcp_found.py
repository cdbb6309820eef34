"""What is found of an item of a `.distcp` file, and whether it is what `.metadata` says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Codec
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats._torch_records import StoredTensor
from ckptkit.formats.dcp_items import FRONT_BYTES, TAIL_BYTES
from ckptkit.formats.objects import zstd_chunks
from ckptkit.formats.safetensors_parse import SafetensorsHeader
from ckptkit.formats.signs import flipped_crc, sign_codec

if TYPE_CHECKING:
    from ckptkit.formats.dcp_locate import LocatedSlices

__all__ = ["Found", "check_tensor", "decoded_ends", "in_header"]

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Found:
    """The columns that are being found, one row an item of the batch."""

    starts: Int64
    nbytes: Int64
    crc: npt.NDArray[np.uint64]
    crc_starts: Int64
    crc_nbytes: Int64
    checked: npt.NDArray[np.bool_]
    templates: Int64  # index of the parsed pickle of a framed item; -1 for others, which were checked one by one
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    codecs: dict[int, Codec] = field(default_factory=dict)

    @classmethod
    def empty(cls, n: int) -> Found:
        zeros = [np.zeros(n, np.int64) for _ in range(4)]
        return cls(
            zeros[0], zeros[1], np.zeros(n, np.uint64), zeros[2], zeros[3], np.zeros(n, np.bool_), np.full(n, -1)
        )

    def put(self, row: int, tensor: StoredTensor) -> None:
        storage = tensor.storage
        begin, crc = storage.start, storage.crc32
        if tensor.marks:
            codec = sign_codec(tensor.dtype, tensor.marks)
            if codec is None:
                raise UnsupportedFormatError(
                    f"{storage.path}: at byte {begin} lies a {tensor.dtype} that is still to be negated. Save what "
                    "tensor.resolve_neg() returns."
                )
            self.codecs[row] = Codec(codec, begin, storage.nbytes)
            begin, crc = 0, None if crc is None else flipped_crc(codec, crc, storage.nbytes)
        self.starts[row], self.nbytes[row] = begin + tensor.offset * tensor.itemsize, tensor.nbytes
        self.crc_starts[row], self.crc_nbytes[row] = begin, storage.nbytes
        if crc is not None:
            self.crc[row], self.checked[row] = crc, True
        if not tensor.contiguous:
            self.strides[row] = tensor.strides


def in_header(
    header: SafetensorsHeader, offsets: dict[str, tuple[int, ...]], path: str, member: LocatedSlices, at: int
) -> tuple[int, int]:
    found = header.tensors.get(member.name)
    box = tuple(member.offsets[at].tolist()), tuple(member.sizes[at].tolist())
    if found is None:
        raise IncompleteCheckpointError(f"{path}: tensor {member.name!r:.80} is not in it, though .metadata says so.")
    stored = offsets.get(member.name, (0,) * len(found.shape)), found.shape
    if stored != box:
        raise IncompleteCheckpointError(
            f"{path}: tensor {member.name!r:.80} has only its part at {list(stored[0])} of sizes {list(stored[1])}, "
            f"not the one at {list(box[0])} of sizes {list(box[1])}. torch keeps one part a file in this format: the "
            "rest was lost when it was saved."
        )
    if found.dtype != member.dtype:
        raise CorruptCheckpointError(
            f"{path}: tensor {member.name!r:.80} is {found.dtype}, .metadata says {member.dtype}."
        )
    return found.start, found.nbytes


def check_tensor(tensor: StoredTensor, member: LocatedSlices, at: int, label: str) -> None:
    sizes = tuple(member.sizes[at].tolist())
    if tensor.dtype != member.dtype or tensor.shape != sizes:
        raise CorruptCheckpointError(
            f"{label} holds {tensor.dtype} {list(tensor.shape)}, but .metadata says {member.dtype} {list(sizes)}. "
            "Files of two saves may have been mixed."
        )


def decoded_ends(packed: bytes, limit: int, *, file: str) -> tuple[memoryview, memoryview, int]:
    """Return the first and last bytes of what zstd decodes to, and its length; at most `limit`."""
    front, tail, size = bytearray(), b"", 0
    for chunk in zstd_chunks(packed, limit, file=file):
        front += chunk[: max(0, FRONT_BYTES - len(front))]
        tail = (tail + chunk)[-TAIL_BYTES:]
        size += len(chunk)
    return memoryview(bytes(front)), memoryview(tail), size
