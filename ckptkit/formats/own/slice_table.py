"""Encodes the slices that each rank wrote, and builds the manifest of a FULL or LOCAL checkpoint from them on rank
0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, CatalogInfo, Digest, MeshInfo, SliceArray, TensorEntry, TensorSlice
from ckptkit.digests import DIGEST, hex_digest_of
from ckptkit.errors import CorruptCheckpointError, SaveError
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS, Manifest
from ckptkit.formats.own.reader import role_of
from ckptkit.formats.own.record import MANIFEST_NAME, FileRecord
from ckptkit.storage.store import Store


class SliceRow(NamedTuple):
    """A slice that a rank wrote: a box's row-major bytes, and their digest."""

    key: str
    dtype: str
    shape: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    path: str
    start: int
    nbytes: int
    digest: int
    placement: Sequence[Any] | None = None


@dataclass(slots=True)
class TablePart:
    """The slices that one rank wrote."""

    rank: int
    rows: list[SliceRow] = field(default_factory=list)
    meshes: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the part as JSON."""
        files = {path: [item.nbytes, item.checksum, item.outlined] for path, item in self.files.items()}
        return json.dumps([self.rank, self.rows, self.meshes, files], separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> TablePart:
        """Parse a part that a rank in this save has sent."""
        rank, rows, meshes, files = json.loads(data)
        found = {path: FileRecord(*item) for path, item in files.items()}
        return cls(rank, [SliceRow(*row) for row in rows], meshes, found)


def write_manifest(
    parts: Sequence[TablePart],
    store: Store,
    *,
    format: str,
    save_id: str,
    extra: Mapping[str, Any],
    aliases: Mapping[str, Mapping[str, str]],
    sync: bool,
) -> dict[str, FileRecord]:
    """Write `manifest.safetensors` for all ranks' slices, and return this file.

    Args:
        aliases: By section, the tied weights: each with the name under which it is stored.

    Raises:
        SaveError: Ranks disagree about a tensor, or some of its elements are missing.
    """
    meshes: list[dict[str, Any]] = []
    table: dict[str, tuple[str, tuple[int, ...], list[TensorSlice]]] = {}
    placements: dict[str, Any] = {}
    files: dict[str, FileRecord] = {}
    for part in sorted(parts, key=lambda p: p.rank):
        files.update(part.files)
        chosen = [mesh_index(mesh, meshes) for mesh in part.meshes]
        for row in part.rows:
            shape, box = tuple(row.shape), Box(tuple(row.offsets), tuple(row.sizes))
            about = table.setdefault(row.key, (row.dtype, shape, []))
            if about[:2] != (row.dtype, shape):
                raise SaveError(
                    f"tensor {row.key!r} is {row.dtype} {list(row.shape)} on rank {part.rank}, but {about[0]} "
                    f"{list(about[1])} on another."
                )
            digest = Digest(DIGEST, row.digest, row.start, row.nbytes)
            about[2].append(TensorSlice(box, row.path, row.start, row.nbytes, digest=digest, rank=part.rank))
            if row.placement is not None:
                placements[row.key] = [chosen[row.placement[0]], row.placement[1]]
    entries = entries_of(table)
    for entry in entries.values():
        try:
            entry.check_coverage()
        except CorruptCheckpointError as error:
            raise SaveError(f"{error} Do all ranks hold the same model?") from error
    tied = {"aliases": {name: table for name, table in aliases.items() if table}} if any(aliases.values()) else {}
    info = CatalogInfo(
        format,
        producer="ckptkit",
        world_size=len(parts),
        mesh=MeshInfo(tuple(meshes[0]["shape"]), tuple(meshes[0]["names"])) if meshes else None,
        files={path: item.nbytes for path, item in files.items()},
        extra={**extra, **tied, "save_id": save_id, MESHES: meshes, PLACEMENTS: placements},
    )
    data = Manifest.of(Catalog(entries, {}, info)).to_bytes()
    store.write(MANIFEST_NAME, data, sync=sync)
    return {MANIFEST_NAME: FileRecord(len(data), hex_digest_of(data))}


def mesh_index(mesh: dict[str, Any], meshes: list[dict[str, Any]]) -> int:
    """Return a mesh's index in the list, after appending the mesh if it is new."""
    if mesh not in meshes:
        meshes.append(mesh)
    return meshes.index(mesh)


def entries_of(table: Mapping[str, tuple[str, tuple[int, ...], Sequence[TensorSlice]]]) -> dict[str, TensorEntry]:
    """Return catalog entries by key, given (dtype, shape, slices) by key. Our own keys determine the roles."""
    entries = {}
    for key, (dtype, shape, slices) in table.items():
        role, fqn, state = role_of(key)
        entries[key] = TensorEntry(key, dtype, shape, SliceArray.of(slices, len(shape)), role, fqn, state)
    return entries
