"""Lists an object store once, and answers many lookups from this listing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from ckptkit.storage.objects import KNOWN_BYTES, RemoteStore
from ckptkit.storage.store import FileInfo, ReadInto, Store, checked_path


def snapshot(store: Store, below: str = "") -> Store:
    """Return a snapshot of `store`, which shows everything under `below` as it is now, even after later changes.

    Returns `store` itself if the listing would take too many requests, or if lookups are free (on a file system).
    """
    if not isinstance(store, RemoteStore) or isinstance(store, Snapshot):
        return store
    found = store.list_at_once(below)
    return store if found is None else Snapshot(store, below, found)


class Snapshot(RemoteStore):
    """Answers `info` and `list` from one listing, and downloads each version of a small file only once.

    Paths that are not under `below` are looked up in the store. Writes do not change the snapshot.

    Args:
        found: All files under `below`, sorted by path.
    """

    sizes_are_free = True

    def __init__(self, store: RemoteStore, below: str, found: Sequence[FileInfo]) -> None:
        self.__dict__.update(store.__dict__)  # the same directory and connection
        self._below = f"{below}/" if below else ""
        self._names = [item.path for item in found]
        self._found = found

    def _file(self, path: str) -> FileInfo | None:
        at = bisect_left(self._names, path)
        return self._found[at] if at < len(self._names) and self._names[at] == path else None

    def _inside(self, path: str) -> Sequence[FileInfo]:
        if not path:
            return self._found
        names = self._names
        return self._found[bisect_left(names, f"{path}/") : bisect_left(names, f"{path}0")]  # "0" comes right after "/"

    def exists(self, path: str) -> bool:
        found = self.info(path)
        return found is not None and found.kind == "file"

    def info(self, path: str) -> FileInfo | None:
        if not path.startswith(self._below):
            return super().info(path)
        checked_path(path, root_allowed=True)
        found = self._file(path)
        return FileInfo(path, "directory", 0, 0.0) if found is None and self._inside(path) else found

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        if not f"{path}/".startswith(self._below):
            return super().list(path, recursive=recursive)
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
            return super().read(path, start, stop)
        checked_path(path)
        item = self._file(path)
        if item is None:
            raise FileNotFoundError(f"{self.url}/{path} does not exist")
        if item.size > KNOWN_BYTES:
            return super().read(path, start, stop)
        full, known = self._full(path), self._connection.known
        data = known.get(full, item.tag)
        if data is None:
            data = super().read(path, 0, item.size + 1) if item.size else super().read(path)
            # If the length differs, the file was replaced after the listing, and `data` has another tag.
            if len(data) == item.size:
                known.put(full, item.tag, data)
            else:
                data = super().read(path)
        return data[start:stop]

    def fetch(self, paths: Iterable[str]) -> None:
        """Download small files concurrently, and cache them for later reads. Skips files that are already cached."""
        known = self._connection.known
        items = [item for path in paths if (item := self._file(path)) and item.tag and 0 < item.size <= KNOWN_BYTES]
        new = [item for item in items if known.get(self._full(item.path), item.tag) is None]
        # Ask for one byte more than the listed size. If the byte exists, the file was replaced after the listing.
        views = [memoryview(bytearray(item.size + 1)) for item in new]
        jobs = [(i.path, 0, i.size + 1, [ReadInto(i.path, 0, view)]) for i, view in zip(new, views, strict=True)]
        for item, view, answer in zip(new, views, self._get_once(jobs), strict=True):
            if not isinstance(answer, BaseException) and answer[0] == item.size:
                known.put(self._full(item.path), item.tag, bytes(view[: item.size]))
