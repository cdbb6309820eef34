"""`manifest.safetensors`: what a checkpoint of ours holds, as columns: every slice, where it lies, its digest.

There is no pickle in it, and nothing a row long in Python objects: a million slices are a few arrays, and the
entries of its catalog are made when they are asked for. The columns (T tensors, N slices in the order of their
tensors, E the sum of ndim over what precedes):

    names, paths                 tables of texts (UTF-8, and `.ends`)
    tensor.dtype, .ndim          [T] u8    index into the header's "dtypes"; dimensions
    tensor.shape                 [E] i64
    tensor.stop                  [T] i64   past the tensor's last slice
    tensor.role, .state          [T] u8, i32   `Role` by its order; index into the header's "states"
    tensor.fqn                   [2T] i32  start and stop of the FQN in the name
    tensor.placement             [T] i32   index into the header's "placements", -1 for none
    tensor.parts, .part          parts of the planner's path: how many; length, or -1 - index for a list index
    slice.file, .rank            [N] i32
    slice.start, .nbytes         [N] i64
    slice.offset, .size          [E] i64
    slice.xxh3_64                [N] u64   of the slice's bytes; absent where nothing was digested
    stride.row, .value           the few slices that do not lie row-major
    objects, object.*            the same for what is no tensor; small values stand in the header

`info.extra["meshes"]` and `info.extra["placements"]` of the catalog (see `MESHES`, `PLACEMENTS`) carry how each
tensor was placed: LOCAL checkpoints are resharded by it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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
from ckptkit.formats.columns import Column, Columns, pack, unpack, unpack_texts
from ckptkit.formats.manifest_checks import check_manifest, check_tables

__all__ = ["DIGEST", "MESHES", "PLACEMENTS", "Entries", "Manifest", "Objects", "Slices", "Tensors", "read_manifest"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
DIGEST = "xxh3_64"
VERSION = 1
MESHES = "meshes"
"""Key of `info.extra`: [{"shape": [...], "names": [...], "ranks": [...]}, ...]; "ranks" row-major, absent where they
count from 0."""
PLACEMENTS = "placements"
"""Key of `info.extra`: {tensor name: [mesh index, ["S(0)", "R", "SS(0,2)", ...]]}, one text a mesh dimension: Shard,
Replicate, _StridedShard with its split factor."""
_ROLES = tuple(Role)
_ENCODINGS = ("torch_save", "json", "value")


@dataclass(frozen=True, slots=True)
class Tensors:
    """One row a tensor. `slice_stop` is past its last row in `Slices`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    slice_stop: Int64
    roles: list[Role]
    fqns: list[str]
    states: list[str]
    keys: list[tuple[str | int, ...]]
    placements: Int32  # index into Manifest.placements, -1 for none


@dataclass(frozen=True, slots=True)
class Slices:
    """One row a slice, in the order of the tensors; `offsets` and `sizes` are ragged: ndim numbers a row."""

    files: Int32
    starts: Int64
    nbytes: Int64
    offsets: Int64
    sizes: Int64
    ranks: Int32
    digests: npt.NDArray[np.uint64] | None
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Objects:
    """What is no tensor, by name; an entry with `encoding` "value" or "json" carries its value."""

    entries: Mapping[str, ObjectEntry]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A catalog as columns.

    Attributes:
        placements: Distinct (mesh index, placements); `tensors.placements` points into it.
    """

    paths: list[str]
    tensors: Tensors
    slices: Slices
    objects: Objects
    info: CatalogInfo
    placements: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    # --- catalogs

    @classmethod
    def of(cls, catalog: Catalog) -> Manifest:
        """Return the columns of a catalog. Raises UnsupportedFormatError where a slice is compressed or digested
        by anything but the xxh3_64 of its own bytes."""
        from ckptkit.formats.manifest_build import manifest_of

        return manifest_of(catalog)

    def catalog(self) -> Catalog:
        """Return the catalog; its tensors are made when asked for."""
        extra = dict(self.info.extra)
        if self.placements:
            extra[PLACEMENTS] = _Placements(self)
        info = CatalogInfo(
            self.info.format,
            self.info.producer,
            self.info.step,
            self.info.world_size,
            self.info.mesh,
            self.info.files,
            self.info.side_files,
            self.info.notes,
            extra,
        )
        return Catalog(Entries(self), self.objects.entries, info)

    # --- bytes

    def to_bytes(self) -> bytes:
        """Return the bytes of `manifest.safetensors`. Raises UsageError: something in `info.extra` is not JSON."""
        from ckptkit.formats.manifest_build import encode

        arrays, header = encode(self)
        return pack(arrays, {"format": VERSION, **header})

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, file: str = "manifest.safetensors") -> Manifest:
        """Return the manifest in `data`, which it keeps and refers to; every row is checked.

        Raises:
            CorruptCheckpointError: A column is missing, of a wrong length, or a row is impossible.
            UnsafePathError: A path points outside of the checkpoint.
            UnsupportedFormatError: A newer ckptkit wrote it.
        """
        columns = unpack(data, file=file)
        check_tables(columns, VERSION)
        manifest = _decode(columns)
        check_manifest(manifest, columns)
        return manifest


def read_manifest(data: bytes | bytearray | memoryview, *, file: str = "manifest.safetensors") -> Catalog:
    """Return the catalog that a manifest holds. Raises as `Manifest.from_bytes` does."""
    return Manifest.from_bytes(data, file=file).catalog()


def _decode(columns: Columns) -> Manifest:
    names = unpack_texts(columns, "names")
    count = len(names)
    ndims = columns.get("tensor.ndim", "uint8", count).astype(np.int64)
    shapes = split_rows(columns.get("tensor.shape", "int64", int(ndims.sum())), ndims)
    stops = columns.get("tensor.stop", "int64", count)
    dtypes, states = columns.field("dtypes", list), columns.field("states", list)
    fqns = columns.get("tensor.fqn", "int32", 2 * count).tolist()
    tensors = Tensors(
        names,
        [dtypes[i] for i in columns.get("tensor.dtype", "uint8", count).tolist()],
        shapes,
        stops,
        [_ROLES[i] for i in columns.get("tensor.role", "uint8", count).tolist()],
        [name[a:b] for name, a, b in zip(names, fqns[::2], fqns[1::2], strict=True)],
        [states[i] for i in columns.get("tensor.state", "int32", count).tolist()],
        _decode_keys(columns, "tensor", names),
        columns.get("tensor.placement", "int32", count),
    )
    total = int(stops[-1]) if count else 0
    elements = int((np.diff(stops, prepend=0) * ndims).sum())
    paths = unpack_texts(columns, "paths")
    slices = Slices(
        columns.get("slice.file", "int32", total),
        columns.get("slice.start", "int64", total),
        columns.get("slice.nbytes", "int64", total),
        columns.get("slice.offset", "int64", elements),
        columns.get("slice.size", "int64", elements),
        columns.get("slice.rank", "int32", total),
        columns.get("slice.xxh3_64", "uint64", total) if "slice.xxh3_64" in columns.arrays else None,
        _decode_strides(columns, ndims, stops),
    )
    placements = [(int(mesh), tuple(texts)) for mesh, texts in columns.field("placements", list)]
    return Manifest(paths, tensors, slices, _decode_objects(columns, paths), _decode_info(columns), placements)


def split_rows(flat: Column, widths: Int64) -> list[tuple[int, ...]]:
    """Return a ragged column as one tuple a row."""
    values, at, rows = flat.tolist(), 0, []
    for width in widths.tolist():
        rows.append(tuple(values[at : at + width]))
        at += width
    return rows


def _decode_keys(columns: Columns, prefix: str, names: list[str]) -> list[tuple[str | int, ...]]:
    """The planner's paths: the name cut into parts, a part of -1 - i being the list index i."""
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


def _decode_strides(columns: Columns, ndims: Int64, stops: Int64) -> dict[int, tuple[int, ...]]:
    rows = columns.get("stride.row", "int64")
    tensors = np.searchsorted(stops, rows, side="right")
    widths = ndims[np.minimum(tensors, max(0, len(ndims) - 1))] if len(ndims) else np.zeros(len(rows), np.int64)
    values = columns.get("stride.value", "int64", int(widths.sum()))
    return dict(zip(rows.tolist(), split_rows(values, widths), strict=True))


def _decode_objects(columns: Columns, paths: list[str]) -> Objects:
    names = unpack_texts(columns, "objects")
    count = len(names)
    files = columns.get("object.file", "int32", count).tolist()
    starts = columns.get("object.start", "int64", count).tolist()
    sizes = columns.get("object.nbytes", "int64", count).tolist()
    digests = columns.get("object.xxh3_64", "uint64", count).tolist()
    known = columns.get("object.digested", "uint8", count).tolist()
    roles = columns.get("object.role", "uint8", count).tolist()
    encodings = columns.get("object.encoding", "uint8", count).tolist()
    keys = _decode_keys(columns, "object", names)
    values: dict[str, Any] = columns.field("values", dict)
    entries = {}
    for i, name in enumerate(names):
        digest = Digest(DIGEST, digests[i], starts[i], sizes[i]) if known[i] else None
        path = "" if files[i] < 0 else paths[files[i]]
        encoding, value = _ENCODINGS[encodings[i]], values.get(name)
        entries[name] = ObjectEntry(
            name, path, starts[i], sizes[i], None, encoding, value, digest, _ROLES[roles[i]], keys[i]
        )
    return Objects(entries)


def _decode_info(columns: Columns) -> CatalogInfo:
    info: dict[str, Any] = columns.field("info", dict)
    mesh = info.get("mesh")
    return CatalogInfo(
        str(info.get("format", "ckptkit")),
        str(info.get("producer", "")),
        info.get("step"),
        info.get("world_size"),
        None if mesh is None else MeshInfo(tuple(mesh["shape"]), tuple(mesh["names"])),
        dict(info.get("files", {})),
        tuple(info.get("side_files", ())),
        tuple(info.get("notes", ())),
        dict(info.get("extra", {})),
    )


class Entries(Mapping[str, TensorEntry]):
    """The tensors of a manifest, each made when it is asked for.

    Attributes:
        columns: Of each tensor, its first slice, past its last one, and where its boxes begin in the slices' elements.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._index = {name: i for i, name in enumerate(manifest.tensors.names)}
        stops = manifest.tensors.slice_stop
        starts = np.concatenate([[0], stops[:-1]]).astype(np.int64) if len(stops) else stops
        widths = np.fromiter(map(len, manifest.tensors.shapes), np.int64, len(stops))
        elements = np.cumsum((stops - starts) * widths) - (stops - starts) * widths
        self.columns: tuple[Int64, Int64, Int64] = (starts, stops, elements)
        self._starts: list[int] = starts.tolist()
        self._stops: list[int] = stops.tolist()
        self._elements: list[int] = elements.tolist()
        self._strided = sorted(manifest.slices.strides)

    def row(self, name: str) -> int | None:
        """Return the tensor's row in the manifest, None where there is none of that name."""
        return self._index.get(name)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> TensorEntry:
        i = self._index[name]
        tensors, slices = self.manifest.tensors, self.manifest.slices
        shape, start, stop = tensors.shapes[i], self._starts[i], self._stops[i]
        ndim, at = len(shape), self._elements[i]
        rows = slice(start, stop)
        boxes = slice(at, at + (stop - start) * ndim)
        digests = slices.digests
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
            strides={row - start: slices.strides[row] for row in self._strided_rows(start, stop)},
        )
        return TensorEntry(
            name, tensors.dtypes[i], shape, array, tensors.roles[i], tensors.fqns[i], tensors.states[i], tensors.keys[i]
        )

    def _strided_rows(self, start: int, stop: int) -> list[int]:
        return self._strided[bisect.bisect_left(self._strided, start) : bisect.bisect_left(self._strided, stop)]


class _Placements(Mapping[str, "list[Any]"]):
    """`info.extra["placements"]` without a list for every tensor."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        chosen = manifest.tensors.placements.tolist()
        self._index = {name: row for name, row in zip(manifest.tensors.names, chosen, strict=True) if row >= 0}

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __getitem__(self, name: str) -> list[Any]:
        mesh, texts = self._manifest.placements[self._index[name]]
        return [mesh, list(texts)]
