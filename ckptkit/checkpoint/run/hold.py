"""Holds a run's write lease, and a pin that protects the checkpoint from which the run was resumed."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ckptkit.errors import SaveError
from ckptkit.formats.own.record import CommitRecord
from ckptkit.storage.lock import Lease, acquire_lease
from ckptkit.storage.store import Store

_lock = threading.Lock()
_shared: dict[tuple[int, str], _Shared] = {}  # by process id (a fork holds no leases) and root


@dataclass(slots=True, eq=False)
class _Shared:
    """This process's lease on a root, and the number of managers that use it."""

    lease: Lease
    users: int = 0


class RunHold:
    """Holds, for one manager on rank 0, the lease on the run and a pin on the checkpoint that the manager loaded.

    All managers in a process share the lease on a root, and their saves take turns. A manager that is never closed
    keeps the lease until the process exits.
    """

    def __init__(self, root: Store) -> None:
        self._root = root
        self._pid = os.getpid()
        self._pin: ExitStack | None = None
        self._taken: _Shared | None = None

    def lease(self, look: Callable[[], Store] | None = None) -> Lease:
        """Return the lease. The first call acquires it, or raises LeaseHeldError. For `look`, see `acquire_lease`."""
        if self._taken is not None:
            return self._taken.lease
        root, key = self._root, (os.getpid(), self._root.url)
        with _lock:
            shared = _shared.get(key)
            if shared is not None:
                try:
                    shared.lease.check(view=None if look is None else look())
                except SaveError:  # the root was removed and recreated, or another job took over
                    shared = None
            if shared is None:
                shared = _shared[key] = _Shared(acquire_lease(root, look=look))
            shared.users += 1
            self._taken = shared
        return shared.lease

    def remember(self, left: Collection[str], *, among: Callable[[CommitRecord], bool] | None = None) -> None:
        """Update the lease's list after a rotation that left the checkpoints `left`.

        The rotation was among the checkpoints for which `among` returns True (None: all). The others stay in the list.
        """
        lease = self._taken.lease if self._taken is not None else None
        if lease is not None and lease.inventory is not None:
            known = lease.inventory.committed
            kept = [i for i in known if i.name in left or (among is not None and not among(i.record))]
            lease.inventory = replace(lease.inventory, committed=tuple(kept))

    def keep(self, pin: ExitStack) -> None:
        """Hold `pin` until `release`. Release the pin that was held before."""
        before, self._pin = self._pin, pin
        if before is not None:
            before.close()

    def hurry(self) -> None:
        """End the waits of the lease's requests, unless another manager uses the lease."""
        if self._taken is not None and self._taken.users == 1:
            self._taken.lease.hurry()

    def release(self) -> None:
        """Release the lease and the pin. May be called again. Does nothing in a fork, because the parent owns both."""
        if os.getpid() != self._pid:
            return
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.close()
        shared, self._taken = self._taken, None
        if shared is not None:
            with _lock:
                shared.users -= 1
                if shared.users == 0:
                    shared.lease.release()
                    key = (self._pid, self._root.url)
                    if _shared.get(key) is shared:
                        del _shared[key]


@atexit.register
def _end_of_process() -> None:
    for (pid, _), shared in list(_shared.items()):
        if pid == os.getpid():
            shared.lease.release()
