"""Describes a checkpoint from its metadata: sections, dtypes, sizes, module tree, and which rank wrote each slice."""

from __future__ import annotations

import fnmatch
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from ckptkit.arguments import Location, check_int, location
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.formats.detect import open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.report import plain

SCHEMA = "ckptkit.inspect/1"
_Sized: TypeAlias = tuple[TensorEntry, int, int]  # tensor, elements, bytes


@dataclass(frozen=True, slots=True)
class RoleSummary:
    """The number of tensors in one role, such as the model or the optimizer, and their elements and bytes.

    Replicas count once.
    """

    role: str
    tensors: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]  # bytes by dtype
    placements: Mapping[str, int]  # number of tensors by sharding: "whole", "dim 0 in 4", "dim 0 in 2 x dim 1 in 2"


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """One slice: its offsets and sizes in the tensor, the rank that wrote it, and its byte range in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `slices` is filled only if requested."""

    name: str
    fqn: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    slice_count: int
    slices: tuple[SliceInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module of the model. The totals include all submodules."""

    name: str
    tensors: int
    numel: int
    nbytes: int
    children: tuple[TreeNode, ...]


@dataclass(frozen=True, slots=True)
class InspectReport:
    """The result of `inspect`. docs/json.md explains the fields."""

    url: str
    note: str
    format: str
    producer: str
    step: int | None
    world_size: int | None
    mesh: Mapping[str, int] | None
    sections: tuple[RoleSummary, ...]
    largest: tuple[TensorInfo, ...]
    tensors: tuple[TensorInfo, ...]
    tree: TreeNode | None
    tied: Mapping[str, str]  # name -> the tensor with which it shares its bytes
    objects: tuple[str, ...]
    uninterpreted: Mapping[str, str]  # tensors of unknown classes -> why they cannot be read
    files: Mapping[str, int]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.inspect/1")."""
        return {"schema": SCHEMA, **plain(self)}


def inspect(
    url: Location,
    *,
    tensors: str | None = None,
    depth: int = 2,
    storage_options: Mapping[str, Any] | None = None,
    options: ReadOptions | None = None,
) -> InspectReport:
    """Describe the checkpoint at `url`. Reads only metadata.

    Args:
        tensors: A glob. The tensors whose name or FQN matches are listed with their slices.
        depth: Number of module levels in the tree.
        storage_options: Options for the fsspec file system of a remote URL.
        options: Information that the files do not contain; see `ReadOptions`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CkptkitError: The checkpoint cannot be opened. The message names the file and the problem.
    """
    check_int("depth", depth, least=0)
    source = open_source(
        resolve_url(location("url", url), storage_options=storage_options),
        storage_options=storage_options,
        options=options or ReadOptions(),
    )
    return summarise(source.catalog, url=source.url, note=source.note or "", tensors=tensors, depth=depth)


@collector_paused()
def summarise(
    catalog: Catalog, *, url: str = "", note: str = "", tensors: str | None = None, depth: int = 2
) -> InspectReport:
    """Return the report on an open catalog."""
    info, mesh = catalog.info, catalog.info.mesh
    entries = list(catalog.tensors.values())
    shown = [e for e in entries if tensors and any(fnmatch.fnmatchcase(name, tensors) for name in (e.name, e.fqn))]
    itemsizes = {dtype: dtype_of(dtype).itemsize for dtype in {e.dtype for e in entries}}
    sized = [(e, n := e.numel, n * itemsizes[e.dtype]) for e in entries]  # computed once, because there may be 300,000
    model = [item for item in sized if item[0].role is Role.MODEL]
    opaque = dict(info.extra.get("opaque", {}))
    opaque.update((e.name, why) for e in catalog.in_parts() if e.role is Role.MODEL and (why := e.slices.opaque))
    largest = heapq.nlargest(8, model, key=itemgetter(2))
    dims = () if mesh is None else mesh.names or tuple(f"dim{i}" for i in range(len(mesh.shape)))
    return InspectReport(
        url=url,
        note=note,
        format=info.format,
        producer=info.producer,
        step=info.step,
        world_size=info.world_size,
        mesh=None if mesh is None else dict(zip(dims, mesh.shape, strict=False)),
        sections=tuple(_sections(sized)),
        largest=tuple(_tensor(e, slices=False) for e, _, _ in largest),
        tensors=tuple(_tensor(e, slices=True) for e in shown),
        tree=_tree("", [(e.fqn.split(".", depth), numel, nbytes) for e, numel, nbytes in model], depth),
        tied=_tied(catalog, model),
        objects=tuple(name for name in catalog.objects if name not in opaque),
        uninterpreted=opaque,
        files=dict(info.files),
        notes=tuple(note for note in info.notes if not note.startswith("not interpreted: ")),
    )


def _sections(sized: Iterable[_Sized]) -> Iterable[RoleSummary]:
    by_role: dict[Role, list[_Sized]] = {}
    for item in sized:
        by_role.setdefault(item[0].role, []).append(item)
    for role in Role:
        mine = by_role.get(role)
        if not mine:
            continue
        dtypes: dict[str, int] = {}
        for entry, _, nbytes in mine:
            dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + nbytes
        placements = Counter(_cut(entry) for entry, _, _ in mine)
        numel, nbytes = (sum(map(itemgetter(i), mine)) for i in (1, 2))
        yield RoleSummary(role.value, len(mine), numel, nbytes, dtypes, dict(placements))


def _cut(entry: TensorEntry) -> str:
    """Describe how a tensor is sharded. Uses the tensor's slices, because few formats record placements."""
    slices = entry.slices
    if len(slices) < 2 or not entry.numel:
        return "whole"
    counts = [len(np.unique(slices.offsets[:, dim])) for dim in range(len(entry.shape))]
    cuts = [f"dim {dim} in {count}" for dim, count in enumerate(counts) if count > 1]
    return " x ".join(cuts) or "whole, in replicas"


def _tied(catalog: Catalog, model: Iterable[_Sized]) -> dict[str, str]:
    """Return a mapping from each tied tensor to the tensor with which it shares its bytes.

    Finds the ties that the checkpoint records, and tensors whose bytes are at the same offsets of the same file.
    """
    found: dict[str, str] = {}
    for names in catalog.info.extra.get("aliases", {}).values():
        found.update(names)
    first: dict[Any, tuple[str, tuple[int, ...]]] = {}
    for entry, _, nbytes in model:
        if nbytes and not entry.slices.opaque:
            # A compressed slice's range refers to its decompressed record, so its place includes the record.
            place = entry.slices.byte_range(0), entry.slices.codecs.get(0)
            kept, shape = first.setdefault(place, (entry.fqn, entry.shape))
            if kept != entry.fqn and entry.shape == shape:
                found.setdefault(entry.fqn, kept)
    return found


def _tensor(entry: TensorEntry, *, slices: bool) -> TensorInfo:
    rows: tuple[SliceInfo, ...] = ()
    part = entry.slices
    if slices and part.opaque:  # the whole records, because only their class knows where the elements are
        ranks = [-1] * len(part) if part.ranks is None else part.ranks.tolist()
        boxes = zip(map(tuple, part.offsets.tolist()), map(tuple, part.sizes.tolist()), ranks, strict=True)
        rows = tuple(SliceInfo(*box, *record) for box, record in zip(boxes, part.records(), strict=True))
    elif slices:
        rows = tuple(SliceInfo(s.box.offsets, s.box.sizes, s.rank, s.path, s.start, s.nbytes) for s in part)
    return TensorInfo(
        entry.name, entry.fqn, entry.role.value, entry.dtype, entry.shape, entry.nbytes, len(entry.slices), rows
    )


def _tree(name: str, entries: list[tuple[list[str], int, int]], depth: int, at: int = 0) -> TreeNode | None:
    """Return the node of a module, or None if `entries` is empty.

    Each entry is (name components, elements, bytes) of one of the module's tensors.
    """
    if not entries:
        return None
    groups: dict[str, list[tuple[list[str], int, int]]] = {}
    for item in entries if depth > 0 else ():
        if len(item[0]) > at:
            groups.setdefault(item[0][at], []).append(item)
    children = [_tree(part, below, depth - 1, at + 1) for part, below in groups.items()]
    return TreeNode(
        name,
        len(entries),
        sum(map(itemgetter(1), entries)),
        sum(map(itemgetter(2), entries)),
        tuple(child for child in children if child is not None),
    )
