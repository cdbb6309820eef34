"""The end of a `dcp.save` with our writer: `.metadata` and the manifest from torch's own Metadata and results."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import (
    Catalog,
    CatalogInfo,
    Digest,
    ObjectEntry,
    SliceArray,
    TensorEntry,
)
from ckptkit.formats.dcp_encode import RecordColumns, encode_metadata, payload_nbytes
from ckptkit.formats.dcp_roles import RoleTable
from ckptkit.formats.layout import MANIFEST_NAME, FileRecord
from ckptkit.formats.manifest import DIGEST, Manifest
from ckptkit.formats.outline import LEAST, spare_fields
from ckptkit.storage.store import Store

__all__ = ["Place", "write_finish"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item was written: the record, its payload (-1, and 0 bytes, where it is no plain tensor) and their
    digest."""

    path: str
    offset: int
    length: int
    payload: int
    nbytes: int
    digest: int
    file: FileRecord


def write_finish(
    store: Store,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    name: str,
    sync: bool,
    manifest: bool,
) -> None:
    """Write the index of a save, `.metadata` last. `metadata` itself is left without its storage data: torch
    broadcasts it to all ranks, which have no use for them."""
    places = {result.index: result.storage_data for found in results for result in found}
    chunks = list(_encoded(metadata, places))
    state, size = xxhash.xxh3_64(), 0
    for chunk in chunks:
        state.update(chunk)
        size += len(chunk)
    if manifest:
        files = {place.path: place.file for place in places.values()}
        files[name] = FileRecord(size, state.hexdigest())
        store.write(MANIFEST_NAME, _manifest(metadata, places, files, len(results)), sync=sync)
    with store.writer(name, sync=sync) as writer:
        for chunk in chunks:
            writer.write(chunk)


def _encoded(metadata: Metadata, places: dict[Any, Place]) -> Iterator[bytes]:
    if not _is_usual(metadata):
        infos = {index: _StorageInfo(p.path, p.offset, p.length) for index, p in places.items()}
        yield pickle.dumps(dataclasses.replace(metadata, storage_data=infos), protocol=4)
        return
    paths = sorted({place.path for place in places.values()})
    number = {path: i for i, path in enumerate(paths)}
    objects: dict[str, tuple[int, int, int]] = {}
    rows: dict[str, list[tuple[int, Place]]] = {}
    for index, place in places.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            rows.setdefault(index.fqn, []).append((index.index or 0, place))
        else:
            objects[index.fqn] = (number[place.path], place.offset, place.length)
    meta = metadata.storage_meta
    yield from encode_metadata(
        list(_columns(metadata, rows, number)),
        paths,
        objects=objects,
        planner_data=metadata.planner_data,
        checkpoint_id=str(meta.checkpoint_id) if meta else "",
        save_id=str(meta.save_id) if meta else "",
    )


def _is_usual(metadata: Metadata) -> bool:
    """Whether a planner left the metadata such as the default one makes them."""
    paths = metadata.planner_data
    plain = paths is None or (isinstance(paths, dict) and all(map(_is_path, paths.values())))
    usual = all(
        md.properties.layout is torch.strided and md.properties.memory_format is torch.contiguous_format
        for md in metadata.state_dict_metadata.values()
        if isinstance(md, TensorStorageMetadata)
    )
    return plain and usual and type(metadata) is Metadata


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and all(type(part) in (str, int) for part in path)


def _columns(
    metadata: Metadata, rows: dict[str, list[tuple[int, Place]]], number: dict[str, int]
) -> Iterator[RecordColumns]:
    for name, found in metadata.state_dict_metadata.items():
        if not isinstance(found, TensorStorageMetadata):
            continue
        placed = [place for _, place in sorted(rows.get(name, ()), key=lambda item: item[0])]
        shape = tuple(found.size)
        box = (len(placed), len(shape))
        yield RecordColumns(
            name,
            _dtype(found),
            shape,
            np.array([c.offsets for c in found.chunks], np.int64).reshape(box),
            np.array([c.sizes for c in found.chunks], np.int64).reshape(box),
            np.array([number[p.path] for p in placed], np.int32),
            np.array([p.offset for p in placed], np.int64),
            np.array([p.length for p in placed], np.int64),
        )


def _dtype(found: TensorStorageMetadata) -> str:
    return str(found.properties.dtype).removeprefix("torch.")


def _manifest(metadata: Metadata, places: dict[Any, Place], files: dict[str, FileRecord], world_size: int) -> bytes:
    keys: dict[str, Any] = metadata.planner_data if _is_usual(metadata) and metadata.planner_data else {}
    by_name: dict[str, list[tuple[int, Any, Place]]] = {}
    for index, place in places.items():
        by_name.setdefault(index.fqn, []).append((index.index or 0, index, place))
    rows = {name: sorted(found, key=lambda item: item[0]) for name, found in by_name.items()}
    dense = [n for n, found in rows.items() if all(place.payload >= 0 for _, _, place in found)]
    roles = RoleTable({name: tuple(path) for name, path in keys.items()}, dense)
    paths = sorted(files.keys() - {".metadata"})
    number = {path: i for i, path in enumerate(paths)}
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for name, found in metadata.state_dict_metadata.items():
        placed = [place for _, _, place in rows.get(name, ())]
        role, key = roles.of(name), tuple(keys.get(name, ()))
        if isinstance(found, TensorStorageMetadata) and name in rows and all(p.payload >= 0 for p in placed):
            slices = _slices(found, placed, paths, number)
            tensors[name] = TensorEntry(
                name, _dtype(found), tuple(found.size), slices, role.role, role.fqn, role.state, key
            )
        elif len(placed) == 1:
            place = placed[0]
            digest = Digest(DIGEST, place.digest, place.offset, place.length)
            objects[name] = ObjectEntry(
                name, place.path, place.offset, place.length, digest=digest, role=role.role, key=key
            )
    meta = metadata.storage_meta
    sliced = {id(place) for name in tensors for _, _, place in rows[name]}
    spares = [
        (place.path, place.payload, place.nbytes, place.digest)
        for place in places.values()
        if place.nbytes >= LEAST and id(place) not in sliced
    ]
    extra = {
        "digests": {path: item.digest for path, item in files.items()},
        "save_id": meta.save_id if meta else "",
        **spare_fields(spares),
    }
    info = CatalogInfo(
        "dcp",
        producer="ckptkit",
        world_size=world_size,
        files={path: item.nbytes for path, item in files.items()},
        extra=extra,
    )
    return Manifest.of(Catalog(tensors, objects, info)).to_bytes()


def _slices(
    found: TensorStorageMetadata, placed: Sequence[Place], paths: list[str], number: dict[str, int]
) -> SliceArray:
    boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in found.chunks]
    box, dtype = (len(placed), len(found.size)), _dtype(found)
    return SliceArray(
        paths,
        np.array([number[p.path] for p in placed], np.int32),
        np.array([p.payload for p in placed], np.int64),
        np.array([payload_nbytes(dtype, b.sizes) for b in boxes], np.int64),
        np.array([b.offsets for b in boxes], np.int64).reshape(box),
        np.array([b.sizes for b in boxes], np.int64).reshape(box),
        ranks=np.array([_rank(p.path) for p in placed], np.int32),
        algorithm=DIGEST,
        digests=np.array([p.digest for p in placed], np.uint64),
    )


def _rank(path: str) -> int:
    return int(path[2:].split("_", 1)[0])
