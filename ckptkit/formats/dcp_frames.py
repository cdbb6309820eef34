"""Items of `.distcp` files that are framed alike, parsed together as columns of bytes.

Items of one torch version differ only in numbers: checksums, sizes, offsets. One of them, parsed in full by
`_torch_zip`, becomes the frame; for the others numpy compares all bytes that must be the same, and checks the
numbers by the same rules. What does not fit the frame is parsed in full as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.formats._torch_zip import LOCAL_HEADER, Member

__all__ = ["Frame", "FramedItems"]

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
            sums = np.array([zlib.crc32(data) for data in raw], np.int64)
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
