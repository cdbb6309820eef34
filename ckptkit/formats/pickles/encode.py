"""Writes a state dict as a torch.save file, without torch. The file is a zip of uncompressed members, tensors last.

`torch.load(weights_only=True)` can load the file, also memory-mapped. Sources for the format: torch/serialization.py
(`_save`, `_load`) and the zip specification (APPNOTE 6.3.10). Uses ZIP64 if an offset or a size requires it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptkit.catalog.box import row_major_strides
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.digests import crc32
from ckptkit.formats.dcp.records import ALIGNMENT
from ckptkit.formats.hf.header import FileLayout, TensorToWrite
from ckptkit.formats.pickles.allowed import STORAGE_CLASSES
from ckptkit.formats.pickles.zip import central_header, end_records, local_header

# --- a state dict's `data.pkl` as torch.save writes it, opcode by opcode


def _tensor(key: str, tensor: TensorToWrite) -> bytes:
    storage = STORAGE_CLASSES.get(tensor.dtype)
    count = tensor.nbytes // dtype_of(tensor.dtype).itemsize if storage else tensor.nbytes
    parts = [
        b"ctorch._utils\n_rebuild_tensor_v%d\n(" % (2 if storage else 3),
        b"(" + _text("storage"),
        f"ctorch\n{storage}\n".encode() if storage else b"ctorch.storage\nUntypedStorage\n",
        _text(key) + _text("cpu") + _int(count) + b"tQ",  # the storage's persistent id
        _int(0) + _tuple(tensor.shape) + _tuple(row_major_strides(tensor.shape)),
        b"\x89ccollections\nOrderedDict\n)R",  # requires_grad=False, no backward hooks
    ]
    if not storage:
        parts.append(f"ctorch\n{tensor.dtype}\n".encode())
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


def encode_torch_file(tensors: Sequence[TensorToWrite]) -> FileLayout:
    """Lay out the torch.save file of a state dict. Each tensor has its own storage, aligned to 64 bytes.

    A tensor's CRC-32 is stored in the local header and in the central directory.
    """
    members: list[tuple[bytes, int, int, int]] = []  # name, crc, nbytes, local header's offset
    literals: list[tuple[int, bytes]] = []
    head = bytearray()
    pickled = bytearray(b"\x80\x02}(")
    for key, tensor in enumerate(tensors):  # tensor i is the whole of storage i
        pickled += _text(tensor.name) + _tensor(str(key), tensor)
    for short, data in (
        (b"data.pkl", bytes(pickled + b"u.")),
        (b"byteorder", b"little"),
        (b"version", b"3\n"),
    ):
        members.append((_ROOT + short, crc32(data), len(data), len(head)))
        head += local_header(*members[-1][:3]) + data
    literals.append((0, bytes(head)))
    at = len(head)
    starts: list[int] = []
    first_crcs: list[int] = []
    for i, tensor in enumerate(tensors):
        name = _ROOT + b"data/%d" % i
        padding = -(at + len(local_header(name, 0, tensor.nbytes)) + 4) % ALIGNMENT
        header = local_header(name, 0, tensor.nbytes, padding=padding)
        literals.append((at, header))
        members.append((name, 0, tensor.nbytes, at))
        first_crcs.append(at + 14)
        starts.append(at + len(header))
        at += len(header) + tensor.nbytes
    directory = bytearray()
    second_crcs = []
    for name, crc, nbytes, offset in members:
        second_crcs.append(at + len(directory) + 16)
        directory += central_header(name, crc, nbytes, offset)
    literals.append((at, bytes(directory) + end_records(len(members), len(directory), at)))
    nbytes = at + len(literals[-1][1])
    places = zip(first_crcs, second_crcs[len(members) - len(tensors) :], strict=True)
    crcs = tuple((at, start, t.nbytes) for at, start, t in zip(places, starts, tensors, strict=True))
    return FileLayout(tuple(literals), tuple(starts), nbytes, crcs)
