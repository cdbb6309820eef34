"""What views of a store have in common: whatever is written goes to the store itself, at once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from ckptkit.storage.store import BlobWriter, Store

__all__ = ["View"]


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
