"""Combines many small ranges of a file into few reads, and splits the results again. Pure: reads nothing."""

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

__all__ = ["Job", "Scatter", "Span", "coalesce", "cut_reads", "BlockReader"]

_MAX_GAP = 512 << 10  # a request costs about as long as reading this much
_LITTLE = 24 << 20  # where all that is to be read is no more, a connection each for all of it would take long
_LEAST = 4 << 20  # of that, one request

Job = tuple[str, int, int, list[ReadInto]]
"""One request: (path, start, stop, the reads that it serves, those perhaps that others serve, too)."""


@dataclass(frozen=True, slots=True)
class Span:
    """One read: bytes [start, stop) of a file, which serve the requests `members` (indices)."""

    start: int
    stop: int
    members: tuple[int, ...]


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_span: int) -> list[Span]:
    """Join half-open ranges of one file that are near each other into spans, sorted by start.

    Args:
        ranges: (start, stop) in bytes, in any order; they may overlap.
        max_gap: Bytes one would rather read and drop than start another read for.
        max_span: A span grows no longer than this by joining (a longer range stays one span).
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
    """Deals out the bytes of a file from `start` on, as they come, to the views that want them.

    Args:
        reads: What is wanted; parts of it may lie before `start`, or after what comes.
    """

    def __init__(self, reads: Sequence[ReadInto], start: int) -> None:
        self._start = start
        self._waiting = sorted(reads, key=lambda read: -read.start)  # the next one last
        self._open: list[tuple[int, memoryview]] = []

    def __call__(self, at: int, piece: bytes | memoryview) -> None:
        """Take the bytes that follow those before; `at` counts from the start."""
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
    """Return the requests for all of the reads: enough for what may be in flight to share the work, and no more.

    Args:
        large: Bytes that one request asks for where there are few.
    """
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
            # Cut without regard to what is read into what: a view may get its bytes from two requests.
            for start, stop in _cut(span.start, span.stop, most):
                later = bisect_left(members, stop, key=_start)
                jobs.append((path, start, stop, members[:later]))
                members = [item for item in members[:later] if _stop(item) > stop] + members[later:]
    return jobs


def _cut(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a range into as few equal parts as are no larger than `most`."""
    count = -(-(stop - start) // most)
    for i in range(count):
        yield start + i * (stop - start) // count, start + (i + 1) * (stop - start) // count


def _start(item: ReadInto) -> int:
    return item.start


def _stop(item: ReadInto) -> int:
    return item.start + item.view.nbytes


# Small reads of a remote store, served out of blocks that are read whole: one request for many.


_LEAST_BLOCK = 64 << 10
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
        self._block = max(_LEAST_BLOCK, min(_MOST, _HELD // max(1, files)))
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
                with WorkerPool(min(_AT_ONCE, len(missing)), thread_name_prefix="ckptkit-block") as pool:
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
