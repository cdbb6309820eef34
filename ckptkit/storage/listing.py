"""A snapshot of one listing of an object store, for many lookups without further requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ckptkit.storage.store import BlobWriter, FileInfo, ReadInto, Store, UnfinishedUpload, Uploads, checked_path

if TYPE_CHECKING:
    from ckptkit.storage.objects import RemoteStore

__all__ = ["Snapshot", "snapshot", "View"]

# What views of a store have in common: whatever is written goes to the store itself, at once.


class View:
    """The writing half of a Store that shows another one."""

    _store: Store

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

    def with_free_names(self) -> Store:
        return self._store.with_free_names()

    def sync_directory(self, path: str = "") -> None:
        self._store.sync_directory(path)


def snapshot(store: Store, below: str = "") -> Store:
    """Return a view of `store` in which all that lies below `below` is as it was at this moment.

    It costs one request for a thousand objects. Where that can't be had, and on a file system, where looking costs
    nothing, it is the store itself.
    """
    from ckptkit.storage.objects import RemoteStore

    if not isinstance(store, RemoteStore):
        return store
    found = store.list_at_once(below)
    return store if found is None else Snapshot(store, below, found)


class Snapshot(View):
    """A Store whose `info` and `list` tell what was there, and whose small files are fetched once for each content.

    What it does not cover, and all that is written, goes to the store at once; the view does not change.

    Args:
        found: All files below `below`, sorted by path, paths relative to the store.
    """

    def __init__(self, store: RemoteStore, below: str, found: Sequence[FileInfo]) -> None:
        self._store: RemoteStore = store
        self._below = f"{below}/" if below else ""
        self._names = [item.path for item in found]
        self._found = found
        self.url = store.url
        self.asking_costs, self.sizes_are_free = store.asking_costs, True

    def child(self, path: str) -> Store:
        return self._store.child(path)

    def free_bytes(self) -> int | None:
        return None

    # --- looking

    def exists(self, path: str) -> bool:
        found = self.info(path)
        return found is not None and found.kind == "file"

    def _file(self, path: str) -> FileInfo | None:
        at = bisect_left(self._names, path)
        return self._found[at] if at < len(self._names) and self._names[at] == path else None

    def _inside(self, path: str) -> Sequence[FileInfo]:
        if not path:
            return self._found
        return self._found[
            bisect_left(self._names, f"{path}/") : bisect_left(self._names, f"{path}0")
        ]  # "0" is "/" + 1

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
        found: dict[tuple[str, bool], FileInfo] = {}  # there may be an object and a folder of one name
        for item in self._inside(path):
            head, separator, _ = item.path[start:].partition("/")
            if recursive or not separator:
                found[item.path, False] = item
            else:
                folder = item.path[:start] + head
                found.setdefault((folder, True), FileInfo(folder, "directory", 0, 0.0))
        return [item for _, item in sorted(found.items())]

    # --- reading

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if not path.startswith(self._below):
            return self._store.read(path, start, stop)
        checked_path(path)
        found = self._file(path)
        if found is None:
            raise FileNotFoundError(f"{self.url}/{path} does not exist")
        return self._store.read_listed(found, start, stop)

    def fetch(self, paths: Iterable[str]) -> None:
        """Fetch small files that are about to be read, all at once, where they are not known."""
        found = [self._file(path) for path in paths]
        self._store.fetch_listed([item for item in found if item is not None])

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self._store.read_into(path, start, view)

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        self._store.read_many(reads, workers=workers)
