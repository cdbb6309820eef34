"""What a run holds for its life: the lease to write, and the checkpoint that it was resumed from."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import ExitStack

from ckptkit.checkpoint.lease import Lease, acquire_lease
from ckptkit.errors import SaveError
from ckptkit.storage.store import Store

__all__ = ["RunHold"]

_lock = threading.Lock()
_shared: dict[tuple[int, str], _Shared] = {}  # by process (a fork has none of its parent's) and root


class _Shared:
    """The lease that this process has of a root, and how many managers use it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.users = 0


class RunHold:
    """The holdings of one manager, on rank 0. Given back by `release`, when nobody refers to it, and at exit.

    Managers of one process share the lease: their saves take turns.
    """

    def __init__(self, root: Store) -> None:
        self._root = root
        self._pins: list[ExitStack] = []
        self._taken: list[_Shared] = []
        self._end = weakref.finalize(self, _give_back, self._taken, self._pins, os.getpid())

    def lease(self) -> Lease:
        """Return the lease, taken at the first call.

        Raises:
            LeaseHeldError: Another job writes there; the message names it.
        """
        if not self._taken:
            self._taken.append(_take(self._root))
        return self._taken[0].lease

    def keep(self, pin: ExitStack) -> None:
        """Hold an entered pin from now on, in place of the one before."""
        self._pins.append(pin)
        while len(self._pins) > 1:
            self._pins.pop(0).close()

    def release(self) -> None:
        """Give everything back. Can be repeated."""
        self._end()


def _take(root: Store) -> _Shared:
    key = (os.getpid(), root.url)
    with _lock:
        shared = _shared.get(key)
        if shared is not None:
            try:
                shared.lease.check()
            except SaveError:  # the root was removed and made anew, or another job took over
                shared = None
        if shared is None:
            shared = _shared[key] = _Shared(acquire_lease(root))
        shared.users += 1
        return shared


def _give_back(taken: list[_Shared], pins: list[ExitStack], pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork: they are our parent's
    while pins:
        pins.pop().close()
    with _lock:
        while taken:
            shared = taken.pop()
            shared.users -= 1
            if shared.users == 0:
                shared.lease.release()
                key = (pid, shared.lease.root.url)
                if _shared.get(key) is shared:
                    del _shared[key]
