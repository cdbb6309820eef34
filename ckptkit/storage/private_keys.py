"""Writes under keys that only one writer knows: no checks before a write, small files in parallel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from ckptkit.storage.body import Content
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.store import FileInfo, ReadInto, Store

__all__ = ["AttemptStore", "attempt_store"]


def attempt_store(root: Store, path: str) -> Store:
    """Return the store of the folder at `path` below `root` for the one writer that knows its keys."""
    return AttemptStore.of(root, path) if isinstance(root, RemoteStore) else root.child(path)


class AttemptStore(RemoteStore):
    """The folder of an attempt on an object store.

    A small file is on its way when `write` or the block of a `writer` returns. `settle` waits, and raises what went
    wrong: until then nothing may be said of what was written, and what was lent to a writer stays lent. Reading
    settles first.
    """

    @classmethod
    def of(cls, root: RemoteStore, path: str) -> AttemptStore:
        """Return the store of `path` below `root`, over the same connection."""
        return cls._at(root.child(path), _Underway())

    @classmethod
    def _at(cls, store: RemoteStore, underway: _Underway) -> AttemptStore:
        made = cls(store._place, storage_options=store.storage_options)
        made._connection, made._api, made._underway = store._connection, store._api, underway
        return made

    _underway: _Underway

    def child(self, path: str) -> AttemptStore:
        return self._at(super().child(path), self._underway)

    def settle(self) -> None:
        """Wait for all that was written. Raises the first failure, to each that asks."""
        self._underway.wait()

    def arrived(self) -> dict[str, int]:
        """Return the size of each file that this process wrote and of which the store has said, by its tag, that it
        has it: what it has put together of what it was given, not only an answer on the way."""
        start = len(self._full("", root_allowed=True)) + 1
        return {full[start:]: nbytes for full, nbytes in self._underway.arrived.items()}

    # --- writing

    def _told(self, full: str, nbytes: int, tag: str) -> None:
        self._underway.told(full, nbytes if tag else None)

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        if overwrite:  # after what it replaces
            self.settle()
            super().write(path, data, overwrite=True)
            self._told(self._full(path), len(data), "")
            return
        self._put(path, self._full(path), Content.of(bytes(data)))

    def _put(self, path: str, full: str, data: bytes | Content) -> str:
        content, put_now = Content.of(data), super()._put

        def put() -> None:
            self._told(full, content.nbytes, put_now(path, full, content))

        self._underway.add(self._connection.upload(put, self._api.held(content)))
        return ""  # not told yet

    def _delete(self, names: Sequence[str], *, folder: str = "") -> None:
        self.settle()  # what arrives after the deletion would stay
        super()._delete(names, folder=folder)
        for name in names:
            self._told(self._full(name), 0, "")

    # --- reading

    def info(self, path: str) -> FileInfo | None:
        self.settle()
        return super().info(path)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        self.settle()
        return super().list(path, recursive=recursive)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        self.settle()
        return super().read(path, start, stop)

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        self.settle()
        super().read_many(reads, workers=workers)


class _Underway:
    """Writes of one attempt that were begun, and the first failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[Future[object]] = []
        self._failure: BaseException | None = None
        self.arrived: dict[str, int] = {}  # by full name

    def told(self, full: str, nbytes: int | None) -> None:
        if nbytes is None:  # nothing is known of it
            self.arrived.pop(full, None)
        else:
            self.arrived[full] = nbytes

    def add(self, future: Future[object]) -> None:
        with self._lock:
            self._futures.append(future)

    def wait(self) -> None:
        while True:
            with self._lock:
                if not self._futures:
                    break
                future = self._futures[0]
            error = future.exception()
            with self._lock:
                self._failure = self._failure or error
                if future in self._futures:
                    self._futures.remove(future)
        if self._failure is not None:
            raise self._failure
