"""Reads LOCAL files: one safetensors file per rank, with local tensors and their offsets in the full tensors.

    local_<rank, five digits>.safetensors

The header's `__metadata__["ckptkit.local"]` is JSON: `{"version": 1, "rank", "world_size", "meshes", "tensors"}`.
"meshes" has the same form as in the manifest (`{"shape", "names", "ranks"}`). "tensors" has an item for each tensor in
the file: `[key, full shape, offsets, [mesh, placements] or null]`. A local tensor that consists of several regions of
the full tensor (a strided shard) is stored as one tensor per region, named `<key>#<region>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, CatalogInfo, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.hf.header import SafetensorsHeader, read_header
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.own.json import parse
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS
from ckptkit.formats.own.reader import role_of
from ckptkit.formats.own.record import NO_RECORD
from ckptkit.storage.store import Store
from ckptkit.units import first_few

METADATA_KEY = "ckptkit.local"
_MAX_RANKS = 1 << 20
_FILE = re.compile(r"local_([0-9]{5,9})\.safetensors")


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor in a rank's file.

    Attributes:
        name: Name of the tensor in the file.
        key: Name of the tensor in the checkpoint.
        shape: Shape of the full tensor.
        box: Region of the full tensor that this file contains.
        placement: (mesh index, one string per mesh dimension), or None if the tensor is not sharded.
    """

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    placement: tuple[int, tuple[str, ...]] | None


def file_name(rank: int) -> str:
    return f"local_{rank:05d}.safetensors"


def file_metadata(
    rank: int, world_size: int, meshes: Sequence[Mapping[str, Any]], tensors: Sequence[LocalTensor]
) -> dict[str, str]:
    """Return the `__metadata__` of a rank's file."""
    table = {
        t.name: [t.key, t.shape, t.box.offsets, None if t.placement is None else [t.placement[0], t.placement[1]]]
        for t in tensors
    }
    body = {"version": 1, "rank": rank, "world_size": world_size, "meshes": list(meshes), "tensors": table}
    return {METADATA_KEY: json.dumps(body, separators=(",", ":"))}


def is_local(store: Store) -> bool:
    """Return whether the directory at the store's root contains rank files in this format."""
    return any(_FILE.fullmatch(item.path) for item in store.list())


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of a directory of rank files that has no manifest. Reads the headers of all rank files.

    Raises:
        CheckpointNotFoundError: There are no rank files.
        IncompleteCheckpointError: A rank's file is missing.
        CorruptCheckpointError: A header violates the LOCAL format.
    """
    found = {int(m[1]): item for item in store.list() if (m := _FILE.fullmatch(item.path))}
    if not found:
        raise CheckpointNotFoundError(f"{store.url} has no file local_<rank>.safetensors.")
    slices: dict[str, list[TensorSlice]] = {}
    about: dict[str, tuple[str, tuple[int, ...]]] = {}
    placements: dict[str, Any] = {}
    meshes: list[Any] = []
    world_size = len(found)
    for rank, item in sorted(found.items()):
        path, header = item.path, read_header(store, item.path)
        body = _body(header, path, rank)
        world_size = max(world_size, body["world_size"])
        shift = len(meshes)
        meshes += body["meshes"]
        for name, stored in header.tensors.items():
            try:
                key, shape, offsets, placement = body["tensors"][name]
                shape, offsets = tuple(map(int, shape)), tuple(map(int, offsets))
                if placement is not None:
                    placements.setdefault(key, [int(placement[0]) + shift, [str(text) for text in placement[1]]])
            except (TypeError, ValueError, IndexError) as error:
                raise CorruptCheckpointError(
                    f"{path}: tensor {name!r} has a malformed description ({error})."
                ) from error
            if about.setdefault(key, (stored.dtype, shape)) != (stored.dtype, shape):
                raise CorruptCheckpointError(f"{path}: tensor {key!r} has a different dtype or shape on other ranks.")
            box = Box(offsets, stored.shape)
            if not box.within(shape):
                raise CorruptCheckpointError(f"{path}: tensor {name!r} is outside the shape {list(shape)} of {key!r}.")
            slices.setdefault(key, []).append(TensorSlice(box, path, stored.start, stored.nbytes, rank=rank))
    missing = [str(rank) for rank in range(world_size) if rank not in found]
    if missing:
        raise IncompleteCheckpointError(
            f"{store.url}: {world_size} ranks saved, but {len(missing)} of their files are missing: those of ranks "
            f"{first_few(missing)}."
        )
    entries = {}
    for key, found_slices in slices.items():
        dtype, shape = about[key]
        entries[key] = TensorEntry(key, dtype, shape, SliceArray.of(found_slices, len(shape)), *role_of(key))
    info = CatalogInfo(
        "ckptkit-local",
        producer="ckptkit",
        world_size=world_size,
        files={item.path: item.size for item in found.values()},
        extra={MESHES: meshes, PLACEMENTS: placements, "unproved": NO_RECORD},
        notes=(f"not proved: {NO_RECORD}",),
    )
    return Catalog(entries, {}, info)


def _body(header: SafetensorsHeader, path: str, rank: int) -> dict[str, Any]:
    try:
        body = parse(header.metadata[METADATA_KEY], file=f"{path}: its metadata")
        mine = body["version"] == 1 and body["rank"] == rank and rank < body["world_size"] < _MAX_RANKS
        if mine and isinstance(body["meshes"], list) and set(body["tensors"]) == set(header.tensors):
            return dict(body)
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path}: its metadata does not describe a rank's tensors ({error!r}).") from error
    raise CorruptCheckpointError(f"{path}: its metadata describes another rank, or other tensors.")
