"""A second way into a file of tmpfs: its memory, while another thread is at the door where writers take turns."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MappedFiles"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since 5.14
_DONT_NEED = 4
_PAGE = mmap.PAGESIZE


@dataclass(slots=True)
class _Mapping:
    data: npt.NDArray[np.uint8]
    address: int


class MappedFiles:
    """The files of a sink, each mapped when it is first asked for. Safe for several threads.

    Pages are there before they are touched: where the file system is full, the call that makes them fails, and no
    signal ends the process. They leave this process when they are filled, so they don't count as its memory.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, _Mapping] = {}
        self._lock = threading.Lock()
        self._advise: Any = None
        self.able = True

    def put(self, index: int, descriptor: int, nbytes: int, start: int, views: Sequence[Any]) -> bool:
        """Lay views one after the other at `start` of a file of `nbytes`; False where they must be written instead."""
        mapping = self._mapping(index, descriptor, nbytes)
        if mapping is None:
            return False
        first, stop = start // _PAGE * _PAGE, start + sum(len(view) for view in views)
        if stop > nbytes or self._advise(mapping.address + first, stop - first, _POPULATE_WRITE):
            return False  # full, or an older kernel: to be written, which tells why it can't
        at = start
        for view in views:
            np.copyto(mapping.data[at : at + len(view)], np.frombuffer(view, np.uint8))
            at += len(view)
        self._advise(mapping.address + first, stop - first, _DONT_NEED)
        return True

    def _mapping(self, index: int, descriptor: int, nbytes: int) -> _Mapping | None:
        with self._lock:
            if not self.able:
                return None
            found = self._mappings.get(index)
            if found is None:
                try:
                    found = self._mappings[index] = self._map(descriptor, nbytes)
                except (OSError, ValueError, AttributeError):  # no room for addresses, or a C library without madvise
                    self.able = False
            return found

    def _map(self, descriptor: int, nbytes: int) -> _Mapping:
        if self._advise is None:
            # Not `mmap.madvise`, which keeps Python's lock while the kernel makes pages.
            self._advise = ctypes.CDLL(None).madvise
            self._advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        data = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
        return _Mapping(data, data.ctypes.data)

    def close(self) -> None:
        """Unmap all. Nothing is being put any more."""
        with self._lock:
            self.able = False
            self._mappings.clear()
