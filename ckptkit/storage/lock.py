"""Allows only one writer at a time: by a lease (a file) in a run, and by a lock of the operating system elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.errors import LeaseHeldError, SaveError, StorageError, UnsafePathError
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.owner import Owner, owner_in, owner_json, place_of, read_json, this_process
from ckptkit.storage.pool import start_or_do_without
from ckptkit.storage.retry import BRIEF_S, Patience, patient, timeout_s
from ckptkit.storage.staging import STARTING_S, new_nonce
from ckptkit.storage.store import Store

logger = logging.getLogger(__name__)

STATE_DIRECTORY = ".ckptkit"  # in a run's root: holds the lease, pins and pending deletions
BEAT_S = 10.0
TTL_S = 45.0  # another machine's lease expires after this long without a heartbeat
_POLL_S = 1.0
_FRESH_S = 5.0
_MOST_ATTEMPTS = 64  # failed attempts to remember; a slow server may still store a file of such an attempt
_GENERATION = re.compile(r"[0-9]{1,18}")
_held_leases: weakref.WeakValueDictionary[str, Lease] = weakref.WeakValueDictionary()  # this process's leases, by nonce


@dataclass(frozen=True, slots=True)
class _State:
    """The content of one lease file. A new owner creates a file with the next generation, and edits no other file."""

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
        return json.dumps({**owner_json(root, self.owner), **body}).encode()


class Lease:
    """The right to write under a root. A thread renews the lease until `release` is called or the process ends."""

    def __init__(self, root: Store, state: _State, *, since: float, old: Sequence[str] = ()) -> None:
        """Start to renew a lease. The lease's file must have been written.

        Args:
            since: The time of `_now` just before the file was written.
            old: Lease files of earlier generations. `finish` deletes them.
        """
        self.root = root
        self.path, self.nonce = state.path, state.nonce
        self.inventory: Any = None  # an Inventory, which can't be imported here (circular import)
        """The inventory of an object store after the last save under this lease; None if unknown.

        Only the lease's owner saves, but other processes may have deleted files since.
        """
        self.wrote_hint = False
        """Whether the last save under this lease wrote `latest` to an object store. If so, it need not be read."""
        self.sequence = 0
        """The sequence number of the last save under this lease."""
        self._state = state
        self._renewed = since
        self._old = list(old)
        self._spare = True  # whether the file already lists an id for the next attempt
        self._inode = (place_of(root) or [])[1:]  # [] on an object store
        self.turn = threading.Lock()  # held during a save, so that this process's saves take turns
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._patience = Patience(min(TTL_S, timeout_s()))  # for each renewal; short, because the next one follows soon
        _held_leases[state.nonce] = self
        thread = threading.Thread(
            target=_beat, args=(weakref.ref(self), self._stop, BEAT_S), name="ckptkit-lease", daemon=True
        )
        start_or_do_without(thread)
        weakref.finalize(self, self._stop.set).atexit = False  # at exit, `release` must come first

    def is_surely_ours(self) -> bool:
        """Return True if no other job can have taken the lease, because it was renewed a moment ago. Makes no request.

        Always False on a file system, and on a store where two jobs can take the lease at once.
        """
        root = self.root
        one_owner = root.asking_costs and root.has_conditional_writes is True
        return one_owner and not self._stop.is_set() and _now() - self._renewed < TTL_S / 3

    def new_attempt(self) -> str:
        """Return the id of a new save attempt. It is in the lease's file before this method returns."""
        if not self._spare:
            self._add_spare("")
        self._spare = False
        return self._state.attempts[-1]

    def end_attempt(self, save_id: str, *, committed: bool) -> None:
        """Write the id of the next attempt to the lease's file now, so that the next save need not wait. Never raises.

        Args:
            committed: Whether the attempt `save_id` left no files to clean up. If so, its id is removed from the file.
        """
        try:
            with self._patience.entered():
                self._add_spare(save_id if committed else "")
        except OSError as error:
            logger.debug("the lease of %s does not list the next attempt yet: %s", self.root.url, error)

    def _add_spare(self, committed: str) -> None:
        with self._lock:
            attempts = [name for name in self._state.attempts if name != committed][-_MOST_ATTEMPTS:]
            self._state = replace(self._state, attempts=(*attempts, new_nonce()))
            if not self._stop.is_set():
                self._write(self._state)
                self._spare = True

    def finish(self) -> None:
        """Do the work for which `acquire_lease` need not wait.

        Test whether the store has conditional writes, with a write to the lease's file. Delete lease files of earlier
        generations, and incomplete files of killed processes.
        """
        if self.root.has_conditional_writes is None:
            with self._lock:
                if not self._stop.is_set():
                    self.root.try_conditional(self.path, self._state.to_json(self.root))
        old, self._old = self._old, []
        with contextlib.suppress(OSError):
            self.root.delete(old)

    def check(self, *, view: Store | None = None) -> None:
        """Raise SaveError if the lease is lost, because the root no longer exists or another job took the lease.

        Makes no request if `is_surely_ours` returns True. `view` is a snapshot of the root that was just taken.
        """
        if view is None and self.is_surely_ours():
            return
        newest = _newest(view or snapshot(self.root, STATE_DIRECTORY)) or self._put_back()
        if newest is None:
            raise SaveError(
                f"The lease of {self.root.url} is gone, so this may not be the directory in which the job began to "
                "write. Was the directory removed, or its mount lost? Nothing was written elsewhere."
            )
        if newest.nonce != self.nonce:
            raise LeaseHeldError(f"{self.root.url} is now being written by {newest.owner}: {self._why_lost(newest)}")

    def _why_lost(self, newest: _State) -> str:
        """Return the most likely reason why another job holds the lease."""
        silent = _now() - self._renewed
        if newest.generation == self._state.generation:
            return (
                "both jobs took the lease at the same time, and this store has no conditional writes to prevent that "
                "(docs/remote.md). This job may no longer write; end one of the two."
            )
        if silent > TTL_S:
            return f"this job did not renew its lease for {silent:.0f} s (was it suspended?) and may no longer write."
        return "that job took the lease over, although this one renewed it. This job may no longer write."

    def _put_back(self) -> _State | None:
        """Write the lease's file again after it was deleted. Return the newest lease, which may be another job's.

        Returns None if the root is no longer the same directory, or if the lease was released.
        """
        with self._lock:
            if self._stop.is_set() or not self._inode or (place_of(self.root) or [])[1:] != self._inode:
                return None
            logger.warning("the lease of %s was deleted; it is written again", self.root.url)
            root = self.root.existing()
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                root.write(self.path, self._state.to_json(root), sync=False)
        return _newest(self.root)

    def renew(self) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._state = replace(self._state, beat=self._state.beat + 1)
                started = _now()
                self._write(self._state)
                self._renewed = started

    def hurry(self) -> None:
        """End the waits of renewals and of `end_attempt` for an unreachable store."""
        self._patience.hurry()

    def release(self) -> None:
        """Release the lease, so that the next writer need not wait for its expiry. Never raises."""
        self.hurry()
        with Patience(min(BRIEF_S, timeout_s())).entered(), self._lock:
            if self._stop.is_set():
                return
            sure = self.is_surely_ours()
            self._stop.set()
            _held_leases.pop(self.nonce, None)
            state = replace(self._state, released=True)
            try:
                newest = self._state if sure else _newest(snapshot(self.root, STATE_DIRECTORY))
                if state.owner == this_process() and newest and newest.nonce == self.nonce:  # not in a forked child
                    self._write(state)
            except OSError as error:
                logger.warning("the lease of %s could not be released: %s", self.root.url, error)

    def _write(self, state: _State) -> None:
        # Invariant: a lost root is never recreated. Otherwise the next `check` would accept a different disk.
        folder, _, name = state.path.rpartition("/")
        store = self.root.child(folder).existing()
        store.write(name, state.to_json(self.root), overwrite=True, sync=False)


def _beat(reference: weakref.ref[Lease], stop: threading.Event, seconds: float) -> None:
    while not stop.wait(seconds):
        lease = reference()
        if lease is None:
            return
        try:
            with lease._patience.entered():
                lease.renew()
        except OSError as error:  # the store may respond at the next heartbeat
            logger.warning("the lease of %s could not be renewed: %s", lease.root.url, error)
        del lease


@patient()
def acquire_lease(root: Store, *, look: Callable[[], Store] | None = None) -> Lease:
    """Take the lease of `root`, and return it.

    If it is free, or its owner is known to be dead, the call does not wait. If the owner is on another machine, the
    call waits up to TTL_S for a heartbeat.

    Args:
        look: A function that returns a new snapshot of `root`. A caller that passes it must call `Lease.finish` later.

    Raises:
        LeaseHeldError: The owner is alive. The message names the owner.
    """
    for _ in range(100):
        started = _now()
        view = snapshot(root, STATE_DIRECTORY) if look is None else look()
        newest = _newest(view)
        if newest is not None and not newest.released:
            _refuse_if_alive(root, newest)
        # A power cut can damage a lease's file. Its content is ignored, but its generation counts as taken.
        generation = max((generation for generation, _ in _generations(view)), default=0)
        if generation > (newest.generation if newest else 0) and _newest(root) != newest:
            continue  # another contender was faster
        left = newest.attempts if newest is not None and newest.owner.copied is False else ()
        attempts = (*left[-_MOST_ATTEMPTS:], new_nonce())
        state, since = _State(generation + 1, new_nonce(), this_process(), attempts=attempts), _now()
        try:
            if is_directory(root):
                try:  # the file contains the root's inode, so the root must exist
                    root.make_directory(STATE_DIRECTORY)
                except FileExistsError:
                    check_state_directory(root)
            # Put-if-absent: exactly one of several contenders wins. Without conditional writes, check again that the
            # name is free, unless this was just checked. No sync: after a power cut, this process is gone, too.
            look_again = root.has_conditional_writes is False and since - started >= _FRESH_S
            (root if look_again else root.with_free_names()).write(state.path, state.to_json(root), sync=False)
        except FileExistsError:
            continue
        except PermissionError as error:
            raise StorageError(error.errno, f"{root.url} is not writable: {error.strerror}") from error
        logger.debug("took the lease of %s, generation %d", root.url, state.generation)
        old = [path for generation, path in _generations(view) if generation < state.generation]
        unfinished = [i for i in view.list(STATE_DIRECTORY) if i.path.endswith(".part") or "/clock-" in i.path]
        with contextlib.suppress(OSError):  # the lease is taken, and must not be lost because of leftovers
            if unfinished and (ours := root.info(state.path)) is not None:
                # Newer ones may belong to contenders that are about to rename them.
                old += [item.path for item in unfinished if ours.mtime - item.mtime > STARTING_S]
        lease = Lease(root, state, since=since, old=old)
        if look is None:
            lease.finish()
        return lease
    raise LeaseHeldError(f"{root.url}: the lease keeps changing hands. Too many jobs want to write here.")


def obstacle(root: Store) -> str:
    """Return why a save to `root` would fail now, or "". Writes nothing and does not wait.

    Returns "" for an object store, and for an owner on another machine, because a check would take requests or a wait.
    """
    if not is_directory(root):
        return ""
    try:
        newest = _newest(root)
        if newest is not None and not newest.released and newest.owner != this_process() and newest.owner.alive():
            return f"{root.url} is being written by {newest.owner}"
        if not root.is_writable() or not root.child(STATE_DIRECTORY).is_writable():
            return f"{root.url} is not writable"
    except OSError:
        return ""
    except UnsafePathError as error:
        return str(error).removesuffix(".")
    return ""


def check_state_directory(root: Store) -> None:
    """Raise NotADirectoryError if there is a file where the directory of the lease should be."""
    found = root.info(STATE_DIRECTORY) if is_directory(root) else None
    if found is not None and found.kind == "file":
        raise NotADirectoryError(
            f"{root.url}/{STATE_DIRECTORY} is a file, not the directory in which ckptkit keeps the lease of a run. "
            "Move it away, or choose another directory"
        )


@dataclass(frozen=True, slots=True)
class Attempts:
    """The save attempts in a lease's file that may be uncommitted. `owner` is None if the lease was released."""

    ids: frozenset[str] = frozenset()
    owner: Owner | None = None


def open_attempts(root: Store) -> Attempts:
    """Return the attempts that the lease's file lists, or none if `root` may be a copy of another directory."""
    newest = _newest(snapshot(root, STATE_DIRECTORY))
    if newest is None or newest.owner.copied is not False:
        return Attempts()
    return Attempts(frozenset(newest.attempts), None if newest.released else newest.owner)


def _refuse_if_alive(root: Store, state: _State) -> None:
    owner, alive = state.owner, state.owner.alive()
    if owner == this_process():
        alive = state.nonce in _held_leases  # if not, an earlier manager in this process left the lease
    if alive is None:
        alive = _has_heartbeat(root, state)
    if alive:
        where = " (this process: another manager has it open; close that one)" if owner == this_process() else ""
        raise LeaseHeldError(
            f"{root.url} is being written by {owner}{where}; nothing was written. Two jobs can't save to one root: "
            "end the other one, or choose another directory."
        )
    why = "is dead" if not owner.copied else "writes to the directory that this one was copied from"
    logger.info("%s: took over from %s, which %s", root.url, owner, why)


def _has_heartbeat(root: Store, state: _State) -> bool:
    """Wait up to TTL_S for an owner on another machine to renew its lease. Return whether it does so."""
    found, patience_s = root.info(state.path), TTL_S
    if found is not None and found.mtime:
        age = store_clock(root) - found.mtime
        if age > TTL_S:
            return False
        patience_s -= max(0.0, age)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        newest = _newest(root)
        if newest is None or newest.released or newest.nonce != state.nonce:
            return False  # released, or taken by another contender: the caller looks again
        if newest.beat != state.beat:
            return True
    return False


def store_clock(root: Store) -> float:
    """Return the store's time in seconds since the epoch, or the local time if its files have no mtime."""
    for _ in range(3):
        path = f"{STATE_DIRECTORY}/clock-{new_nonce()}"
        root.write(path, b"?", sync=False)
        found = root.info(path)
        root.delete([path])
        if found is not None:  # else: a new owner of the lease has deleted the file
            break
    return found.mtime if found is not None and found.mtime else time.time()


def _newest(root: Store) -> _State | None:
    for generation, path in sorted(_generations(root), reverse=True):
        body = read_json(root, path)
        owner = owner_in(root, body)
        if owner is not None and isinstance(body.get("nonce"), str) and type(body.get("beat")) is int:
            listed = body.get("attempts")
            attempts = tuple(str(name) for name in listed) if isinstance(listed, list) else ()
            return _State(generation, body["nonce"], owner, body["beat"], body.get("released") is True, attempts)
    return None


def _generations(root: Store) -> list[tuple[int, str]]:
    found = []
    for item in root.list(STATE_DIRECTORY):
        name = item.path.rpartition("/")[2]
        if name.startswith("lease-") and name.endswith(".json") and _GENERATION.fullmatch(name[6:-5]):
            found.append((int(name[6:-5]), item.path))
    return found


def _now() -> float:
    """Return the time in seconds of a clock that is never set. It also runs while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


# --- system locks, for writers without a run; a lock ends with its process


_held: dict[tuple[int, int], Callable[[], object]] = {}  # by (device, inode): the function that unlocks the directory
_held_lock = threading.Lock()


class HeldDirectory:
    """A locked directory. The lock ends with `release`, or when this object is garbage-collected.

    A failed save can leave a lock behind. If this process already holds a lock on the directory, that lock is released
    first. On file systems without locks, nothing is locked.
    """

    def __init__(self, path: str) -> None:
        """Lock the directory, creating it if needed. Raises LeaseHeldError if another process is writing to it."""
        os.makedirs(path, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        with _held_lock:
            _held.pop(key, bool)()
            try:
                _flock(fd)
            except BlockingIOError:
                os.close(fd)
                raise LeaseHeldError(
                    f"{path}: another process is saving to it; nothing was touched. Save to another directory."
                ) from None
            self._release = _held[key] = weakref.finalize(self, _unlock, fd, os.getpid())
            self._release.atexit = False  # the system unlocks it at exit

    def release(self) -> None:
        """Unlock the directory. The second call does nothing."""
        self._release()


def hold(store: Store) -> HeldDirectory | None:
    """Lock a store's directory. Return None on an object store."""
    return HeldDirectory(store.url) if is_directory(store) else None


def _flock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a network file system without locks
        return


def _unlock(fd: int, owner: int) -> None:
    with contextlib.suppress(OSError):
        if os.getpid() == owner:  # not in a child, because it shares the lock
            fcntl.flock(fd, fcntl.LOCK_UN)  # explicitly, because children hold the descriptor too
        os.close(fd)
