"""From files that were written to a committed checkpoint of ours: digests, manifest, objects, commit record."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, SliceArray, TensorEntry
from ckptkit.errors import UsageError
from ckptkit.formats.layout import MANIFEST_NAME, RECORD_NAME, CommitRecord, FileRecord, check_tag, step_name
from ckptkit.formats.manifest import DIGEST, Manifest
from ckptkit.offline.plan import Plan
from ckptkit.storage.staging import new_nonce
from ckptkit.storage.store import Store
from ckptkit.version import __version__

__all__ = ["Seal", "seal"]

_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Seal:
    """What the record and the manifest of a new checkpoint state, besides its files.

    Attributes:
        entries: The tensors of the result by name, with any slices: those of the plan take their place.
        ranks: [files] the rank that each file of the plan belongs to.
        objects: Entries of the manifest, their places in the new files.
    """

    name: str
    step: int
    state_dict_type: str
    world_size: int
    mesh: Mapping[str, Any] | None
    entries: Mapping[str, TensorEntry]
    ranks: npt.NDArray[np.int32]
    objects: Mapping[str, ObjectEntry]
    extra: Mapping[str, Any]
    record: Mapping[str, Any]


def seal(plan: Plan, store: Store, what: Seal, *, workers: int = 0) -> CommitRecord:
    """Hash the plan's files in `store`, then write the manifest and, last, the commit record."""
    digests, files = _hash_files(plan, store, workers)
    tensors: dict[str, TensorEntry] = {}
    paths = [file.path for file in plan.files]
    for placement, values in zip(plan.placements, digests, strict=True):
        entry = what.entries[placement.tensor.name]
        slices = SliceArray(
            paths,
            placement.files,
            placement.starts,
            placement.nbytes(),
            placement.offsets,
            placement.sizes,
            ranks=what.ranks[placement.files],
            algorithm=DIGEST,
            digests=values,
        )
        tensors[entry.name] = TensorEntry(
            entry.name, entry.dtype, entry.shape, slices, entry.role, entry.fqn, entry.state, entry.key
        )
    sizes = {path: item.nbytes for path, item in files.items()}
    fields = {"digests": {path: item.xxh3_64 for path, item in files.items()}, **what.extra}
    info = CatalogInfo(f"ckptkit-{what.state_dict_type}", producer="ckptkit", step=what.step, files=sizes, extra=fields)
    manifest = Manifest.of(Catalog(tensors, what.objects, info)).to_bytes()
    store.write(MANIFEST_NAME, manifest)
    files[MANIFEST_NAME] = FileRecord(len(manifest), xxhash.xxh3_64_hexdigest(manifest))
    record = CommitRecord(
        step=what.step,
        save_id=new_nonce(),
        state_dict_type=what.state_dict_type,
        files=files,
        tag=_tag(what.name, what.step),
        created=time.time(),
        world_size=what.world_size,
        mesh=what.mesh,
        manifest=MANIFEST_NAME,
        writer={"host": socket.gethostname(), "pid": os.getpid()},
        versions={"ckptkit": __version__},
        **what.record,
    )
    store.write(RECORD_NAME, record.to_json())
    return record


def _tag(name: str, step: int) -> str | None:
    """The tag of a checkpoint in a directory of this name; None where the name is that of its step, or can't be one."""
    if name == step_name(step):
        return None
    try:
        return check_tag(name, step)
    except UsageError:
        return None


def _hash_files(plan: Plan, store: Store, workers: int) -> tuple[list[npt.NDArray[np.uint64]], dict[str, FileRecord]]:
    """Return the digest of every placed box, by placement, and of every file."""
    digests = [np.zeros(len(placement), np.uint64) for placement in plan.placements]
    owners = [np.full(len(placement), i, np.int64) for i, placement in enumerate(plan.placements)]
    empty = np.zeros(0, np.int64)
    table = np.stack(
        [
            np.concatenate([empty, *(p.files.astype(np.int64) for p in plan.placements)]),
            np.concatenate([empty, *(p.starts for p in plan.placements)]),
            np.concatenate([empty, *(p.nbytes() for p in plan.placements)]),
            np.concatenate([empty, *owners]),
            np.concatenate([empty, *(np.arange(len(p)) for p in plan.placements)]),
        ]
    )
    table = table[:, np.lexsort((table[1], table[0]))]
    bounds = np.searchsorted(table[0], np.arange(len(plan.files) + 1))

    def one(index: int) -> FileRecord:
        rows = table[:, bounds[index] : bounds[index + 1]]
        return _hash_file(store, plan.files[index].path, plan.files[index].nbytes, rows, digests)

    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        found = list(pool.map(one, range(len(plan.files))))
    return digests, {file.path: record for file, record in zip(plan.files, found, strict=True)}


def _hash_file(
    store: Store, path: str, nbytes: int, rows: npt.NDArray[np.int64], digests: list[npt.NDArray[np.uint64]]
) -> FileRecord:
    """Hash a file once from its start to its end: the whole, and each box in it."""
    whole = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(_CHUNK, max(nbytes, 1))))

    def walk(start: int, stop: int, state: Any) -> None:
        while start < stop:
            view = buffer[: min(len(buffer), stop - start)]
            store.read_into(path, start, view)
            whole.update(view)
            if state is not None:
                state.update(view)
            start += len(view)

    at = 0
    for start, length, owner, row in rows[1:].T.tolist():
        walk(at, start, None)
        state = xxhash.xxh3_64()
        walk(start, start + length, state)
        digests[owner][row] = state.intdigest()
        at = start + length
    walk(at, nbytes, None)
    return FileRecord(nbytes, whole.hexdigest())


def objects_json(objects: Mapping[str, ObjectEntry]) -> bytes:
    """Return the bytes of `objects.json` of these entries, whose values are trees already."""
    trees = {name: entry.value for name, entry in objects.items()}
    return json.dumps({"format": 1, "objects": trees}, separators=(",", ":"), allow_nan=False).encode()
