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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ckptkit.checkpoint.run.attempt import (
    LocalPlace,
    Place,
    RemotePlace,
    Witness,
    take_name,
    would_replace,
    write_hint,
)
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome, check_equal
from ckptkit.checkpoint.run.inventory import Committed, Inventory, in_order, list_checkpoints
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.checkpoint.run.unnamed import (
    clear,
    delete_marked,
    deleted_records,
    give_up,
    mark_of,
    others_in,
    record_in,
    split_files,
)
from ckptkit.errors import (
    CheckpointExistsError,
    CkptkitError,
    LeaseHeldError,
    NoSpaceError,
    SaveError,
    command_line,
)
from ckptkit.formats.own.record import (
    LATEST_HINT,
    RECORD_NAME,
    CommitRecord,
    FileRecord,
    checkpoint_name,
    record_path,
)
from ckptkit.log import warn_once
from ckptkit.storage import staging
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import UNFINISHED, is_directory
from ckptkit.storage.lock import Lease, acquire_lease, store_clock
from ckptkit.storage.owner import this_process
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.publish import open_staging
from ckptkit.storage.staging import is_abandoned, leftover_of, new_nonce, owner_path, staging_name
from ckptkit.storage.store import Store
from ckptkit.units import format_size

logger = logging.getLogger(__name__)

UPLOAD_AGE_S = 86400.0  # abort unfinished uploads at this age; uploads of dead saves are aborted earlier
_LOOK_S = 5.0  # when the record is uploaded, the check of the lease may be at most this old
_SLACK = 1 << 20  # bytes to allow for the record and directories
_OF_A_SAVE = re.compile(r"[^/]+/[0-9a-f]{16}/")  # the prefix of RemotePlace's keys


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

    Also finishes interrupted replacements of checkpoints. A failed deletion is logged, and the next call retries it.

    Args:
        leased: Whether the caller holds the run's lease, so that no other save is running on any machine.
        inventory: The current inventory, if known.
        view: The snapshot that `inventory` was listed from. If given, old uploads are not searched for.
        but: The path of the caller's own attempt, which is kept.
    """
    given, view = view, view or snapshot(root)
    inventory = inventory or list_checkpoints(root, view=view)
    dead = _dead_paths(root, inventory, view, leased=leased)
    if is_directory(root) and leased and not dry_run:
        # A replacement may have been killed between its two renames.
        dead += [take_name(root, found.path, found.name) for found in inventory.committed if found.path != found.name]
    removed = []
    for path in dict.fromkeys(dead):
        if path in ("", but):
            continue
        try:
            left = _staying(root, path) if dry_run else _remove(root, path)
        except (OSError, CkptkitError) as error:
            warn_once(logger, f"{root.url}/{path}", "could not be removed: %s", error)
            continue
        if not left:
            removed.append(path)
    for item in inventory.skipped if leased and not dry_run else ():
        if item.unknown:
            warn_once(logger, f"{root.url}/{item.path}", "is kept, but is not a checkpoint: %s", item.reason)
    return removed if given is not None else removed + _old_uploads(root, dry_run=dry_run)


def finish_replacements(root: Store) -> list[str]:
    """Remove what dead writers left, and finish replacements of checkpoints if they were killed between two renames.

    Returns the removed paths. Does nothing while a job holds the run's lease: the job's next save cleans up.
    """
    try:
        lease = acquire_lease(root)
    except LeaseHeldError:
        return []
    try:
        return clean_leftovers(root, leased=True)
    finally:
        lease.release()


def _dead_paths(root: Store, inventory: Inventory, view: Store, *, leased: bool) -> list[str]:
    """Return what dead writers left: staging and trash directories, owner files, deletion marks, temporary files."""
    dead = [item.path for item in inventory.abandoned]
    for attempt in inventory.in_progress:
        kept = leftover_of(attempt.path)
        # On an object store (`kept` is None) only the lease's holder writes attempts.
        if (kept is None and leased) or (kept is not None and is_abandoned(root, kept, leased=leased)):
            dead.append(attempt.path)
    if not is_directory(root):
        # Marks of deletions (see `mark_of`) that are no longer needed: only the mark is left, or nothing was deleted.
        ended = [item.path for item in inventory.skipped if item.deleted and not item.kept_files]
        dead += [file.path for path in ended for file in view.list(path) if file.kind == "file"]
        if view.sizes_are_free:  # if each lookup is a request, leave a mark until its checkpoint is deleted
            marks = [f"{item.path}/{mark_of(item.record)}" for item in inventory.committed]
            dead += [path for path in marks if view.info(path) is not None]
    for entry in view.list():
        kept = leftover_of(entry.path)
        if kept is not None and kept.kind == "owner" and is_abandoned(root, kept):
            dead.append(entry.path)  # its staging directory was removed or never created
        part = UNFINISHED.fullmatch(entry.path)
        is_hint = entry.kind == "file" and part is not None and part[1] == LATEST_HINT
        if is_hint and (leased or time.time() - entry.mtime > staging.STARTING_S):
            dead.append(entry.path)
    return dead


def _old_uploads(root: Store, *, dry_run: bool) -> list[str]:
    """Abort multipart uploads that saves started at least a day ago. Uploads of other programs may take longer."""
    found = [upload for upload in root.unfinished_uploads(older_than_s=UPLOAD_AGE_S) if _OF_A_SAVE.match(upload.path)]
    if found and not dry_run:
        now = store_clock(root)  # this machine's clock may be wrong
        found = [upload for upload in found if now - upload.started >= UPLOAD_AGE_S]
        root.end_uploads(found)
    return [f"unfinished upload of {upload.name}" for upload in found]


def _staying(root: Store, path: str) -> list[str]:
    """Return what `_remove` would return. Deletes nothing."""
    kept = leftover_of(path)
    if kept is not None and kept.kind == "owner":
        folder = staging_name(kept.name, kept.nonce)
        return [path] if root.info(folder) is not None and _staying(root, folder) else []
    name, _, folder = path.rpartition("/")
    is_attempt = _OF_A_SAVE.match(f"{path}/") and not is_directory(root)
    if kept is None and (not is_attempt or any(record.data == folder for record in deleted_records(root, name))):
        return []
    return [] if record_in(root, path) else split_files(root.child(path))[1]


def _remove(root: Store, path: str) -> list[str]:
    """Remove what a dead writer left at `path`. Return the files of other programs in it, which are kept."""
    name, _, folder = path.rpartition("/")
    kept = leftover_of(path)
    is_attempt = kept is None and _OF_A_SAVE.match(f"{path}/") and not is_directory(root)
    if not is_attempt and (kept is None or kept.kind == "owner"):
        if kept is not None and root.info(staging_name(kept.name, kept.nonce)) is not None:
            return [path]  # the directory could not be removed, and is recognized by this file
        root.delete([path])
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
        overwrite: Replace a committed checkpoint of the same name once the new checkpoint is complete.
        set_aside: Rename a directory that has the step's name but is not a checkpoint. Rank 0's value counts.
        file_names: A regular expression for the paths that all ranks will write. Foreign files with such a path are
            detected before anything is written. Rank 0's value counts.
        lease: The run's lease, or a function that returns it. Only rank 0 calls the function. On an object store, the
            function is called with one argument, which it passes to `acquire_lease` as `look`. None: the attempt
            acquires its own lease. Attempts with the same lease take turns.

    Raises:
        CheckpointExistsError: A checkpoint or something else already has the checkpoint's name. On an object store,
            `commit` may raise this error instead.
        NoSpaceError: There is not enough space for the bytes of all ranks. Nothing was written.
        LeaseHeldError: Another job saves to this root.
        UsageError: The tag or the step is invalid, or differs between ranks.
        RankFailedError: A rank died, hung, or does not see the same storage.
    """
    coordinator = coordinator or Coordinator()
    attempt = SaveAttempt(root, step, tag, coordinator, overwrite, set_aside, file_names)
    what = f"starting to save step {step!r:.40}"
    try:
        checkpoint_name(step, tag)
        outcome = Outcome((step, tag, overwrite, planned_bytes))
    except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
        outcome = Outcome.of_error(error)
    try:
        # 1. Invariant: either all ranks continue with the same attempt, or none does.
        save_id, witness = coordinator.settle(outcome, what, then=partial(attempt.open, lease))
        # 2. Invariant: every rank sees the location that rank 0 created, so no rank writes to a different disk.
        if not coordinator.is_main:
            attempt.use(save_id, witness)
        if not root.asking_costs:  # on an object store, each rank checks this before it reports its files
            coordinator.all_ok(attempt.place.look, what)
    except BaseException:
        attempt.close()
        raise
    return attempt


class SaveAttempt:
    """One attempt to save, from `begin_save` to `commit` or `abort`.

    Rank 0 holds the lease. Managers in one process share the lease, so their attempts take turns. On an object store,
    the first save under a lease lists the run in the background, while the ranks upload to private keys; only the
    commit waits for the listing. The two most likely reasons to refuse a save are checked before the uploads: another
    job's lease, and an existing checkpoint of the same name. Later saves under the same lease reuse the listing.

    Attributes:
        store: Where every rank writes its files.
        name: The directory of the future checkpoint.
        save_id: 16 hex digits, unique to this attempt.
        after: On rank 0, after a commit: the list of the run's checkpoints, with the new one. The run is not listed
            again, because no other process can have saved. So the list may contain checkpoints that other processes
            have deleted.
    """

    place: Place
    store: Store
    save_id: str

    def __init__(
        self,
        root: Store,
        step: int,
        tag: str | None,
        coordinator: Coordinator,
        overwrite: bool,
        set_aside: bool,
        file_names: str,
    ) -> None:
        self.root, self.step, self.tag, self.coordinator = root, step, tag, coordinator
        self.after: Inventory | None = None
        self._overwrite, self._set_aside, self._file_names = overwrite, set_aside, file_names
        self._started = time.monotonic()
        # On rank 0:
        self._lease: Lease | None = None  # once this attempt has its turn
        self._own_lease: Lease | None = None  # acquired for this attempt alone
        self._view, self._inventory = root, Inventory(root.url)
        self._listing: Future[None] | None = None  # the run is being listed in the background
        self._is_open = False
        self._record: CommitRecord | None = None

    def use(self, save_id: str, witness: Witness | None) -> None:
        """Set the attempt's id, and with it the location of its files. `witness`: as for `RemotePlace`."""
        self.name, self.save_id = checkpoint_name(self.step, self.tag), save_id
        if is_directory(self.root):
            self.place = LocalPlace(self.root, self.name, save_id)
        else:
            self.place = RemotePlace(self.root, self.name, save_id, witness=witness)
        self.store = self.place.store

    def open(self, given: Lease | Callable[..., Lease] | None, requests: Sequence[Any]) -> tuple[str, Witness]:
        """Acquire the lease, check that the save may begin, and create the location. Runs on rank 0.

        If another attempt in this process uses the lease, waits until that attempt ends.

        Returns the attempt's id, and a `Witness`, with which the other ranks check that they see the same store.
        """
        check_equal([request[:3] for request in requests], "what to save: (step, tag, overwrite)")
        root, remote = self.root, self.root.asking_costs
        views: list[Store] = []  # the snapshot taken to acquire the lease; empty if it was already held

        def look() -> Store:
            views.append(snapshot(root))
            return views[-1]

        if given is None:
            lease = self._own_lease = acquire_lease(root, look=look if remote else None)
        elif isinstance(given, Lease):
            lease = given
        else:
            lease = given(look) if remote else given()
        limit_s = self.coordinator.timeout_s
        if not lease.turn.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
            raise LeaseHeldError(
                f"{root.url}: another save of this process did not end within {limit_s:g} s; nothing was "
                "written. Wait for it, or give the manager a longer timeout_s."
            )
        self._lease = lease
        self.use(lease.new_attempt() if remote else new_nonce(), None)
        kept = None if views else lease.inventory
        taken = any(view.info(record_path(self.name)) is not None for view in views)
        listed = partial(self._list_run, lease, views[-1] if views else None)
        in_the_way = [] if kept is None else [i.name for i in kept.committed] + [i.path for i in kept.skipped]
        if not remote or taken or self.name in in_the_way:
            listed()
        elif kept is not None:
            self._inventory = kept
        else:
            pool = WorkerPool(1, thread_name_prefix="ckptkit-open")
            self._listing = pool.submit(listed)
            pool.shutdown(wait=False)
        _check_space(root, [request[3] for request in requests], saved=len(self._inventory.committed))
        # Invariant: if there is too little space, the save fails before it writes anything.
        self._is_open = True
        if is_directory(root):
            open_staging(root.existing(), self.name, self.save_id, leased=True)
        return self.save_id, Witness(lease.path, lease.nonce)

    def _list_run(self, lease: Lease, view: Store | None) -> None:
        """List the run and clean it up, before anything is published.

        `view` is the snapshot that the lease was acquired with; None if the lease was already held.
        """
        if view is None:
            # On an object store, a single listing serves all checks.
            view = snapshot(self.root)
            lease.check(view=view)
        lease.finish()
        # Invariant: no other attempt is running here. Remove what dead attempts left first, to free space.
        inventory = list_checkpoints(self.root, view=view)
        half_replaced = any(item.path != item.name for item in inventory.committed)
        own = self.place.path if self.place.data else ""
        if clean_leftovers(self.root, leased=True, inventory=inventory, view=view, but=own) or half_replaced:
            view = snapshot(self.root)
            inventory = list_checkpoints(self.root, view=view)
        self._view, self._inventory = view, inventory
        self._check_free_name(view, inventory)

    def _check_free_name(self, view: Store, inventory: Inventory) -> None:
        root, name, url = self.root, self.name, f"{self.root.url}/{self.name}"
        found = inventory.find(name)
        skipped = next((item for item in inventory.skipped if item.path == name), None)
        taken = root.info(name) if is_directory(root) else view.info(record_path(name))
        if found is not None:
            if not self._overwrite:
                raise CheckpointExistsError(
                    f"{url} exists already (save {found.record.save_id}); a checkpoint is never changed. Use another "
                    "step or tag, or replace it with overwrite=True."
                )
            held = [pin for pin in list_pins(root) if pin.name == name and pin.owner != this_process()]
            if held:
                raise CheckpointExistsError(f"{url} is not overwritten: it is {held[0].reason}.")
        elif skipped is not None and skipped.deleted:
            pass  # the directory contains only foreign files, which stay
        elif skipped is not None and taken is not None:
            if not self._set_aside or skipped.unanswered or (skipped.damaged and not self._overwrite):
                raise CheckpointExistsError(f"{url} is in the way: {skipped.reason}. Move it away or delete it.")
            if is_directory(root):  # on an object store nothing is renamed, because the commit replaces the record
                aside = f"{name}.aside-{new_nonce()}"
                root.rename(name, aside)
                logger.warning("%s was renamed to %s: %s", url, aside, skipped.reason)
        elif taken is not None:
            raise CheckpointExistsError(f"{url} is in the way: a {taken.kind} that is not a checkpoint of ckptkit.")
        if taken is not None and is_directory(root):  # on an object store, each attempt has its own folder
            in_the_way = [path for path in others_in(root, name) if re.fullmatch(self._file_names, path)]
            if in_the_way:
                raise would_replace(root, name, ", ".join(in_the_way[:3]))

    def abort(self, error: BaseException) -> NoReturn:
        """Tell all ranks that this rank failed. Their `commit` raises the same error, and nothing is published.

        Raises:
            RankFailedError: Always, with one exception: if there is only one rank, an error of ckptkit is raised
                unchanged.
        """
        with contextlib.suppress(Exception):  # finish this rank's uploads before rank 0 deletes everything
            self.place.sync(())
        try:
            self.coordinator.settle(Outcome.of_error(error), f"saving {self.name}")
        finally:
            self.close()
        raise SaveError(f"saving {self.name} failed: {error}") from error  # not reached: `settle` raises

    def commit(
        self,
        files: Mapping[str, FileRecord],
        record_fields: Mapping[str, Any],
        *,
        payload: Any,
        complete: Callable[[list[Any]], Mapping[str, FileRecord]],
    ) -> CommitRecord:
        """Publish the checkpoint once every rank has written its files, and return the record. All ranks must call it.

        On ranks other than 0, the returned record lists no files.

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
        try:
            # 3. Invariant: if a rank reports success, its files are durable, in the store that rank 0 will check.
            self.place.look()
            if self.coordinator.world_size > 1 or not self.root.asking_costs:
                self.place.sync(files)
                self.place.check(files)  # a single rank on an object store checks later, in `_publish`
            outcome = Outcome((dict(files), payload))
        except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
            outcome = Outcome.of_error(error)
        try:
            # 4. Invariant: nothing is published unless all ranks' files are durable. If one rank raises, all do.
            then = partial(self._publish, record_fields, complete)
            slim: CommitRecord = self.coordinator.settle(outcome, f"saving {self.name}", then=then)
        finally:
            self.close()
        if self._record is None:
            return slim
        text = "saved %s/%s: %s in %.1f s"
        seconds = time.monotonic() - self._started
        logger.debug(text, self.root.url, self.name, format_size(slim.total_bytes), seconds)
        return self._record

    def _publish(
        self,
        record_fields: Mapping[str, Any],
        complete: Callable[[list[Any]], Mapping[str, FileRecord]],
        reports: list[tuple[dict[str, FileRecord], Any]],
    ) -> CommitRecord:
        """Commit the checkpoint. Runs on rank 0, and returns the record without its file list."""
        lease, place = self._lease, self.place
        assert lease is not None
        if self._listing is not None:
            self._listing.result()  # raises the errors of the checks
        files: dict[str, FileRecord] = {}
        for rank, (mine, _) in enumerate(reports):
            for path, item in mine.items():
                if path in files:
                    raise SaveError(f"{self.name}: rank {rank} and a lower rank both wrote {path}.")
                files[path] = item
        own, of_ranks = dict(reports[0][0]), files.keys() - reports[0][0].keys()
        # On an object store, while the index is written, check that this job still holds the lease.
        started = time.monotonic()
        with WorkerPool(1, thread_name_prefix="ckptkit-look") as pool:
            look = pool.submit(lease.check) if self.root.asking_costs else None
            # `complete` may also return other ranks' files, which those ranks have already checked.
            found = complete([payload for _, payload in reports])
            own |= {path: item for path, item in found.items() if path not in of_ranks}
            place.sync(path for path in own if path not in files)
            files |= own
            # 5. Invariant: the files that the record will name exist and are complete, and there are no other files.
            place.check(own, files)
            if look is not None:
                look.result()
        # Invariant: a writer that has lost the lease does not commit, because its files may have been deleted.
        if look is None or time.monotonic() - started >= _LOOK_S:
            lease.check()
        # The inventory may lack this writer's last save.
        newest = max((lease.sequence, *(item.record.sequence for item in self._inventory.committed)))
        writer = this_process()
        record = CommitRecord(
            **{
                "created": time.time(),
                "world_size": self.coordinator.world_size,
                "writer": {"host": writer.host, "pid": writer.pid},
                **record_fields,
                "step": self.step,
                "tag": self.tag,
                "save_id": self.save_id,
                "sequence": newest + 1,
                "data": place.data,
                "files": files,
            }
        )
        place.look()
        # 6. and 7.: the commit. Invariant: when `save` returns, the checkpoint survives a power failure.
        data = record.to_json()
        known = CommitRecord.from_json(data, file=f"{self.name}/{RECORD_NAME}")  # the record as a reader gets it
        place.publish(data, overwrite=self._overwrite, again=lease.check)
        lease.sequence = record.sequence
        self._record = known
        slim = replace(known, files={})  # saves memory: the inventory is kept until the next save
        others = [(item.path, item.record) for item in self._inventory.committed if item.name != self.name]
        committed = [Committed(path, replace(record, files={})) for path, record in others]
        ordered, _ = in_order([*committed, Committed(self.name, slim)])
        self.after = replace(self._inventory, committed=tuple(ordered))
        return slim

    def close(self) -> None:
        """Clean up, and let the next attempt use the lease. After a commit, first write the file `latest`.

        A failure is only logged: the save has already succeeded or failed, and the next save cleans up.
        """
        if self._listing is not None:
            self._listing.exception()  # waits, because the background thread may still be cleaning up
        lease = self._lease
        try:
            if lease is not None:
                lease.inventory = None  # if anything fails below, the next save lists the run and cleans up
                self._end(lease)
                lease.inventory = self.after
        finally:
            if lease is not None:
                self._lease = None
                lease.turn.release()
            if self._own_lease is not None:
                self._own_lease.release()

    def _end(self, lease: Lease) -> None:
        committed, remote = self._record is not None, self.root.asking_costs
        with WorkerPool(1, thread_name_prefix="ckptkit-end") as pool:
            if self._is_open and remote:  # meanwhile, record in the lease whether this attempt was committed
                pool.submit(lease.end_attempt, self.place.data, committed=committed)
            if committed:
                wrote = write_hint(self.root, self.name, view=self._view, ours=lease.wrote_hint)
                lease.wrote_hint = wrote and remote
            try:
                if self._is_open:
                    self.place.close()
            except (OSError, CkptkitError) as error:  # CkptkitError: the record is unreadable, so the owner is unknown
                logger.warning("%s could not be cleaned up: %s. The next save tries again.", self.root.url, error)
                self.after = None


def _check_space(root: Store, planned: Sequence[int | None], *, saved: int) -> None:
    """Raise NoSpaceError if there is not enough space. `saved` is the number of committed checkpoints."""
    free = root.free_bytes()
    if free is None or any(nbytes is None for nbytes in planned):
        return
    total = sum(nbytes or 0 for nbytes in planned)
    need = total + total // 20 + _SLACK
    if need > free:
        advice = "Free some space, or save to another disk."
        if saved > 1:  # otherwise, nothing can be deleted
            advice = (
                "Old checkpoints are deleted only after the new one is committed, so there must be space for one more. "
                f"To see what can be deleted: {command_line('prune', root.url, '--max-num', '1', '--dry-run')}"
            )
        raise NoSpaceError(
            f"{root.url}: the checkpoint needs {format_size(need)}, but only {format_size(free)} are free: No space "
            f"left on device. Nothing was written. {advice}"
        )
