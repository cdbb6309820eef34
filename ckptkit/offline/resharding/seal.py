"""Turns written files into a committed ckptkit checkpoint by adding digests, manifest and commit record."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Catalog, CatalogInfo, MeshInfo, ObjectEntry, SliceArray, TensorEntry
from ckptkit.digests import DIGEST, digest_of, hex_digest_of, new_hasher
from ckptkit.formats.checks import RecordTable
from ckptkit.formats.own.manifest import Manifest
from ckptkit.formats.own.outline import LEAST
from ckptkit.formats.own.record import MANIFEST_NAME, RECORD_NAME, CommitRecord, FileRecord
from ckptkit.formats.sources import Origin, SourceReader
from ckptkit.offline.copying.copier import Digested
from ckptkit.offline.copying.plan import Placement, Plan
from ckptkit.offline.resharding.own_state import OwnTensor
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.staging import new_nonce
from ckptkit.storage.store import Store
from ckptkit.version import __version__

_Row = tuple[int, int, int, int, bool, int]  # start, bytes, placement, its row, whether the digest is known, digest
_CHUNK = 256 << 10  # bytes; stays in the L2 cache while two digests read it
_REMOTE_CHUNK = 8 << 20
Digests = Sequence[npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Seal:
    """The fields of a new checkpoint's commit record and manifest that cannot be computed from its files.

    Attributes:
        tag: The name of the directory. None if the name is derived from the step.
        tensors: The tensors by name, with their manifest fields.
        ranks: [files] the rank of each file in the plan. -1 means no rank.
        objects: Manifest entries, with their locations in the new files and their digests.
        extra: More manifest fields: meshes, placements, aliases.
        record: Fields copied from the source's commit record.
    """

    step: int
    tag: str | None
    state_dict_type: str
    world_size: int
    mesh: Mapping[str, Any] | None
    tensors: Mapping[str, OwnTensor]
    ranks: npt.NDArray[np.int32]
    objects: Mapping[str, ObjectEntry]
    extra: Mapping[str, Any]
    record: Mapping[str, Any]


def planned_catalog(plan: Plan, what: Seal, digests: Digests | None = None) -> Catalog:
    """Return the catalog of the checkpoint that the plan writes, with `digests` if given."""
    tensors: dict[str, TensorEntry] = {}
    paths = [file.path for file in plan.files]
    nbytes, stop = Placement.joined(plan.placements)[2], 0
    for index, placement in enumerate(plan.placements):
        tensor = placement.tensor
        about = what.tensors[tensor.name]
        start, stop = stop, stop + len(placement)
        slices = SliceArray(
            paths, placement.files, placement.starts, nbytes[start:stop], placement.offsets, placement.sizes,
            ranks=what.ranks[placement.files],
            algorithm=None if digests is None else DIGEST,
            digests=None if digests is None else digests[index],
        )  # fmt: skip
        tensors[tensor.name] = TensorEntry(
            tensor.name, tensor.dtype, tensor.shape, slices, about.role, about.fqn, about.state, about.key
        )
    mesh = None if what.mesh is None else MeshInfo(tuple(what.mesh["shape"]), tuple(what.mesh["names"]))
    info = CatalogInfo(
        f"ckptkit-{what.state_dict_type}", producer="ckptkit", step=what.step, world_size=what.world_size, mesh=mesh,
        files={file.path: file.nbytes for file in plan.files}, extra=what.extra,
    )  # fmt: skip
    return Catalog(tensors, what.objects, info)


def seal(plan: Plan, store: Store, what: Seal, *, digested: Digested | None = None, workers: int = 0) -> CommitRecord:
    """Hash the plan's files in `store`, then write the manifest and, last, the commit record.

    Args:
        digested: Digests of boxes that were computed while the boxes were written. All other bytes are read again.
    """
    digests, files = _hash_files(plan, store, digested or Digested(), workers)
    known = planned_catalog(plan, what, digests)
    info = replace(known.info, extra={**what.extra, "digests": {path: item.digest for path, item in files.items()}})
    manifest = Manifest.of(Catalog(known.tensors, what.objects, info)).to_bytes()
    store.write(MANIFEST_NAME, manifest)
    files[MANIFEST_NAME] = FileRecord(len(manifest), hex_digest_of(manifest))
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
    data = record.to_json()
    CommitRecord.from_json(data, file=RECORD_NAME)  # before it is written: a reader must accept it
    store.write(RECORD_NAME, data)
    return record


def _hash_files(plan: Plan, store: Store, digested: Digested, workers: int) -> tuple[Digests, dict[str, FileRecord]]:
    """Return the digests of all boxes (one array per placement), and each file's entry in the commit record."""
    digests = [np.zeros(len(placement), np.uint64) for placement in plan.placements]
    lengths = [len(placement) for placement in plan.placements]
    files, starts, nbytes = Placement.joined(plan.placements)
    rows = np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((nbytes, starts, files))
    files, starts, nbytes = files[order], starts[order], nbytes[order]
    bounds = np.searchsorted(files, np.arange(len(plan.files) + 1)).tolist()
    table = digested.table()
    table = table[np.lexsort((table["start"], table["file"]))]
    nothing = np.zeros(len(table), np.int64)
    known = RecordTable(table["file"], table["start"], table["nbytes"], table["digest"], nothing, nothing)
    found = known.find(files, starts, nbytes)
    values = np.append(table["digest"], np.uint64(0))[found]  # index -1 (unknown) selects the appended 0
    columns = (starts, nbytes, owners[order], rows[order], found >= 0, values)
    reader = SourceReader(store, [Origin(file.path) for file in plan.files])

    def one(index: int) -> FileRecord:
        part = slice(bounds[index], bounds[index + 1])
        boxes = list(zip(*(column[part].tolist() for column in columns), strict=True))
        return _FileHash(reader, index, plan.files[index].nbytes, digests).hashed(boxes)

    try:
        with WorkerPool(workers or min(8, os.cpu_count() or 1)) as pool:
            records = list(pool.map(one, range(len(plan.files))))
    finally:
        reader.close()
    return digests, {file.path: record for file, record in zip(plan.files, records, strict=True)}


class _FileHash:
    """Hashes a file from beginning to end: each box whose digest is not known yet, and the file's outline.

    The outline is the file's bytes, with each large box replaced by its digest (see `formats/own/outline.py`).
    """

    def __init__(self, reader: SourceReader, index: int, nbytes: int, digests: Digests) -> None:
        self._reader = reader
        self._index = index
        self._nbytes = nbytes
        self._digests = digests
        self._outline = new_hasher()
        self._outlined = False
        self._buffer = memoryview(bytearray(min(_CHUNK if reader.is_local else _REMOTE_CHUNK, max(nbytes, 1))))

    def hashed(self, boxes: list[_Row]) -> FileRecord:
        """Hash the file, which contains `boxes`. Return its entry in the commit record."""
        first = 0  # start of the bytes that are not yet hashed
        pending: list[_Row] = []  # boxes in the bytes that are not yet hashed
        for row in boxes:
            start, length, owner, place, known, digest = row
            if not known or length < LEAST:
                pending.append(row)
                continue
            self._read(first, start, pending)
            self._state(owner, place, length, digest)
            first, pending = start + length, []
        self._read(first, self._nbytes, pending)
        return FileRecord(self._nbytes, self._outline.hexdigest(), self._outlined)

    def _state(self, owner: int, row: int, nbytes: int, digest: int) -> None:
        self._digests[owner][row] = digest
        if nbytes >= LEAST:
            self._outline.update(digest.to_bytes(8, "little"))
            self._outlined = True

    def _read(self, first: int, stop: int, boxes: list[_Row]) -> None:
        at, state = 0, None  # index of the current box, and its hasher if it began in an earlier chunk
        for begin in range(first, stop, len(self._buffer)):
            view = self._buffer[: min(len(self._buffer), stop - begin)]
            self._reader.read(self._index, begin, view)
            end, told = begin + len(view), begin  # the outline already includes the bytes before `told`
            while at < len(boxes) and boxes[at][0] < end:
                start, length, owner, row, *_ = boxes[at]
                state = state or new_hasher()
                state.update(view[max(start - begin, 0) : start + length - begin])
                if length >= LEAST:
                    self._outline.update(view[told - begin : max(start - begin, 0)])
                    told = min(start + length, end)
                if start + length > end:
                    break
                self._state(owner, row, length, state.intdigest())
                at, state = at + 1, None
            self._outline.update(view[told - begin :])
        for _, length, owner, row, *_ in boxes[at:]:  # empty boxes at the end
            self._state(owner, row, length, digest_of(b""))
