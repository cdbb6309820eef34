"""Runs the commit protocol: all ranks write their files, then a single record turns them into a checkpoint.

The numbered comments are the steps of the protocol, each with the invariant that holds after it. If a save fails, its
files are removed. This module also removes what dead writers left in a run.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from ckptkit.checkpoint.run.attempt import (
    LOOK_S,
    Place,
    Witness,
    check_names,
    place_of,
    settle_replacements,
    write_hint,
)
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome, check_equal
from ckptkit.checkpoint.run.inventory import Attempt, Committed, Inventory, Skipped, in_order, list_checkpoints
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.checkpoint.run.unnamed import (
    DELETING,
    clear,
    delete_marked,
    deleted_records,
    finish_deletion,
    give_up,
    mark_of,
)
from ckptkit.errors import (
    CheckpointExistsError,
    CkptkitError,
    LeaseHeldError,
    NoSpaceError,
    SaveError,
    UsageError,
    command_line,
)
from ckptkit.formats.own.record import (
    LATEST_HINT,
    RECORD_NAME,
    CommitRecord,
    FileRecord,
    checkpoint_name,
    record_path,
    step_name,
)
from ckptkit.log import warn_once
from ckptkit.storage import staging
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.lock import Lease, acquire_lease, store_clock
from ckptkit.storage.owner import this_process
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.publish import finish_replacement
from ckptkit.storage.staging import is_abandoned, leftover_of, new_nonce, owner_path
from ckptkit.storage.store import FileInfo, Store
from ckptkit.units import format_size

__all__ = ["SaveAttempt", "begin_save", "clean_leftovers"]

logger = logging.getLogger(__name__)

UPLOAD_AGE_S = 86400.0  # abort unfinished uploads at this age; those of dead saves are aborted earlier
_HALF_HINT = re.compile(rf"\.{LATEST_HINT}\.[0-9a-f]{{12}}\.part")  # a temporary file that LocalStore writes
_OF_A_SAVE = re.compile(r"[^/]+/[0-9a-f]{16}/")  # the prefix of RemotePlace's keys
_PROBE = re.compile(r"\.probe-[0-9a-f]{16}\.part")  # stores write it to test conditional writes


def clean_leftovers(
    root: Store,
    *,
    leased: bool = False,
    dry_run: bool = False,
    inventory: Inventory | None = None,
    view: Store | None = None,
    but: str = "",
) -> list[str]:
    """Remove what dead writers left (staging directories, trash, uploads), and return the removed paths.

    Also finishes killed replacements. A failed deletion is logged, and the next call retries it.

    Args:
        leased: Whether the caller holds the run's lease, so that no other save is running on any machine.
        inventory: The current inventory, if known.
        view: The snapshot of `root` that `inventory` was listed from. If given, old uploads are not searched for,
            because that needs a request; uploads of dead saves are removed anyway.
        but: The path of the caller's own attempt, which is kept.
    """
    given, view = view, view or snapshot(root)
    inventory = inventory or list_checkpoints(root, view=view)
    if leased and not dry_run:
        settle_replacements(root, {item.path: item.name for item in inventory.committed})
    dead = [item.path for item in inventory.abandoned]
    dead += [item.path for item in inventory.in_progress if _is_dead(root, item, leased=leased)]
    items = view.list()
    if is_directory(root):
        half = [f"{item.path}/{DELETING}" for item in inventory.skipped if item.deleted]
        dead += [path for path in half if root.info(path) is not None]
    dead += _lone_owners(root, items) + _half_written(items, leased=leased)
    dead += _void_marks(inventory, view)
    removed = []
    for path in dict.fromkeys(dead):
        if path == but:
            continue
        try:
            left = [] if dry_run else _remove(root, path)
        except OSError as error:
            warn_once(logger, f"{root.url}/{path}", "could not be removed: %s", error)
            continue
        if not left:
            removed.append(path)
    for item in inventory.skipped if leased and not dry_run else ():
        if item.unknown:
            warn_once(logger, f"{root.url}/{item.path}", "is left unchanged: %s", item.reason)
    return removed if given is not None else removed + _old_uploads(root, dry_run=dry_run)


def _void_marks(inventory: Inventory, view: Store) -> list[str]:
    """Return marks of deletions that are no longer needed: nothing was deleted yet, or only the mark is left.

    `unnamed.mark_of` says what a mark is.
    """
    if is_directory(view):
        return []
    ended = [item.path for item in inventory.skipped if item.deleted and not item.kept_files]
    found = [item.path for path in ended for item in view.list(path) if item.kind == "file"]
    if view.sizes_are_free:  # elsewhere, each lookup is a request; the checkpoint's deletion removes its mark
        marks = [f"{item.path}/{mark_of(item.record)}" for item in inventory.committed]
        found += [path for path in marks if view.info(path) is not None]
    return found


def _old_uploads(root: Store, *, dry_run: bool) -> list[str]:
    """Abort multipart uploads that saves started at least a day ago. Listings do not show them, but they cost money.

    Leaves other programs' uploads alone, because they may take longer.
    """
    found = [upload for upload in root.unfinished_uploads(older_than_s=UPLOAD_AGE_S) if _OF_A_SAVE.match(upload.path)]
    if found and not dry_run:
        now = store_clock(root)  # this machine's clock may be wrong
        found = [upload for upload in found if now - upload.started >= UPLOAD_AGE_S]
        root.end_uploads(found)
    return [f"unfinished upload of {upload.name}" for upload in found]


def _is_dead(root: Store, attempt: Attempt, *, leased: bool) -> bool:
    kept = leftover_of(attempt.path)
    if kept is not None:
        return bool(is_abandoned(root, kept, leased=leased))
    return leased  # only the lease's holder writes attempts, and the caller holds the lease


def _lone_owners(root: Store, items: list[FileInfo]) -> list[str]:
    """Return the owner files of dead writers whose staging directory was removed or never created."""
    found = [leftover_of(item.path) for item in items]
    return [item.path for item in found if item is not None and item.kind == "owner" and is_abandoned(root, item)]


def _half_written(items: list[FileInfo], *, leased: bool) -> list[str]:
    """Return temporary files that killed processes left in the root: half-written `latest` files, and probes."""

    def is_left(item: FileInfo) -> bool:
        if _HALF_HINT.fullmatch(item.path) and leased:
            return True
        # Probes are written without a lease, so only their age shows that the writer is dead.
        old = time.time() - item.mtime > staging.STARTING_S
        return old and bool(_HALF_HINT.fullmatch(item.path) or _PROBE.fullmatch(item.path))

    return [item.path for item in items if item.kind == "file" and is_left(item)]


def _remove(root: Store, path: str) -> list[str]:
    """Remove what a dead writer left at `path`. Return the foreign files in it, which stay."""
    name, _, folder = path.rpartition("/")
    if folder == DELETING and is_directory(root):
        finish_deletion(root, name)
        return []
    kept = leftover_of(path)
    is_attempt = kept is None and _OF_A_SAVE.match(f"{path}/") and not is_directory(root)
    if not is_attempt and (kept is None or kept.kind == "owner"):
        root.delete([path])
        return []
    if is_directory(root) and kept is not None and finish_replacement(root, kept):
        return []
    logger.info("removing %s/%s, left by a dead process", root.url, path)
    gone = [record for record in deleted_records(root, name) if record.data == folder] if is_attempt else []
    if gone:  # the process was killed while it deleted a checkpoint
        delete_marked(root, snapshot(root, name), name, gone[0])
        return []
    left = give_up(root, path, kept.name) if is_directory(root) and kept is not None else clear(root, path)
    if is_directory(root):
        root.delete([owner_path(path)])
    return left


_SLACK = 1 << 20  # bytes to allow for the record and directories


@dataclass(frozen=True, slots=True)
class _Request:
    """One rank's arguments of `begin_save`. Step, tag and overwrite must be equal on all ranks."""

    step: int
    tag: str | None
    overwrite: bool
    set_aside: bool
    planned_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Start:
    """Rank 0's message to the other ranks about the attempt."""

    save_id: str
    witness: Witness | None = None


def begin_save(
    root: Store,
    step: int,
    *,
    tag: str | None = None,
    planned_bytes: int | None = None,
    coordinator: Coordinator | None = None,
    overwrite: bool = False,
    set_aside: bool = False,
    file_names: str = "",
    lease: Lease | Callable[..., Lease] | None = None,
) -> SaveAttempt:
    """Start an attempt to save `step`, with its own location for files. All ranks must call it.

    Afterwards every rank must call the attempt's `commit` or `abort`, once.

    Args:
        planned_bytes: The bytes that this rank will write. None: unknown, so free space is not checked.
        overwrite: Replace a committed checkpoint of that name once the new one is complete.
        set_aside: Rename a directory that has the step's name but is not a checkpoint. Rank 0's value counts.
        file_names: A regular expression for the paths that all ranks will write. Foreign files with such a path are
            detected before anything is written. Rank 0's value counts.
        lease: The run's lease, or a function that returns it. Rank 0 calls the function. On an object store, its
            argument is `look` of `acquire_lease`. None: the attempt acquires its own lease. Attempts with the same
            lease take turns.

    Raises:
        CheckpointExistsError: A checkpoint or something else has that name. On an object store, `commit` may raise it
            instead.
        NoSpaceError: There is not enough space for the bytes of all ranks. Nothing was written.
        LeaseHeldError: Another job saves to this root.
        UsageError: The tag or the step is invalid, or differs between ranks.
        RankFailedError: A rank died, hung, or does not see the same storage.
    """

    def request() -> _Request:
        checkpoint_name(step, tag)
        if planned_bytes is not None and planned_bytes < 0:
            raise UsageError(f"planned_bytes is {planned_bytes}, expected 0 or more.")
        return _Request(step, tag, overwrite, set_aside, planned_bytes)

    coordinator = coordinator or Coordinator()
    opening = _Opening(root, lease, coordinator.timeout_s, file_names)
    what = f"starting to save step {step!r:.40}"
    try:
        # 1. Invariant: either all ranks continue with the same attempt, or none does.
        start: _Start = coordinator.settle(Outcome.of(request), what, then=opening.open)
        # 2. Invariant: every rank sees the location that rank 0 created, so no rank writes to a different disk.
        place = opening.place or place_of(root, checkpoint_name(step, tag), start.save_id, witness=start.witness)
        if not root.asking_costs:  # on an object store, each rank checks this before it reports its files
            coordinator.all_ok(place.look, what)
    except BaseException:
        opening.close()
        raise
    return SaveAttempt(root, step, tag, start, place, coordinator, overwrite=overwrite, opening=opening)


class _Opening:
    """Rank 0's work at the start and end of a save: acquires and releases the lease, its turn, and the location.

    Managers in one process share a lease and take turns. On an object store, the first save under a lease lists the run
    in the background, while the ranks upload to private keys. Only the commit waits for the listing (`wait`). The two
    most likely reasons to refuse a save are checked before the uploads: another job's lease, and an existing name.
    Later saves under the same lease reuse the inventory.
    """

    def __init__(
        self, root: Store, lease: Lease | Callable[..., Lease] | None, patience_s: float, file_names: str
    ) -> None:
        self.root, self._given, self._patience_s, self._file_names = root, lease, patience_s, file_names
        self.lease: Lease | None = None
        self._own_lease: Lease | None = None
        self._has_turn = False
        self.place: Place | None = None
        self.view = root
        self.inventory = Inventory(root.url)
        self.after: Inventory | None = None  # on an object store: the inventory after the commit
        self._settling: Future[None] | None = None
        self.committed = False
        self._ended = False

    def open(self, requests: Sequence[_Request]) -> _Start:
        first = requests[0]
        check_equal([(r.step, r.tag, r.overwrite) for r in requests], "what to save: (step, tag, overwrite)")
        views: list[Store] = []
        started = time.monotonic()

        def look() -> Store:
            views.append(snapshot(self.root))
            return views[-1]

        self.lease = self._lease(look if self.root.asking_costs else None)
        self._has_turn = self.lease.turn.acquire(timeout=min(self._patience_s, threading.TIMEOUT_MAX))
        if not self._has_turn:
            raise LeaseHeldError(
                f"{self.root.url}: another save of this process did not end within {self._patience_s:g} s; nothing was "
                "written. Wait for it, or give the manager a longer timeout_s."
            )
        name = checkpoint_name(first.step, first.tag)
        save_id = self.lease.new_attempt() if self.root.asking_costs else new_nonce()
        place = place_of(self.root, name, save_id)
        settle = partial(self._settle, first, views[-1] if views else None, place)
        kept = None if views else self.lease.inventory
        taken = any(view.info(record_path(name)) is not None for view in views)
        if views and not taken:
            place.was_free(started)
        if not self.root.asking_costs or taken or (kept is not None and name in _names(kept)):
            settle()
        elif kept is not None:
            self.inventory = kept
        else:
            pool = WorkerPool(1, thread_name_prefix="ckptkit-open")
            self._settling = pool.submit(settle)
            pool.shutdown(wait=False)
        _check_space(self.root, [request.planned_bytes for request in requests])
        # Invariant: if there is too little space, the save fails before it writes anything.
        self.place = place
        self.place.open()
        witness = Witness(self.lease.path, self.lease.nonce)
        return _Start(save_id, witness)

    def _lease(self, look: Callable[[], Store] | None) -> Lease:
        if self._given is None:
            self._own_lease = acquire_lease(self.root, look=look)
            return self._own_lease
        if isinstance(self._given, Lease):
            return self._given
        return self._given() if look is None else self._given(look)

    def _settle(self, request: _Request, view: Store | None, place: Place) -> None:
        """List the run and clean it up, before anything is published.

        Args:
            view: The snapshot that the lease was acquired with; None if the lease was already held.
        """
        assert self.lease is not None
        if view is None:
            # On an object store, a single listing serves all checks.
            view = snapshot(self.root)
            self.lease.check(view=view)
        self.lease.try_conditional()
        self.lease.tidy()
        # Invariant: no other attempt is running here. Remove what dead attempts left first, to free space.
        own = f"{place.name}/{place.data}" if place.data else ""
        inventory = list_checkpoints(self.root, view=view)
        half_replaced = any(item.path != item.name for item in inventory.committed)
        if clean_leftovers(self.root, leased=True, inventory=inventory, view=view, but=own) or half_replaced:
            view = snapshot(self.root)
            inventory = list_checkpoints(self.root, view=view)
        self.view, self.inventory = view, inventory
        _check_free_name(self.root, view, inventory, place.name, request)
        check_names(self.root, place.name, self._file_names)

    def wait(self) -> None:
        """Wait for the checks that must precede a commit. Their errors propagate."""
        if self._settling is not None:
            self._settling.result()

    def end_attempt(self) -> None:
        """Record in the lease whether this attempt was committed, before the next attempt begins."""
        if self.lease is not None and self.place is not None and self.root.asking_costs and not self._ended:
            self._ended = True
            self.lease.end_attempt(self.place.data, committed=self.committed)

    def close(self) -> None:
        """Clean up and release the lease.

        A failure is only logged: the save has already succeeded or failed, and the next save cleans up.
        """
        if self._settling is not None:
            self._settling.exception()  # waits, because the background thread may still be cleaning up
        try:
            if self.place is not None:
                self.place.close()
        except (OSError, CkptkitError) as error:  # CkptkitError: the record cannot be read, so the owner is unknown
            logger.warning("%s could not be cleaned up: %s. The next save tries again.", self.root.url, error)
            self.after = None
        finally:
            self.end_attempt()
            if self.lease is not None and self._has_turn:
                self._has_turn = False
                self.lease.inventory = self.after  # None after a failure, so the next save lists and cleans up
                self.lease.turn.release()
            if self._own_lease is not None:
                self._own_lease.release()


def _check_free_name(root: Store, view: Store, inventory: Inventory, name: str, request: _Request) -> None:
    found, place = inventory.find(name), f"{root.url}/{name}"
    if found is not None:
        if not request.overwrite:
            raise CheckpointExistsError(
                f"{place} exists already (save {found.record.save_id}); a checkpoint is never changed. Save another "
                "step or tag, or replace it with overwrite=True."
            )
        held = [pin for pin in list_pins(root) if pin.name == name and pin.owner != this_process()]
        if held:
            raise CheckpointExistsError(f"{place} is not overwritten: it is {held[0].reason}.")
        return
    skipped = next((item for item in inventory.skipped if item.path == name), None)
    if skipped is not None and skipped.deleted:
        return  # the directory contains only foreign files, which stay
    taken = root.info(name) if is_directory(root) else view.info(f"{name}/{RECORD_NAME}")
    if skipped is not None and taken is not None:
        if request.set_aside and not skipped.unanswered and (request.overwrite or not skipped.damaged):
            _set_aside(root, skipped)
            return
        raise CheckpointExistsError(f"{place} is in the way: {skipped.reason}. Move it away or delete it.")
    if taken is not None:
        raise CheckpointExistsError(f"{place} is in the way: a {taken.kind} that is not a checkpoint of ckptkit.")


def _set_aside(root: Store, skipped: Skipped) -> None:
    """Rename a directory that has the checkpoint's name but is not a checkpoint. Deletes none of its files.

    On an object store nothing is renamed, because the commit replaces the record there.
    """
    if is_directory(root):
        aside = f"{skipped.path}.aside-{new_nonce()}"
        root.rename(skipped.path, aside)
        logger.warning("%s/%s was renamed to %s: %s", root.url, skipped.path, aside, skipped.reason)


def _names(inventory: Inventory) -> set[str]:
    """Return the names of committed and skipped checkpoints."""
    return {item.name for item in inventory.committed} | {item.path for item in inventory.skipped}


def _check_space(root: Store, planned: Sequence[int | None]) -> None:
    free = root.free_bytes()
    if free is None or any(nbytes is None for nbytes in planned):
        return
    total = sum(nbytes or 0 for nbytes in planned)
    need = total + total // 20 + _SLACK
    if need > free:
        raise NoSpaceError(
            f"{root.url}: the checkpoint needs {format_size(need)}, but only {format_size(free)} are free: No space "
            "left on device. Nothing was written. Old checkpoints are deleted only after the new one is committed, so "
            "there must be space for one more: free some, or keep fewer checkpoints. To see what could be deleted: "
            + command_line("prune", root.url, "--max-num", "2", "--dry-run")
        )


class SaveAttempt:
    """One attempt to save, from `begin_save` to `commit` or `abort`.

    Attributes:
        store: Where every rank writes its files.
        name: The directory of the future checkpoint.
        save_id: 16 hex digits, unique to this attempt.
        data: The folder of the files, next to the record: "", or the save id on an object store.
        after: On rank 0, after a commit to an object store: the new inventory. It needs no listing, because no other
            process may write.
    """

    def __init__(
        self,
        root: Store,
        step: int,
        tag: str | None,
        start: _Start,
        place: Place,
        coordinator: Coordinator,
        *,
        overwrite: bool,
        opening: _Opening,
    ) -> None:
        self.root, self.step, self.tag = root, step, tag
        self.name = tag or step_name(step)
        self.save_id = start.save_id
        self.store, self.data = place.store, place.data
        self.coordinator = coordinator
        self._place = place
        self._overwrite = overwrite
        self._opening = opening
        self._record: CommitRecord | None = None
        self._hinted: Future[None] | None = None
        self.after: Inventory | None = None
        self._started = time.monotonic()

    def abort(self, error: BaseException) -> NoReturn:
        """Tell all ranks that this rank failed. Their `commit` raises the same error, and nothing is published.

        Raises:
            RankFailedError: Always, except that if there is only one rank, its ckptkit error is raised unchanged.
        """
        with contextlib.suppress(Exception):  # finish this rank's uploads before rank 0 deletes everything
            self._place.sync(())
        self._settle(Outcome.of_error(error), lambda reports: None)
        raise SaveError(f"saving {self.name} failed: {error}") from error  # not reached: _settle raises

    def commit(
        self,
        files: Mapping[str, FileRecord],
        record_fields: Mapping[str, Any],
        *,
        payload: Any = None,
        complete: Callable[[list[Any]], Mapping[str, FileRecord]] | None = None,
    ) -> CommitRecord:
        """Publish the checkpoint once every rank has written its files, and return the record. All ranks must call it.

        On ranks other than 0 the record lists no files.

        Args:
            files: The files that this rank wrote to `store`, by path.
            record_fields: Fields of `CommitRecord`, at least `state_dict_type`. Rank 0's values count.
            payload: Any value to pass to `complete`.
            complete: Called on rank 0 with the payloads of all ranks, unless a rank failed. Writes index and manifest
                to `store`, and returns these files.

        Raises:
            RankFailedError: A rank failed, died or hung. Every rank raises the same error. Nothing was published, and
                the files were deleted.
        """
        with WorkerPool(2, thread_name_prefix="ckptkit-hints") as self._hints:
            try:
                # 3. Invariant: if a rank reports success, its files are durable, in the store that rank 0 will check.
                self._place.look()
                if self.coordinator.world_size > 1 or not self.root.asking_costs:
                    self._place.sync(files)
                    self._place.check_own(files)  # a single rank on an object store checks later, in `_publish`
                outcome = Outcome((dict(files), payload))
            except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
                outcome = Outcome.of_error(error)
            slim: CommitRecord = self._settle(outcome, partial(self._publish, record_fields, complete))
        record = self._record or slim
        if self.coordinator.is_main:
            if self._hinted is None:
                self._write_hint()
            else:
                self._hinted.result()
            self.after = self._opening.after
            logger.debug(
                "saved %s/%s: %s in %.1f s",
                self.root.url,
                record.name,
                format_size(record.total_bytes),
                time.monotonic() - self._started,
            )
        return record

    def _settle(self, outcome: Outcome, publish: Callable[[list[Any]], Any]) -> Any:
        try:
            # 4. Invariant: nothing is published unless all ranks' files are durable. If one rank raises, all do.
            return self.coordinator.settle(outcome, f"saving {self.name}", then=publish)
        finally:
            self._opening.close()  # does nothing on ranks other than 0

    def _publish(
        self,
        record_fields: Mapping[str, Any],
        complete: Callable[[list[Any]], Mapping[str, FileRecord]] | None,
        reports: list[tuple[dict[str, FileRecord], Any]],
    ) -> CommitRecord:
        """Commit the checkpoint. Runs on rank 0, and returns the record without its file list."""
        self._opening.wait()
        files: dict[str, FileRecord] = {}
        for rank, (mine, _) in enumerate(reports):
            for path, item in mine.items():
                if path in files:
                    raise SaveError(f"{self.name}: rank {rank} and a lower rank both wrote {path}.")
                files[path] = item
        own, of_ranks = dict(reports[0][0]), files.keys() - reports[0][0].keys()
        with self._looked():
            if complete is not None:
                # `complete` may also return other ranks' files, which those ranks have already checked.
                found = complete([payload for _, payload in reports])
                own |= {path: item for path, item in found.items() if path not in of_ranks}
            self._place.sync(path for path in own if path not in files)
            files |= own
            # 5. Invariant: the files that the record will name exist and are complete, and there are no other files.
            self._place.check_all(files, own)
        lease = self._opening.lease
        last = lease.sequence if lease is not None else 0  # the inventory may not include this writer's last save
        record = CommitRecord(
            **{
                "created": time.time(),
                "world_size": self.coordinator.world_size,
                "writer": {"host": this_process().host, "pid": this_process().pid},
                **record_fields,
                "step": self.step,
                "tag": self.tag,
                "save_id": self.save_id,
                "sequence": max(self._opening.inventory.next_sequence, 1 + last),
                "data": self.data,
                "files": files,
            }
        )
        self._place.look()
        # 6. and 7.: the commit. Invariant: when `save` returns, the checkpoint survives a power failure.
        data = record.to_json()
        self._place.publish(data, overwrite=self._overwrite, again=lease.make_sure if lease else None)
        self._opening.committed = True
        if lease is not None:
            lease.sequence = record.sequence
        self._record = CommitRecord.from_json(data, file=f"{self.name}/{RECORD_NAME}")  # the record as a reader gets it
        if self.root.asking_costs:
            before = self._opening.inventory
            others = [item for item in before.committed if item.name != self.name]
            committed = in_order([*others, Committed(self.name, self._record)])
            self._opening.after = replace(before, committed=committed)
            # Run these while the location is being closed, because each of them needs a request.
            self._hinted = self._hints.submit(self._write_hint)
            self._hints.submit(self._opening.end_attempt)
        return self._record.without_files()

    @contextlib.contextmanager
    def _looked(self) -> Iterator[None]:
        """Check that this job still holds the lease. Check also that the name is free, unless the put itself does that.

        On an object store, the checks run in parallel with the `with` block, and are complete when it ends.
        """
        lease, started = self._opening.lease, time.monotonic()
        looks: list[Callable[[], None]] = []
        if lease is not None and self.root.asking_costs and not lease.is_surely_ours():
            looks = [lease.check] if self._overwrite else [lease.check, self._place.look_free]
        with WorkerPool(2, thread_name_prefix="ckptkit-look") as pool:
            futures = [pool.submit(look) for look in looks]
            yield
            for future in futures:
                future.result()
        # Invariant: a writer that has lost the lease does not commit, because its files may have been deleted.
        fresh = bool(looks) and time.monotonic() - started < LOOK_S
        if lease is not None and not fresh:
            lease.make_sure()

    def _write_hint(self) -> None:
        lease = self._opening.lease
        ours = lease is not None and lease.wrote_hint
        wrote = write_hint(self.root, self.name, view=self._opening.view, ours=ours)
        if lease is not None and self.root.asking_costs:
            lease.wrote_hint = wrote
