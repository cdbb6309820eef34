"""Draws how much two checkpoints differ, by layer and module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ckptkit.offline.pictures.page import PAGE, Panel, label, rect, svg, text

__all__ = ["heat_map", "layer_of", "split_layer"]

WIDTH, LEFT, RIGHT, CELL = 1100.0, 150.0, 150.0, 18.0  # to the right, the last column's slanted name
_LEGEND = {0.0: "equal", 1e-6: "1e-6", 1e-4: "1e-4", 1e-2: "0.01", 1.0: "1 and more", math.inf: "NaN or infinite"}
_OTHER, _ASIDE = "not the network", ("rng.", "extra.")
_PREFIXED = re.compile(r"(?P<part>optimizer|master): (?P<fqn>\S+)(?: (?P<state>\S+))?$")
_LAYER = re.compile(r"^(.*?)(\d+)\.(.*)$")


def split_layer(fqn: str) -> tuple[str, str]:
    """Return (layer, module): "model.layers.3.mlp.w" -> ("model.layers.3", "mlp.w"); ("", fqn) outside of layers."""
    match = _LAYER.match(fqn)
    return (f"{match[1]}{match[2]}", match[3]) if match else ("", fqn)


def layer_of(name: str) -> tuple[int, str]:
    """Return what a tensor of a diff counts for, and whether that is of the model (0), of an optimizer (1), or of
    neither (2): ("optimizer: model.layers.3 exp_avg"). One that is in no layer counts for itself."""
    match = _PREFIXED.match(name)
    if match is None:
        other = name.startswith(_ASIDE)
        return 2 * other, name if other else split_layer(name)[0] or name
    layer = split_layer(match["fqn"])[0]
    return 1, f"{match['part']}: {layer} {match['state'] or ''}".rstrip() if layer else name


def heat_map(changes: Mapping[str, float]) -> Panel:
    """Return a grid of layers by modules: the model's rows first, then those of each state of the optimizer.

    Args:
        changes: Name -> relative change: max |a - b| / max |a|; 0 where equal, inf or NaN where not finite. The name is
            a FQN, or "optimizer: FQN STATE", or "master: FQN", as `diff` has it.
    """
    if not changes:
        return Panel("Change by layer", "The two have no tensor in common (by name and shape).", "")
    sections: dict[str, dict[str, float]] = {}
    for name, change in changes.items():
        section, fqn = _section(name)
        sections.setdefault(section, {})[fqn] = change
    # What is no part of the network has names of its own: it would only widen the grid.
    others = {name: sections.pop(name) for name in [_OTHER] if name in sections and len(sections) > 1}
    grids = [part for part in (sections, others) if part]
    if sum(_height(part) for part in grids) > PAGE:
        grids = [{name: part} for grid in grids for name, part in grid.items()]
    pictures: list[tuple[str, float]] = []
    for part in grids:
        body, height = _grid(part, titled=len(sections) > 1)
        pictures.append((body, height + 24))
    if sum(height for _, height in pictures) <= PAGE:
        pictures = [_stacked(pictures)]
    body, height = pictures[-1]
    pictures[-1] = (body + _legend(height - 12), height + 8)
    words = (
        "Rows are layers, columns are modules. Colour shows the largest change relative to the "
        "largest value: grey is equal, and each step towards red is ten times more."
    )
    return Panel("Change by layer", words, "".join(svg(WIDTH, height, body) for body, height in pictures))


def _stacked(pictures: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """One picture of several, below each other."""
    top, parts = 0.0, []
    for body, height in pictures:
        parts.append(f'<g transform="translate(0 {top:.1f})">{body}</g>' if top else body)
        top += height
    return "".join(parts), top


def _legend(top: float) -> str:
    return "".join(
        rect(LEFT + i * 110, top, 12, 12, fill=_heat(change)) + text(LEFT + i * 110 + 17, top + 10, name, kind="soft")
        for i, (change, name) in enumerate(_LEGEND.items())
    )


def _section(name: str) -> tuple[str, str]:
    """Return which part of the grid a name belongs to, and its FQN."""
    match = _PREFIXED.match(name)
    if match is None:
        return (_OTHER if name.startswith(_ASIDE) else "model"), name
    if match["state"]:
        return f"optimizer: {match['state']}", match["fqn"]
    return match["part"], match["fqn"]


def _height(sections: Mapping[str, Mapping[str, float]]) -> float:
    """About how tall a grid gets."""
    rows = sum(len({split_layer(fqn)[0] for fqn in part}) for part in sections.values())
    return 100 + rows * _cell(rows) + 31 * len(sections)


def _cell(rows: int) -> float:
    return min(CELL, max(5.0, 850.0 / rows))


def _grid(sections: Mapping[str, Mapping[str, float]], *, titled: bool) -> tuple[str, float]:
    """Draw sections below each other over the same columns; return how tall they are, too."""
    modules = list(dict.fromkeys(split_layer(fqn)[1] for part in sections.values() for fqn in part))
    layers = {name: list(dict.fromkeys(split_layer(fqn)[0] for fqn in part)) for name, part in sections.items()}
    cell = _cell(sum(map(len, layers.values())))
    width = min((WIDTH - LEFT - RIGHT) / len(modules), 64.0)
    parts = []
    y = 20 + 3.95 * min(32, max(map(len, modules)))  # the slanted names stand above
    every = max(1, math.ceil(13 / width))  # where columns are narrow, not all have room for a name
    for j, module in list(enumerate(modules))[::every]:
        x = LEFT + j * width + width / 2
        parts.append(
            f'<g transform="translate({x:.1f} {y - 6:.1f}) rotate(-40)">{text(0, 0, label(module, 195.0))}</g>'
        )
    for name, part in sections.items():
        if titled:
            parts.append(text(4, y + 10, label(name, LEFT - 8), kind="soft"))
            y += 21
        parts.append(_rows(part, layers[name], modules, y, width, cell))
        y += len(layers[name]) * cell + 10
    return "".join(parts), y - 10


def _rows(
    part: Mapping[str, float], layers: Sequence[str], modules: Sequence[str], top: float, width: float, cell: float
) -> str:
    row_of, column_of = ({name: i for i, name in enumerate(names)} for names in (layers, modules))
    every = math.ceil(12 / cell)
    parts = [
        text(LEFT - 8, top + i * cell + cell / 2 + 4, label(layer or "outside of layers", LEFT - 12), anchor="end")
        for i, layer in list(enumerate(layers))[::every]
    ]
    for fqn, change in part.items():
        layer, module = split_layer(fqn)
        x, y = LEFT + column_of[module] * width, top + row_of[layer] * cell
        words = "equal" if change == 0 else f"relative change {change:.3g}"
        gap = 1 if min(width, cell) > 4 else 0
        parts.append(rect(x, y, width - gap, cell - gap, fill=_heat(change), title=f"{fqn}\n{words}"))
    return "".join(parts)


def _heat(change: float) -> str:
    if change == 0:
        return "#c9ced8"
    if not math.isfinite(change):
        return "hsl(300 70% 45%)"
    heat = min(max((math.log10(change) + 7) / 7, 0.0), 1.0)  # 1e-7 .. 1
    return f"hsl({50 - 50 * heat:.0f} {70 + 15 * heat:.0f}% {82 - 36 * heat:.0f}%)"
