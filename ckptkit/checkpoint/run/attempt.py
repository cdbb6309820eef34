"""Stores the files of one save attempt until a single atomic step publishes them.

Local and remote stores give the same guarantee: a checkpoint exists if and only if its commit record exists. The record
is written last, once all files that it names are durable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ckptkit.checkpoint.run.unnamed import clear, delete_marked, deleted_records, give_up, mark_of, others_in
from ckptkit.errors import CheckpointExistsError, CkptkitError, CorruptCheckpointError, SaveError
from ckptkit.formats.own.record import (
    LATEST_HINT,
    RECORD_NAME,
    CommitRecord,
    FileRecord,
    find_record,
    record_path,
    step_of_name,
)
from ckptkit.storage import publish, staging
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.private_keys import attempt_store
from ckptkit.storage.retry import may_yet_happen
from ckptkit.storage.store import Store

logger = logging.getLogger(__name__)

_witnessed: weakref.WeakKeyDictionary[Store, Witness] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Witness:
    """The path and nonce of a lease file. If a rank finds this file in its store, the store is also rank 0's."""

    path: str
    nonce: str


class LocalPlace:
    """A staging directory in the root of a run on a file system. A single rename publishes the checkpoint.

    Every rank calls `look`, `sync` and `check`. Only rank 0 calls the other methods.

    Attributes:
        data: The value for `CommitRecord.data`.
    """

    data = ""

    def __init__(self, root: LocalStore, name: str, save_id: str) -> None:
        # Invariant: a missing root or staging directory is never recreated, because the new one could be on a different
        # disk.
        self.root, self.name, self.save_id = root.existing(), name, save_id
        self.path = staging.staging_name(name, save_id)
        self.store: LocalStore = root.child(self.path).existing()
        self._left = self.path
        """The directory that `close` deletes."""

    def look(self) -> None:
        """Raise SaveError unless this rank sees the location that rank 0 created."""
        _check_owner(self.root, staging.owner_path(self.path), self.save_id)
        if self.root.info(self.path) is None:
            raise SaveError(f"{self.store.url} was removed while it was being written.")

    def sync(self, paths: Iterable[str]) -> None:
        """Make the given files, which this rank wrote, durable."""
        # Syncs even files that were already synced: that costs nothing, but a missing sync may lose the checkpoint.
        for path in paths:
            self.store.sync_file(path)

    def check(self, own: Mapping[str, FileRecord], every: Mapping[str, FileRecord] | None = None) -> None:
        """Raise SaveError if a file is missing or has a wrong size, or if there is a file that no rank wrote.

        Args:
            every: The files of all ranks. Passed only on rank 0, after all ranks have written their files.
        """
        if every is not None:
            _check_files(self.store.url, every, {item.path: item.size for item in self.store.list(recursive=True)})

    def publish(self, record: bytes, *, overwrite: bool, again: Callable[[], None] | None = None) -> None:
        """Write the record and make the checkpoint visible and durable. For `again`, see `RemotePlace.publish`.

        Raises:
            CheckpointExistsError: A checkpoint already has this name, or a foreign file would be overwritten.
        """
        self.store.write(RECORD_NAME, record, sync=False)
        self.sync([RECORD_NAME])
        replaces = self.root.info(self.name) is not None
        if replaces:
            replaces = overwrite
            with contextlib.suppress(CkptkitError):  # the record is damaged
                if find_record(self.root, record_path(self.name)) is None:
                    # Only what is left of a deleted checkpoint may be replaced.
                    replaces = bool(deleted_records(self.root, self.name))
        if replaces:  # `close` moves the foreign files of the replaced directory to the new one
            others = others_in(self.root, self.name)
            taken = [path for path in others if os.path.lexists(f"{self.store.url}/{path}")]
            if taken:
                raise would_replace(self.root, self.name, ", ".join(taken[:3]))
            if others:
                text = "kept files in %s/%s that its commit record does not name: %s"
                logger.info(text, self.root.url, self.name, others[:5])
        # Invariant: from here on the staging directory is complete, but not yet listed as a checkpoint.
        publish.sync_directories(self.store)
        self.root.sync_directory()
        # Invariant: all bytes and file names in the staging directory survive a power failure.
        if not replaces:
            try:
                publish.publish(self.root, self.path, self.name)  # the commit point
            except (FileExistsError, FileNotFoundError) as error:
                raise CheckpointExistsError(
                    f"{self.root.path_of(self.name)} appeared during the save; it was left unchanged, and nothing was "
                    "published."
                ) from error
            self._left = ""
        elif not publish.exchange(self.root, self.path, self.name):  # the commit point, synced to disk
            # NFS cannot swap directories atomically. Until the old checkpoint is removed, the new one is listed under a
            # second name. No tag can equal this name, because tags cannot contain "@".
            second = f"{self.name}@{self.save_id}"
            publish.publish(self.root, self.path, second)  # the commit point
            self._left = ""
            try:
                self._left = take_name(self.root, second, self.name)
            except OSError as error:
                logger.warning("%s is called %s until the next save: %s", self.name, second, error)

    def close(self) -> None:
        """Delete everything that was not published. May be called again."""
        if self._left:  # after a swap, the staging directory contains the old checkpoint
            give_up(self.root, self._left, self.name)
        self.root.delete([staging.owner_path(self.path)])


def would_replace(root: LocalStore, name: str, what: str) -> CheckpointExistsError:
    """Return the error for a save that would overwrite a foreign file in the directory `name`."""
    return CheckpointExistsError(
        f"{root.path_of(name)}: this save would overwrite a file that its commit record does not name: {what}. "
        "Nothing was published. Move that file away."
    )


def take_name(root: LocalStore, path: str, name: str) -> str:
    """Rename the checkpoint at `path` to `name`. Return the path to which a previous checkpoint was moved, or ""."""
    trash = publish.drop(root, name)
    root.rename(path, name)
    root.sync_directory()
    return trash or ""


class RemotePlace:
    """One attempt's keys on an object store, under the checkpoint's prefix.

    Uploading the commit record publishes the files.

    `step_N/checkpoint.json` names the save id; the files are `step_N/<save id>/...`. So late uploads from a dead
    attempt cannot overwrite another attempt's files, and a single put replaces a checkpoint. The lease records which
    process owns the attempt. It is acquired before the attempt's first file is written, and held until all files are
    committed or deleted. The methods are those of `LocalPlace`.

    Args:
        witness: Lets a rank check that it writes to the same store as rank 0; None on rank 0.
    """

    def __init__(self, root: Store, name: str, save_id: str, *, witness: Witness | None = None) -> None:
        self.root, self.name, self.save_id = root, name, save_id
        self._witness = witness
        self.data = save_id
        self.path = f"{name}/{save_id}"
        self.store = attempt_store(root, self.path)
        self._replaced: CommitRecord | None = None
        self._published = False
        self._may_appear = False  # whether a failed upload of the record may still take effect
        self._tried = False

    def look(self) -> None:
        # Checking once per lease is enough, because a key prefix, unlike a directory, cannot be moved or unmounted.
        witness = self._witness
        if witness is not None and _witnessed.get(self.root) != witness:
            _check_owner(self.root, witness.path, witness.nonce)
            _witnessed[self.root] = witness

    def sync(self, paths: Iterable[str]) -> None:
        # Wait for small objects that are still uploading. An object is durable as soon as it exists.
        self.store.settle()

    def check(self, own: Mapping[str, FileRecord], every: Mapping[str, FileRecord] | None = None) -> None:
        # An object exists if its put returned the ETag of the whole object. If the ETag is missing (lost, sent to
        # another process, or not provided by fsspec), list once: listings of S3 and GCS are consistent. Each rank
        # checks its own files.
        found = self.store.arrived()
        if not found.keys() >= own.keys():
            start = len(self.path) + 1
            listed = snapshot(self.root, self.name).list(self.path, recursive=True)
            sizes = {item.path[start:]: item.size for item in listed}
            found = {path: sizes[path] for path in found.keys() | own.keys() if path in sizes}
        _check_files(self.store.url, own, found)

    def publish(self, record: bytes, *, overwrite: bool, again: Callable[[], None] | None = None) -> None:
        """Upload the commit record, which makes the checkpoint visible.

        Args:
            again: Called before a retry, which may be a minute later. Raises if this process may not write.
        """
        # Invariant: all objects that the record names are complete, and no other process writes to their keys.
        if overwrite:
            with contextlib.suppress(CorruptCheckpointError):  # the names of a damaged record's files are unknown
                old = find_record(self.root, record_path(self.name))
                if old is not None and old.data:
                    self.root.write(f"{self.name}/{mark_of(old)}", old.to_json(), overwrite=True)
                    self._replaced = old
        try:
            root = self.root.with_each_put(partial(self._try, again))
            root.write(record_path(self.name), record, overwrite=overwrite)  # the commit point
        except OSError as error:
            # The put may have succeeded although its answer was lost. In this case, its retry failed because our own
            # record exists.
            self._may_appear |= may_yet_happen(error)
            if not self._is_record_ours():
                if not isinstance(error, FileExistsError):
                    raise
                raise self._was_taken() from error
        else:
            # A store without conditional writes does not detect that another writer has replaced our record.
            if self.root.has_conditional_writes is not True and not self._is_record_ours():
                raise self._was_taken()
        self._published = True

    def _try(self, again: Callable[[], None] | None, put: Callable[[], str]) -> str:
        """Upload the commit record once. If this fails, note whether the upload may still take effect later."""
        if self._tried and again is not None:
            again()
        self._tried = True
        try:
            return put()
        except BaseException as error:
            self._may_appear |= may_yet_happen(error)
            raise

    def _was_taken(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.root.url}/{self.name} was committed by another writer first; nothing was published."
        )

    def _is_record_ours(self) -> bool:
        found = find_record(self.root, record_path(self.name))
        return found is not None and found.save_id == self.save_id

    def close(self) -> None:
        with contextlib.suppress(OSError, CkptkitError):
            self.sync(())  # an upload that finishes after the deletion would leave its object behind
        old = self._replaced
        if not self._published and not self._is_record_ours():
            # Invariant: no record ever names deleted files. If the record may still appear, keep its files. If it never
            # appears, the next save removes them.
            if not self._may_appear:
                clear(self.root, self.path)
                self.root.delete([f"{self.name}/{mark_of(old)}"] if old is not None else [])
        elif old is not None and old.data != self.save_id:
            delete_marked(self.root, snapshot(self.root, self.name), self.name, old)


Place = LocalPlace | RemotePlace


def _check_owner(root: Store, path: str, save_id: str) -> None:
    stated = staging.read_owner(root, path)
    if stated is None or stated.nonce != save_id:
        raise SaveError(
            f"{root.url} is not shared by all ranks, or was replaced: this rank does not see the save that rank 0 "
            f"began there ({path}). All ranks need the same shared directory or bucket. Was a mount lost, or the "
            "directory removed?"
        )


def _check_files(url: str, files: Mapping[str, FileRecord], found: Mapping[str, int]) -> None:
    """Raise SaveError unless `found`, which maps paths to sizes, agrees exactly with `files`."""
    for path, item in sorted(files.items()):
        if path not in found:
            raise SaveError(f"{url}/{path} is missing, although a rank wrote it. Nothing was published.")
        if found[path] != item.nbytes:
            raise SaveError(
                f"{url}/{path} has {found[path]} bytes, but {item.nbytes} were written. Nothing was published."
            )
    stray = sorted(found.keys() - files.keys())
    if stray:
        raise SaveError(
            f"{url}/{stray[0]} is in the checkpoint's directory, but no rank wrote it. Nothing was published."
        )


def write_hint(root: Store, name: str, *, view: Store | None = None, ours: bool = False) -> bool:
    """Write the newest checkpoint's name to the file `latest`, as a hint for users. Never raises.

    Returns False if the file is foreign (and stays) or cannot be written. ckptkit does not rely on the hint.

    Args:
        view: A snapshot of `root`.
        ours: Whether the existing file is known to be a hint.
    """
    with contextlib.suppress(OSError, ValueError):
        root = root.existing()
        view = root if view is None or is_directory(root) else view
        found = None if ours else view.info(LATEST_HINT)
        if found is not None:
            if found.kind != "file" or found.size > 200:
                return False
            stated = view.read(LATEST_HINT).decode().strip()
            if stated and step_of_name(stated) is None and find_record(root, record_path(stated)) is None:
                return False  # a foreign file
        root.write(LATEST_HINT, f"{name}\n".encode(), overwrite=True, sync=False)
        return True
    return False
