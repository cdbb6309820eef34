"""Who holds which slice of which tensor: one bar a tensor, cut by rank, and the bytes of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptkit.catalog.entry import Role, TensorEntry, TensorSlice
from ckptkit.offline.pictures.page import Panel, colour, label, rect, svg, text
from ckptkit.units import format_size

__all__ = ["rank_totals", "shard_map"]

WIDTH, LEFT, RIGHT, ROW = 1100, 330, 150, 18
MAX_TENSORS, MAX_SLICES = 300, 20_000


def rank_totals(entries: Iterable[TensorEntry]) -> dict[int, int]:
    """Return the bytes that each rank wrote, by rank (-1 where it is not known)."""
    totals: dict[int, int] = {}
    for entry in entries:
        slices = entry.slices
        for row in range(len(slices)):
            rank = -1 if slices.ranks is None else int(slices.ranks[row])
            totals[rank] = totals.get(rank, 0) + int(slices.nbytes[row])
    return dict(sorted(totals.items()))


def shard_map(entries: Iterable[TensorEntry], *, heading: str = "Shard map") -> Panel:
    """Return the map of these tensors in their order; where there are too many, the smaller ones are left out and
    counted in the explanation."""
    every = list(entries)
    chosen: set[int] = set()
    slices = 0
    for i in sorted(range(len(every)), key=lambda i: -every[i].nbytes)[:MAX_TENSORS]:
        slices += len(every[i].slices)
        if slices > MAX_SLICES:
            break
        chosen.add(i)
    drawn = [entry for i, entry in enumerate(every) if i in chosen]
    totals = rank_totals(every)
    count = max(totals, default=0) + 1
    body, top = _totals(totals, count)
    for i, entry in enumerate(drawn):
        body += _row(entry, top + i * ROW, count)
    left_out = len(every) - len(drawn)
    more = f" The {len(drawn)} largest of {len(every)} tensors are drawn." if left_out else ""
    return Panel(
        heading,
        "One bar a tensor, cut where ranks meet; rest the pointer on a slice to see its box, bytes and file." + more,
        svg(WIDTH, top + len(drawn) * ROW + 6, body),
    )


def _totals(totals: Mapping[int, int], count: int) -> tuple[str, float]:
    """The bytes of each rank as bars, wrapped into as many lines as they need."""
    largest = max(totals.values(), default=1) or 1
    columns = min(max(len(totals), 1), 16)
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
        short = f"{rank}: " if columns == 16 else f"{name} · "
        parts.append(text(x, y + 11, label(short + format_size(nbytes), cell - 4)))
    lines = -(-len(totals) // columns)
    return "".join(parts), lines * 34 + 12.0


def _row(entry: TensorEntry, y: float, count: int) -> str:
    name = entry.fqn if entry.role is Role.MODEL else entry.name
    parts = [text(LEFT - 10, y + 12, label(name, LEFT - 16), anchor="end")]
    shape = "x".join(map(str, entry.shape)) or "scalar"
    parts.append(text(WIDTH - RIGHT + 10, y + 12, label(f"{shape} {entry.dtype}", RIGHT - 14), kind="soft"))
    across, down = _cut_dimensions(entry)
    width = WIDTH - LEFT - RIGHT
    for part in entry.slices:
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
                title=_title(name, part),
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
