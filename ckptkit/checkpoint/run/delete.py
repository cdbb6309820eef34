"""Deletes checkpoints according to a retention policy: hides one, then deletes its data, never foreign files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptkit.checkpoint.retention import Decision, RetentionPolicy, decide, warn_of_excess
from ckptkit.checkpoint.run.attempt import write_hint
from ckptkit.checkpoint.run.commit import clean_leftovers
from ckptkit.checkpoint.run.inventory import Inventory, list_checkpoints
from ckptkit.checkpoint.run.pins import deleting, list_pins
from ckptkit.checkpoint.run.unnamed import delete_marked, give_up, mark_of, unnamed_files
from ckptkit.errors import CheckpointExistsError, CheckpointNotFoundError, CkptkitError, command_line
from ckptkit.formats.own.record import CommitRecord, find_record, record_path
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.publish import drop
from ckptkit.storage.retry import patient
from ckptkit.storage.store import Store
from ckptkit.units import first_few, format_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The result of a rotation.

    Attributes:
        decisions: One decision for each committed checkpoint, in the order of `Inventory.committed`. Checkpoints that
            another process deletes meanwhile are left out.
        failed: Names of checkpoints that could not be deleted, each with the error. The next rotation retries.
        cleaned: Removed paths that dead saves had left behind.
        kept_files: Foreign files that still exist in directories of deleted checkpoints.
    """

    decisions: tuple[Decision, ...] = ()
    deleted: tuple[str, ...] = ()
    failed: Mapping[str, str] | None = None
    cleaned: tuple[str, ...] = ()
    kept_files: tuple[str, ...] = ()

    @property
    def left(self) -> frozenset[str]:
        """The remaining checkpoints' names."""
        return frozenset(item.name for item in self.decisions) - frozenset(self.deleted)


def plan_rotation(
    inventory: Inventory, root: Store, policy: RetentionPolicy, *, protected: Mapping[str, str] | None = None
) -> list[Decision]:
    """Return what a rotation would do now. `protected`: names that must stay, each with the reason."""
    keep = dict(protected or {})
    for pin in list_pins(root):
        keep[pin.name] = f"{keep[pin.name]}; {pin.reason}" if pin.name in keep else pin.reason
    return decide([item.record for item in inventory.committed], policy, protected=keep)


@patient()
def rotate(
    root: Store,
    policy: RetentionPolicy,
    *,
    protected: Mapping[str, str] | None = None,
    among: Callable[[CommitRecord], bool] | None = None,
    clean: bool = False,
    seen: Inventory | None = None,
    level: int = logging.INFO,
) -> Rotation:
    """Delete the checkpoints that `policy` does not keep. Call on one rank, after the new checkpoint is committed.

    A failed deletion is logged and reported instead of raised, because the save is already committed.

    Args:
        protected: Names that must stay in addition to pinned checkpoints, each with the reason.
        among: Returns whether the policy applies to a checkpoint. None: it applies to all.
        clean: True also removes the leftovers of dead saves.
        seen: The inventory that this job keeps while it holds the lease. If the policy keeps everything in it, the
            root is not listed again.
        level: Level of the log lines about deletions. A save passes DEBUG, because its own line names them.
    """
    if seen is not None and not clean:
        records = [item.record for item in seen.committed if among is None or among(item.record)]
        early = decide(records, policy, protected=protected)
        if all(decision.keep for decision in early):
            warn_of_excess(early, policy)
            return Rotation(tuple(early))
    inventory = list_checkpoints(root)
    if among is not None:
        inventory = replace(inventory, committed=tuple(item for item in inventory.committed if among(item.record)))
    decisions = plan_rotation(inventory, root, policy, protected=protected)
    warn_of_excess(decisions, policy)
    deleted, failed = [], {}
    kept: list[str] = []
    for decision in [*decisions]:
        if decision.keep:
            continue
        try:
            if delete_checkpoint(root, decision.name, reason=decision.reason, kept=kept, level=level):
                deleted.append(decision.name)
        except (OSError, CkptkitError) as error:
            gone = isinstance(error, CheckpointNotFoundError) and list_checkpoints(root).find(decision.name) is None
            if gone:  # another process has deleted it
                decisions.remove(decision)
            else:
                failed[decision.name] = str(error)
    if failed:  # log one line for all: without permission to delete, every deletion fails after every save
        more = f" and {len(failed) - 1} more" * (len(failed) > 1)
        name, why = next(iter(failed.items()))
        logger.warning("%s/%s%s could not be deleted: %s. The next save tries again", root.url, name, more, why)
    cleaned = clean_leftovers(root) if clean else []
    return Rotation(tuple(decisions), tuple(deleted), failed, tuple(cleaned), tuple(kept))


def delete_any(root: Store, name: str, *, reason: str) -> bool:
    """Delete one committed checkpoint like `delete_checkpoint`, and write the newest remaining name to `latest`."""
    is_deleted = delete_checkpoint(root, name, reason=reason)
    if is_deleted:
        newest = list_checkpoints(root).latest
        write_hint(root, newest.name if newest is not None else "")
    return is_deleted


@patient()
def delete_checkpoint(
    root: Store, name: str, *, reason: str, kept: list[str] | None = None, level: int = logging.INFO
) -> bool:
    """Delete one committed checkpoint. Return True, or False if a user or a reader has pinned the checkpoint.

    If the deletion is killed halfway, the remaining files no longer form a checkpoint, and the next save or prune
    removes them. Foreign files are never deleted. Their paths are added to `kept`.

    Raises:
        CheckpointNotFoundError: No committed checkpoint has that name.
        CheckpointExistsError: Another process replaced the checkpoint at this moment; the new one stays. An object
            store cannot tell.
    """
    with deleting(root, name) as pins:
        # Invariant: a reader that starts now sees the announced deletion and waits. Afterwards it finds all files or
        # none.
        if pins:
            logger.log(level, "kept %s/%s: %s", root.url, name, pins[0].reason)
            return False
        view = snapshot(root, name)
        found = root.info(name) if is_directory(root) else None
        is_other = found is not None and found.kind != "directory"
        record = None if is_other else find_record(view, record_path(name))
        if record is None or record.name != name:
            raise CheckpointNotFoundError(
                f"{root.url}/{name} is not a committed checkpoint; it was not deleted. Try: "
                f"{command_line('ls', root.url)}"
            )
        if not is_directory(root):
            root.write(f"{name}/{mark_of(record)}", record.to_json(), overwrite=True)
            # Invariant: when the record is gone, the mark names the files to delete.
            root.delete([record_path(name)])
            unnamed = delete_marked(root, view, name, record)
        else:
            unnamed = unnamed_files(root, name, record)
            trash = drop(root, name)  # Invariant: the checkpoint is durably unlisted, and nobody sees it half deleted.
            if trash is None:
                raise CheckpointNotFoundError(f"{root.url}/{name} was deleted by another process.")
            _refuse_another(root, trash, name, record)
            give_up(root, trash, name)
    logger.log(level, "deleted %s/%s (%s): %s", root.url, name, format_size(record.total_bytes), reason)
    if unnamed:
        text = "kept files in %s/%s that its commit record does not name: %s"
        logger.warning(text, root.url, name, first_few(unnamed))
        if kept is not None:
            kept += [f"{name}/{path}" for path in unnamed]
    return True


def _refuse_another(root: LocalStore, trash: str, name: str, record: CommitRecord) -> None:
    """Move a checkpoint back from the trash and raise, if a save replaced `record` before it was moved there."""
    try:
        moved = find_record(root, record_path(trash))
    except CkptkitError:  # damaged since it was read
        return
    if moved is None or moved.save_id == record.save_id:
        return
    try:
        root.rename(trash, name)
    except FileExistsError:  # a save has taken the name in the meantime, so it would have replaced this one, too
        return
    root.sync_directory()
    raise CheckpointExistsError(f"{root.url}/{name} was replaced by another process; the new one was not deleted.")
