"""Keys that one writer alone knows: nothing is asked before a write, and small files go side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ckptkit.storage.content import Content
from ckptkit.storage.remote import RemoteStore
from ckptkit.storage.store import FileInfo, ReadInto

__all__ = ["AttemptStore"]


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

    # --- writing

    def _finish(self, path: str, full: str, content: Content) -> None:
        self._later(lambda: self._put(path, full, content), content)

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        if overwrite:  # after what it replaces
            self.settle()
            super().write(path, data, overwrite=True)
            return
        full, content = self._full(path), Content.of(bytes(data))
        self._later(lambda: self._put(path, full, content), content)

    def _later(self, put: Callable[[], object], content: Content) -> None:
        self._underway.add(self._connection.upload(put, self._api.held(content)))

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
