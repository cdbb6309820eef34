"""Whole directories, published at once or not at all: staging and trash siblings, one rename, leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CheckpointExistsError, RankFailedError, UsageError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.owner import Owner, this_process
from ckptkit.storage.store import Store, open_store

__all__ = [
    "Leftover",
    "clean_siblings",
    "close_staging",
    "Writer",
    "drop",
    "empty_trash",
    "exchange",
    "is_abandoned",
    "is_dead",
    "is_interruption",
    "leftover_of",
    "new_nonce",
    "open_staging",
    "owner_path",
    "publish",
    "read_owner",
    "remove_leftover",
    "stage",
    "staging_name",
    "statements",
    "sync_files",
    "sync_tree",
    "trash_name",
    "write_owner",
]

logger = logging.getLogger(__name__)

STARTING_S = 60.0  # how long a writer may take between making the file that names it and filling it
_LEFTOVER = re.compile(r"\.(tmp|trash)-(.+)-([0-9a-f]{16})((?:\.[0-9]{1,6})?\.owner)?", re.DOTALL)
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


def new_nonce() -> str:
    """Return 16 hex digits that no other attempt has."""
    return os.urandom(8).hex()


def staging_name(name: str, nonce: str) -> str:
    """Return the sibling in which `name` is prepared; no discovery matches it."""
    return f".tmp-{_short(name)}-{nonce}"


def trash_name(name: str, nonce: str) -> str:
    """Return the sibling in which `name` ends; what is in it is given up."""
    return f".trash-{_short(name)}-{nonce}"


def _short(name: str) -> str:
    return os.fsencode(name)[:200].decode("utf-8", "ignore")  # a name may have 255 bytes with all of it


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a directory entry says by its name: it is "tmp", "trash" or the "owner" of a "tmp" of `name`."""

    path: str
    kind: str
    name: str
    nonce: str


def leftover_of(path: str) -> Leftover | None:
    """Return what the name of a directory entry says, None where it is no staging and no trash of ours."""
    match = _LEFTOVER.fullmatch(path)
    return Leftover(path, "owner" if match[4] else match[1], match[2], match[3]) if match else None


def owner_path(staging: str, rank: int = 0) -> str:
    """Return the file beside a staging directory that states its writer; where several ranks write, that of `rank`.

    Rank 0 makes the directory, and ends it. Its statement is there before the directory and after it, so a staging
    directory without one is nobody's. Beside and not inside: what is inside is exactly what will be published, and in
    a swap what was published.
    """
    return f"{staging}.{rank}.owner" if rank else f"{staging}.owner"


def statements(parent: LocalStore, staging: str) -> list[str]:
    """Return the files beside a staging directory that state its writers, that of rank 0 first."""
    pattern = re.compile(re.escape(staging) + r"(?:\.[0-9]{1,6})?\.owner", re.DOTALL)
    found = [item.path for item in parent.list() if pattern.fullmatch(item.path)]
    return sorted(found, key=lambda path: path != owner_path(staging))


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


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes an attempt; `leased` where it holds the lease of the run, so whoever has that knows its fate; `whole`
    is the name that the directory is to get, once nothing else is left to do."""

    nonce: str
    owner: Owner
    leased: bool
    whole: str = ""


def write_owner(store: Store, path: str, nonce: str, *, leased: bool = False, shared: bool = True) -> None:
    """State at `path` that this process writes attempt `nonce`. Not `shared`: no other attempt has this path."""
    body = json.dumps({"nonce": nonce, "leased": leased, **this_process().to_json()}).encode()
    if not isinstance(store, LocalStore):
        store.write(path, body, overwrite=not shared)
        return
    fd = store.create(path)  # not synced: a power cut ends the writer too
    try:
        while body:
            body = body[os.write(fd, body) :]
    finally:
        os.close(fd)


def read_owner(store: Store, path: str) -> Writer | None:
    """Return what the file at `path` states, None where there is none or it is damaged."""
    try:
        body = json.loads(store.read(path, 0, 4096).partition(b"\n")[0])  # a journal may follow
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    owner = Owner.from_json(body)
    if owner is None or not isinstance(body.get("nonce"), str):
        return None
    return Writer(body["nonce"], owner, body.get("leased") is True, str(body.get("whole") or ""))


def sync_tree(store: LocalStore) -> None:
    """Make every file and directory below `store` durable."""
    files, folders = _tree(store)
    sync_files(store, files)
    for folder in reversed(folders):  # a directory after what is in it
        store.sync_directory(folder)


def sync_files(store: LocalStore, paths: Iterable[str]) -> None:
    """Make the content of files durable."""
    with ThreadPoolExecutor(4, thread_name_prefix="ckptkit-sync") as pool:
        list(pool.map(lambda path: _sync_file(store, path), paths))


def _tree(store: LocalStore) -> tuple[list[str], list[str]]:
    """Return the files and the directories below `store`, parents first."""
    files: list[str] = []
    folders = [""]
    for folder in folders:  # grows while we go
        for item in store.list(folder):
            if item.kind == "directory":
                folders.append(item.path)
            elif item.kind == "file":
                files.append(item.path)
    return files, folders


def _sync_file(store: LocalStore, path: str) -> None:
    fd = store.open_file(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(parent: LocalStore, staging: str, name: str) -> None:
    """Rename a durable staging directory to `name`, and make that durable. Raises FileExistsError."""
    parent.rename(staging, name)
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


def is_abandoned(parent: Store, leftover: Leftover, *, leased: bool = False) -> bool | None:
    """Tell whether nobody writes in a leftover any more; None where its writer is on another machine.

    Args:
        leased: The caller holds the lease of the run: then no other leased writer lives.
    """
    if leftover.kind == "trash":
        return True  # given up by whoever made it: any process may go on deleting
    return is_dead(parent, owner_path(staging_name(leftover.name, leftover.nonce)), leased=leased)


def is_dead(store: Store, path: str, *, leased: bool = False) -> bool | None:
    """Tell whether the writer that the file at `path` states is gone; None where it can't be known."""
    stated = read_owner(store, path)
    if stated is not None:
        if leased and stated.leased and stated.owner == this_process():
            return True  # a save of ours that failed, and could not clean up: saves take turns
        alive = stated.owner.alive()
        if alive is None:
            return True if leased and stated.leased else None
        return not alive
    found = store.info(path)  # without content: its writer has just made it, or died then
    return found is None or time.time() - found.mtime > STARTING_S


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
    if leftover.kind == "tmp" and _finish(parent, leftover):
        return
    logger.info("removing %s/%s, which a dead process left", parent.url, leftover.path)
    trash = drop(parent, leftover.path) if leftover.kind == "tmp" else leftover.path
    if trash is not None:
        parent.delete_tree(trash)
    if leftover.kind == "tmp":
        parent.delete([owner_path(leftover.path)])


def _finish(parent: LocalStore, leftover: Leftover) -> bool:
    """Put a staging directory in place that was whole when its writer died, and whose target was away by then."""
    stated = read_owner(parent, owner_path(leftover.path))
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
    overwrite: bool = False,
    last: Iterable[str] = (),
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = False,
    gone: Collection[str] = (),
    names: Mapping[str, int] | None = None,
) -> Iterator[Store]:
    """Yield a store to write a whole directory into; when the block ends well it is at `url`, durable.

    After any exception nothing of it remains, and what was at `url` before is untouched (on an object
    store with `overwrite`, where there is no rename, it is gone).

    Args:
        overwrite: What is at `url` is replaced, in one step where the file system can, and deleted after.
        last: Names that must appear after all others where files appear one by one (object stores):
            a reader finds the directory by them.
        resume: What a dead writer left with steps in its journal is taken over: the store may hold files. What is
            interrupted, by Ctrl-C or because a rank died, is left with its steps for the next writer. On an object
            store that is by the object (`Ledger`).
        names: All that may be written, with its size where that is known, else -1. For object stores, where a dead
            writer's objects are told from those of others by it.
        gone: Statements of writers on other machines that are known to be dead.

    Raises:
        CheckpointExistsError: `url` is taken; nothing was written.
    """
    store = open_store(url, storage_options=storage_options)
    if isinstance(store, LocalStore):
        with _stage_local(store, overwrite=overwrite, resume=resume, gone=gone) as staging:
            yield staging
        return
    from ckptkit.storage.staging_remote import stage_remote

    with stage_remote(store, overwrite=overwrite, last=frozenset(last), names=names, resume=resume) as remote:
        yield remote


@contextlib.contextmanager
def _stage_local(target: LocalStore, *, overwrite: bool, resume: bool, gone: Collection[str]) -> Iterator[LocalStore]:
    head, name = os.path.split(target.url)
    if not name:
        raise UsageError(f"{target.url} can't be replaced by a checkpoint; name a directory in it.")
    from ckptkit.storage.journal import Journal, adopt, give_up, resumable

    parent = LocalStore(head)
    left = resumable(parent, name, gone=gone) if resume else None
    clean_siblings(parent, name, but=left)  # first: it may finish what a dead writer had all but done
    _check_target(parent, name, overwrite=overwrite)
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
        _put_in_place(parent, nonce, name, overwrite=overwrite)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if not (resume and is_interruption(error) and give_up(parent, name, nonce)):
                close_staging(parent, name, nonce)
        raise
    try:
        close_staging(parent, name, nonce)
    except OSError as error:  # the new content is in place and durable: nothing is lost but space
        logger.warning("what was at %s before could not be deleted: %s", target.url, error)


def is_interruption(error: BaseException) -> bool:
    """Tell whether nothing was wrong with the work itself: it was stopped, or a rank of several died."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, RankFailedError) and error.interrupted)


def _check_target(parent: LocalStore, name: str, *, overwrite: bool) -> None:
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
    if not overwrite:
        raise CheckpointExistsError(
            f"{place} exists already; nothing was written. Choose another place, or replace it with overwrite=True "
            "(--overwrite)."
        )
    if found.kind == "directory":
        _check_disposable(parent.child(name))


def _check_disposable(store: LocalStore) -> None:
    """Raise where replacing the directory would delete more than one checkpoint, or the ground we stand on."""
    place = Path(store.url)
    reason = None
    if place in (Path.cwd(), *Path.cwd().parents):
        reason = "the current directory is in it"
    elif place in (Path.home(), *Path.home().parents):
        reason = "your home directory is in it"
    elif (place / ".git").exists():
        reason = "it is a git repository"
    else:
        inner = next((item.path for item in store.list() if store.info(f"{item.path}/checkpoint.json")), None)
        reason = f"it is a directory of checkpoints ({inner}, ...)" if inner else None
    if reason:
        raise CheckpointExistsError(f"{place} is not overwritten: {reason}. Choose another place.")


def _replace_in_two_steps(parent: LocalStore, nonce: str, name: str) -> None:
    """Replace `name` where there is no atomic swap (NFS). For a moment there is neither, and at no moment nothing.

    Whoever cleans up after a kill in that moment learns from the statement of its writer that the staging directory
    is whole, and puts it in place (`_finish`). An error puts the old one back.
    """
    staging = staging_name(name, nonce)
    body = json.dumps({"nonce": nonce, "whole": name, **this_process().to_json()})
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


def _put_in_place(parent: LocalStore, nonce: str, name: str, *, overwrite: bool) -> None:
    """Publish a durable staging directory; what it replaces has the staging's name afterwards."""
    staging, found = staging_name(name, nonce), parent.info(name)
    if found is not None and found.kind == "directory":
        with contextlib.suppress(OSError):  # an empty directory gives way; any other stays
            os.rmdir(parent.path_of(name))
            found = None
    if found is not None and overwrite:
        if exchange(parent, staging, name):
            return
        _replace_in_two_steps(parent, nonce, name)
        return
    try:
        publish(parent, staging, name)
    except FileExistsError as error:
        raise CheckpointExistsError(
            f"{parent.path_of(name)} appeared while its replacement was written; it was left as it is."
        ) from error
