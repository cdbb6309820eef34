"""Writing the files of a plan in any order, on a local file system; CRC fields are filled from what went by."""

from __future__ import annotations

import bisect
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from ckptkit.errors import NoSpaceError, StorageError
from ckptkit.offline.copying.checks import crc32, crc32_combine
from ckptkit.offline.copying.plan import CrcField, OutputFile
from ckptkit.offline.copying.sources import Descriptors
from ckptkit.storage.local import LocalStore, start_writing

__all__ = ["LocalSink", "chunks", "combined_crc", "KernelCopy", "copy_range", "pick", "takes_turns"]

# Copies between files inside the kernel, where the file system is fast at it.


# (source, its start, target, its start, bytes) -> (bytes copied, whether the kernel can do it here at all).
# Fewer bytes than asked while it can: the source ends.
KernelCopy: TypeAlias = Callable[[int, int, int, int, int], tuple[int, bool]]

_UNABLE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
_NO_SHARING = ("ext2", "ext3", "ext4")  # copy_file_range is a splice in 64 KiB steps here, slower by a fifth
_TURNS = (*_NO_SHARING, "tmpfs", "xfs", "btrfs", "f2fs", "zfs", "overlay")


def pick(folder: str) -> KernelCopy | None:
    """Return how to copy into files below `folder`; None where plain reads and writes are faster."""
    if _file_system(folder) in _NO_SHARING:
        return None
    return copy_range if hasattr(os, "copy_file_range") else None


def takes_turns(folder: str) -> bool:
    """Tell whether the file system at `folder` lets only one thread at a time write to a file.

    A second one would spin: it costs a core and gains nothing.
    """
    return _file_system(folder) in _TURNS


def copy_range(source: int, start: int, target: int, at: int, nbytes: int) -> tuple[int, bool]:
    """Copy by copy_file_range: file systems may share blocks, servers copy on their side."""
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, start + done, at + done)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            return done, False
        if count == 0:
            break
        done += count
    return done, True


def _file_system(folder: str) -> str:
    """The type of the file system at `folder`, as Linux calls it; "" where it can't be told."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                if line.split(" ", 3)[2] == wanted:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    except (OSError, IndexError):
        pass
    return ""


_MAX_VECTOR = 512  # buffers of one pwritev; Linux takes 1024
_READ_BACK = 1 << 20
_DIRTY = 32 << 20  # after this many bytes into one file, the kernel starts to write them back


class LocalSink:
    """The files of a plan below a local store, created at their full size. Safe for several threads."""

    def __init__(self, store: LocalStore, files: Sequence[OutputFile]) -> None:
        self._store = store
        self._files = files
        self._descriptors = Descriptors(self._reopen)
        # By file that has CRC fields: (start, nbytes, CRC-32) of what was written.
        self._crcs: dict[int, list[tuple[int, int, int]]] = {i: [] for i, f in enumerate(files) if _any(f.crcs)}
        # Where the kernel lets only one thread at a time write to a file, a second one would spin and waste a core.
        self._turns = [threading.Lock() for _ in files] if takes_turns(store.url) else []
        self._dirty = [0] * len(files)  # bytes written to each file since writeback was started; approximate
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
        for literal in file.literals:
            self.write(index, literal.start, [memoryview(literal.data)])

    def needs_bytes(self, index: int) -> bool:
        """Tell whether what is written to a file must pass through here: it has CRC fields."""
        return index in self._crcs

    def put(self, index: int, start: int, view: memoryview) -> None:
        """Write bytes whose CRC-32, where it is needed, is stated by `add_crc`."""
        path = self._files[index].path
        with self._descriptors.using(path) as descriptor:
            with self._turn(index):
                self._write(descriptor, path, start, [view])
            self._wrote(index, descriptor, len(view))

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
        end = start
        with self._descriptors.using(path) as descriptor:
            # Without taking a turn: for short writes, spinning is a tenth faster than waiting for the lock.
            for first in range(0, len(views), _MAX_VECTOR):
                end = self._write(descriptor, path, end, views[first : first + _MAX_VECTOR])
            self._wrote(index, descriptor, end - start)

    def _turn(self, index: int) -> AbstractContextManager[object]:
        """Return the lock of a file; nothing to wait for where several threads may write to it at once."""
        return self._turns[index] if self._turns else nullcontext()

    def _wrote(self, index: int, descriptor: int, nbytes: int) -> None:
        self._dirty[index] += nbytes
        if self._dirty[index] >= _DIRTY:
            self._dirty[index] = 0
            start_writing(descriptor)

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
        """Copy a run of a source descriptor in the kernel; return the bytes copied, fewer where the kernel can't."""
        path = self._files[index].path
        with self._descriptors.using(path) as descriptor:
            with self._turn(index):
                if self.kernel is None:
                    return 0
                try:
                    done, able = self.kernel(source, source_start, descriptor, start, nbytes)
                except OSError as error:
                    raise self._failure(path, error) from error
            self._wrote(index, descriptor, done)
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


def chunks(start: int, stop: int, size: int, *, shift: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the pieces of [start, stop) between multiples of `size` in the target, which is `shift` further on.

    So no page of the target is written in two pieces: a disk's file system takes a fifth longer for those.
    """
    while start < stop:
        end = min(stop, start + size - (start + shift) % size)
        yield start, end
        start = end


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
