"""Stores files on a local or mounted file system. Writes are atomic, renames never replace, and reads are parallel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import operator
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.errors import IncompleteCheckpointError, NoSpaceError, StorageError, UnsafePathError
from ckptkit.storage.coalesce import Span, coalesce
from ckptkit.storage.store import FileInfo, ReadInto, Store, checked_path, is_path

if TYPE_CHECKING:
    from typing_extensions import TypeIs

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{12}\.part", re.DOTALL)
"""Matches the temporary name of a file that is being written, or whose writer was killed. Group 1 is the final name."""

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
_PASSED_ON = (FileNotFoundError, FileExistsError, PermissionError)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RENAME_NOREPLACE = 1  # linux/fs.h
_AT_FDCWD = -100
_MAX_SCANS = 100
_MAX_GAP = 64 << 10  # reading this many unneeded bytes is cheaper than another system call
_MAX_SPAN = 8 << 20
_SHORT = 256 << 10  # bytes; reading fewer from the page cache takes less time than starting a thread
_WAIT_S = 100e-6  # a slower read counts as a read from disk
_MAX_WAITS = 8  # slow reads to tolerate before using threads; other load on the machine also slows down reads
_DIRTY = 16 << 20  # bytes between writebacks: 1 GiB took 0.36 s (with 32 MiB: 0.38 s; with only an fsync: 0.47 s)
_Infos = list[FileInfo]  # inside the class, `list` is a method
_Jobs = list[tuple[int, str, Span, list[ReadInto]]]
_Reads = list[ReadInto]


def start_writing(descriptor: int) -> None:
    """Start to write a file's cached pages to disk, so that a later fsync is faster. Does nothing outside of Linux."""
    begin = _libc("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if begin is not None:
        begin(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _libc(name: str, *types: Any) -> Any:
    """Return a function of the C library, or None if the library has no such function."""
    with contextlib.suppress(OSError, AttributeError):
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
        function.argtypes = types
        return function
    return None


@contextlib.contextmanager
def disk_errors(path: str) -> Iterator[None]:
    """Translate system errors into the errors that `Store` documents. The message contains the path."""
    try:
        yield
    except _PASSED_ON:
        raise
    except OSError as error:
        if isinstance(error, (StorageError, NoSpaceError, UnsafePathError, IncompleteCheckpointError)):
            raise
        text = f"{path}: {error.strerror or error}"
        if error.errno == errno.ENOTDIR and (file := _file_above(path)):
            text = f"{path}: {file} is a file, not a directory"
        if error.errno in _FULL:
            raise NoSpaceError(error.errno, f"{text}. Free some space or write elsewhere.") from error
        if error.errno == errno.ENOTDIR:
            raise FileNotFoundError(error.errno, text) from error
        raise StorageError(error.errno, text) from error


def _file_above(path: str) -> str:
    """Return the closest existing path above `path` if it is a file. Return "" if it is a directory."""
    above = os.path.dirname(path)
    while above != os.path.dirname(above) and not os.path.lexists(above):
        above = os.path.dirname(above)
    return "" if os.path.isdir(above) else above


class LocalStore(Store):
    """Files in a directory, on a local disk or on a mounted shared file system.

    A read follows a symbolic link only if the target is under this store's directory, or if the link leads from a
    snapshot of a Hugging Face cache to its blobs. Nothing is listed, written or deleted through a link that leads out
    of the top directory. This is the directory of the store that was opened first: `child` passes it on.
    """

    def __init__(self, root: str | os.PathLike[str], *, top: str = "", must_exist: bool = False) -> None:
        """Open a directory, which need not exist. `top` is the directory of the store that was opened first."""
        self.url = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._top = top or self.url
        self._must_exist = must_exist

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    asking_costs = False
    sizes_are_free = True
    has_conditional_writes = True  # `rename` never replaces

    def path_of(self, path: str) -> str:
        """Return the absolute path. Does not resolve symlinks."""
        return os.path.join(self.url, checked_path(path)) if path else self.url

    def child(self, path: str) -> LocalStore:
        return LocalStore(self.path_of(path), top=self._top)

    def existing(self) -> LocalStore:
        """Return a store whose writes do not create the root. If it is missing, the usual cause is a lost mount."""
        return LocalStore(self.url, top=self._top, must_exist=True)

    # --- lookups

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.path_of(path))

    def info(self, path: str) -> FileInfo | None:
        full = self.path_of(path)
        try:
            with disk_errors(full):
                return _file_info(path, os.lstat(full))
        except FileNotFoundError:
            return None

    def list(self, path: str = "", *, recursive: bool = False) -> _Infos:
        found: _Infos = []
        left = [path]
        while left:
            folder = left.pop()
            full = self.path_of(folder)
            if full != self._top:
                self._check_inside(full)
            for item in self._scan(folder, full):
                if not recursive or item.kind != "directory":
                    found.append(item)
                elif is_path(item.path):
                    left.append(item.path)
                else:  # a name with a control character or a backslash: listed, but not entered
                    found.append(FileInfo(item.path, "other", 0, 0.0))
        return sorted(found, key=operator.attrgetter("path"))

    def _scan(self, folder: str, full: str) -> _Infos:
        """Return the entries of one directory, or [] if it does not exist.

        Scans again if an entry was deleted meanwhile. Otherwise, the result could lack both a new checkpoint and the
        previous one, which was deleted after the new one had appeared.
        """
        found: _Infos = []
        for _ in range(_MAX_SCANS):
            found, deleted = [], False
            with contextlib.suppress(FileNotFoundError), disk_errors(full), os.scandir(full) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    try:
                        found.append(_file_info(name, entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        deleted = True
            if not deleted:
                break
        return found

    def stat_file(self, path: str) -> os.stat_result:
        """Return the stat result of a file. Follows the same symbolic links as `read`."""
        full = self.path_of(path)
        with disk_errors(full):
            return os.stat(self._resolved(full))

    def free_bytes(self) -> int | None:
        place = self._nearest()
        with disk_errors(str(place)):
            room = os.statvfs(place)
        return room.f_bavail * room.f_frsize

    def is_writable(self) -> bool:
        """Return whether this process may create files in the directory.

        If the directory does not exist, return whether this process may create the directory.
        """
        effective = os.access in os.supports_effective_ids
        return os.access(self._nearest(), os.W_OK | os.X_OK, effective_ids=effective)

    def _nearest(self) -> Path:
        """Return the directory or, if it does not exist, the closest directory above it that exists."""
        place = Path(self.url)
        while not place.exists() and place != place.parent:
            place = place.parent
        return place

    # --- reading

    def open_file(self, path: str) -> int:
        """Return a read-only descriptor of a regular file. The caller closes it."""
        full = self.path_of(path)
        with disk_errors(full):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a FIFO must not block
            fd = os.open(self._resolved(full), flags)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise UnsafePathError(f"{full} is a FIFO, a device or a directory, not a regular file; it is not read.")
        return fd

    def _resolved(self, full: str) -> str:
        real = os.path.realpath(full)
        root = os.path.realpath(self.url)
        if self.url != self._top:
            self._check_inside(self.url)
        if real in (full, root) or real.startswith(os.path.join(root, "")):
            return real
        cache, separator, _ = root.rpartition("/snapshots/")  # hub cache: snapshots/<revision>/x -> blobs/<hash>
        if separator and real.startswith(f"{cache}/blobs/"):
            return real
        raise UnsafePathError(f"{full} is a symbolic link to {real}, outside of {root}. It is not followed.")

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        fd = self.open_file(path)
        try:
            with disk_errors(self.path_of(path)):
                size = os.fstat(fd).st_size
                length = max(0, min(size if stop is None else stop, size) - start)
                parts = [os.pread(fd, length, start)]  # up to 2 GiB, this is one call without a copy
                done = len(parts[0])
                while done < length and parts[-1]:
                    parts.append(os.pread(fd, length - done, start + done))
                    done += len(parts[-1])
                return parts[0] if done == len(parts[0]) else b"".join(parts)
        finally:
            os.close(fd)

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        fd = self.open_file(path)
        try:
            self._read_exactly(fd, path, start, view)
        finally:
            os.close(fd)

    def _read_exactly(self, fd: int, path: str, start: int, view: memoryview) -> None:
        view, done = view.cast("B"), 0
        with disk_errors(self.path_of(path)):
            while done < len(view) and (got := os.preadv(fd, [view[done:]], start + done)):
                done += got
        if done != len(view):
            raise IncompleteCheckpointError(
                f"{self.path_of(path)}: the file has {os.fstat(fd).st_size} bytes, but bytes up to "
                f"{start + len(view)} are needed. It is truncated."
            )

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        by_file: dict[str, _Reads] = {}
        for read in reads:
            by_file.setdefault(read.path, []).append(read)
        with contextlib.ExitStack() as stack:
            jobs: _Jobs = []
            for path, items in by_file.items():
                fd = self.open_file(path)
                stack.callback(os.close, fd)
                ranges = [(item.start, item.start + item.view.nbytes) for item in items]
                spans = coalesce(ranges, max_gap=_MAX_GAP, max_span=_MAX_SPAN)
                jobs += [(fd, path, span, items) for span in spans]
            workers = min(workers or min(8, (os.cpu_count() or 1) * 2), len(jobs))
            done = self._read_quick(jobs) if workers > 1 else 0
            jobs = jobs[done:]
            if workers <= 1 or len(jobs) <= 1:
                for job in jobs:
                    self._read_span(*job)
                return
            with ThreadPoolExecutor(workers, thread_name_prefix="ckptkit-read") as pool:
                for future in [pool.submit(self._read_span, *job) for job in jobs]:
                    future.result()

    def _read_quick(self, jobs: _Jobs) -> int:
        """Do short reads in this thread while the data is in the page cache. Return the number of reads done.

        Threads read data from disk faster, but take five times as long for cached data, because they compete for the
        GIL.
        """
        waits = 0
        for done, (fd, path, span, items) in enumerate(jobs):
            if waits > max(_MAX_WAITS, done // 8) or span.stop - span.start > _SHORT:
                return done
            started = time.perf_counter()
            self._read_span(fd, path, span, items)
            waits += time.perf_counter() - started > _WAIT_S
        return len(jobs)

    def _read_span(self, fd: int, path: str, span: Span, items: _Reads) -> None:
        if len(span.members) == 1:
            item = items[span.members[0]]
            self._read_exactly(fd, path, item.start, item.view)
            return
        buffer = memoryview(bytearray(span.stop - span.start))
        self._read_exactly(fd, path, span.start, buffer)
        for index in span.members:
            item = items[index]
            target = item.view.cast("B")
            target[:] = buffer[item.start - span.start : item.start - span.start + len(target)]

    def _check_inside(self, folder: str) -> None:
        """Raise UnsafePathError if a symbolic link in `folder` leads out of the store that was opened first."""
        real, top = os.path.realpath(folder), os.path.realpath(self._top)
        if real != top and not real.startswith(os.path.join(top, "")):
            raise UnsafePathError(
                f"{folder} leads through a symbolic link to {real}, outside of {top}. It is not followed."
            )

    def _to_change(self, path: str) -> str:
        """Return the absolute path of a file to write, rename or delete. Raises if the file is outside the store."""
        full = self.path_of(path)
        if full != self._top:
            self._check_inside(os.path.dirname(full))
        return full

    # --- writing

    def create(self, path: str, nbytes: int = 0, *, target: str = "") -> int:
        """Create a file exclusively and return a read-write descriptor. Creates missing directories.

        Args:
            nbytes: Disk space to reserve if the file system supports that.
            target: The path to which the file will be renamed, for errors.
        """
        full, told = self._to_change(path), self.path_of(target or path)
        with disk_errors(told):
            for tries_left in (2, 1, 0):
                try:
                    self._make_parents(full)
                    fd = os.open(full, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                    break
                except FileNotFoundError:  # another process has just removed the directory, which was empty
                    if not tries_left:
                        raise
                except PermissionError as error:
                    raise PermissionError(error.errno, error.strerror, told) from error
            try:
                if nbytes:
                    _allocate(fd, nbytes)
            except BaseException:
                os.close(fd)
                os.unlink(full)
                raise
        return fd

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        with self.writer(path, overwrite=overwrite, sync=sync) as file:
            file.write(data)

    @contextlib.contextmanager
    def writer(self, path: str, *, overwrite: bool = False, sync: bool = True) -> Iterator[_LocalWriter]:
        """Yield a writer to a temporary file. If the block succeeds, the file is renamed to `path`."""
        full = self.path_of(path)
        if not overwrite and os.path.lexists(full):
            raise FileExistsError(errno.EEXIST, f"{full} exists already")
        folder, _, name = path.rpartition("/")
        part = f"{folder}/.{name[:200]}.{os.urandom(6).hex()}.part".lstrip("/")
        fd = self.create(part, target=path)
        try:
            try:
                yield _LocalWriter(fd, full, writeback=sync)
                if sync:
                    with disk_errors(full):
                        os.fsync(fd)
            finally:
                with disk_errors(full):
                    os.close(fd)  # NFS reports a full disk here
            if overwrite:
                with disk_errors(full):
                    os.replace(self.path_of(part), full)
            else:
                self.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                self.delete([part])
            raise
        if sync:
            self.sync_directory(folder)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory. Raises FileExistsError if `target` exists."""
        old, new = self._to_change(source), self._to_change(target)
        with disk_errors(new):
            _rename_noreplace(old, new)

    def move(self, source: str, target: str) -> None:
        """Rename a file or a directory, and create missing directories. Raises FileExistsError if `target` exists.

        The last component of each path may be any name that the file system allows.
        """
        old, new = self._entry(source), self._entry(target)
        with disk_errors(new):
            self._make_parents(new)
            _rename_noreplace(old, new)

    def _entry(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        if name in ("", ".", "..") or "\0" in name:
            raise UnsafePathError(f"{self.url}/{path} is not a file name.")
        place = self.path_of(folder)
        self._check_inside(place if os.path.lexists(place) else self.url)
        return f"{place}/{name}"

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents. Raises FileExistsError."""
        full = self._to_change(path)
        with disk_errors(full):
            self._make_parents(full)
            os.mkdir(full)

    def sync_file(self, path: str) -> None:
        """Make a file's content durable."""
        with disk_errors(self.path_of(path)):
            fd = self.open_file(path)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_directory(self, path: str = "") -> None:
        """Make a directory's entries durable."""
        full = self.path_of(path)
        with disk_errors(full):
            fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts can't sync a directory
                    raise
            finally:
                os.close(fd)

    def _make_parents(self, full: str) -> None:
        """Create the missing directories above `full`. If this creates the store's root, syncs the new entries."""
        parent = os.path.dirname(full)
        if not self._must_exist:
            created, place = [], self._top
            while not os.path.isdir(place) and place != os.path.dirname(place):
                created.append(place := os.path.dirname(place))
            try:
                os.makedirs(parent, exist_ok=True)
            except FileExistsError as error:
                raise FileExistsError(error.errno, f"{parent} is a file, not a directory") from error
            for place in created:
                with contextlib.suppress(PermissionError):  # a directory that may be written to, but not read
                    LocalStore(place).sync_directory()
            return
        missing = []
        while parent != self.url and not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)

    # --- deleting

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            full = self._to_change(path)
            with contextlib.suppress(FileNotFoundError), disk_errors(full):
                os.unlink(full)

    def delete_tree(self, path: str, *, last: str = "") -> None:
        """Delete a directory and its content. The entry named `last` is deleted after all others."""
        full = self._to_change(path)
        found = self.info(path)
        if found is None:
            return
        if found.kind != "directory":
            self.delete([path])
            return
        with contextlib.suppress(FileNotFoundError), disk_errors(full):
            for entry in list(os.scandir(full)) if last else ():
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name != last:
                    os.unlink(entry.path)
            shutil.rmtree(full)  # uses directory descriptors: never follows a symlink

    def remove_empty_directories(self) -> None:
        """Remove all empty directories under this store's directory, then this directory itself if it is empty."""
        with disk_errors(self.url):
            for folder, _, _ in os.walk(self.url, topdown=False):  # symlinks are not followed
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def is_directory(store: Store) -> TypeIs[LocalStore]:
    """Return whether `store` is a directory of a file system, which can be renamed, locked, linked and opened."""
    return isinstance(store, LocalStore)


@dataclass(slots=True)
class _LocalWriter:
    """Appends to a file descriptor. With `writeback`, the data goes to disk early, so that the final sync is faster."""

    fd: int
    path: str  # the file's final path, for errors
    writeback: bool = False
    _dirty: int = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._dirty += len(view)
        with disk_errors(self.path):
            while len(view):
                view = view[os.write(self.fd, view) :]
        if self.writeback and self._dirty >= _DIRTY:
            self._dirty = 0
            start_writing(self.fd)


def _file_info(path: str, status: os.stat_result) -> FileInfo:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    return FileInfo(path, kind, {"file": status.st_size, "symlink": -1}.get(kind, 0), status.st_mtime)


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(fd, nbytes)


def renameat2(source: str, target: str, flags: int) -> bool:
    """Call renameat2(2). Return False if the system or the file system does not support the flags."""
    function = _libc("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), source, None, target)


def _rename_noreplace(source: str, target: str) -> None:
    if renameat2(source, target, _RENAME_NOREPLACE):
        return
    if os.path.isdir(source):
        # Without renameat2 (NFS), rely on rename(2): a directory can't replace a file or a non-empty directory.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):  # the target has just been created
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
            raise
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        os.unlink(source)
        return
    # Without hard links (a bucket mounted with FUSE), take the name with an empty file, which is then replaced.
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        os.rename(source, target)
    except BaseException:
        os.unlink(target)
        raise
