"""Writes under keys that no other process uses. So writes run in parallel, and need not check whether a key exists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from ckptkit.storage.body import Content
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.store import FileInfo, ReadInto, Store


def attempt_store(root: Store, path: str) -> Store:
    """Return a store for the folder `path` under `root`. No other process may write to this folder."""
    return AttemptStore(root.child(path)) if isinstance(root, RemoteStore) else root.child(path)


class AttemptStore(RemoteStore):
    """A save attempt's folder on an object store.

    `write` and `writer` may return before a small file has been sent. `settle` waits for all files, and raises the
    first error. Lent memory must not change until then. Every read first calls `settle`.
    """

    def __init__(self, store: RemoteStore) -> None:
        self.__dict__.update(store.__dict__)  # the same directory and connection
        self._sending: list[Future[None]] = []
        self._arrived: dict[str, int] = {}  # sizes of confirmed objects, by full name

    def child(self, path: str) -> AttemptStore:
        child = AttemptStore(super().child(path))
        child._sending, child._arrived = self._sending, self._arrived
        return child

    def settle(self) -> None:
        """Wait for all writes. If a write failed, this call and all later calls raise the first error."""
        sending = list(self._sending)
        wait(sending)
        for future in sending:
            future.result()

    def arrived(self) -> dict[str, int]:
        """Return {path: size} for the files that the store has confirmed to be complete, by returning a tag."""
        start = len(self._full("", root_allowed=True)) + 1
        return {full[start:]: nbytes for full, nbytes in self._arrived.items()}

    # --- writing

    def _confirmed(self, full: str, nbytes: int, tag: str) -> None:
        if tag:
            self._arrived[full] = nbytes
        else:
            self._arrived.pop(full, None)

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

        self._sending.append(self._connection.upload(put, self._api.held(content)))
        return ""  # the tag is not known yet

    def delete(self, paths: Iterable[str]) -> None:
        names = list(paths)
        self.settle()  # an object that arrives after the deletion would remain
        super().delete(names)
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

    def exists(self, path: str) -> bool:
        self.settle()
        return super().exists(path)
