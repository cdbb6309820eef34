"""Reads torch.distributed.checkpoint (DCP) checkpoints: `.metadata` (or one `__R.metadata` per rank) and data files.

Opening a checkpoint reads only the metadata files. Finding the exact bytes of a tensor in the data files takes another
read per slice, so this happens on first access to the tensor (see `locate`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import BoxTable, products
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, CatalogInfo, Codec, ObjectEntry, Role, TensorEntry
from ckptkit.catalog.tiles import check_coverage
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.dcp.locate import Items, LocatedSlices, find_opaque, item_batches
from ckptkit.formats.dcp.roles import RoleTable
from ckptkit.formats.nested import entries_of
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.own.record import NO_RECORD, step_of_name
from ckptkit.formats.pickles.inert import ChunkMetadata, Index, Record, StorageInfo, TensorMetadata, TorchDType
from ckptkit.formats.pickles.objects import plain
from ckptkit.formats.pickles.walk import loads
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.gc_pause import collector_paused
from ckptkit.storage.store import FileInfo, Store, checked_path
from ckptkit.units import first_few

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_METADATA_KIND = "torch.distributed.checkpoint.metadata.Metadata"
MAX_METADATA_BYTES = 4 << 30
_BYTES_KIND = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
_ZSTD = "stream.zstd/1"
_MAX_NDIM = 64
_MAX_COUNT = 1 << 62
_MOST_PACKED = 64  # highest ratio of declared to stored bytes: float64 values packed into one bit each
_KINDS = {"other": "FIFO, a socket or a device"}

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Place = tuple[str, "tuple[int, ...] | None"]
"""The name of a tensor and the offsets of a slice, or the name of an object and None."""


@collector_paused()
def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of the DCP checkpoint at the store's root.

    Reads only the metadata files, unless all tensors are inside nested objects (`flatten_state_dict=False`). In that
    case, also reads the objects from the data files.

    Raises:
        CheckpointNotFoundError: There is no metadata file.
        IncompleteCheckpointError: The save did not finish, a file is missing, or part of a tensor is missing.
        CorruptCheckpointError: A metadata file is damaged, or contradicts another metadata file or the data files.
        UnsafePickleError: A metadata file refers to a Python global that is not allowed. No code was run.
        UnsafePathError: A metadata file refers to a data file outside the checkpoint.
    """
    listing = {info.path: info for info in store.list()}
    parts = [_Part(listing[name], _load(store, listing[name])) for name in metadata_files(listing)]
    return _Builder(store, parts, _Files(store, listing)).catalog()


def metadata_files(listing: Mapping[str, FileInfo]) -> list[str]:
    """Return the names of a checkpoint's metadata files: `.metadata`, or one `__R.metadata` per rank, in rank order.

    Raises:
        CheckpointNotFoundError: There is no metadata file.
        IncompleteCheckpointError: The save did not finish, or some ranks' metadata files are missing.
    """
    if METADATA in listing:
        return [METADATA]
    ranks = {int(m[1]): name for name in listing if (m := _RANK_METADATA.fullmatch(name))}
    if ranks:
        last = max([*ranks, *(int(m[1]) for name in listing if (m := _DATA_FILE.fullmatch(name)))])
        missing = sorted(set(range(last + 1)) - ranks.keys()) if last < 1 << 20 else [-1]
        if missing:
            raise IncompleteCheckpointError(
                f"__{missing[0]}.metadata is missing: each of the ranks 0 to {last} writes such a file."
            )
        return [ranks[rank] for rank in sorted(ranks)]
    if f"{METADATA}.tmp" in listing:
        raise IncompleteCheckpointError(
            f"{METADATA} is missing (only .metadata.tmp is there): the save did not finish. Use an older checkpoint of "
            "this run."
        )
    if any(_DATA_FILE.fullmatch(name) for name in listing):
        raise IncompleteCheckpointError(
            f"{METADATA} is missing: the save did not finish, or a copy left out this hidden file, as `cp DIR/*` does. "
            "Copy it from the original, or use an older checkpoint of this run."
        )
    text = "there is no .metadata and no __0.metadata: this is not a DCP checkpoint."
    steps = [(step, name) for name in listing if (step := step_of_name(name)) is not None]
    raise CheckpointNotFoundError(
        f"{text} It may be a run: name a checkpoint in it, such as {max(steps)[1]}." if steps else text
    )


def _load(store: Store, info: FileInfo) -> Any:
    if info.kind not in ("file", "symlink"):
        raise CorruptCheckpointError(f"{info.path}: expected a file, found a {_KINDS.get(info.kind, info.kind)}.")
    if info.size > MAX_METADATA_BYTES:
        raise CorruptCheckpointError(f"{info.path} has {info.size} bytes, more than any checkpoint's metadata needs.")
    data = store.read(info.path)
    if not data:
        raise IncompleteCheckpointError(f"{info.path} is empty: the save was interrupted, perhaps by a power cut.")
    return loads(data, file=info.path, max_bytes=MAX_METADATA_BYTES)


class _Part:
    """An unpickled metadata file. The constructor checks the top-level fields."""

    def __init__(self, info: FileInfo, value: Any) -> None:
        self.name = info.path
        self.nbytes = info.size if info.kind == "file" else -1
        if not isinstance(value, Record) or value.kind != _METADATA_KIND:
            raise CorruptCheckpointError(f"{self.name}: it contains no Metadata of torch.distributed.checkpoint.")
        fields = value.fields
        self.entries = self._dict(fields, "state_dict_metadata")
        self.storage = self._dict(fields, "storage_data")
        self.planner = self._dict(fields, "planner_data")
        self.version = fields.get("version")
        meta = fields.get("storage_meta")
        place, save = (
            meta.fields.get(key) if isinstance(meta, Record) else None for key in ("checkpoint_id", "save_id")
        )
        # A save with a commit record has a checkpoint_id that ends with its save_id. A plain DCP export has no save_id.
        self.is_of_a_save = isinstance(place, str) and isinstance(save, str) and place.rstrip("/").endswith(save or "-")

    def _dict(self, fields: Mapping[str, Any], key: str) -> dict[Any, Any]:
        value = fields.get(key)
        if value is None and key == "planner_data":
            return {}
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{self.name}: its {key} is missing or not a dict.")
        return value

    def fault(self, text: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.name}: {text}.")

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Return each key's path in the nested state dict."""
        found: dict[str, tuple[str | int, ...]] = {}
        for key, path in self.planner.items():
            if not isinstance(key, str):
                raise self.fault("a key of its planner_data is not a string")
            if not isinstance(path, (tuple, list)) or not all(type(p) in (str, int) for p in path):
                raise self.fault(f"the path of {key!r:.80} is not a list of keys")
            found[key] = tuple(path)
        return found

    def places(self) -> dict[Place, StorageInfo]:
        """Return the location of each slice and each object in the data files."""
        infos = list(self.storage.values())
        try:
            names, offsets = _fields(self.storage, "fqn"), _fields(self.storage, "offset")
        except AttributeError:
            raise self.fault("an index of its storage_data is incomplete") from None
        # Check the offsets before using them as dict keys: hashing a nested tuple from a hostile file can take
        # exponential time.
        counts = _are_counts([offset for offset in offsets if offset is not None])
        if not (counts and _are(Index, self.storage) and _are(StorageInfo, infos) and _are(str, names)):
            raise self.fault("an entry of its storage_data is malformed")
        found = dict(zip(zip(names, offsets, strict=True), infos, strict=True))
        if len(found) < len(infos):
            raise self.fault("its storage_data lists a part twice")
        return found


# Each of these helpers checks a whole list in a few passes that run in C. With a million slices, a Python loop would
# take as long as unpickling the metadata.


def _fields(values: Iterable[Any], name: str) -> list[Any]:
    return list(map(attrgetter(name), values))


def _are(kind: type[Any], values: Iterable[Any]) -> bool:
    return not set(map(type, values)) - {kind}


def _are_counts(values: Sequence[Any]) -> bool:
    short = _are(tuple, values) and max(map(len, values), default=0) <= _MAX_NDIM
    return short and _are(int, chain.from_iterable(values))


class _Files:
    """Assigns numbers to the data files, and checks each file when the metadata first refers to the file."""

    def __init__(self, store: Store, listing: Mapping[str, FileInfo]) -> None:
        self._store = store
        self._listing = listing
        self._index: dict[str, int] = {}
        self.paths: list[str] = []
        self.sizes: list[int] = []
        self.ranks: list[int] = []

    def numbers(self, paths: Sequence[Any], source: str) -> list[int]:
        if not _are(str, paths):
            raise CorruptCheckpointError(f"{source}: the name of a data file is not a string.")
        for path in dict.fromkeys(path for path in paths if path not in self._index):
            try:
                checked_path(path)
            except UnsafePathError:
                raise UnsafePathError(
                    f"{source}: it names {path[:200]!r}, which is outside the checkpoint. That file was not read."
                ) from None
            info = self._listing.get(path) or self._store.info(path)
            if info is None:
                raise IncompleteCheckpointError(
                    f"{path} is missing: {source} says that it contains tensors. Copy it again from the original."
                )
            if info.kind not in ("file", "symlink"):
                raise CorruptCheckpointError(f"{path}: expected a file, found a {_KINDS.get(info.kind, info.kind)}.")
            if info.kind == "symlink":
                self._store.read(path, 0, 1)  # raises if the link leads out of the checkpoint
            match = _DATA_FILE.fullmatch(path.rpartition("/")[2])
            self._index[path] = len(self.paths)
            self.paths.append(path)
            self.sizes.append(info.size if info.kind == "file" else -1)
            self.ranks.append(int(match[1]) if match and len(match[1]) < 9 else -1)
        return list(map(self._index.__getitem__, paths))


@dataclass(slots=True)
class _Rows:
    """The slices of one tensor, collected from all metadata files that list the tensor."""

    dtype: str
    shape: tuple[int, ...]
    offsets: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    zstd: list[bool] = field(default_factory=list)


class _Builder:
    def __init__(self, store: Store, parts: Sequence[_Part], files: _Files) -> None:
        self.store = store
        self.parts = parts
        self.files = files
        self.rows: dict[str, _Rows] = {}
        self.objects: dict[str, tuple[StorageInfo, str]] = {}
        self.opaque: dict[str, str] = {}  # tensor name -> why it can't be read as plain memory
        self.paths: dict[str, tuple[str | int, ...]] = {}

    def catalog(self) -> Catalog:
        for part in self.parts:
            self.paths.update(part.paths())
        for part in self.parts:
            self._gather(part)
            part.entries, part.storage = {}, {}  # free the unpickled metadata
        items = self._joined_rows()
        # A planner that does not flatten the state dict writes no paths to the metadata.
        roles = RoleTable({name: (name,) for name in (*items.names, *self.objects)} | self.paths, items.names)
        tensors = self._tensors(items, roles)
        objects = {name: self._object(name, roles) for name in self.objects}
        check_coverage(list(tensors.values()))
        if not tensors and not self.opaque:
            return self._unflattened(objects)
        return Catalog(tensors, objects, self._info())

    def _unflattened(self, objects: dict[str, ObjectEntry]) -> Catalog:
        """Return the catalog of a checkpoint saved with `flatten_state_dict=False`.

        The tensors are inside nested objects, so the pickles of all objects are read.
        """
        values: dict[str, dict[str, Any]] = {}
        for name, entry in objects.items():
            if entry.codec is None:
                with contextlib.suppress(UnsafePickleError, UnsupportedFormatError):
                    value = read_archive(self.store, entry.path, entry.start, entry.nbytes)
                    values.setdefault(entry.path, {})[name] = plain(value, file=f"{entry.path} ({name!r:.80})")
        tensors, others = entries_of(values, levels=1)
        parts = {name: entry for name, entry in others.items() if len(entry.key) > 1}
        opened = {entry.key[0] for entry in tensors.values()} | {entry.key[0] for entry in parts.values()}
        kept = {name: entry for name, entry in objects.items() if name not in opened}
        return Catalog(tensors, {**kept, **parts}, self._info())

    # --- gathering

    def _gather(self, part: _Part) -> None:
        places = part.places()
        for name, entry in part.entries.items():
            if not isinstance(name, str):
                raise part.fault("a key of its state_dict_metadata is not a string")
            if isinstance(entry, TensorMetadata):
                self._gather_tensor(part, name, entry, places)
            elif isinstance(entry, Record) and entry.kind == _BYTES_KIND:
                info = places.pop((name, None), None)
                if info is None:
                    raise IncompleteCheckpointError(f"{part.name}: it has no location for the entry {name!r:.80}.")
                self.objects.setdefault(name, (info, part.name))
            else:
                raise part.fault(f"the entry {name!r:.80} is neither a tensor nor bytes")
        for name, _ in places:
            raise part.fault(f"storage_data lists a part of {name!r:.80} that state_dict_metadata does not")

    def _gather_tensor(self, part: _Part, name: str, entry: TensorMetadata, places: dict[Place, StorageInfo]) -> None:
        chunks = entry.chunks if isinstance(getattr(entry, "chunks", None), list) else [None]
        try:
            dtype, shape = _tensor_dtype(entry.properties), entry.size
            offsets, sizes = _fields(chunks, "offsets"), _fields(chunks, "sizes")
        except AttributeError:
            raise part.fault(f"the description of {name!r:.80} is incomplete") from None
        except UnsupportedFormatError as error:
            if self._gather_whole(part, name, entry.size, chunks, places):
                return
            raise UnsupportedFormatError(f"{part.name}: tensor {name!r:.80}: {error}") from None
        counts = _are(ChunkMetadata, chunks) and _are_counts([shape, *offsets, *sizes])
        if not counts or {len(shape)} != {len(shape), *map(len, offsets), *map(len, sizes)}:
            raise part.fault(f"the offsets or sizes of a part of {name!r:.80} are not one integer per dimension")
        if any(n < 0 or n >= _MAX_COUNT for n in shape):
            raise part.fault(f"the shape of {name!r:.80} is invalid")
        rows = self.rows.setdefault(name, _Rows(dtype, shape))
        if (rows.dtype, rows.shape) != (dtype, shape) or name in self.objects:
            raise part.fault(
                f"{name!r:.80} is {dtype} {list(shape)} here and {rows.dtype} {list(rows.shape)} elsewhere"
            )
        try:
            infos = [places.pop((name, offset)) for offset in offsets]
        except KeyError as error:
            raise IncompleteCheckpointError(
                f"{part.name}: it has no location for the part of {name!r:.80} at {error.args[0][1]}."
            ) from None
        starts, lengths = _ranges(infos, part, name)
        rows.offsets += offsets
        rows.sizes += sizes
        rows.starts += starts
        rows.lengths += lengths
        rows.files += self.files.numbers(_fields(infos, "relative_path"), part.name)
        packed = any(_fields(infos, "transforms"))
        rows.zstd += [packed and _is_zstd(info, part, name) for info in infos]

    def _gather_whole(
        self, part: _Part, name: str, shape: Any, chunks: Sequence[Any], places: dict[Place, StorageInfo]
    ) -> bool:
        """Add a quantized or sparse tensor to `objects`, because it can only be read as a whole.

        Returns False, and adds nothing, if the tensor is not stored as a single piece.
        """
        box: list[Any] = [getattr(chunk, key, None) for chunk in chunks for key in ("offsets", "sizes")]
        if len(chunks) != 1 or not _are_counts(box) or any(box[0]) or box[1] != shape or name in self.rows:
            return False
        info = places.pop((name, box[0]), None)
        if info is not None:
            self.objects.setdefault(name, (info, part.name))
            self.opaque[name] = "is quantized or sparse"
        return info is not None

    # --- columns

    def _joined_rows(self) -> Items:
        rows = self.rows.values()

        def column(field: str, dtype: Any) -> npt.NDArray[Any]:
            return np.fromiter(chain.from_iterable(map(attrgetter(field), rows)), dtype)

        try:
            offsets, sizes = (
                np.fromiter(chain.from_iterable(chain.from_iterable(map(attrgetter(field), rows))), np.int64)
                for field in ("offsets", "sizes")
            )
        except OverflowError:
            huge = (any(abs(n) >> 63 for n in chain(*item.offsets, *item.sizes)) for item in rows)
            name = next(compress(self.rows, huge), "")
            raise CorruptCheckpointError(f"{self._source}: a part of {name!r:.80} is out of range.") from None
        ndims = np.array([len(item.shape) for item in rows], np.int64)
        stops = np.cumsum([len(item.starts) for item in rows], dtype=np.int64)
        return Items(
            self.store,
            self.files.paths,
            np.array(self.files.ranks, np.int32),
            list(self.rows),
            [item.dtype for item in rows],
            [item.shape for item in rows],
            BoxTable(ndims, stops, offsets, sizes),
            column("files", np.int32),
            column("starts", np.int64),
            column("lengths", np.int64),
            column("zstd", np.bool_),
        )

    def _tensors(self, items: Items, roles: RoleTable) -> dict[str, TensorEntry]:
        sizes = np.array(self.files.sizes, np.int64)[items.files] if len(items.files) else items.places
        bad = np.flatnonzero((sizes >= 0) & (items.places + items.lengths > sizes))
        if len(bad):
            row = int(bad[0])
            path, start = self.files.paths[int(items.files[row])], int(items.places[row])
            raise IncompleteCheckpointError(
                f"{path} is truncated: it has {int(sizes[row])} bytes, but an item is at "
                f"[{start}, {start + int(items.lengths[row])})."
            )
        numels, short = self._check_bytes(items)
        if not numels.all():
            items = items.take(numels != 0)
        entries: dict[str, TensorEntry] = {}
        for i, (name, dtype, shape) in enumerate(zip(items.names, items.dtypes, items.shapes, strict=True)):
            found = roles.of(name)
            entries[name] = TensorEntry(
                name, dtype, shape, LocatedSlices(items, i), found.role, found.fqn, found.state,
                self.paths.get(name, ()),
            )  # fmt: skip
        for name, error in short.items():  # an error, unless the tensor is of a subclass that may pack its values
            slices = entries[name].slices
            assert isinstance(slices, LocatedSlices)
            try:
                found_opaque = find_opaque(slices)
            except CkptkitError:
                raise error from None
            if not found_opaque:
                raise error
            self.opaque[name] = slices.opaque
        item_batches((entry.role, entry.slices) for entry in entries.values())
        return entries

    def _check_bytes(self, items: Items) -> tuple[npt.NDArray[np.float64], dict[str, CorruptCheckpointError]]:
        """Check that each slice is stored with at least as many bytes as its sizes and dtype require.

        Without this check, a small hostile file could declare a huge tensor, and a load would exhaust the memory.

        Returns:
            The number of elements of each slice, and an error for each tensor that has too few bytes. The caller must
            raise the error, unless the tensor's class packs several values into a byte.
        """
        boxes, owners = items.boxes, items.boxes.owners
        numels = products(boxes.sizes.astype(np.float64), boxes.ndims[owners])  # floats, which can't overflow
        negative = np.flatnonzero(boxes.sizes < 0)
        if len(negative):
            name = items.names[boxes.owner_of(negative[0])]
            raise CorruptCheckpointError(f"{self._source}: a part of {name!r:.80} has a negative size.")
        itemsizes = np.array([dtype_of(dtype).itemsize for dtype in items.dtypes], np.float64)
        wanted = numels * itemsizes[owners] if len(owners) else numels
        bad = np.flatnonzero(~items.zstd & (wanted > items.lengths))
        short: dict[str, CorruptCheckpointError] = {}
        for row in bad.tolist():
            name, path = items.names[int(owners[row])], self.files.paths[int(items.files[row])]
            error = CorruptCheckpointError(
                f"{self._source}: the part of {name!r:.80} of sizes {list(boxes.box(row)[1])} needs {wanted[row]:.0f} "
                f"bytes, but {path} stores {int(items.lengths[row])} for it."
            )
            if wanted[row] > _MOST_PACKED * items.lengths[row]:
                raise error
            short.setdefault(name, error)
        return numels, short

    @property
    def _source(self) -> str:
        return self.parts[0].name

    def _object(self, name: str, roles: RoleTable) -> ObjectEntry:
        info, source = self.objects[name]
        part = next(part for part in self.parts if part.name == source)
        (start,), (length,) = _ranges([info], part, name)
        file = self.files.numbers([info.relative_path], source)[0]
        path, size = self.files.paths[file], self.files.sizes[file]
        if 0 <= size < start + length:
            raise IncompleteCheckpointError(
                f"{path} is truncated: it has {size} bytes, but {name!r:.80} is at [{start}, {start + length})."
            )
        codec = Codec("zstd", start, length) if _is_zstd(info, part, name) else None
        role = roles.of(name).role
        return ObjectEntry(
            name,
            path,
            0 if codec else start,
            0 if codec else length,
            codec,
            role=role if role in (Role.OPTIMIZER, Role.OTHER) or name in self.opaque else Role.OTHER,
            key=self.paths.get(name, ()),
        )

    def _info(self) -> CatalogInfo:
        files = dict(zip(self.files.paths, self.files.sizes, strict=True))
        files.update({part.name: part.nbytes for part in self.parts})
        extra: dict[str, Any] = {}
        notes: tuple[str, ...] = ()
        if any(part.is_of_a_save for part in self.parts):
            extra["unproved"] = NO_RECORD
            notes = (f"not proved: {NO_RECORD}",)
        version = self.parts[0].version
        if isinstance(version, str):
            extra["dcp_version"] = version[:32]
        if self.opaque:
            extra["opaque"] = dict(self.opaque)
            notes += (f"not interpreted: {first_few([f'{name} {why}' for name, why in self.opaque.items()], 3)}",)
        per_rank = _RANK_METADATA.fullmatch(self._source) is not None
        return CatalogInfo(
            "dcp",
            producer="torch.distributed.checkpoint",
            world_size=len(self.parts) if per_rank else None,
            files=files,
            extra=extra,
            notes=notes,
        )


def _ranges(infos: Sequence[StorageInfo], part: _Part, name: str) -> tuple[list[int], list[int]]:
    """Return the start and the length of each item in its file, in bytes."""
    try:
        starts, lengths = _fields(infos, "offset"), _fields(infos, "length")
    except AttributeError:
        raise part.fault(f"the location of {name!r:.80} is incomplete") from None
    both = [*starts, *lengths]
    if not _are(int, both) or (both and not 0 <= min(both) <= max(both) < _MAX_COUNT):
        raise part.fault(f"the location of {name!r:.80} is not a byte range")
    return starts, lengths


def _is_zstd(info: StorageInfo, part: _Part, name: str) -> bool:
    transforms = info.transforms
    if not transforms:
        return False
    if not isinstance(transforms, (list, tuple)) or list(transforms) != [_ZSTD]:
        raise UnsupportedFormatError(
            f"{part.name}: {name!r:.80} was written with the transforms {str(transforms)[:80]}; only {_ZSTD!r} is read."
        )
    return True


def _tensor_dtype(properties: Any) -> str:
    """Return the dtype from an unpickled `TensorProperties`.

    The pickled state of that class is the tuple (dtype, layout, requires_grad, memory format, pinned).

    Raises:
        AttributeError: The properties contain no dtype.
        UnsupportedFormatError: The layout is not dense, or the dtype is unknown.
    """
    state = properties.state if isinstance(properties, Record) else None
    found = state[0] if isinstance(state, tuple) and state else (properties.fields.get("dtype") if state else None)
    if not isinstance(found, TorchDType):
        raise AttributeError("dtype")
    layout = state[1] if isinstance(state, tuple) and len(state) > 1 else "strided"
    if layout != "strided":
        raise UnsupportedFormatError(f"its layout is {str(layout)[:40]}; only dense tensors can be read.")
    return dtype_of(found.name).name
