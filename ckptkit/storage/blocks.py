"""Small reads of a remote store, served out of blocks that are read whole: one request for many."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

from ckptkit.storage.store import ReadInto, Store

__all__ = ["BlockReader"]

_LEAST = 64 << 10
_MOST = 2 << 20
_HELD = 64 << 20  # bytes of blocks kept
_WASTE = 8  # times what was asked for: whoever jumps about gets what he asks for, and no more
_AT_ONCE = 8

_Key = tuple[str, int]


class BlockReader:
    """Reads ranges of the files of a store that nobody changes. Safe for several threads.

    A range of less than a quarter of a block comes out of a block, the last of which are kept; a longer one is read
    as it is. What is kept takes at most 64 MiB, however many files are read in turn: the more, the smaller the blocks.
    """

    def __init__(self, store: Store, files: int = 1) -> None:
        self._store = store
        self._block = max(_LEAST, min(_MOST, _HELD // max(1, files)))
        self._blocks: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._asked = self._fetched = 0

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        """Fill `view` from `start`. Raises as the store does."""
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto]) -> None:
        """Fill many views. Raises as the store does."""
        small = [read for read in reads if self._is_small(read)]
        with self._lock:
            self._asked += sum(read.view.nbytes for read in small)
            wasteful = self._fetched > _HELD + _WASTE * self._asked
        if wasteful:
            self._store.read_many(reads)
            return
        blocks = self._take(dict.fromkeys(key for read in small for key in self._keys(read)))
        rest = [read for read in reads if not self._is_small(read)]
        rest += [read for read in small if not self._serve(read, blocks)]
        if rest:
            self._store.read_many(rest)  # where a file ends early, this says so

    def _is_small(self, read: ReadInto) -> bool:
        return 0 < 4 * read.view.nbytes < self._block

    def _keys(self, read: ReadInto) -> list[_Key]:
        last = (read.start + read.view.nbytes - 1) // self._block
        return [(read.path, index) for index in range(read.start // self._block, last + 1)]

    def _take(self, keys: Iterable[_Key]) -> dict[_Key, bytes]:
        """Return blocks, read now or before; who finds one on its way waits for it."""
        found: dict[_Key, Future[bytes]] = {}
        missing: list[_Key] = []
        with self._lock:
            for key in keys:
                if key in self._blocks:
                    self._blocks.move_to_end(key)
                else:
                    self._blocks[key] = Future()
                    missing.append(key)
                found[key] = self._blocks[key]
            while len(self._blocks) > max(len(missing), _HELD // self._block):
                self._blocks.popitem(last=False)
        try:
            if len(missing) == 1:
                self._fetch(missing[0], found[missing[0]])
            elif missing:
                with ThreadPoolExecutor(min(_AT_ONCE, len(missing)), thread_name_prefix="ckptkit-block") as pool:
                    for key in missing:
                        pool.submit(self._fetch, key, found[key])
        except BaseException as error:  # a signal: who waits for these blocks must not wait for ever
            for key in missing:
                self._give_up(key, found[key], error)
            raise
        return {key: future.result() for key, future in found.items()}

    def _fetch(self, key: _Key, future: Future[bytes]) -> None:
        path, index = key
        try:
            data = self._store.read(path, index * self._block, (index + 1) * self._block)
        except BaseException as error:  # noqa: BLE001 - raised by whoever asked for the block
            self._give_up(key, future, error)
            return
        with self._lock:
            self._fetched += len(data)
        with contextlib.suppress(InvalidStateError):
            future.set_result(data)

    def _give_up(self, key: _Key, future: Future[bytes], error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
        with self._lock:
            if self._blocks.get(key) is future and future.exception() is not None:
                del self._blocks[key]

    def _serve(self, read: ReadInto, blocks: dict[_Key, bytes]) -> bool:
        """Fill a view from blocks; False where the file ends before it is full."""
        out, at = read.view.cast("B") if read.view.ndim != 1 or read.view.format != "B" else read.view, read.start
        stop = read.start + len(out)
        while at < stop:
            index, inside = divmod(at, self._block)
            piece = blocks[read.path, index][inside : inside + stop - at]
            if not piece:
                return False
            out[at - read.start : at - read.start + len(piece)] = piece
            at += len(piece)
        return True
