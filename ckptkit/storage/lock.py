"""One writer at a time in a local directory: a lock that the system gives back when its process ends."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable

from ckptkit.errors import LeaseHeldError
from ckptkit.storage.local import is_directory
from ckptkit.storage.store import Store

if sys.platform != "win32":  # which has nothing to lock by
    import fcntl

__all__ = ["HeldDirectory", "hold"]

_held: dict[tuple[int, int], Callable[[], object]] = {}  # what gives each back
_lock = threading.Lock()


class HeldDirectory:
    """A directory that this process writes to, until `release`, or until nobody has this object any more.

    The process itself may take it again: its save before may have failed on another rank. Where the file system has no
    such locks, nothing is held.
    """

    def __init__(self, path: str) -> None:
        """Take it, making it where it is not there.

        Raises:
            LeaseHeldError: Another process is writing to it.
        """
        os.makedirs(path, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        with _lock:
            _held.pop(key, bool)()
            try:
                _take(fd)
            except BlockingIOError:
                os.close(fd)
                raise LeaseHeldError(
                    f"{path}: another process is saving to it; nothing was touched. Save to another directory."
                ) from None
            self._release = _held[key] = weakref.finalize(self, _give_back, fd, os.getpid())
            self._release.atexit = False  # the system does it

    def release(self) -> None:
        """Give it back; does nothing the second time."""
        self._release()


def hold(store: Store) -> HeldDirectory | None:
    """Take the directory of a store; None where it is no directory that could be locked."""
    return HeldDirectory(store.url) if is_directory(store) else None


def _take(fd: int) -> None:
    if sys.platform != "win32":
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a network file system that can't
            return


def _give_back(fd: int, owner: int) -> None:
    with contextlib.suppress(OSError):
        if sys.platform != "win32" and os.getpid() == owner:  # not in a child, which shares the lock
            fcntl.flock(fd, fcntl.LOCK_UN)  # children hold the descriptor, too
        os.close(fd)
