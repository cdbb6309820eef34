"""Executes rotation: deletes the record first, then the data; repeatable, and never a foreign file."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckptkit.checkpoint.retention import Decision, RetentionPolicy, decide
from ckptkit.checkpoint.run.commit import clean_leftovers
from ckptkit.checkpoint.run.inventory import Inventory, list_checkpoints
from ckptkit.checkpoint.run.pins import deleting, list_pins
from ckptkit.checkpoint.run.unnamed import delete_in_place, delete_marked, give_up, mark_of, unnamed_files
from ckptkit.errors import CheckpointNotFoundError, CkptkitError, UsageError, command_line
from ckptkit.formats.own.record import CommitRecord, find_record, record_path
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.publish import drop
from ckptkit.storage.retry import patient
from ckptkit.storage.store import Store
from ckptkit.units import format_size

__all__ = ["BackgroundRotation", "Rotation", "delete_checkpoint", "plan_rotation", "rotate"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a rotation did.

    Attributes:
        decisions: For every committed checkpoint, in the order of the run.
        deleted: The names that are gone.
        failed: The names that should be gone and are not, each with the error; the next rotation tries again.
        cleaned: Leftovers of dead saves that were removed.
        kept_files: Files in the directories of what was deleted that no commit record names: they are still there.
    """

    decisions: tuple[Decision, ...] = ()
    deleted: tuple[str, ...] = ()
    failed: Mapping[str, str] | None = None
    cleaned: tuple[str, ...] = ()
    kept_files: tuple[str, ...] = ()

    @property
    def left(self) -> frozenset[str]:
        """The names that are still there."""
        return frozenset(item.name for item in self.decisions) - frozenset(self.deleted)

    @property
    def freed_bytes(self) -> int:
        """The bytes of what was deleted."""
        return sum(item.nbytes for item in self.decisions if item.name in self.deleted)


def plan_rotation(
    inventory: Inventory, root: Store, policy: RetentionPolicy, *, protected: Mapping[str, str] | None = None
) -> list[Decision]:
    """Return what a rotation would do now. `protected`: names that the caller needs, with its reasons."""
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
) -> Rotation:
    """Delete what `policy` does not keep. On one rank, after the new checkpoint is committed.

    A failure to delete is logged and reported, never raised: a save that is done stays done.

    Args:
        protected: Names that must stay, with the reason, beside those pinned: the one resumed from.
        among: Which checkpoints the policy is about, where others lie beside them; None: all.
        clean: Also remove what dead saves left.
        seen: What was there a while ago, by a writer that still has the lease: where nothing of that is to go, none of
            it is looked at again.
    """
    if seen is not None and not clean:
        records = [item.record for item in seen.committed if among is None or among(item.record)]
        early = decide(records, policy, protected=protected)
        if all(decision.keep for decision in early):
            return Rotation(tuple(early))
    inventory = list_checkpoints(root)
    if among is not None:
        inventory = replace(inventory, committed=tuple(item for item in inventory.committed if among(item.record)))
    decisions = plan_rotation(inventory, root, policy, protected=protected)
    deleted, failed = [], {}
    kept: list[str] = []
    for decision in decisions:
        if decision.keep:
            continue
        try:
            if delete_checkpoint(root, decision.name, reason=decision.reason, kept=kept):
                deleted.append(decision.name)
        except (OSError, CkptkitError) as error:
            failed[decision.name] = str(error)
    if failed:  # one line, however many: without the permission to delete it is all of them, after each save
        more = f", nor {len(failed) - 1} others" * (len(failed) > 1)
        name, why = next(iter(failed.items()))
        logger.warning("%s/%s could not be deleted%s: %s. The next save tries again", root.url, name, more, why)
    cleaned = clean_leftovers(root) if clean else []
    return Rotation(tuple(decisions), tuple(deleted), failed, tuple(cleaned), tuple(kept))


@patient()
def delete_checkpoint(root: Store, name: str, *, reason: str, kept: list[str] | None = None) -> bool:
    """Delete one committed checkpoint; False where it is pinned. Repeatable: what a kill leaves is no checkpoint,
    and the next save or prune removes it. Files in its directory that its record does not name stay there.

    Args:
        kept: Gets the paths of such files.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint of that name.
        StorageError: The storage failed.
    """
    with deleting(root, name) as pins:
        # Invariant: a reader that comes now sees the announcement, waits, and then finds the checkpoint gone or whole.
        if pins:
            logger.info("kept %s/%s: %s", root.url, name, pins[0].reason)
            return False
        view = snapshot(root, name)
        record = _own_record(view, name)
        unnamed = _delete_local(root, name, record) if is_directory(root) else _delete_remote(root, view, record)
    logger.info("deleted %s/%s (%s): %s", root.url, name, format_size(record.total_bytes), reason)
    if unnamed:
        shown = ", ".join(unnamed[:5]) + (f", ... ({len(unnamed)} in all)" if len(unnamed) > 5 else "")
        logger.warning("kept in %s/%s what its commit record does not name: %s", root.url, name, shown)
        if kept is not None:
            kept += [f"{name}/{path}" for path in unnamed]
    return True


def _own_record(root: Store, name: str) -> CommitRecord:
    found = root.info(name) if is_directory(root) else None
    record = None if found is not None and found.kind != "directory" else find_record(root, record_path(name))
    if record is None or record.name != name:
        raise CheckpointNotFoundError(
            f"{root.url}/{name} is no committed checkpoint of ours; it is not deleted. "
            f"Try: {command_line('ls', root.url)}"
        )
    return record


def _delete_local(root: LocalStore, name: str, record: CommitRecord) -> list[str]:
    unnamed = unnamed_files(root, name, record)
    if not unnamed:
        trash = drop(root, name)  # Invariant: no longer listed, durably, and never seen half-deleted.
        return [] if trash is None else give_up(root, trash, name)
    delete_in_place(root, name, record)
    return unnamed


def _delete_remote(root: Store, view: Store, record: CommitRecord) -> list[str]:
    name = record.name
    root.write(f"{name}/{mark_of(record)}", record.to_json(), overwrite=True)
    # Invariant: whoever finds no record finds what is to be deleted.
    root.delete([record_path(name)])
    return delete_marked(root, view, name, record)


class BackgroundRotation:
    """Rotation in a thread, so that training does not wait for deletions. On one rank."""

    def __init__(self, root: Store, policy: RetentionPolicy) -> None:
        self.root, self.policy = root, policy
        self._asked: queue.SimpleQueue[Mapping[str, str] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self.last = Rotation()

    def submit(self, *, protected: Mapping[str, str] | None = None) -> None:
        """Ask for a rotation; requests that wait become one."""
        if self._closed:
            raise UsageError("the rotation of this run was closed already.")
        with self._idle:
            self._waiting += 1
        self._asked.put(dict(protected or {}))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckptkit-rotate", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when nothing is left to delete; False after `timeout_s`."""
        with self._idle:
            return self._idle.wait_for(lambda: self._waiting == 0, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish and end the thread; False where it is still at work after `timeout_s` (it can be left so)."""
        self._closed = True
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            protected = self._asked.get()
            taken = 1
            while protected is not None and not self._asked.empty():
                newer = self._asked.get()
                if newer is None:
                    self._asked.put(None)
                    break
                protected, taken = newer, taken + 1
            if protected is None:
                return
            try:
                self.last = rotate(self.root, self.policy, protected=protected)
            except (OSError, CkptkitError) as error:
                logger.warning(
                    "could not rotate the checkpoints of %s: %s. The next save tries again", self.root.url, error
                )
            except Exception:  # the boundary of a thread: a save that is done stays done
                logger.exception("rotating the checkpoints of %s failed; the next save tries again", self.root.url)
            finally:
                with self._idle:
                    self._waiting -= taken
                    self._idle.notify_all()
