"""Defines `manifest.safetensors`, which lists every slice of a ckptkit checkpoint with its location and digest.

The file consists of columns, and contains no pickle. Even a million slices are loaded as a few arrays, and an entry of
the catalog is created when it is accessed. The columns are listed below. T is the number of tensors, and N the number
of slices, which are in tensor order. A column of length E has one number per dimension of each tensor or slice.

    names, paths                 lists of strings: concatenated UTF-8, and `.ends`, the end of each string
    tensor.dtype, .ndim          [T] u8    index into the header's "dtypes"; number of dimensions
    tensor.shape                 [E] i64
    tensor.stop                  [T] i64   index after the tensor's last slice
    tensor.role, .state          [T] u8, i32   the `Role`'s position in the enum; index into the header's "states"
    tensor.fqn                   [2T] i32  where the FQN starts and stops in the name
    tensor.placement             [T] i32   index into the header's "placements", -1 for none
    tensor.parts                 number of components of the path in the state dict
    tensor.part                  for each component: length of a dict key (part of the name), or -1 - i for list index i
    slice.file, .rank            [N] i32
    slice.start, .nbytes         [N] i64
    slice.offset, .size          [E] i64
    slice.<digest>               [N] u64   of the slice's bytes; absent if there are no digests
    stride.row, .value           index and strides of each slice that is not row-major
    objects, object.*            names and columns of the non-tensor entries; small values are in the header

The catalog's `info.extra["meshes"]` and `info.extra["placements"]` (see `MESHES`, `PLACEMENTS`) describe how each
tensor was placed. Resharding a LOCAL checkpoint needs both.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import BoxTable, products
from ckptkit.catalog.dtypes import DTYPES
from ckptkit.catalog.entry import (
    Catalog,
    CatalogInfo,
    Digest,
    MeshInfo,
    ObjectEntry,
    Role,
    SliceArray,
    TensorEntry,
)
from ckptkit.digests import DIGEST
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.own.columns import Column, Columns, pack, pack_texts, unpack, unpack_texts
from ckptkit.formats.own.json import MESH, NULL, TABLE, TEXT, TEXTS, Check, check_json, field_of, is_texts
from ckptkit.storage.store import checked_path

# --- validation of whole columns at a time


_MAX_NDIM = 64  # torch's own limit
_MAX_BYTES = 1 << 62
_BLOCK = 1 << 16  # slices that are checked at once


def _check_manifest(manifest: Manifest, columns: Columns) -> None:
    """Check paths and names, and that each slice lies inside its tensor and has as many bytes as its sizes require.

    Raises:
        CorruptCheckpointError: A row has invalid values.
        UnsafePathError: A path leads out of the checkpoint.
    """
    for path in manifest.paths:
        checked_path(path)
    names = manifest.tensors.names
    if len(set(names)) != len(names):
        _fail(columns, "a tensor is listed twice")
    if len(manifest.objects) != len(columns.get("objects.ends", "int64")):
        _fail(columns, "an object is listed twice")
    for name, shape, dtype in zip(names, manifest.tensors.shapes, manifest.tensors.dtypes, strict=True):
        if math.prod(shape) * DTYPES[dtype].itemsize > _MAX_BYTES:
            _fail(columns, f"tensor {name!r} has an impossible size")
    blocks = manifest.tensors.slice_stop // _BLOCK  # the arrays for all slices at once would need much memory
    for tensors in np.split(np.arange(len(names)), np.flatnonzero(np.diff(blocks)) + 1) if names else ():
        _check_slices(manifest, columns, int(tensors[0]), int(tensors[-1]) + 1)


def _check_slices(manifest: Manifest, columns: Columns, first: int, stop: int) -> None:
    """Check the slices of the tensors [first, stop)."""
    tensors, slices = manifest.tensors, manifest.slices
    starts, stops, elements, ndims = tensors.places()
    begin, rows = int(starts[first]), slice(int(starts[first]), int(stops[stop - 1]))
    numbers = slice(int(elements[first]), int(elements[stop]))
    boxes = BoxTable(ndims[first:stop], stops[first:stop] - begin, slices.offsets[numbers], slices.sizes[numbers])
    owners, sizes = boxes.owners, boxes.sizes
    extents = boxes.extents(np.array([n for shape in tensors.shapes[first:stop] for n in shape], np.int64))
    outside = (boxes.offsets < 0) | (sizes < 0) | (sizes > extents) | (boxes.offsets > extents - sizes)
    itemsizes = np.array([DTYPES[name].itemsize for name in tensors.dtypes[first:stop]], np.int64)[owners]
    nbytes = products(sizes, boxes.ndims[owners]) * itemsizes
    for row, strides in slices.strides.items():
        if rows.start <= row < rows.stop:
            counts = boxes.box(row - begin)[1]
            span = max(0, 1 + sum((n - 1) * s for n, s in zip(counts, strides, strict=True)))
            nbytes[row - begin] = 0 if 0 in counts else min(span * itemsizes.item(row - begin), _MAX_BYTES + 1)
    wrong = (slices.nbytes[rows] != nbytes) | (nbytes > _MAX_BYTES)
    far = (slices.starts[rows] < 0) | (slices.starts[rows] > _MAX_BYTES)
    for bad, of, what in (
        (outside, np.repeat(owners, boxes.ndims[owners]), "is outside the tensor"),
        (wrong, owners, "has a size that does not match its box or its strides"),
        (far, owners, "starts outside of any file"),
    ):
        if bad.any():
            name = tensors.names[first + of.item(int(np.argmax(bad)))]
            _fail(columns, f"a slice of tensor {name!r} {what}")


def _in_range(
    columns: Columns, name: str, dtype: str, count: int | None = None, *, low: int = 0, high: int | None = None
) -> Column:
    """Return a column after checking that all values are at least `low`, and below `high` if `high` is given."""
    column = columns.get(name, dtype, count)
    if len(column) and (int(column.min()) < low or (high is not None and int(column.max()) >= high)):
        what = "holds a negative number" if high is None else "has an index outside its table"
        _fail(columns, f"column {name!r} {what}")
    return column


def _fail(columns: Columns, what: str) -> None:
    raise CorruptCheckpointError(f"{columns.file}: {what}. The file is damaged.")


Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
VERSION = 1
MESHES = "meshes"
"""Key of the device meshes in `info.extra`: [{"shape": [...], "names": [...], "ranks": [...]}, ...].

"ranks" is row-major, and is left out if the ranks are 0, 1, 2, ...
"""
PLACEMENTS = "placements"
"""Key of the placements in `info.extra`: {tensor name: [mesh index, ["S(0)", "R", "SS(0,2)", ...]]}.

There is one string per mesh dimension, for Shard, Replicate, or _StridedShard with its split factor.
"""
_ROLES = tuple(Role)
_SLICE_COLUMNS = (  # name, attribute of `Slices`, dtype
    ("slice.file", "files", "int32"),
    ("slice.start", "starts", "int64"),
    ("slice.nbytes", "nbytes", "int64"),
    ("slice.offset", "offsets", "int64"),
    ("slice.size", "sizes", "int64"),
    ("slice.rank", "ranks", "int32"),
    (f"slice.{DIGEST}", "digests", "uint64"),
)
_ENCODINGS = ("torch_save", "json", "value")
_OBJECT_COLUMNS = (
    ("file", "int32"),
    ("start", "int64"),
    ("nbytes", "int64"),
    (DIGEST, "uint64"),
    ("digested", "uint8"),
    ("role", "uint8"),
    ("encoding", "uint8"),
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a manifest as columns. `slice_stop` is the index after each tensor's last slice in `Slices`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    slice_stop: Int64
    roles: list[Role]
    fqns: list[str]
    states: list[str]
    keys: list[tuple[str | int, ...]]
    placements: Int32  # index into Manifest.placements, -1 for none

    def places(self) -> tuple[Int64, Int64, Int64, Int64]:
        """Return four columns that say where the slices of each tensor are.

        The columns are:

        - [T] the index of the tensor's first slice
        - [T] the index after its last slice
        - [T + 1] where its offsets and sizes start in the ragged columns, then the end of those columns
        - [T] its number of dimensions
        """
        counts = np.diff(self.slice_stop, prepend=0)
        ndims = np.fromiter(map(len, self.shapes), np.int64, len(self.shapes))
        return self.slice_stop - counts, self.slice_stop, np.append(0, np.cumsum(counts * ndims)), ndims


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a manifest as columns, in tensor order.

    `offsets` and `sizes` are ragged: each row has as many numbers as the tensor has dimensions.
    """

    files: Int32
    starts: Int64
    nbytes: Int64
    offsets: Int64
    sizes: Int64
    ranks: Int32
    digests: npt.NDArray[np.uint64] | None
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A catalog as columns.

    Attributes:
        placements: The distinct (mesh index, placements) pairs. `tensors.placements` holds indices into this list.
    """

    paths: list[str]
    tensors: Tensors
    slices: Slices
    objects: Mapping[str, ObjectEntry]
    info: CatalogInfo
    placements: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    # --- conversion from and to catalogs

    @classmethod
    def of(cls, catalog: Catalog) -> Manifest:
        """Convert a catalog to columns. The tensors keep their order.

        Raises:
            UnsupportedFormatError: A slice is compressed, or its digest does not use the algorithm `DIGEST`, or does
                not cover exactly the slice's bytes.
        """
        entries = list(catalog.tensors.values())
        paths: dict[str, int] = {}
        slices = _slices(entries, paths)
        placements, chosen = _placements(entries, catalog.info.extra.get(PLACEMENTS, {}))
        tensors = Tensors(
            [e.name for e in entries],
            [e.dtype for e in entries],
            [tuple(e.shape) for e in entries],
            np.cumsum([len(e.slices) for e in entries], dtype=np.int64),
            [e.role for e in entries],
            [e.fqn for e in entries],
            [e.state for e in entries],
            [tuple(e.key) for e in entries],
            chosen,
        )
        for entry in catalog.objects.values():
            if entry.path:
                paths.setdefault(entry.path, len(paths))
        return cls(list(paths), tensors, slices, dict(catalog.objects), catalog.info, placements)

    def catalog(self) -> Catalog:
        """Return the catalog. The entries of tensors are created on demand."""
        info = self.info
        if self.placements:
            distinct = [[mesh, list(texts)] for mesh, texts in self.placements]
            rows = zip(self.tensors.names, self.tensors.placements.tolist(), strict=True)
            placed = {name: distinct[row] for name, row in rows if row >= 0}
            info = replace(info, extra={**info.extra, PLACEMENTS: placed})
        return Catalog(Entries(self), self.objects, info)

    # --- conversion from and to bytes

    def to_bytes(self) -> bytes:
        """Return the bytes of `manifest.safetensors`.

        Raises:
            UsageError: A value in `info.extra` is not JSON.
            UnsupportedFormatError: A tensor's name does not contain its FQN.
        """
        tensors, slices, info = self.tensors, self.slices, self.info
        dtypes, dtype_rows = _distinct(tensors.dtypes)
        states, state_rows = _distinct(tensors.states)
        fqns: list[int] = []
        for name, fqn in zip(tensors.names, tensors.fqns, strict=True):
            start = len(name) - len(fqn) if name.endswith(fqn) else name.find(fqn)
            if start < 0:
                raise UnsupportedFormatError(
                    f"tensor {name!r}: a manifest needs its FQN {fqn!r} to be a part of its name."
                )
            fqns += [start, start + len(fqn)] if fqn else [0, 0]
        arrays: dict[str, Column] = {
            **pack_texts(tensors.names, "names"),
            **pack_texts(self.paths, "paths"),
            "tensor.dtype": np.array(dtype_rows, np.uint8),
            "tensor.ndim": np.array([len(s) for s in tensors.shapes], np.uint8),
            "tensor.shape": np.array([n for s in tensors.shapes for n in s], np.int64),
            "tensor.stop": tensors.slice_stop,
            "tensor.role": np.array([_ROLES.index(r) for r in tensors.roles], np.uint8),
            "tensor.state": np.array(state_rows, np.int32),
            "tensor.fqn": np.array(fqns, np.int32),
            "tensor.placement": tensors.placements,
            **_pack_keys("tensor", tensors.names, tensors.keys),
            **{name: column for name, key, _ in _SLICE_COLUMNS if (column := getattr(slices, key)) is not None},
            "stride.row": np.array(sorted(slices.strides), np.int64),
            "stride.value": np.array([n for row in sorted(slices.strides) for n in slices.strides[row]], np.int64),
        }
        objects, values = _pack_objects(self.objects, self.paths)
        arrays.update(objects)
        fields: dict[str, Any] = {
            "format": info.format,
            "producer": info.producer,
            "step": info.step,
            "world_size": info.world_size,
            **({} if info.mesh is None else {"mesh": {"shape": info.mesh.shape, "names": info.mesh.names}}),
            "files": dict(info.files),
            "side_files": info.side_files,
            "notes": info.notes,
            "extra": {key: value for key, value in info.extra.items() if key != PLACEMENTS},
        }
        check_json(fields, "info")
        header = {
            "format": VERSION,
            "dtypes": dtypes,
            "states": states,
            "placements": self.placements,
            "values": values,
            "info": fields,
        }
        return pack(arrays, header)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, file: str = "manifest.safetensors") -> Manifest:
        """Parse `data` and check every row. The columns are views of `data`, which therefore stays in memory.

        Raises:
            CorruptCheckpointError: A column is missing or has a wrong length, or a row has invalid values.
            UnsafePathError: A path leads out of the checkpoint.
            UnsupportedFormatError: A newer ckptkit wrote the manifest.
        """
        columns = unpack(data, file=file)
        manifest = _decode(columns)
        _check_manifest(manifest, columns)
        return manifest


def _decode(columns: Columns) -> Manifest:
    """Return the manifest that `columns` contain. Checks all indices."""
    found = columns.field("format", int)
    if found != VERSION:
        raise UnsupportedFormatError(
            f"{columns.file}: its format is {found}; this ckptkit reads {VERSION}. Update ckptkit."
        )
    dtypes, states = (columns.field(name, list) for name in ("dtypes", "states"))
    for name, table in (("dtypes", dtypes), ("states", states)):
        if not is_texts(table):
            _fail(columns, f"{name!r} in its header has an item that is not a string")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise UnsupportedFormatError(f"{columns.file}: dtype {unknown[0]!r} is unknown.")
    placements: list[tuple[int, tuple[str, ...]]] = []
    for item in columns.field("placements", list):
        if not isinstance(item, list) or len(item) != 2 or type(item[0]) is not int or not is_texts(item[1]):
            _fail(columns, "a placement in its header is malformed")
        placements.append((item[0], tuple(item[1])))
    info = _decode_info(columns)
    names, paths = unpack_texts(columns, "names"), unpack_texts(columns, "paths")
    count = len(names)
    ndims = _in_range(columns, "tensor.ndim", "uint8", count, high=_MAX_NDIM + 1).astype(np.int64)
    shapes = _split_rows(_in_range(columns, "tensor.shape", "int64", int(ndims.sum())), ndims)
    stops = columns.get("tensor.stop", "int64", count)
    if count and (stops[0] < 0 or (np.diff(stops) < 0).any() or stops[-1] > len(columns.get("slice.file", "int32"))):
        _fail(columns, "the column 'tensor.stop' is damaged")
    fqns = _in_range(columns, "tensor.fqn", "int32", 2 * count).tolist()
    rows = _in_range(columns, "tensor.dtype", "uint8", count, high=len(dtypes)).tolist()
    roles = _in_range(columns, "tensor.role", "uint8", count, high=len(_ROLES)).tolist()
    named = _in_range(columns, "tensor.state", "int32", count, high=len(states)).tolist()
    tensors = Tensors(
        names,
        [dtypes[i] for i in rows],
        shapes,
        stops,
        [_ROLES[i] for i in roles],
        [name[a:b] for name, a, b in zip(names, fqns[::2], fqns[1::2], strict=True)],
        [states[i] for i in named],
        _decode_keys(columns, "tensor", names),
        _in_range(columns, "tensor.placement", "int32", count, low=-1, high=len(placements)),
    )
    total = int(stops[-1]) if count else 0
    elements = int((np.diff(stops, prepend=0) * ndims).sum())
    _in_range(columns, "slice.file", "int32", total, high=len(paths))
    slices: dict[str, Any] = {"digests": None}
    for name, key, dtype in _SLICE_COLUMNS:
        if key != "digests" or name in columns.arrays:
            slices[key] = columns.get(name, dtype, elements if key in ("offsets", "sizes") else total)
    strides = _decode_strides(columns, ndims, stops, total)
    return Manifest(
        paths, tensors, Slices(**slices, strides=strides), _decode_objects(columns, paths), info, placements
    )


def _split_rows(flat: Column, widths: Int64) -> list[tuple[int, ...]]:
    """Return a ragged column as one tuple per row."""
    values, at, rows = flat.tolist(), 0, []
    for width in widths.tolist():
        rows.append(tuple(values[at : at + width]))
        at += width
    return rows


def _decode_keys(columns: Columns, prefix: str, names: list[str]) -> list[tuple[str | int, ...]]:
    """Return each entry's path in the state dict.

    The column stores a dict key as the length of the key in the entry's name, and the list index i as -1 - i.
    """
    counts = columns.get(f"{prefix}.parts", "uint8", len(names))
    parts = columns.get(f"{prefix}.part", "int32", int(counts.sum(dtype=np.int64))).tolist()
    keys: list[tuple[str | int, ...]] = []
    at = 0
    for name, count in zip(names, counts.tolist(), strict=True):
        key: list[str | int] = []
        begin = 0
        for part in parts[at : at + count]:
            if part < 0:
                key.append(-1 - part)
                begin += len(str(-1 - part)) + 1
            else:
                key.append(name[begin : begin + part])
                begin += part + 1
        keys.append(tuple(key))
        at += count
    return keys


def _decode_strides(columns: Columns, ndims: Int64, stops: Int64, total: int) -> dict[int, tuple[int, ...]]:
    rows = _in_range(columns, "stride.row", "int64", high=total)
    if (np.diff(rows) <= 0).any():
        _fail(columns, "the list of strided slices is damaged")
    widths = ndims[np.searchsorted(stops, rows, side="right")]
    values = _in_range(columns, "stride.value", "int64", int(widths.sum()))
    return dict(zip(rows.tolist(), _split_rows(values, widths), strict=True))


def _decode_objects(columns: Columns, paths: list[str]) -> dict[str, ObjectEntry]:
    names = unpack_texts(columns, "objects")
    tables = {"file": len(paths), "role": len(_ROLES), "encoding": len(_ENCODINGS)}
    found = [
        _in_range(
            columns, f"object.{name}", dtype, len(names), low=-1 if name == "file" else 0, high=tables.get(name)
        ).tolist()
        for name, dtype in _OBJECT_COLUMNS
    ]
    values: dict[str, Any] = columns.field("values", dict)
    entries = {}
    rows = zip(names, _decode_keys(columns, "object", names), *found, strict=True)
    for name, key, file, start, nbytes, value, digested, role, encoding in rows:
        digest = Digest(DIGEST, value, start, nbytes) if digested else None
        path = "" if file < 0 else paths[file]
        entries[name] = ObjectEntry(
            name, path, start, nbytes, None, _ENCODINGS[encoding], values.get(name), digest, _ROLES[role], key
        )
    return entries


_INFO: Mapping[str, Check] = {
    "format": TEXT,
    "producer": TEXT,
    "step": ("a number or null", (int, NULL), None),
    "world_size": ("a number or null", (int, NULL), None),
    "mesh": MESH,
    "files": ("sizes by path", (dict,), lambda files: all(type(size) is int for size in files.values())),
    "side_files": TEXTS,
    "notes": TEXTS,
    "extra": TABLE,
}


def _decode_info(columns: Columns) -> CatalogInfo:
    stated, file = columns.field("info", dict), f"{columns.file}: info"
    info = {name: field_of({"mesh": None, **stated}, name, check, file) for name, check in _INFO.items()}
    opaque = info["extra"].get("opaque", {})
    if not isinstance(opaque, dict) or not is_texts(list(opaque.values())):
        _fail(columns, "info.extra.opaque in its header is malformed")
    for path in (*info["files"], *info["side_files"]):
        checked_path(path)
    mesh = info["mesh"] and MeshInfo(tuple(info["mesh"]["shape"]), tuple(info["mesh"]["names"]))
    texts = {name: tuple(info[name]) for name in ("side_files", "notes")}
    return CatalogInfo(**{**info, **texts, "mesh": mesh})


class Entries(Mapping[str, TensorEntry]):
    """A manifest's tensors. Each `TensorEntry` is created on demand."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._index = {name: i for i, name in enumerate(manifest.tensors.names)}
        starts, stops, elements, _ = manifest.tensors.places()
        self._places = list(zip(starts.tolist(), stops.tolist(), elements[:-1].tolist(), strict=True))
        self._strided = sorted(manifest.slices.strides)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> TensorEntry:
        i = self._index[name]
        tensors, slices = self.manifest.tensors, self.manifest.slices
        shape, (start, stop, at) = tensors.shapes[i], self._places[i]
        ndim = len(shape)
        rows = slice(start, stop)
        boxes = slice(at, at + (stop - start) * ndim)
        digests = slices.digests
        strided = self._strided[bisect.bisect_left(self._strided, start) : bisect.bisect_left(self._strided, stop)]
        array = SliceArray(
            self.manifest.paths,
            slices.files[rows],
            slices.starts[rows],
            slices.nbytes[rows],
            slices.offsets[boxes].reshape(stop - start, ndim),
            slices.sizes[boxes].reshape(stop - start, ndim),
            ranks=slices.ranks[rows],
            algorithm=None if digests is None else DIGEST,
            digests=None if digests is None else digests[rows],
            strides={row - start: slices.strides[row] for row in strided},
        )
        return TensorEntry(
            name, tensors.dtypes[i], shape, array, tensors.roles[i], tensors.fqns[i], tensors.states[i], tensors.keys[i]
        )


# --- from a catalog to columns, and from columns to the arrays to pack


def _slices(entries: Sequence[TensorEntry], paths: dict[str, int]) -> Slices:
    parts: dict[str, list[Column]] = {key: [] for _, key, _ in _SLICE_COLUMNS}
    strides: dict[int, tuple[int, ...]] = {}
    tables: dict[int, Column] = {}  # by id(array.paths): all of a catalog's tensors share one list
    row = digested = 0
    for entry in entries:
        array = entry.slices
        _check_supported(entry)
        table = tables.get(id(array.paths))
        if table is None:
            table = np.array([paths.setdefault(p, len(paths)) for p in array.paths], np.int32)
            tables[id(array.paths)] = table
        count = len(array)
        parts["files"].append(table[array.files] if count else np.zeros(0, np.int32))
        parts["starts"].append(array.starts)
        parts["nbytes"].append(array.nbytes)
        parts["offsets"].append(array.offsets.reshape(-1))
        parts["sizes"].append(array.sizes.reshape(-1))
        parts["ranks"].append(np.full(count, -1, np.int32) if array.ranks is None else array.ranks)
        if array.digests is not None:
            parts["digests"].append(array.digests)
            digested += count
        strides.update({row + i: tuple(s) for i, s in array.strides.items()})
        row += count
    if digested not in (0, row):
        raise UnsupportedFormatError(
            f"a manifest needs digests of all slices or of none; {digested} of {row} have one."
        )
    found: dict[str, Any] = {
        key: np.concatenate([np.zeros(0, dtype), *parts[key]]).astype(dtype, copy=False)
        for _, key, dtype in _SLICE_COLUMNS
    }
    return Slices(**{**found, "digests": found["digests"] if digested else None}, strides=strides)


def _check_supported(entry: TensorEntry) -> None:
    array: SliceArray = entry.slices
    if array.codecs:
        raise UnsupportedFormatError(f"tensor {entry.name!r}: a manifest can't hold compressed slices.")
    if array.digests is None:
        return
    own = array.digest_starts is None or (
        np.array_equal(array.digest_starts, array.starts) and np.array_equal(array.digest_nbytes, array.nbytes)  # type: ignore[arg-type]
    )
    if array.algorithm != DIGEST or not own:
        raise UnsupportedFormatError(
            f"tensor {entry.name!r}: a manifest holds the {DIGEST} of each slice's own bytes, not {array.algorithm}."
        )


def _placements(
    entries: Sequence[TensorEntry], given: Mapping[str, Any]
) -> tuple[list[tuple[int, tuple[str, ...]]], Any]:
    distinct: dict[tuple[int, tuple[str, ...]], int] = {}
    chosen = np.full(len(entries), -1, np.int32)
    for row, entry in enumerate(entries):
        placed = given.get(entry.name)
        if placed is not None:
            mesh, texts = placed
            chosen[row] = distinct.setdefault((int(mesh), tuple(texts)), len(distinct))
    return list(distinct), chosen


# --- packing


def _distinct(values: Sequence[str]) -> tuple[list[str], list[int]]:
    table: dict[str, int] = {}
    rows = [table.setdefault(value, len(table)) for value in values]
    return list(table), rows


def _pack_keys(prefix: str, names: Sequence[str], keys: Sequence[tuple[str | int, ...]]) -> dict[str, Column]:
    counts, parts = [], []
    for name, key in zip(names, keys, strict=True):
        if key and (".".join(map(str, key)) != name or len(key) > 255):
            raise UnsupportedFormatError(
                f"{name!r}: the path {key} cannot be stored: it must be the name, split at dots into at most 255 parts."
            )
        counts.append(len(key))
        parts += [-1 - part if isinstance(part, int) else len(part) for part in key]
    return {f"{prefix}.parts": np.array(counts, np.uint8), f"{prefix}.part": np.array(parts, np.int32)}


def _pack_objects(entries: Mapping[str, ObjectEntry], paths: list[str]) -> tuple[dict[str, Column], dict[str, Any]]:
    index = {path: i for i, path in enumerate(paths)}
    items = list(entries.values())
    for entry in items:
        if entry.codec is not None or (entry.digest is not None and entry.digest.algorithm != DIGEST):
            raise UnsupportedFormatError(f"object {entry.name!r}: a manifest can't hold its codec or its digest.")
    rows = [
        (
            index[e.path] if e.path else -1,
            e.start,
            e.nbytes,
            e.digest.value if e.digest else 0,
            e.digest is not None,
            _ROLES.index(e.role),
            _ENCODINGS.index(e.encoding),
        )
        for e in items
    ]
    arrays = {
        **pack_texts([e.name for e in items], "objects"),
        **{
            f"object.{name}": np.array([row[i] for row in rows], dtype)
            for i, (name, dtype) in enumerate(_OBJECT_COLUMNS)
        },
        **_pack_keys("object", [e.name for e in items], [tuple(e.key) for e in items]),
    }
    # Objects in separate files stay there. Values are included only if they are stored nowhere else.
    return arrays, {e.name: e.value for e in items if e.encoding != "torch_save" and not e.path}
