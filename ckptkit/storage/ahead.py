"""Files of an object store that are fetched whole before anybody knows that they are needed: a round trip less."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress

from ckptkit.errors import CkptkitError
from ckptkit.storage.paths import checked_path
from ckptkit.storage.store import BlobWriter, FileInfo, ReadInto, Store

__all__ = ["ReadAhead", "fetch_ahead"]

logger = logging.getLogger(__name__)

_Fetched = tuple[Future[Mapping[str, memoryview]], str]
"""What brings the files of a group, and the name of the file there."""


def fetch_ahead(store: Store, groups: Iterable[Sequence[FileInfo]]) -> ReadAhead:
    """Return a view of `store` for which the files of each group are on their way; nothing waits for them here.

    Args:
        groups: Files as a listing has just shown them, which nobody changes; those of a group come together.
    """
    wanted = [group for group in groups if group]
    held: dict[str, _Fetched] = {}
    if wanted:
        pool = ThreadPoolExecutor(len(wanted), thread_name_prefix="ckptkit-ahead")
        for group in wanted:
            fetched = pool.submit(_fetch, store, group)
            held.update((item.path, (fetched, item.path)) for item in group)
        pool.shutdown(wait=False)
    return ReadAhead(store, held)


def _fetch(store: Store, items: Sequence[FileInfo]) -> Mapping[str, memoryview]:
    views = {item.path: memoryview(bytearray(item.size)) for item in items}
    store.read_many([ReadInto(path, 0, view) for path, view in views.items()])
    return views


class ReadAhead:
    """A Store that serves what was fetched ahead from memory, and asks the store itself for all else.

    What could not be fetched is read again by whoever needs it, who then gets the store's own error.
    """

    def __init__(self, store: Store, held: Mapping[str, _Fetched]) -> None:
        self._store = store
        self._held = held
        self.url = store.url

    @property
    def local_root(self) -> str | None:
        return self._store.local_root

    def child(self, path: str) -> Store:
        below = f"{checked_path(path)}/"
        held = {name.removeprefix(below): found for name, found in self._held.items() if name.startswith(below)}
        return ReadAhead(self._store.child(path), held)

    def _fetched(self, path: str) -> memoryview | None:
        if path not in self._held:
            return None
        fetched, name = self._held[path]
        with suppress(CkptkitError, OSError):
            return fetched.result()[name]
        logger.debug("%s/%s could not be fetched ahead", self.url, path)
        return None

    # --- reading

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        found = self._fetched(path)
        return self._store.read(path, start, stop) if found is None else bytes(found[start:stop])

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        rest = []
        for item in reads:
            found = self._fetched(item.path)
            if found is None or item.start + item.view.nbytes > len(found):
                rest.append(item)  # the store itself says so where a file ends early
            else:
                item.view.cast("B")[:] = found[item.start : item.start + item.view.nbytes]
        if rest:
            self._store.read_many(rest, workers=workers)

    # --- looking and writing: as the store does

    def info(self, path: str) -> FileInfo | None:
        return self._store.info(path)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        return self._store.list(path, recursive=recursive)

    def writer(self, path: str, *, sync: bool = True) -> AbstractContextManager[BlobWriter]:
        return self._store.writer(path, sync=sync)

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        self._store.write(path, data, overwrite=overwrite, sync=sync)

    def delete(self, paths: Iterable[str]) -> None:
        self._store.delete(paths)

    def delete_tree(self, path: str) -> None:
        self._store.delete_tree(path)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()
