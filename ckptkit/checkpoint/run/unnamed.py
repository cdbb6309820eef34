"""Files in the directory of a checkpoint that its commit record does not name: they are somebody's, and outlive it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from ckptkit.errors import CheckpointNotFoundError, CkptkitError
from ckptkit.formats.own.record import RECORD_NAME, CommitRecord, find_record
from ckptkit.storage.local import LocalStore, OpenDirectory, is_directory
from ckptkit.storage.store import Store

__all__ = [
    "DELETING",
    "carry_over",
    "delete_in_place",
    "deleted_records",
    "finish_deletion",
    "mark_of",
    "named_paths",
    "unnamed_files",
]

DELETING = ".ckptkit-deleting.json"  # the record of a checkpoint of which not all files are deleted yet
_DELETED = ".ckptkit-deleted.json"
_MARK = re.compile(r"\.ckptkit-(?:deleting|deleted(?:-[0-9a-f]{16})?)\.json")
_ATTEMPT = re.compile(r"([0-9a-f]{16})(?:\.owner|/.*)", re.DOTALL)


def mark_of(record: CommitRecord) -> str:
    """Return the name of the record of a deleted checkpoint, on an object store where other files are left."""
    return f".ckptkit-deleted-{record.save_id}.json"


def named_paths(record: CommitRecord) -> list[str]:
    """Return the paths of a checkpoint's files, relative to its directory, without the record itself."""
    below = f"{record.data}/" if record.data else ""
    return [f"{below}{path}" for path in record.files]


def unnamed_files(root: Store, path: str, record: CommitRecord) -> list[str]:
    """Return what lies in the directory at `path` and is no file of the checkpoint, relative to the directory.

    Args:
        record: Of the checkpoint there. On an object store other attempts to save it have folders beside its own.
    """
    named = {RECORD_NAME, *named_paths(record)}
    found = [item.path[len(path) + 1 :] for item in root.list(path, recursive=True)]
    return [p for p in found if p not in named and not _MARK.fullmatch(p) and not _of_an_attempt(p, record)]


def _of_an_attempt(inner: str, record: CommitRecord) -> bool:
    match = _ATTEMPT.fullmatch(inner) if record.data else None
    return match is not None and (match[1] != record.data or inner.endswith(".owner"))


def deleted_records(root: Store, name: str) -> list[CommitRecord]:
    """Return the records of the checkpoints that were deleted from a directory in which other files were left."""
    paths = [f"{name}/{DELETING}", f"{name}/{_DELETED}"]
    if not is_directory(root):  # each attempt has a folder of its own, and may have been deleted by itself
        paths = [item.path for item in root.list(name) if _MARK.fullmatch(item.path[len(name) + 1 :])]
    found = []
    for path in paths:
        with contextlib.suppress(CkptkitError, OSError):
            found.append(find_record(root, path))
    return [record for record in found if record is not None]


def delete_in_place(root: LocalStore, name: str, record: CommitRecord) -> None:
    """Delete a checkpoint's files from its directory, and nothing else: what others have there is not touched.

    The record gets another name first, in one durable step that needs no space: then it is no checkpoint, and what
    is still to be deleted is known after a kill (`finish_deletion`). The directory is held by its descriptor: a save
    that puts another one in its place meanwhile keeps its files.

    Raises:
        CheckpointNotFoundError: Another checkpoint, or none, is there by now.
    """
    with root.opened(name) as folder:
        found = folder.read(RECORD_NAME)
        if found is None or CommitRecord.from_json(found, file=f"{folder.url}/{RECORD_NAME}").save_id != record.save_id:
            raise CheckpointNotFoundError(f"{folder.url} was deleted or replaced meanwhile; nothing of it was deleted.")
        folder.rename(RECORD_NAME, DELETING)
        _delete_named(folder, record)


def finish_deletion(root: LocalStore, name: str) -> None:
    """Delete what is left of a checkpoint whose deletion was killed. Can be repeated."""
    with contextlib.suppress(FileNotFoundError), root.opened(name) as folder:
        found = folder.read(DELETING)
        if found is not None:
            _delete_named(folder, CommitRecord.from_json(found, file=f"{folder.url}/{DELETING}"))


def _delete_named(folder: OpenDirectory, record: CommitRecord) -> None:
    folder.delete(named_paths(record))
    with contextlib.suppress(FileNotFoundError):  # somebody else has finished it
        folder.rename(DELETING, _DELETED)


def carry_over(root: LocalStore, source: str, target: str, paths: Iterable[str]) -> None:
    """Let files of one directory also lie in another one, at the same paths.

    Links and not renames: whichever of the two directories a kill leaves behind, the files are in the other one.

    Raises:
        FileExistsError: There is a file of that name.
    """
    for path in paths:
        root.link(f"{source}/{path}", f"{target}/{path}")
