"""What `.metadata` says of tensors, as columns: a million slices by a few passes over lists, not one by one.

Whatever is unusual in the least is left to the slow way in `dcp`, which names what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct, first_of_equal
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError
from ckptkit.formats.pickles.inert import ChunkMetadata, Index, Record, StorageInfo, TensorMetadata, TorchDType

__all__ = ["BYTES_KIND", "MAX_COUNT", "MAX_NDIM", "ZSTD", "TensorColumns", "in_bulk", "tensor_dtype"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

BYTES_KIND = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
ZSTD = "stream.zstd/1"
MAX_NDIM = 64
MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors, and their slices as columns: rows [bounds[i], bounds[i + 1]) are those of tensor i.

    Attributes:
        ndims: [t]
        files: [n] number of the data file.
        starts, lengths: [n] bytes of the slice's item in its file.
        zstd: [n] whether the item is compressed.
        offsets, sizes: Of all slices, elements, end to end: as many numbers a slice as its tensor has dimensions.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    ndims: Int64
    bounds: Int64
    files: Int32
    starts: Int64
    lengths: Int64
    zstd: npt.NDArray[np.bool_]
    offsets: Int64
    sizes: Int64

    @property
    def owners(self) -> Int64:
        """[n] the tensor of each slice."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.bounds))

    def elements(self) -> Int64:
        """Return where the numbers of each slice begin in `offsets` and `sizes`, and where the last end, [n + 1]."""
        result: Int64 = np.concatenate([[0], np.cumsum(self.ndims[self.owners])])
        return result

    def numels(self) -> npt.NDArray[np.float64]:
        """Return the elements of each slice, [n]: as floats, which no hostile size overflows."""
        result = np.ones(len(self.files), np.float64)
        for rows, at in _by_ndim(self.ndims[self.owners]):
            result[rows] = np.prod(self.sizes[at].astype(np.float64), axis=1)
        return result

    def take(self, keep: npt.NDArray[np.bool_]) -> TensorColumns:
        """Return the columns with some slices left out."""
        wide = np.repeat(keep, self.ndims[self.owners])
        counts = np.bincount(self.owners[keep], minlength=len(self.names))
        return TensorColumns(
            self.names, self.dtypes, self.shapes, self.ndims, np.concatenate([[0], np.cumsum(counts)]),
            self.files[keep], self.starts[keep], self.lengths[keep], self.zstd[keep],
            self.offsets[wide], self.sizes[wide],
        )  # fmt: skip


class _UnusualError(Exception):
    """To be read, or refused, one by one."""


def in_bulk(
    entries: Mapping[Any, Any], storage: Mapping[Any, Any], number: Callable[[str], int]
) -> tuple[TensorColumns, dict[str, StorageInfo]] | None:
    """Return the tensors as columns, and the places of the byte entries; None where anything is unusual.

    Args:
        number: The number of a data file by its path; may raise.
    """
    try:
        return _in_bulk(entries, storage, number)
    except (_UnusualError, OverflowError, UnsupportedFormatError):
        return None


def _in_bulk(
    entries: Mapping[Any, Any], storage: Mapping[Any, Any], number: Callable[[str], int]
) -> tuple[TensorColumns, dict[str, StorageInfo]]:
    _all_of(entries, str)
    tensors = {name: entry for name, entry in entries.items() if type(entry) is TensorMetadata}
    others = {name for name, entry in entries.items() if isinstance(entry, Record) and entry.kind == BYTES_KIND}
    if len(tensors) + len(others) != len(entries):
        raise _UnusualError
    described = list(tensors.values())
    shapes = _fields(described, "size")
    ndims = _lengths(shapes, tuple)
    if len(ndims) and ndims.max() > MAX_NDIM:
        raise _UnusualError
    _checked(_joined(shapes, int(ndims.sum())))
    try:
        dtypes = [tensor_dtype(properties) for properties in _fields(described, "properties")]
    except AttributeError:
        raise _UnusualError from None
    lists = _fields(described, "chunks")
    counts = _lengths(lists, list)
    widths = np.repeat(ndims, counts)
    chunks = list(chain.from_iterable(lists))
    _all_of(chunks, ChunkMetadata)
    offsets, sizes = _boxes(_fields(chunks, "offsets"), widths), _boxes(_fields(chunks, "sizes"), widths)
    del chunks
    places, objects = _places(storage, {name: i for i, name in enumerate(tensors)}, others)
    rows = _matched(places, counts, widths, offsets)
    files, starts, lengths, zstd = _items([places.infos[row] for row in rows.tolist()], number)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return TensorColumns(
        list(tensors), dtypes, shapes, ndims, bounds, files, starts, lengths, zstd, offsets, sizes
    ), objects  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of tensor items, in the order of the file: of which tensor, the part at which offset, where."""

    owners: Int64
    offsets: list[tuple[int, ...]]
    infos: list[StorageInfo]


def _places(
    storage: Mapping[Any, Any], numbers: Mapping[str, int], others: set[str]
) -> tuple[_Places, dict[str, StorageInfo]]:
    infos = list(storage.values())
    _all_of(storage, Index)
    _all_of(infos, StorageInfo)
    names, offsets = _fields(storage, "fqn"), _fields(storage, "offset")
    _all_of(names, str)
    owners = np.fromiter(map(numbers.get, names, repeat(-1)), np.int64, len(names))
    bare = np.fromiter((offset is None for offset in offsets), bool, len(offsets))
    if ((owners < 0) != bare).any():
        raise _UnusualError
    at = np.flatnonzero(bare).tolist()
    objects = {names[row]: infos[row] for row in at}
    if objects.keys() != others or len(at) != len(others):
        raise _UnusualError
    if at:
        kept = np.flatnonzero(~bare)
        owners, rows = owners[kept], kept.tolist()
        offsets, infos = [offsets[row] for row in rows], [infos[row] for row in rows]
    return _Places(owners, offsets, infos), objects


def _matched(places: _Places, counts: Int64, widths: Int64, offsets: Int64) -> Int64:
    """Return, for each slice, the row of its place: the same tensor, the same offset, and no other has both."""
    if len(places.owners) != len(widths) or (np.bincount(places.owners, minlength=len(counts)) != counts).any():
        raise _UnusualError
    rows = np.argsort(places.owners, kind="stable")
    found = _boxes([places.offsets[row] for row in rows.tolist()], widths)
    owners = np.repeat(np.arange(len(counts)), counts)
    same = np.array_equal(found, offsets)
    matched: Int64 = rows.copy()
    for at, elements in _by_ndim(widths):
        wanted, given = (np.column_stack([owners[at], table[elements]]) for table in (offsets, found))
        if first_of_equal(wanted) is not None:
            raise _UnusualError
        if not same:
            ours, theirs = np.lexsort(wanted.T[::-1]), np.lexsort(given.T[::-1])
            if not np.array_equal(wanted[ours], given[theirs]):
                raise _UnusualError
            matched[at[ours]] = rows[at[theirs]]
    return matched


def _items(infos: list[StorageInfo], number: Callable[[str], int]) -> tuple[Int32, Int64, Int64, npt.NDArray[np.bool_]]:
    """The columns files, starts, lengths, zstd."""
    starts, lengths = (_numbers(_fields(infos, name)) for name in ("offset", "length"))
    zstd = np.zeros(len(infos), bool)
    transforms = _fields(infos, "transforms")
    if any(transforms):
        if not all(not t or (isinstance(t, (list, tuple)) and list(t) == [ZSTD]) for t in transforms):
            raise _UnusualError
        zstd = np.fromiter(map(bool, transforms), bool, len(infos))
    paths = _fields(infos, "relative_path")
    _all_of(paths, str)
    table = {path: number(path) for path in dict.fromkeys(paths)}
    return np.fromiter(map(table.__getitem__, paths), np.int32, len(paths)), starts, lengths, zstd


def _by_ndim(widths: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Yield (rows, places of their numbers [n, ndim]) for the slices of each number of dimensions."""
    begins = np.cumsum(widths) - widths
    for ndim in distinct(widths).tolist():
        rows = np.flatnonzero(widths == ndim)
        yield rows, begins[rows][:, None] + np.arange(ndim)


def _boxes(values: Sequence[Any], widths: Int64) -> Int64:
    if not np.array_equal(_lengths(values, tuple), widths):
        raise _UnusualError
    return _joined(values, int(widths.sum()))


def _joined(values: Sequence[tuple[Any, ...]], count: int) -> Int64:
    _all_of(chain.from_iterable(values), int)
    return np.fromiter(chain.from_iterable(values), np.int64, count)


def _numbers(values: Sequence[Any]) -> Int64:
    _all_of(values, int)
    return _checked(np.fromiter(values, np.int64, len(values)))


def _checked(values: Int64) -> Int64:
    if len(values) and (values.min() < 0 or values.max() >= MAX_COUNT):
        raise _UnusualError
    return values


def _lengths(values: Sequence[Any], kind: type[Any]) -> Int64:
    _all_of(values, kind)
    return np.fromiter(map(len, values), np.int64, len(values))


def _fields(values: Iterable[Any], name: str) -> list[Any]:
    try:
        return list(map(attrgetter(name), values))
    except AttributeError:  # a slot that the pickle did not fill
        raise _UnusualError from None


def _all_of(values: Iterable[Any], kind: type[Any]) -> None:
    if set(map(type, values)) - {kind}:
        raise _UnusualError


def tensor_dtype(properties: Any) -> str:
    """Return the dtype of TensorProperties, whose state is (dtype, layout, requires_grad, memory format, pinned).

    Raises:
        AttributeError: They have none.
        UnsupportedFormatError: Their layout is not dense, or the dtype unknown.
    """
    state = properties.state if isinstance(properties, Record) else None
    found = state[0] if isinstance(state, tuple) and state else (properties.fields.get("dtype") if state else None)
    if not isinstance(found, TorchDType):
        raise AttributeError("dtype")
    layout = state[1] if isinstance(state, tuple) and len(state) > 1 else "strided"
    if layout != "strided":
        raise UnsupportedFormatError(f"its layout is {str(layout)[:40]}; only dense tensors are read.")
    return dtype_of(found.name).name
