"""Draws how much two checkpoints differ, by layer and module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ckptkit.offline.pictures.page import Panel, label, rect, svg, text
from ckptkit.units import counted

WIDTH, LEFT, RIGHT, CELL = 1100.0, 150.0, 150.0, 18.0  # RIGHT leaves room for the last column's slanted name
_LEGEND = {0.0: "equal", 1e-6: "1e-6", 1e-4: "1e-4", 1e-2: "0.01", 1.0: "1 and more", math.inf: "NaN or infinite"}
_OTHER, _ASIDE = "other state", ("rng.", "extra.")
_PREFIXED = re.compile(r"(?P<part>optimizer|master): (?P<fqn>\S+)(?: (?P<state>\S+))?$")
_COUNTER = "step"  # it counts updates, so a difference says nothing about the weights
_LAYER = re.compile(r"^(.*?)(\d+)\.(.*)$")


def split_layer(fqn: str) -> tuple[str, str]:
    """Return (layer, module): "model.layers.3.mlp.w" -> ("model.layers.3", "mlp.w"); ("", fqn) if not in a layer."""
    match = _LAYER.match(fqn)
    return (f"{match[1]}{match[2]}", match[3]) if match else ("", fqn)


def layer_of(name: str) -> tuple[int, str]:
    """Return (group, row) of a tensor in a summary by layer. Groups: the model (0), the optimizer (1), others (2).

    Each optimizer state is a row of its own, and so is each tensor outside of the layers.
    """
    match = _PREFIXED.match(name)
    if match is not None:
        return 1, _part(name)[0]
    other = name.startswith(_ASIDE)
    return 2 * other, name if other else split_layer(name)[0] or name


def heat_maps(changes: Mapping[str, float]) -> list[Panel]:
    """Return grids of layers by modules: an open panel for the model, and a folded one for each optimizer state.

    The optimizer's step counters are not drawn; the explanation says how many there are.

    Args:
        changes: Name -> relative change, max |a - b| / max |a|; 0 if equal, inf or NaN if not finite. Names are FQNs,
            "optimizer: FQN STATE" or "master: FQN", as in a `diff` report.
    """
    parts: dict[str, dict[str, float]] = {}
    for name, change in changes.items():
        part, fqn = _part(name)
        parts.setdefault(part, {})[fqn] = change
    counters = parts.pop(f"optimizer: {_COUNTER}", {})
    if not parts:
        return [Panel("Change by layer", "The checkpoints have no tensor in common (by name and shape).", "")]
    words = (
        "Rows are layers, columns are modules. Colour shows the largest change relative to the "
        "largest value: grey is equal, and each step towards red is ten times more."
    )
    if counters:
        words += f" {counted(len(counters), 'step counter', 'are')} hidden."
    return [
        Panel(
            f"Change by layer: {part}",
            words,
            _grid(of_part),
            behind=f"{sum(map(bool, of_part.values()))} of {len(of_part)} tensors differ" if i else "",
        )
        for i, (part, of_part) in enumerate(parts.items())
    ]


def _part(name: str) -> tuple[str, str]:
    """Return the name of the grid to which a tensor belongs, and its FQN."""
    match = _PREFIXED.match(name)
    if match is None:
        return (_OTHER if name.startswith(_ASIDE) else "model"), name
    if match["state"]:
        return f"optimizer: {match['state']}", match["fqn"]
    return match["part"], match["fqn"]


def _grid(changes: Mapping[str, float]) -> str:
    """Draw one row per layer, with the column names above and the legend below."""
    modules = list(dict.fromkeys(split_layer(fqn)[1] for fqn in changes))
    layers = list(dict.fromkeys(split_layer(fqn)[0] for fqn in changes))
    cell = min(CELL, max(5.0, 850.0 / len(layers)))
    width = min((WIDTH - LEFT - RIGHT) / len(modules), 64.0)
    y = 20 + 3.95 * min(32, max(map(len, modules)))  # leaves room for the slanted names above
    every = max(1, math.ceil(13 / width))  # if columns are narrow, label only every n-th one
    parts = []
    for j, module in list(enumerate(modules))[::every]:
        x = LEFT + j * width + width / 2
        name = text(0, 0, label(module, 195.0))
        parts.append(f'<g transform="translate({x:.1f} {y - 6:.1f}) rotate(-40)">{name}</g>')
    for i, layer in list(enumerate(layers))[:: math.ceil(12 / cell)]:
        name = label(layer or "outside of layers", LEFT - 12)
        parts.append(text(LEFT - 8, y + i * cell + cell / 2 + 4, name, anchor="end"))
    row_of, column_of = ({name: i for i, name in enumerate(names)} for names in (layers, modules))
    gap = 1 if min(width, cell) > 4 else 0
    for fqn, change in changes.items():
        layer, module = split_layer(fqn)
        place = (LEFT + column_of[module] * width, y + row_of[layer] * cell)
        words = "equal" if change == 0 else f"relative change {change:.3g}"
        parts.append(_cell(*place, width - gap, cell - gap, change, title=f"{fqn}\n{words}"))
    y += len(layers) * cell
    for i, (change, name) in enumerate(_LEGEND.items()):
        x = LEFT + i * 110
        parts += [_cell(x, y + 12, 12, 12, change), text(x + 17, y + 22, name, kind="soft")]
    return svg(WIDTH, y + 32, "".join(parts))


def _cell(x: float, y: float, width: float, height: float, change: float, *, title: str = "") -> str:
    if change == 0:
        return rect(x, y, width, height, title=title, kind="equal")
    fill = "hsl(300 70% 45%)"
    if math.isfinite(change):
        heat = min(max((math.log10(change) + 7) / 7, 0.0), 1.0)  # logarithmic: 1e-7 -> 0, 1 -> 1
        fill = f"hsl({50 - 50 * heat:.0f} {70 + 15 * heat:.0f}% {82 - 36 * heat:.0f}%)"
    return rect(x, y, width, height, fill=fill, title=title)
