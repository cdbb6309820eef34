"""From files that were written to a committed checkpoint of ours: digests, manifest, objects, commit record."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.catalog.entry import Catalog, CatalogInfo, MeshInfo, ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.formats.layout import MANIFEST_NAME, RECORD_NAME, CommitRecord, FileRecord
from ckptkit.formats.manifest import DIGEST, Manifest
from ckptkit.offline.plan import Plan
from ckptkit.offline.sources import Origin, SourceReader
from ckptkit.storage.staging import new_nonce
from ckptkit.storage.store import Store
from ckptkit.version import __version__

__all__ = ["Seal", "SealedTensor", "planned_catalog", "seal"]

_CHUNK = 256 << 10  # stays in the second-level cache between two digests
_REMOTE_CHUNK = 8 << 20
Digests = Sequence[npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class SealedTensor:
    """What the manifest says of a tensor besides its slices."""

    role: Role
    fqn: str
    state: str
    key: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """What the record and the manifest of a new checkpoint state, besides its files.

    Attributes:
        tag: The directory's name where it is not that of the step.
        tensors: By name.
        ranks: [files] the rank that each file of the plan belongs to, -1 for none.
        objects: Entries of the manifest: their places in the new files, and digests.
        extra: Of the manifest: meshes, placements, aliases.
        record: Fields of the record that are taken over from the source's.
    """

    step: int
    tag: str | None
    state_dict_type: str
    world_size: int
    mesh: Mapping[str, Any] | None
    tensors: Mapping[str, SealedTensor]
    ranks: npt.NDArray[np.int32]
    objects: Mapping[str, ObjectEntry]
    extra: Mapping[str, Any]
    record: Mapping[str, Any]


def planned_catalog(plan: Plan, what: Seal, digests: Digests | None = None) -> Catalog:
    """Return the catalog that the written checkpoint will have; with no digests unless they are given."""
    tensors: dict[str, TensorEntry] = {}
    paths = [file.path for file in plan.files]
    for index, placement in enumerate(plan.placements):
        tensor = placement.tensor
        about = what.tensors[tensor.name]
        slices = SliceArray(
            paths,
            placement.files,
            placement.starts,
            placement.nbytes(),
            placement.offsets,
            placement.sizes,
            ranks=what.ranks[placement.files],
            algorithm=None if digests is None else DIGEST,
            digests=None if digests is None else digests[index],
        )
        tensors[tensor.name] = TensorEntry(
            tensor.name, tensor.dtype, tensor.shape, slices, about.role, about.fqn, about.state, about.key
        )
    mesh = what.mesh
    info = CatalogInfo(
        f"ckptkit-{what.state_dict_type}",
        producer="ckptkit",
        step=what.step,
        world_size=what.world_size,
        mesh=None if mesh is None else MeshInfo(tuple(mesh["shape"]), tuple(mesh["names"])),
        files={file.path: file.nbytes for file in plan.files},
        extra=what.extra,
    )
    return Catalog(tensors, what.objects, info)


def seal(plan: Plan, store: Store, what: Seal, *, workers: int = 0) -> CommitRecord:
    """Hash the plan's files in `store`, then write the manifest and, last, the commit record.

    The files are read once more: pieces of a box and of a file arrive in the order of the source, and xxh3 can't be
    put together from pieces.
    """
    digests, files = _hash_files(plan, store, workers)
    known = planned_catalog(plan, what, digests)
    extra = {**what.extra, "digests": {path: item.digest for path, item in files.items()}}
    info = CatalogInfo(
        known.info.format,
        known.info.producer,
        what.step,
        what.world_size,
        known.info.mesh,
        known.info.files,
        extra=extra,
    )
    manifest = Manifest.of(Catalog(known.tensors, what.objects, info)).to_bytes()
    store.write(MANIFEST_NAME, manifest)
    files[MANIFEST_NAME] = FileRecord(len(manifest), xxhash.xxh3_64_hexdigest(manifest))
    record = CommitRecord(
        step=what.step,
        tag=what.tag,
        save_id=new_nonce(),
        state_dict_type=what.state_dict_type,
        files=files,
        created=time.time(),
        world_size=what.world_size,
        mesh=None if what.mesh is None else {"shape": what.mesh["shape"], "names": what.mesh["names"]},
        manifest=MANIFEST_NAME,
        writer={"host": os.uname().nodename, "pid": os.getpid()},
        versions={"ckptkit": __version__},
        **what.record,
    )
    store.write(RECORD_NAME, record.to_json())
    return record


@dataclass(frozen=True, slots=True)
class _Boxes:
    """All placed boxes by file and start: bytes [start, start + nbytes), and whose they are."""

    bounds: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: Plan) -> _Boxes:
        empty, placements = np.zeros(0, np.int64), plan.placements
        lengths = [len(placement) for placement in placements]
        files = np.concatenate([empty, *(p.files.astype(np.int64) for p in placements)])
        starts = np.concatenate([empty, *(p.starts for p in placements)])
        nbytes = np.concatenate([empty, *(p.nbytes() for p in placements)])
        rows = np.concatenate([empty, *(np.arange(n) for n in lengths)])
        owners = np.repeat(np.arange(len(placements)), lengths)
        order = np.lexsort((nbytes, starts, files))
        bounds = np.searchsorted(files[order], np.arange(len(plan.files) + 1))
        return cls(bounds, starts[order], nbytes[order], owners[order], rows[order])


def _hash_files(plan: Plan, store: Store, workers: int) -> tuple[Digests, dict[str, FileRecord]]:
    """Return the digest of every placed box, by placement, and of every file."""
    digests = [np.zeros(len(placement), np.uint64) for placement in plan.placements]
    boxes = _Boxes.of(plan)
    reader = SourceReader(store, [Origin(file.path) for file in plan.files])

    def one(index: int) -> FileRecord:
        return _hash_file(reader, index, plan.files[index].nbytes, boxes, digests)

    try:
        with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
            found = list(pool.map(one, range(len(plan.files))))
    finally:
        reader.close()
    return digests, {file.path: record for file, record in zip(plan.files, found, strict=True)}


def _hash_file(reader: SourceReader, index: int, nbytes: int, boxes: _Boxes, digests: Digests) -> FileRecord:
    """Hash a file once from its start to its end: the whole, and each box in it."""
    whole = xxhash.xxh3_64()
    chunk = _CHUNK if reader.is_local else _REMOTE_CHUNK
    buffer = memoryview(bytearray(min(chunk, max(nbytes, 1))))
    part = slice(int(boxes.bounds[index]), int(boxes.bounds[index + 1]))
    columns = (boxes.starts[part], boxes.nbytes[part], boxes.owners[part], boxes.rows[part])
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    at, state = 0, None  # of the box that the last chunk ended in
    for first in range(0, nbytes, chunk):
        view = buffer[: min(chunk, nbytes - first)]
        reader.read(index, first, view)
        whole.update(view)
        stop = first + len(view)
        while at < len(rows) and rows[at][0] < stop:
            start, length, owner, row = rows[at]
            state = state or xxhash.xxh3_64()
            state.update(view[max(start - first, 0) : start + length - first])
            if start + length > stop:
                break
            digests[owner][row] = state.intdigest()
            at, state = at + 1, None
    for _, _, owner, row in rows[at:]:  # boxes of no bytes at the very end
        digests[owner][row] = xxhash.xxh3_64_intdigest(b"")
    return FileRecord(nbytes, whole.hexdigest())
