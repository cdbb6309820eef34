"""One writer for a run: a lease that names its owner, is taken over when the owner is dead, and needs no clock."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ckptkit.errors import LeaseHeldError, SaveError
from ckptkit.formats.own.record import CommitRecord
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.owner import Owner, own_statement, owner_in, this_process
from ckptkit.storage.pool import start_or_do_without
from ckptkit.storage.retry import BRIEF_S, Patience, patient, timeout_s
from ckptkit.storage.staging import new_nonce
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    pass

__all__ = [
    "STATE_DIRECTORY",
    "Lease",
    "acquire_lease",
    "last_holder",
    "lease_holder",
    "store_clock",
    "write_state",
    "RunHold",
]

logger = logging.getLogger(__name__)

STATE_DIRECTORY = ".ckptkit"  # below the root of a run: lease, pins, deletions that are under way
BEAT_S = 10.0
TTL_S = 45.0  # a lease from another machine that was not renewed for so long is dead
_POLL_S = 1.0
_FRESH_S = 5.0
_GENERATION = re.compile(r"[0-9]{1,18}")
_here: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _State:
    """One generation of the lease, as its file states it. A new owner adds a generation, never edits one."""

    generation: int
    nonce: str
    owner: Owner
    beat: int = 0
    released: bool = False

    @property
    def path(self) -> str:
        return f"{STATE_DIRECTORY}/lease-{self.generation:08d}.json"

    def to_json(self, root: Store) -> bytes:
        body = {"nonce": self.nonce, "beat": self.beat, "released": self.released}
        return json.dumps({**own_statement(root), **self.owner.to_json(), **body}).encode()


class Lease:
    """The right to write below a root. Renewed by a thread; given back by `release`, or by dying."""

    def __init__(self, root: Store, state: _State, *, since: float, old: Sequence[str] = ()) -> None:
        """`since`: when it began to be written, by `_now`. `old`: files of generations before, for `tidy`."""
        self.root = root
        self.nonce = state.nonce
        self.inventory: Any = None  # the Inventory that the last save saw; that module imports this one
        """What the last save under this lease left on an object store, where none but its holder saves; others may
        have deleted some of it since. None: look."""
        self.wrote_hint = False
        """Whether the last save under this lease wrote `latest`, on an object store: then it need not be looked at."""
        self.sequence = 0
        """Of the last save under this lease."""
        self._state = state
        self._renewed = since
        self._seen = since - TTL_S  # when it was looked at and was ours
        self._old = list(old)
        self._ground = _ground(root)
        self.turn = threading.Lock()  # of the saves of this process: one at a time
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._patience = Patience(min(TTL_S, timeout_s()))  # of each renewal: there is another beat
        _here[state.nonce] = self
        thread = threading.Thread(
            target=_beat, args=(weakref.ref(self), self._stop, BEAT_S), name="ckptkit-lease", daemon=True
        )
        start_or_do_without(thread)
        weakref.finalize(self, self._stop.set).atexit = False  # at exit `release` comes first

    @property
    def path(self) -> str:
        """Of the file that states it, below the root."""
        return self._state.path

    def is_surely_ours(self) -> bool:
        """Tell whether nobody can have taken it: it was renewed a moment ago, and who wants it must see it silent for
        three times as long. Never where one of two that write it at once is not refused."""
        root = self.root
        one_of_two = root.asking_costs and root.has_conditional_writes is True
        return one_of_two and not self._stop.is_set() and _now() - self._renewed < TTL_S / 3

    def make_sure(self) -> None:
        """Raise as `check` does where it is not surely ours."""
        if not self.is_surely_ours():
            self.check()

    def try_conditional(self) -> None:
        """Find out by its file whether the store has conditional writes."""
        with self._lock:
            if not self._stop.is_set():
                self.root.try_conditional(self._state.path, self._state.to_json(self.root))

    def tidy(self) -> None:
        """Delete what older generations left, and files that a kill left half-written."""
        old, self._old = self._old, []
        with contextlib.suppress(OSError):
            self.root.delete(old)

    def check(self, *, view: Store | None = None) -> None:
        """Raise SaveError unless the lease is still ours: the root may be gone, or another job took over.

        Args:
            view: A snapshot of the root, taken just now.
        """
        started = _now()
        top = _top(view or snapshot(self.root, STATE_DIRECTORY)) or self._put_back()
        if top is None:
            raise SaveError(
                f"{self.root.url} is no longer what it was when this job began to write: its lease is gone. Was the "
                "directory removed, or its mount lost? Nothing was written elsewhere."
            )
        if top.nonce != self.nonce:
            raise LeaseHeldError(f"{self.root.url} is written by {top.owner} now: {self._why_lost(top)}")
        self._seen = started if view is None else self._seen

    def _why_lost(self, top: _State) -> str:
        """Return how another came to have the lease, as far as this process can know."""
        silent = _now() - self._renewed
        if top.generation == self._state.generation:
            return (
                "both jobs took the lease at once, and this store does not refuse the second of two such writes "
                "(docs/remote.md: stores without conditional writes). This job may not write any more; end one of them."
            )
        if silent > TTL_S:
            return f"this job did not renew its lease for {silent:.0f} s (was it stopped?) and may not write any more."
        return "that job took the lease over, though this one renewed it. This job may not write any more."

    def _put_back(self) -> _State | None:
        """Write the lease again where its file alone is gone, deleted by hand: the root is still the same. Another
        job that came meanwhile has put its own there; then that one is returned."""
        with self._lock:
            if self._stop.is_set() or self._ground is None or _ground(self.root) != self._ground:
                return None
            logger.warning("the lease of %s was deleted; it is written again", self.root.url)
            root = self.root.existing()
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                root.write(self._state.path, self._state.to_json(root), sync=False)
        return _top(self.root)

    def renew(self) -> None:
        """Show that the owner lives."""
        with self._lock:
            if not self._stop.is_set():
                self._state = replace(self._state, beat=self._state.beat + 1)
                started = _now()
                self._write(self._state)
                self._renewed = started

    def release(self) -> None:
        """Give the lease back, so that the next writer need not ask whether we live. Never raises."""
        self._patience.hurry()  # a renewal that waits for a storage out of reach
        with Patience(min(BRIEF_S, timeout_s())).entered(), self._lock:
            if self._stop.is_set():
                return
            seen = self.root.asking_costs and _now() - self._seen < TTL_S / 3
            sure = seen or self.is_surely_ours()
            self._stop.set()
            _here.pop(self.nonce, None)
            state = replace(self._state, released=True)
            try:
                if state.owner == this_process() and (sure or self._is_top()):  # not in a fork
                    self._write(state)
            except OSError as error:
                logger.warning("the lease of %s could not be given back: %s", self.root.url, error)

    def _is_top(self) -> bool:
        top = _top(snapshot(self.root, STATE_DIRECTORY))
        return top is not None and top.nonce == self.nonce

    def _write(self, state: _State) -> None:
        # Invariant: a root that is gone stays gone, or the next `check` would take another disk for ours.
        folder, _, name = state.path.rpartition("/")
        store = self.root.child(folder).existing()
        store.write(name, state.to_json(self.root), overwrite=True, sync=False)


def _ground(root: Store) -> tuple[int, int] | None:
    """Return what tells a directory from another of its name; None where there is no such thing."""
    if not is_directory(root):
        return None
    with contextlib.suppress(OSError):
        found = os.stat(root.url)
        return found.st_dev, found.st_ino
    return None


def _beat(lease: weakref.ref[Lease], stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        held = lease()
        if held is None:
            return
        try:
            with held._patience.entered():
                held.renew()
        except OSError as error:  # the store may be back at the next beat
            logger.warning("the lease of %s could not be renewed: %s", held.root.url, error)
        del held


@patient()
def acquire_lease(root: Store, *, patience_s: float | None = None, look: Callable[[], Store] | None = None) -> Lease:
    """Return the lease of `root`, at once where nobody has it or its owner is known to be dead.

    Where the owner is on another machine it is watched, at most for `patience_s` (default 45 s): one sign
    of life and it keeps the lease.

    Args:
        look: Gives a snapshot of `root`, taken when it is called. Then `try_conditional` and `tidy` are left to the
            caller, who has something else to do meanwhile.

    Raises:
        LeaseHeldError: Its owner lives; the message names it.
    """
    for _ in range(100):
        started = _now()
        view = snapshot(root, STATE_DIRECTORY) if look is None else look()
        top = _top(view)
        if top is not None and not top.released:
            _refuse_if_alive(root, top, TTL_S if patience_s is None else patience_s)
        # A file that can't be read (a power cut: leases are not synced) is no lease, but its number is taken.
        newest = max((generation for generation, _ in _generations(view)), default=0)
        if newest > (top.generation if top else 0) and _top(root) != top:
            continue  # another contender was faster
        state, since = _State(newest + 1, new_nonce(), this_process()), _now()
        try:
            # Put-if-absent: one of many contenders wins.
            root.claim(state.path, state.to_json(root), looked=since - started < _FRESH_S)
        except FileExistsError:
            continue
        logger.debug("took the lease of %s, generation %d", root.url, state.generation)
        lease = Lease(root, state, since=since, old=_left(view, state))
        if look is None:
            lease.try_conditional()
            lease.tidy()
        return lease
    raise LeaseHeldError(f"{root.url}: the lease changes hands all the time. Many jobs want to write here.")


def lease_holder(root: Store) -> Owner | None:
    """Return who holds the lease by its file, alive or not; None where it is free."""
    owner, holds = last_holder(root)
    return owner if holds else None


def last_holder(root: Store) -> tuple[Owner | None, bool]:
    """Return who had the lease last, None where nobody ever had it; and whether it was not given back."""
    top = _top(root)
    return (None, False) if top is None else (top.owner, not top.released)


def _refuse_if_alive(root: Store, state: _State, patience_s: float) -> None:
    owner, alive = state.owner, state.owner.alive()
    if owner == this_process():
        alive = state.nonce in _here  # else: left by a manager of this process that is gone
    if alive is None:
        alive = _shows_life(root, state, patience_s)
    if alive:
        where = " (this process: another manager has it open; close that one)" if owner == this_process() else ""
        raise LeaseHeldError(
            f"{root.url} is being written by {owner}{where}; nothing was written. Two jobs can't save to one root: "
            "end the other one, or choose another directory."
        )
    why = "is dead" if not owner.copied else "writes to the directory that this one is a copy of"
    logger.info("%s: took over from %s, which %s", root.url, owner, why)


def _shows_life(root: Store, state: _State, patience_s: float) -> bool:
    """Watch an owner on another machine. Compares times of the store's clock only, and our own stop-watch."""
    found = root.info(state.path)
    if found is not None and found.mtime:
        age = store_clock(root) - found.mtime
        if age > TTL_S:
            return False
        patience_s = min(patience_s, TTL_S - max(0.0, age))
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        top = _top(root)
        if top is None or top.released or top.nonce != state.nonce:
            return False  # over, or another contender has it: the caller looks again
        if top.beat != state.beat:
            return True
    return False


def write_state(root: Store, path: str, data: bytes, *, overwrite: bool = False) -> None:
    """Write a file of the state directory, not synced: the machine that goes down takes its owner with it."""
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):  # a reader that leaves removes the directory if it is empty
            return root.write(path, data, overwrite=overwrite, sync=False)
    return root.write(path, data, overwrite=overwrite, sync=False)


def store_clock(root: Store) -> float:
    """Return the time as the store stamps files, in seconds since the epoch; ours where it stamps none."""
    for _ in range(3):
        path = f"{STATE_DIRECTORY}/clock-{new_nonce()}"
        write_state(root, path, b"?")
        found = root.info(path)
        root.delete([path])
        if found is not None:  # else a new owner of the lease has tidied up
            break
    return found.mtime if found is not None and found.mtime else time.time()


def _top(root: Store) -> _State | None:
    """Return the newest generation that can be read."""
    for generation, path in sorted(_generations(root), reverse=True):
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            body: Any = json.loads(root.read(path, 0, 4096))
            owner = owner_in(root, body)
            if owner is not None and isinstance(body.get("nonce"), str) and type(body.get("beat")) is int:
                return _State(generation, body["nonce"], owner, body["beat"], body.get("released") is True)
    return None


def _generations(root: Store) -> list[tuple[int, str]]:
    found = []
    for item in root.list(STATE_DIRECTORY):
        name = item.path.rpartition("/")[2]
        if name.startswith("lease-") and name.endswith(".json") and _GENERATION.fullmatch(name[6:-5]):
            found.append((int(name[6:-5]), item.path))
    return found


def _left(view: Store, state: _State) -> list[str]:
    """Return what older generations left, and files that a kill left half-written."""
    old = [path for generation, path in _generations(view) if generation < state.generation]
    parts = [i.path for i in view.list(STATE_DIRECTORY) if i.path.endswith(".part") or "/clock-" in i.path]
    return old + parts


def _now() -> float:
    """Return seconds of a clock that nobody sets and that counts while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# What a run holds for its life: the lease to write, and the checkpoint that it was resumed from.


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
            if not self._root.asking_costs:
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
