"""Reads a checkpoint of torch.distributed.checkpoint: `.metadata`, or one `__R.metadata` a rank, and its data files.

Opening reads metadata only. Where the bytes of a tensor lie inside its item is looked up when somebody asks
for them (`dcp_locate`), since it costs a read an item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, CatalogInfo, Codec, ObjectEntry, Role, TensorEntry
from ckptkit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsupportedFormatError,
)
from ckptkit.formats._pickle_bulk import load_metadata
from ckptkit.formats._pickle_stubs import ChunkMetadata, Index, Record, StorageInfo, TensorMetadata, TorchDType
from ckptkit.formats.dcp_locate import Items, LocatedSlices, item_batches
from ckptkit.formats.dcp_roles import RoleTable
from ckptkit.formats.options import ReadOptions
from ckptkit.storage.paths import checked_path
from ckptkit.storage.store import FileInfo, Store

__all__ = ["METADATA", "metadata_files", "open_catalog"]

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_ZSTD = "stream.zstd/1"
_BYTES_KIND = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
_METADATA_KIND = "torch.distributed.checkpoint.metadata.Metadata"
_MAX_METADATA_BYTES = 4 << 30
_MAX_NDIM = 64
_KINDS = {"other": "FIFO, a socket or a device"}

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


def open_catalog(store: Store, *, options: ReadOptions = ReadOptions()) -> Catalog:  # noqa: B008 - frozen
    """Return what the DCP checkpoint at the store's root holds. Reads its metadata, no data file.

    Raises:
        CheckpointNotFoundError: There is no metadata.
        IncompleteCheckpointError: The save did not finish, or files or parts of tensors are missing.
        CorruptCheckpointError: The metadata are damaged or contradict each other or the files.
        UnsafePickleError: The metadata ask for a global that is not allowed; nothing was run.
        UnsafePathError: The metadata point outside the checkpoint.
    """
    listing = {info.path: info for info in store.list()}
    names = metadata_files(listing)
    parts = [_Part(name, _load(store, listing[name])) for name in names]
    files = _Files(store, listing)
    return _Builder(store, parts, files).catalog()


def metadata_files(listing: Mapping[str, FileInfo]) -> list[str]:
    """Return the metadata files among the names of a directory: `.metadata`, or those of all ranks in order.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: There are none.
    """
    if METADATA in listing:
        return [METADATA]
    ranks = {int(m[1]): name for name in listing if (m := _RANK_METADATA.fullmatch(name))}
    if ranks:
        missing = sorted(set(range(max(ranks) + 1)) - ranks.keys()) if max(ranks) < 1 << 20 else [-1]
        if missing:
            raise IncompleteCheckpointError(
                f"__{missing[0]}.metadata is missing: every rank of this save wrote its own, up to rank {max(ranks)}."
            )
        return [ranks[rank] for rank in sorted(ranks)]
    unfinished = f"{METADATA}.tmp" in listing
    data = any(_DATA_FILE.fullmatch(name) for name in listing)
    if unfinished or data:
        raise IncompleteCheckpointError(
            f"{METADATA} is missing{' (only .metadata.tmp is there)' if unfinished else ''}: the save did not finish. "
            "Take an older checkpoint of this run."
        )
    raise CheckpointNotFoundError("there is no .metadata and no __0.metadata: this is no DCP checkpoint.")


def _load(store: Store, info: FileInfo) -> Any:
    if info.kind not in ("file", "symlink"):
        raise CorruptCheckpointError(f"{info.path}: it is no file but a {_KINDS.get(info.kind, info.kind)}.")
    if info.size > _MAX_METADATA_BYTES:
        raise CorruptCheckpointError(f"{info.path}: {info.size} bytes of metadata are more than any checkpoint needs.")
    data = store.read(info.path)
    if not data:
        raise IncompleteCheckpointError(f"{info.path} is empty: the save was cut off, such as by a power cut.")
    return load_metadata(data, file=info.path)


class _Part:
    """One metadata file, its outermost shape checked."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        if not isinstance(value, Record) or value.kind != _METADATA_KIND:
            raise CorruptCheckpointError(f"{name}: it holds no Metadata of torch.distributed.checkpoint.")
        fields = value.fields
        self.entries = self._dict(fields, "state_dict_metadata")
        self.storage = self._dict(fields, "storage_data")
        self.planner = self._dict(fields, "planner_data")
        self.version = fields.get("version")
        self.storage_meta = fields.get("storage_meta")

    def _dict(self, fields: Mapping[str, Any], key: str) -> dict[Any, Any]:
        value = fields.get(key)
        if value is None and key == "planner_data":
            return {}
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{self.name}: its {key} is missing or no dict.")
        return value

    def fault(self, text: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.name}: {text}.")

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """The planner's path by key."""
        found: dict[str, tuple[str | int, ...]] = {}
        for key, path in self.planner.items():
            if not isinstance(key, str):
                raise self.fault("a key of its planner_data is no text")
            if not isinstance(path, (tuple, list)) or not all(type(p) in (str, int) for p in path):
                raise self.fault(f"the path of {key!r:.80} is no list of keys")
            found[key] = tuple(path)
        return found

    def grouped_storage(self) -> dict[str, dict[tuple[int, ...] | None, StorageInfo]]:
        """Where each item lies: key -> offset (None for byte entries) -> place."""
        grouped: dict[str, dict[tuple[int, ...] | None, StorageInfo]] = {}
        for index, info in self.storage.items():
            try:
                fqn, offset = index.fqn, index.offset
            except AttributeError:
                raise self.fault("an index of its storage_data is incomplete") from None
            if not isinstance(index, Index) or not isinstance(info, StorageInfo) or not isinstance(fqn, str):
                raise self.fault("an entry of its storage_data is no place of an item")
            if offset is not None and not _is_counts(offset):
                raise self.fault(f"an offset of {fqn!r:.80} is no tuple of counts")
            group = grouped.setdefault(fqn, {})
            if offset in group:
                raise self.fault(f"{fqn!r:.80} has two places for its part at {offset}")
            group[offset] = info
        return grouped


def _is_counts(value: Any) -> bool:
    # Before it is hashed: a nested tuple from a hostile file may take exponential time.
    return type(value) is tuple and len(value) <= _MAX_NDIM and all(type(v) is int for v in value)


class _Files:
    """The data files by number, each looked at once."""

    def __init__(self, store: Store, listing: Mapping[str, FileInfo]) -> None:
        self._store = store
        self._listing = listing
        self._index: dict[str, int] = {}
        self.paths: list[str] = []
        self.sizes: list[int] = []
        self.ranks: list[int] = []

    def number(self, path: Any, source: str) -> int:
        found = self._index.get(path) if isinstance(path, str) else -1
        if found == -1:
            raise CorruptCheckpointError(f"{source}: the name of a data file is no text.")
        return self._add(path, source) if found is None else found

    def _add(self, path: str, source: str) -> int:
        try:
            checked_path(path)
        except UnsafePathError:
            raise UnsafePathError(
                f"{source}: it points to {path[:200]!r}, outside the checkpoint. It is not followed."
            ) from None
        info = self._listing.get(path) or self._store.info(path)
        if info is None:
            raise IncompleteCheckpointError(
                f"{path} is missing: {source} says that tensors lie in it. Copy it back from where the checkpoint came."
            )
        if info.kind not in ("file", "symlink"):
            raise CorruptCheckpointError(f"{path}: it is no file but a {_KINDS.get(info.kind, info.kind)}.")
        match = _DATA_FILE.fullmatch(path.rpartition("/")[2])
        rank = int(match[1]) if match and len(match[1]) < 9 else -1
        if info.kind == "symlink":
            self._store.read(path, 0, 1)  # raises where it leads outside
        self._index[path] = len(self.paths)
        self.paths.append(path)
        self.sizes.append(info.size if info.kind == "file" else -1)
        self.ranks.append(rank)
        return len(self.paths) - 1


class _Rows:
    """The slices of one tensor, gathered over all metadata files that list it."""

    __slots__ = ("dtype", "files", "lengths", "offsets", "shape", "sizes", "starts", "zstd")

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.offsets: list[tuple[int, ...]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.files: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.zstd: list[bool] = []


class _Builder:
    def __init__(self, store: Store, parts: Sequence[_Part], files: _Files) -> None:
        self.store = store
        self.parts = parts
        self.files = files
        self.rows: dict[str, _Rows] = {}
        self.objects: dict[str, tuple[StorageInfo, str]] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}

    def catalog(self) -> Catalog:
        for part in self.parts:
            self.paths.update(part.paths())
            self._gather(part)
        items = self._items()
        roles = RoleTable(self.paths, self.rows)
        tensors = self._tensors(items, roles)
        objects = {name: self._object(name, roles) for name in self.objects}
        for entry in tensors.values():
            entry.check_coverage()
        return Catalog(tensors, objects, self._info())

    # --- gathering

    def _gather(self, part: _Part) -> None:
        grouped = part.grouped_storage()
        for name, entry in part.entries.items():
            if not isinstance(name, str):
                raise part.fault("a key of its state_dict_metadata is no text")
            places = grouped.pop(name, {})
            if isinstance(entry, TensorMetadata):
                self._gather_tensor(part, name, entry, places)
            elif isinstance(entry, Record) and entry.kind == _BYTES_KIND:
                if None not in places:
                    raise IncompleteCheckpointError(f"{part.name}: it has no place for the entry {name!r:.80}.")
                self.objects.setdefault(name, (places.pop(None), part.name))
            else:
                raise part.fault(f"the entry {name!r:.80} is neither a tensor nor bytes")
            if places:
                raise part.fault(f"{name!r:.80} has places for parts that it does not have")
        if grouped:
            raise part.fault(f"it has a place for {next(iter(grouped))!r:.80}, which it does not describe")

    def _gather_tensor(
        self, part: _Part, name: str, entry: TensorMetadata, places: dict[tuple[int, ...] | None, StorageInfo]
    ) -> None:
        try:
            dtype, shape, chunks = _dtype(entry.properties), entry.size, entry.chunks
        except AttributeError:
            raise part.fault(f"the description of {name!r:.80} is incomplete") from None
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"{part.name}: tensor {name!r:.80}: {error}") from None
        if not _is_counts(shape) or any(n < 0 or n >= 1 << 62 for n in shape) or type(chunks) is not list:
            raise part.fault(f"the shape of {name!r:.80} is no shape")
        rows = self.rows.setdefault(name, _Rows(dtype, shape))
        if (rows.dtype, rows.shape) != (dtype, shape) or name in self.objects:
            raise part.fault(
                f"{name!r:.80} is {dtype} {list(shape)} here and {rows.dtype} {list(rows.shape)} elsewhere"
            )
        for chunk in chunks:
            self._gather_chunk(part, name, rows, chunk, places)

    def _gather_chunk(
        self, part: _Part, name: str, rows: _Rows, chunk: Any, places: dict[tuple[int, ...] | None, StorageInfo]
    ) -> None:
        try:
            offsets, sizes = chunk.offsets, chunk.sizes
        except AttributeError:
            raise part.fault(f"a part of {name!r:.80} is incomplete") from None
        ndim = len(rows.shape)
        if not isinstance(chunk, ChunkMetadata) or not (_is_counts(offsets) and _is_counts(sizes)):
            raise part.fault(f"a part of {name!r:.80} is no box")
        if len(offsets) != ndim or len(sizes) != ndim:
            raise part.fault(f"a part of {name!r:.80} has {len(offsets)} dimensions, the tensor {ndim}")
        info = places.pop(offsets, None)
        if info is None:
            raise IncompleteCheckpointError(f"{part.name}: it has no place for the part of {name!r:.80} at {offsets}.")
        start, length = _range(info, part, name)
        rows.offsets.append(offsets)
        rows.sizes.append(sizes)
        rows.files.append(self.files.number(info.relative_path, part.name))
        rows.starts.append(start)
        rows.lengths.append(length)
        rows.zstd.append(_is_zstd(info, part, name))

    # --- columns

    def _items(self) -> Items:
        """All tensor items as columns, in the order of `rows`, empty parts left out."""
        total = [len(r.starts) for r in self.rows.values()]
        files = _column((r.files for r in self.rows.values()), np.int32)
        starts = _column((r.starts for r in self.rows.values()), np.int64)
        lengths = _column((r.lengths for r in self.rows.values()), np.int64)
        zstd = _column((r.zstd for r in self.rows.values()), np.bool_)
        self._check_ranges(files, starts, lengths)
        return Items(self.store, self.files.paths, files, starts, lengths, zstd, np.cumsum([0, *total]))

    def _check_ranges(self, files: Int32, starts: Int64, lengths: Int64) -> None:
        sizes = np.array(self.files.sizes, np.int64)
        known = sizes[files] >= 0
        bad = np.flatnonzero(known & (starts + lengths > sizes[files]))
        if len(bad):
            row = int(bad[0])
            path = self.files.paths[int(files[row])]
            raise IncompleteCheckpointError(
                f"{path} is {int(sizes[files[row]])} bytes long, but an item lies at "
                f"[{int(starts[row])}, {int(starts[row] + lengths[row])}). It is truncated."
            )

    def _tensors(self, items: Items, roles: RoleTable) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        ranks = np.array(self.files.ranks, np.int32)
        slices: list[LocatedSlices] = []
        for i, (name, rows) in enumerate(self.rows.items()):
            found = roles.of(name)
            made = self._slices(name, rows, items, i, ranks)
            slices.append(made)
            entries[name] = TensorEntry(
                name, rows.dtype, rows.shape, made, found.role, found.fqn, found.state, self.paths.get(name, ())
            )
        item_batches(items, [(entry.role, made) for entry, made in zip(entries.values(), slices, strict=True)])
        return entries

    def _slices(self, name: str, rows: _Rows, items: Items, index: int, ranks: Int32) -> LocatedSlices:
        n, ndim = len(rows.starts), len(rows.shape)
        try:
            offsets = np.array(rows.offsets, np.int64).reshape(n, ndim)
            sizes = np.array(rows.sizes, np.int64).reshape(n, ndim)
        except (OverflowError, ValueError):
            raise CorruptCheckpointError(f"{self._source}: a part of {name!r:.80} is out of range.") from None
        rows_at = np.arange(int(items.bounds[index]), int(items.bounds[index + 1]))
        self._check_bytes(name, rows, sizes, items, rows_at)
        keep = (sizes != 0).all(axis=1)
        if not keep.all():
            offsets, sizes, rows_at = offsets[keep], sizes[keep], rows_at[keep]
        return LocatedSlices(name, rows.dtype, items, rows_at, offsets, sizes, ranks[items.files[rows_at]])

    def _check_bytes(self, name: str, rows: _Rows, sizes: Int64, items: Items, rows_at: Int64) -> None:
        """No part may declare more bytes than are stored for it: allocation comes after this."""
        if (sizes < 0).any():
            raise CorruptCheckpointError(f"{self._source}: a part of {name!r:.80} has a negative size.")
        wanted = np.prod(sizes.astype(np.float64), axis=1) * dtype_of(rows.dtype).itemsize
        plain = ~items.zstd[rows_at]
        bad = np.flatnonzero(plain & (wanted > items.lengths[rows_at]))
        if len(bad):
            row = int(bad[0])
            path = items.paths[int(items.files[rows_at[row]])]
            raise CorruptCheckpointError(
                f"{self._source}: the part of {name!r:.80} of sizes {sizes[row].tolist()} needs {wanted[row]:.0f} "
                f"bytes, but {path} stores {int(items.lengths[rows_at[row]])} for it."
            )

    @property
    def _source(self) -> str:
        return self.parts[0].name

    def _object(self, name: str, roles: RoleTable) -> ObjectEntry:
        info, source = self.objects[name]
        part = next(part for part in self.parts if part.name == source)
        start, length = _range(info, part, name)
        file = self.files.number(info.relative_path, source)
        path, size = self.files.paths[file], self.files.sizes[file]
        if 0 <= size < start + length:
            raise IncompleteCheckpointError(
                f"{path} is {size} bytes long, but {name!r:.80} lies at [{start}, {start + length}). It is truncated."
            )
        codec = Codec("zstd", start, length) if _is_zstd(info, part, name) else None
        role = roles.of(name).role
        return ObjectEntry(
            name,
            path,
            0 if codec else start,
            0 if codec else length,
            codec,
            role=role if role in (Role.OPTIMIZER, Role.OTHER) else Role.OTHER,
            key=self.paths.get(name, ()),
        )

    def _info(self) -> CatalogInfo:
        files = dict(zip(self.files.paths, self.files.sizes, strict=True))
        for part in self.parts:
            found = self.store.info(part.name)
            files[part.name] = found.size if found is not None and found.kind == "file" else -1
        extra: dict[str, Any] = {}
        version = self.parts[0].version
        if isinstance(version, str):
            extra["dcp_version"] = version[:32]
        per_rank = _RANK_METADATA.fullmatch(self._source) is not None
        return CatalogInfo(
            "dcp",
            producer="torch.distributed.checkpoint",
            world_size=len(self.parts) if per_rank else None,
            files=files,
            extra=extra,
        )


def _column(parts: Iterable[list[Any]], dtype: Any) -> npt.NDArray[Any]:
    arrays = [np.array(part, dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _dtype(properties: Any) -> str:
    """The dtype of TensorProperties, whose state is (dtype, layout, requires_grad, memory format, pinned)."""
    state = properties.state if isinstance(properties, Record) else None
    found = state[0] if isinstance(state, tuple) and state else (properties.fields.get("dtype") if state else None)
    if not isinstance(found, TorchDType):
        raise AttributeError("dtype")
    layout = state[1] if isinstance(state, tuple) and len(state) > 1 else "strided"
    if layout != "strided":
        raise UnsupportedFormatError(f"its layout is {str(layout)[:40]}; only dense tensors are read.")
    return dtype_of(found.name).name


def _range(info: StorageInfo, part: _Part, name: str) -> tuple[int, int]:
    try:
        start, length = info.offset, info.length
    except AttributeError:
        raise part.fault(f"the place of {name!r:.80} is incomplete") from None
    if type(start) is not int or type(length) is not int or not 0 <= start < 1 << 62 or not 0 <= length < 1 << 62:
        raise part.fault(f"the place of {name!r:.80} is no byte range")
    return start, length


def _is_zstd(info: StorageInfo, part: _Part, name: str) -> bool:
    transforms = info.transforms
    if not transforms:
        return False
    if not isinstance(transforms, (list, tuple)) or list(transforms) != [_ZSTD]:
        raise UnsupportedFormatError(
            f"{part.name}: {name!r:.80} was written through {str(transforms)[:80]}; only {_ZSTD!r} is known."
        )
    return True
