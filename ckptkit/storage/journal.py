"""Records which steps of a command are finished, so that the same command can continue after an interruption.

Each rank has an owner file next to the staging directory. The first line of the file is JSON that identifies the rank's
process. The journal follows: a header line (plan, world size, rank), then one line per finished step. The file is never
synced. It survives if the process is killed. Work from before a reboot of the machine is never continued.
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
from ckptkit.storage.owner import owner_json, this_process
from ckptkit.storage.staging import Leftover, leftovers, owner_files, owner_path, read_owner, staging_name

logger = logging.getLogger(__name__)

_HEAD = re.compile(r"([0-9a-f]{32}) (\d{1,6}) (\d{1,6})")
_EARLIER = "#"  # a line that separates the sections of earlier attempts from the current section
_VOID = "x "


@dataclass(frozen=True, slots=True)
class Section:
    """One rank's progress in one attempt to run the command.

    Attributes:
        plan: Fingerprint of the source and of all bytes to write.
        steps: The numbers of the rank's finished steps.
        void: Paths of files. In the section of the running attempt: the files that this attempt writes again from the
            start. In the section of an earlier attempt: the files for which its steps do not count.
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
    """Records one rank's finished steps in one attempt to run the command. Thread-safe."""

    def __init__(self, staging: str, *, world_size: int = 1, rank: int = 0) -> None:
        """Open no file. `begin` appends to the owner file of `rank`, which must exist by then."""
        self._staging = staging
        self._path = owner_path(staging, rank)
        self.world_size, self.rank = world_size, rank
        self._fd = -1
        self._lock = threading.Lock()

    def earlier(self) -> list[Section]:
        """Return the progress of earlier attempts."""
        return _parse(_read(owner_path(self._staging)))[0]

    def begin(self, plan: str, *, steps: Collection[int] = (), anew: Iterable[str] = ()) -> None:
        """Begin this attempt's section.

        Args:
            plan: Fingerprint of the source and of all bytes to write.
            steps: The numbers of the steps that are already finished.
            anew: Files that this attempt writes again from the start. Earlier attempts' steps for these files do not
                count.
        """
        section = Section(plan, self.world_size, self.rank, frozenset(steps), frozenset(anew))
        text = _text(section.lines())
        self._fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        end = os.lseek(self._fd, 0, os.SEEK_END)
        text = text if end and os.pread(self._fd, 1, end - 1) == b"\n" else b"\n" + text
        while text:
            text = text[os.write(self._fd, text) :]

    def done(self, step: int) -> None:
        line = b"%d\n" % step
        with self._lock:
            written = os.write(self._fd, line)
            if written < len(line):  # remove the partial number, which would merge with the next; the step is repeated
                os.ftruncate(self._fd, os.lseek(self._fd, -written, os.SEEK_CUR))

    def end(self) -> None:
        """Remove the journals of all ranks. Rank 0 calls this after all are done, before the result is published."""
        self.close()
        folder, staging = os.path.split(self._staging)
        parent = LocalStore(folder)
        parent.delete([path for path in owner_files(parent, staging) if path != owner_path(staging)])
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._path, len(_read(self._path).partition(b"\n")[0]))

    def leave(self) -> None:
        """Mark this process as dead in its owner file, although it may keep running.

        Another writer can then take over the finished steps. One byte is overwritten in place: a new file could bring
        back an owner file that another process has deleted.
        """
        self.close()
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mark = b'"started": "'
                body = os.pread(fd, 4096, 0).partition(b"\n")[0]
                at = body.find(mark) + len(mark)
                if at >= len(mark) and body[at : at + 1] != b'"':
                    os.pwrite(fd, b"-", at)
            finally:
                os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - a path of ours, checked
        return file.read()


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def _parse(content: bytes) -> tuple[list[Section], list[Section]]:
    """Return the sections of earlier attempts, and those of this attempt. No sections if `content` is not a journal."""
    earlier: list[tuple[re.Match[str], set[int], set[str]]] = []  # head, steps, void
    found = earlier[:]
    try:
        for raw in content.split(b"\n")[1:-1]:  # after the last newline comes nothing, or an incomplete line
            line = raw.decode("utf-8", "surrogateescape")
            head = _HEAD.fullmatch(line)
            if head is not None:
                found.append((head, set(), set()))
            elif line == _EARLIER:
                earlier, found = [*earlier, *found], []
            elif line.startswith(_VOID) and found:
                found[-1][2].add(line.removeprefix(_VOID))
            else:
                step = int(line)
                if found:
                    found[-1][1].add(step)
    except ValueError:
        return [], []
    first, second = (
        [Section(h[1], int(h[2]), int(h[3]), frozenset(steps), frozenset(void)) for h, steps, void in sections]
        for sections in (earlier, found)
    )
    return first, second


def _merged(parent: LocalStore, paths: Sequence[str]) -> list[Section]:
    """Return the finished steps of all ranks in all attempts, read from the owner files `paths`."""
    parsed = [_parse(parent.read(path)) for path in paths]
    current = [section for _, found in parsed for section in found]
    void = frozenset(path for section in current for path in section.void)
    earlier = [replace(section, void=section.void | void) for older, _ in parsed for section in older]
    merged: dict[Section, frozenset[int]] = {}
    for section in [*earlier, *(replace(section, void=frozenset()) for section in current)]:
        key = replace(section, steps=frozenset())
        merged[key] = merged.get(key, frozenset()) | section.steps
    return [replace(key, steps=steps) for key, steps in merged.items() if steps]


# --- taking over an earlier attempt


def resumable(parent: LocalStore, name: str, *, dead: Collection[str] = ()) -> Leftover | None:
    """Return the newest staging directory of `name` that can be continued, or None.

    In such a directory, at least one step is finished, and all processes that wrote to it are dead.

    Args:
        dead: Owner files on other machines whose processes are known to be dead (see `dead_owner_files`).
    """
    found = []
    for left in _staging_directories(parent, name):
        paths = owner_files(parent, left.path)
        if all(path in dead or _is_dead(parent, path) for path in paths):
            info = parent.info(owner_path(left.path))
            if info is not None and _merged(parent, paths):
                found.append((info.mtime, left))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def dead_owner_files(parent: LocalStore, name: str) -> dict[str, str]:
    """Return the owner files of dead processes of this machine that wrote `name`, each with its staging directory."""
    found = [
        (path, left.path) for left in _staging_directories(parent, name) for path in owner_files(parent, left.path)
    ]
    return {path: staging for path, staging in found if _is_dead(parent, path)}


def _staging_directories(parent: LocalStore, name: str) -> Iterator[Leftover]:
    for left in leftovers(parent, name):
        found = parent.info(left.path) if left.kind == "tmp" else None
        if found is not None and found.kind == "directory" and parent.info(owner_path(left.path)) is not None:
            yield left


def _is_dead(parent: LocalStore, path: str) -> bool:
    writer = read_owner(parent, path)
    if writer is None or writer.leased or writer.owner.machine != this_process().machine:
        return False
    return writer.owner.alive() is False


def adopt(parent: LocalStore, left: Leftover, name: str, nonce: str) -> LocalStore | None:
    """Take over the staging directory of a dead writer, and return it. Return None if another process was faster."""
    path = staging_name(name, nonce)
    old = owner_files(parent, left.path)
    try:
        body = json.dumps({"nonce": nonce, "leased": False, **owner_json(parent)})
        lines = [body, *(line for section in _merged(parent, old) for line in section.lines()), _EARLIER]
        parent.write(owner_path(path), _text(lines), overwrite=True, sync=False)
        parent.rename(left.path, path)
    except FileNotFoundError:
        parent.delete([owner_path(path)])
        return None
    parent.delete(old)
    return parent.child(path)


def give_up(parent: LocalStore, name: str, nonce: str) -> bool:
    """Keep a staging directory for the next attempt. Return False if it is useless, because no step is finished."""
    staging = staging_name(name, nonce)
    if not _merged(parent, owner_files(parent, staging)):
        return False
    Journal(parent.path_of(staging)).leave()
    logger.info("%s is kept: run the same command again to continue", parent.path_of(staging))
    return True
