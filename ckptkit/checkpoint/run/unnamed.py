"""Deletes the files of a checkpoint, but keeps files in its directory that the commit record does not name."""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import re
from collections.abc import Iterable

from ckptkit.errors import CheckpointNotFoundError, CkptkitError
from ckptkit.formats.own.record import RECORD_NAME, CommitRecord, find_record, record_path
from ckptkit.formats.replaceable import may_be_saved
from ckptkit.log import warn_once
from ckptkit.storage.local import LocalStore, OpenDirectory, is_directory
from ckptkit.storage.store import Store

__all__ = [
    "DELETING",
    "carry_over",
    "clear",
    "delete_in_place",
    "delete_marked",
    "deleted_records",
    "finish_deletion",
    "give_up",
    "mark_of",
    "named_paths",
    "others_in",
    "unnamed_files",
]

logger = logging.getLogger(__name__)

DELETING = ".ckptkit-deleting.json"  # the record of a checkpoint while its files are being deleted
_DELETED = ".ckptkit-deleted.json"
_MARK = re.compile(r"\.ckptkit-(?:deleting|deleted(?:-[0-9a-f]{16})?)\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{16}/")


def mark_of(record: CommitRecord) -> str:
    """Return the name of the mark that a deletion on an object store leaves: a copy of the commit record."""
    return f".ckptkit-deleted-{record.save_id}.json"


def named_paths(record: CommitRecord) -> list[str]:
    """Return the paths of a checkpoint's files relative to its directory, without the record itself."""
    below = f"{record.data}/" if record.data else ""
    return [f"{below}{path}" for path in record.files]


def unnamed_files(root: Store, path: str, record: CommitRecord) -> list[str]:
    """Return the files in the directory at `path` that do not belong to the checkpoint, relative to the directory.

    Args:
        record: The checkpoint's. On an object store, other attempts to save it have folders beside its own.
    """
    named = {RECORD_NAME, *named_paths(record)}
    found = [item.path[len(path) + 1 if path else 0 :] for item in root.list(path, recursive=True)]
    return [inner for inner in found if inner not in named and not _MARK.fullmatch(inner)]


def clear(root: Store, path: str) -> list[str]:
    """Delete the files of a dead attempt, recognized by their names, and return the other files, which stay. So do
    files that appear in the meantime."""
    place = root.child(path)
    listed = place.list(recursive=True)
    ours = {item.path for item in listed if item.kind == "file" and may_be_saved(item.path)}
    place.delete(sorted(ours))
    root.end_uploads(root.unfinished_uploads(path))
    if is_directory(place):
        place.remove_empty_directories()
    left = [item.path for item in listed if item.path not in ours]
    if left:
        shown = ", ".join(left[:5]) + (f", ... ({len(left)} in all)" if len(left) > 5 else "")
        warn_once(logger, f"{root.url}/{path}", "is left by a dead save; other files in it stay: %s", shown)
    return left


def give_up(root: LocalStore, path: str, name: str) -> list[str]:
    """Delete a staging or trash directory, and return the files that stay in it.

    Args:
        path: A directory that is not listed as a checkpoint.
        name: The checkpoint's name. Foreign files are moved back into its directory.
    """
    marks = [mark for mark in (DELETING, _DELETED, RECORD_NAME) if root.info(f"{path}/{mark}") is not None]
    if not marks:
        return clear(root, path)
    source, target = root.path_of(path), root.path_of(name)
    others = others_in(root, path)  # of any names: other programs wrote them
    lost = [inner for inner in others if not _is_there(f"{source}/{inner}", f"{target}/{inner}")]
    for inner in lost:  # another file of that name may be there by now
        aside = f".replaced-{path[-16:]}" if os.path.lexists(f"{target}/{inner}") else ""
        with contextlib.suppress(FileExistsError):  # this was killed before
            root.link(f"{path}/{inner}", f"{name}/{inner}{aside}")
    if lost and not os.path.lexists(f"{target}/{RECORD_NAME}"):
        with contextlib.suppress(FileExistsError):  # the mark explains why these files have no checkpoint
            root.link(f"{path}/{marks[-1]}", f"{name}/{_DELETED}")
    # Invariant: while files are left, the record tells which belong to the checkpoint, even after a kill.
    root.delete_tree(path, last=marks[-1])
    return []


def _is_there(path: str, other: str) -> bool:
    """Return whether what lies at `path` also lies at `other`: linked, or copied where the file system has no links."""
    if not os.path.isfile(path) or not os.path.lexists(other):
        return os.path.lexists(other)
    return filecmp.cmp(path, other, shallow=False)


def others_in(root: LocalStore, path: str) -> list[str]:
    """Return the relative paths of foreign files in the directory of a checkpoint or a deleted checkpoint."""
    try:
        record = find_record(root, record_path(path))
    except (CkptkitError, OSError):  # damaged: recognize a checkpoint's files by their names
        found = [item.path[len(path) + 1 :] for item in root.list(path, recursive=True)]
        return [inner for inner in found if not (may_be_saved(inner) or _MARK.fullmatch(inner))]
    records = deleted_records(root, path) if record is None else [record]
    return sorted({inner for record in records for inner in unnamed_files(root, path, record)})


def deleted_records(root: Store, name: str) -> list[CommitRecord]:
    """Return the records of deleted checkpoints in a directory in which foreign files were left."""
    paths = [f"{name}/{DELETING}", f"{name}/{_DELETED}"]
    if not is_directory(root):  # each attempt has its own folder, and may have been deleted separately
        paths = [item.path for item in root.list(name) if _MARK.fullmatch(item.path[len(name) + 1 :])]
    found = []
    for path in paths:
        with contextlib.suppress(CkptkitError, OSError):
            found.append(find_record(root, path))
    return [record for record in found if record is not None]


def delete_marked(root: Store, view: Store, name: str, record: CommitRecord) -> list[str]:
    """Delete the files of a checkpoint on an object store after its record was deleted or replaced; return the foreign
    files.

    The mark (`mark_of`) was written beforehand: after a kill, it lists what is left to delete. It stays as long as
    foreign files do.
    """
    found = (f"{name}/{path}" for path in named_paths(record))
    root.delete(path for path in found if view.info(path) is not None)
    unnamed = unnamed_files(view, name, record)
    if all(_ATTEMPT.match(path) and not path.startswith(f"{record.data}/") for path in unnamed):
        root.delete([f"{name}/{mark_of(record)}"])
    return unnamed


def delete_in_place(root: LocalStore, name: str, record: CommitRecord) -> None:
    """Delete a checkpoint's files from its directory, and leave foreign files untouched.

    First the record is renamed, which is durable and needs no space. From then on the directory is not a checkpoint,
    and after a kill `finish_deletion` knows what is still to be deleted. The directory is accessed by its descriptor,
    so a new checkpoint that replaces it in the meantime keeps its files.

    Raises:
        CheckpointNotFoundError: The checkpoint was deleted or replaced in the meantime.
    """
    with root.opened(name) as folder:
        found = folder.read(RECORD_NAME)
        if found is None or CommitRecord.from_json(found, file=f"{folder.url}/{RECORD_NAME}").save_id != record.save_id:
            raise CheckpointNotFoundError(
                f"{folder.url} was deleted or replaced in the meantime; this deletion removed nothing."
            )
        folder.rename(RECORD_NAME, DELETING)
        _delete_named(folder, record)


def finish_deletion(root: LocalStore, name: str) -> None:
    """Finish a deletion that was killed. Can be repeated."""
    with contextlib.suppress(FileNotFoundError), root.opened(name) as folder:
        found = folder.read(DELETING)
        if found is not None:
            _delete_named(folder, CommitRecord.from_json(found, file=f"{folder.url}/{DELETING}"))


def _delete_named(folder: OpenDirectory, record: CommitRecord) -> None:
    folder.delete(named_paths(record))
    with contextlib.suppress(FileNotFoundError):  # another process has finished it
        folder.rename(DELETING, _DELETED)


def carry_over(root: LocalStore, source: str, target: str, paths: Iterable[str]) -> None:
    """Link files of one directory into another one, at the same paths.

    Not renames: whichever of the two directories a kill leaves, the files are in it.

    Raises:
        FileExistsError: There is a file of that name.
    """
    for path in paths:
        root.link(f"{source}/{path}", f"{target}/{path}")
