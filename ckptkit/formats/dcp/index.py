"""The index of a sharded state: the parts of all ranks merged, checked, and turned into `.metadata` and manifest."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import first_of_equal
from ckptkit.catalog.entry import CatalogInfo, Digest, MeshInfo, ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.digests import DIGEST, hex_digest_of, new_hasher
from ckptkit.errors import CorruptCheckpointError, SaveError
from ckptkit.formats.dcp.files import ROW
from ckptkit.formats.dcp.records import RecordColumns, encode_metadata, payload_nbytes
from ckptkit.formats.dcp.roles import RoleTable
from ckptkit.formats.own.columns import Columns, unpack, unpack_texts
from ckptkit.formats.own.manifest import MESHES, Manifest, Objects, Slices, Tensors
from ckptkit.formats.own.outline import LEAST, Spare, spare_fields
from ckptkit.formats.own.reader import role_of
from ckptkit.formats.own.record import MANIFEST_NAME, FileRecord
from ckptkit.storage.store import Store

__all__ = ["METADATA_NAME", "Arranged", "Index", "Kind", "Part", "RankSlices", "WrittenFiles", "arrange", "write_index"]

METADATA_NAME = ".metadata"

# Bringing the slices of all ranks into the order of their tensors, a few ranks at a time.


Int64 = npt.NDArray[np.int64]
_BLOCK = 1 << 16  # rows that are sorted together: what they are gathered from stays in the cache, however many ranks


@dataclass(frozen=True, slots=True)
class RankSlices:
    """What a rank wrote.

    Attributes:
        tensors: [n] the tensor of each slice.
        rows: [n] where each lies, a `ROW` each.
        boxes: The offsets of each slice and then its sizes, end to end.
        first_path: Its files are numbered from here on.
    """

    tensors: Int64
    rows: npt.NDArray[np.void]
    boxes: Int64
    rank: int
    first_path: int


@dataclass(frozen=True, slots=True)
class Arranged:
    """All slices, ordered by tensor; those of one tensor in the order of their ranks.

    Attributes:
        tensor: [n] of each slice.
        stops: [tensors] past the last slice of each.
        columns: [n] "start", "length", "payload", "digest", "rank", "file".
        offsets, sizes: Of each slice, end to end.
    """

    tensor: Int64
    stops: Int64
    columns: dict[str, npt.NDArray[Any]]
    offsets: Int64
    sizes: Int64


def arrange(found: Sequence[RankSlices], widths: Int64) -> Arranged:
    """Return the slices of all ranks by tensor; `widths` are the dimensions of each tensor.

    Not sorted and gathered as a whole: with thousands of ranks each row would come from another page of memory, and
    what is made on the way would be several times the result.
    """
    blocks = list(_blocks(found))
    counts = np.zeros(len(widths), np.int64)
    for block in blocks:
        for_each = np.bincount(np.concatenate([item.tensors for item in block]), minlength=len(widths))
        counts += for_each
    total, numbers = int(counts.sum()), int((counts * widths).sum())
    columns: dict[str, npt.NDArray[Any]] = {name: np.empty(total, np.int64) for name in ("start", "length", "payload")}
    columns |= {
        "digest": np.empty(total, np.uint64),
        "rank": np.empty(total, np.int32),
        "file": np.empty(total, np.int32),
    }
    tensor, stops = np.repeat(np.arange(len(counts), dtype=np.int64), counts), np.cumsum(counts, dtype=np.int64)
    result = Arranged(tensor, stops, columns, np.empty(numbers, np.int64), np.empty(numbers, np.int64))
    first = result.stops - counts
    elements = np.cumsum(counts * widths) - counts * widths - first * widths  # plus row * width: where its box begins
    placed = first.copy()
    for block in blocks:
        _place(block, result, widths, elements, placed)
    return result


def _blocks(found: Sequence[RankSlices]) -> Iterator[list[RankSlices]]:
    block: list[RankSlices] = []
    rows = 0
    for item in found:
        block.append(item)
        rows += len(item.rows)
        if rows >= _BLOCK:
            yield block
            block, rows = [], 0
    if block:
        yield block


def _place(block: Sequence[RankSlices], result: Arranged, widths: Int64, elements: Int64, placed: Int64) -> None:
    """Put the slices of some ranks where they belong; `placed`: where the next slice of each tensor does."""
    tensors = np.concatenate([item.tensors for item in block])
    if not len(tensors):
        return
    # numpy sorts numbers of 16 bits by their digits, others by comparing.
    order = np.argsort(tensors.astype(np.uint16) if len(widths) <= 1 << 16 else tensors, kind="stable")
    ordered = tensors[order]
    counts = np.bincount(ordered, minlength=len(widths))
    to = np.arange(len(ordered)) + (placed - np.cumsum(counts) + counts)[ordered]
    placed += counts
    rows = np.concatenate([item.rows for item in block])
    lengths = [len(item.rows) for item in block]
    for name in ("start", "length", "payload", "digest"):
        result.columns[name][to] = rows[name][order]
    result.columns["rank"][to] = np.repeat(np.array([item.rank for item in block], np.int32), lengths)[order]
    first_path = np.repeat(np.array([item.first_path for item in block], np.int32), lengths)
    result.columns["file"][to] = (rows["file"] + first_path)[order]
    ndim = widths[tensors]
    begin = (2 * (np.cumsum(ndim) - ndim))[order]  # a row's offsets, then its sizes
    ndim = ndim[order]
    source, target = _ragged(begin, ndim), _ragged(elements[ordered] + to * ndim, ndim)
    boxes = np.concatenate([item.boxes for item in block])
    result.offsets[target] = boxes[source]
    result.sizes[target] = boxes[source + np.repeat(ndim, ndim)]


def _ragged(first: Int64, widths: Int64) -> Int64:
    """The indices first[0] ... first[0] + widths[0] - 1, first[1] ..."""
    total = int(widths.sum())
    starts = np.cumsum(widths) - widths
    index: Int64 = np.arange(total, dtype=np.int64) + np.repeat(first - starts, widths)
    return index


_log = logging.getLogger(__name__)
_AT_ONCE = 1 << 18  # numbers of boxes that are looked at together
Path = tuple["str | int", ...]
Kind = Literal["ckptkit-sharded", "dcp"]
"""Who chose the names: a manager, or whoever called `dcp.save`."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank sent: `ShardedPlan.write`'s `part`, unpacked."""

    rank: int
    columns: Columns
    names: list[str]
    paths: list[str]
    objects: list[str]

    @classmethod
    def of(cls, data: bytes, rank: int) -> Part:
        """Return the part that a rank of this save sent."""
        columns = unpack(data, file=f"the part of rank {rank}")
        texts = (unpack_texts(columns, name) for name in ("names", "paths", "objects"))
        return cls(int(columns.header["rank"]), columns, *texts)


@dataclass(slots=True)
class _Key:
    """One tensor as the first rank that has it sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    placement: tuple[int, tuple[str, ...]] | None


@dataclass(frozen=True, slots=True)
class _Object:
    """An object's record: (file, start, length), digest."""

    place: tuple[int, int, int]
    digest: int
    path: Path
    rank: int


class Index:
    """All slices of all ranks, ordered by tensor."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.files: dict[str, FileRecord] = {}
        self.meshes: list[dict[str, Any]] = []
        self.world_size = 1
        self._keys: dict[str, _Key] = {}
        self._tables: dict[str, tuple[Int64, list[int]]] = {}
        self._order: dict[str, int] = {}
        self._objects: dict[str, _Object] = {}
        self._tensor: Int64 = np.zeros(0, np.int64)
        self.stops: Int64 = np.zeros(0, np.int64)
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._offsets: Int64 = np.zeros(0, np.int64)
        self._sizes: Int64 = np.zeros(0, np.int64)
        self._spares: list[Spare] = []
        self._unproved: set[str] = set()  # names of tensors that are not plainly cut along one dimension

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Index:
        """Return the index of these parts. Raises SaveError where two disagree about a tensor."""
        self = cls()
        found = [self._take(part) for part in parts]  # not kept: a few objects a rank are much for thousands
        widths = np.array([len(key.shape) for key in self._keys.values()], np.int64)
        made = arrange(found, widths)
        self._tensor, self.stops, self._columns = made.tensor, made.stops, made.columns
        self._offsets, self._sizes = made.offsets, made.sizes
        self._drop_replicas()
        return self

    def _take(self, part: Part) -> RankSlices:
        """Return a rank's slices; keep everything else of it."""
        header = part.columns.header
        self.world_size = int(header["world_size"])
        first_path = len(self.paths)
        self.paths += part.paths
        self.files.update({path: FileRecord(*item) for path, item in header["files"].items()})
        shared, meshes = self._table(part)
        private = zip(part.names, header["private"], strict=True)
        own = [self._add(name, fields, meshes, part.rank) for name, fields in private]
        keys = np.concatenate([shared, np.array(own, np.int64)]) if own else shared
        rows = part.columns.get("rows", "uint8").view(ROW)
        count = len(rows) - len(part.objects)
        for row, name, path in zip(rows[count:].tolist(), part.objects, header["objects"], strict=True):
            _, file, start, length, _, digest = row
            made = _Object((file + first_path, start, length), digest, tuple(path), part.rank)
            self._objects.setdefault(name, made)
        boxes = part.columns.get("box", "int64")
        return RankSlices(keys[rows["key"][:count]], rows[:count], boxes, part.rank, first_path)

    def _table(self, part: Part) -> tuple[Int64, list[int]]:
        """The rows of the keys, and the meshes, of the table that a part brings or names."""
        name = str(part.columns.header["table"])
        known = self._tables.get(name)
        if known is None:
            if "table" not in part.columns.arrays:
                raise SaveError(f"rank {part.rank} names a table of keys that no lower rank has sent.")
            table = unpack(part.columns.get("table", "uint8").tobytes(), file=f"the keys of rank {part.rank}")
            meshes = [self._mesh(fields) for fields in table.field("meshes", list)]
            keys = zip(unpack_texts(table, "names"), table.field("keys", list), strict=True)
            rows = [self._add(key, fields, meshes, part.rank) for key, fields in keys]
            known = self._tables[name] = (np.array(rows, np.int64), meshes)
        return known

    def _mesh(self, fields: dict[str, Any]) -> int:
        if fields not in self.meshes:
            self.meshes.append(fields)
        return self.meshes.index(fields)

    def _add(self, name: str, fields: Sequence[Any], meshes: Sequence[int], rank: int) -> int:
        dtype, shape, path, placed = fields
        known = self._keys.get(name)
        if known is None:
            placement = None if placed is None else (meshes[placed[0]], tuple(placed[1]))
            self._keys[name] = _Key(name, dtype, tuple(shape), tuple(path), placement)
            self._order[name] = len(self._order)
        elif (known.dtype, known.shape) != (dtype, tuple(shape)):
            raise SaveError(
                f"{name}: rank {rank} has {dtype} of shape {list(shape)}, a lower rank has {known.dtype} of shape "
                f"{list(known.shape)}. A name must mean one tensor on all ranks."
            )
        return self._order[name]

    def _drop_replicas(self) -> None:
        """Keep the lowest rank's slice of boxes that several ranks wrote.

        That happens where a DTensor lies on a submesh: with FSDP over "dp" and tensor parallelism over "tp", a
        parameter that is not tensor parallel has one "dp" mesh for each "tp" rank, and none of them knows the others.
        """
        keep = np.ones(len(self._tensor), bool)
        whole = self._split()
        for (key, rows, offsets, sizes), is_whole in zip(self.entries(), whole, strict=True) if not all(whole) else ():
            if is_whole:
                continue
            self._unproved.add(key.name)
            if len(offsets) < 2 or not key.shape:
                continue
            first = first_of_equal(np.concatenate([offsets, sizes], axis=1))
            if first is None:
                continue
            self._warn_of_different(key, rows, np.concatenate([offsets, sizes], axis=1))
            mask = np.zeros(len(offsets), bool)
            mask[first] = True
            keep[rows] = mask
        if keep.all():
            return
        self._spares = self._places(np.flatnonzero(~keep))
        widths = np.array([len(key.shape) for key in self._keys.values()], np.int64)[self._tensor]
        elements = np.repeat(keep, widths)
        self._offsets, self._sizes = self._offsets[elements], self._sizes[elements]
        self._tensor = self._tensor[keep]
        self._columns = {name: column[keep] for name, column in self._columns.items()}
        self.stops = np.cumsum(np.bincount(self._tensor, minlength=len(self._keys)), dtype=np.int64)

    def _split(self) -> list[bool]:
        """Whether each tensor's boxes are the whole of it, or the whole cut along one dimension: the usual cases, told
        at once for all tensors of as many dimensions and slices."""
        shapes = [key.shape for key in self._keys.values()]
        widths = np.fromiter(map(len, shapes), np.int64, len(shapes))
        counts = np.diff(self.stops, prepend=0)
        first = np.cumsum(counts * widths) - counts * widths
        found = np.zeros(len(shapes), bool)
        for ndim, count in sorted(set(zip(widths.tolist(), counts.tolist(), strict=True))):
            alike = np.flatnonzero((widths == ndim) & (counts == count))
            step = max(1, _AT_ONCE // max(1, count * ndim))
            for rows in np.split(alike, range(step, len(alike), step)):
                index = first[rows][:, None] + np.arange(count * ndim)
                box = (len(rows), count, ndim)
                whole = np.array([shapes[row] for row in rows.tolist()], np.int64).reshape(len(rows), ndim)
                found[rows] = _are_split(whole, self._offsets[index].reshape(box), self._sizes[index].reshape(box))
        split: list[bool] = found.tolist()
        return split

    def _places(self, rows: Int64) -> list[Spare]:
        """Where these rows' bytes lie, as far as outlines hold their digests."""
        columns, nbytes = self._columns, self._nbytes()
        places = zip(*(column[rows].tolist() for column in (columns["file"], columns["payload"], nbytes)), strict=True)
        found = zip(places, columns["digest"][rows].tolist(), strict=True)
        return [(self.paths[file], start, size, digest) for (file, start, size), digest in found if size >= LEAST]

    def _warn_of_different(self, key: _Key, rows: slice, boxes: Int64) -> None:
        digests: dict[tuple[int, ...], int] = {}
        for box, digest in zip(boxes.tolist(), self._columns["digest"][rows].tolist(), strict=True):
            if digests.setdefault(tuple(box), digest) != digest:
                _log.warning(
                    "%s: ranks that hold the same part of it hold different values; the lowest rank's are saved.",
                    key.name,
                )
                return

    # --- what it holds

    def entries(self) -> Iterator[tuple[_Key, slice, Int64, Int64]]:
        """Yield (key, rows, offsets, sizes) of each tensor."""
        start, element = 0, 0
        for key, stop in zip(self._keys.values(), self.stops.tolist(), strict=True):
            ndim = len(key.shape)
            end = element + (stop - start) * ndim
            box = (stop - start, ndim)
            yield (
                key,
                slice(start, stop),
                self._offsets[element:end].reshape(box),
                self._sizes[element:end].reshape(box),
            )
            start, element = stop, end

    def check(self) -> None:
        """Check that the slices of each tensor cover it, each element once.

        Raises:
            SaveError: They do not: the placements of some rank do not describe what it holds.
        """
        for key, rows, offsets, sizes in self.entries() if self._unproved else ():
            if key.name in self._unproved and not _is_split(key.shape, offsets, sizes):
                self._check_slowly(key, rows, offsets, sizes)

    def _check_slowly(self, key: _Key, rows: slice, offsets: Int64, sizes: Int64) -> None:
        count = len(offsets)
        boxes = np.concatenate([offsets, sizes], axis=1)
        ranks = self._columns["rank"][rows].tolist()
        if len(key.shape) and len(np.unique(boxes, axis=0)) != count and 0 not in key.shape:
            raise SaveError(f"{key.name}: ranks {ranks} wrote the same part of it. Is it a DTensor of a wrong mesh?")
        zeros = np.zeros(count, np.int64)
        array = SliceArray(["?"], zeros.astype(np.int32), zeros, zeros, offsets, sizes)
        entry = TensorEntry(key.name, key.dtype, key.shape, array)
        try:
            entry.check_coverage()
        except CorruptCheckpointError as error:
            raise SaveError(
                f"{error} They were written by ranks {ranks}, placed {key.placement and list(key.placement[1])}."
            ) from error

    # --- files

    def metadata(self, checkpoint_id: str, save_id: str) -> Iterator[bytes]:
        """Yield `.metadata`."""
        columns = self._columns
        tensors = [
            RecordColumns(
                key.name,
                key.dtype,
                key.shape,
                offsets,
                sizes,
                columns["file"][rows],
                columns["start"][rows],
                columns["length"][rows],
            )
            for key, rows, offsets, sizes in self.entries()
        ]
        planner: dict[str, Path] = {key.name: key.path for key in self._keys.values()}
        planner.update({name: found.path for name, found in self._objects.items()})
        return encode_metadata(
            tensors,
            self.paths,
            objects={name: found.place for name, found in self._objects.items()},
            planner_data=planner,
            checkpoint_id=checkpoint_id,
            save_id=save_id,
        )

    def manifest(
        self, files: Mapping[str, FileRecord], save_id: str, extra: Mapping[str, Any], kind: Kind = "ckptkit-sharded"
    ) -> Manifest:
        """Return the manifest. `files` are all files of the checkpoint but the manifest itself."""
        keys = list(self._keys.values())
        distinct: dict[tuple[int, tuple[str, ...]], int] = {}
        chosen = [-1 if k.placement is None else distinct.setdefault(k.placement, len(distinct)) for k in keys]
        role = self._roles(kind)
        roles = [role[key.name] for key in keys]
        tensors = Tensors(
            [key.name for key in keys],
            [key.dtype for key in keys],
            [key.shape for key in keys],
            self.stops,
            [found[0] for found in roles],
            [found[1] for found in roles],
            [found[2] for found in roles],
            [key.path for key in keys],
            np.array(chosen, np.int32),
        )
        columns = self._columns
        slices = Slices(
            columns["file"].astype(np.int32, copy=False),
            columns["payload"],
            self._nbytes(),
            self._offsets,
            self._sizes,
            columns["rank"].astype(np.int32, copy=False),
            columns["digest"].astype(np.uint64, copy=False),
        )
        fields = {"digests": {path: item.digest for path, item in files.items()}, "save_id": save_id}
        largest = max(self.meshes, key=lambda mesh: math.prod(mesh["shape"]), default=None)
        info = CatalogInfo(
            kind,
            producer="ckptkit",
            world_size=self.world_size,
            mesh=None if largest is None else MeshInfo(tuple(largest["shape"]), tuple(largest["names"])),
            files={path: item.nbytes for path, item in files.items()},
            extra={**extra, **fields, **({MESHES: self.meshes} if self.meshes else {}), **spare_fields(self._spares)},
        )
        objects = {}
        for name, found in self._objects.items():
            file, start, nbytes = found.place
            digest = Digest(DIGEST, found.digest, start, nbytes)
            objects[name] = ObjectEntry(
                name, self.paths[file], start, nbytes, digest=digest, role=role[name][0], key=found.path
            )
        return Manifest(self.paths, tensors, slices, Objects(objects), info, list(distinct))

    def _nbytes(self) -> Int64:
        """Bytes of each slice."""
        keys = self._keys.values()
        widths = np.array([len(key.shape) for key in keys], np.int64)
        itemsizes = np.array([payload_nbytes(key.dtype, (1,)) for key in keys], np.int64)
        if not len(self._tensor):
            return np.zeros(0, np.int64)
        found, rows = itemsizes[self._tensor], widths[self._tensor]
        first = np.cumsum(rows) - rows
        for dim in range(int(rows.max())):
            deep = rows > dim
            found[deep] *= self._sizes[first[deep] + dim]
        return found

    def _roles(self, kind: Kind) -> dict[str, tuple[Role, str, str]]:
        """Return the role of each key: our own names say it themselves, a user's only all together."""
        paths = {key.name: key.path for key in self._keys.values()}
        paths.update({name: found.path for name, found in self._objects.items()})
        if kind == "ckptkit-sharded":
            return {name: role_of(name, path) for name, path in paths.items()}
        table = RoleTable(paths, list(self._keys))
        told = {name: table.of(name) for name in paths}
        return {name: (found.role, found.fqn, found.state) for name, found in told.items()}


def _is_split(shape: tuple[int, ...], offsets: Int64, sizes: Int64) -> bool:
    return bool(_are_split(np.array([shape], np.int64).reshape(1, -1), offsets[None], sizes[None])[0])


def _are_split(shapes: Int64, offsets: Int64, sizes: Int64) -> npt.NDArray[np.bool_]:
    """Whether the boxes [tensor, slice, dim] are the whole of each tensor, or the whole cut along one dimension."""
    tensors, count, ndim = offsets.shape
    if count == 1:
        whole: npt.NDArray[np.bool_] = (sizes[:, 0] == shapes).all(axis=1) & ~offsets.any(axis=(1, 2))
        return whole
    if count == 0 or ndim == 0:
        return np.zeros(tensors, bool)
    low, high = offsets.min(axis=1), sizes.max(axis=1)
    cut = (high != shapes) | (offsets.max(axis=1) != low)
    split: npt.NDArray[np.bool_] = (shapes > 0).all(axis=1) & (cut.sum(axis=1) == 1) & ~low.any(axis=1)
    split &= (cut | (sizes.min(axis=1) == high)).all(axis=1)
    dim = cut.argmax(axis=1)[:, None, None]
    begins = np.take_along_axis(offsets, dim, axis=2)[:, :, 0]
    lengths = np.take_along_axis(sizes, dim, axis=2)[:, :, 0]
    order = np.argsort(begins, axis=1, kind="stable")
    begins = np.take_along_axis(begins, order, axis=1)
    ends = begins + np.take_along_axis(lengths, order, axis=1)
    split &= (begins[:, 1:] == ends[:, :-1]).all(axis=1)
    split &= ends[:, -1] == np.take_along_axis(shapes, dim[:, 0], axis=1)[:, 0]
    return split


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """A complete sharded state on disk.

    Attributes:
        files: Every file of all ranks, `.metadata` and the manifest included.
        tensors, slices: How many.
        nbytes: Bytes of tensor data, each element once.
    """

    files: Mapping[str, FileRecord]
    tensors: int
    slices: int
    nbytes: int


def write_index(
    parts: Sequence[bytes],
    store: Store,
    *,
    save_id: str = "",
    sync: bool = True,
    extra: Mapping[str, Any] | None = None,
    kind: Kind = "ckptkit-sharded",
) -> WrittenFiles:
    """Write `manifest.safetensors` and `.metadata` of what all ranks wrote. Rank 0 alone calls it.

    Args:
        parts: what `ShardedPlan.write` told of each rank.
        save_id: Recorded in both files.
        extra: JSON, into the manifest's `info.extra`.
        kind: What the manifest says that this is.

    Raises:
        SaveError: The parts disagree about a tensor, overlap, or leave elements of one uncovered.
    """
    index = Index.of(Part.of(data, rank) for rank, data in enumerate(parts))
    index.check()
    state, size = new_hasher(), 0
    with store.writer(METADATA_NAME, sync=sync) as writer:  # it appears at the end of the block, after the manifest
        for chunk in index.metadata(store.url, save_id):
            state.update(chunk)
            size += len(chunk)
            writer.write(chunk)
        files = {**index.files, METADATA_NAME: FileRecord(size, state.hexdigest())}
        manifest = index.manifest(files, save_id, extra or {}, kind).to_bytes()
        store.write(MANIFEST_NAME, manifest, sync=sync)
    files[MANIFEST_NAME] = FileRecord(len(manifest), hex_digest_of(manifest))
    nbytes = sum(payload_nbytes(key.dtype, key.shape) for key, *_ in index.entries())
    return WrittenFiles(files, len(index.stops), int(index.stops[-1]) if len(index.stops) else 0, nbytes)
