"""A whole directory on an object store: final keys, those that readers look for last."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from ckptkit.errors import CheckpointExistsError
from ckptkit.storage.staging import new_nonce, read_owner, write_owner
from ckptkit.storage.store import BlobWriter, FileInfo, ReadInto, Store

__all__ = ["OWNER_NAME", "stage_remote"]

logger = logging.getLogger(__name__)

OWNER_NAME = ".ckptkit-owner.json"  # first to come, last to go: the directory is being written


@contextlib.contextmanager
def stage_remote(target: Store, *, overwrite: bool, last: frozenset[str]) -> Iterator[Store]:
    """Yield a store that writes to the final keys of `target` and holds back the names in `last`."""
    _clear(target, overwrite=overwrite, last=last)
    write_owner(target, OWNER_NAME, new_nonce())
    staged = _Staged(target, last)
    try:
        yield staged
        staged.put_last()
    except BaseException:
        with contextlib.suppress(OSError):
            target.delete([*staged.written, OWNER_NAME])
        raise
    target.delete([OWNER_NAME])


def _clear(target: Store, *, overwrite: bool, last: frozenset[str]) -> None:
    """Make `target` free to write. Raises CheckpointExistsError."""
    names = [item.path for item in target.list(recursive=True)]
    if not names:
        return
    stated = read_owner(target, OWNER_NAME) if OWNER_NAME in names else None
    alive = stated.owner.alive() if stated else None
    if stated and alive is False:
        logger.info("removing what %s left at %s", stated.owner, target.url)
        target.delete([name for name in names if name != OWNER_NAME])
        target.delete([OWNER_NAME])
        return
    if alive:
        raise CheckpointExistsError(
            f"{target.url} is being written by {stated.owner if stated else 'another process'}."
        )
    if not overwrite:
        writer = f"; {stated.owner} was, or is, writing it" if stated else ""
        raise CheckpointExistsError(
            f"{target.url} exists already{writer}; nothing was written. Choose another place, or replace it with "
            "overwrite=True (--overwrite)."
        )
    # There is no rename here. Without the names that readers look for, the old files are no checkpoint, so new and
    # old ones can't be taken for one. The old files must go before a writer of the same names may come.
    target.delete([name for name in names if name in last])
    target.delete([name for name in names if name not in last])


class _Staged:
    """A Store that remembers what it wrote, and keeps the names in `last` in memory until the end."""

    def __init__(self, inner: Store, last: frozenset[str], prefix: str = "", root: _Staged | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.prefix = prefix
        self.root = root or self
        self.last = last
        self.written: list[str] = []
        self.held: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def local_root(self) -> str | None:
        return None

    def child(self, path: str) -> _Staged:
        return _Staged(self.inner.child(path), self.last, f"{self.prefix}{path}/", self.root)

    def _note(self, path: str) -> None:
        with self.root._lock:
            self.root.written.append(self.prefix + path)

    def put_last(self) -> None:
        """Write what was held back."""
        for path, data in sorted(self.held.items()):
            self._note(path)
            self.inner.write(path, data)

    # --- reading: what is held back is there for the one who wrote it

    def info(self, path: str) -> FileInfo | None:
        held = self.root.held.get(self.prefix + path)
        return self.inner.info(path) if held is None else FileInfo(path, "file", len(held), 0.0)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        return self.inner.list(path, recursive=recursive)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        held = self.root.held.get(self.prefix + path)
        return self.inner.read(path, start, stop) if held is None else held[start:stop]

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        rest = []
        for read in reads:
            data = None if (held := self.root.held.get(self.prefix + read.path)) is None else held[read.start :]
            if data is None or len(data) < len(read.view):
                rest.append(read)
            else:
                read.view[:] = data[: len(read.view)]
        if rest:
            self.inner.read_many(rest, workers=workers)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    # --- writing

    def writer(self, path: str, *, sync: bool = True) -> AbstractContextManager[BlobWriter]:
        if self.prefix + path in self.last:
            return self._hold(path)
        self._note(path)
        return self.inner.writer(path, sync=sync)

    @contextlib.contextmanager
    def _hold(self, path: str) -> Iterator[BlobWriter]:
        buffer = _Buffer()
        yield buffer
        self.write(path, bytes(buffer.data))

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        if self.prefix + path in self.last:
            self.root.held[self.prefix + path] = bytes(data)
            return
        self._note(path)
        self.inner.write(path, data, overwrite=overwrite, sync=sync)

    def delete(self, paths: Iterable[str]) -> None:
        self.inner.delete(paths)

    def delete_tree(self, path: str) -> None:
        self.inner.delete_tree(path)


class _Buffer:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data
