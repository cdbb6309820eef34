"""Writing the files of a plan in any order, on a local file system; CRC fields are filled from what went by."""

from __future__ import annotations

import bisect
import errno
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ckptkit.errors import NoSpaceError, StorageError
from ckptkit.offline.checks import crc32, crc32_combine
from ckptkit.offline.kernel import KernelCopy, pick
from ckptkit.offline.plan import CrcField, OutputFile
from ckptkit.offline.sources import Descriptors
from ckptkit.storage.local import LocalStore

__all__ = ["LocalSink", "combined_crc"]

_MAX_VECTOR = 512  # buffers of one pwritev; Linux takes 1024
_READ_BACK = 1 << 20


class LocalSink:
    """The files of a plan below a local store, created at their full size. Safe for several threads."""

    def __init__(self, store: LocalStore, files: Sequence[OutputFile]) -> None:
        self._store = store
        self._files = files
        self._descriptors = Descriptors(self._reopen)
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}  # by file: (start, nbytes, CRC-32) of what was written
        self._busy = [threading.Lock() for _ in files]
        self.kernel: KernelCopy | None = pick(store.url)

    def _reopen(self, path: str) -> int:
        return os.open(self._store.path_of(path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def create(self, index: int) -> None:
        """Create a file and write its literals."""
        file = self._files[index]
        descriptor = self._store.create(file.path)
        try:
            # Not posix_fallocate: tmpfs would fill every page with zeros first, half as slow again as the copy,
            # and `execute` has compared the free space with all that is to be written.
            os.ftruncate(descriptor, file.nbytes)
        finally:
            os.close(descriptor)
        self._begin(index)

    def take_over(self, index: int) -> None:
        """Go on with a file of its full size that an interrupted run left; its literals are written again."""
        self._begin(index)

    def _begin(self, index: int) -> None:
        file = self._files[index]
        if _any(file.crcs):
            self._crcs[index] = []
        for literal in file.literals:
            self.write(index, literal.start, [memoryview(literal.data)])

    def needs_bytes(self, index: int) -> bool:
        """Tell whether what is written to a file must pass through here: it has CRC fields."""
        return index in self._crcs

    def put(self, index: int, start: int, view: memoryview) -> None:
        """Write bytes whose CRC-32, where it is needed, is stated by `add_crc`; threads wait in turn for a file."""
        path = self._files[index].path
        # The kernel lets one thread at a time into a file, and a second one would spin at its door.
        with self._busy[index], self._descriptors.using(path) as descriptor:
            self._write(descriptor, path, start, [view])

    def add_crc(self, index: int, start: int, nbytes: int, crc: int) -> None:
        """State the CRC-32 of what was `put`."""
        self._crcs[index].append((start, nbytes, crc))

    def write(self, index: int, start: int, views: Sequence[Any]) -> None:
        """Write views one after the other from `start` of a file."""
        path = self._files[index].path
        known = self._crcs.get(index)
        if known is not None:
            at = start
            for view in views:
                known.append((at, len(view), crc32(view)))
                at += len(view)
        with self._descriptors.using(path) as descriptor:
            for first in range(0, len(views), _MAX_VECTOR):
                start = self._write(descriptor, path, start, views[first : first + _MAX_VECTOR])

    def _write(self, descriptor: int, path: str, start: int, views: Sequence[Any]) -> int:
        total = sum(len(view) for view in views)
        try:
            done = os.pwritev(descriptor, views, start)
            if done < total:  # a signal, or the disk is nearly full: the rest says which
                rest = memoryview(b"".join(views))[done:]
                while len(rest):
                    count = os.pwrite(descriptor, rest, start + total - len(rest))
                    rest = rest[count:]
        except OSError as error:
            raise self._failure(path, error) from error
        return start + total

    def _failure(self, path: str, error: OSError) -> Exception:
        full = self._store.path_of(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return NoSpaceError(error.errno, f"{full}: {error.strerror}. Free some space or write elsewhere.")
        return StorageError(error.errno, f"{full}: {error.strerror}")

    def copy(self, source: int, source_start: int, index: int, start: int, nbytes: int) -> int:
        """Copy a run of a source descriptor in the kernel; return the bytes done, fewer where it can't."""
        path = self._files[index].path
        # The kernel lets one thread at a time into a file, and a second one would spin at its door.
        with self._busy[index], self._descriptors.using(path) as descriptor:
            if self.kernel is None:
                return 0
            try:
                done, able = self.kernel(source, source_start, descriptor, start, nbytes)
            except OSError as error:
                raise self._failure(path, error) from error
        if not able:
            self.kernel = None
        return done

    def finish(self, index: int) -> None:
        """Fill the CRC fields of a file. Everything else of it must have been written."""
        known = self._crcs.pop(index, None)
        if known is None:
            return
        file = self._files[index]
        known.sort()
        for item in file.crcs:
            value = combined_crc(known, item)
            if value is None:
                value = self._read_back(index, item)
            data = struct.pack("<I", value)
            for at in item.at:
                self.write(index, at, [memoryview(data)])

    def _read_back(self, index: int, item: CrcField) -> int:
        path, value = self._files[index].path, 0
        buffer = memoryview(bytearray(min(_READ_BACK, item.nbytes)))
        with self._descriptors.using(path) as descriptor:
            for at in range(item.start, item.start + item.nbytes, _READ_BACK):
                part = buffer[: min(_READ_BACK, item.start + item.nbytes - at)]
                if os.preadv(descriptor, [part], at) != len(part):
                    raise StorageError(errno.EIO, f"{self._store.path_of(path)}: what was written can't be read back.")
                value = crc32(part, value)
        return value

    def close(self) -> None:
        self._descriptors.close()


def combined_crc(known: Sequence[tuple[int, int, int]], item: CrcField) -> int | None:
    """Return the CRC-32 of a field's range from those of its pieces, sorted; None where they don't tile it."""
    at, value = item.start, 0
    stop = item.start + item.nbytes
    for i in range(bisect.bisect_left(known, (at, 0, 0)), len(known)):
        start, nbytes, crc = known[i]
        if at == stop or start != at or start + nbytes > stop:
            break
        value = crc32_combine(value, crc, nbytes)
        at += nbytes
    return value if at == stop else None


def _any(items: Iterable[object]) -> bool:
    return next(iter(items), None) is not None
