"""How far a writer of a staging directory came, beside it, so that the same command run again goes on from there.

The file that states a writer is one line of JSON. A journal is what follows: a line that says what is being written,
and a line for each step that is done. Nothing of it is synced: what a killed process wrote is still there, and what a
machine wrote before it went down is never taken over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator

from ckptkit.storage.local import LocalStore
from ckptkit.storage.owner import this_process
from ckptkit.storage.staging import Leftover, leftover_of, owner_path, read_owner, staging_name

__all__ = ["Journal", "adopt", "give_up", "resumable"]

logger = logging.getLogger(__name__)


class Journal:
    """The journal of one attempt. Safe for several threads."""

    def __init__(self, path: str) -> None:
        """`path`: of the file that states the writer."""
        self._path = path
        self._fd = -1
        self._lock = threading.Lock()

    @classmethod
    def beside(cls, staging: LocalStore) -> Journal:
        """Return the journal of a staging directory."""
        return cls(owner_path(staging.url))

    def steps(self, plan: str) -> frozenset[int]:
        """Return the steps of `plan` that are done; none where something else was being written."""
        found, steps = _parse(self._read())
        return steps if found == plan else frozenset()

    def has_steps(self) -> bool:
        """Tell whether there is anything to go on from."""
        return bool(_parse(self._read())[1])

    def begin(self, plan: str, *, anew: bool) -> None:
        """State what is written from now on. `anew`: no step of it is done."""
        head, _, rest = self._read().partition(b"\n")
        self._fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        whole = rest if rest.endswith(b"\n") else rest[: rest.rfind(b"\n") + 1]  # a line may be torn
        os.ftruncate(self._fd, len(head))
        os.pwrite(self._fd, b"\n" + (f"{plan}\n".encode() if anew else whole), len(head))
        os.lseek(self._fd, 0, os.SEEK_END)

    def done(self, step: int) -> None:
        """State that a step is done: its bytes are written and will not be written again."""
        line = b"%d\n" % step
        with self._lock:
            written = os.write(self._fd, line)
            if written < len(
                line
            ):  # the beginning of another number, if more came behind it: done again, it is no harm
                end = os.lseek(self._fd, -written, os.SEEK_CUR)
                os.ftruncate(self._fd, end)

    def end(self) -> None:
        """Forget all steps: what lies in the staging directory from now on is to be published, or to be deleted."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._path, len(self._read().partition(b"\n")[0]))

    def close(self) -> None:
        """Close the file, and keep what it says."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> bytes:
        with open(self._path, "rb") as file:  # noqa: PTH123 - a path of ours, checked
            return file.read()


def _parse(content: bytes) -> tuple[str, frozenset[int]]:
    """The plan and the steps; "" and none where there is no journal, or what follows the statement is none."""
    lines = content.split(b"\n")[1:-1]  # behind the last end of line there is nothing, or a torn line
    try:
        return (lines[0].decode(), frozenset(map(int, lines[1:]))) if lines else ("", frozenset())
    except ValueError:
        return "", frozenset()


def resumable(parent: LocalStore, name: str) -> Leftover | None:
    """Return the staging directory that a dead writer of `name`, on this machine since it was started, left with
    steps done; the newest of several."""
    found = [(info.mtime, kept) for kept in _left(parent, name) if (info := parent.info(owner_path(kept.path)))]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _left(parent: LocalStore, name: str) -> Iterator[Leftover]:
    expected = staging_name(name, "0" * 16)
    for item in parent.list():
        kept = leftover_of(item.path)
        if kept is None or kept.kind != "tmp" or item.kind != "directory":
            continue
        path = owner_path(kept.path)
        stated = read_owner(parent, path) if staging_name(kept.name, "0" * 16) == expected else None
        if stated is None or stated.whole or stated.leased or stated.owner.machine != this_process().machine:
            continue
        if stated.owner.alive() is False and Journal(parent.path_of(path)).has_steps():
            yield kept


def adopt(parent: LocalStore, left: Leftover, name: str, nonce: str) -> LocalStore | None:
    """Make a dead writer's staging directory this process's own; None where somebody else was quicker."""
    path = staging_name(name, nonce)
    try:
        journal = parent.read(owner_path(left.path)).partition(b"\n")[2]
        _state(parent, owner_path(path), {"nonce": nonce, "leased": False, **this_process().to_json()}, journal)
        parent.rename(left.path, path)
    except FileNotFoundError:
        parent.delete([owner_path(path)])
        return None
    parent.delete([owner_path(left.path)])
    return parent.child(path)


def give_up(parent: LocalStore, name: str, nonce: str) -> bool:
    """Leave a staging directory to whoever writes the same next, where there is something to go on from.

    This process may live on: it states that its writer is gone.
    """
    path = owner_path(staging_name(name, nonce))
    journal = Journal(parent.path_of(path))
    if not journal.has_steps():
        return False
    owner = {**this_process().to_json(), "started": "-"}
    _state(parent, path, {"nonce": nonce, "leased": False, **owner}, parent.read(path).partition(b"\n")[2])
    logger.info("%s is kept: the same command goes on from it", parent.path_of(staging_name(name, nonce)))
    return True


def _state(parent: LocalStore, path: str, body: dict[str, object], journal: bytes) -> None:
    parent.write(path, json.dumps(body).encode() + b"\n" + journal, overwrite=True, sync=False)
