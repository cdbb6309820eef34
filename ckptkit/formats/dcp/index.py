"""Builds the index of a save: checks and merges all ranks' slices, and writes the manifest and DCP's `.metadata`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import BoxTable, first_of_equal, products
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import CatalogInfo, Digest, MeshInfo, ObjectEntry, check_boxes
from ckptkit.digests import DIGEST, hex_digest_of, new_hasher, signature_of
from ckptkit.errors import CorruptCheckpointError, SaveError
from ckptkit.formats.dcp.files import ROW, Phase, Written
from ckptkit.formats.dcp.metadata import MetadataPickle, RecordColumns
from ckptkit.formats.dcp.roles import RoleTable
from ckptkit.formats.own.manifest import MESHES, Manifest, Slices, Tensors
from ckptkit.formats.own.outline import LEAST, Spare, spare_fields
from ckptkit.formats.own.reader import role_of
from ckptkit.formats.own.record import MANIFEST_NAME, FileRecord
from ckptkit.storage.store import Store

METADATA_NAME = ".metadata"
Int64 = npt.NDArray[np.int64]


_log = logging.getLogger(__name__)
Path = tuple["str | int", ...]


class PlannedKey(NamedTuple):
    """A tensor in the saved state. All ranks that hold part of the tensor have equal keys for it.

    Attributes:
        path: The keys and indices that lead to the tensor in the nested state dict.
        placement: (mesh index, the placement on each mesh dimension as a string), or None for a plain tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    placement: tuple[int, tuple[str, ...]] | None


# --- what a rank tells rank 0


class PlainSlice(NamedTuple):
    """A slice that is stored as raw tensor bytes, as in safetensors. `digest` covers [start, start + nbytes)."""

    key: PlannedKey
    box: Box
    path: str
    start: int
    nbytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's report to rank 0 about the slices and objects that the rank wrote.

    The report takes 40 bytes per slice, plus 16 bytes per dimension of each slice.

    Attributes:
        written: Locations of the slices, then of the objects. `key` in a row is an index into the keys in `table`,
            followed by those in `private`.
        boxes: Offsets and sizes of each slice, concatenated over all slices.
        digest: A hash that identifies `table`, even if this rank does not send the table.
        table: Result of `key_table`, or None if a lower rank sends the same table.
        private: Keys that only this rank has. They are not in the table.
        objects: (name, path) of each object.
    """

    world_size: int
    written: Written
    boxes: Int64
    digest: bytes
    table: bytes | None
    private: Sequence[PlannedKey] = ()
    objects: Sequence[tuple[str, Path]] = ()


def key_table(keys: Sequence[PlannedKey], meshes: Sequence[Mapping[str, Any]]) -> bytes:
    """Encode keys, and the meshes that the keys' placements refer to, as JSON.

    Ranks with equal keys and meshes get the same bytes.
    """
    return json.dumps([keys, meshes], separators=(",", ":")).encode()


def plain_part(
    world_size: int,
    slices: Sequence[PlainSlice],
    files: Mapping[str, FileRecord],
    phases: Sequence[Phase],
    meshes: Sequence[Mapping[str, Any]] = (),
) -> RankPart:
    """Return the report of a rank that wrote slices as raw bytes, as in safetensors."""
    keys = {item.key.name: item.key for item in slices}
    number, path_number = ({name: i for i, name in enumerate(names)} for names in (keys, files))
    rows = [(number[s.key.name], path_number[s.path], s.start, s.nbytes, s.start, s.digest) for s in slices]
    boxes = np.array([n for s in slices for n in (*s.box.offsets, *s.box.sizes)], np.int64)
    table = key_table(list(keys.values()), meshes)
    written = Written(list(files), dict(files), np.array(rows, ROW), list(phases))
    return RankPart(world_size, written, boxes, signature_of(table), table)


def mesh_index(mesh: dict[str, Any], meshes: list[dict[str, Any]]) -> int:
    """Return a mesh's index in the list. Appends the mesh if it is not in the list yet."""
    if mesh not in meshes:
        meshes.append(mesh)
    return meshes.index(mesh)


# --- on rank 0


class SaveIndex:
    """The index of a save: the slices of all ranks, ordered by tensor, with the objects and files.

    Args:
        parts: The report of each rank, in rank order.

    Raises:
        SaveError: Two ranks disagree about a tensor, or a tensor's slices overlap or leave elements uncovered.
    """

    def __init__(self, parts: Sequence[RankPart]) -> None:
        self.paths: list[str] = []
        self.files: dict[str, FileRecord] = {}
        self.meshes: list[dict[str, Any]] = []
        self.world_size = parts[0].world_size
        self._keys: dict[str, PlannedKey] = {}
        self._numbers: dict[str, int] = {}  # each name's position in `_keys`
        self._objects: dict[str, ObjectEntry] = {}
        self._spares: list[Spare] = []
        # By digest of a table: the numbers of its keys, and the numbers of its meshes.
        tables: dict[bytes, tuple[Int64, list[int]]] = {}
        slices, tensors, first_paths = [], [], []
        for rank, part in enumerate(parts):
            rows, count = part.written.rows, len(part.written.rows) - len(part.objects)
            for row, (name, path) in zip(rows[count:].tolist(), part.objects, strict=True):
                _, file, start, length, _, digest = row
                where, found = part.written.paths[file], Digest(DIGEST, digest, start, length)
                self._objects.setdefault(name, ObjectEntry(name, where, start, length, digest=found, key=path))
            if part.digest not in tables:
                if part.table is None:
                    raise SaveError(f"rank {rank} refers to a table of keys that no lower rank has sent.")
                keys, fields = json.loads(part.table)
                meshes = [mesh_index(mesh, self.meshes) for mesh in fields]
                tables[part.digest] = self._numbered(keys, meshes, rank), meshes
            common, meshes = tables[part.digest]
            numbers = np.append(common, self._numbered(part.private, meshes, rank))
            tensors.append(numbers[rows["key"][:count]])
            slices.append(rows[:count])
            first_paths.append(len(self.paths))
            self.paths += part.written.paths
            self.files.update(part.written.files)
        counts = list(map(len, slices))
        joined, owners = np.concatenate(slices), np.concatenate(tensors)
        joined["file"] += np.repeat(np.array(first_paths, np.int32), counts)
        order = np.argsort(owners, kind="stable")  # the slices of one tensor stay in rank order
        self._rows, self._ranks = joined[order], np.repeat(np.arange(len(parts), dtype=np.int32), counts)[order]
        self.boxes = self._boxes_of(owners, order, np.concatenate([part.boxes for part in parts]))
        self._drop_replicas()
        paths = {key.name: key.path for key in self._keys.values()}
        self._key_paths = paths | {name: found.key for name, found in self._objects.items()}

    def _boxes_of(self, owners: Int64, order: Int64, numbers: Int64) -> BoxTable:
        """Return the boxes in the given order. `numbers` contains the offsets and sizes of each box."""
        widths = np.fromiter((len(key.shape) for key in self._keys.values()), np.int64, len(self._keys))
        ndims = widths[owners]
        begins, ndims = (2 * (np.cumsum(ndims) - ndims))[order], ndims[order]  # where each box's offsets start
        steps = begins - (np.cumsum(ndims) - ndims)
        offsets = np.arange(int(ndims.sum())) + np.repeat(steps, ndims)
        stops = np.cumsum(np.bincount(owners, minlength=len(widths)), dtype=np.int64)
        return BoxTable(widths, stops, numbers[offsets], numbers[offsets + np.repeat(ndims, ndims)])

    def _numbered(self, keys: Sequence[PlannedKey], meshes: Sequence[int], rank: int) -> Int64:
        """Return the number of each key of a rank. Adds new keys to the index."""
        for name, dtype, shape, path, placed in keys:
            known = self._keys.get(name)
            if known is None:
                placement = None if placed is None else (meshes[placed[0]], tuple(placed[1]))
                self._keys[name] = PlannedKey(name, dtype, tuple(shape), tuple(path), placement)
                self._numbers[name] = len(self._numbers)
            elif (known.dtype, known.shape) != (dtype, tuple(shape)):
                raise SaveError(
                    f"{name}: rank {rank} has {dtype} of shape {list(shape)}, a lower rank has {known.dtype} of shape "
                    f"{list(known.shape)}. A name must refer to the same tensor on all ranks."
                )
        return np.array([self._numbers[key[0]] for key in keys], np.int64)

    def _drop_replicas(self) -> None:
        """Drop all but the lowest rank's slice of each region, and check that each tensor is covered.

        Several ranks write the same region if a DTensor is on a submesh. For example, if a job uses FSDP over "dp" and
        tensor parallelism over "tp", a parameter without tensor parallelism is on one "dp" mesh per "tp" rank. The
        ranks of each of these meshes write the whole parameter. In LOCAL saves, several ranks may also write the same
        plain tensor.

        Raises:
            SaveError: A tensor's slices do not cover each element exactly once. This happens if a rank's placements do
                not match the elements that the rank holds.
        """
        shapes = np.array([size for key in self._keys.values() for size in key.shape], np.int64)
        others = np.flatnonzero(~self.boxes.in_rows(shapes)[0]).tolist()
        keys, keep = list(self._keys.values()) if others else [], np.ones(len(self._rows), bool)
        for tensor in others:
            key, (rows, offsets, sizes) = keys[tensor], self.boxes.of(tensor)
            boxes = np.concatenate([offsets, sizes], axis=1)
            kept, first = np.arange(len(boxes)), None
            if len(boxes) > 1:
                first = first_of_equal(boxes) if key.shape else kept[:1]
            if first is not None:
                kept = first
                digests = zip(map(tuple, boxes.tolist()), self._rows["digest"][rows].tolist(), strict=True)
                if len(set(digests)) > len(first):
                    _log.warning(
                        "%s: ranks that hold the same part have different values; the lowest rank's values are saved.",
                        key.name,
                    )
                keep[rows] = False
                keep[rows.start + first] = True
            try:
                check_boxes(key.name, key.shape, offsets[kept], sizes[kept])
            except CorruptCheckpointError as error:
                raise SaveError(
                    f"{error} The slices were written by ranks {self._ranks[rows][kept].tolist()}, with the placements "
                    f"{key.placement and list(key.placement[1])}. Do all ranks hold the same model, and optimizer "
                    "states of the same parameters? Do all ranks of the tensor's mesh save (process_group=)?"
                ) from error
        if keep.all():
            return
        columns = (self._rows["file"], self._rows["payload"], self._nbytes(), self._rows["digest"])
        dropped = zip(*(column[~keep].tolist() for column in columns), strict=True)
        self._spares = [(self.paths[file], at, size, digest) for file, at, size, digest in dropped if size >= LEAST]
        self.boxes, self._rows, self._ranks = self.boxes.take(keep), self._rows[keep], self._ranks[keep]

    # --- files

    def metadata(self, checkpoint_id: str, save_id: str) -> Iterator[bytes]:
        """Yield the bytes of `.metadata`."""
        places = self._rows
        tensors = []
        for tensor, key in enumerate(self._keys.values()):
            rows, offsets, sizes = self.boxes.of(tensor)
            columns = (places[name][rows] for name in ("file", "start", "length"))
            tensors.append(RecordColumns(key.name, key.dtype, key.shape, offsets, sizes, *columns))
        objects = {name: (found.path, found.start, found.nbytes) for name, found in self._objects.items()}
        return MetadataPickle(tensors, self.paths, objects, self._key_paths, checkpoint_id, save_id).chunks()

    def manifest(self, save_id: str, extra: Mapping[str, Any], kind: str) -> Manifest:
        """Return the manifest. `self.files` must list all of the checkpoint's files except the manifest itself."""
        keys = list(self._keys.values())
        distinct: dict[tuple[int, tuple[str, ...]], int] = {}
        chosen = [-1 if k.placement is None else distinct.setdefault(k.placement, len(distinct)) for k in keys]
        paths = self._key_paths
        if kind != "dcp":  # the names that ckptkit chooses contain the role, the FQN and the optimizer state
            role = {name: role_of(name, path) for name, path in paths.items()}
        else:
            table = RoleTable(paths, list(self._keys))  # the role of a name that the user chose depends on the others
            role = {name: table.of(name) for name in paths}
        roles = [role[key.name] for key in keys]
        tensors = Tensors(
            [key.name for key in keys],
            [key.dtype for key in keys],
            [key.shape for key in keys],
            self.boxes.stops,
            [found[0] for found in roles],
            [found[1] for found in roles],
            [found[2] for found in roles],
            [key.path for key in keys],
            np.array(chosen, np.int32),
        )
        files_, starts, digests = (np.ascontiguousarray(self._rows[name]) for name in ("file", "payload", "digest"))
        slices = Slices(files_, starts, self._nbytes(), self.boxes.offsets, self.boxes.sizes, self._ranks, digests)
        fields: dict[str, Any] = {"save_id": save_id}
        if METADATA_NAME in self.files:  # a reader checks whether another writer has replaced `.metadata`
            fields["digests"] = {path: item.digest for path, item in self.files.items()}
        if self.meshes:
            fields[MESHES] = self.meshes
        largest = max(self.meshes, key=lambda mesh: math.prod(mesh["shape"]), default=None)
        info = CatalogInfo(
            kind,
            producer="ckptkit",
            world_size=self.world_size,
            mesh=None if largest is None else MeshInfo(tuple(largest["shape"]), tuple(largest["names"])),
            files={path: item.nbytes for path, item in self.files.items()},
            extra={**extra, **fields, **spare_fields(self._spares)},
        )
        objects = {name: replace(found, role=role[name][0]) for name, found in self._objects.items()}
        return Manifest(self.paths, tensors, slices, objects, info, list(distinct))

    def _nbytes(self) -> Int64:
        itemsizes = np.array([dtype_of(key.dtype).itemsize for key in self._keys.values()], np.int64)
        found: Int64 = itemsizes[self.boxes.owners] * products(self.boxes.sizes, self.boxes.ndims[self.boxes.owners])
        return found


def write_index(
    parts: Sequence[RankPart],
    store: Store,
    *,
    save_id: str = "",
    sync: bool = True,
    extra: Mapping[str, Any] | None = None,
    kind: str = "ckptkit-sharded",
    aliases: Mapping[str, Mapping[str, str]] | None = None,
) -> Mapping[str, FileRecord]:
    """Write `manifest.safetensors` and, if the data files are DCP's, `.metadata`. Return the written files.

    Only rank 0 calls this function.

    Args:
        parts: The report of each rank, in rank order.
        save_id: Identifier of the save, recorded in both files.
        extra: JSON for the manifest's `info.extra`.
        kind: The format name recorded in the manifest. With "dcp", the tensors have the names that the user gave them.
            With any other kind, ckptkit has chosen the names.
        aliases: Tied weights by section, such as "model": maps each tied name to the name under which the tensor is
            stored.

    Raises:
        SaveError: The ranks disagree about a tensor, or their slices overlap or leave elements uncovered.
    """
    index = SaveIndex(parts)
    tied = {section: names for section, names in (aliases or {}).items() if names}
    written: dict[str, FileRecord] = {}
    with ExitStack() as stack:
        if kind in ("ckptkit-sharded", "dcp"):
            state, size = new_hasher(), 0
            # `.metadata` is published when the block ends, which is after the manifest is written.
            writer = stack.enter_context(store.writer(METADATA_NAME, sync=sync))
            for chunk in index.metadata(store.url, save_id):
                state.update(chunk)
                size += len(chunk)
                writer.write(chunk)
            written[METADATA_NAME] = index.files[METADATA_NAME] = FileRecord(size, state.hexdigest())
        manifest = index.manifest(save_id, {**(extra or {}), **({"aliases": tied} if tied else {})}, kind).to_bytes()
        store.write(MANIFEST_NAME, manifest, sync=sync)
    written[MANIFEST_NAME] = FileRecord(len(manifest), hex_digest_of(manifest))
    return written
