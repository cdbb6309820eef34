"""Draws how much two checkpoints differ, by layer and module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from ckptkit.offline.pictures.page import Panel, escaped, label, svg, text
from ckptkit.units import counted

WIDTH, LEFT, RIGHT, CELL = 1100.0, 150.0, 150.0, 18.0  # RIGHT leaves room for the last column's slanted name
MAX_ROWS = 180  # with the smallest cells, a grid of this many rows fits on a page
MAX_CELLS = 1500  # in larger grids, names that differ only in a number, such as an expert's, share a cell
_LEGEND = {0.0: "equal", 1e-6: "1e-6", 1e-4: "1e-4", 1e-2: "0.01", 1.0: "1 and more", math.inf: "NaN or infinite"}
_OTHER, _ASIDE = "other state", ("rng.", "extra.")
_PREFIXED = re.compile(r"(?P<part>optimizer|master): (?P<fqn>\S+)(?: (?P<state>\S+))?$")
_COUNTER = "step"  # it counts updates, so a difference says nothing about the weights
_LAYER = re.compile(r"(?<!\d)(\d+)\.")  # without the lookbehind, a name of a million digits would take hours
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a name component that is a number


def split_layer(fqn: str) -> tuple[str, str]:
    """Return a name's layer and module, such as ("model.layers.3", "mlp.w"), or ("", fqn) outside of layers."""
    match = _LAYER.search(fqn)
    return (fqn[: match.end() - 1], fqn[match.end() :]) if match else ("", fqn)


def layer_of(name: str) -> tuple[int, str]:
    """Return a tensor's group and row in a summary by layer.

    The groups are the model (0), the optimizer (1) and other tensors (2). Each optimizer state has its own row. Each
    tensor outside of the layers has its own row, too.
    """
    match = _PREFIXED.match(name)
    if match is not None:
        return 1, _part(name)[0]
    other = name.startswith(_ASIDE)
    return 2 * other, name if other else split_layer(name)[0] or name


def heat_maps(changes: Mapping[str, float]) -> list[Panel]:
    """Return grids of layers and modules: an open panel for the model, a folded panel per optimizer state.

    The optimizer's step counters are hidden; a panel's text says how many there are.

    Args:
        changes: The relative changes (max |a - b| / max |a|) by name. 0 means equal tensors, and a change may be inf or
            NaN. Names are FQNs, "optimizer: FQN STATE" or "master: FQN", as in a `diff` report.
    """
    parts: dict[str, dict[str, float]] = {}
    for name, change in changes.items():
        part, fqn = _part(name)
        parts.setdefault(part, {})[fqn] = change
    counters = parts.pop(f"optimizer: {_COUNTER}", {})
    if not parts:
        return [Panel("Change by layer", "The checkpoints have no tensor in common (by name and shape).", "")]
    words = (
        "Rows are layers, columns are modules. Colour shows the largest change relative to the largest value, on a "
        "logarithmic scale; grey is equal."
    )
    if counters:
        words += f" {counted(len(counters), 'step counter', 'are')} hidden."
    panels: list[Panel] = []
    for part, of_part in parts.items():
        differ = f"{sum(map(bool, of_part.values()))} of {len(of_part)} tensors differ"
        cells = {fqn: [change] for fqn, change in of_part.items()}
        more = ""
        if len(cells) > MAX_CELLS:
            cells = _fold(of_part)
            more += " Numbered modules, such as experts, share a cell." * (len(cells) < len(of_part))
        rows = len({split_layer(fqn)[0] for fqn in cells})
        if (count := math.ceil(max(len(cells) / MAX_CELLS, rows / MAX_ROWS))) > 1:
            cells = _fold_layers(cells, count)
            more += f" A row shows {count} consecutive layers, named by the first."
        panels.append(Panel(f"Change by layer: {part}", words + more, _grid(cells), behind=differ if panels else ""))
    return panels


def _part(name: str) -> tuple[str, str]:
    """Return the grid in which a tensor is drawn ("model", "optimizer: exp_avg"), and the tensor's FQN."""
    match = _PREFIXED.match(name)
    if match is None:
        return (_OTHER if name.startswith(_ASIDE) else "model"), name
    if match["state"]:
        return f"optimizer: {match['state']}", match["fqn"]
    return match["part"], match["fqn"]


def _fold(changes: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the changes by layer and module. Numbers in the module's name become "*": "mlp.experts.*.up.weight"."""
    found: dict[str, list[float]] = {}
    for fqn, change in changes.items():
        layer, module = split_layer(fqn)
        found.setdefault(f"{layer}.{_NUMBER.sub('*', module)}".strip("."), []).append(change)
    return found


def _fold_layers(cells: Mapping[str, list[float]], count: int) -> dict[str, list[float]]:
    """Combine the changes of each group of `count` consecutive layers, under the name of the group's first layer."""
    found: dict[str, list[float]] = {}
    for fqn, changes in cells.items():
        match = _LAYER.search(fqn)
        name = fqn
        if match and len(match[1]) < 19:
            name = f"{fqn[: match.start()]}{int(match[1]) // count * count}{fqn[match.end() - 1 :]}"
        found.setdefault(name, []).extend(changes)
    return found


def _in_order(layers: Iterable[str]) -> list[str]:
    """Sort layers with the same prefix by their number, because a file may list layer 10 before layer 2."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for layer in layers:
        prefix = layer.rstrip("0123456789")
        kinds.setdefault(prefix, []).append((int(layer[len(prefix) :][:18] or -1), layer))
    return [layer for rows in kinds.values() for _, layer in sorted(rows)]


def _grid(changes: Mapping[str, list[float]]) -> str:
    modules = list(dict.fromkeys(split_layer(fqn)[1] for fqn in changes))
    layers = _in_order(dict.fromkeys(split_layer(fqn)[0] for fqn in changes))
    cell = min(CELL, max(5.0, 850.0 / len(layers)))
    width = min((WIDTH - LEFT - RIGHT) / len(modules), 64.0)
    y = 20 + 3.95 * min(32, max(map(len, modules)))  # leaves room for the slanted names above
    every = max(1, math.ceil(13 / width))  # if columns are narrow, only every n-th column has a label
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
    cells: dict[str, list[str]] = {}  # by colour
    for fqn, values in changes.items():
        layer, module = split_layer(fqn)
        change = max(values, key=lambda value: (not math.isfinite(value), value))
        words = "equal" if change == 0 else f"relative change {change:.2g}"
        if len(values) > 1:
            words = f"{len(values)} tensors, {'all' if change == 0 else 'largest'} {words}"
        x, middle = LEFT + column_of[module] * width, y + (row_of[layer] + 0.5) * cell
        cells.setdefault(_look(change), []).append(_cell(x, middle, width - gap, f"{fqn}\n{words}"))
    parts += [f'<g {look} stroke-width="{cell - gap:g}">{"".join(mine)}</g>' for look, mine in cells.items()]
    y += len(layers) * cell
    for i, (change, name) in enumerate(_LEGEND.items()):
        x = LEFT + i * 110
        parts.append(f'<g {_look(change)} stroke-width="12">{_cell(x, y + 18, 12)}</g>')
        parts.append(text(x + 17, y + 22, name, kind="soft"))
    return svg(WIDTH, y + 32, "".join(parts))


def _cell(x: float, middle: float, width: float, title: str = "") -> str:
    """Return a cell as a thick line. The SVG group sets its colour and height, so that large grids make small files."""
    inside = f"<title>{escaped(title)}</title>" if title else ""
    return f'<path d="M{x:.6g} {middle:.6g}h{width:.4g}">{inside}</path>'


def _look(change: float) -> str:
    """Return the SVG attributes of cells with the relative change `change`. Each factor of ten has three shades."""
    if change == 0:
        return 'class="equal"'
    if not math.isfinite(change):
        return 'stroke="hsl(300 70% 45%)"'
    heat = min(max(round(3 * math.log10(change) + 21) / 21, 0.0), 1.0)  # 1e-7 -> 0, 1 -> 1
    return f'stroke="hsl({50 - 50 * heat:.0f} {70 + 15 * heat:.0f}% {82 - 36 * heat:.0f}%)"'
