"""Many small ranges of a file become few reads, and what comes is dealt out again. Pure: it reads nothing."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptkit.storage.store import ReadInto

__all__ = ["Job", "Scatter", "Span", "coalesce", "cut_reads"]

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
