"""Draws a run's checkpoints by step: metrics, sizes, and which of them rotation keeps or deletes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.offline.pictures.page import Panel, escaped, label, rect, svg, text
from ckptkit.units import format_size

WIDTH, LEFT = 1100.0, 90.0
BARS, CHART = 150.0, 80.0  # user units: height of the longest bar, and of a metric's chart
_GAP = 34.0  # between charts
_LABEL = 46.0  # width of a step number in user units
_MAX_METRICS = 6
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
_LEGEND = {"delete": "rotation deletes next", "skipped": "no checkpoint", _ABSENT: "no longer here"}
_COMMITTED = ("kept", "pinned", "best", "delete")


@dataclass(frozen=True, slots=True)
class TimelineItem:
    """One checkpoint. `state` is "kept", "pinned", "best", "delete", "in progress", "abandoned" or "skipped".

    Attributes:
        absent_before: Number of checkpoints saved between the previous one and this one that no longer exist.
    """

    name: str
    step: int | None
    nbytes: int
    state: str
    reason: str
    absent_before: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


def timeline(
    items: Sequence[TimelineItem], *, max_num: int | None = None, max_mem: int | None = None, exempt: Sequence[str] = ()
) -> Panel:
    """Draw one column per checkpoint, in the order of steps: a point for each metric, and a bar for the size.

    Args:
        max_num, max_mem: The retention policy's limits, drawn as lines.
        exempt: Descriptions of the policy's exemptions.
    """
    ordered = sorted(items, key=lambda item: (item.step is None, item.step or 0))  # items without a step last
    items = []
    for item in ordered:
        if item.absent_before:  # a gap, whose name is the number of checkpoints that no longer exist
            items.append(TimelineItem(str(item.absent_before), None, 0, _ABSENT, ""))
        items.append(item)
    slot = (WIDTH - LEFT - 10) / max(len(items), 1)
    counts = Counter(name for item in items for name in item.metrics)
    metrics = [name for name, _ in counts.most_common(_MAX_METRICS)]
    parts, y = [], 0.0
    for name in metrics:
        parts.append(_chart(name, items, slot, y + 20))
        y += CHART + _GAP
    base = y + 30 + BARS
    parts += _bars(items, slot, base)
    parts += _limit_lines(items, slot, max_num, max_mem, y + 4, base)
    parts += _legend(items, base + 28)
    limits = [f"max_num {max_num}"] * (max_num is not None)
    limits += [f"max_mem {format_size(max_mem or 0)}"] * (max_mem is not None)
    words = "One bar per checkpoint; its height shows the bytes of all ranks."
    if metrics:
        words += " A point above it shows the value of a metric at that step."
    if len(counts) > len(metrics):
        words += f" {len(counts) - len(metrics)} more metrics are not drawn."
    if limits or exempt:
        words += f" Policy: {', '.join([*limits, *exempt])}."
    return Panel("Checkpoints of the run", words, svg(WIDTH, base + 42, "".join(parts)))


def _chart(name: str, items: Sequence[TimelineItem], slot: float, top: float) -> str:
    """Draw a metric as a line, with its smallest value at the bottom and its largest at the top."""
    values = [(i, item.metrics[name]) for i, item in enumerate(items) if name in item.metrics]
    finite = [value for _, value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    half = high / 2 - low / 2  # half of the span, because the whole span may overflow a float
    dots, path, pen = [], "", "M"
    for i, value in values:
        x, y, fill = LEFT + (i + 0.5) * slot, top, "hsl(300 70% 45%)"
        if math.isfinite(value):
            y += CHART * (1 - (value / 2 - low / 2) / half if half else 0.5)
            path += f"{pen}{x:.1f} {y:.1f}"
            fill = _COLOURS.get(items[i].state, "#9aa4b5")
        pen = "L" if math.isfinite(value) else "M"
        words = escaped(f"{items[i].name}\n{name} {value:.6g}")
        radius = min(4.0, slot / 2)
        dots.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:.2f}" fill="{fill}"><title>{words}</title></circle>')
    scales = {top + 4: high, top + CHART + 4: low} if half else {top + CHART / 2 + 4: low}
    named = [text(LEFT - 8, y, f"{value:.4g}", kind="soft", anchor="end") for y, value in scales.items() if finite]
    line = f'<path class="line" d="{path}"/>' if path else ""
    return text(LEFT, top - 8, label(name, WIDTH - LEFT)) + "".join(named) + line + "".join(dots)


def _bars(items: Sequence[TimelineItem], slot: float, base: float) -> list[str]:
    largest = max((item.nbytes for item in items), default=1) or 1
    width = min(slot * 0.8, 90.0)
    free = LEFT  # x at which the previous step number ends
    parts = [
        text(LEFT, base - BARS - 14, "size"),
        text(LEFT - 8, base - BARS + 8, format_size(largest), kind="soft", anchor="end"),
        text(LEFT - 8, base, "0", kind="soft", anchor="end"),
    ]
    for i, item in enumerate(items):
        x = LEFT + i * slot + (slot - width) / 2
        if item.state == _ABSENT:
            words = f"{item.name} saved in between, now gone"
            parts.append(rect(x, base - BARS / 3, width, BARS / 3, title=words, kind="gone"))
            count = label(item.name, width + 4)
            parts.append(text(x + width / 2, base - BARS / 6 + 4, count, kind="soft", anchor="middle"))
            continue
        height = max(BARS * item.nbytes / largest, 3)  # entries that are not checkpoints have size 0
        title = f"{item.name}\n{format_size(item.nbytes)} · {item.state}\n{item.reason}"
        parts.append(rect(x, base - height, width, height, fill=_COLOURS.get(item.state, "#9aa4b5"), title=title))
        if x + width / 2 >= free:
            words = label(str(item.step) if item.step is not None else item.name, max(slot, _LABEL))
            parts.append(text(x + width / 2, base + 14, words, anchor="middle"))
            free = x + width / 2 + _LABEL
    return parts


def _limit_lines(
    items: Sequence[TimelineItem], slot: float, max_num: int | None, max_mem: int | None, top: float, base: float
) -> list[str]:
    """Draw a line at each limit of the policy. Checkpoints to the left of it are kept only if they are exempt."""
    committed = [i for i, item in enumerate(items) if item.state in _COMMITTED]
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
        lines.append(f'<path class="limit" d="M{x:.1f} {top:.1f} V{base:.1f}"/>')
        left = index == min(i for _, i in limits) and len(limits) > 1  # to keep the labels of two limits apart
        where = (x - 4, "end") if left else (x + 4, "start")
        lines.append(text(where[0], top + 7 + 11 * row, words, kind="soft", anchor=where[1]))
    return lines


def _legend(items: Sequence[TimelineItem], top: float) -> list[str]:
    parts, x = [], LEFT
    present = {item.state for item in items}
    for state in [*_COLOURS, _ABSENT]:
        if state in present:
            words, gone = _LEGEND.get(state, state), state == _ABSENT
            parts.append(rect(x, top, 10, 10, fill="" if gone else _COLOURS[state], kind="gone" if gone else ""))
            parts.append(text(x + 15, top + 9, words, kind="soft"))
            x += 35 + 6.1 * len(words)
    return parts
