"""Writes the commands' HTML pages: for a checkpoint, a run, a reshard or a diff."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.formats.detect import open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.offline.inspect import summarise
from ckptkit.offline.pictures.heat_map import heat_maps
from ckptkit.offline.pictures.page import page
from ckptkit.offline.pictures.reshard_map import reshard_map
from ckptkit.offline.pictures.shard_map import shard_maps
from ckptkit.offline.pictures.timeline import timeline
from ckptkit.offline.pictures.treemap import treemap
from ckptkit.units import format_count, format_size

if TYPE_CHECKING:
    from ckptkit.offline.diff import DiffReport
    from ckptkit.offline.listing import Listing


def write_inspect_page(
    url: str,
    path: str,
    *,
    other: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options: ReadOptions | None = None,
) -> None:
    """Write the page for the checkpoint at `url` to the file `path`.

    With `other`, also draw a reshard from `url` to the checkpoint at `other`.
    """
    address = resolve_url(url, storage_options=storage_options)
    source = open_source(address, storage_options=storage_options, options=options or ReadOptions())
    after = None
    if other is not None:
        address = resolve_url(other, storage_options=storage_options)
        after = open_source(address, storage_options=storage_options).catalog
    Path(path).write_text(inspect_page(source.catalog, source.url, after=after), encoding="utf-8")


def inspect_page(catalog: Catalog, url: str, *, after: Catalog | None = None) -> str:
    """Return the page for a catalog: shard map, sizes by module, and the bytes that a reshard to `after` would move."""
    report = summarise(catalog, url=url, depth=5)
    facts = [("format", report.format), ("files", f"{len(report.files)}")]
    facts += [("step", str(report.step))] * (report.step is not None)
    facts += [("ranks", str(report.world_size))] * (report.world_size is not None)
    if report.mesh:
        facts.append(("mesh", " x ".join(f"{name}={size}" for name, size in report.mesh.items())))
    facts += [(s.role, f"{format_count(s.numel)} elements · {format_size(s.nbytes)}") for s in report.sections]
    panels = shard_maps(catalog.tensors.values())
    if report.tree is not None and report.tree.nbytes:
        panels.append(treemap(report.tree))
    if after is not None:
        panels.append(reshard_map(catalog.tensors.values(), after.tensors.values()))
        panels += shard_maps(after.tensors.values(), when=" after")
    return page(url, panels, facts=facts)


def write_run_page(listing: Listing, path: str) -> None:
    """Write a run's timeline to the file `path`."""
    facts = [("checkpoints", str(len(listing.checkpoints))), ("total", format_size(listing.total_bytes))]
    facts += [("saved earlier, now gone", str(listing.absent))] * (listing.absent > 0)
    panel = timeline(listing.checkpoints, listing.policy)
    Path(path).write_text(page(listing.url, [panel], facts=facts), encoding="utf-8")


def write_diff_page(report: DiffReport, path: str) -> None:
    """Write a diff's heat maps to the file `path`."""
    facts = [("in", report.b), ("equal tensors", str(report.same)), ("different", str(len(report.different)))]
    shown = page(f"Changed since {report.a}", heat_maps(report.changes), facts=facts, source="tensors and digests")
    Path(path).write_text(shown, encoding="utf-8")
