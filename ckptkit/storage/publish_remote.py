"""Publishes a directory on an object store under final keys; those that readers look for come last.

There is no rename, and what readers look for has plain names: so a writer of a directory owns all of it, until it is
done. Whoever comes after a dead one takes the place of its statement by a put that must not replace, ends its uploads,
and goes on with the objects that it had finished. No put of a writer replaces anything, so what a dead one had on its
way can come late only where nothing is yet; before the names that readers look for are written, all is compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ckptkit.errors import CheckpointExistsError, StorageError
from ckptkit.storage import ledger
from ckptkit.storage.ledger import FOLDER, Finished, Ledger, read_ledger
from ckptkit.storage.listing import View
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.owner import own_statement
from ckptkit.storage.retry import may_yet_happen
from ckptkit.storage.staging import Replaceable, Writer, is_interruption, new_nonce, read_owner, write_owner
from ckptkit.storage.store import BlobWriter, FileInfo, ReadInto, Store

__all__ = ["OWNER_NAME", "check_object", "check_remote", "stage_object", "stage_remote"]

logger = logging.getLogger(__name__)

NEW = ".ckptkit-new"  # below a directory that is replaced: where the new one lies until it is whole
OWNER_NAME = ".ckptkit-owner.json"  # first to come, last to go: the directory is being written
_OWNER = re.compile(r"\.ckptkit-owner(?:-(\d{1,9}))?\.json")  # numbered: who takes over from whom
_PROBE = re.compile(r"\.probe-[0-9a-f]{16}\.part")
_LOOKED_FOR = frozenset(["checkpoint.json", ".metadata", "manifest.safetensors", "config.json", "adapter_config.json"])
_TURNS = 3  # of who takes a place; each other one needs somebody who came and went meanwhile
_Items = Mapping[str, FileInfo]


@contextlib.contextmanager
def stage_remote(
    target: Store,
    *,
    replaceable: Replaceable | None,
    last: frozenset[str],
    names: Mapping[str, int] | None = None,
    resume: bool = False,
) -> Iterator[Store]:
    """Yield a store that writes to the final keys of `target` and holds back the names in `last`.

    Args:
        names: All that may be written, with its size where that is known, else -1. None: anything.
        resume: See `stage`; the store that is yielded has the `ledger`.
    """
    replaced = replaceable is not None and _is_finished(target)
    if replaced and replaceable is not None:
        replaceable(target, "", ())
    where = target.child(NEW) if replaced else target
    place = _Place(where, last, names)
    earlier = place.take(replaceable=replaceable, resume=resume, private=replaced)
    staged = _Staged(where, last, ledger=Ledger(where, earlier))
    old: list[str] = []
    try:
        yield staged
        place.check(staged.ledger)
        staged.put_last()
        if replaced and replaceable is not None:
            old = [item.path for item in target.list(recursive=True) if not item.path.startswith(f"{NEW}/")]
            replaceable(target, "", ())  # again: hours may have passed
            place.check_copies()
    except BaseException as error:
        with contextlib.suppress(OSError):
            # What may yet be put there by a request that nobody has answered must find what it names.
            left = staged.may_appear and place.leave(anyway=True)
            if not left and not (resume and is_interruption(error) and place.leave()):
                place.clear([*staged.written, *staged.ledger.earlier])
        raise
    made = _put_in_place(target, place, last, old) if replaced else []
    place.clear(made)


def check_remote(target: Store, replaceable: Replaceable | None) -> None:
    """Raise CheckpointExistsError where `stage_remote` would; nothing is written."""
    if replaceable is not None and _is_finished(target):
        replaceable(target, "", ())
    else:
        _Place(target, frozenset(), None).check_free(replaceable)


def _is_finished(target: Store) -> bool:
    """Tell whether something lies there that nobody states to be writing."""
    paths = [item.path for item in target.list(recursive=True) if not _PROBE.fullmatch(item.path)]
    return bool(paths) and not any(_OWNER.fullmatch(path) for path in paths)


def _put_in_place(target: Store, place: _Place, last: frozenset[str], old: Sequence[str]) -> list[str]:
    """Replace what lies in `target`, `old`, by what was staged below it, and return the names of that.

    The names that readers look for go first and come last: in between there is no checkpoint rather than a mixed one.
    Killed in it, the new one still lies whole in the staging folder, and the same command goes on from it.
    """
    try:
        paths = [path for path in place.look() if not _OWNER.fullmatch(path) and not path.startswith(f"{FOLDER}/")]
        target.delete([path for path in old if path in last or path in _LOOKED_FOR])
        late = [path for path in paths if path in last]
        for group in ([path for path in paths if path not in last], late):
            with ThreadPoolExecutor(8, thread_name_prefix="ckptkit-copy") as pool:
                list(pool.map(lambda path: _copy(place.store, path, target, path), group))
        target.delete([path for path in old if path not in paths])
    except BaseException:
        with contextlib.suppress(OSError):
            place.leave(anyway=True)
        logger.warning(
            "%s was being replaced, and is neither the old nor the new one. The new one lies whole in %s/%s: run the "
            "same command again to go on.",
            target.url,
            target.url,
            NEW,
        )
        raise
    return paths


def _copy(source: Store, path: str, target: Store, name: str) -> None:
    if not isinstance(source, RemoteStore) or not isinstance(target, RemoteStore):
        raise StorageError(f"{target.url}: objects can't be copied there.")
    source.copy_to(path, target, name)


def check_object(target: Store, name: str, replaceable: Replaceable | None) -> None:
    """Raise CheckpointExistsError where a single object may not be written; nothing is."""
    if target.info(name) is None:
        return
    if replaceable is None:
        raise CheckpointExistsError(
            f"{target.url}/{name} exists already; nothing was written. Choose another place, or replace it with "
            "overwrite=True (--overwrite)."
        )
    replaceable(target, name, ())


@contextlib.contextmanager
def stage_object(target: Store, name: str, *, replaceable: Replaceable | None) -> Iterator[Store]:
    """Yield the store to write a single object to: what a dead writer had begun to send of it is ended.

    What it replaces, where it may, stays until the block ends well: then a copy takes its place at once.

    Raises:
        CheckpointExistsError: It is there, or somebody else writes it, or may do so.
    """
    check_object(target, name, replaceable)
    overwrite = replaceable is not None
    statement = f".{name}{OWNER_NAME}"
    stated = read_owner(target, statement)
    where = target.child(f".{name}{NEW}") if overwrite else target
    if stated is not None:
        alive = stated.owner.alive()
        if alive or (alive is None and not overwrite):
            raise CheckpointExistsError(f"{target.url}/{name} is being written by {stated.owner}, or was.")
        _end_uploads(target, frozenset({name, f".{name}{NEW}/{name}"}))
        target.delete([statement])
    try:
        write_owner(target, statement, new_nonce())
    except FileExistsError as error:
        raise CheckpointExistsError(f"{target.url}/{name} is being written by another process.") from error
    try:
        if overwrite:
            where.delete_tree(name)  # a dead writer's
        yield where
        if overwrite:
            _copy(where, name, target, name)
    finally:
        if overwrite:
            where.delete([name])
        target.delete([statement])


def _end_uploads(target: Store, names: frozenset[str] | None) -> None:
    """Throw away what a dead writer has begun to send: it could not come late any more, and it costs."""
    if not isinstance(target, RemoteStore):
        return
    root = target._full("", root_allowed=True) + "/"
    found = target.unfinished_uploads()
    target.end_uploads([upload for upload in found if names is None or upload.name.removeprefix(root) in names])


@dataclass(frozen=True, slots=True)
class _Left:
    """Who was, or is, writing a directory, by the newest statement in it.

    Attributes:
        number: Of the statement; -1 where there is none.
        names: What that writer may have written; None where it does not say.
    """

    number: int
    writer: Writer | None
    names: frozenset[str] | None


class _Place:
    """The keys of a directory, and whose they are."""

    def __init__(self, target: Store, last: frozenset[str], names: Mapping[str, int] | None) -> None:
        self.store = target
        self._last = last
        self._names = names
        self._own = OWNER_NAME
        self._body = b""
        self._probes: list[str] = []

    def take(self, *, replaceable: Replaceable | None, resume: bool, private: bool) -> dict[str, Finished]:
        """Make the directory this writer's, and return what of it is finished already.

        Args:
            private: Nobody else but commands of ours writes there.

        Raises:
            CheckpointExistsError: It is somebody else's, or there is something.
        """
        for _ in range(_TURNS):
            items = self.look()
            left = self._left(items)
            alive = left.writer.owner.alive() if left.writer else None
            if items and not private:
                self._check_free(left, alive, overwrite=replaceable is not None)
            elif alive:
                raise CheckpointExistsError(
                    f"{self.store.url} is being written by {left.writer.owner if left.writer else '?'}."
                )
            # Where the writer is known, and is gone, what it may have written goes, and nothing else.
            known = left.names
            if items and known is None and replaceable is not None and not private:
                replaceable(self.store, "", (OWNER_NAME,))
            self._state(left.number + 1, list(items) if known is None else known)
            try:
                # Somebody else may have come, written all of it and gone, since this process looked.
                now = {path: item.size for path, item in self.look().items() if path != self._own}
                if now == {path: item.size for path, item in items.items()}:
                    return self._take_over(items, left, known, resume=resume)
            except BaseException:
                # This process may live on, and try again: what it says of itself would then be in its way.
                with contextlib.suppress(OSError):
                    self.store.delete([self._own])
                raise
            self.store.delete([self._own])
        raise CheckpointExistsError(f"{self.store.url} is being written by another process.")

    def check_free(self, replaceable: Replaceable | None) -> None:
        """Raise CheckpointExistsError where `take` would."""
        items = self.look()
        left = self._left(items)
        if items:
            alive = left.writer.owner.alive() if left.writer else None
            self._check_free(left, alive, overwrite=replaceable is not None)

    def look(self) -> dict[str, FileInfo]:
        """Return what lies there."""
        found = {item.path: item for item in self.store.list(recursive=True)}
        # Whoever tries the store leaves this for a moment, or where it is killed: it is nothing.
        self._probes = [path for path in found if _PROBE.fullmatch(path)]
        return {path: item for path, item in found.items() if path not in self._probes}

    def _take_over(
        self, items: _Items, left: _Left, known: frozenset[str] | None, *, resume: bool
    ) -> dict[str, Finished]:
        """Keep what is finished of what lies there, and delete the rest, of it what is in `known`."""
        if left.writer is not None:
            _end_uploads(self.store, left.names)
        earlier = read_ledger(self.store, items) if resume and left.writer is not None else {}
        kept = {path: said for path, said in earlier.items() if (self._names or {}).get(path) == said.nbytes}
        goes = [path for path in items if known is None or path in known or path.startswith(f"{FOLDER}/")]
        goes = [path for path in goes if path not in kept and not _OWNER.fullmatch(path)]
        if not kept:
            self._delete(goes)
        else:
            logger.info("going on with %d objects that %s left at %s", len(kept), left.writer, self.store.url)
            self._delete([path for path in goes if not path.startswith(f"{FOLDER}/")])
        self.store.delete([path for path in items if _OWNER.fullmatch(path)])
        return kept

    def _left(self, items: _Items) -> _Left:
        numbers = {int(match[1] or 0): path for path in items if (match := _OWNER.fullmatch(path))}
        if not numbers:
            return _Left(-1, None, None)
        number = max(numbers)
        names = None
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            said = json.loads(self.store.read(numbers[number]).partition(b"\n")[2] or b"null")
            if isinstance(said, list) and all(isinstance(name, str) for name in said):
                names = frozenset(said)
        return _Left(number, read_owner(self.store, numbers[number]), names)

    def _check_free(self, left: _Left, alive: bool | None, *, overwrite: bool) -> None:
        owner, url = left.writer.owner if left.writer else None, self.store.url
        if alive:
            raise CheckpointExistsError(f"{url} is being written by {owner}.")
        if left.number < 0 and overwrite:
            raise CheckpointExistsError(f"{url} appeared just now; it was left as it is. Run the same command again.")
        if overwrite or (alive is False and left.names is not None):
            return
        if owner is not None:
            raise CheckpointExistsError(
                f"{url} exists already; {owner} was, or is, writing it. Where it is dead, the same command with "
                "overwrite=True (--overwrite) goes on with what it has finished."
            )
        raise CheckpointExistsError(
            f"{url} exists already; nothing was written. Choose another place, or replace it with overwrite=True "
            "(--overwrite)."
        )

    def _state(self, number: int, goes: Iterable[str]) -> None:
        """State that this process writes here. One of several contenders wins: the put must not replace.

        Args:
            goes: What there was, and is to be deleted: whoever comes after this process knows that.
        """
        self._own = f".ckptkit-owner-{number}.json" if number else OWNER_NAME
        body = {"nonce": new_nonce(), "leased": False, **own_statement(self.store)}
        text = json.dumps(body) + ("" if self._names is None else "\n" + json.dumps(sorted({*self._names, *goes})))
        self._body = text.encode()
        try:
            self.store.write(self._own, self._body)
        except FileExistsError as error:
            raise CheckpointExistsError(f"{self.store.url} is being written by another process.") from error

    def _delete(self, paths: Iterable[str]) -> None:
        """Delete objects. Without the names that readers look for, what is left is no checkpoint."""
        names = list(paths)
        self.store.delete([path for path in names if path in self._last])
        self.store.delete([path for path in names if path not in self._last])

    def check_copies(self) -> None:
        """Raise StorageError where the store can't copy an object: before anything of the old is touched."""
        probe = f".probe-{new_nonce()}.part"
        try:
            _copy(self.store, self._own, self.store, probe)
        finally:
            self.store.delete([probe])

    def check(self, finished: Ledger) -> None:
        """Compare what lies there with what was written.

        Raises:
            StorageError: Somebody else writes here, or something was replaced.
        """
        items = {item.path: item for item in self.store.list(recursive=True)}
        wanted = {path: n for path, n in (self._names or {}).items() if n >= 0 and path not in self._last}
        wrong = [path for path, n in wanted.items() if path not in items or items[path].size != n]
        told = [said for said in finished.said.values() if said.path not in wrong]
        wrong += [said.path for said in told if not (said.is_there(items.get(said.path)) or self._is_still(said))]
        others = [path for path in items if _OWNER.fullmatch(path) and path != self._own]
        # A store that ignores conditions lets two writers make the same statement: the last one counts.
        if wrong or others or not self._is_ours():
            what = f"{wrong[0]} is not what was written" if wrong else "another process has taken it over"
            raise StorageError(f"{self.store.url} was changed while it was written: {what}. Nothing was published.")

    def _is_still(self, said: Finished) -> bool:
        """Tell whether an object is what it was, though a listing gives it another tag than a look did.

        Gateways change the tags in headers, and not those in listings; some give another one each time.
        """
        looks = [self.store.info(said.path) for _ in range(2)]
        if looks[0] is None or looks[1] is None:
            return False
        return said.is_there(looks[1]) or (looks[0].tag != looks[1].tag and looks[1].size == said.nbytes)

    def leave(self, *, anyway: bool = False) -> bool:
        """Leave what is finished to whoever writes the same next; False where there is nothing. This process may live
        on: it says that it is gone.

        Args:
            anyway: Also where nothing is said of what is finished.
        """
        if not (anyway or self.store.list(FOLDER)) or not self._is_ours():
            return False
        body, _, names = self._body.partition(b"\n")
        gone = json.dumps({**json.loads(body), "started": "-"}).encode()
        self.store.write(self._own, gone + b"\n" + names, overwrite=True)
        return True

    def _is_ours(self) -> bool:
        try:
            return self.store.read(self._own) == self._body
        except FileNotFoundError:
            return False

    def clear(self, paths: Iterable[str]) -> None:
        """Delete objects, what was said of any, and the statement. Nothing, where somebody else has taken over."""
        names = list(paths)
        if names and not self._is_ours():
            return
        spoken_of = any(n >= ledger.WORTH for n in (self._names or {}).values())
        said = [item.path for item in self.store.list(FOLDER)] if spoken_of else []
        self.store.delete([*names, *said, *self._probes, self._own])


class _Staged(View):
    """A Store that remembers what it wrote, and keeps the names in `last` in memory until the end."""

    def __init__(
        self, inner: Store, last: frozenset[str], prefix: str = "", root: _Staged | None = None, *, ledger: Ledger
    ) -> None:
        self.inner = self._store = inner
        self.ledger = ledger
        self.url = inner.url
        self.asking_costs, self.sizes_are_free = inner.asking_costs, inner.sizes_are_free
        self.prefix = prefix
        self.root = root or self
        self.last = last
        self.written: list[str] = []
        self.held: dict[str, bytes] = {}
        self.may_appear = False
        """Whether a name in `last` may come to be there, though the store has not said so."""
        self._lock = threading.Lock()

    def child(self, path: str) -> _Staged:
        return _Staged(self.inner.child(path), self.last, f"{self.prefix}{path}/", self.root, ledger=self.ledger)

    def _note(self, path: str) -> None:
        with self.root._lock:
            self.root.written.append(self.prefix + path)

    def put_last(self) -> None:
        """Write what was held back."""
        inner = self.inner.with_each_put(self._try) if isinstance(self.inner, RemoteStore) else self.inner
        for path, data in sorted(self.held.items()):
            self._note(path)
            inner.write(path, data)

    def _try(self, put: Callable[[], str]) -> str:
        try:
            return put()
        except BaseException as error:
            self.may_appear |= may_yet_happen(error)
            raise

    # --- reading: what is held back is there for the one who wrote it

    def info(self, path: str) -> FileInfo | None:
        held = self.root.held.get(self.prefix + path)
        return self.inner.info(path) if held is None else FileInfo(path, "file", len(held), 0.0)

    def exists(self, path: str) -> bool:
        return self.prefix + path in self.root.held or self.inner.exists(path)

    def fetch(self, paths: Iterable[str]) -> None:
        self.inner.fetch(paths)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        return self.inner.list(path, recursive=recursive)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        held = self.root.held.get(self.prefix + path)
        return self.inner.read(path, start, stop) if held is None else held[start:stop]

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        rest = []
        for read in reads:
            data = None if (held := self.root.held.get(self.prefix + read.path)) is None else held[read.start :]
            if data is None or len(data) < len(read.view):
                rest.append(read)
            else:
                read.view[:] = data[: len(read.view)]
        if rest:
            self.inner.read_many(rest, workers=workers)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    # --- writing

    def writer(self, path: str, *, sync: bool = True) -> AbstractContextManager[BlobWriter]:
        if self.prefix + path in self.last:
            return self._hold(path)
        self._note(path)
        return self.inner.writer(path, sync=sync)

    @contextlib.contextmanager
    def _hold(self, path: str) -> Iterator[BlobWriter]:
        buffer = _Buffer()
        yield buffer
        self.write(path, bytes(buffer.data))

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        if self.prefix + path in self.last:
            self.root.held[self.prefix + path] = bytes(data)
            return
        self._note(path)
        self.inner.write(path, data, overwrite=overwrite, sync=sync)

    def existing(self) -> _Staged:
        return self

    def with_free_names(self) -> _Staged:
        return self

    def with_each_put(self, around: Callable[[Callable[[], str]], str]) -> _Staged:
        return self


class _Buffer:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data
