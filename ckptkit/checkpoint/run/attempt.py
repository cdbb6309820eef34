"""An attempt to save: its location until it is published, and the single step that publishes it.

Two places keep the same promise: a checkpoint exists if, and only if, its record does, and the record comes
last, after everything that it names is durable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckptkit.checkpoint.run.unnamed import (
    carry_over,
    clear,
    delete_marked,
    deleted_records,
    give_up,
    mark_of,
    others_in,
)
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

__all__ = [
    "LOOK_S",
    "LocalPlace",
    "Place",
    "RemotePlace",
    "Witness",
    "check_names",
    "place_of",
    "settle_replacements",
    "write_hint",
]

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # how old a look at the lease, or at a name, may be when the record is put

_witnessed: weakref.WeakKeyDictionary[Store, Witness] = weakref.WeakKeyDictionary()


class Place(Protocol):
    """One attempt's files."""

    name: str
    data: str  # CommitRecord.data

    @property
    def store(self) -> Store:
        """Where the files go."""

    def open(self) -> None:
        """Make the place and say who writes. Rank 0."""

    def look(self) -> None:
        """Raise SaveError unless this rank sees the place that rank 0 made. Every rank, at any time."""

    def sync(self, paths: Iterable[str]) -> None:
        """Make files that this rank wrote durable."""

    def check_own(self, files: Mapping[str, FileRecord]) -> None:
        """Raise SaveError unless what this rank wrote is `files`, and is there, each with its size, as far as the place
        can tell better here than rank 0 by `check_all`. Every rank."""

    def check_all(self, files: Mapping[str, FileRecord], own: Mapping[str, FileRecord]) -> None:
        """Raise SaveError unless `files`, of all ranks, are there, each with its size, and nothing else. Rank 0, which
        wrote `own`."""

    def was_free(self, when: float) -> None:
        """Take note that there was no checkpoint of this name then, by `time.monotonic`. Rank 0."""

    def look_free(self) -> None:
        """Raise CheckpointExistsError if there is a checkpoint of this name, where that is not known, and `publish`
        would have to ask. Rank 0, a moment before that."""

    def publish(self, record: bytes, *, overwrite: bool, again: Callable[[], None] | None = None) -> None:
        """Write the record and let the checkpoint appear. Durable on return. Rank 0.

        Args:
            again: Raises where this writer may no longer write. Called before the record is tried to be put again,
                which may be a minute later.
        """

    def close(self) -> None:
        """Delete all that is not published. Rank 0; can be repeated."""


@dataclass(frozen=True, slots=True)
class Witness:
    """The file of the lease under which an attempt is made, and what it says: who reads it sees the same store."""

    path: str
    nonce: str


def place_of(root: Store, name: str, save_id: str, *, witness: Witness | None = None) -> Place:
    """Return the place of an attempt to save `name`; nothing is made yet.

    Args:
        witness: What a rank must see before it says that its files are in the store that rank 0 writes to; None on
            rank 0 itself.
    """
    if is_directory(root):
        return LocalPlace(root, name, save_id)
    return RemotePlace(root, name, save_id, witness=witness)


def _check_owner(root: Store, path: str, save_id: str) -> None:
    stated = staging.read_owner(root, path)
    if stated is None or stated.nonce != save_id:
        raise SaveError(
            f"{root.url} is not shared by all ranks, or is no longer what it was: this rank does not see the save "
            f"that rank 0 began there ({path}). Every rank must be given the same shared directory or bucket. Was a "
            "mount lost, or the directory removed?"
        )


class LocalPlace:
    """A staging directory beside the checkpoint, on a file system: one rename publishes it."""

    data = ""

    def __init__(self, root: LocalStore, name: str, save_id: str) -> None:
        # Invariant: a root, or a staging directory, that is gone is never made anew: that would be another disk.
        self.root, self.name, self.save_id = root.existing(), name, save_id
        self.path = staging.staging_name(name, save_id)
        self._store = root.child(self.path).existing()
        self._replacement = f"{name}@{save_id}"  # a name that discovery knows, and no tag has

    @property
    def store(self) -> LocalStore:
        return self._store

    def open(self) -> None:
        publish.open_staging(self.root, self.name, self.save_id, leased=True)

    def look(self) -> None:
        _check_owner(self.root, staging.owner_path(self.path), self.save_id)
        if self.root.info(self.path) is None:
            raise SaveError(f"{self.store.url} is gone: somebody removed it while it was written.")

    def sync(self, paths: Iterable[str]) -> None:
        # Also what its writer has synced: a second time costs nothing, a forgotten one costs the checkpoint.
        for path in paths:
            fd = self.store.open_file(path)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def check_own(self, files: Mapping[str, FileRecord]) -> None:
        pass  # rank 0 looks at all of them

    def check_all(self, files: Mapping[str, FileRecord], own: Mapping[str, FileRecord]) -> None:
        _check_files(self.store.url, files, {item.path: item.size for item in self.store.list(recursive=True)})

    def was_free(self, when: float) -> None:
        pass  # a rename tells

    def look_free(self) -> None:
        pass

    def publish(self, record: bytes, *, overwrite: bool, again: Callable[[], None] | None = None) -> None:
        self.store.write(RECORD_NAME, record)
        replaces = self.root.info(self.name) is not None and (overwrite or self._is_deleted())
        if replaces:
            self._carry_over()
        # Invariant: from here the staging directory is complete, and discovery does not see it.
        publish.sync_directories(self.store)
        self.root.sync_directory()
        # Invariant: every byte and every name in it survives a power cut.
        if replaces:
            self._replace()
            return
        try:
            publish.publish(self.root, self.path, self.name)  # the commit point
        except (FileExistsError, FileNotFoundError) as error:
            raise CheckpointExistsError(
                f"{self.root.path_of(self.name)} appeared while it was saved; it was left as it is, and nothing "
                "was published."
            ) from error

    def _is_deleted(self) -> bool:
        return find_record(self.root, record_path(self.name)) is None and bool(deleted_records(self.root, self.name))

    def _carry_over(self) -> None:
        """Take over what others have put into the directory that is replaced."""
        others = others_in(self.root, self.name)
        try:
            carry_over(self.root, self.name, self.path, others)
        except FileExistsError as error:
            raise _would_replace(self.root, self.name, str(error)) from error
        if others:
            logger.info("kept in %s/%s what its commit record does not name: %s", self.root.url, self.name, others[:5])

    def _replace(self) -> None:
        """Publish over a checkpoint of the same name: at no instant is there neither."""
        if publish.exchange(self.root, self.path, self.name):  # the commit point; synced
            return
        # No atomic swap here (NFS). Discovery knows the new one by a second name until the old one is away.
        publish.publish(self.root, self.path, self._replacement)  # the commit point
        _settle(self.root, self._replacement, self.name)

    def close(self) -> None:
        # Published or not: after a swap the old checkpoint lies here.
        give_up(self.root, self.path, self.name)
        self.root.delete(reversed(staging.owner_files(self.root, self.path)))


def check_names(root: Store, name: str, file_names: str) -> None:
    """Raise CheckpointExistsError where others have a file in the directory `name` that a save there would write.

    Args:
        file_names: A pattern of the paths that it writes. On an object store it has a folder of its own.
    """
    if not is_directory(root):
        return
    taken = [path for path in others_in(root, name) if re.fullmatch(file_names, path)]
    if taken:
        raise _would_replace(root, name, ", ".join(taken[:3]))


def _would_replace(root: LocalStore, name: str, what: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{root.path_of(name)} holds a file that its commit record does not name, and this save writes one of that "
        f"name: {what}. Nothing was published. Move it away."
    )


def settle_replacements(root: Store, paths: Mapping[str, str]) -> None:
    """Finish overwrites that were killed between their two renames. `paths`: directory -> name."""
    if is_directory(root):
        for path, name in paths.items():
            if path != name:
                _settle(root, path, name)


def _settle(root: LocalStore, path: str, name: str) -> None:
    trash = publish.drop(root, name)
    root.rename(path, name)
    root.sync_directory()
    if trash is not None:
        give_up(root, trash, name)


class RemotePlace:
    """Keys of the attempt alone below the checkpoint's, on an object store: putting the record publishes them.

    `step_N/checkpoint.json` names the save id, `step_N/<save id>/...` are the files. A late upload of a
    dead attempt can't mix with another's, and replacing a checkpoint is one put. Whose an attempt is says the lease,
    which is there before its first file and held until its last was committed or deleted.
    """

    def __init__(self, root: Store, name: str, save_id: str, *, witness: Witness | None = None) -> None:
        self.root, self.name, self.save_id = root, name, save_id
        self._witness = witness
        self.data = save_id
        self.path = f"{name}/{save_id}"
        self._store = attempt_store(root, self.path)
        self._replaced: CommitRecord | None = None
        self._published = False
        self._may_appear = False  # though the store has not said so
        self._tried = False
        self._free_at = -LOOK_S  # when a look showed that there is no record

    @property
    def store(self) -> Store:
        return self._store

    def open(self) -> None:
        pass  # keys need no directory

    def look(self) -> None:
        # Once for each lease: keys do not move as directories do.
        witness = self._witness
        if witness is not None and _witnessed.get(self.root) != witness:
            _check_owner(self.root, witness.path, witness.nonce)
            _witnessed[self.root] = witness

    def sync(self, paths: Iterable[str]) -> None:
        # Small objects may still be on their way. One that is there is durable.
        self._store.settle()

    def check_own(self, files: Mapping[str, FileRecord]) -> None:
        # A put that was answered with the tag of the whole object is proof that it is there: stores that say so and
        # have it not are beyond any look. Of what has no such answer (it was lost, another process has it, or fsspec
        # gives none) one listing tells, which S3 and GCS give consistently.
        found = self._store.arrived()
        if not found.keys() >= files.keys():
            start = len(self.path) + 1
            listed = snapshot(self.root, self.name).list(self.path, recursive=True)
            sizes = {item.path[start:]: item.size for item in listed}
            found = {path: sizes[path] for path in found.keys() | files.keys() if path in sizes}
        _check_files(self._store.url, files, found)

    def check_all(self, files: Mapping[str, FileRecord], own: Mapping[str, FileRecord]) -> None:
        self.check_own(own)

    def was_free(self, when: float) -> None:
        self._free_at = when

    def look_free(self) -> None:
        if self.root.has_conditional_writes is True or self._is_known_free():
            return
        started = time.monotonic()
        path = record_path(self.name)
        if self.root.exists(path):
            raise self._was_taken()
        self._free_at = started

    def _is_known_free(self) -> bool:
        return time.monotonic() - self._free_at < LOOK_S

    def publish(self, record: bytes, *, overwrite: bool, again: Callable[[], None] | None = None) -> None:
        # Invariant: every object that the record names is complete, under keys that nobody else writes.
        old = self._old() if overwrite else None
        if old is not None and old.data:
            self.root.write(f"{self.name}/{mark_of(old)}", old.to_json(), overwrite=True)
            self._replaced = old
        root = self.root
        if self._is_known_free():
            root = root.with_free_names()
        root = root.with_each_put(partial(self._try, again))
        try:
            root.write(record_path(self.name), record, overwrite=overwrite)  # the commit point
        except OSError as error:
            # The answer may have been lost, or the request repeated after that: then the record is ours.
            self._may_appear |= may_yet_happen(error)
            found = find_record(self.root, record_path(self.name))
            if found is None or found.save_id != self.save_id:
                if not isinstance(error, FileExistsError):
                    raise
                raise self._was_taken() from error
        else:
            self._read_back()
        self._published = True

    def _old(self) -> CommitRecord | None:
        try:
            return find_record(self.root, record_path(self.name))
        except CorruptCheckpointError:  # what it named can't be known any more
            return None

    def _read_back(self) -> None:
        """Raise if another writer's record replaced ours, which a store without conditional writes does not report."""
        if self.root.has_conditional_writes is not True:
            found = find_record(self.root, record_path(self.name))
            if found is None or found.save_id != self.save_id:
                raise self._was_taken()

    def _try(self, again: Callable[[], None] | None, put: Callable[[], str]) -> str:
        """Try to put the record. A put of an earlier try may still arrive later, whatever response a retry gets."""
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

    def close(self) -> None:
        with contextlib.suppress(OSError, CkptkitError):
            self.sync(())  # what arrives after the deletion would stay
        old = self._replaced
        if not self._published and not self._is_record_ours():
            # Invariant: no record ever names what is gone. One that a slow server puts there late finds its files, and
            # if it never does, the next save removes them.
            if not self._may_appear:
                clear(self.root, self.path)
                self.root.delete([f"{self.name}/{mark_of(old)}"] if old is not None else [])
        elif old is not None and old.data != self.save_id:
            delete_marked(self.root, snapshot(self.root, self.name), self.name, old)

    def _is_record_ours(self) -> bool:
        found = find_record(self.root, record_path(self.name))
        return found is not None and found.save_id == self.save_id


def write_hint(root: Store, name: str, *, view: Store | None = None, ours: bool = False) -> bool:
    """Let the file `latest` name the newest checkpoint, for people; nothing here reads it. Never raises.

    Returns whether it does: a file of somebody else's is left alone.

    Args:
        view: A snapshot of `root`.
        ours: What has that name is known to be a hint.
    """
    with contextlib.suppress(OSError, ValueError):
        root = root.existing()
        view = root if view is None or is_directory(root) else view
        found = None if ours else view.info(LATEST_HINT)
        if found is not None:
            if found.kind != "file" or found.size > 200:
                return False
            stated = view.read(LATEST_HINT).decode().strip()
            if step_of_name(stated) is None and find_record(root, record_path(stated)) is None:
                return False  # somebody else's file of that name
        root.write(LATEST_HINT, f"{name}\n".encode(), overwrite=True, sync=False)
        return True
    return False


def _check_files(url: str, files: Mapping[str, FileRecord], found: Mapping[str, int]) -> None:
    """Raise SaveError unless what was found, by size, is exactly `files`."""
    for path, item in sorted(files.items()):
        if path not in found:
            raise SaveError(f"{url}/{path} is missing, though a rank wrote it. Nothing was published.")
        if found[path] != item.nbytes:
            raise SaveError(
                f"{url}/{path} has {found[path]} bytes, but {item.nbytes} were written. Nothing was published."
            )
    stray = sorted(found.keys() - files.keys())
    if stray:
        raise SaveError(
            f"{url}/{stray[0]} lies in the checkpoint, but no rank says that it wrote it. Nothing was published."
        )
