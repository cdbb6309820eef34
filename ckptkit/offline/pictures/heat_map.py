"""How much two checkpoints differ, layer by layer and module by module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ckptkit.offline.pictures.page import Panel, label, rect, svg, text

__all__ = ["heat_map", "split_layer"]

WIDTH, LEFT, RIGHT, CELL = 1100.0, 120.0, 90.0, 18.0  # to the right, the slanted name of the last column
_LEGEND = {0.0: "equal", 1e-6: "1e-6", 1e-4: "1e-4", 1e-2: "0.01", 1.0: "1 and more", math.inf: "NaN or infinite"}
_LAYER = re.compile(r"^(.*?)(\d+)\.(.*)$")


def split_layer(fqn: str) -> tuple[str, str]:
    """Return (layer, module): "model.layers.3.mlp.w" -> ("model.layers.3", "mlp.w"); ("", fqn) outside of layers."""
    match = _LAYER.match(fqn)
    return (f"{match[1]}{match[2]}", match[3]) if match else ("", fqn)


def heat_map(changes: Mapping[str, float]) -> Panel:
    """Return a grid of layers by modules.

    Args:
        changes: FQN -> relative change: max |a - b| / max |a|; 0 where equal, inf or NaN where not finite.
    """
    if not changes:
        return Panel("Change by layer", "The two have no tensor in common, by name and shape.", "")
    cells: dict[tuple[str, str], float] = {}
    layers: dict[str, None] = {}
    modules: dict[str, None] = {}
    for fqn, change in changes.items():
        layer, module = split_layer(fqn)
        layers.setdefault(layer)
        modules.setdefault(module)
        cells[layer, module] = change
    width = (WIDTH - LEFT - RIGHT) / max(len(modules), 1)
    parts = []
    every = max(1, math.ceil(12 / width))  # where columns are narrow, not all have room for a name
    for j, module in list(enumerate(modules))[::every]:
        x = LEFT + j * width + width / 2
        parts.append(f'<g transform="translate({x:.1f} 116) rotate(-40)">{text(0, 0, label(module, 150.0))}</g>')
    for i, layer in enumerate(layers):
        y = 126 + i * CELL
        parts.append(text(LEFT - 8, y + 13, label(layer or "(no layer)", LEFT - 12), anchor="end"))
        for j, module in enumerate(modules):
            if (layer, module) in cells:
                change = cells[layer, module]
                parts.append(
                    rect(
                        LEFT + j * width,
                        y,
                        width - 1,
                        CELL - 1,
                        fill=_heat(change),
                        title=f"{layer}.{module}\nrelative change {change:.3g}",
                    )
                )
    words = (
        "Rows are layers, columns modules; grey is equal, and each step towards red is ten times more relative change."
    )
    bottom = 138 + len(layers) * CELL
    for i, (change, name) in enumerate(_LEGEND.items()):
        parts.append(rect(LEFT + i * 110, bottom, 12, 12, fill=_heat(change)))
        parts.append(text(LEFT + i * 110 + 17, bottom + 10, name, kind="soft"))
    return Panel("Change by layer", words, svg(WIDTH, bottom + 20, "".join(parts)))


def _heat(change: float) -> str:
    if change == 0:
        return "#c9ced8"
    if not math.isfinite(change):
        return "hsl(300 70% 45%)"
    heat = min(max((math.log10(change) + 7) / 7, 0.0), 1.0)  # 1e-7 .. 1
    return f"hsl({50 - 50 * heat:.0f} {70 + 15 * heat:.0f}% {82 - 36 * heat:.0f}%)"
