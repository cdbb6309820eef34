"""Files of an object store that are fetched whole before anybody knows that they are needed: a round trip less."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptkit.errors import CkptkitError
from ckptkit.storage.paths import checked_path
from ckptkit.storage.store import FileInfo, ReadInto, Store
from ckptkit.storage.view import View

if TYPE_CHECKING:
    from ckptkit.storage.remote import RemoteStore

__all__ = ["ReadAhead", "fetch_ahead"]

logger = logging.getLogger(__name__)


def fetch_ahead(store: RemoteStore, groups: Iterable[Sequence[FileInfo]]) -> ReadAhead:
    """Return a view of `store` for which the files of each group are on their way; nothing waits for them here.

    Args:
        groups: Files as a listing has just shown them, which nobody changes; those of a group come together.
    """
    held: dict[str, tuple[_Group, str]] = {}
    for items in groups:
        group = _Group(store, items)
        held.update((item.path, (group, item.path)) for item in items)
    return ReadAhead(store, held)


class _Group:
    """Files that are on their way together."""

    def __init__(self, store: RemoteStore, items: Sequence[FileInfo]) -> None:
        self._views = {item.path: memoryview(bytearray(item.size)) for item in items}
        self._wait: Callable[[], None] | None = store.begin_many(
            [ReadInto(path, 0, view) for path, view in self._views.items()]
        )
        self._lock = threading.Lock()

    def get(self, path: str) -> memoryview | None:
        """Wait, and return what a file holds; None where the group can't be had."""
        with self._lock:
            if self._wait is not None:
                wait, self._wait = self._wait, None
                try:
                    wait()
                except (CkptkitError, OSError) as error:
                    logger.debug("could not be fetched ahead: %s", error)
                    self._views.clear()
                except BaseException:
                    self._views.clear()
                    raise
        return self._views.get(path)


class ReadAhead(View):
    """A Store that serves what was fetched ahead from memory, and asks the store itself for all else.

    What could not be fetched is read again by whoever needs it, who then gets the store's own error.
    """

    def __init__(self, store: Store, held: Mapping[str, tuple[_Group, str]]) -> None:
        self._store = store
        self._held = held
        self.url = store.url

    @property
    def local_root(self) -> str | None:
        return self._store.local_root

    def child(self, path: str) -> Store:
        below = f"{checked_path(path)}/"
        held = {name.removeprefix(below): found for name, found in self._held.items() if name.startswith(below)}
        store = self._store.child(path)
        return ReadAhead(store, held) if held else store

    def _fetched(self, path: str) -> memoryview | None:
        group, name = self._held.get(path, (None, ""))
        return None if group is None else group.get(name)

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

    # --- looking: as the store does

    def info(self, path: str) -> FileInfo | None:
        return self._store.info(path)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        return self._store.list(path, recursive=recursive)

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()
