"""Answers many lookups on an object store from one listing, without further requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ckptkit.storage.store import BlobWriter, FileInfo, ReadInto, Store, UnfinishedUpload, Uploads, checked_path

if TYPE_CHECKING:
    from ckptkit.storage.objects import RemoteStore


class View:
    """A Store that forwards every call to another store. Subclasses override some methods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.url, self.asking_costs, self.sizes_are_free = store.url, store.asking_costs, store.sizes_are_free

    def child(self, path: str) -> Store:
        return self._store.child(path)

    def info(self, path: str) -> FileInfo | None:
        return self._store.info(path)

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        return self._store.list(path, recursive=recursive)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.read(path, start, stop)

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self._store.read_into(path, start, view)

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        self._store.read_many(reads, workers=workers)

    def fetch(self, paths: Iterable[str]) -> None:
        self._store.fetch(paths)

    def writer(self, path: str, *, sync: bool = True) -> AbstractContextManager[BlobWriter]:
        return self._store.writer(path, sync=sync)

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        self._store.write(path, data, overwrite=overwrite, sync=sync)

    def delete(self, paths: Iterable[str]) -> None:
        self._store.delete(paths)

    def delete_tree(self, path: str) -> None:
        self._store.delete_tree(path)

    def existing(self) -> Store:
        return self._store.existing()

    def with_free_names(self) -> Store:
        return self._store.with_free_names()

    def with_each_put(self, around: Callable[[Callable[[], str]], str]) -> Store:
        return self._store.with_each_put(around)

    @property
    def has_conditional_writes(self) -> bool | None:
        return self._store.has_conditional_writes

    def try_conditional(self, path: str, data: bytes) -> None:
        self._store.try_conditional(path, data)

    def claim(self, path: str, data: bytes, *, looked: bool) -> None:
        self._store.claim(path, data, looked=looked)

    def settle(self) -> None:
        self._store.settle()

    def arrived(self) -> dict[str, int]:
        return self._store.arrived()

    def unfinished_uploads(self, path: str = "", *, older_than_s: float = 0.0) -> Uploads:
        return self._store.unfinished_uploads(path, older_than_s=older_than_s)

    def end_uploads(self, found: Sequence[UnfinishedUpload]) -> None:
        self._store.end_uploads(found)

    def sync_directory(self, path: str = "") -> None:
        self._store.sync_directory(path)


def snapshot(store: Store, below: str = "") -> Store:
    """Return a view of `store` that keeps showing everything under `below` as it is now.

    Makes one request per thousand objects. Returns `store` itself if lookups are free, as on a file system, or if the
    listing would take too many requests.
    """
    from ckptkit.storage.objects import RemoteStore

    if not isinstance(store, RemoteStore):
        return store
    found = store.list_at_once(below)
    return store if found is None else Snapshot(store, below, found)


class Snapshot(View):
    """A Store that answers `info` and `list` from one listing, and downloads each version of a small file only once.

    Paths outside the listing are looked up in the store, and all writes go there. Writes do not change the snapshot.

    Args:
        found: All files under `below`, sorted by path. Paths are relative to the store.
    """

    def __init__(self, store: RemoteStore, below: str, found: Sequence[FileInfo]) -> None:
        super().__init__(store)
        self._remote = store
        self._below = f"{below}/" if below else ""
        self._names = [item.path for item in found]
        self._found = found
        self.sizes_are_free = True

    def _file(self, path: str) -> FileInfo | None:
        at = bisect_left(self._names, path)
        return self._found[at] if at < len(self._names) and self._names[at] == path else None

    def _inside(self, path: str) -> Sequence[FileInfo]:
        if not path:
            return self._found
        names = self._names
        return self._found[bisect_left(names, f"{path}/") : bisect_left(names, f"{path}0")]  # "0" follows "/"

    def exists(self, path: str) -> bool:
        found = self.info(path)
        return found is not None and found.kind == "file"

    def info(self, path: str) -> FileInfo | None:
        if not path.startswith(self._below):
            return self._store.info(path)
        checked_path(path, root_allowed=True)
        found = self._file(path)
        return FileInfo(path, "directory", 0, 0.0) if found is None and self._inside(path) else found

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        if not f"{path}/".startswith(self._below):
            return self._store.list(path, recursive=recursive)
        checked_path(path, root_allowed=True)
        start = len(path) + 1 if path else 0
        found: dict[tuple[str, bool], FileInfo] = {}  # an object and a folder can have the same name
        for item in self._inside(path):
            head, separator, _ = item.path[start:].partition("/")
            if recursive or not separator:
                found[item.path, False] = item
            else:
                folder = item.path[:start] + head
                found.setdefault((folder, True), FileInfo(folder, "directory", 0, 0.0))
        return [item for _, item in sorted(found.items())]

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if not path.startswith(self._below):
            return self._store.read(path, start, stop)
        checked_path(path)
        found = self._file(path)
        if found is None:
            raise FileNotFoundError(f"{self.url}/{path} does not exist")
        return self._remote.read_listed(found, start, stop)

    def fetch(self, paths: Iterable[str]) -> None:
        """Download small files concurrently, before they are read. Skips files that are already cached."""
        found = [self._file(path) for path in paths]
        self._remote.fetch_listed([item for item in found if item is not None])
