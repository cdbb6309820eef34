"""Publishes directories atomically: writes next to the target, syncs, renames. Deletes the files of dead writers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptkit.errors import CheckpointExistsError, UsageError
from ckptkit.storage.journal import Journal, adopt, give_up, resumable
from ckptkit.storage.local import LocalStore, renameat2
from ckptkit.storage.open import open_store
from ckptkit.storage.staging import (
    Leftover,
    Replaceable,
    exists_already,
    is_abandoned,
    is_interruption,
    leftovers,
    new_nonce,
    owner_files,
    owner_path,
    read_owner,
    staging_name,
    trash_name,
    write_owner,
)
from ckptkit.storage.store import Store

logger = logging.getLogger(__name__)
_RENAME_EXCHANGE = 2  # linux/fs.h


# --- the life of a staging directory


def open_staging(parent: LocalStore, name: str, nonce: str, *, leased: bool = False) -> LocalStore:
    """Create the staging directory for `name` under `parent`, and its owner file."""
    path = staging_name(name, nonce)
    try:
        write_owner(parent, owner_path(path), nonce, leased=leased)
        parent.make_directory(path)
    except BaseException:
        with contextlib.suppress(OSError):
            parent.delete([owner_path(path)])
        raise
    return parent.child(path)


def close_staging(
    parent: LocalStore, name: str, nonce: str, *, old: str = "", replaceable: Replaceable | None = None
) -> None:
    """Delete a staging directory and its owner files. After publication, the directory may already be gone.

    Args:
        old: The path of the target's old content. `replaceable` checks it again before it is deleted, because other
            programs may have added files. If this raises CheckpointExistsError, the old content is kept as
            NAME.replaced-NONCE.
    """
    path, kept = staging_name(name, nonce), f"{name}.replaced-{nonce}"
    if old and replaceable is not None:
        try:
            replaceable(parent, old, ())
            if old == kept:
                parent.rename(kept, path)
        except CheckpointExistsError as error:
            if old != kept:
                parent.rename(old, kept)
                parent.sync_directory()
            why, place = error.reason or str(error), parent.path_of(name)
            logger.warning("%s was replaced; its old content is kept as %s: %s", place, parent.path_of(kept), why)
    _delete_staging(parent, path, name)


def _delete_staging(parent: LocalStore, path: str, name: str) -> None:
    """Delete a staging directory and its owner files. If the process is killed, the next command deletes the rest."""
    renamed = staging_name(name, new_nonce())  # Invariant: one process deletes it, and nobody continues the work in it.
    with contextlib.suppress(FileNotFoundError):
        parent.rename(path, renamed)
        parent.delete_tree(renamed)
    parent.delete(reversed(owner_files(parent, path)))


def sync_tree(store: LocalStore) -> None:
    """Make every file and directory under `store` durable."""
    sync_files(store, [item.path for item in store.list(recursive=True) if item.kind == "file"])
    sync_directories(store)


def sync_directories(store: LocalStore) -> None:
    """Make the entries of every directory under `store` durable."""
    paths = [item.path for item in store.list(recursive=True)]
    folders = {path[:at] for path in paths for at, c in enumerate(path) if c == "/"}
    for folder in (*sorted(folders, reverse=True), ""):  # children before their parent
        store.sync_directory(folder)


def sync_files(store: LocalStore, paths: Iterable[str]) -> None:
    """Make the content of files durable."""
    with ThreadPoolExecutor(4, thread_name_prefix="ckptkit-sync") as pool:
        list(pool.map(store.sync_file, paths))


def publish(parent: LocalStore, staging: str, name: str) -> None:
    """Rename a synced staging directory or file to `name`, and sync the parent. Raises FileExistsError."""
    staged = os.lstat(parent.path_of(staging))
    try:
        parent.rename(staging, name)
    except (FileExistsError, FileNotFoundError):
        # NFS repeats a request whose response was lost. If `name` is now what was staged, the first request succeeded.
        if not (os.path.lexists(parent.path_of(name)) and os.path.samestat(staged, os.lstat(parent.path_of(name)))):
            raise
    try:
        parent.sync_directory()
    except OSError:  # undo the rename: after a power cut, `name` could be missing, so it must not look published
        with contextlib.suppress(OSError):
            parent.rename(name, staging)
        raise


def exchange(parent: LocalStore, first: str, second: str) -> bool:
    """Swap two names under `parent` atomically and durably. Return False if the file system can't swap (NFS)."""
    done = _exchange(parent.path_of(first), parent.path_of(second))
    if done:
        try:
            parent.sync_directory()
        except OSError:
            _exchange(parent.path_of(first), parent.path_of(second))
            raise
    return done


def _exchange(first: str, second: str) -> bool:
    return renameat2(first, second, _RENAME_EXCHANGE)


def drop(parent: LocalStore, name: str) -> str | None:
    """Rename `name` durably to a trash name, which the caller deletes. Return None if `name` does not exist.

    If the process is killed, `name` is complete or absent, but never partly deleted.
    """
    target = trash_name(name, new_nonce())
    try:
        parent.rename(name, target)
    except FileNotFoundError:
        return None
    parent.sync_directory()
    return target


def clean_siblings(parent: LocalStore, name: str, *, keep: Leftover | None = None) -> None:
    """Delete the staging directories and owner files of dead commands that wrote `name`, except those of `keep`.

    Leftovers of a run's saves and deletions stay: they may contain foreign files, which only the run recognizes.
    """
    for leftover in leftovers(parent, name):
        path = staging_name(leftover.name, leftover.nonce)
        writer = read_owner(parent, owner_path(path))
        is_of_a_run = leftover.kind == "trash" or (writer is not None and writer.leased)
        if (keep is not None and leftover.nonce == keep.nonce) or is_of_a_run or not is_abandoned(parent, leftover):
            continue
        try:
            logger.info("removing %s/%s, left by a dead process", parent.url, path)
            _delete_staging(parent, path, leftover.name)
        except PermissionError as error:  # the file belongs to a different user; `name` can still be written
            logger.warning("%s: leftovers of a dead process could not be removed: %s", parent.path_of(name), error)


# --- staging a whole directory or a single file, for convert and reshard


@contextlib.contextmanager
def stage(
    url: str,
    *,
    file: str = "",
    replaceable: Replaceable | None = None,
    overwrite: bool = False,
    last: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = False,
    dead: Collection[str] = (),
    names: Mapping[str, int] | None = None,
) -> Iterator[Store]:
    """Yield a store in which to write a directory. If the block succeeds, the directory is durable at `url`.

    If the block fails, the old content of `url` is unchanged, and the new directory is deleted (except with `resume`).
    Object stores have no rename; `publish_remote` describes how a directory is published there.

    Args:
        file: Publish only this file under `url`. The directory may contain other files.
        replaceable: A function that raises CheckpointExistsError if an existing target may not be replaced. After a
            swap, it is called again for the old content. If it raises then, the old content is not deleted.
        overwrite: Replace an existing target.
        last: Names of the files by which readers recognize the directory. On an object store, these files are written
            last.
        resume: Continue the work of a dead writer. The yielded store may then contain finished files. If this process
            is interrupted (Ctrl-C, a dead rank), its finished files are kept for the next writer. Has no effect if a
            single file is published on an object store.
        dead: Owner files of dead writers on other machines.
        names: All paths that may be written, each with its size in bytes (-1 if unknown). On an object store, these
            names distinguish the objects of a dead writer from other objects.

    Raises:
        CheckpointExistsError: The target exists. Nothing was written.
    """
    store = open_store(url, storage_options=storage_options)
    if isinstance(store, LocalStore):
        with _stage_local(
            store, file, replaceable=replaceable, overwrite=overwrite, resume=resume, dead=dead
        ) as staging:
            yield staging
        return
    from ckptkit.storage.publish_remote import stage_object, stage_remote

    rule = replaceable if overwrite else None
    if file:
        with stage_object(store, file, replaceable=rule) as remote:
            yield remote
        return
    with stage_remote(store, replaceable=rule, last=frozenset(last), names=names, resume=resume) as remote:
        yield remote


@contextlib.contextmanager
def _stage_local(
    target: LocalStore,
    file: str,
    *,
    replaceable: Replaceable | None,
    overwrite: bool,
    resume: bool,
    dead: Collection[str],
) -> Iterator[LocalStore]:
    head, name = (target.url, file) if file else os.path.split(target.url)
    if not name:
        raise UsageError(
            f"{target.url} is the root of a file system, which nothing can replace. Name a directory below it."
        )
    parent = LocalStore(head)
    left = resumable(parent, name, dead=dead) if resume else None
    clean_siblings(parent, name, keep=left)
    rule = replaceable if overwrite else None
    check_target(parent, name, replaceable=rule)
    check_writable(parent)  # without this check, the error would name the owner file
    nonce = new_nonce()
    adopted = adopt(parent, left, name, nonce) if left is not None else None
    staging = adopted or open_staging(parent, name, nonce)
    try:
        yield staging
        sync_tree(staging)
        parent.sync_directory()
        # Invariant: everything is durable before it gets the name that readers look for.
        if resume:
            Journal(staging.url).end()  # after this, the staging directory may contain the replaced content
        if rule is not None:  # check again, because hours may have passed
            check_target(parent, name, replaceable=rule)
        old = _put_in_place(parent, nonce, name, file=file, overwrite=overwrite)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if not (resume and is_interruption(error) and give_up(parent, name, nonce)):
                close_staging(parent, name, nonce)
        raise
    try:
        close_staging(parent, name, nonce, old=old, replaceable=replaceable)
    except OSError as error:  # the new content is published and durable; only space is wasted
        logger.warning("%s was replaced, but its old content could not be deleted: %s", parent.path_of(name), error)


def check_target(parent: LocalStore, name: str, *, replaceable: Replaceable | None) -> None:
    """Raise CheckpointExistsError if `name` may not be written."""
    found, place = parent.info(name), parent.path_of(name)
    if found is None:
        return
    if found.kind == "symlink":
        raise CheckpointExistsError(
            f"{place} is a symbolic link to {os.readlink(place)}, and links are not replaced. Name its target, or "
            "remove the link."
        )
    if found.kind == "directory" and not parent.list(name):
        return
    if replaceable is None:
        raise exists_already(place)
    if Path(place) in (Path.cwd(), *Path.cwd().parents):
        raise CheckpointExistsError(
            f"{place} is not overwritten: it contains the current directory. Choose another path."
        )
    replaceable(parent, name, ())


def check_writable(store: LocalStore) -> None:
    """Raise if a directory, or its nearest existing parent, is not writable. Writes nothing."""
    place = store.url
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise NotADirectoryError(f"{place} is not a directory, so nothing can be written below it")
    if not LocalStore(place).is_writable():
        raise PermissionError(f"{place} is not writable: permission denied, or mounted read-only")


def _put_in_place(parent: LocalStore, nonce: str, name: str, *, file: str = "", overwrite: bool) -> str:
    """Publish a synced staging directory, or only its `file`, as `name`.

    Returns the path of the old content of `name`, or "" if there was none, or if it is gone.
    """
    staging, found = staging_name(name, nonce), parent.info(name)
    if found is not None and found.kind == "directory":
        with contextlib.suppress(OSError):  # removes only an empty directory
            os.rmdir(parent.path_of(name))
            found = None
    source = f"{staging}/{file}" if file else staging
    if found is not None and overwrite:
        if exchange(parent, source, name):
            return source
        if file:
            os.replace(parent.path_of(source), parent.path_of(name))
            parent.sync_directory()
            return ""
        # Without an atomic swap (NFS), `name` does not exist between two renames. If the process is killed then, the
        # old content stays under the other name.
        aside = f"{name}.replaced-{nonce}"
        parent.rename(name, aside)
        try:
            parent.sync_directory()
            publish(parent, staging, name)
        except BaseException:
            with contextlib.suppress(OSError):
                parent.rename(aside, name)
            raise
        return aside
    try:
        publish(parent, source, name)
        return ""
    except FileExistsError as error:
        raise CheckpointExistsError(
            f"{parent.path_of(name)} was created by another process during the write; it was not changed."
        ) from error
