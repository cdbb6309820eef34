"""What must hold for a manifest before anything is read by it. Whole columns at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import DTYPES
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.columns import Columns
from ckptkit.storage.paths import checked_path

if TYPE_CHECKING:
    from ckptkit.formats.manifest import Manifest

__all__ = ["check_manifest", "check_tables"]

_MAX_NDIM = 64  # torch's own limit
_MAX_BYTES = 1 << 62


def check_tables(columns: Columns, version: int) -> None:
    """Check everything that later steps index with, so that decoding can't go wrong half-way.

    Raises:
        CorruptCheckpointError: A table or a pointer is impossible.
        UnsupportedFormatError: The manifest is of a newer format.
    """
    found = columns.field("format", int)
    if found != version:
        raise UnsupportedFormatError(f"{columns.file}: its format is {found}; this ckptkit reads {version}. Update it.")
    for name in ("dtypes", "states"):
        if not all(isinstance(item, str) for item in columns.field(name, list)):
            _fail(columns, f"{name!r} in its header holds something that is no text")
    unknown = [name for name in columns.field("dtypes", list) if name not in DTYPES]
    if unknown:
        raise UnsupportedFormatError(f"{columns.file}: dtype {unknown[0]!r} is unknown.")
    _check_placements(columns)
    _check_info(columns)
    count = len(columns.get("names.ends", "int64"))
    _in_range(columns, "tensor.dtype", "uint8", len(columns.header["dtypes"]), count)
    _in_range(columns, "tensor.state", "int32", len(columns.header["states"]), count)
    _in_range(columns, "tensor.role", "uint8", 4, count)
    _in_range(columns, "tensor.ndim", "uint8", _MAX_NDIM + 1, count)
    _in_range(columns, "tensor.placement", "int32", len(columns.header["placements"]), count, low=-1)
    _non_negative(columns, "tensor.shape")
    _non_negative(columns, "tensor.fqn", "int32")
    stops = columns.get("tensor.stop", "int64", count)
    if count and (stops[0] < 0 or (np.diff(stops) < 0).any() or stops[-1] > len(columns.get("slice.file", "int32"))):
        _fail(columns, "the pointers to the slices of its tensors are damaged")
    files = len(columns.get("paths.ends", "int64"))
    _in_range(columns, "slice.file", "int32", files)
    objects = len(columns.get("objects.ends", "int64"))
    _in_range(columns, "object.file", "int32", files, objects, low=-1)
    _in_range(columns, "object.role", "uint8", 4, objects)
    _in_range(columns, "object.encoding", "uint8", 3, objects)
    for name in ("object.start", "object.nbytes", "stride.row", "stride.value"):
        _non_negative(columns, name)
    total = int(stops[-1]) if count else 0
    rows = columns.get("stride.row", "int64")
    if len(rows) and (rows[-1] >= total or (np.diff(rows) <= 0).any()):
        _fail(columns, "the list of strided slices is damaged")


def check_manifest(manifest: Manifest, columns: Columns) -> None:
    """Check paths, names, and that each slice lies in its tensor and has the bytes of its box.

    Raises:
        CorruptCheckpointError: A row is impossible.
        UnsafePathError: A path points outside of the checkpoint.
    """
    for path in manifest.paths:
        checked_path(path)
    names = manifest.tensors.names
    if len(set(names)) != len(names):
        _fail(columns, "a tensor is listed twice")
    if len(manifest.objects.entries) != len(columns.get("objects.ends", "int64")):
        _fail(columns, "an object is listed twice")
    slices = manifest.slices
    end = slices.starts.astype(np.float64) + slices.nbytes
    if len(end) and (slices.starts.min() < 0 or slices.nbytes.min() < 0 or end.max() > _MAX_BYTES):
        _fail(columns, "a slice lies at a negative place, or past any file")
    itemsizes = np.array([DTYPES[d].itemsize for d in manifest.tensors.dtypes], np.int64)
    ndims = np.array([len(s) for s in manifest.tensors.shapes], np.int64)
    counts = np.diff(manifest.tensors.slice_stop, prepend=0)
    strided = np.zeros(len(slices.starts), bool)
    strided[list(slices.strides)] = True
    for ndim in np.unique(ndims).tolist():
        _check_boxes(manifest, columns, ndim, ndims, counts, itemsizes, strided)
    _check_strided(manifest, columns, itemsizes)


def _check_boxes(
    manifest: Manifest,
    columns: Columns,
    ndim: int,
    ndims: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    itemsizes: npt.NDArray[np.int64],
    strided: npt.NDArray[np.bool_],
) -> None:
    """All slices of the tensors with this many dimensions at once."""
    chosen = np.flatnonzero(ndims == ndim)
    tensor_of = np.repeat(np.arange(len(ndims)), counts)
    rows = np.flatnonzero(ndims[tensor_of] == ndim)
    shapes = np.array([manifest.tensors.shapes[i] for i in chosen.tolist()], np.int64).reshape(len(chosen), ndim)
    numels = np.prod(shapes.astype(np.float64), axis=1)
    if (numels * itemsizes[chosen] > _MAX_BYTES).any():
        _fail(columns, "a tensor is larger than anything can be")
    compact = np.zeros(len(ndims), np.int64)
    compact[chosen] = np.arange(len(chosen))
    owner = tensor_of[rows]
    shape = shapes[compact[owner]]
    widths = ndims[tensor_of]
    first = (np.cumsum(widths) - widths)[rows]
    index = first[:, None] + np.arange(ndim)
    offsets, sizes = manifest.slices.offsets[index], manifest.slices.sizes[index]
    bad = ((offsets < 0) | (sizes < 0) | (sizes > shape) | (offsets > shape - np.minimum(sizes, shape))).any(axis=1)
    if bad.any():
        name = manifest.tensors.names[int(owner[np.argmax(bad)])]
        _fail(columns, f"a slice of tensor {name!r} lies outside of its shape")
    nbytes = np.prod(sizes, axis=1) * itemsizes[owner]
    wrong = (nbytes != manifest.slices.nbytes[rows]) & ~strided[rows]
    if wrong.any():
        name = manifest.tensors.names[int(owner[np.argmax(wrong)])]
        _fail(columns, f"a slice of tensor {name!r} has other bytes than its box")


def _check_strided(manifest: Manifest, columns: Columns, itemsizes: npt.NDArray[np.int64]) -> None:
    slices, stops = manifest.slices, manifest.tensors.slice_stop
    widths = np.repeat(np.array([len(s) for s in manifest.tensors.shapes], np.int64), np.diff(stops, prepend=0))
    first = np.cumsum(widths) - widths
    for row, strides in slices.strides.items():
        sizes = slices.sizes[int(first[row]) : int(first[row]) + len(strides)].tolist()
        last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        owner = int(np.searchsorted(stops, row, side="right"))
        expected = 0 if 0 in sizes else (last + 1) * int(itemsizes[owner])
        if expected != int(slices.nbytes[row]):
            _fail(columns, f"a slice of tensor {manifest.tensors.names[owner]!r} has other bytes than its strides span")


def _check_placements(columns: Columns) -> None:
    for item in columns.field("placements", list):
        sound = isinstance(item, list) and len(item) == 2 and type(item[0]) is int and isinstance(item[1], list)
        if not sound or not all(isinstance(text, str) for text in item[1]):
            _fail(columns, "a placement in its header is malformed")


def _check_info(columns: Columns) -> None:
    info = columns.field("info", dict)
    columns.field("values", dict)
    wanted = {"files": dict, "side_files": list, "notes": list, "extra": dict, "format": str, "producer": str}
    for name, kind in wanted.items():
        if name in info and not isinstance(info[name], kind):
            _fail(columns, f"info.{name} in its header is no {kind.__name__}")
    for name in ("step", "world_size"):
        if info.get(name) is not None and type(info[name]) is not int:
            _fail(columns, f"info.{name} in its header is no number")
    mesh = info.get("mesh")
    if mesh is not None and not (isinstance(mesh, dict) and _ints(mesh.get("shape")) and _texts(mesh.get("names"))):
        _fail(columns, "info.mesh in its header is malformed")
    if not all(type(n) is int for n in info.get("files", {}).values()):
        _fail(columns, "info.files in its header is malformed")
    for path in (*info.get("files", {}), *info.get("side_files", ())):
        checked_path(path)


def _ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _in_range(columns: Columns, name: str, dtype: str, high: int, count: int | None = None, *, low: int = 0) -> None:
    column = columns.get(name, dtype, count)
    if len(column) and (int(column.min()) < low or int(column.max()) >= high):
        _fail(columns, f"column {name!r} points outside of its table")


def _non_negative(columns: Columns, name: str, dtype: str = "int64") -> None:
    column = columns.get(name, dtype)
    if len(column) and int(column.min()) < 0:
        _fail(columns, f"column {name!r} holds a negative number")


def _fail(columns: Columns, what: str) -> None:
    raise CorruptCheckpointError(f"{columns.file}: {what}. The file is damaged: run ckptkit verify.")
