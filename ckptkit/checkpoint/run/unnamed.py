"""Deletes a checkpoint's files, but keeps the foreign files (those that no commit record names) in its directory."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection

from ckptkit.errors import CkptkitError
from ckptkit.formats.own.record import RECORD_NAME, CommitRecord, find_record, record_path
from ckptkit.formats.replaceable import belongs, may_be_saved
from ckptkit.log import warn_once
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.store import Store
from ckptkit.units import first_few

logger = logging.getLogger(__name__)

_DELETED = ".ckptkit-deleted.json"  # name of a deleted checkpoint's record, if foreign files are left
_MARK = re.compile(r"\.ckptkit-deleted(?:-[0-9a-f]{16})?\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{16}/")


def mark_of(record: CommitRecord) -> str:
    """Return the name of a deletion's mark: a copy of the commit record.

    It is written to an object store before the commit record is deleted.
    """
    return f".ckptkit-deleted-{record.save_id}.json"


def named_paths(record: CommitRecord) -> list[str]:
    """Return the paths of the files that a commit record lists, relative to the checkpoint's directory."""
    below = f"{record.data}/" if record.data else ""
    return [f"{below}{path}" for path in record.files]


def unnamed_files(root: Store, path: str, record: CommitRecord) -> list[str]:
    """Return the relative paths of the files in the directory `path` that do not belong to the checkpoint `record`."""
    named = {RECORD_NAME, *named_paths(record)}
    found = [item.path[len(path) + 1 if path else 0 :] for item in root.list(path, recursive=True)]
    return [inner for inner in found if inner not in named and not _MARK.fullmatch(inner)]


def split_files(place: Store) -> tuple[list[str], list[str]]:
    """Return the files that a dead save or conversion left in its directory `place`, and all other files."""
    listed = place.list(recursive=True)
    ours = [i.path for i in listed if i.kind == "file" and (may_be_saved(i.path) or belongs(place, i))]
    return ours, sorted({item.path for item in listed}.difference(ours))


def clear(root: Store, path: str) -> list[str]:
    """Delete the files that a dead save left. Return all other files, which are kept."""
    place = root.child(path)
    ours, left = split_files(place)
    place.delete(ours)
    if is_directory(place):
        place.remove_empty_directories()
    else:
        root.end_uploads(root.unfinished_uploads(path))
    if left:
        text = "was left by a dead save. These files in it are kept, because other programs wrote them: %s"
        warn_once(logger, f"{root.url}/{path}", text, first_few(left))
    return left


def record_in(root: Store, path: str) -> str:
    """Return the name of the file in `path` that records a committed or a deleted checkpoint, or ""."""
    return next((mark for mark in (RECORD_NAME, _DELETED) if root.info(f"{path}/{mark}") is not None), "")


def give_up(root: LocalStore, path: str, name: str) -> list[str]:
    """Delete the staging or trash directory at `path`, but no foreign files.

    If this directory contains a commit record, the foreign files are moved back to the directory `name`. Otherwise,
    they stay where they are, and are returned. If the process is killed, the next call does the rest.

    Args:
        path: A directory that is not listed as a checkpoint.
        name: The checkpoint's name.
    """
    mark = record_in(root, path)
    if not mark:
        return clear(root, path)
    others = others_in(root, path)  # other programs wrote them, so they can have any name
    if others:
        _delete_own(root, path, {*others, RECORD_NAME, _DELETED})
        if mark == RECORD_NAME:
            try:
                root.rename(f"{path}/{mark}", f"{path}/{_DELETED}")  # explains why there are files but no checkpoint
            except FileExistsError:
                root.delete([f"{path}/{mark}"])
        try:
            root.rename(path, name)
            root.sync_directory()
            return []
        except FileExistsError:  # a new checkpoint has the name
            mark = _DELETED
        for inner in others:
            try:
                root.move(f"{path}/{inner}", f"{name}/{inner}")
            except FileExistsError:
                root.move(f"{path}/{inner}", f"{name}/{inner}.replaced-{path[-16:]}")
    found = root.info(name)
    if found is not None and found.kind == "directory" and root.info(f"{name}/{RECORD_NAME}") is None:
        with contextlib.suppress(FileExistsError):
            root.rename(f"{path}/{mark}", f"{name}/{_DELETED}")
    # Invariant: as long as files are left, the record says which belong to the checkpoint, even after a kill.
    root.delete_tree(path, last=mark)
    return []


def _delete_own(root: LocalStore, path: str, kept: Collection[str]) -> None:
    """Delete all files in the directory `path` except `kept`, and the directories that become empty."""
    start = len(path) + 1
    own = [item.path for item in root.list(path, recursive=True) if item.path[start:] not in kept]
    root.delete(own)
    folders = {file[:at] for file in own for at in range(start, len(file)) if file[at] == "/"}
    for folder in sorted(folders, reverse=True):  # children before their parent
        with contextlib.suppress(OSError):
            os.rmdir(root.path_of(folder))


def others_in(root: LocalStore, path: str) -> list[str]:
    """Return the relative paths of other programs' files in the directory of a checkpoint, even of a deleted one."""
    try:
        record = find_record(root, record_path(path))
    except (CkptkitError, OSError):  # the record is unreadable: recognize the checkpoint's files by their names
        found = [item.path[len(path) + 1 :] for item in root.list(path, recursive=True)]
        return [inner for inner in found if not (may_be_saved(inner) or _MARK.fullmatch(inner))]
    records = deleted_records(root, path) if record is None else [record]
    return sorted({inner for record in records for inner in unnamed_files(root, path, record)})


def deleted_records(root: Store, name: str) -> list[CommitRecord]:
    """Return the commit records of deleted checkpoints that have left files in a directory."""
    paths = [f"{name}/{_DELETED}"]
    if not is_directory(root):  # each attempt has its own folder and its own mark
        paths = [item.path for item in root.list(name) if _MARK.fullmatch(item.path[len(name) + 1 :])]
    found = []
    for path in paths:
        with contextlib.suppress(CkptkitError, OSError):
            found.append(find_record(root, path))
    return [record for record in found if record is not None]


def delete_marked(root: Store, view: Store, name: str, record: CommitRecord) -> list[str]:
    """Delete a checkpoint's files from an object store, and return the files that remain.

    The mark of the deletion (`mark_of`) must have been written, and then the commit record deleted or replaced. If the
    process is killed, the mark still lists the files to delete. It is kept if foreign files remain. Files of other
    attempts to save this checkpoint do not count as foreign.
    """
    found = (f"{name}/{path}" for path in named_paths(record))
    root.delete(path for path in found if view.info(path) is not None)
    unnamed = unnamed_files(view, name, record)
    if all(_ATTEMPT.match(path) and not path.startswith(f"{record.data}/") for path in unnamed):
        root.delete([f"{name}/{mark_of(record)}"])
    return unnamed
