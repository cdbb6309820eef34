"""What must hold for a manifest before anything is read by it. Whole columns at a time."""

from __future__ import annotations

import math
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
_BLOCK = 1 << 16


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
    slices, tensors = manifest.slices, manifest.tensors
    itemsizes = [DTYPES[name].itemsize for name in tensors.dtypes]
    for name, shape, itemsize in zip(names, tensors.shapes, itemsizes, strict=True):
        if math.prod(shape) * itemsize > _MAX_BYTES:
            _fail(columns, f"tensor {name!r} is larger than anything can be")
    if len(slices.starts) and int(slices.starts.min()) < 0:
        _fail(columns, "a slice lies before its file")
    geometry = _Geometry(manifest, columns, np.array(itemsizes, np.int64))
    for row in range(0, len(slices.starts), _BLOCK):
        geometry.check(row, min(row + _BLOCK, len(slices.starts)))
    geometry.check_strided()


class _Geometry:
    """Where the numbers of each tensor's slices stand in the ragged columns."""

    def __init__(self, manifest: Manifest, columns: Columns, itemsizes: npt.NDArray[np.int64]) -> None:
        self.manifest = manifest
        self.columns = columns
        self.itemsizes = itemsizes
        self.stops = manifest.tensors.slice_stop
        self.starts = self.stops - np.diff(self.stops, prepend=0)
        self.ndims = np.array([len(shape) for shape in manifest.tensors.shapes], np.int64)
        elements = (self.stops - self.starts) * self.ndims
        self.first_element = np.cumsum(elements) - elements
        self.shapes = np.array([n for shape in manifest.tensors.shapes for n in shape], np.int64)
        self.first_shape = np.cumsum(self.ndims) - self.ndims

    def check(self, start: int, stop: int) -> None:
        """Check the slices [start, stop). A block at a time: what is compared is larger than what is stored."""
        rows = np.arange(start, stop)
        owner = np.searchsorted(self.stops, rows, side="right")
        first = self.first_element[owner] + (rows - self.starts[owner]) * self.ndims[owner]
        slices = self.manifest.slices
        strided = np.array([row - start for row in slices.strides if start <= row < stop], np.int64)
        for ndim in np.unique(self.ndims[owner]).tolist():
            here = np.flatnonzero(self.ndims[owner] == ndim)
            index = first[here][:, None] + np.arange(ndim)
            shape = self.shapes[self.first_shape[owner[here]][:, None] + np.arange(ndim)]
            offsets, sizes = slices.offsets[index], slices.sizes[index]
            bad = (offsets < 0) | (sizes < 0) | (sizes > shape) | (offsets > shape - np.minimum(sizes, shape))
            self._refuse(bad.any(axis=1), owner[here], "lies outside of its shape")
            found = slices.nbytes[rows[here]]
            wrong = np.prod(sizes, axis=1) * self.itemsizes[owner[here]] != found
            wrong &= ~np.isin(here, strided)
            self._refuse(wrong | (found < 0) | (found > _MAX_BYTES), owner[here], "has other bytes than its box")
            ends = slices.starts[rows[here]] > _MAX_BYTES
            self._refuse(ends, owner[here], "lies past any file")

    def _refuse(self, bad: npt.NDArray[np.bool_], owner: npt.NDArray[np.int64], what: str) -> None:
        if bad.any():
            _fail(self.columns, f"a slice of tensor {self._name(int(owner[np.argmax(bad)]))!r} {what}")

    def _name(self, tensor: int) -> str:
        return self.manifest.tensors.names[tensor]

    def check_strided(self) -> None:
        """Check that the bytes of slices with strides are what the strides span."""
        slices = self.manifest.slices
        for row, strides in slices.strides.items():
            owner = int(np.searchsorted(self.stops, row, side="right"))
            first = int(self.first_element[owner]) + (row - int(self.starts[owner])) * len(strides)
            sizes = slices.sizes[first : first + len(strides)].tolist()
            last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
            expected = 0 if 0 in sizes else (last + 1) * int(self.itemsizes[owner])
            if expected != int(slices.nbytes[row]):
                _fail(self.columns, f"a slice of tensor {self._name(owner)!r} has other bytes than its strides span")


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
        if not isinstance(path, str):
            _fail(columns, "a path in its header is no text")
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
