"""Staging and trash siblings: their names, their writers, and whether a writer is dead."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from ckptkit.errors import RankFailedError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.owner import Owner, own_statement, owner_in, this_process
from ckptkit.storage.store import Store

__all__ = [
    "Leftover",
    "Replaceable",
    "STARTING_S",
    "Writer",
    "is_abandoned",
    "is_dead",
    "is_interruption",
    "leftover_of",
    "new_nonce",
    "owner_path",
    "read_owner",
    "staging_name",
    "statements",
    "trash_name",
    "write_owner",
]

STARTING_S = 60.0  # how long a writer may take between making the file that names it and filling it
_LEFTOVER = re.compile(r"\.(tmp|trash)-(.+)-([0-9a-f]{16})((?:\.[0-9]{1,6})?\.owner)?", re.DOTALL)

Replaceable: TypeAlias = Callable[[Store, str, Collection[str]], None]
"""Raises CheckpointExistsError where a file or a directory is not just one checkpoint or one export. It gets a store,
the path in it, and the names that an interrupted command has stated that it writes there. Storage knows no formats."""


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


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes an attempt; `leased` where it holds the lease of the run, so whoever has that knows its fate; `whole`
    is the name that the directory is to get, once nothing else is left to do."""

    nonce: str
    owner: Owner
    leased: bool
    whole: str = ""


def write_owner(store: Store, path: str, nonce: str, *, leased: bool = False) -> None:
    """State at `path` that this process writes attempt `nonce`. Raises FileExistsError."""
    body = json.dumps({"nonce": nonce, "leased": leased, **own_statement(store)}).encode()
    if not isinstance(store, LocalStore):
        store.write(path, body)
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
    owner = owner_in(store, body)
    if owner is None or not isinstance(body.get("nonce"), str):
        return None
    return Writer(body["nonce"], owner, body.get("leased") is True, str(body.get("whole") or ""))


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


def is_interruption(error: BaseException) -> bool:
    """Tell whether nothing was wrong with the work itself: it was stopped, or a rank of several died."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, RankFailedError) and error.interrupted)
