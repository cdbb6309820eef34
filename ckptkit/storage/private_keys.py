"""Writes under keys that have only one writer. Small files are sent in parallel, without first checking the keys."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from ckptkit.storage.body import Content
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.store import FileInfo, ReadInto, Store


def attempt_store(root: Store, path: str) -> Store:
    """Return a store for the folder `path` under `root`, which has no other writer."""
    return AttemptStore.of(root, path) if isinstance(root, RemoteStore) else root.child(path)


class AttemptStore(RemoteStore):
    """A save attempt's folder on an object store.

    `write` and `writer` return while a small file is still being sent. `settle` waits for all files and raises the
    first failure. Until then, memory that was lent to a writer must not change. Every read calls `settle` first.
    """

    _pending: _Pending

    @classmethod
    def of(cls, root: RemoteStore, path: str) -> AttemptStore:
        """Return the store of `path` under `root`, which uses the same connection."""
        return cls._at(root.child(path), _Pending())

    @classmethod
    def _at(cls, store: RemoteStore, pending: _Pending) -> AttemptStore:
        made = cls(store._place, storage_options=store.storage_options)
        made._connection, made._api, made._pending = store._connection, store._api, pending
        return made

    def child(self, path: str) -> AttemptStore:
        return self._at(super().child(path), self._pending)

    def settle(self) -> None:
        """Wait for all writes. If one failed, every call raises the first failure."""
        self._pending.wait()

    def arrived(self) -> dict[str, int]:
        """Return {path: size} for the files that this process wrote and for which the store has returned a tag.

        The tag confirms that the object is complete, not just that it was sent.
        """
        start = len(self._full("", root_allowed=True)) + 1
        return {full[start:]: nbytes for full, nbytes in self._pending.arrived.items()}

    # --- writing

    def _confirmed(self, full: str, nbytes: int, tag: str) -> None:
        if tag:
            self._pending.arrived[full] = nbytes
        else:
            self._pending.arrived.pop(full, None)

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        if overwrite:  # an earlier write of the same file must end first
            self.settle()
            super().write(path, data, overwrite=True)
            self._confirmed(self._full(path), len(data), "")
            return
        self._put(path, self._full(path), Content.of(bytes(data)))

    def _put(self, path: str, full: str, data: bytes | Content) -> str:
        content, put_now = Content.of(data), super()._put

        def put() -> None:
            self._confirmed(full, content.nbytes, put_now(path, full, content))

        self._pending.add(self._connection.upload(put, self._api.held(content)))
        return ""  # the tag is not known yet

    def _delete(self, names: Sequence[str], *, folder: str = "") -> None:
        self.settle()  # an object that arrives after the deletion would remain
        super()._delete(names, folder=folder)
        for name in names:
            self._confirmed(self._full(name), 0, "")

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


class _Pending:
    """The pending writes of one attempt, and the first failure."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[Future[object]] = []
        self._failure: BaseException | None = None
        self.arrived: dict[str, int] = {}  # sizes of confirmed objects, by full name

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
