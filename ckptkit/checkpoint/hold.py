"""What a run holds for its life: the lease to write, and the checkpoint that it was resumed from."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from ckptkit.checkpoint.lease import Lease, acquire_lease
from ckptkit.errors import SaveError
from ckptkit.formats.layout import CommitRecord
from ckptkit.storage.store import Store
from ckptkit.storage.workers import start_or_do_without

__all__ = ["RunHold"]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_shared: dict[tuple[int, str], _Shared] = {}  # by process (a fork has none of its parent's) and root


_LEAVING_S = 10.0  # as long as a pin that is on its way out is waited for at the end; it is void without us

_Held = tuple[list["_Shared"], list[ExitStack], int]
# Garbage is collected at any line of any thread: in the one that serves the object store, which would wait for
# itself, or inside `_lock`. So what nobody gave back is only noted there, which a SimpleQueue allows, and given
# back by a thread of its own.
_abandoned: queue.SimpleQueue[_Held] = queue.SimpleQueue()
_reaper: tuple[int, threading.Thread] | None = None
_ending = False


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
        self._leaving: list[threading.Event] = []
        self._taken: list[_Shared] = []
        self._end = weakref.finalize(self, _abandon, self._taken, self._pins, os.getpid())

    def lease(self, look: Callable[[], Store] | None = None) -> Lease:
        """Return the lease, taken at the first call.

        Args:
            look: As for `acquire_lease`.

        Raises:
            LeaseHeldError: Another job writes there; the message names it.
        """
        if not self._taken:
            _watch()
            self._taken.append(_take(self._root, look))
        return self._taken[0].lease

    def remember(self, left: Collection[str], *, among: Callable[[CommitRecord], bool] | None = None) -> None:
        """Note that no checkpoint is there but those in `left`, among those that `among` is about; None: all."""
        lease = self._taken[0].lease if self._taken else None
        if lease is not None and lease.inventory is not None:
            known = lease.inventory.committed
            kept = [i for i in known if i.name in left or (among is not None and not among(i.record))]
            lease.inventory = replace(lease.inventory, committed=tuple(kept))

    def keep(self, pin: ExitStack) -> None:
        """Hold an entered pin from now on, in place of the one before."""
        _watch()
        self._pins.append(pin)
        while len(self._pins) > 1:
            before = self._pins.pop(0)
            if self._root.local_root is not None:
                before.close()
                continue
            leaving, left = ExitStack(), threading.Event()  # a request, which no load waits for
            leaving.callback(left.set)
            leaving.push(before)
            self._leaving.append(left)
            _abandoned.put(([], [leaving], os.getpid()))

    def release(self) -> None:
        """Give everything back. Can be repeated."""
        alive = self._end.detach()
        if alive is not None:
            _give_back(*alive[2])
            if alive[2][2] == os.getpid():
                for left in self._leaving:
                    left.wait(_LEAVING_S)


def _take(root: Store, look: Callable[[], Store] | None) -> _Shared:
    key = (os.getpid(), root.url)
    with _lock:
        shared = _shared.get(key)
        if shared is not None:
            try:
                shared.lease.check(view=None if look is None else look())
            except SaveError:  # the root was removed and made anew, or another job took over
                shared = None
        if shared is None:
            shared = _shared[key] = _Shared(acquire_lease(root, look=look))
        shared.users += 1
        return shared


def _abandon(taken: list[_Shared], pins: list[ExitStack], pid: int) -> None:
    if _ending and threading.current_thread() is threading.main_thread():
        _give_back(taken, pins, pid)
    else:
        _abandoned.put((taken, pins, pid))


def _watch() -> None:
    """Have a thread that gives back what is abandoned."""
    global _reaper
    with _lock:
        if _reaper is None or _reaper[0] != os.getpid():
            thread = threading.Thread(target=_reap, name="ckptkit-hold", daemon=True)
            _reaper = (os.getpid(), thread)
            start_or_do_without(thread)


def _reap() -> None:
    while True:
        _give_back_or_say(_abandoned.get())


def _give_back_or_say(held: _Held) -> None:
    try:
        _give_back(*held)
    except Exception as error:  # noqa: BLE001 - nobody is there to catch it
        logger.warning("what a manager held could not be given back: %s", error)


def _end_of_process() -> None:
    global _ending
    _ending = True
    while True:
        try:
            held = _abandoned.get_nowait()
        except queue.Empty:
            return
        _give_back_or_say(held)


def _forget() -> None:
    """In a fork: what was held, and the lock that another thread may have had, are our parent's."""
    global _lock
    _lock = threading.Lock()
    _shared.clear()


weakref.finalize(_Shared(cast(Lease, None)), int)  # the finalizers' own end is registered before, and so comes after
atexit.register(_end_of_process)
os.register_at_fork(after_in_child=_forget)


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
