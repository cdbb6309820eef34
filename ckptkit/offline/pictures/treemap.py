"""Draws the bytes of each module as a treemap (squarified: Bruls, Huizing, van Wijk 2000)."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.offline.inspect import TreeNode
from ckptkit.offline.pictures.page import Panel, label, rect, svg, text
from ckptkit.units import format_count, format_size

WIDTH, HEIGHT = 1100.0, 420.0
Rect = tuple[float, float, float, float]


def treemap(tree: TreeNode) -> Panel:
    """Draw a model's modules as nested areas, each in proportion to the module's bytes."""
    total = max(tree.nbytes, 1)
    body: list[str] = []
    _draw(tree, (0.0, 0.0, WIDTH, HEIGHT), "", 0, total, body)
    words = "Area shows bytes; hover over a module for its share."
    return Panel("Sizes by module", words, svg(WIDTH, HEIGHT, "".join(body)))


def _draw(node: TreeNode, area: Rect, prefix: str, depth: int, total: int, body: list[str]) -> None:
    x, y, w, h = area
    name = f"{prefix}.{node.name}".strip(".")
    if depth and (w < 1.5 or h < 1.5):
        return
    if depth:
        share = f"{format_size(node.nbytes)} · {format_count(node.numel)} elements · {100 * node.nbytes / total:.1f}%"
        # The colour shows the kind of module: it is the same in every layer.
        kind = ".".join([part for part in name.split(".") if not part.isdecimal()][:3])
        hue = sum(ord(c) * (i + 1) for i, c in enumerate(kind)) * 47 % 360
        fill = f"hsl({hue} 45% {min(60 + 8 * depth, 88)}%)"
        body.append(rect(x, y, w, h, fill=fill, title=f"{name}\n{share}"))
        if w > 24 and h > 15:
            words = f"{node.name} · {format_size(node.nbytes)}"  # always shown, because there is no hover on paper
            body.append(text(x + 4, y + 12, label(words if len(words) * 6.1 < w - 8 else node.name, w - 8), kind="on"))
    inner = (x, y, w, h) if not depth else (x + 2, y + 16, w - 4, h - 18)
    children = [child for child in node.children if child.nbytes > 0]
    if children and inner[2] > 36 and inner[3] > 18:  # smaller areas have no room for names
        children.sort(key=lambda child: -child.nbytes)
        for child, place in zip(children, squarify([c.nbytes for c in children], inner), strict=True):
            _draw(child, place, name, depth + 1, total, body)


def squarify(sizes: Sequence[float], area: Rect) -> list[Rect]:
    """Return one rectangle per size. The sizes must be sorted, largest first.

    The rectangles fill `area` in proportion to the sizes, and are as square as a layout in rows allows.
    """
    x, y, w, h = area
    scale = w * h / sum(sizes)
    left = [size * scale for size in sizes]
    placed: list[Rect] = []
    while left:
        side = min(w, h)
        row = [left[0]]
        while len(row) < len(left) and _worst([*row, left[len(row)]], side) <= _worst(row, side):
            row.append(left[len(row)])
        thickness = sum(row) / side if side else 0.0
        along = 0.0
        for size in row:
            length = size / thickness if thickness else 0.0
            placed.append((x, y + along, thickness, length) if w >= h else (x + along, y, length, thickness))
            along += length
        if w >= h:
            x, w = x + thickness, w - thickness
        else:
            y, h = y + thickness, h - thickness
        left = left[len(row) :]
    return placed


def _worst(row: Sequence[float], side: float) -> float:
    total = sum(row)
    if not total or not side or not min(row):
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))
