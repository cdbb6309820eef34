"""The checkpoints of a run over its steps: sizes, what is kept and why, what rotation would delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.offline.pictures.page import Panel, label, rect, svg, text
from ckptkit.units import format_size

__all__ = ["TimelineItem", "timeline"]

WIDTH, HEIGHT, LEFT, BOTTOM = 1100.0, 300.0, 70.0, 46.0
_COLOURS = {
    "kept": "hsl(212 58% 62%)",
    "pinned": "hsl(42 80% 60%)",
    "best": "hsl(140 45% 58%)",
    "delete": "hsl(0 55% 68%)",
    "in progress": "hsl(265 45% 72%)",
    "abandoned": "#9aa4b5",
}


@dataclass(frozen=True, slots=True)
class TimelineItem:
    """One checkpoint: `state` is "kept", "pinned", "best", "delete", "in progress" or "abandoned"."""

    name: str
    step: int
    nbytes: int
    state: str
    reason: str


def timeline(items: Sequence[TimelineItem], *, max_num: int | None = None, max_mem: int | None = None) -> Panel:
    """Return the checkpoints as bars in the order of their steps, with the limits of the retention policy."""
    items = sorted(items, key=lambda item: item.step)
    largest = max((item.nbytes for item in items), default=1) or 1
    room, height = WIDTH - LEFT - 10, HEIGHT - BOTTOM - 20
    slot = room / max(len(items), 1)
    parts = [
        text(LEFT - 8, 24, format_size(largest), kind="soft", anchor="end"),
        text(LEFT - 8, HEIGHT - BOTTOM, "0", kind="soft", anchor="end"),
    ]
    for i, item in enumerate(items):
        bar = height * item.nbytes / largest
        x, width = LEFT + i * slot + slot * 0.1, min(slot * 0.8, 90.0)
        title = f"{item.name}\n{format_size(item.nbytes)} · {item.state}\n{item.reason}"
        parts.append(rect(x, HEIGHT - BOTTOM - bar, width, bar, fill=_COLOURS.get(item.state, "#9aa4b5"), title=title))
        if slot > 26 or i % max(1, int(26 / slot)) == 0:
            parts.append(
                text(x + width / 2, HEIGHT - BOTTOM + 14, label(str(item.step), max(slot, 26.0)), anchor="middle")
            )
    shown = [state for state in _COLOURS if any(item.state == state for item in items)]
    for i, state in enumerate(shown):
        parts.append(rect(LEFT + i * 110, HEIGHT - 16, 10, 10, fill=_COLOURS[state]))
        parts.append(text(LEFT + i * 110 + 15, HEIGHT - 7, state, kind="soft"))
    limits = [f"max_num {max_num}"] * (max_num is not None) + [f"max_mem {format_size(max_mem or 0)}"] * (
        max_mem is not None
    )
    words = "One bar a checkpoint; its height is bytes of all ranks." + (
        f" Policy: {', '.join(limits)}." if limits else ""
    )
    return Panel("Checkpoints of the run", words, svg(WIDTH, HEIGHT, "".join(parts)))
