"""The commit protocol: all ranks write, then one record makes it a checkpoint, or nothing is left.

The steps, and what holds after each, are beside the code; `publish` has the last ones.
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
from typing import Any, NoReturn, Protocol

from ckptkit.checkpoint.run.attempt import (
    LOOK_S,
    Place,
    Witness,
    check_names,
    place_of,
    settle_replacements,
    write_hint,
)
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
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

__all__ = ["SaveAttempt", "WrittenFile", "begin_save", "clean_leftovers"]

# What dead writers left below a root, removed; what a living one writes is never touched.


logger = logging.getLogger(__name__)

UPLOAD_AGE_S = 86400.0  # of an upload that nobody finished; those of a dead save go with its files at once
_HALF_HINT = re.compile(rf"\.{LATEST_HINT}\.[0-9a-f]{{12}}\.part")  # as LocalStore names what it is writing
_OF_A_SAVE = re.compile(r"[^/]+/[0-9a-f]{16}/")  # how RemotePlace names what it writes
_PROBE = re.compile(r"\.probe-[0-9a-f]{16}\.part")  # as a store names what it tries conditional writes on


def clean_leftovers(
    root: Store,
    *,
    leased: bool = False,
    dry_run: bool = False,
    inventory: Inventory | None = None,
    view: Store | None = None,
    but: str = "",
) -> list[str]:
    """Remove staging, trash and uploads whose writer is dead, and return their paths.

    Also finishes what a killed overwrite began. A failure to delete is logged: the next call tries again.

    Args:
        leased: The caller holds the lease of the run, so no other save is alive, on whatever machine it was.
        inventory: What the caller has just listed.
        view: The snapshot of `root` that it was listed in. Then old uploads are not looked for, which takes a request
            of its own: those of dead saves go all the same.
        but: The caller's own attempt.
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
            warn_once(logger, f"{root.url}/{item.path}", "is left as it is: %s", item.reason)
    return removed if given is not None else removed + _old_uploads(root, dry_run=dry_run)


def _void_marks(inventory: Inventory, view: Store) -> list[str]:
    """Return the marks of deletions that were killed before they began, or when nothing but the mark was left."""
    if is_directory(view):
        return []
    ended = [item.path for item in inventory.skipped if item.deleted and not item.kept_files]
    found = [item.path for path in ended for item in view.list(path) if item.kind == "file"]
    if view.sizes_are_free:  # else each would have to be asked for; they go with their checkpoint
        marks = [f"{item.path}/{mark_of(item.record)}" for item in inventory.committed]
        found += [path for path in marks if view.info(path) is not None]
    return found


def _old_uploads(root: Store, *, dry_run: bool) -> list[str]:
    """Throw away multipart uploads of saves that were begun a day ago: no listing of files shows them, and they cost.
    Others' may take longer than that."""
    found = [upload for upload in root.unfinished_uploads(older_than_s=UPLOAD_AGE_S) if _OF_A_SAVE.match(upload.path)]
    if found and not dry_run:
        now = store_clock(root)  # ours may be ahead of it
        found = [upload for upload in found if now - upload.started >= UPLOAD_AGE_S]
        root.end_uploads(found)
    return [f"unfinished upload of {upload.name}" for upload in found]


def _is_dead(root: Store, attempt: Attempt, *, leased: bool) -> bool:
    kept = leftover_of(attempt.path)
    if kept is not None:
        return bool(is_abandoned(root, kept, leased=leased))
    return leased  # whoever has the lease, and no other, writes attempts


def _lone_owners(root: Store, items: list[FileInfo]) -> list[str]:
    """Return statements of dead writers whose directory is gone, or was never made."""
    found = [leftover_of(item.path) for item in items]
    return [item.path for item in found if item is not None and item.kind == "owner" and is_abandoned(root, item)]


def _half_written(items: list[FileInfo], *, leased: bool) -> list[str]:
    """Return half-written files of the name `latest`, and probes of a store, that a kill left at the root."""

    def is_left(item: FileInfo) -> bool:
        if _HALF_HINT.fullmatch(item.path) and leased:
            return True
        # A probe asks for no lease, so none says that its maker is dead: only time does.
        old = time.time() - item.mtime > staging.STARTING_S
        return old and bool(_HALF_HINT.fullmatch(item.path) or _PROBE.fullmatch(item.path))

    return [item.path for item in items if item.kind == "file" and is_left(item)]


def _remove(root: Store, path: str) -> list[str]:
    """Remove what a dead writer left at `path`, and return what stays because it is somebody else's."""
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
    if gone:  # a deletion that was killed
        delete_marked(root, snapshot(root, name), name, gone[0])
        return []
    left = give_up(root, path, kept.name) if is_directory(root) and kept is not None else clear(root, path)
    if is_directory(root):
        root.delete([owner_path(path)])
    return left


_SLACK = 1 << 20  # records, directories


class WrittenFile(Protocol):
    """What a writer knows of a file: bytes, and their digest as a number or as 16 hex digits."""

    @property
    def nbytes(self) -> int: ...
    @property
    def checksum(self) -> int | str: ...


Files = Mapping[str, WrittenFile]


@dataclass(frozen=True, slots=True)
class _Request:
    """What a rank asks for; all ranks must ask for the same, but for their own bytes."""

    step: int
    tag: str | None
    overwrite: bool
    set_aside: bool
    planned_bytes: int | None
    extra: bytes


@dataclass(frozen=True, slots=True)
class _Start:
    """What rank 0 decided."""

    save_id: str
    messages: tuple[bytes, ...]
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
    message: bytes = b"",
) -> SaveAttempt:
    """Return an attempt to save `step`: a private place to write to. All ranks must call it.

    Afterwards every rank calls `commit` or `abort` of the attempt, once.

    Args:
        planned_bytes: What this rank will write; None where it can't tell (no check for space then).
        overwrite: Replace a committed checkpoint of that name; the old one goes after the new one is there.
        set_aside: A step's directory that is in the way and is no checkpoint gets another name. Rank 0's counts.
        file_names: A pattern of the paths that all ranks will write. A file of others that has one of them, and would
            be in the directory still, is found before anything is written. Rank 0's counts.
        lease: The lease of the run, or what returns it, asked on rank 0 only, given what `acquire_lease` takes for
            `look`; else the attempt takes its own. The attempts of one lease take turns.
        message: Any bytes; `SaveAttempt.messages` has those of all ranks, on every rank.

    Raises:
        CheckpointExistsError: There is such a checkpoint, or something else of its name. On an object store it may be
            raised by `commit`.
        NoSpaceError: Not enough room for what all ranks plan. Nothing was written.
        LeaseHeldError: Another job saves to this root.
        UsageError: The tag or the step is refused, or ranks disagree on them.
        RankFailedError: A rank died, hung, or does not see the same storage.
    """
    coordinator = coordinator or Coordinator()
    opening = _Opening(root, lease, coordinator.timeout_s, file_names)
    what = f"starting to save step {step!r:.40}"
    try:
        # 1. Invariant: every rank names the same attempt, or none goes on.
        request = _request(step, tag, overwrite, set_aside, planned_bytes, message)
        start: _Start = coordinator.settle(request, what, then=opening.open)
        # 2. Invariant: every rank sees the place that rank 0 made; on another disk it would write for nobody.
        place = opening.place or place_of(root, checkpoint_name(step, tag), start.save_id, witness=start.witness)
        if not root.asking_costs:  # on an object store before the rank says that its files are there
            coordinator.all_ok(place.look, what)
    except BaseException:
        opening.close()
        raise
    return SaveAttempt(root, step, tag, start, place, coordinator, overwrite=overwrite, opening=opening)


def _request(
    step: int, tag: str | None, overwrite: bool, set_aside: bool, planned_bytes: int | None, message: bytes
) -> Outcome:
    try:
        checkpoint_name(step, tag)
        if planned_bytes is not None and planned_bytes < 0:
            raise UsageError(f"planned_bytes is {planned_bytes}, expected 0 or more.")
    except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
        return Outcome.of_error(error)
    return Outcome(_Request(step, tag, overwrite, set_aside, planned_bytes, message))


class _Opening:
    """Rank 0's part of the start, and of the end: what it took it gives back.

    On an object store the first save under a lease looks at the run, while the files go up to keys that nobody else
    has: what it finds is needed before the commit only (`wait`). What would most likely refuse it, the lease of another
    and a name that is taken, is looked at before. The saves after it know what is there.
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
        self.after: Inventory | None = None  # once it is committed, where looking again takes requests
        self._settling: Future[None] | None = None
        self.committed = False
        self._ended = False

    def open(self, requests: Sequence[_Request]) -> _Start:
        first = requests[0]
        _check_equal(requests)
        views: list[Store] = []
        started = time.monotonic()

        def look() -> Store:
            views.append(snapshot(self.root))
            return views[-1]

        self.lease = self._lease(look if self.root.asking_costs else None)
        self._take_turn(self.lease)
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
        # Invariant: a disk that is too small fails before a byte is written.
        self.place = place
        self.place.open()
        witness = Witness(self.lease.path, self.lease.nonce)
        return _Start(save_id, tuple(request.extra for request in requests), witness)

    def _lease(self, look: Callable[[], Store] | None) -> Lease:
        if self._given is None:
            self._own_lease = acquire_lease(self.root, look=look)
            return self._own_lease
        if isinstance(self._given, Lease):
            return self._given
        return self._given() if look is None else self._given(look)

    def _settle(self, request: _Request, view: Store | None, place: Place) -> None:
        """Look at the run, and clean it up, before anything is published.

        Args:
            view: What the lease was taken by; None where it was ours before.
        """
        assert self.lease is not None
        if view is None:
            # On an object store one listing serves all that is to be known.
            view = snapshot(self.root)
            self.lease.check(view=view)
        self.lease.try_conditional()
        self.lease.tidy()
        # Invariant: no other attempt is under way here. What dead ones left goes first: it may be the space we need.
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
        """Return once all that must be known before a commit is known. Raises what forbids it."""
        if self._settling is not None:
            self._settling.result()

    def _take_turn(self, lease: Lease) -> None:
        self._has_turn = lease.turn.acquire(timeout=min(self._patience_s, threading.TIMEOUT_MAX))
        if not self._has_turn:
            raise LeaseHeldError(
                f"{self.root.url}: another save of this process is not done after {self._patience_s:g} s; nothing was "
                "written. Wait for it, or give the manager a longer timeout_s."
            )

    def end_attempt(self) -> None:
        """State in the lease that this attempt was committed, or that it failed, before the next one."""
        if self.lease is not None and self.place is not None and self.root.asking_costs and not self._ended:
            self._ended = True
            self.lease.end_attempt(self.place.data, committed=self.committed)

    def close(self) -> None:
        """Give back space and lease. The outcome is decided: a failure here is logged, the next save cleans up."""
        if self._settling is not None:
            self._settling.exception()  # it may be cleaning up
        try:
            if self.place is not None:
                self.place.close()
        except (
            OSError,
            CkptkitError,
        ) as error:  # ours too: a record that cannot be read says not whose files these are
            logger.warning("%s could not be cleaned up: %s. The next save tries again.", self.root.url, error)
            self.after = None
        finally:
            self.end_attempt()
            if self.lease is not None and self._has_turn:
                self._has_turn = False
                self.lease.inventory = self.after  # None after a failure: the next save looks, and cleans up
                self.lease.turn.release()
            if self._own_lease is not None:
                self._own_lease.release()


def _check_equal(requests: Sequence[_Request]) -> None:
    first = requests[0]
    for rank, other in enumerate(requests):
        if (other.step, other.tag, other.overwrite) != (first.step, first.tag, first.overwrite):
            raise UsageError(
                f"ranks disagree on what to save: rank 0 has step {first.step}, tag {first.tag!r}, overwrite="
                f"{first.overwrite}; rank {rank} has step {other.step}, tag {other.tag!r}, overwrite={other.overwrite}."
            )


def _check_free_name(root: Store, view: Store, inventory: Inventory, name: str, request: _Request) -> None:
    found, place = inventory.find(name), f"{root.url}/{name}"
    if found is not None:
        if not request.overwrite:
            raise CheckpointExistsError(
                f"{place} was saved already (save {found.record.save_id}); a checkpoint is never written again. "
                "Save another step or tag, or replace it with overwrite=True."
            )
        held = [pin for pin in list_pins(root) if pin.name == name and pin.owner != this_process()]
        if held:
            raise CheckpointExistsError(f"{place} is not overwritten: it is {held[0].reason}.")
        return
    skipped = next((item for item in inventory.skipped if item.path == name), None)
    if skipped is not None and skipped.deleted:
        return  # what others have put there stays there
    taken = root.info(name) if is_directory(root) else view.info(f"{name}/{RECORD_NAME}")
    if skipped is not None and taken is not None:
        if request.set_aside and not skipped.unanswered and (request.overwrite or not skipped.damaged):
            _set_aside(root, skipped)
            return
        raise CheckpointExistsError(f"{place} is in the way: {skipped.reason}. Move it away or delete it.")
    if taken is not None:
        raise CheckpointExistsError(f"{place} is in the way: a {taken.kind} that is no checkpoint of ours.")


def _set_aside(root: Store, skipped: Skipped) -> None:
    """Give a directory that is no checkpoint another name, so that a save can have its own. Nothing of it is deleted.
    On an object store only its record is replaced."""
    if is_directory(root):
        aside = f"{skipped.path}.aside-{new_nonce()}"
        root.rename(skipped.path, aside)
        logger.warning("%s/%s was renamed to %s: %s", root.url, skipped.path, aside, skipped.reason)


def _names(inventory: Inventory) -> set[str]:
    """Return what is taken, or was once."""
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
            "left on device. Nothing was written. Old checkpoints are deleted only after the new one is safe, so there "
            "must be room for one more: free some space, or keep fewer; what could go: "
            + command_line("prune", root.url, "--max-num", "2", "--dry-run")
        )


class SaveAttempt:
    """One attempt to save, between `begin_save` and its `commit` or `abort`.

    Attributes:
        store: Where every rank writes its files.
        name: The checkpoint's directory-to-be.
        save_id: 16 hex digits of this attempt alone.
        data: What lies between the record and the files: "", or the save id on an object store.
        messages: What each rank gave to `begin_save`, by rank.
        after: On rank 0 and an object store, once it is committed: what this writer, which alone may write, knows to be
            there.
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
        self.save_id, self.messages = start.save_id, start.messages
        self.store, self.data = place.store, place.data
        self.coordinator = coordinator
        self._place = place
        self._overwrite = overwrite
        self._opening = opening
        self._record: CommitRecord | None = None
        self._fields: Mapping[str, Any] = {}
        self._complete: Callable[[list[Any]], Files] | None = None
        self._hinted: Future[None] | None = None
        self.after: Inventory | None = None
        self._started = time.monotonic()

    def abort(self, error: BaseException) -> NoReturn:
        """Tell all ranks that this one failed; they raise the same from `commit`. Nothing is published.

        Raises:
            RankFailedError: Always (a process that is alone raises its ckptkit error as it is).
        """
        with contextlib.suppress(Exception):  # what this rank has on its way must not arrive after rank 0 deleted all
            self._place.sync(())
        self._settle(Outcome.of_error(error), lambda reports: None)
        raise SaveError(f"saving {self.name} failed: {error}") from error  # settle has raised

    def commit(
        self,
        files: Files,
        record_fields: Mapping[str, Any],
        *,
        payload: Any = None,
        complete: Callable[[list[Any]], Files] | None = None,
    ) -> CommitRecord:
        """Publish the checkpoint once every rank is here and well, and return its record, durable.

        On ranks other than 0 the record's table of files is empty.

        Args:
            files: What this rank wrote below `store`, by path.
            record_fields: Fields of `CommitRecord` that the caller knows: at least `state_dict_type`. Rank 0's count.
            payload: Anything, for `complete` on rank 0.
            complete: Rank 0 runs it with the payloads by rank when all ranks are well: it writes what sums
                them up (index, manifest) to `store` and returns those files.

        Raises:
            RankFailedError: A rank failed, died or hung: the same on every rank. Nothing was published,
                and the space is given back.
        """
        self._fields, self._complete = record_fields, complete
        with WorkerPool(2, thread_name_prefix="ckptkit-hints") as self._hints:
            try:
                outcome = Outcome((self._durable(files), payload))
            except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
                outcome = Outcome.of_error(error)
            slim: CommitRecord = self._settle(outcome, self._publish)
        record = self._record or slim
        if self.coordinator.is_main:
            if self._hinted is None:
                self._write_hint()
            else:
                self._hinted.result()
            self.after = self._opening.after
            logger.debug(  # the manager has the line for people
                "saved %s/%s: %s in %.1f s",
                self.root.url,
                record.name,
                format_size(record.total_bytes),
                time.monotonic() - self._started,
            )
        return record

    def _settle(self, outcome: Outcome, publish: Callable[[list[Any]], Any]) -> Any:
        try:
            # 4. Invariant: nothing is published unless all ranks are durable; no rank returns while another raised.
            return self.coordinator.settle(outcome, f"saving {self.name}", then=publish)
        finally:
            self._opening.close()  # on rank 0; the others opened nothing

    def _durable(self, files: Files) -> dict[str, FileRecord]:
        # 3. Invariant: a rank that reports success has its bytes on disk, where rank 0 will look for them.
        self._place.look()
        mine = {path: _file_record(path, item) for path, item in files.items()}
        if self.coordinator.world_size > 1 or not self.root.asking_costs:
            self._place.sync(mine)
            self._place.check_own(mine)
        return mine  # a rank that is alone does so while its index is on its way, and before it publishes

    def _publish(self, reports: list[tuple[dict[str, FileRecord], Any]]) -> CommitRecord:
        """Commit, on rank 0, and return the record without its files."""
        self._opening.wait()
        files: dict[str, FileRecord] = {}
        for rank, (mine, _) in enumerate(reports):
            for path, item in mine.items():
                if path in files:
                    raise SaveError(f"{self.name}: rank {rank} and a rank before it both wrote {path}.")
                files[path] = item
        own, of_ranks = dict(reports[0][0]), files.keys() - reports[0][0].keys()
        with self._looked():
            if self._complete is not None:
                # It may name what other ranks wrote, too: each has looked for its own.
                found = self._complete([payload for _, payload in reports])
                summed = {path: _file_record(path, item) for path, item in found.items()}
                own |= {path: item for path, item in summed.items() if path not in of_ranks}
            self._place.sync(path for path in own if path not in files)
            files |= own
            # 5. Invariant: what the record will name is there, whole, and nothing else is.
            self._place.check_all(files, own)
        lease = self._opening.lease
        last = lease.sequence if lease is not None else 0  # a listing may be older than what this writer has saved
        record = CommitRecord(
            **{
                "created": time.time(),
                "world_size": self.coordinator.world_size,
                "writer": {"host": this_process().host, "pid": this_process().pid},
                **self._fields,
                "step": self.step,
                "tag": self.tag,
                "save_id": self.save_id,
                "sequence": max(self._opening.inventory.next_sequence, 1 + last),
                "data": self.data,
                "files": files,
            }
        )
        self._place.look()
        # 6. and 7.: the commit. Invariant: a save that returns survives a power cut.
        data = record.to_json()
        self._place.publish(data, overwrite=self._overwrite, again=lease.make_sure if lease else None)
        self._opening.committed = True
        if lease is not None:
            lease.sequence = record.sequence
        self._record = CommitRecord.from_json(data, file=f"{self.name}/{RECORD_NAME}")  # what a reader will see
        if self.root.asking_costs:
            before = self._opening.inventory
            others = [item for item in before.committed if item.name != self.name]
            committed = in_order([*others, Committed(self.name, self._record)])
            self._opening.after = replace(before, committed=committed)
            # While the place is closed: each takes a request.
            self._hinted = self._hints.submit(self._write_hint)
            self._hints.submit(self._opening.end_attempt)
        return self._record.without_files()

    @contextlib.contextmanager
    def _looked(self) -> Iterator[None]:
        """Have looked, when the block ends, whether the lease is ours and, where a put does not tell, the name is free:
        at the same time, where that takes requests."""
        lease, started = self._opening.lease, time.monotonic()
        looks: list[Callable[[], None]] = []
        if lease is not None and self.root.asking_costs and not lease.is_surely_ours():
            looks = [lease.check] if self._overwrite else [lease.check, self._place.look_free]
        with WorkerPool(2, thread_name_prefix="ckptkit-look") as pool:
            futures = [pool.submit(look) for look in looks]
            yield
            for future in futures:
                future.result()
        # Invariant: who has lost the lease, and with it what he has written, does not commit.
        fresh = bool(looks) and time.monotonic() - started < LOOK_S
        if lease is not None and not fresh:
            lease.make_sure()

    def _write_hint(self) -> None:
        lease = self._opening.lease
        ours = lease is not None and lease.wrote_hint
        wrote = write_hint(self.root, self.name, view=self._opening.view, ours=ours)
        if lease is not None and self.root.asking_costs:
            lease.wrote_hint = wrote


def _file_record(path: str, item: WrittenFile) -> FileRecord:
    if isinstance(item, FileRecord):
        return item
    digest = item.checksum
    return FileRecord(int(item.nbytes), digest if isinstance(digest, str) else f"{digest:016x}")
