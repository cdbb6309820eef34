"""Publishes a directory on an object store. The files that readers look for are written last, as there is no rename.

A writer owns the whole directory until it is done. It creates an owner file with a create-only put. If the owner dies,
the next writer takes over: it writes an owner file with the next number, aborts the dead writer's uploads, and keeps
the finished objects. All puts are create-only. So a put of a dead writer that arrives late cannot replace an object.
All objects are checked before the files that readers look for are written.

To replace a finished directory, the new content is written to a folder inside the directory. It is then copied over the
old content.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CheckpointExistsError, StorageError
from ckptkit.storage import ledger
from ckptkit.storage.ledger import FOLDER, Finished, Ledger, read_ledger
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.owner import owner_json
from ckptkit.storage.retry import may_yet_happen
from ckptkit.storage.staging import (
    Replaceable,
    Writer,
    exists_already,
    is_interruption,
    new_nonce,
    read_owner,
    write_owner,
)
from ckptkit.storage.store import FileInfo, ReadInto, Store

logger = logging.getLogger(__name__)

NEW = ".ckptkit-new"  # staging folder inside a directory that is being replaced
OWNER_NAME = ".ckptkit-owner.json"  # written first and deleted last: it marks an unfinished directory
_OWNER = re.compile(r"\.ckptkit-owner(?:-(\d{1,9}))?\.json")  # takeover number n writes .ckptkit-owner-n.json
_LOOKED_FOR = frozenset(["checkpoint.json", ".metadata", "manifest.safetensors", "config.json", "adapter_config.json"])
_TURNS = 3  # tries to take a directory; a try fails if another writer came and finished during the try


@contextlib.contextmanager
def stage_remote(
    target: RemoteStore,
    *,
    replaceable: Replaceable | None,
    last: frozenset[str],
    names: Mapping[str, int] | None = None,
    resume: bool = False,
) -> Iterator[Store]:
    """Yield a store that writes to `target`. If `target` is to be replaced, the store writes to a folder in `target`.

    The files named in `last` are written after the block has succeeded.

    Args:
        names: All paths that may be written, each with its size in bytes (-1 if unknown). None allows any path.
        resume: Keep and continue the work of a dead writer. The store's `ledger` lists the writer's objects.
    """
    replaces = replaceable if replaceable is not None and _is_finished(target) else None
    if replaces is not None:
        replaces(target, "", ())
    where = target if replaces is None else target.child(NEW)
    place = _Place(where, last, names)
    earlier = place.take(replaceable=replaceable, resume=resume, private=replaces is not None)
    staged = _Staged(where, last, ledger=Ledger(where, earlier))
    old: list[str] = []
    try:
        yield staged
        place.check(staged.ledger)
        staged.put_last()
        if replaces is not None:
            old = [item.path for item in target.list(recursive=True) if not item.path.startswith(f"{NEW}/")]
            replaces(target, "", ())  # check again, because hours may have passed
            place.check_copies()
    except BaseException as error:
        with contextlib.suppress(OSError):
            # A put that failed may still take effect on the server later. That would publish these objects, so don't
            # delete them.
            left = staged.may_appear and place.leave(always=True)
            if not left and not (resume and is_interruption(error) and place.leave()):
                place.clear([*staged.written, *staged.ledger.earlier])
        raise
    made = [] if replaces is None else _copy_over(target, place, last, old)
    place.clear(made)
    came = [item.path for item in target.list(recursive=True) if item.path not in made] if replaces is not None else []
    if came:
        logger.warning("%s contains objects that were added while it was replaced: %s", target.url, ", ".join(came[:3]))


def check_remote(target: RemoteStore, replaceable: Replaceable | None) -> None:
    """Raise CheckpointExistsError in the same cases as `stage_remote`. Writes nothing."""
    if replaceable is not None and _is_finished(target):
        replaceable(target, "", ())
    else:
        _Place(target, frozenset(), None).check_free(replaceable)


def _is_finished(target: RemoteStore) -> bool:
    """Return whether the directory has content but no owner file."""
    paths = [item.path for item in target.list(recursive=True)]
    return bool(paths) and not any(_OWNER.fullmatch(path) for path in paths)


def _copy_over(target: RemoteStore, place: _Place, last: frozenset[str], old: Sequence[str]) -> list[str]:
    """Replace the objects `old` in `target` with the staged objects. Return the paths of the staged objects.

    The files that readers look for are deleted first and copied last, so that readers never find a mixed checkpoint. If
    the process is killed, the staging folder still has the whole new content. Running the same command again continues
    the copy.
    """
    try:
        paths = [path for path in place.look() if not _OWNER.fullmatch(path) and not path.startswith(f"{FOLDER}/")]
        target.delete([path for path in old if path in last or path in _LOOKED_FOR])
        for group in ([path for path in paths if path not in last], [path for path in paths if path in last]):
            target._connection.each(lambda path: place.store.copy_to(path, target, path), group)
        target.delete([path for path in old if path not in paths])
    except BaseException:
        with contextlib.suppress(OSError):
            place.leave(always=True)
        logger.warning(
            "%s was partly replaced. The new content is complete in %s/%s: run the same command again to continue.",
            target.url,
            target.url,
            NEW,
        )
        raise
    return paths


def check_object(target: RemoteStore, name: str, replaceable: Replaceable | None) -> None:
    """Raise CheckpointExistsError if the single object `name` may not be written. Writes nothing."""
    if target.info(name) is None:
        return
    if replaceable is None:
        raise exists_already(f"{target.url}/{name}")
    replaceable(target, name, ())


@contextlib.contextmanager
def stage_object(target: RemoteStore, name: str, *, replaceable: Replaceable | None) -> Iterator[Store]:
    """Yield a store in which to write the single object `name`, which one copy request replaces in the end.

    Raises:
        CheckpointExistsError: The object may not be replaced, or another process may be writing the object.
    """
    check_object(target, name, replaceable)
    overwrite = replaceable is not None
    owner_file = f".{name}{OWNER_NAME}"
    writer = read_owner(target, owner_file)
    where = target.child(f".{name}{NEW}") if overwrite else target
    if writer is not None:
        alive = writer.owner.alive()
        if alive or (alive is None and not overwrite):
            raise CheckpointExistsError(
                f"{target.url}/{name} is being written, or was left unfinished, by {writer.owner}."
            )
        _end_uploads(target, frozenset({name, f".{name}{NEW}/{name}"}))
        target.delete([owner_file])
    try:
        write_owner(target, owner_file, new_nonce())
    except FileExistsError as error:
        raise CheckpointExistsError(f"{target.url}/{name} is being written by another process.") from error
    try:
        if overwrite:
            where.delete_tree(name)  # from a dead writer
        yield where
        if overwrite:
            check_object(target, name, replaceable)  # check again, because hours may have passed
            where.copy_to(name, target, name)
    finally:
        if overwrite:
            where.delete([name])
        target.delete([owner_file])


def _end_uploads(target: RemoteStore, names: frozenset[str] | None) -> None:
    """Abort a dead writer's uploads of the objects `names` (None: all), which could still be completed."""
    target.end_uploads([upload for upload in target.unfinished_uploads() if names is None or upload.path in names])


@dataclass(frozen=True, slots=True)
class _Previous:
    """The newest owner file in a directory. `number` is -1 if there is none; `names` is None if unknown."""

    number: int
    writer: Writer | None
    names: frozenset[str] | None

    @property
    def alive(self) -> bool | None:
        return self.writer.owner.alive() if self.writer is not None else None


class _Place:
    """A directory on an object store, and the owner file that makes it this process's own."""

    def __init__(self, target: RemoteStore, last: frozenset[str], names: Mapping[str, int] | None) -> None:
        self.store = target
        self._last = last
        self._names = names
        self._own = OWNER_NAME
        self._body = b""

    def take(self, *, replaceable: Replaceable | None, resume: bool, private: bool) -> dict[str, Finished]:
        """Make this process the owner of the directory. Return, by path, the objects that a dead writer finished.

        Args:
            private: Whether only ckptkit writes to the directory. If so, its content may be replaced unchecked.

        Raises:
            CheckpointExistsError: Another process owns the directory, or the content may not be replaced.
        """
        for _ in range(_TURNS):
            items = self.look()
            previous = self._previous(items)
            if not private:
                self._check(items, previous, overwrite=replaceable is not None)
            elif previous.alive:
                raise self._written_by(previous)
            # If the names of a dead writer's objects are unknown, all objects will be deleted. So check them first.
            if items and previous.names is None and replaceable is not None and not private:
                replaceable(self.store, "", (OWNER_NAME,))
            self._write_owner(previous.number + 1, list(items) if previous.names is None else previous.names)
            try:
                # Since `items` was listed, another writer may have come, finished and gone.
                now = {path: item.size for path, item in self.look().items() if path != self._own}
                if now == {path: item.size for path, item in items.items()}:
                    return self._take_over(items, previous, resume=resume)
            except BaseException:
                # Otherwise our owner file would block this process when it tries again.
                with contextlib.suppress(OSError):
                    self.store.delete([self._own])
                raise
            self.store.delete([self._own])
        raise CheckpointExistsError(f"{self.store.url} is being written by another process.")

    def check_free(self, replaceable: Replaceable | None) -> None:
        """Raise CheckpointExistsError in the same cases as `take`. Writes nothing."""
        items = self.look()
        self._check(items, self._previous(items), overwrite=replaceable is not None)

    def look(self) -> dict[str, FileInfo]:
        """Return the directory's objects, by path."""
        return {item.path: item for item in self.store.list(recursive=True)}

    def _take_over(self, items: Mapping[str, FileInfo], previous: _Previous, *, resume: bool) -> dict[str, Finished]:
        """Delete the objects that a dead writer may have written. With `resume`, keep and return finished ones."""
        if previous.writer is not None:
            _end_uploads(self.store, previous.names)
        earlier = read_ledger(self.store, items) if resume and previous.writer is not None else {}
        kept = {path: record for path, record in earlier.items() if (self._names or {}).get(path) == record.nbytes}
        known = previous.names
        others = [path for path in items if known is None or path in known or path.startswith(f"{FOLDER}/")]
        others = [path for path in others if path not in kept and not _OWNER.fullmatch(path)]
        if kept:
            owner = previous.writer.owner if previous.writer is not None else None
            logger.info("continuing with %d objects that %s left at %s", len(kept), owner, self.store.url)
            others = [path for path in others if not path.startswith(f"{FOLDER}/")]
        # First delete the names that readers look for: without them, the rest is not a checkpoint.
        self.store.delete([path for path in others if path in self._last])
        self.store.delete([path for path in others if path not in self._last])
        self.store.delete([path for path in items if _OWNER.fullmatch(path)])
        return kept

    def _previous(self, items: Mapping[str, FileInfo]) -> _Previous:
        numbers = {int(match[1] or 0): path for path in items if (match := _OWNER.fullmatch(path))}
        if not numbers:
            return _Previous(-1, None, None)
        number = max(numbers)
        names = None
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            body = json.loads(self.store.read(numbers[number]).partition(b"\n")[2] or b"null")
            if isinstance(body, list) and all(isinstance(name, str) for name in body):
                names = frozenset(body)
        return _Previous(number, read_owner(self.store, numbers[number]), names)

    def _check(self, items: Mapping[str, FileInfo], previous: _Previous, *, overwrite: bool) -> None:
        """Raise CheckpointExistsError if a live process owns the directory, or its content must not be replaced."""
        url, alive = self.store.url, previous.alive
        if not items or (alive is False and previous.names is not None):
            return
        if alive:
            raise self._written_by(previous)
        if overwrite and previous.number < 0:
            raise CheckpointExistsError(
                f"{url} was created a moment ago by another process; it was not changed. Run the same command again."
            )
        if overwrite:
            return
        if previous.writer is not None:
            raise CheckpointExistsError(
                f"{url} exists already: {previous.writer.owner} is writing it or left it unfinished. If that process "
                "is dead, the same command with overwrite=True (--overwrite) continues its work."
            )
        raise exists_already(url)

    def _written_by(self, previous: _Previous) -> CheckpointExistsError:
        owner = previous.writer.owner if previous.writer is not None else "?"
        return CheckpointExistsError(f"{self.store.url} is being written by {owner}.")

    def _write_owner(self, number: int, found: Iterable[str]) -> None:
        """Write this process's owner file with a create-only put. If several processes try this, only one succeeds.

        Args:
            found: Existing paths that this process will delete. If it dies, the next writer deletes them.
        """
        self._own = f".ckptkit-owner-{number}.json" if number else OWNER_NAME
        text = json.dumps({"nonce": new_nonce(), "leased": False, **owner_json(self.store)})
        if self._names is not None:
            text += "\n" + json.dumps(sorted({*self._names, *found}))
        self._body = text.encode()
        try:
            self.store.write(self._own, self._body)
        except FileExistsError as error:
            raise CheckpointExistsError(f"{self.store.url} is being written by another process.") from error

    def check_copies(self) -> None:
        """Raise StorageError if the store can't copy objects. Call this before touching any old object."""
        probe = f"{FOLDER}/copy"
        try:
            self.store.copy_to(self._own, self.store, probe)
        finally:
            self.store.delete([probe])

    def check(self, finished: Ledger) -> None:
        """Raise StorageError unless the directory contains the objects that this process wrote, unchanged."""
        items = self.look()
        wanted = {path: n for path, n in (self._names or {}).items() if n >= 0 and path not in self._last}
        wrong = [path for path, n in wanted.items() if path not in items or items[path].size != n]
        records = [record for record in finished.done.values() if record.path not in wrong]
        changed = [record for record in records if not record.is_there(items.get(record.path))]
        if changed:  # or the store returns a new tag in each listing, as some gateways do: then only sizes tell
            again = self.look()
            for record in changed:
                first, second = items.get(record.path), again.get(record.path)
                if first is None or second is None or first.tag == second.tag or second.size != record.nbytes:
                    wrong.append(record.path)
        others = [path for path in items if _OWNER.fullmatch(path) and path != self._own]
        # On a store that ignores conditions, two writers may write the same owner file. The later one is the owner.
        if wrong or others or not self._is_ours():
            what = f"{wrong[0]} is not what was written" if wrong else "another process has taken it over"
            raise StorageError(f"{self.store.url} was changed while it was written: {what}. Nothing was published.")

    def leave(self, *, always: bool = False) -> bool:
        """Mark this process as dead in its owner file, so that another writer can take over the finished objects.

        Does nothing and returns False if another process has already taken over, or if no object is recorded as
        finished (except with `always`).
        """
        if not (always or self.store.list(FOLDER)) or not self._is_ours():
            return False
        body, _, names = self._body.partition(b"\n")
        dead = json.dumps({**json.loads(body), "started": "-"}).encode()
        self.store.write(self._own, dead + b"\n" + names, overwrite=True)
        return True

    def _is_ours(self) -> bool:
        try:
            return self.store.read(self._own) == self._body
        except FileNotFoundError:
            return False

    def clear(self, paths: Iterable[str]) -> None:
        """Delete `paths`, the records and the owner file, unless another process has taken over the directory."""
        names = list(paths)
        if names and not self._is_ours():
            return
        has_records = any(n >= ledger.WORTH for n in (self._names or {}).values())
        records = [item.path for item in self.store.list(FOLDER)] if has_records else []
        self.store.delete([*names, *records])
        self.store.delete([self._own])  # not in the same call: stores may delete the names of one call in any order


class _Staged(RemoteStore):
    """A store that remembers which paths it wrote. Keeps the files named in `last` in memory until `put_last`."""

    def __init__(
        self, store: RemoteStore, last: frozenset[str], prefix: str = "", root: _Staged | None = None, *, ledger: Ledger
    ) -> None:
        self.__dict__.update(store.__dict__)  # the same directory and connection
        self._plain = store
        self.ledger = ledger
        self.prefix = prefix
        self.root = root or self
        self.last = last
        self.written: list[str] = []
        self.held: dict[str, bytes] = {}
        self.may_appear = False
        """Whether a put of a file in `last` has failed, but the store may still carry it out."""

    def child(self, path: str) -> _Staged:
        return _Staged(super().child(path), self.last, f"{self.prefix}{path}/", self.root, ledger=self.ledger)

    def with_free_names(self) -> _Staged:
        return self

    def put_last(self) -> None:
        """Write the files named in `last`, which were kept in memory."""
        plain = self._plain.with_each_put(self._try)
        for path, data in sorted(self.held.items()):
            self.written.append(path)
            plain.write(path, data)

    def _try(self, put: Callable[[], str]) -> str:
        try:
            return put()
        except BaseException as error:
            self.may_appear |= may_yet_happen(error)
            raise

    # --- reading: the writer can read the files that are held back

    def info(self, path: str) -> FileInfo | None:
        held = self.root.held.get(self.prefix + path)
        return super().info(path) if held is None else FileInfo(path, "file", len(held), 0.0)

    def exists(self, path: str) -> bool:
        return self.prefix + path in self.root.held or super().exists(path)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        held = self.root.held.get(self.prefix + path)
        return super().read(path, start, stop) if held is None else held[start:stop]

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        rest = []
        for read in reads:
            held = self.root.held.get(self.prefix + read.path, b"")[read.start :]
            if read.view.nbytes and len(held) >= read.view.nbytes:
                read.view[:] = held[: len(read.view)]
            else:
                rest.append(read)
        super().read_many(rest, workers=workers)

    # --- writing

    @contextlib.contextmanager
    def writer(self, path: str, *, sync: bool = True) -> Iterator[Any]:
        if self.prefix + path in self.last:
            buffer = io.BytesIO()
            yield buffer
            self.write(path, buffer.getvalue())
            return
        self.root.written.append(self.prefix + path)
        with super().writer(path) as writer:
            yield writer

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        if self.prefix + path in self.last:
            self.root.held[self.prefix + path] = bytes(data)
            return
        self.root.written.append(self.prefix + path)
        super().write(path, data, overwrite=overwrite)
