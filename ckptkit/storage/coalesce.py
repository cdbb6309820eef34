"""Many small ranges of a file become few reads, and what comes is dealt out again. Pure: it reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.storage.store import ReadInto

__all__ = ["Scatter", "Span", "coalesce"]


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
