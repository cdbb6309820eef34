"""Draws a run's checkpoints by step: metrics, sizes, and which checkpoints rotation keeps or deletes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.offline.listing import Listed
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


def timeline(rows: Sequence[Listed], policy: RetentionPolicy | None = None) -> Panel:
    """Draw one column per checkpoint, in the order of steps: a point for each metric, and a bar for the size.

    The limits of the policy are drawn as lines.
    """
    ordered = sorted(rows, key=lambda row: (row.step is None, row.step or 0))  # rows without a step last
    items = []
    for row in ordered:
        if row.absent_before:  # a gap, whose name is the number of checkpoints that no longer exist
            items.append(Listed(str(row.absent_before), _ABSENT))
        items.append(row)
    slot = (WIDTH - LEFT - 10) / max(len(items), 1)
    counts = Counter(name for item in items for name in item.metrics or ())
    metrics = [name for name, _ in counts.most_common(_MAX_METRICS)]
    parts, y = [], 0.0
    for name in metrics:
        parts.append(_chart(name, items, slot, y + 20))
        y += CHART + _GAP
    base = y + 30 + BARS
    parts += _bars(items, slot, base)
    parts += _legend(items, base + 28)
    rules: list[str] = []
    if policy is not None:
        parts += _limit_lines(items, slot, policy, y + 4, base)
        rules += [f"max_num {policy.max_num}"] * (policy.max_num is not None)
        rules += [f"max_mem {format_size(int(policy.max_mem or 0))}"] * (policy.max_mem is not None)
        rules += policy.exemptions
    words = "One bar per checkpoint; its height shows the bytes of all ranks."
    if metrics:
        words += " A point above it shows the value of a metric at that step."
    if len(counts) > len(metrics):
        words += f" {len(counts) - len(metrics)} more metrics are not drawn."
    if rules:
        words += f" Policy: {', '.join(rules)}."
    return Panel("Checkpoints of the run", words, svg(WIDTH, base + 42, "".join(parts)))


def _state(item: Listed) -> str:
    """Return the state that determines the checkpoint's colour, such as "kept", "best" or "delete"."""
    if item.state != "committed":
        return item.state
    if item.keep is False:
        return "delete"
    return "pinned" if "pinned" in item.why else "best" if "best" in item.why else "kept"


def _chart(name: str, items: Sequence[Listed], slot: float, top: float) -> str:
    """Draw a metric as a line, with its smallest value at the bottom and its largest at the top."""
    values = [(i, item.metrics[name]) for i, item in enumerate(items) if item.metrics and name in item.metrics]
    finite = [value for _, value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    half = high / 2 - low / 2  # half of the span, because the whole span may overflow a float
    dots, path, pen = [], "", "M"
    for i, value in values:
        x, y, fill = LEFT + (i + 0.5) * slot, top, "hsl(300 70% 45%)"
        if math.isfinite(value):
            y += CHART * (1 - (value / 2 - low / 2) / half if half else 0.5)
            path += f"{pen}{x:.1f} {y:.1f}"
            fill = _COLOURS.get(_state(items[i]), "#9aa4b5")
        pen = "L" if math.isfinite(value) else "M"
        words = escaped(f"{items[i].name}\n{name} {value:.6g}")
        radius = min(4.0, slot / 2)
        dots.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius:.2f}" fill="{fill}"><title>{words}</title></circle>')
    scales = {top + 4: high, top + CHART + 4: low} if half else {top + CHART / 2 + 4: low}
    named = [text(LEFT - 8, y, f"{value:.4g}", kind="soft", anchor="end") for y, value in scales.items() if finite]
    line = f'<path class="line" d="{path}"/>' if path else ""
    return text(LEFT, top - 8, label(name, WIDTH - LEFT)) + "".join(named) + line + "".join(dots)


def _bars(items: Sequence[Listed], slot: float, base: float) -> list[str]:
    largest = max((item.nbytes or 0 for item in items), default=1) or 1
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
        nbytes, state = item.nbytes or 0, _state(item)
        height = max(BARS * nbytes / largest, 3)  # entries that are not checkpoints have no size
        title = f"{item.name}\n{format_size(nbytes)} · {state}\n{item.why}"
        parts.append(rect(x, base - height, width, height, fill=_COLOURS.get(state, "#9aa4b5"), title=title))
        if x + width / 2 >= free:
            words = label(str(item.step) if item.step is not None else item.name, max(slot, _LABEL))
            parts.append(text(x + width / 2, base + 14, words, anchor="middle"))
            free = x + width / 2 + _LABEL
    return parts


def _limit_lines(items: Sequence[Listed], slot: float, policy: RetentionPolicy, top: float, base: float) -> list[str]:
    """Draw a line at each limit of the policy.

    The checkpoints to the left of a line exceed the limit. Rotation deletes them unless another rule keeps them.
    """
    committed = [i for i, item in enumerate(items) if item.state == "committed"]
    limits: list[tuple[str, int]] = []
    if policy.max_num is not None and len(committed) > policy.max_num:
        limits.append((f"max_num {policy.max_num}", committed[-policy.max_num]))
    if policy.max_mem is not None:
        total, first, max_mem = 0, len(items), int(policy.max_mem)
        for i in reversed(committed):
            total += items[i].nbytes or 0
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


def _legend(items: Sequence[Listed], top: float) -> list[str]:
    parts, x = [], LEFT
    present = set(map(_state, items))
    for state in [*_COLOURS, _ABSENT]:
        if state in present:
            words, gone = _LEGEND.get(state, state), state == _ABSENT
            parts.append(rect(x, top, 10, 10, fill="" if gone else _COLOURS[state], kind="gone" if gone else ""))
            parts.append(text(x + 15, top + 9, words, kind="soft"))
            x += 35 + 6.1 * len(words)
    return parts
