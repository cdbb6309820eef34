"""Draws the slices of each rank. Each tensor is a bar whose parts show which bytes each rank stores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptkit.catalog.entry import Role, TensorEntry, TensorSlice
from ckptkit.offline.pictures.page import PAGE, Panel, colour, label, rect, svg, text
from ckptkit.units import counted, format_size

WIDTH, LEFT, RIGHT, ROW = 1100, 400, 250, 18
SHORTEST = 10.0  # minimum length of a bar in user units, so that a layer norm's slices stay visible
MAX_BARS, MAX_SLICES = 300, 8_000
NARROW = 12  # maximum number of ranks side by side, which leaves room for "63: 10.5 GB"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a name component that is a number
_Bar = list[TensorEntry]  # tensors of equal shape, dtype, sharding and owners: layers, or a parameter's moments


def rank_totals(entries: Iterable[TensorEntry]) -> dict[int, int]:
    """Return how many bytes each rank wrote, by rank. Rank -1 means that the rank is not recorded."""
    totals: dict[int, int] = {}
    for entry in entries:
        slices = entry.slices
        for row, (_, _, nbytes) in enumerate(slices.records()):
            rank = -1 if slices.ranks is None else int(slices.ranks[row])
            totals[rank] = totals.get(rank, 0) + nbytes
    return dict(sorted(totals.items()))


def shard_maps(entries: Iterable[TensorEntry], *, when: str = "") -> list[Panel]:
    """Return one map per role (model, optimizer, ...). With several ranks, a panel with the bytes per rank comes first.

    On the page, all maps except the first are collapsed. Layers with the same sharding share a bar, and so do a
    parameter's moments. If there are still too many bars, the shortest are omitted, and the explanation says how many
    tensors are drawn.

    `when`, such as " after", is part of each heading.
    """
    every = [entry for entry in entries if entry.numel]
    roles = {role: [entry for entry in every if entry.role is role] for role in Role}
    bars = {role: _bars([entry for entry in mine if entry.numel > 1] or mine) for role, mine in roles.items() if mine}
    totals = rank_totals(every)
    ranks = max(totals, default=0) + 1
    panels = [_ranks(totals, ranks, when)] if len(totals) > 1 else []
    first = next(iter(bars), None)
    for role, mine in bars.items():
        drawn, hidden = _longest(mine), len(roles[role]) - sum(map(len, mine))
        summary = f"{counted(len(roles[role]), 'tensor')}, {format_size(sum(entry.nbytes for entry in roles[role]))}"
        words = "Length shows bytes, colour shows the rank. Hover over a slice for its place and file."
        shown, count = sum(map(len, drawn)), sum(map(len, mine))
        if len(drawn) < shown:
            words += " Tensors with the same shape and sharding share a bar."
        if shown < count:
            words += f" The {shown} largest of {count} tensors are drawn."
        if hidden:
            words += f" {hidden} scalar {'tensor is' if hidden == 1 else 'tensors are'} hidden."
        picture, behind = "".join(_pictures(drawn, ranks)), "" if role is first else summary
        panels.append(Panel(f"Shard map{when}: {role.value}", words, picture, behind=behind))
    return panels


def _bars(entries: Iterable[TensorEntry]) -> list[_Bar]:
    """Return the tensors in groups.

    Tensors of a group differ only in the numbers in their names, or in the kind of optimizer state.
    """
    bars: dict[tuple[object, ...], _Bar] = {}
    for entry in entries:
        slices = entry.slices
        ranks = b"" if slices.ranks is None else slices.ranks.tobytes()
        split = (entry.shape, entry.dtype, slices.offsets.tobytes(), slices.sizes.tobytes(), ranks)
        bars.setdefault((_NUMBER.sub("#", entry.fqn or entry.name), *split), []).append(entry)
    return list(bars.values())


def _longest(bars: Sequence[_Bar]) -> list[_Bar]:
    """Return the longest bars, as many as fit on a page, in their original order."""
    chosen: set[int] = set()
    slices = 0
    for i in sorted(range(len(bars)), key=lambda i: -_nbytes(bars[i]))[:MAX_BARS]:
        slices += len(bars[i][0].slices)
        if slices > MAX_SLICES and chosen:
            break
        chosen.add(i)
    return [bar for i, bar in enumerate(bars) if i in chosen]


def _nbytes(bar: _Bar) -> int:
    return sum(entry.nbytes for entry in bar)


def _bar_name(bar: _Bar) -> str:
    """Return one name for a bar's tensors: "layers.{0-79}.mlp.up · exp_avg, exp_avg_sq"."""
    names = list(dict.fromkeys(entry.fqn or entry.name for entry in bar))
    states = dict.fromkeys(entry.state for entry in bar if entry.fqn and entry.role is not Role.MASTER)
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in names), strict=True)
    numbers = iter([sorted(set(column)) for column in columns])
    name = _NUMBER.sub(lambda _: _ranges(next(numbers)), names[0])
    return " · ".join(filter(None, (name, ", ".join(filter(None, states)))))


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as "{0-2,5}". If there are more than three ranges, only two are shown."""
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


def _ranks(totals: dict[int, int], count: int, when: str) -> Panel:
    """Draw each rank's bytes as a bar in the rank's colour, on as many lines as needed."""
    largest = max(totals.values()) or 1
    columns = min(len(totals), NARROW)
    cell = WIDTH / columns
    parts = []
    for i, (rank, nbytes) in enumerate(totals.items()):
        x, y = (i % columns) * cell, (i // columns) * 34
        name = f"rank {rank}" if rank >= 0 else "writer not recorded"
        fill, width = colour(rank, count), (cell - 8) * nbytes / largest
        parts.append(rect(x, y + 14, width, 10, fill=fill, title=f"{name}: {nbytes} bytes"))
        short = f"{rank}: " if columns == NARROW else f"{name} · "
        parts.append(text(x, y + 11, label(short + format_size(nbytes), cell - 4)))
    height = -(-len(totals) // columns) * 34
    return Panel(f"Bytes per rank{when}", "What each rank wrote.", svg(WIDTH, height, "".join(parts)))


def _pictures(bars: Sequence[_Bar], ranks: int) -> list[str]:
    """Draw the bars one below the other, in as many pictures as needed. Each picture fits on a sheet of paper."""
    longest = max(map(_nbytes, bars))
    pictures, body, y = [], "", 0.0
    for bar in bars:
        if y + ROW > PAGE:
            pictures.append(svg(WIDTH, y, body))
            body, y = "", 0.0
        body += _row(bar, y, longest, ranks)
        y += ROW
    return [*pictures, svg(WIDTH, y + 6, body)]


def _row(bar: _Bar, y: float, longest: int, ranks: int) -> str:
    entry, nbytes = bar[0], _nbytes(bar)
    parts = [text(LEFT - 10, y + 12, label(_bar_name(bar), LEFT - 16), anchor="end")]
    shape = "x".join(map(str, entry.shape)) or "scalar"
    times = f"{len(bar)} of " if len(bar) > 1 else ""
    facts = f"{format_size(nbytes)} · {times}{shape} {entry.dtype}"
    parts.append(text(WIDTH - RIGHT + 10, y + 12, label(facts, RIGHT - 14), kind="soft"))
    # The dimensions split into the most and the second most parts; -1 if there is no such dimension.
    counts = [len(set(entry.slices.offsets[:, dim].tolist())) for dim in range(len(entry.shape))]
    order = sorted(range(len(counts)), key=lambda dim: -counts[dim])
    across = order[0] if order else -1
    down = order[1] if len(order) > 1 and counts[order[1]] > 1 else -1
    length = max(SHORTEST, (WIDTH - LEFT - RIGHT) * nbytes / longest)
    alike = f"\nand {len(bar) - 1} like it" if len(bar) > 1 else ""
    for part in () if entry.slices.opaque else entry.slices:
        if not part.nbytes:
            continue
        x, w = _extent(part, entry, across)
        v, h = _extent(part, entry, down)
        box = ", ".join(f"{o}:{o + s}" for o, s in zip(part.box.offsets, part.box.sizes, strict=True))
        owner = f"rank {part.rank}" if part.rank >= 0 else "writer not recorded"
        title = f"{entry.name}[{box}]\n{owner} · {part.nbytes} bytes\n{part.path} @ {part.start}{alike}"
        place = (LEFT + x * length, y + 2 + v * (ROW - 4), w * length, h * (ROW - 4))
        parts.append(rect(*place, fill=colour(part.rank, ranks), title=title))
    return "".join(parts)


def _extent(part: TensorSlice, entry: TensorEntry, dim: int) -> tuple[float, float]:
    if dim < 0:
        return 0.0, 1.0
    return part.box.offsets[dim] / entry.shape[dim], part.box.sizes[dim] / entry.shape[dim]
