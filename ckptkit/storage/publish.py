"""Publishes a directory atomically: staging and trash siblings, one rename, cleanup of leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ckptkit.errors import CheckpointExistsError, UsageError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.open import open_store
from ckptkit.storage.owner import own_statement
from ckptkit.storage.staging import (
    Leftover,
    Replaceable,
    _short,
    is_abandoned,
    is_interruption,
    leftover_of,
    new_nonce,
    owner_path,
    read_owner,
    staging_name,
    statements,
    trash_name,
    write_owner,
)
from ckptkit.storage.store import Store

__all__ = [
    "check_target",
    "check_writable",
    "clean_siblings",
    "close_staging",
    "drop",
    "empty_trash",
    "exchange",
    "finish",
    "open_staging",
    "publish",
    "put_in_place",
    "remove_leftover",
    "stage",
    "sync_directories",
    "sync_files",
    "sync_tree",
]

logger = logging.getLogger(__name__)
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


# --- a staging directory, from its birth to its end


def open_staging(parent: LocalStore, name: str, nonce: str, *, leased: bool = False) -> LocalStore:
    """Make the staging directory of `name` below `parent`, and beside it the statement who writes."""
    path = staging_name(name, nonce)
    write_owner(parent, owner_path(path), nonce, leased=leased)
    parent.make_directory(path)
    return parent.child(path)


def close_staging(parent: LocalStore, name: str, nonce: str) -> None:
    """Delete what is left of a staging directory, published or not, and the statement of its writer."""
    path = staging_name(name, nonce)
    trash = drop(parent, path)
    if trash is not None:
        empty_trash(parent, trash)
    parent.delete(reversed(statements(parent, path)))


def sync_tree(store: LocalStore) -> None:
    """Make every file and directory below `store` durable."""
    sync_files(store, [item.path for item in store.list(recursive=True) if item.kind == "file"])
    sync_directories(store)


def sync_directories(store: LocalStore) -> None:
    """Make every name below `store` durable."""
    paths = [item.path for item in store.list(recursive=True)]
    folders = {path[:at] for path in paths for at, c in enumerate(path) if c == "/"}
    for folder in (*sorted(folders, reverse=True), ""):  # a directory after what is in it
        store.sync_directory(folder)


def sync_files(store: LocalStore, paths: Iterable[str]) -> None:
    """Make the content of files durable."""
    with ThreadPoolExecutor(4, thread_name_prefix="ckptkit-sync") as pool:
        list(pool.map(lambda path: _sync_file(store, path), paths))


def _sync_file(store: LocalStore, path: str) -> None:
    fd = store.open_file(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(parent: LocalStore, staging: str, name: str) -> None:
    """Rename a durable staging directory, or a file, to `name`, and make that durable. Raises FileExistsError."""
    staged = os.lstat(parent.path_of(staging))
    try:
        parent.rename(staging, name)
    except (FileExistsError, FileNotFoundError):
        # NFS repeats a request whose answer was lost: then it was us who did it.
        if not (os.path.lexists(parent.path_of(name)) and os.path.samestat(staged, os.lstat(parent.path_of(name)))):
            raise
    try:
        parent.sync_directory()
    except OSError:  # what can be lost must not be there as if it were done
        with contextlib.suppress(OSError):
            parent.rename(name, staging)
        raise


def exchange(parent: LocalStore, first: str, second: str) -> bool:
    """Swap two names below `parent` in one atomic, durable step; False where the file system can't (NFS)."""
    done = _exchange(parent.path_of(first), parent.path_of(second))
    if done:
        try:
            parent.sync_directory()
        except OSError:
            _exchange(parent.path_of(first), parent.path_of(second))
            raise
    return done


def _exchange(first: str, second: str) -> bool:
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), first, None, second)


@functools.cache
def _renameat2() -> Any:
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None, use_errno=True).renameat2
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        return function
    return None


def drop(parent: LocalStore, name: str) -> str | None:
    """Move `name` to the trash in one durable step and return its new name; None where it is gone already.

    Whatever is killed now, `name` is no longer there, and never half there.
    """
    kept = leftover_of(name)
    target = trash_name(kept.name if kept else name, new_nonce())
    try:
        parent.rename(name, target)
    except FileNotFoundError:
        return None
    parent.sync_directory()
    return target


def empty_trash(parent: LocalStore, trash: str, *, first: str | None = None) -> None:
    """Delete a trash directory, and in it `first` before all else. Can be repeated after a kill."""
    if first is not None:
        with contextlib.suppress(FileNotFoundError):
            parent.delete([f"{trash}/{first}"])
    parent.delete_tree(trash)


def clean_siblings(parent: LocalStore, name: str, *, but: Leftover | None = None) -> None:
    """Delete what dead writers of `name` left below `parent`, but for one of them; a living one keeps its own."""
    for item in parent.list():
        kept = leftover_of(item.path)
        if kept is None or kept.name != _short(name) or (but is not None and kept.nonce == but.nonce):
            continue
        if is_abandoned(parent, kept):
            remove_leftover(parent, kept)


def remove_leftover(parent: LocalStore, leftover: Leftover) -> None:
    """Delete an abandoned staging or trash directory, or the statement of an owner."""
    if finish(parent, leftover):
        return
    logger.info("removing %s/%s, which a dead process left", parent.url, leftover.path)
    trash = drop(parent, leftover.path) if leftover.kind == "tmp" else leftover.path
    if trash is not None:
        parent.delete_tree(trash)
    if leftover.kind == "tmp":
        parent.delete([owner_path(leftover.path)])


def finish(parent: LocalStore, leftover: Leftover) -> bool:
    """Put a staging directory in place that was whole when its writer died, and whose target was away by then."""
    stated = read_owner(parent, owner_path(leftover.path)) if leftover.kind == "tmp" else None
    name = stated.whole if stated is not None else ""
    if not name or "/" in name or _short(name) != leftover.name or parent.info(name) is not None:
        return False
    logger.warning("%s/%s was being replaced by a process that died; it is finished now", parent.url, name)
    publish(parent, leftover.path, name)
    parent.delete([owner_path(leftover.path)])
    return True


# --- one directory as a whole: what convert and reshard write


@contextlib.contextmanager
def stage(
    url: str,
    *,
    file: str = "",
    replaceable: Replaceable | None = None,
    last: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = False,
    gone: Collection[str] = (),
    names: Mapping[str, int] | None = None,
) -> Iterator[Store]:
    """Yield a store to write a whole directory into; when the block ends well it is at `url`, durable.

    After any exception nothing of it remains, and what was at `url` before is untouched. An object store has no rename:
    what is replaced there stays until the new one is whole, and copies take its place one by one (`staging_remote`).

    Args:
        file: The result is the one file of this name, which then lies below `url` beside others.
        replaceable: What is in its place is replaced where this does not raise, in one step where the file system can,
            and deleted after. None: nothing is replaced.
        last: Names that must appear after all others where files appear one by one (object stores):
            a reader finds the directory by them.
        resume: What a dead writer left with steps in its journal is taken over: the store may hold files. What is
            interrupted, by Ctrl-C or because a rank died, is left with its steps for the next writer. On an object
            store that is by the object (`Ledger`); a single file begins anew there.
        names: All that may be written, with its size where that is known, else -1. For object stores, where a dead
            writer's objects are told from those of others by it.
        gone: Statements of writers on other machines that are known to be dead.

    Raises:
        CheckpointExistsError: The place is taken; nothing was written.
    """
    store = open_store(url, storage_options=storage_options)
    if isinstance(store, LocalStore):
        with _stage_local(store, file, replaceable=replaceable, resume=resume, gone=gone) as staging:
            yield staging
        return
    from ckptkit.storage.publish_remote import stage_object, stage_remote

    if file:
        with stage_object(store, file, replaceable=replaceable) as remote:
            yield remote  # its writer makes the file appear whole or not at all
        return
    with stage_remote(store, replaceable=replaceable, last=frozenset(last), names=names, resume=resume) as remote:
        yield remote


@contextlib.contextmanager
def _stage_local(
    target: LocalStore, file: str, *, replaceable: Replaceable | None, resume: bool, gone: Collection[str]
) -> Iterator[LocalStore]:
    head, name = (target.url, file) if file else os.path.split(target.url)
    if not name:
        raise UsageError(f"{target.url} can't be replaced by a checkpoint; name a directory in it.")
    from ckptkit.storage.journal import Journal, adopt, give_up, resumable

    parent = LocalStore(head)
    left = resumable(parent, name, gone=gone) if resume else None
    clean_siblings(parent, name, but=left)  # first: it may finish what a dead writer had all but done
    check_target(parent, name, replaceable=replaceable)
    nonce = new_nonce()
    taken = adopt(parent, left, name, nonce) if left is not None else None
    staging = taken or open_staging(parent, name, nonce)
    try:
        yield staging
        sync_tree(staging)
        parent.sync_directory()
        # Invariant: every byte and every name of it survives a power cut, before it gets the name that is looked for.
        if resume:
            Journal.beside(staging).end()  # from here on it may hold what was replaced
        if replaceable is not None:  # again: hours may have passed
            check_target(parent, name, replaceable=replaceable)
        put_in_place(parent, nonce, name, file=file, overwrite=replaceable is not None)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if not (resume and is_interruption(error) and give_up(parent, name, nonce)):
                close_staging(parent, name, nonce)
        raise
    try:
        close_staging(parent, name, nonce)
    except OSError as error:  # the new content is in place and durable: nothing is lost but space
        logger.warning("what was at %s before could not be deleted: %s", parent.path_of(name), error)


def check_target(parent: LocalStore, name: str, *, replaceable: Replaceable | None) -> None:
    """Raise CheckpointExistsError where `name` may not be written."""
    found, place = parent.info(name), parent.path_of(name)
    if found is None:
        return
    if found.kind == "symlink":
        raise CheckpointExistsError(
            f"{place} is a symbolic link to {os.readlink(place)}; it is not replaced. Name its target, or remove it."
        )
    if found.kind == "directory" and not parent.list(name):
        return
    if replaceable is None:
        raise CheckpointExistsError(
            f"{place} exists already; nothing was written. Choose another place, or replace it with overwrite=True "
            "(--overwrite)."
        )
    if Path(place) in (Path.cwd(), *Path.cwd().parents):
        raise CheckpointExistsError(
            f"{place} is not overwritten: the current directory is in it. Choose another place."
        )
    replaceable(parent, name, ())


def check_writable(store: LocalStore) -> None:
    """Raise where a directory, or the one above it that is to hold it, can't be written to. Nothing is written."""
    place = store.url
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise NotADirectoryError(errno.ENOTDIR, f"{place} is no directory; nothing can be written below it.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{place} can't be written to: permission denied, or mounted read-only.")


def _replace_in_two_steps(parent: LocalStore, nonce: str, name: str) -> None:
    """Replace `name` where there is no atomic swap (NFS). For a moment there is neither, and at no moment nothing.

    Whoever cleans up after a kill in that moment learns from the statement of its writer that the staging directory
    is whole, and puts it in place (`finish`). An error puts the old one back.
    """
    staging = staging_name(name, nonce)
    body = json.dumps({"nonce": nonce, "whole": name, **own_statement(parent)})
    Path(parent.path_of(owner_path(staging))).write_text(body)  # killed in it: the old one is still in place
    old = drop(parent, name)
    try:
        publish(parent, staging, name)
    except BaseException:
        if old is not None:
            with contextlib.suppress(OSError):
                parent.rename(old, name)
        raise
    if old is not None:
        parent.rename(old, staging)


def put_in_place(parent: LocalStore, nonce: str, name: str, *, file: str = "", overwrite: bool) -> None:
    """Publish a durable staging directory, or the `file` in it; what it replaces has its name afterwards."""
    staging, found = staging_name(name, nonce), parent.info(name)
    if found is not None and found.kind == "directory":
        with contextlib.suppress(OSError):  # an empty directory gives way; any other stays
            os.rmdir(parent.path_of(name))
            found = None
    source = f"{staging}/{file}" if file else staging
    if found is not None and overwrite:
        if exchange(parent, source, name):
            return
        if not file:
            _replace_in_two_steps(parent, nonce, name)
            return
        os.replace(parent.path_of(source), parent.path_of(name))
        parent.sync_directory()
        return
    try:
        publish(parent, source, name)
    except FileExistsError as error:
        raise CheckpointExistsError(
            f"{parent.path_of(name)} appeared while its replacement was written; it was left as it is."
        ) from error
