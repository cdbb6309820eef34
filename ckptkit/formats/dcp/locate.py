"""Where the bytes of each tensor lie inside its item of a `.distcp` file: found on demand, many items at once.

An item is a torch.save zip of its own, about 1.5 KB longer than the tensor in it; a file may instead be one
safetensors blob. For a zip, its first kilobyte (pickle, header of the storage) and its last (the directory,
with the CRC-32 of the storage) are read; neighbours share a read.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Codec, Role, SliceArray
from ckptkit.digests import CRC, crc32
from ckptkit.errors import (
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.dcp.columns import TensorColumns
from ckptkit.formats.dcp.host_bytes import flipped_crc, sign_codec
from ckptkit.formats.hf.dcp_shards import saved_offsets
from ckptkit.formats.hf.header import SafetensorsHeader, read_header
from ckptkit.formats.pickles.objects import zstd_chunks
from ckptkit.formats.pickles.tensors import OpaqueTensorError, Storage, StoredTensor, TensorRebuilder
from ckptkit.formats.pickles.walk import loads
from ckptkit.formats.pickles.zip import (
    LOCAL_HEADER,
    Layout,
    Member,
    ShortTailError,
    TorchArchive,
    check_byteorder,
    memory_store,
    parse_directory,
    read_archive,
    storage_of,
)
from ckptkit.storage.store import ReadInto, Store

if TYPE_CHECKING:
    pass

__all__ = [
    "Items",
    "LocatedSlices",
    "item_batches",
    "Found",
    "check_tensor",
    "find_opaque",
    "decoded_ends",
    "in_header",
    "Frame",
    "FramedItems",
    "FRONT_BYTES",
    "TAIL_BYTES",
    "ItemEnds",
    "ItemParser",
]

# Items of `.distcp` files that are framed alike, parsed together as columns of bytes.
#
# Items of one torch version differ only in numbers: checksums, sizes, offsets. One of them, parsed in full by
# `_torch_zip`, becomes the frame; for the others numpy compares all bytes that must be the same, and checks the
# numbers by the same rules. What does not fit the frame is parsed in full as well.


Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]

_CENTRAL = 46  # bytes of a directory entry before its name: APPNOTE.TXT 4.3.12
_CRC, _PACKED, _SIZE, _HEADER = 16, 20, 24, 42  # offsets in a directory entry
_END64, _LOCATOR, _END = 56, 20, 22
_ELSEWHERE = 0xFFFFFFFF  # the number is in a zip64 field
_CHECKED = ("data.pkl", "data/0")  # members whose checksum and size may differ from item to item
_LITTLE = b"little"
_VARYING = (".data/serialization_id",)


@dataclass(frozen=True, slots=True)
class FramedItems:
    """What the columns say of the items that fit; offsets from the start of each item.

    Attributes:
        fits: [n] whether the item was parsed; the other columns hold for those rows only.
        starts, nbytes, crc: [n] of the storage.
        pickles: [n] the item's pickle, as an index into `distinct`.
        distinct: The different pickles, bytes.
    """

    fits: npt.NDArray[np.bool_]
    starts: Int64
    nbytes: Int64
    crc: Int64
    pickles: Int64
    distinct: list[bytes]


class Frame:
    """The bytes that framed items share, taken from one of them that was parsed in full.

    Args:
        tail: Its last bytes, the whole zip directory among them.
        front: Its first bytes, up to the header of the storage.
        members: By name below the archive's folder, in directory order.
        directory: Where the directory begins in the item.
        length: Bytes of the item.
    """

    def __init__(self, front: bytes, tail: bytes, members: Mapping[str, Member], directory: int, length: int) -> None:
        self.nbytes = length - directory
        self.names = list(members)
        self.members = list(members.values())
        self._tail = np.frombuffer(tail[-self.nbytes :], np.uint8)
        self._same = np.ones(self.nbytes, bool)
        self._entries: list[int] = []
        pos = 0
        for name, member in members.items():
            self._entries.append(pos)
            self._vary(pos + _HEADER, 4)
            if name in _CHECKED:
                self._vary(pos + _PACKED, 8)
            if name in _CHECKED or name in _VARYING:
                self._vary(pos + _CRC, 4)
            pos += _CENTRAL + len(member.name.encode())
        self._end64 = pos
        self._end = pos
        self._wide = self.nbytes - pos > _END  # torch always writes the zip64 end records, other writers where needed
        if self._wide:
            self._vary(pos + 48, 8)  # offset of the directory
            self._vary(pos + _END64 + 8, 8)  # offset of the zip64 end record
            self._end += _END64 + _LOCATOR
        self._vary(self._end + 16, 4)  # offset of the directory
        self._pickle = self._local(front, "data.pkl")
        header = self._pickle[0]
        self._pickle_start = len(header) + int(_u2(header[None, :], np.array([28]))[0])
        self._storage = self._local(front, "data/0")
        self._order = self._local(front, "byteorder") if "byteorder" in members else None

    @classmethod
    def of(cls, front: bytes, tail: bytes, members: Mapping[str, Member], directory: int, length: int) -> Frame | None:
        """Return the frame of an item; None where it is not laid out as torch's own writer does."""
        names = {"data.pkl", "data/0"}
        entries = sum(_CENTRAL + len(m.name.encode()) for m in members.values())
        ends = (entries + _END, entries + _END64 + _LOCATOR + _END)
        if not names <= members.keys() or length - directory not in ends:
            return None
        headers = [m.header for m in members.values()]
        if members["data.pkl"].header != 0 or headers != sorted(headers) or len(tail) < length - directory:
            return None
        read = [members[name] for name in (*names, "byteorder") if name in members]
        if any(m.header + LOCAL_HEADER.size + len(m.name.encode()) > len(front) for m in read):
            return None
        return cls(front, tail, members, directory, length)

    def _vary(self, pos: int, n: int) -> None:
        self._same[pos : pos + n] = False

    def _local(self, front: bytes, name: str) -> tuple[UInt8, npt.NDArray[np.bool_]]:
        """The bytes of a member's local header, and which of them must be the same."""
        member = self.members[self.names.index(name)]
        size = LOCAL_HEADER.size + len(member.name.encode())
        same = np.ones(size, bool)
        same[10:26] = False  # time, checksum, sizes: zero, or repeated from the directory
        same[28:30] = name == "data.pkl"  # the length of the padding
        return np.frombuffer(front[member.header : member.header + size], np.uint8), same

    def parse(self, front: UInt8, tail: UInt8, lengths: Int64) -> FramedItems:
        """Parse the items with these first and last bytes, [n, any] and [n, self.nbytes].

        Where an item is shorter than its row of `front`, what comes after its end is never looked at: every member is
        checked to lie before the directory.
        """
        n = len(lengths)
        fits = (tail[:, self._same] == self._tail[self._same]).all(axis=1)
        numbers = {name: self._numbers(tail, entry) for name, entry in zip(self.names, self._entries, strict=True)}
        fits &= self._in_order(numbers, tail, lengths)
        fits &= (numbers["data.pkl"][2] == 0) & self._matches(front, np.zeros(n, np.int64), self._pickle)
        header = numbers["data/0"][2]
        size = len(self._storage[0])
        fits &= header + size <= front.shape[1]
        at = np.where(fits, header, 0)
        fits &= self._matches(front, at, self._storage)
        starts = at + size + _u2(front, at + 28)
        if self._order is not None:
            at = np.where(fits, numbers["byteorder"][2], 0)
            fits &= self._is_little(front, at, self._limit("byteorder", numbers, tail))
        crc, nbytes, _ = numbers["data/0"]
        fits &= starts + nbytes <= self._limit("data/0", numbers, tail)
        fits &= self._pickle_start + numbers["data.pkl"][1] <= self._limit("data.pkl", numbers, tail)
        pickles, distinct = self._pickles(front, numbers["data.pkl"], fits)
        return FramedItems(fits, starts, nbytes, crc, pickles, distinct)

    def _numbers(self, tail: UInt8, entry: int) -> tuple[Int64, Int64, Int64]:
        """(CRC-32, bytes, header) of one member; its two sizes must agree, else the size is made impossible."""
        packed, size, header = (_u4(tail, entry + at) for at in (_PACKED, _SIZE, _HEADER))
        plain = (packed == size) & (size != _ELSEWHERE) & (header != _ELSEWHERE)
        return _u4(tail, entry + _CRC), np.where(plain, size, 1 << 40), header

    def _directory(self, tail: UInt8) -> Int64:
        return _u8(tail, self._end64 + 48) if self._wide else _u4(tail, self._end + 16)

    def _in_order(
        self, numbers: Mapping[str, tuple[Int64, Int64, Int64]], tail: UInt8, lengths: Int64
    ) -> npt.NDArray[np.bool_]:
        """Members one after the other, then the directory, then the end records, which agree."""
        fits = np.ones(len(lengths), bool)
        stop = np.zeros(len(lengths), np.int64)
        for name, member in zip(self.names, self.members, strict=True):
            _, nbytes, header = numbers[name]
            fits &= header >= stop
            stop = header + LOCAL_HEADER.size + len(member.name.encode()) + nbytes
        directory = self._directory(tail)
        fits &= (stop <= directory) & (directory == lengths - self.nbytes)
        if self._wide:
            fits &= _u8(tail, self._end64 + _END64 + 8) == lengths - (_END64 + _LOCATOR + _END)
            narrow = _u4(tail, self._end + 16)
            fits &= (narrow == directory) | (narrow == _ELSEWHERE)
        return fits

    def _matches(self, front: UInt8, at: Int64, local: tuple[UInt8, npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
        wanted, same = local
        found = front[np.arange(len(at))[:, None], at[:, None] + np.flatnonzero(same)]
        return np.asarray((found == wanted[same]).all(axis=1))

    def _limit(self, name: str, numbers: Mapping[str, tuple[Int64, Int64, Int64]], tail: UInt8) -> Int64:
        """Where a member must have ended: at the header of the next one, or at the directory."""
        following = self.names.index(name) + 1
        return numbers[self.names[following]][2] if following < len(self.names) else self._directory(tail)

    def _is_little(self, front: UInt8, at: Int64, limit: Int64) -> npt.NDArray[np.bool_]:
        assert self._order is not None
        size = len(self._order[0])
        inside = at + size <= front.shape[1]
        at = np.where(inside, at, 0)
        start = at + size + _u2(front, at + 28)
        inside &= (start + len(_LITTLE) <= np.minimum(limit, front.shape[1])) & self._matches(front, at, self._order)
        start = np.where(inside, start, 0)
        found = front[np.arange(len(at))[:, None], start[:, None] + np.arange(len(_LITTLE))]
        return np.asarray(inside & (found == np.frombuffer(_LITTLE, np.uint8)).all(axis=1))

    def _pickles(
        self, front: UInt8, numbers: tuple[Int64, Int64, Int64], fits: npt.NDArray[np.bool_]
    ) -> tuple[Int64, list[bytes]]:
        """Which pickle each item has; items whose pickle does not match its CRC-32 are taken out of `fits`."""
        crc, nbytes, _ = numbers
        start = self._pickle_start
        fits &= (nbytes > 0) & (start + nbytes <= front.shape[1])
        pickles = np.zeros(len(crc), np.int64)
        distinct: list[bytes] = []
        for length in sorted(set(nbytes[fits].tolist())):
            rows = np.flatnonzero(fits & (nbytes == length))
            block = np.ascontiguousarray(front[rows, start : start + length])
            values, inverse = np.unique(block.view(f"V{length}").reshape(-1), return_inverse=True)
            raw = [value.tobytes() for value in values]
            sums = np.array([crc32(data) for data in raw], np.int64)
            fits[rows] &= sums[inverse] == crc[rows]
            pickles[rows] = inverse + len(distinct)
            distinct += raw
        return pickles, distinct


def _u4(table: UInt8, column: int) -> Int64:
    return np.ascontiguousarray(table[:, column : column + 4]).view("<u4").reshape(-1).astype(np.int64)


def _u8(table: UInt8, column: int) -> Int64:
    return np.ascontiguousarray(table[:, column : column + 8]).view("<i8").reshape(-1).astype(np.int64)


def _u2(table: UInt8, columns: Int64) -> Int64:
    rows = np.arange(len(table))
    low, high = table[rows, columns].astype(np.int64), table[rows, columns + 1].astype(np.int64)
    return low + (high << 8)


# One item of a `.distcp` file: its two ends read together with those of its neighbours, and parsed.


Int32 = npt.NDArray[np.int32]

FRONT_BYTES = 1024
TAIL_BYTES = 1024
_JOIN = 4096  # bytes between two ranges that are read rather than skipped
_TURN = 128  # reads
_SLOW_S = 100e-6  # for one of them: longer than a thread costs


class ItemEnds:
    """The first and last bytes of a block of items, read with few reads."""

    def __init__(self, store: Store, paths: Sequence[str], files: Int32, starts: Int64, lengths: Int64) -> None:
        fronts = np.minimum(lengths, FRONT_BYTES)
        tails = np.minimum(lengths, TAIL_BYTES)
        # Two ranges an item, in file order; near ones become one read.
        low = np.stack([starts, starts + lengths - tails], axis=1).reshape(-1)
        high = np.stack([starts + fronts, starts + lengths], axis=1).reshape(-1)
        file = np.repeat(files, 2)
        # The furthest byte so far, in each file for itself: files are laid end to end for the running maximum.
        shift = np.cumsum(np.r_[False, file[1:] != file[:-1]]) * (int(high.max(initial=0)) + 1)
        stops = np.maximum.accumulate(high + shift) - shift
        breaks = np.r_[True, (file[1:] != file[:-1]) | (low[1:] - stops[:-1] > _JOIN) | (low[1:] < low[:-1])]
        heads = np.flatnonzero(breaks)
        lasts = np.r_[heads[1:], len(low)] - 1
        span_low, span_high = low[heads], np.maximum.reduceat(high, heads)
        span_stops = np.cumsum(span_high - span_low)
        moved = (span_stops - span_high)[np.cumsum(breaks) - 1]  # from the file to where it is held
        self._low, self._high = low + moved, high + moved
        held = int(span_stops[-1]) if len(span_stops) else 0
        self._held = np.empty(held + FRONT_BYTES, np.uint8)
        self._held[held:] = 0
        view = self._held.data
        begins = (span_stops - (span_high - span_low)).tolist()
        columns = (file[lasts].tolist(), span_low.tolist(), begins, span_stops.tolist())
        _read(store, [ReadInto(paths[f], start, view[a:b]) for f, start, a, b in zip(*columns, strict=True)])

    def front(self, i: int) -> memoryview:
        """The first bytes of an item."""
        return self._held[self._low[2 * i] : self._high[2 * i]].data

    def tail(self, i: int) -> memoryview:
        """The last bytes of an item."""
        return self._held[self._low[2 * i + 1] : self._high[2 * i + 1]].data

    def fronts(self, rows: Int64) -> UInt8:
        """The first bytes of items, [n, FRONT_BYTES]; after the end of a shorter one come any."""
        return self._windows(self._low[2 * rows], FRONT_BYTES)

    def tails(self, rows: Int64, nbytes: int) -> UInt8:
        """The last `nbytes` bytes of items that have as many, [n, nbytes]."""
        return self._windows(self._high[2 * rows + 1] - nbytes, nbytes)

    def _windows(self, begins: Int64, nbytes: int) -> UInt8:
        every = np.lib.stride_tricks.as_strided(self._held, (len(self._held) - nbytes + 1, nbytes), (1, 1))
        windows: UInt8 = every[begins]
        return windows


def _read(store: Store, reads: Sequence[ReadInto]) -> None:
    """Read many short ranges: in turn while they are at hand, as a page cache's are; else several at once."""
    begin = 0
    while not store.asking_costs and begin < len(reads):
        started = time.perf_counter()
        turn = reads[begin : begin + _TURN]
        store.read_many(turn, workers=1)
        begin += _TURN
        if time.perf_counter() - started > _SLOW_S * len(turn):
            break
    store.read_many(reads[begin:])


class ItemParser:
    """Parses items from their two ends. Equal pickles (same dtype, shape, strides) are parsed once."""

    def __init__(self) -> None:
        self._pickles: dict[bytes, StoredTensor] = {}

    def parse(
        self,
        front: memoryview,
        tail: memoryview,
        path: str,
        start: int,
        length: int,
        label: str,
        whole: Callable[[], TorchArchive],
    ) -> tuple[StoredTensor, Frame | None]:
        """Return the tensor, and the frame that other items may share; None where this one is unusual.

        Args:
            whole: Reads the item as any archive is read: for one whose pickle or directory is longer than usual.
        """
        try:
            members, directory = parse_directory(bytes(tail), length, file=label)
        except ShortTailError:
            return _one_tensor(whole().value, label), None
        layout = Layout(members, directory, label)
        pickled = self._member(layout, "data.pkl", front)
        order = self._member(layout, "byteorder", front) if "byteorder" in layout.members else b"little"
        if pickled is None or order is None:
            return _one_tensor(whole().value, label), None
        check_byteorder(order, file=label)
        template = self._parsed(pickled, label)
        member = layout.members.get(f"data/{template.storage.key}")
        if member is None or template.storage.nbytes > member.nbytes:
            raise CorruptCheckpointError(
                f"{label}: its storage holds {0 if member is None else member.nbytes} bytes, its tensor needs "
                f"{template.storage.nbytes}."
            )
        header = bytes(front[member.header : member.header + LOCAL_HEADER.size + len(member.name.encode())])
        if len(header) < LOCAL_HEADER.size + len(member.name.encode()):
            return _one_tensor(whole().value, label), None
        begin = start + layout.start(member, header)
        storage = Storage(path, template.storage.key, member.nbytes, template.storage.dtype, "", begin, member.crc32)
        tensor = replace(template, storage=storage)
        if template.storage.key != "0" or template.marks:
            return tensor, None
        return tensor, Frame.of(bytes(front), bytes(tail), layout.members, directory, length)

    def _member(self, layout: Layout, name: str, front: memoryview) -> bytes | None:
        """The bytes of a small member, None where they are not among the first of the item."""
        member = layout.members[name]
        header = bytes(front[member.header : member.header + LOCAL_HEADER.size + len(member.name.encode())])
        if len(header) < LOCAL_HEADER.size + len(member.name.encode()):
            return None
        begin = layout.start(member, header)
        data = bytes(front[begin : begin + member.nbytes])
        if len(data) < member.nbytes:
            return None
        if crc32(data) != member.crc32:
            raise CorruptCheckpointError(f"{layout.file}: member {member.name!r:.80} does not match its CRC-32.")
        return data

    def template(self, pickled: bytes, label: str) -> StoredTensor | None:
        """The tensor a pickle describes, its storage without a place; None where it needs a look of its own."""
        try:
            found = self._parsed(pickled, label)
        except (UnsafePickleError, OpaqueTensorError):
            return None
        return found if found.storage.key == "0" and not found.marks else None

    def _parsed(self, pickled: bytes, label: str) -> StoredTensor:
        found = self._pickles.get(pickled)
        if found is None:
            value = loads(
                pickled,
                file=label,
                functions=TensorRebuilder(lazy=True).functions,
                persistent_load=lambda identity: storage_of(identity, None, ""),
            )
            found = self._pickles[pickled] = _one_tensor(value, label)
        return found


def _one_tensor(value: Any, label: str) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        raise CorruptCheckpointError(f"{label} holds a {type(value).__name__}, where .metadata says a tensor.")
    return value


# What is found of an item of a `.distcp` file, and whether it is what `.metadata` says.


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


UInt64 = npt.NDArray[np.uint64]

_BATCH_ROWS = 1 << 16
_BLOCK_ROWS = 1 << 12  # items whose ends are held at once
_NO_STRIDES: Mapping[int, tuple[int, ...]] = {}
_NO_CODECS: Mapping[int, Codec] = {}
_BLOCK_FILES = 128  # files that are open at once
_HEAD = 9
_ZIP = b"PK\x03\x04"
_FEW = 16  # items for which numpy is worth its fixed cost
_MAX_FRAMES = 8
_SLACK = 1 << 20  # what an item may be longer than its tensor, when it is decompressed


class Items:
    """Every tensor item of a checkpoint as columns; rows [bounds[i], bounds[i + 1]) are those of tensor i.

    Attributes:
        columns: What `.metadata` says of them.
        starts, nbytes, digests, digest_starts, digest_nbytes: As `SliceArray` has them, once located.
        checked: [t] whether all slices of a tensor have digests.
        strides, codecs: By tensor, as `SliceArray` has them.
        opaque: By tensor, why its records can't be read without its class, once that is known.
    """

    def __init__(self, store: Store, paths: Sequence[str], ranks: Int32, columns: TensorColumns) -> None:
        self.store = store
        self.paths = paths
        self.ranks = ranks
        self.columns = columns
        self.elements = columns.elements()
        count = len(columns.files)
        self.starts, self.nbytes, self.digest_starts, self.digest_nbytes = (np.zeros(count, np.int64) for _ in range(4))
        self.digests = np.zeros(count, np.uint64)
        self.checked = np.zeros(len(columns.names), bool)
        self.opaque: dict[int, str] = {}
        self.strides: dict[int, Mapping[int, tuple[int, ...]]] = {}
        self.codecs: dict[int, Mapping[int, Codec]] = {}

    @classmethod
    def of(cls, store: Store, paths: Sequence[str], ranks: Sequence[int], columns: TensorColumns) -> Items:
        """Return the items of these columns. `ranks`: who wrote each file."""
        return cls(store, paths, np.array(ranks, np.int32)[columns.files], columns)


class LocatedSlices(SliceArray):
    """Slices whose byte ranges are found when one of them is asked for, together with those of its batch.

    Boxes, files and ranks are there from the start; `starts`, `nbytes`, `strides`, digests and codecs are not. All are
    views of the columns of all tensors, made when they are asked for.
    """

    __slots__ = ("batch", "hi", "items", "lo", "tensor")

    def __init__(self, items: Items, tensor: int) -> None:
        self.items = items
        self.tensor = tensor
        self.lo: int = int(items.columns.bounds[tensor])
        self.hi: int = int(items.columns.bounds[tensor + 1])
        self.batch: _Batch | None = None

    def __len__(self) -> int:
        return self.hi - self.lo

    @property
    def name(self) -> str:
        return self.items.columns.names[self.tensor]

    @property
    def dtype(self) -> str:
        return self.items.columns.dtypes[self.tensor]

    @property
    def paths(self) -> Sequence[str]:  # type: ignore[override]
        return self.items.paths

    @property
    def files(self) -> Int32:  # type: ignore[override]
        return self.items.columns.files[self.lo : self.hi]

    @property
    def ranks(self) -> Int32:  # type: ignore[override]
        return self.items.ranks[self.lo : self.hi]

    @property
    def offsets(self) -> Int64:  # type: ignore[override]
        return self._box(self.items.columns.offsets)

    @property
    def sizes(self) -> Int64:  # type: ignore[override]
        return self._box(self.items.columns.sizes)

    def _box(self, table: Int64) -> Int64:
        items, ndim = self.items, len(self.items.columns.shapes[self.tensor])
        first = int(items.elements[self.lo])
        return table[first : first + (self.hi - self.lo) * ndim].reshape(self.hi - self.lo, ndim)

    @property
    def opaque(self) -> str:  # type: ignore[override]
        if self.batch is not None:
            self.batch.locate()
        return self.items.opaque.get(self.tensor, "")

    def records(self) -> list[tuple[str, int, int]]:
        columns, rows = self.items.columns, slice(self.lo, self.hi)
        files = [self.paths[file] for file in self.files]
        return list(zip(files, columns.starts[rows].tolist(), columns.lengths[rows].tolist(), strict=True))

    def _located(self) -> Items:
        if self.opaque:
            raise UnsupportedFormatError(
                f"tensor {self.name!r:.80} {self.opaque}: nothing here reads it. torch's own FileSystemReader does, in "
                "a job that imports the class."
            )
        return self.items

    @property
    def starts(self) -> Int64:  # type: ignore[override]
        return self._located().starts[self.lo : self.hi]

    @property
    def nbytes(self) -> Int64:  # type: ignore[override]
        return self._located().nbytes[self.lo : self.hi]

    @property
    def strides(self) -> Mapping[int, tuple[int, ...]]:  # type: ignore[override]
        return self._located().strides.get(self.tensor, _NO_STRIDES)

    @property
    def codecs(self) -> Mapping[int, Codec]:  # type: ignore[override]
        return self._located().codecs.get(self.tensor, _NO_CODECS)

    @property
    def algorithm(self) -> str | None:  # type: ignore[override]
        return CRC if self._located().checked[self.tensor] else None

    @property
    def digests(self) -> UInt64 | None:  # type: ignore[override]
        return self._digest_column(self._located().digests)

    @property
    def digest_starts(self) -> Int64 | None:  # type: ignore[override]
        return self._digest_column(self._located().digest_starts)

    @property
    def digest_nbytes(self) -> Int64 | None:  # type: ignore[override]
        return self._digest_column(self._located().digest_nbytes)

    def _digest_column(self, column: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        return column[self.lo : self.hi] if self.items.checked[self.tensor] else None


def find_opaque(slices: LocatedSlices) -> bool:
    """Tell whether the tensor can't be read without its class: looks at its records alone."""
    _Locator(slices.items, np.array([slices.tensor], np.int64)).run()
    return slices.tensor in slices.items.opaque


def item_batches(tensors: Iterable[tuple[Role, SliceArray]]) -> None:
    """Group the slices so that those of one role are located some ten thousand at a time."""
    by_role: dict[Role, _Batch] = {}
    for role, slices in tensors:
        assert isinstance(slices, LocatedSlices)
        batch = by_role.get(role)
        if batch is None or (batch.count and batch.count + len(slices) > _BATCH_ROWS):
            batch = by_role[role] = _Batch(slices.items)
        batch.add(slices)


class _Batch:
    def __init__(self, items: Items) -> None:
        self.items = items
        self.members: list[LocatedSlices] = []
        self.count = 0
        self._lock = threading.Lock()

    def add(self, slices: LocatedSlices) -> None:
        slices.batch = self
        self.members.append(slices)
        self.count += len(slices)

    def locate(self) -> None:
        """Fill in the columns of all members. Does nothing the second time."""
        with self._lock:
            if self.members:
                _Locator(self.items, np.array([member.tensor for member in self.members], np.int64)).run()
                for member in self.members:
                    member.batch = None
                self.members = []


class _Locator:
    """Args:
    tensors: Which of the items' tensors are located.
    """

    def __init__(self, items: Items, tensors: Int64) -> None:
        columns = items.columns
        self.items = items
        self.store = items.store
        self.paths = items.paths
        self.tensors = tensors
        counts = columns.bounds[tensors + 1] - columns.bounds[tensors]
        self.bounds = np.concatenate([[0], np.cumsum(counts)])
        self.rows = np.repeat(columns.bounds[tensors] - self.bounds[:-1], counts) + np.arange(int(self.bounds[-1]))
        self.files = columns.files[self.rows]
        self.starts = columns.starts[self.rows]
        self.lengths = columns.lengths[self.rows]
        self.zstd = columns.zstd[self.rows]
        self.found = Found.empty(len(self.rows))
        self.parser = ItemParser()
        self.frames: list[Frame] = []
        self.templates: list[StoredTensor] = []

    def run(self) -> None:
        order = np.lexsort((self.starts, self.files))
        plain: list[tuple[str, Int64]] = []
        for rows in _by_file(order, self.files):
            path = self.paths[int(self.files[rows[0]])]
            for row in rows[self.zstd[rows]].tolist():
                self._compressed(row, path)
            if not self.zstd[rows].all():
                plain.append((path, rows[~self.zstd[rows]]))
        zips: list[Int64] = []
        for (path, rows), head in zip(plain, self._heads(plain), strict=True):
            if self._is_safetensors(path, rows, head):
                self._safetensors(path, rows)
            else:
                zips.append(rows)
        for block in _blocks(zips):
            self._zips(block)
        self._hand_out()

    def _heads(self, files: Sequence[tuple[str, Int64]]) -> list[bytes]:
        """The first bytes of the first item of each file."""
        heads = [bytearray(_HEAD) for _ in files]
        reads = [
            ReadInto(path, int(self.starts[rows[0]]), memoryview(head))
            for (path, rows), head in zip(files, heads, strict=True)
        ]
        for begin in range(0, len(reads), _BLOCK_FILES):
            self.store.read_many(reads[begin : begin + _BLOCK_FILES])
        return [bytes(head) for head in heads]

    def _member(self, row: int) -> tuple[LocatedSlices, int]:
        member = int(np.searchsorted(self.bounds, row, side="right")) - 1
        return LocatedSlices(self.items, int(self.tensors[member])), row - int(self.bounds[member])

    # --- one safetensors blob a file

    def _is_safetensors(self, path: str, rows: Int64, head: bytes) -> bool:
        """A zip begins with its magic number; a blob with the length of its JSON header."""
        start = int(self.starts[rows[0]])
        if head[:4] == _ZIP:
            self._check_disjoint(path, rows)
            return False
        if head[8:9] == b"{":
            return True
        raise CorruptCheckpointError(
            f"{path}: at byte {start} begins neither a torch.save zip nor a safetensors header. "
            "The file is damaged, or belongs to another save."
        )

    def _check_disjoint(self, path: str, rows: Int64) -> None:
        starts, stops = self.starts[rows], self.starts[rows] + self.lengths[rows]
        bad = (starts[1:] < stops[:-1]) & ((starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1]))
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            name = self._member(int(rows[at + 1]))[0].name
            raise CorruptCheckpointError(f"{path}: the item of {name!r:.80} overlaps the one before it.")

    def _safetensors(self, path: str, rows: Int64) -> None:
        start = int(self.starts[rows[0]])
        if (self.starts[rows] != start).any():
            raise CorruptCheckpointError(f"{path}: its items are a safetensors blob, but begin at different bytes.")
        header = read_header(self.store, path, start=start)
        offsets = saved_offsets(header, path)
        for row in rows.tolist():
            member, at = self._member(row)
            self.found.starts[row], self.found.nbytes[row] = in_header(header, offsets, path, member, at)

    # --- zips

    def _zips(self, rows: Int64) -> None:
        """Locate items sorted by file and start: read their first and last kilobyte, and parse."""
        ends = ItemEnds(self.store, self.paths, self.files[rows], self.starts[rows], self.lengths[rows])
        left = np.arange(len(rows))
        for frame in self.frames:
            left = self._framed(frame, ends, rows, left)
        while len(left):
            shared = self._alone(ends, int(left[0]), int(rows[left[0]]))
            left = left[1:]
            if shared is not None and len(left) >= _FEW and len(self.frames) < _MAX_FRAMES:
                self.frames.append(shared)
                left = self._framed(shared, ends, rows, left)

    def _alone(self, ends: ItemEnds, i: int, row: int) -> Frame | None:
        """Parse one item in full; the frame that others may share with it."""
        member, at = self._member(row)
        start, length = int(self.starts[row]), int(self.lengths[row])
        label = self._label(row)
        path = self.paths[int(self.files[row])]

        def whole() -> TorchArchive:
            return read_archive(self.store, path, start, length)

        try:
            tensor, frame = self.parser.parse(ends.front(i), ends.tail(i), path, start, length, label, whole)
        except (UnsafePickleError, OpaqueTensorError) as error:
            kind = error.kind if isinstance(error, OpaqueTensorError) else self._class_of(path, start, length)
            if kind:
                self.items.opaque[member.tensor] = f"is a {kind}"
                return None
            said = "" if repr(member.name)[:80] in str(error) else f"tensor {member.name!r:.80}: "
            raise type(error)(f"{said}{error}") from None
        check_tensor(tensor, member, at, label)
        self.found.put(row, tensor)
        return frame

    def _class_of(self, path: str, start: int, length: int) -> str:
        """Return of which class the tensor in a record is, if that alone is what can't be read of it; else ""."""
        try:
            read_archive(self.store, path, start, length, unknown="record")
        except OpaqueTensorError as error:
            return error.kind
        except CkptkitError:
            pass
        return ""

    def _framed(self, frame: Frame, ends: ItemEnds, rows: Int64, left: Int64) -> Int64:
        """Locate those items of `left` that fit the frame; return the others."""
        lengths = self.lengths[rows[left]]
        long = lengths >= frame.nbytes
        tried, others = left[long], left[~long]
        if not len(tried):
            return left
        parsed = frame.parse(ends.fronts(tried), ends.tails(tried, frame.nbytes), lengths[long])
        fits = parsed.fits
        templates = [self.parser.template(raw, self._label(int(rows[tried[0]]))) for raw in parsed.distinct]
        for number, template in enumerate(templates):
            if template is None:
                fits = fits & (parsed.pickles != number)
            else:
                same = fits & (parsed.pickles == number)
                fits = fits & ~(same & (parsed.nbytes < template.storage.nbytes))
        for number, template in enumerate(templates):
            chosen = np.flatnonzero(fits & (parsed.pickles == number))
            if template is not None and len(chosen):
                self._put_framed(template, rows[tried[chosen]], parsed, chosen)
        return np.sort(np.concatenate([others, tried[~fits]]))

    def _put_framed(self, template: StoredTensor, rows: Int64, parsed: FramedItems, chosen: Int64) -> None:
        found = self.found
        storage = self.starts[rows] + parsed.starts[chosen]
        found.starts[rows] = storage + template.offset * template.itemsize
        found.nbytes[rows] = template.nbytes
        found.crc[rows] = parsed.crc[chosen].astype(np.uint64)
        found.crc_starts[rows] = storage
        found.crc_nbytes[rows] = parsed.nbytes[chosen]
        found.checked[rows] = True
        found.templates[rows] = len(self.templates)
        self.templates.append(template)
        if not template.contiguous:
            found.strides.update(dict.fromkeys(rows.tolist(), template.strides))

    def _check_templates(self) -> None:
        """Framed items hold what `.metadata` says, compared once for each kind of item."""
        numbers = self.found.templates
        order = np.argsort(numbers, kind="stable")
        order = order[numbers[order] >= 0]
        columns = self.items.columns
        owners = np.repeat(self.tensors, np.diff(self.bounds))
        for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else ():
            template = self.templates[int(numbers[rows[0]])]
            shape = np.array(template.shape, np.int64)
            alike = columns.ndims[owners[rows]] == len(shape)
            kinds = distinct(owners[rows])
            other = kinds[[columns.dtypes[tensor] != template.dtype for tensor in kinds.tolist()]]
            alike &= ~np.isin(owners[rows], other)
            begins = self.items.elements[self.rows[rows[alike]]]
            sizes = columns.sizes[begins[:, None] + np.arange(len(shape))]
            alike[alike] = (sizes == shape).all(axis=1)
            if not alike.all():
                row = int(rows[~alike].min())
                member, at = self._member(row)
                check_tensor(template, member, at, self._label(row))

    def _label(self, row: int) -> str:
        path, start = self.paths[int(self.files[row])], int(self.starts[row])
        return f"{path}: the item of {self._member(row)[0].name!r:.80} at byte {start}"

    def _compressed(self, row: int, path: str) -> None:
        """A zstd item: decoded as a stream, of which only the first and last kilobytes are kept."""
        member, at = self._member(row)
        start, length = int(self.starts[row]), int(self.lengths[row])
        label = self._label(row)
        wanted = math.prod(member.sizes[at].tolist()) * dtype_of(member.dtype).itemsize
        packed = self.store.read(path, start, start + length)
        front, tail, size = decoded_ends(packed, wanted + _SLACK, file=label)

        def whole() -> TorchArchive:
            data = b"".join(zstd_chunks(packed, wanted + _SLACK, file=label))
            return read_archive(memory_store(path, data), path, 0, size)

        tensor, _ = self.parser.parse(front, tail, path, 0, size, label, whole)
        check_tensor(tensor, member, at, label)
        if tensor.marks:
            raise UnsupportedFormatError(f"{label} is compressed, and still to be conjugated or negated.")
        self.found.put(row, tensor)
        self.found.codecs[row] = Codec("zstd", start, length)

    def _hand_out(self) -> None:
        self._check_templates()
        found, items, counts = self.found, self.items, np.diff(self.bounds)
        items.starts[self.rows], items.nbytes[self.rows] = found.starts, found.nbytes
        items.digests[self.rows] = found.crc
        items.digest_starts[self.rows], items.digest_nbytes[self.rows] = found.crc_starts, found.crc_nbytes
        missing = np.bincount(np.repeat(np.arange(len(counts)), counts)[~found.checked], minlength=len(counts))
        items.checked[self.tensors] = (missing == 0) & (counts > 0)
        for values, table in ((found.strides, items.strides), (found.codecs, items.codecs)):
            for member, own in _split(values, self.bounds).items():
                table[int(self.tensors[member])] = own


def _by_file(order: Int64, files: Int32) -> list[Int64]:
    if len(order) == 0:
        return []
    return np.split(order, np.flatnonzero(np.diff(files[order])) + 1)


def _blocks(files: Iterable[Int64]) -> Iterator[Int64]:
    """Join the rows of files, in order, into blocks of limited size that span a limited number of files."""
    block: list[Int64] = []
    count = 0
    for rows in files:
        for begin in range(0, len(rows), _BLOCK_ROWS):
            piece = rows[begin : begin + _BLOCK_ROWS]
            if block and (count + len(piece) > _BLOCK_ROWS or len(block) >= _BLOCK_FILES):
                yield np.concatenate(block)
                block, count = [], 0
            block.append(piece)
            count += len(piece)
    if block:
        yield np.concatenate(block)


def _split(values: dict[int, Any], bounds: Int64) -> dict[int, dict[int, Any]]:
    out: dict[int, dict[int, Any]] = {}
    for row, value in values.items():
        member = int(np.searchsorted(bounds, row, side="right")) - 1
        out.setdefault(member, {})[row - int(bounds[member])] = value
    return out
