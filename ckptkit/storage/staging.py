"""Creates and parses the names of staging directories, trash directories and owner files, and detects dead writers."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from ckptkit.errors import CheckpointExistsError, RankFailedError, StorageError
from ckptkit.storage.local import LocalStore, disk_errors
from ckptkit.storage.owner import Owner, owner_in, owner_json, read_json, this_process
from ckptkit.storage.store import Store

STARTING_S = 60.0  # how long a writer may take between creating its owner file and filling it
_LEFTOVER = re.compile(r"\.(tmp|trash)-(.+)-([0-9a-f]{16})((?:\.[0-9]{1,6})?\.owner)?", re.DOTALL)

Replaceable: TypeAlias = Callable[[Store, str, Collection[str]], None]
"""Function that raises CheckpointExistsError unless a path contains one checkpoint or export and nothing else.

The arguments are a store, a path in the store, and names to ignore under the path because an interrupted command wrote
them. A callback is needed because the storage layer knows no formats.
"""


def new_nonce() -> str:
    """Return 16 random hex digits that identify an attempt."""
    return os.urandom(8).hex()


def staging_name(name: str, nonce: str) -> str:
    """Return a name for a staging directory of `name`. The result never looks like the name of a checkpoint."""
    return f".tmp-{_truncated(name)}-{nonce}"


def trash_name(name: str, nonce: str) -> str:
    """Return the name to which `name` is renamed before it is deleted."""
    return f".trash-{_truncated(name)}-{nonce}"


def _truncated(name: str) -> str:
    return os.fsencode(name)[:200].decode("utf-8", "ignore")  # prefix and nonce must also fit into 255 bytes


@dataclass(frozen=True, slots=True)
class Leftover:
    """A temporary file or directory next to `name`, from a process that writes or deletes `name`.

    Its kind is "tmp" (staging directory), "owner" (owner file) or "trash".
    """

    path: str
    kind: str
    name: str
    nonce: str


def leftover_of(path: str) -> Leftover | None:
    """Parse the name of a directory entry. Return None if the entry is not a leftover of ckptkit."""
    match = _LEFTOVER.fullmatch(path)
    return Leftover(path, "owner" if match[4] else match[1], match[2], match[3]) if match else None


def leftovers(parent: LocalStore, name: str) -> list[Leftover]:
    """Return the staging directories, trash directories and owner files of `name` under `parent`."""
    found = (leftover_of(item.path) for item in parent.list())
    return [leftover for leftover in found if leftover is not None and leftover.name == _truncated(name)]


def owner_path(staging: str, rank: int = 0) -> str:
    """Return the path of a rank's owner file, which says which process writes the staging directory.

    Rank 0 creates its owner file before the directory, and deletes it after the directory. So a staging directory
    without an owner file has no writer.
    """
    return f"{staging}.{rank}.owner" if rank else f"{staging}.owner"


def owner_files(parent: LocalStore, staging: str) -> list[str]:
    """Return the owner files of a staging directory. The file of rank 0 comes first."""
    pattern = re.compile(re.escape(staging) + r"(?:\.[0-9]{1,6})?\.owner", re.DOTALL)
    found = [item.path for item in parent.list() if pattern.fullmatch(item.path)]
    return sorted(found, key=len)  # rank 0's name has no number


@dataclass(frozen=True, slots=True)
class Writer:
    """The content of an owner file, which identifies the process that writes a staging directory.

    Attributes:
        leased: Whether the writer held the lease of the run. If another process now holds it, the writer is dead.
    """

    nonce: str
    owner: Owner
    leased: bool


def write_owner(store: Store, path: str, nonce: str, *, leased: bool = False) -> None:
    """Write an owner file that names this process. Raises FileExistsError if a local file of this name exists."""
    body = json.dumps({"nonce": nonce, "leased": leased, **owner_json(store)}).encode()
    if not isinstance(store, LocalStore):
        store.write(path, body)
        return
    try:
        fd = store.create(path)  # not synced, because a power cut ends the writer too
    except PermissionError as error:  # the user knows the directory, but not the file
        raise StorageError(error.errno, f"{store.url} is not writable: {error.strerror}") from error
    with disk_errors(store.path_of(path)):
        try:
            while body:
                body = body[os.write(fd, body) :]
        finally:
            os.close(fd)


def read_owner(store: Store, path: str) -> Writer | None:
    """Return the content of an owner file, or None if the file is missing or damaged."""
    body = read_json(store, path)  # a journal may follow
    owner = owner_in(store, body)
    if owner is None or not isinstance(body.get("nonce"), str):
        return None
    return Writer(body["nonce"], owner, body.get("leased") is True)


def is_abandoned(parent: Store, leftover: Leftover, *, leased: bool = False) -> bool | None:
    """Return whether the writer of a leftover is dead. None if unknown, for example on another machine.

    Args:
        leased: Whether the caller holds the lease of the run. If so, all other writers that held the lease are dead.
    """
    if leftover.kind == "trash":
        return True  # any process may finish a deletion
    return is_dead(parent, owner_path(staging_name(leftover.name, leftover.nonce)), leased=leased)


def is_dead(store: Store, path: str, *, leased: bool = False) -> bool | None:
    """Return whether the writer that an owner file names is dead. None if unknown. See `is_abandoned`."""
    writer = read_owner(store, path)
    if writer is not None:
        if leased and writer.leased and writer.owner == this_process():
            # An earlier save of this process wrote the file. Saves take turns, so the earlier save has failed.
            return True
        alive = writer.owner.alive()
        if alive is None:
            return True if leased and writer.leased else None
        return not alive
    found = store.info(path)  # the file may be empty: its writer has just created it, or died right after that
    return found is None or time.time() - found.mtime > STARTING_S


def exists_already(place: str) -> CheckpointExistsError:
    """Return the error for a target that exists and was not to be overwritten."""
    return CheckpointExistsError(
        f"{place} exists already; nothing was written. Choose another path. overwrite=True (--overwrite) replaces it "
        "if it is a checkpoint or an export."
    )


def is_interruption(error: BaseException) -> bool:
    """Return whether `error` means that the work was interrupted (Ctrl-C, a dead rank) and did not fail by itself."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, RankFailedError) and error.interrupted)
