"""Draws which rank holds which slice: one bar per tensor, split by rank, and the bytes of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckptkit.catalog.entry import Role, TensorEntry, TensorSlice
from ckptkit.offline.pictures.page import PAGE, Panel, colour, label, rect, svg, text
from ckptkit.units import format_size

__all__ = ["rank_totals", "shard_map"]

WIDTH, LEFT, RIGHT, ROW = 1100, 350, 180, 18
MAX_TENSORS, MAX_SLICES = 300, 8_000
NARROW = 12  # ranks side by side: "63: 10.5 GB" has room
FOLD_BEYOND = 48  # tensors: more fit no screen, and layers that are cut alike are one row
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a name that is a number


def rank_totals(entries: Iterable[TensorEntry]) -> dict[int, int]:
    """Return the bytes that each rank wrote, by rank (-1 where it is not known)."""
    totals: dict[int, int] = {}
    for entry in entries:
        slices = entry.slices
        for row, (_, _, nbytes) in enumerate(slices.records()):
            rank = -1 if slices.ranks is None else int(slices.ranks[row])
            totals[rank] = totals.get(rank, 0) + nbytes
    return dict(sorted(totals.items()))


def shard_map(entries: Iterable[TensorEntry], *, heading: str = "Shard map") -> Panel:
    """Return the map of these tensors in their order. Layers that are cut alike are one row where there are many;
    where that is still too much the smaller tensors are omitted, and counted in the explanation."""
    every = list(entries)
    flat = [entry for entry in every if entry.numel > 1] or every
    groups = _folded(flat) if len(flat) > FOLD_BEYOND else [[entry] for entry in flat]
    chosen: set[int] = set()
    slices = 0
    for i in sorted(range(len(groups)), key=lambda i: -groups[i][0].nbytes)[:MAX_TENSORS]:
        slices += len(groups[i][0].slices)
        if slices > MAX_SLICES and chosen:
            break
        chosen.add(i)
    drawn = [group for i, group in enumerate(groups) if i in chosen]
    totals = rank_totals(every)
    count = max(totals, default=0) + 1
    body, y = _totals(totals, count)
    pictures = []
    for group in drawn:
        if y + ROW > PAGE:
            pictures.append(svg(WIDTH, y, body))
            body, y = "", 0.0
        body += _row(group, y, count)
        y += ROW
    pictures.append(svg(WIDTH, y + 6, body))
    return Panel(heading, _explanation(every, flat, drawn), "".join(pictures))


def _explanation(
    every: Sequence[TensorEntry], flat: Sequence[TensorEntry], drawn: Sequence[Sequence[TensorEntry]]
) -> str:
    words = ["One bar per tensor, split by rank; hover over a slice to see its box, bytes and file."]
    shown = sum(map(len, drawn))
    if len(drawn) < shown:
        words.append("Tensors with the same shape and sharding share a bar.")
    if shown < len(flat):
        words.append(f"The {shown} largest of {len(flat)} tensors are drawn.")
    if len(flat) < len(every):
        words.append(f"{len(every) - len(flat)} scalar tensors are hidden.")
    return " ".join(words)


def _folded(entries: Iterable[TensorEntry]) -> list[list[TensorEntry]]:
    """Return the entries in groups: those whose names differ by numbers alone, with one shape, cut and owners."""
    groups: dict[tuple[object, ...], list[TensorEntry]] = {}
    for entry in entries:
        slices = entry.slices
        ranks = b"" if slices.ranks is None else slices.ranks.tobytes()
        cut = (entry.shape, entry.dtype, slices.offsets.tobytes(), slices.sizes.tobytes(), ranks)
        groups.setdefault((_NUMBER.sub("#", _name(entry)), *cut), []).append(entry)
    return list(groups.values())


def _name(entry: TensorEntry) -> str:
    """What the tensor belongs to first: that is what the eye looks for."""
    if not entry.fqn:
        return entry.name
    return f"{entry.fqn} · {entry.state}" if entry.state and entry.role is not Role.MASTER else entry.fqn


def _group_name(names: Sequence[str]) -> str:
    """Return one name for names that differ by numbers: "layers.{0-79}.mlp.up"."""
    if len(names) == 1:
        return names[0]
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
    numbers = iter([sorted(set(column)) for column in columns])
    return _NUMBER.sub(lambda _: _ranges(next(numbers)), names[0])


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}"; at most two ranges are spelled out."""
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return "{" + (",".join(words) if len(words) < 4 else f"{words[0]},{words[1]},…") + "}"


def _totals(totals: Mapping[int, int], count: int) -> tuple[str, float]:
    """The bytes of each rank as bars, wrapped into as many lines as they need."""
    largest = max(totals.values(), default=1) or 1
    columns = min(max(len(totals), 1), NARROW)
    cell = WIDTH / columns
    parts = []
    for i, (rank, nbytes) in enumerate(totals.items()):
        x, y = (i % columns) * cell, (i // columns) * 34
        name = f"rank {rank}" if rank >= 0 else "writer not recorded"
        parts.append(
            rect(
                x, y + 14, (cell - 8) * nbytes / largest, 10, fill=colour(rank, count), title=f"{name}: {nbytes} bytes"
            )
        )
        short = f"{rank}: " if columns == NARROW else f"{name} · "
        parts.append(text(x, y + 11, label(short + format_size(nbytes), cell - 4)))
    lines = -(-len(totals) // columns)
    return "".join(parts), lines * 34 + 12.0


def _row(group: Sequence[TensorEntry], y: float, count: int) -> str:
    entry = group[0]
    name = _group_name([_name(one) for one in group])
    parts = [text(LEFT - 10, y + 12, label(name, LEFT - 16), anchor="end")]
    shape = "x".join(map(str, entry.shape)) or "scalar"
    times = f"{len(group)} of " if len(group) > 1 else ""
    parts.append(text(WIDTH - RIGHT + 10, y + 12, label(f"{times}{shape} {entry.dtype}", RIGHT - 14), kind="soft"))
    across, down = _cut_dimensions(entry)
    width = WIDTH - LEFT - RIGHT
    for part in () if entry.slices.opaque else entry.slices:
        if not part.nbytes and entry.numel:
            continue
        x, w = _extent(part, entry, across)
        v, h = _extent(part, entry, down)
        parts.append(
            rect(
                LEFT + x * width,
                y + 2 + v * (ROW - 4),
                w * width,
                h * (ROW - 4),
                fill=colour(part.rank, count),
                title=_title(entry.name, part) + (f"\nand {len(group) - 1} like it" if len(group) > 1 else ""),
            )
        )
    return "".join(parts)


def _cut_dimensions(entry: TensorEntry) -> tuple[int, int]:
    """The dimension cut into most parts, and the next one; -1 where there is none."""
    cuts = [(len(set(entry.slices.offsets[:, d].tolist())), -d) for d in range(len(entry.shape))]
    order = sorted(range(len(cuts)), key=lambda d: cuts[d], reverse=True)
    across = order[0] if order else -1
    down = order[1] if len(order) > 1 and cuts[order[1]][0] > 1 else -1
    return across, down


def _extent(part: TensorSlice, entry: TensorEntry, dim: int) -> tuple[float, float]:
    if dim < 0 or not entry.shape[dim]:
        return 0.0, 1.0
    return part.box.offsets[dim] / entry.shape[dim], part.box.sizes[dim] / entry.shape[dim]


def _title(name: str, part: TensorSlice) -> str:
    box = ", ".join(f"{o}:{o + s}" for o, s in zip(part.box.offsets, part.box.sizes, strict=True))
    owner = f"rank {part.rank}" if part.rank >= 0 else "writer not recorded"
    return f"{name}[{box}]\n{owner} · {part.nbytes} bytes\n{part.path} @ {part.start}"
