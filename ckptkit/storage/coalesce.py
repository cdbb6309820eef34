"""Combines many small reads of a file into a few larger reads, and distributes the bytes to the buffers."""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.store import ReadInto, Store

_MAX_GAP = 512 << 10  # reading this many bytes takes about as long as one more request
_LITTLE = 24 << 20  # if the reads total at most this many bytes, requests may be smaller than `large`
_LEAST = 4 << 20  # lower bound for the size limit of these smaller requests

Job = tuple[str, int, int, list[ReadInto]]
"""One request: path, start, stop, and the reads that overlap this range."""


@dataclass(frozen=True, slots=True)
class Span:
    """One read of a file's bytes [start, stop). `members` are the indices of the ranges in the span."""

    start: int
    stop: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_span: int) -> list[Span]:
    """Join nearby half-open ranges of one file, in any order, into spans, sorted by start.

    Args:
        max_gap: Ranges with a larger gap between them, in bytes, are not joined.
        max_span: Maximum length, in bytes, of a span that joins several ranges. A longer range is a span of its own.
    """
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    spans: list[Span] = []
    members: list[int] = []
    start = stop = 0
    for i in order:
        low, high = ranges[i]
        if members and low - stop <= max_gap and max(high, stop) - start <= max_span:
            members.append(i)
            stop = max(stop, high)
            continue
        if members:
            spans.append(Span(start, stop, tuple(members)))
        members, start, stop = [i], low, high
    if members:
        spans.append(Span(start, stop, tuple(members)))
    return spans


class Scatter:
    """Copies the bytes of a file, as they arrive from `start` on, into the views of `reads`."""

    def __init__(self, reads: Sequence[ReadInto], start: int) -> None:
        self._start = start
        self._waiting = sorted(reads, key=lambda read: -read.start)  # in reverse order: `pop` returns the next read
        self._open: list[tuple[int, memoryview]] = []

    def __call__(self, at: int, piece: bytes | memoryview) -> None:
        """Copy a piece that has just arrived. `at` is the offset of the piece from `start`."""
        low = self._start + at
        high = low + len(piece)
        while self._waiting and self._waiting[-1].start < high:
            read = self._waiting.pop()
            self._open.append((read.start, read.view.cast("B")))
        still = []
        for start, view in self._open:
            first, last = max(low, start), min(high, start + len(view))
            if first < last:
                view[first - start : last - start] = piece[first - low : last - low]
            if start + len(view) > high:
                still.append((start, view))
        self._open = still


def cut_reads(reads: Sequence[ReadInto], *, large: int) -> list[Job]:
    """Split reads into requests of about `large` bytes: enough to keep the connections busy, but no more."""
    by_file: dict[str, list[ReadInto]] = {}
    for read in reads:
        if read.view.nbytes:
            by_file.setdefault(read.path, []).append(read)
    jobs: list[Job] = []
    total = sum(read.view.nbytes for read in reads)
    most = min(2 * large, max(large if total > _LITTLE else min(_LEAST, large), total // 8))
    for path, items in by_file.items():
        ranges = [(item.start, item.start + item.view.nbytes) for item in items]
        for span in coalesce(ranges, max_gap=_MAX_GAP, max_span=sys.maxsize):
            members = sorted((items[i] for i in span.members), key=_start)
            # A read that spans two requests belongs to both.
            for start, stop in _cut(span.start, span.stop, most):
                later = bisect_left(members, stop, key=_start)
                jobs.append((path, start, stop, members[:later]))
                members = [item for item in members[:later] if _stop(item) > stop] + members[later:]
    return jobs


def _cut(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Split a range into as few parts as possible, of equal size and at most `most` bytes each."""
    count = -(-(stop - start) // most)
    for i in range(count):
        yield start + i * (stop - start) // count, start + (i + 1) * (stop - start) // count


def _start(item: ReadInto) -> int:
    return item.start


def _stop(item: ReadInto) -> int:
    return item.start + item.view.nbytes


_LEAST_BLOCK = 64 << 10
_MOST = 2 << 20
_HELD = 64 << 20  # size limit of the cache in bytes
_WASTE = 8  # stop using blocks if the fetched bytes exceed the requested bytes by this factor
_CALL = 8 << 10  # added to the requested bytes of each read, because each call has a cost
_AT_ONCE = 8

_Key = tuple[str, int]


class BlockReader:
    """Serves small reads from cached blocks, so that one request answers many reads. Thread-safe.

    The files must not change. Reads of a quarter of a block or more go directly to the store. If there are many files,
    the blocks are smaller, so that the cache (64 MiB) can hold a block of each file.
    """

    def __init__(self, store: Store, files: int = 1) -> None:
        self._store = store
        self._block = max(_LEAST_BLOCK, min(_MOST, _HELD // max(1, files)))
        self._blocks: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._asked = self._fetched = 0

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto]) -> None:
        small = [read for read in reads if self._is_small(read)]
        with self._lock:
            self._asked += sum(read.view.nbytes + _CALL for read in small)
            wasteful = self._fetched > _HELD + _WASTE * self._asked
        if wasteful:
            self._store.read_many(reads)
            return
        blocks = self._take(dict.fromkeys(key for read in small for key in self._keys(read)))
        rest = [read for read in reads if not self._is_small(read)]
        rest += [read for read in small if not self._serve(read, blocks)]
        if rest:
            self._store.read_many(rest)  # raises if a file is too short

    def _is_small(self, read: ReadInto) -> bool:
        return 0 < 4 * read.view.nbytes < self._block

    def _keys(self, read: ReadInto) -> list[_Key]:
        last = (read.start + read.view.nbytes - 1) // self._block
        return [(read.path, index) for index in range(read.start // self._block, last + 1)]

    def _take(self, keys: Iterable[_Key]) -> dict[_Key, bytes]:
        """Return the blocks `keys`. Reads missing blocks, and waits for blocks that other threads are reading."""
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
                with WorkerPool(min(_AT_ONCE, len(missing)), thread_name_prefix="ckptkit-block") as pool:
                    for key in missing:
                        pool.submit(self._fetch, key, found[key])
        except BaseException as error:  # such as Ctrl-C: other threads must not wait for these blocks forever
            for key in missing:
                self._give_up(key, found[key], error)
            raise
        return {key: future.result() for key, future in found.items()}

    def _fetch(self, key: _Key, future: Future[bytes]) -> None:
        path, index = key
        try:
            data = self._store.read(path, index * self._block, (index + 1) * self._block)
        except BaseException as error:  # noqa: BLE001 - raised in the threads that want the block
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
        """Fill the view of `read` from blocks. Return False if the blocks show that the file is too short."""
        out, at = read.view.cast("B"), read.start
        stop = read.start + len(out)
        while at < stop:
            index, inside = divmod(at, self._block)
            piece = blocks[read.path, index][inside : inside + stop - at]
            if not piece:
                return False
            out[at - read.start : at - read.start + len(piece)] = piece
            at += len(piece)
        return True
