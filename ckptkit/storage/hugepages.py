"""Huge pages below a file on tmpfs while it is written: one page is found, charged and indexed where it were 512."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["HugePages"]

_TMPFS = 0x01021994  # linux/magic.h
_COLLAPSE = 25  # MADV_COLLAPSE of linux/mman.h, since 6.1; it asks no setting but `deny`, as madvise(2) says
_READ_WRITE, _NONE = 3, 0
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_LARGEST = 4 << 20  # of a page: larger ones have left the cache when they are written to
_LEAST = 16 << 20  # a smaller file has nothing to gain
_SPARES_S = 0.25e-9  # a byte of a page, where making it takes 0.05e-9 to 0.1e-9
_PATIENCE_S = 0.01e-9  # a byte of the file: pages may take so much longer than they spare, a fortieth of the write


class HugePages:
    """Lays huge pages below what is about to be appended to a file.

    The write itself stays a write: a full file system is an error of that call, no signal. Pages are made only where
    the file will reach to their end, so it takes no more room than with small ones. Where there are none to be had it
    gets small ones, and so does the rest of it once they have taken longer than they spare: memory in small pieces is
    put together first, and a virtual machine has to be given what it has not used for a while.
    """

    def __init__(self, fd: int, nbytes: int, page: int) -> None:
        self._fd = fd
        self._stop = nbytes // page * page
        self._page = page
        self._next = self._made = 0
        self._left = _PATIENCE_S * nbytes
        self._calls = _calls()
        self._reserved: int | None = self._map(None, 2 * page, _NONE, _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1, 0)

    @classmethod
    def below(cls, fd: int, nbytes: int) -> HugePages | None:
        """Return what does that for an empty file that will have `nbytes` or more; None where nothing is gained."""
        page = _page()
        if nbytes < _LEAST or not page or not _is_tmpfs(fd):
            return None
        try:
            return cls(fd, nbytes, page)
        except OSError:  # no room for addresses
            return None

    @property
    def made(self) -> int:
        """Bytes of the file that lie on huge pages."""
        return self._made

    def reach(self, stop: int) -> None:
        """Have pages below what will be written up to `stop`. Never raises."""
        while self._next < min(stop, self._stop) and self._reserved is not None:
            started = time.perf_counter()
            made = self._make(self._reserved)
            self._next += self._page
            self._left += _SPARES_S * self._page - (time.perf_counter() - started)
            if not made or self._left < 0:
                self.close()

    def close(self) -> None:
        """Give the addresses back."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            self._calls.munmap(reserved, 2 * self._page)

    def _make(self, reserved: int) -> bool:
        address = -(-reserved // self._page) * self._page
        try:
            os.pwrite(self._fd, b"\0", self._next)  # a range without any page is not collapsed
            self._map(address, self._page, _READ_WRITE, _SHARED | _FIXED, self._fd, self._next)
        except OSError:  # the write that follows says why
            return False
        if self._calls.madvise(address, self._page, _COLLAPSE):
            return False
        self._made += self._page
        return True

    def _map(self, address: int | None, nbytes: int, access: int, flags: int, fd: int, start: int) -> int:
        found: int = self._calls.mmap(address, nbytes, access, flags, fd, start)
        if found == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found


@dataclass(frozen=True, slots=True)
class _Calls:
    """Of the C library, without Python's lock while the kernel is at work."""

    mmap: Any
    munmap: Any
    madvise: Any
    fstatfs: Any


@functools.cache
def _calls() -> _Calls:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    library.mmap.restype = address
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    library.fstatfs.argtypes = (number, address)
    return _Calls(library.mmap, library.munmap, library.madvise, library.fstatfs)


@functools.cache
def _page() -> int:
    """Bytes of a huge page, 0 where there are none that are worth it."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: a C library without these calls
        size = int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
        _calls()
        return size if size <= _LARGEST else 0
    return 0


def _is_tmpfs(fd: int) -> bool:
    status = ctypes.create_string_buffer(256)
    return _calls().fstatfs(fd, status) == 0 and int.from_bytes(status.raw[:8], sys.byteorder) == _TMPFS
