"""One writer at a time: a system lock on a directory, or a lease that needs no clock and ends with its owner."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.errors import LeaseHeldError, SaveError
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.owner import Owner, own_statement, owner_in, this_process
from ckptkit.storage.pool import start_or_do_without
from ckptkit.storage.retry import BRIEF_S, Patience, patient, timeout_s
from ckptkit.storage.staging import new_nonce
from ckptkit.storage.store import Store

if sys.platform != "win32":  # which has nothing to lock by
    import fcntl

__all__ = [
    "Attempts",
    "HeldDirectory",
    "hold",
    "STATE_DIRECTORY",
    "Lease",
    "acquire_lease",
    "check_state_directory",
    "lease_holder",
    "open_attempts",
    "store_clock",
    "write_state",
]

logger = logging.getLogger(__name__)

STATE_DIRECTORY = ".ckptkit"  # below the root of a run: lease, pins, deletions that are under way
BEAT_S = 10.0
TTL_S = 45.0  # a lease from another machine that was not renewed for so long is dead
_POLL_S = 1.0
_FRESH_S = 5.0
_MOST_ATTEMPTS = 64  # of those that failed: what a slow server puts there late is still known to be theirs
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
    attempts: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{STATE_DIRECTORY}/lease-{self.generation:08d}.json"

    def to_json(self, root: Store) -> bytes:
        body = {"nonce": self.nonce, "beat": self.beat, "released": self.released, "attempts": self.attempts}
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
        self._spare = True  # whether the last of the attempts that the file states has not begun
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

    def new_attempt(self) -> str:
        """Return the id of an attempt to save that the lease's file states: before anything of it is written."""
        if not self._spare:
            self._state_spare("")
        self._spare = False
        return self._state.attempts[-1]

    def end_attempt(self, save_id: str, *, committed: bool) -> None:
        """State the next attempt, so that it need not wait for that; of this one nothing may be left once it was
        committed. Never raises."""
        try:
            with self._patience.entered():
                self._state_spare(save_id if committed else "")
        except OSError as error:
            logger.debug("the next attempt in %s is not stated yet: %s", self.root.url, error)

    def _state_spare(self, done: str) -> None:
        with self._lock:
            kept = [name for name in self._state.attempts if name != done][-_MOST_ATTEMPTS:]
            self._state = replace(self._state, attempts=(*kept, new_nonce()))
            if not self._stop.is_set():
                self._write(self._state)
                self._spare = True

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
        left = top.attempts if top is not None and top.owner.copied is False else ()
        attempts = (*left[-_MOST_ATTEMPTS:], new_nonce())
        state, since = _State(newest + 1, new_nonce(), this_process(), attempts=attempts), _now()
        try:
            if is_directory(root):
                try:  # the root's inode is a part of what is stated
                    root.make_directory(STATE_DIRECTORY)
                except FileExistsError:
                    check_state_directory(root)
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


def check_state_directory(root: Store) -> None:
    """Raise where somebody's file has the name of the directory that holds the lease."""
    found = root.info(STATE_DIRECTORY) if is_directory(root) else None
    if found is not None and found.kind == "file":
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"{root.url}/{STATE_DIRECTORY} is a file, not the directory in which ckptkit keeps the lease of a run. "
            "Move it away, or choose another place.",
        )


def lease_holder(root: Store) -> Owner | None:
    """Return who holds the lease by its file, alive or not; None where it is free."""
    top = _top(root)
    return None if top is None or top.released else top.owner


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts to save that were begun and are not known to be committed, by what the lease states.

    Attributes:
        owner: Whose they are while they are under way; None where the lease was given back.
    """

    ids: frozenset[str] = frozenset()
    owner: Owner | None = None


def open_attempts(root: Store) -> Attempts:
    """Return the attempts that were begun below `root` itself, not below a directory that it is a copy of."""
    top = _top(snapshot(root, STATE_DIRECTORY))
    if top is None or top.owner.copied is not False:
        return Attempts()
    return Attempts(frozenset(top.attempts), None if top.released else top.owner)


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
                begun = body.get("attempts")
                attempts = tuple(str(name) for name in begun) if isinstance(begun, list) else ()
                return _State(generation, body["nonce"], owner, body["beat"], body.get("released") is True, attempts)
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


# --- a lock of the system, which it gives back when its process ends: for writers without a run


_held: dict[tuple[int, int], Callable[[], object]] = {}  # what gives each back
_held_lock = threading.Lock()


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
        with _held_lock:
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
