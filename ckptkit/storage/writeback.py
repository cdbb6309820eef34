"""Having the disk begin to write what is in memory of a file, so that the sync at the end has less to do."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["start_writing"]

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def start_writing(descriptor: int) -> None:
    """Have the disk begin to write what is in memory of a file, and don't wait.

    Nothing is durable by it, and where the system can't, nothing is lost by that.
    """
    begin = _sync_file_range()
    if begin is not None:
        begin(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


@functools.lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    result: Callable[[int, int, int, int], int] = call
    return result
