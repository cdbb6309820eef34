"""The journal next to a staging directory: finished steps, so that the same command can continue.

The file that states a writer is one line of JSON. A journal is what follows: a line that says what is being written,
as which share of how many, and a line for each step of it that is done. Where several ranks write, each has such a
file. Nothing of it is synced: what a killed process wrote is still there, and what a machine wrote before it went down
is never taken over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptkit.storage.local import LocalStore
from ckptkit.storage.owner import own_statement, this_process
from ckptkit.storage.staging import Leftover, leftover_of, owner_path, read_owner, staging_name, statements

__all__ = ["Journal", "Section", "adopt", "dead_statements", "give_up", "resumable"]

logger = logging.getLogger(__name__)

_HEAD = re.compile(r"([0-9a-f]{32})(?: (\d{1,6}) (\d{1,6}))?")  # journals of one process had no numbers once
_EARLIER = "#"  # what is above is of earlier runs
_VOID = "x "


@dataclass(frozen=True, slots=True)
class Section:
    """What one rank of one run has said.

    Attributes:
        plan: What it wrote: other bytes at other places, or of another source, have another name.
        world_size, rank: Which share of it.
        steps: What is done of that.
        void: Files that were begun anew later, by paths: nothing of them is done.
    """

    plan: str
    world_size: int = 1
    rank: int = 0
    steps: frozenset[int] = frozenset()
    void: frozenset[str] = frozenset()

    def lines(self) -> Iterator[str]:
        yield f"{self.plan} {self.world_size} {self.rank}"
        yield from (f"{_VOID}{path}" for path in sorted(self.void))
        yield from map(str, sorted(self.steps))


class Journal:
    """The journal of one rank of an attempt. Safe for several threads.

    Attributes:
        world_size, rank: The share of the work whose steps are stated.
    """

    def __init__(self, path: str, *, world_size: int = 1, rank: int = 0, first: str = "") -> None:
        """`path`: of the file that states the writer. `first`: that of rank 0, which has what earlier runs said."""
        self._path = path
        self._first = first or path
        self.world_size, self.rank = world_size, rank
        self._fd = -1
        self._lock = threading.Lock()

    @classmethod
    def beside(cls, staging: LocalStore, *, world_size: int = 1, rank: int = 0) -> Journal:
        """Return the journal of a staging directory."""
        first = owner_path(staging.url)
        return cls(owner_path(staging.url, rank), world_size=world_size, rank=rank, first=first)

    def earlier(self) -> list[Section]:
        """Return what earlier runs have said."""
        return _parse(_read(self._first))[0]

    def begin(self, plan: str, *, steps: Collection[int] = (), anew: Iterable[str] = ()) -> None:
        """State what is written from now on.

        Args:
            steps: Those that are done already.
            anew: Files that are begun anew: what earlier runs have said of them is void.
        """
        section = Section(plan, self.world_size, self.rank, frozenset(steps), frozenset(anew))
        text = _text(section.lines())
        self._fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        end = os.lseek(self._fd, 0, os.SEEK_END)
        text = text if end and os.pread(self._fd, 1, end - 1) == b"\n" else b"\n" + text
        while text:
            text = text[os.write(self._fd, text) :]

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
        """Forget all that any rank has said: what lies in the staging directory from now on is to be published, or to
        be deleted. For rank 0, once all are done."""
        self.close()
        folder, staging = os.path.split(self._path.removesuffix(".owner"))
        parent = LocalStore(folder)
        first = owner_path(staging)
        parent.delete([path for path in statements(parent, staging) if path != first])
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._path, len(_read(self._path).partition(b"\n")[0]))

    def leave(self) -> None:
        """Leave what is done to whoever writes the same next. This process may live on: it says that it is gone.

        In place, by one byte of its statement: where that was deleted it stays so.
        """
        self.close()
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mark = b'"started": "'
                statement = os.pread(fd, 4096, 0).partition(b"\n")[0]
                at = statement.find(mark) + len(mark)
                if at >= len(mark) and statement[at : at + 1] != b'"':
                    os.pwrite(fd, b"-", at)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close the file, and keep what it says."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - a path of ours, checked
        return file.read()


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def _parse(content: bytes) -> tuple[list[Section], list[Section]]:
    """Return what earlier runs have said, and what this one; nothing where what follows the statement is no journal."""
    lines = content.split(b"\n")[1:-1]  # behind the last end of line there is nothing, or a torn line
    earlier: list[Section] = []
    found: list[Section] = []
    steps: set[int] = set()
    void: set[str] = set()

    def close_section() -> None:
        if found:
            found[-1] = replace(found[-1], steps=frozenset(steps), void=frozenset(void))
        steps.clear()
        void.clear()

    try:
        for line in (raw.decode("utf-8", "surrogateescape") for raw in lines):
            head = _HEAD.fullmatch(line)
            if head is not None:
                close_section()
                found.append(Section(head[1], int(head[2] or 1), int(head[3] or 0)))
            elif line == _EARLIER:
                close_section()
                earlier, found = [*earlier, *found], []
            elif line.startswith(_VOID) and found:
                void.add(line.removeprefix(_VOID))
            else:
                steps.add(int(line))
        close_section()
    except ValueError:
        return [], []
    return earlier, found


def _together(contents: Sequence[bytes]) -> list[Section]:
    """Return what all runs up to now have said, from the files of all ranks: whatever of it still holds."""
    parsed = [_parse(content) for content in contents]
    said = [section for _, found in parsed for section in found]
    void = frozenset(path for section in said for path in section.void)
    earlier = [replace(section, void=section.void | void) for older, _ in parsed for section in older]
    merged: dict[Section, frozenset[int]] = {}
    for section in [*earlier, *(replace(section, void=frozenset()) for section in said)]:
        key = replace(section, steps=frozenset())
        merged[key] = merged.get(key, frozenset()) | section.steps
    return [replace(key, steps=steps) for key, steps in merged.items() if steps]


# --- from one attempt to the next


def resumable(parent: LocalStore, name: str, *, gone: Collection[str] = ()) -> Leftover | None:
    """Return the staging directory that dead writers of `name`, on this machine since it was started, left with
    steps done; the newest of several.

    Args:
        gone: Statements of writers on other machines that are known to be dead (`dead_statements`).
    """
    found = []
    for left in _left(parent, name):
        paths = statements(parent, left.path)
        if all(path in gone or _is_dead(parent, path) for path in paths):
            contents = [parent.read(path) for path in paths]
            info = parent.info(owner_path(left.path))
            if info is not None and _together(contents):
                found.append((info.mtime, left))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def dead_statements(parent: LocalStore, name: str) -> dict[str, str]:
    """Return the statements of writers of `name` that are dead, as this machine knows, each with its staging directory:
    they ran on it since it was started."""
    found = [(path, left.path) for left in _left(parent, name) for path in statements(parent, left.path)]
    return {path: staging for path, staging in found if _is_dead(parent, path)}


def _left(parent: LocalStore, name: str) -> Iterator[Leftover]:
    expected = staging_name(name, "0" * 16)
    for item in parent.list():
        kept = leftover_of(item.path)
        if kept is None or kept.kind != "tmp" or item.kind != "directory":
            continue
        if staging_name(kept.name, "0" * 16) == expected and parent.info(owner_path(kept.path)) is not None:
            yield kept


def _is_dead(parent: LocalStore, path: str) -> bool:
    stated = read_owner(parent, path)
    if stated is None or stated.whole or stated.leased or stated.owner.machine != this_process().machine:
        return False
    return stated.owner.alive() is False


def adopt(parent: LocalStore, left: Leftover, name: str, nonce: str) -> LocalStore | None:
    """Make a dead writer's staging directory this process's own; None where somebody else was quicker."""
    path = staging_name(name, nonce)
    stated = statements(parent, left.path)
    try:
        said = _together([parent.read(item) for item in stated])
        _state(parent, owner_path(path), {"nonce": nonce, "leased": False, **own_statement(parent)}, said)
        parent.rename(left.path, path)
    except FileNotFoundError:
        parent.delete([owner_path(path)])
        return None
    parent.delete(stated)
    return parent.child(path)


def give_up(parent: LocalStore, name: str, nonce: str) -> bool:
    """Leave a staging directory to whoever writes the same next, where there is something to go on from."""
    staging = staging_name(name, nonce)
    if not _together([parent.read(path) for path in statements(parent, staging)]):
        return False
    Journal(parent.path_of(owner_path(staging))).leave()
    logger.info("%s is kept: the same command goes on from it", parent.path_of(staging))
    return True


def _state(parent: LocalStore, path: str, body: dict[str, object], said: Sequence[Section]) -> None:
    lines = [json.dumps(body), *(line for section in said for line in section.lines()), _EARLIER]
    parent.write(path, _text(lines), overwrite=True, sync=False)
