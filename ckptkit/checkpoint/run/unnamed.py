"""Deletes a checkpoint's files, but keeps the foreign files (those that no commit record names) in its directory."""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import re

from ckptkit.errors import CheckpointNotFoundError, CkptkitError
from ckptkit.formats.own.record import RECORD_NAME, CommitRecord, find_record, record_path
from ckptkit.formats.replaceable import may_be_saved
from ckptkit.log import warn_once
from ckptkit.storage.local import LocalStore, OpenDirectory, is_directory
from ckptkit.storage.store import Store

logger = logging.getLogger(__name__)

DELETING = ".ckptkit-deleting.json"  # name of the commit record while the checkpoint's files are being deleted
_DELETED = ".ckptkit-deleted.json"
_MARK = re.compile(r"\.ckptkit-(?:deleting|deleted(?:-[0-9a-f]{16})?)\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{16}/")


def mark_of(record: CommitRecord) -> str:
    """Return the name of the file that marks a deletion on an object store.

    The file is a copy of the checkpoint's commit record. A deletion writes this file before it deletes anything.
    """
    return f".ckptkit-deleted-{record.save_id}.json"


def named_paths(record: CommitRecord) -> list[str]:
    """Return the paths of the files that a commit record lists, relative to the checkpoint's directory."""
    below = f"{record.data}/" if record.data else ""
    return [f"{below}{path}" for path in record.files]


def unnamed_files(root: Store, path: str, record: CommitRecord) -> list[str]:
    """Return the relative paths of the files in the directory `path` that do not belong to the checkpoint.

    On an object store these include files from other attempts to save the same checkpoint.

    Args:
        record: The checkpoint's commit record.
    """
    named = {RECORD_NAME, *named_paths(record)}
    found = [item.path[len(path) + 1 if path else 0 :] for item in root.list(path, recursive=True)]
    return [inner for inner in found if inner not in named and not _MARK.fullmatch(inner)]


def clear(root: Store, path: str) -> list[str]:
    """Delete the files that a dead save left, recognized by their names. Returns all other files, which are kept.

    Files that appear during the deletion are kept, too.
    """
    place = root.child(path)
    listed = place.list(recursive=True)
    ours = {item.path for item in listed if item.kind == "file" and may_be_saved(item.path)}
    place.delete(sorted(ours))
    if is_directory(place):
        place.remove_empty_directories()
    else:
        root.end_uploads(root.unfinished_uploads(path))
    left = [item.path for item in listed if item.path not in ours]
    if left:
        shown = ", ".join(left[:5]) + (f", ... ({len(left)} in all)" if len(left) > 5 else "")
        warn_once(
            logger, f"{root.url}/{path}", "was left by a dead save; it keeps these files, which others wrote: %s", shown
        )
    return left


def give_up(root: LocalStore, path: str, name: str) -> list[str]:
    """Delete the staging or trash directory at `path`, but no foreign files.

    If this directory contains a commit record, even a renamed one, the foreign files are moved to the directory `name`.
    Otherwise, the foreign files stay where they are, and are returned.

    Args:
        path: A directory that is not listed as a checkpoint.
        name: The checkpoint's name.
    """
    marks = [mark for mark in (DELETING, _DELETED, RECORD_NAME) if root.info(f"{path}/{mark}") is not None]
    if not marks:
        return clear(root, path)
    source, target = root.path_of(path), root.path_of(name)
    others = others_in(root, path)  # other programs wrote them, so they can have any name
    lost = [inner for inner in others if not _is_there(f"{source}/{inner}", f"{target}/{inner}")]
    for inner in lost:  # by now, a different file may have this name
        aside = f".replaced-{path[-16:]}" if os.path.lexists(f"{target}/{inner}") else ""
        with contextlib.suppress(FileExistsError):  # an earlier call linked it, and was then killed
            root.link(f"{path}/{inner}", f"{name}/{inner}{aside}")
    if lost and not os.path.lexists(f"{target}/{RECORD_NAME}"):
        with contextlib.suppress(FileExistsError):  # the mark explains why there are files but no checkpoint
            root.link(f"{path}/{marks[-1]}", f"{name}/{_DELETED}")
    # Invariant: as long as files are left, the record says which belong to the checkpoint, even after a kill.
    root.delete_tree(path, last=marks[-1])
    return []


def _is_there(path: str, other: str) -> bool:
    """Return whether `other` is a link to `path` or a copy of it.

    If `path` is not a file, returns whether `other` exists.
    """
    if not os.path.isfile(path) or not os.path.lexists(other):
        return os.path.lexists(other)
    return filecmp.cmp(path, other, shallow=False)


def others_in(root: LocalStore, path: str) -> list[str]:
    """Return the relative paths of other programs' files in a checkpoint's directory, even after its deletion."""
    try:
        record = find_record(root, record_path(path))
    except (CkptkitError, OSError):  # the record is unreadable: recognize the checkpoint's files by their names
        found = [item.path[len(path) + 1 :] for item in root.list(path, recursive=True)]
        return [inner for inner in found if not (may_be_saved(inner) or _MARK.fullmatch(inner))]
    records = deleted_records(root, path) if record is None else [record]
    return sorted({inner for record in records for inner in unnamed_files(root, path, record)})


def deleted_records(root: Store, name: str) -> list[CommitRecord]:
    """Return the commit records of deleted checkpoints that have left files in a directory."""
    paths = [f"{name}/{DELETING}", f"{name}/{_DELETED}"]
    if not is_directory(root):  # each attempt has its own folder and its own mark
        paths = [item.path for item in root.list(name) if _MARK.fullmatch(item.path[len(name) + 1 :])]
    found = []
    for path in paths:
        with contextlib.suppress(CkptkitError, OSError):
            found.append(find_record(root, path))
    return [record for record in found if record is not None]


def delete_marked(root: Store, view: Store, name: str, record: CommitRecord) -> list[str]:
    """Delete a checkpoint's files from an object store, and return the files that remain.

    Before this call, the file that marks the deletion (`mark_of`) must have been written, and then the checkpoint's
    commit record must have been deleted or replaced. If the process is killed during this call, the mark still lists
    the files to delete. The mark is deleted last, but is kept if foreign files remain. Files of other attempts to save
    this checkpoint do not count as foreign.
    """
    found = (f"{name}/{path}" for path in named_paths(record))
    root.delete(path for path in found if view.info(path) is not None)
    unnamed = unnamed_files(view, name, record)
    if all(_ATTEMPT.match(path) and not path.startswith(f"{record.data}/") for path in unnamed):
        root.delete([f"{name}/{mark_of(record)}"])
    return unnamed


def delete_in_place(root: LocalStore, name: str, record: CommitRecord) -> None:
    """Delete a checkpoint's files from its directory, and leave foreign files untouched.

    The record is renamed first, which is durable and needs no space. From then on the directory is not a checkpoint. If
    the process is killed, the renamed record tells `finish_deletion` which files to delete. Files are deleted
    through the directory's file descriptor. So if a new checkpoint replaces the directory, the new checkpoint's files
    stay.

    Raises:
        CheckpointNotFoundError: Another process deleted or replaced the checkpoint.
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
    """Finish a deletion that was killed. May be called again."""
    with contextlib.suppress(FileNotFoundError), root.opened(name) as folder:
        found = folder.read(DELETING)
        if found is not None:
            _delete_named(folder, CommitRecord.from_json(found, file=f"{folder.url}/{DELETING}"))


def _delete_named(folder: OpenDirectory, record: CommitRecord) -> None:
    folder.delete(named_paths(record))
    with contextlib.suppress(FileNotFoundError):  # another process has already finished the deletion
        folder.rename(DELETING, _DELETED)
