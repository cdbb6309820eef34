"""Many small ranges of a file become few reads. Pure: it plans, and reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Span", "coalesce"]


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
