"""Draws the checkpoints of a run over its steps: sizes, what is kept and why, what rotation would delete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.offline.pictures.page import Panel, escaped, label, rect, svg, text
from ckptkit.units import format_size

__all__ = ["TimelineItem", "timeline"]

WIDTH, HEIGHT, LEFT, BOTTOM = 1100.0, 300.0, 70.0, 46.0
_LABEL = 46.0  # user units that a step number needs
_COLOURS = {
    "kept": "hsl(212 58% 62%)",
    "pinned": "hsl(42 80% 60%)",
    "best": "hsl(140 45% 58%)",
    "delete": "hsl(0 55% 68%)",
    "in progress": "hsl(265 45% 72%)",
    "abandoned": "#9aa4b5",
    "skipped": "#6b7280",
}
_ABSENT = "absent"
_LEGEND = {"delete": "rotation deletes", "skipped": "no checkpoint", _ABSENT: "no longer here"}


@dataclass(frozen=True, slots=True)
class TimelineItem:
    """One checkpoint: `state` is "kept", "pinned", "best", "delete", "in progress", "abandoned" or "skipped".

    Attributes:
        absent_before: How many that were saved between the one before and this are not here.
    """

    name: str
    step: int | None
    nbytes: int
    state: str
    reason: str
    absent_before: int = 0


def timeline(
    items: Sequence[TimelineItem],
    *,
    max_num: int | None = None,
    max_mem: int | None = None,
    exempt: Sequence[str] = (),
) -> Panel:
    """Return the checkpoints as bars in the order of their steps, with the limits of the retention policy.

    Args:
        exempt: What else the policy keeps, in words.
    """
    items = _with_gaps(sorted(items, key=lambda item: (item.step is None, item.step or 0)))  # what has no step last
    largest = max((item.nbytes for item in items), default=1) or 1
    room, height = WIDTH - LEFT - 10, HEIGHT - BOTTOM - 30
    slot = room / max(len(items), 1)
    parts = [
        text(LEFT - 8, 38, format_size(largest), kind="soft", anchor="end"),
        text(LEFT - 8, HEIGHT - BOTTOM, "0", kind="soft", anchor="end"),
    ]
    every = max(1, math.ceil(_LABEL / slot))
    for i, item in enumerate(items):
        bar = height * item.nbytes / largest
        width = min(slot * 0.8, 90.0)
        x = LEFT + i * slot + (slot - width) / 2
        if item.state == _ABSENT:
            parts.append(_gap(item, x, width, height / 3))
            continue
        title = f"{item.name}\n{format_size(item.nbytes)} · {item.state}\n{item.reason}"
        # What is not a checkpoint has no size: a sliver shows where it is.
        parts.append(
            rect(
                x,
                HEIGHT - BOTTOM - max(bar, 3),
                width,
                max(bar, 3),
                fill=_COLOURS.get(item.state, "#9aa4b5"),
                title=title,
            )
        )
        if i % every == 0:
            words = label(str(item.step) if item.step is not None else item.name, max(slot, _LABEL))
            parts.append(text(x + width / 2, HEIGHT - BOTTOM + 14, words, anchor="middle"))
    parts += _limit_lines(items, slot, max_num, max_mem)
    shown = [state for state in [*_COLOURS, _ABSENT] if any(item.state == state for item in items)]
    for i, state in enumerate(shown):
        if state == _ABSENT:
            parts.append(_dashed(LEFT + i * 110, HEIGHT - 16, 10, 10, "2 2", ""))
        else:
            parts.append(rect(LEFT + i * 110, HEIGHT - 16, 10, 10, fill=_COLOURS[state]))
        parts.append(text(LEFT + i * 110 + 15, HEIGHT - 7, _LEGEND.get(state, state), kind="soft"))
    limits = [f"max_num {max_num}"] * (max_num is not None) + [f"max_mem {format_size(max_mem or 0)}"] * (
        max_mem is not None
    )
    limits += exempt
    words = "One bar per checkpoint; its height shows the bytes of all ranks." + (
        f" Policy: {', '.join(limits)}." if limits else ""
    )
    return Panel("Checkpoints of the run", words, svg(WIDTH, HEIGHT, "".join(parts)))


def _with_gaps(items: Sequence[TimelineItem]) -> list[TimelineItem]:
    """The items, and in the place of those that are gone, one that counts them."""
    found = []
    for item in items:
        if item.absent_before:
            found.append(TimelineItem(str(item.absent_before), None, 0, _ABSENT, ""))
        found.append(item)
    return found


def _gap(item: TimelineItem, x: float, width: float, height: float) -> str:
    words = f"{item.name} saved in between, now gone"
    count = text(
        x + width / 2, HEIGHT - BOTTOM - height / 2 + 4, label(item.name, width + 4), kind="soft", anchor="middle"
    )
    return _dashed(x, HEIGHT - BOTTOM - height, width, height, "4 3", words) + count


def _dashed(x: float, y: float, width: float, height: float, dashes: str, title: str) -> str:
    inside = f"<title>{escaped(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="none" stroke="#9aa4b5" '
        f'stroke-dasharray="{dashes}">{inside}</rect>'
    )


def _limit_lines(items: Sequence[TimelineItem], slot: float, max_num: int | None, max_mem: int | None) -> list[str]:
    """Where each limit of the policy falls, counted from the newest: older ones stay only by exemption."""
    committed = [
        i for i, item in enumerate(items) if item.state not in ("in progress", "abandoned", "skipped", _ABSENT)
    ]
    limits: list[tuple[str, int]] = []
    if max_num is not None and len(committed) > max_num:
        limits.append((f"max_num {max_num}", committed[-max_num]))
    if max_mem is not None:
        total, first = 0, len(items)
        for i in reversed(committed):
            total += items[i].nbytes
            if total > max_mem:
                limits.append((f"max_mem {format_size(max_mem)}", first))
                break
            first = i
    lines = []
    for row, (words, index) in enumerate(limits):
        x = LEFT + index * slot
        lines.append(f'<path d="M{x:.1f} 4 V{HEIGHT - BOTTOM:.1f}" stroke="currentColor" stroke-dasharray="4 3"/>')
        left = index == min(i for _, i in limits) and len(limits) > 1  # the words of two limits keep apart
        lines.append(
            text(x - 4 if left else x + 4, 11 + 11 * row, words, kind="soft", anchor="end" if left else "start")
        )
    return lines
