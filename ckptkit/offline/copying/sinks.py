"""Writes a plan's files in any order on a local file system, and fills in their CRC fields."""

from __future__ import annotations

import bisect
import errno
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from ckptkit.digests import crc32, crc32_combine
from ckptkit.errors import NoSpaceError, StorageError
from ckptkit.formats.checks import Crcs
from ckptkit.formats.sources import Descriptors
from ckptkit.offline.copying.plan import CrcField, OutputFile
from ckptkit.storage.local import LocalStore, start_writing

Buffer: TypeAlias = bytes | bytearray | memoryview

_SHORT = 4 << 10  # bytes; one call costs more than copying pieces up to this size and the gaps between them
_GAP = 2 << 10  # bytes; the longest gap between short pieces that are written in one call
_BLOCK = 1 << 20  # bytes; about the most that one call writes if there are gaps
_MAX_VECTOR = 512  # buffers per pwritev; Linux allows 1024
_READ_BACK = 1 << 20
_DIRTY = 32 << 20  # bytes written to a file before its writeback is started


class LocalSink:
    """A plan's files in a local store. Each file is created with its full size. Thread-safe."""

    def __init__(self, store: LocalStore, files: Sequence[OutputFile]) -> None:
        self._store = store
        self._files = files
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptors = Descriptors(lambda path: os.open(store.path_of(path), flags))
        self._crcs = {
            i: Crcs() for i, file in enumerate(files) if any(True for _ in file.crcs)
        }  # only for files with CRC fields
        # There is one lock per file. The kernel lets only one thread at a time write to a file, and a second thread
        # would spin and waste a core.
        self._turns = [threading.Lock() for _ in files]
        self._dirty = [0] * len(files)  # approximate bytes written to each file since its writeback was started

    def begin(self, index: int, *, anew: bool = True) -> None:
        """Write the bytes of a file that come from no tensor, such as headers (its `literals`).

        With `anew`, first create the file with its full size. Without `anew`, an interrupted command has created it.
        """
        file = self._files[index]
        if anew:
            descriptor = self._store.create(file.path)
            try:
                # Not posix_fallocate, because on tmpfs it fills every page with zeros first, which makes the copy take
                # 1.5 times as long. `execute` has already checked the free space.
                os.ftruncate(descriptor, file.nbytes)
            except OSError as error:
                raise self._failure(file.path, error) from error
            finally:
                os.close(descriptor)
        self._put(index, ((literal.start, literal.data) for literal in file.literals))

    def write(self, index: int, pieces: Iterable[tuple[int, Buffer]]) -> None:
        """Write pieces of a file, each given as (start, bytes)."""
        pieces = sorted(pieces, key=itemgetter(0))
        crcs = self._crcs.get(index)
        if crcs is not None:
            for start, data in pieces:
                crcs.feed(start, memoryview(data))
        self._dirty[index] += self._put(index, pieces)
        if self._dirty[index] >= _DIRTY:
            self._dirty[index] = 0
            with self._descriptors.using(self._files[index].path) as descriptor:
                start_writing(descriptor)

    def _put(self, index: int, pieces: Iterable[tuple[int, Buffer]]) -> int:
        """Write pieces, which must be sorted by their starts. Return the number of bytes written."""
        path, written = self._files[index].path, 0
        with self._descriptors.using(path) as descriptor:
            for group in _groups(pieces):
                start, views = group[0][0], [data for _, data in group]
                stop = group[-1][0] + len(group[-1][1])
                nbytes = sum(map(len, views))
                with self._turns[index]:
                    if start + nbytes < stop:  # there are gaps: read them, so that they keep their bytes
                        block = bytearray(stop - start)
                        self._read(descriptor, path, start, memoryview(block))
                        for at, data in group:
                            block[at - start : at - start + len(data)] = data
                        views = [block]
                    self._write(descriptor, path, start, views)
                written += stop - start
        return written

    def _write(self, descriptor: int, path: str, start: int, views: Sequence[Buffer]) -> None:
        total = sum(len(view) for view in views)
        try:
            done = os.pwritev(descriptor, views, start)
            if done < total:  # interrupted by a signal, or the disk is full and the next write raises
                rest = memoryview(b"".join(views))[done:]
                while len(rest):
                    count = os.pwrite(descriptor, rest, start + total - len(rest))
                    rest = rest[count:]
        except OSError as error:
            raise self._failure(path, error) from error

    def _read(self, descriptor: int, path: str, start: int, view: memoryview) -> None:
        if os.preadv(descriptor, [view], start) != len(view):
            raise StorageError(errno.EIO, f"{self._store.path_of(path)}: the written data cannot be read back.")

    def _failure(self, path: str, error: OSError) -> Exception:
        full = self._store.path_of(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return NoSpaceError(error.errno, f"{full}: {error.strerror}. Free some space or write elsewhere.")
        return StorageError(error.errno, f"{full}: {error.strerror}")

    def finish(self, index: int) -> None:
        """Fill in a file's CRC fields, after all other bytes were written."""
        crcs = self._crcs.pop(index, None)
        if crcs is None:
            return
        file = self._files[index]
        known = crcs.parts()
        values = [(item, combined_crc(known, item)) for item in file.crcs]
        missed = [item for item, value in values if value is None]  # CRC fields whose ranges include literals
        if missed:
            known = sorted([*known, *((item.start, len(item.data), crc32(item.data)) for item in file.literals)])
        for item in missed:
            value = combined_crc(known, item)
            values.append((item, self._read_back(file.path, item) if value is None else value))
        fields = [(at, struct.pack("<I", value)) for item, value in values if value is not None for at in item.at]
        self._put(index, sorted(fields))

    def _read_back(self, path: str, item: CrcField) -> int:
        value = 0
        buffer = memoryview(bytearray(min(_READ_BACK, item.nbytes)))
        with self._descriptors.using(path) as descriptor:
            for at in range(item.start, item.start + item.nbytes, _READ_BACK):
                part = buffer[: min(_READ_BACK, item.start + item.nbytes - at)]
                self._read(descriptor, path, at, part)
                value = crc32(part, value)
        return value

    def close(self) -> None:
        self._descriptors.close()


def _groups(pieces: Iterable[tuple[int, Buffer]]) -> Iterator[list[tuple[int, Buffer]]]:
    """Yield groups of pieces to write in one call: adjacent pieces, or short pieces with short gaps between them."""
    group: list[tuple[int, Buffer]] = []
    first = end = 0
    for start, data in pieces:
        near = start == end or (0 < start - end <= _GAP and max(len(data), len(group[-1][1]) if group else 0) <= _SHORT)
        if group and not (near and start - first < _BLOCK and len(group) < _MAX_VECTOR):
            yield group
            group = []
        if not group:
            first = start
        group.append((start, data))
        end = start + len(data)
    if group:
        yield group


def combined_crc(known: Sequence[tuple[int, int, int]], item: CrcField) -> int | None:
    """Return the CRC-32 of the range that a CRC field covers, combined from sorted pieces (start, nbytes, CRC-32).

    Returns None if the pieces do not cover the range without gaps and overlaps.
    """
    at, value = item.start, 0
    stop = item.start + item.nbytes
    for i in range(bisect.bisect_left(known, (at, 0, 0)), len(known)):
        start, nbytes, crc = known[i]
        if at == stop or start != at or start + nbytes > stop:
            break
        value = crc32_combine(value, crc, nbytes)
        at += nbytes
    return value if at == stop else None
