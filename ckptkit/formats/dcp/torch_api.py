"""Defines `DCPWriter` and `DCPReader`, the storage writer and reader for torch's `dcp.save` and `dcp.load`.

    dcp.save(state, storage_writer=ckptkit.DCPWriter(url))
    dcp.load(state, storage_reader=ckptkit.DCPReader(url))

Both work with any planner. `DCPSavePlanner` and `DCPLoadPlanner` avoid the per-tensor objects of torch's planners.
torch's reader loads what `DCPWriter` wrote, and `DCPReader` loads what torch wrote.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ckptkit.arguments import check_flags, check_int, check_storage_options, location, wrong
from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, CatalogInfo, Digest, ObjectEntry, SliceArray, TensorEntry, TensorSlice
from ckptkit.digests import DIGEST, hex_digest_of
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SaveError,
)
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.dcp.class_records import recipes_of
from ckptkit.formats.dcp.files import write_records
from ckptkit.formats.dcp.fill import Filler, Verify
from ckptkit.formats.dcp.host_bytes import dtype_name, own_memory, why_not_dense, without_subclass
from ckptkit.formats.dcp.index import RankPart, write_index
from ckptkit.formats.dcp.plan import ShardedPlan, whole_record
from ckptkit.formats.dcp.planners import DCPLoadPlanner, WriterMeta, is_itself
from ckptkit.formats.dcp.read import (
    ReadPlan,
    add_class,
    check_fits,
    check_shared_memory,
    filled_by,
    load_objects,
    plan_read,
)
from ckptkit.formats.dcp.records import frame_tensor
from ckptkit.formats.dcp.roles import RoleTable
from ckptkit.formats.own import reader as own
from ckptkit.formats.own.manifest import Entries, Manifest
from ckptkit.formats.own.outline import LEAST, spare_fields
from ckptkit.formats.own.record import MANIFEST_NAME, RECORD_NAME, FileRecord, find_record
from ckptkit.storage import open_store
from ckptkit.storage.local import UNFINISHED
from ckptkit.storage.lock import HeldDirectory, hold
from ckptkit.storage.store import Store


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """The location of an item's record, and the location and digest of the payload within the record.

    Attributes:
        offset, length: Byte range of the record in the file.
        payload, nbytes: Start of the payload in the file and its size in bytes, or -1 and 0 if the item is not a dense
            tensor.
        is_shard: True for a shard of a tensor that is not dense, such as a tensor subclass.
    """

    path: str
    offset: int
    length: int
    payload: int
    nbytes: int
    digest: int
    file: FileRecord
    is_shard: bool = False


def _catalog(
    metadata: Metadata,
    places: Mapping[Any, WrittenItem],
    files: Mapping[str, FileRecord],
    save_id: str,
    world_size: int,
) -> Catalog:
    """Return the catalog of a save planned by torch's planner, which has checked that the ranks agree.

    Tensors that can't be read as plain memory are listed as objects.
    """
    paths: Any = metadata.planner_data
    if not isinstance(paths, dict) or not all(
        isinstance(path, tuple) and all(type(part) in (str, int) for part in path) for path in paths.values()
    ):
        paths = {}
    of_name: dict[str, list[tuple[int, WrittenItem]]] = {}
    for index, place in places.items():
        of_name.setdefault(index.fqn, []).append((index.index or 0, place))
    sliced: dict[str, tuple[TensorStorageMetadata, list[WrittenItem]]] = {}
    whole: dict[str, WrittenItem] = {}
    for name, found in metadata.state_dict_metadata.items():
        own = [place for _, place in sorted(of_name.get(name, ()), key=itemgetter(0))]
        if isinstance(found, TensorStorageMetadata) and own and all(p.payload >= 0 for p in own):
            sliced[name] = found, own
        elif len(own) == 1:
            whole[name] = own[0]
    roles = RoleTable({name: paths.get(name, ()) for name in (*sliced, *whole)}, sliced)
    tensors, objects = {}, {}
    for name, (found, own) in sliced.items():
        slices = [
            TensorSlice(
                Box(tuple(chunk.offsets), tuple(chunk.sizes)), p.path, p.payload, p.nbytes,
                digest=Digest(DIGEST, p.digest, p.payload, p.nbytes), rank=int(p.path[2:].split("_", 1)[0]),
            )
            for chunk, p in zip(found.chunks, own, strict=True)
        ]  # fmt: skip
        array, dtype = SliceArray.of(slices, len(found.size)), dtype_name(found.properties.dtype)
        tensors[name] = TensorEntry(name, dtype, tuple(found.size), array, *roles.of(name), paths.get(name, ()))
    for name, p in whole.items():
        digest = Digest(DIGEST, p.digest, p.offset, p.length)
        role = roles.of(name).role
        objects[name] = ObjectEntry(name, p.path, p.offset, p.length, digest=digest, role=role, key=paths.get(name, ()))
    listed = {id(place) for _, own in sliced.values() for place in own}
    spares = [
        (place.path, place.payload, place.nbytes, place.digest)
        for place in places.values()
        if place.nbytes >= LEAST and id(place) not in listed
    ]
    sizes, digests = ({path: getattr(item, name) for path, item in files.items()} for name in ("nbytes", "digest"))
    extra = {"save_id": save_id, "digests": digests, **spare_fields(spares)}
    return Catalog(
        tensors, objects, CatalogInfo("dcp", producer="ckptkit", world_size=world_size, files=sizes, extra=extra)
    )


class CatalogMetadata(Mapping[str, Any]):
    """A `Metadata.state_dict_metadata` that creates chunk objects only for the tensors that a planner asks about.

    A pickle of this mapping contains only the checkpoint's URL. After a save, all ranks except the coordinator get such
    a pickle, and open the checkpoint when they first use the mapping.

    Attributes:
        is_plannable: True if `DCPLoadPlanner` may use this mapping. False if a subclass of the reader overrides the
            methods that read data.
    """

    def __init__(self, reader: DCPReader, *, is_plannable: bool = False) -> None:
        self._reader = reader
        self.is_plannable = is_plannable

    @property
    def _catalog(self) -> Catalog:
        return self._reader.catalog

    def __len__(self) -> int:
        return len(self._catalog.tensors) + len(self._catalog.objects)

    def __iter__(self) -> Iterator[str]:
        yield from self._catalog.tensors
        yield from self._catalog.objects

    def __contains__(self, name: object) -> bool:
        catalog = self._catalog
        return name in catalog.tensors or name in catalog.objects or name in recipes_of(catalog)

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        entry = self._catalog.tensors.get(name)
        recipe = recipes_of(self._catalog).get(name) if entry is None else None
        if recipe is not None:  # stored in parts
            whole = ChunkStorageMetadata(torch.Size([0] * len(recipe["shape"])), torch.Size(recipe["shape"]))
            return TensorStorageMetadata(
                TensorProperties(getattr(torch, recipe["dtype"])), torch.Size(recipe["shape"]), [whole]
            )
        if entry is None:
            self._catalog.objects[name]
            return BytesStorageMetadata()
        boxes = zip(entry.slices.offsets.tolist(), entry.slices.sizes.tolist(), strict=True)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape), chunks)

    def plan(self, state_dict: dict[str, Any], *, strict: bool) -> ReadPlan:
        """Plan the reads that fill `state_dict`."""
        r = self._reader
        return plan_read(r.catalog, r.store, state_dict, verify=r.verify, cast=r.cast, strict=strict, workers=r.workers)


class CatalogPaths(Mapping[str, "tuple[str | int, ...]"]):
    """A `Metadata.planner_data` with the path of each key. A pickled instance contains only the URL."""

    def __init__(self, reader: DCPReader) -> None:
        self._reader = reader
        self._known: dict[str, tuple[str | int, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader, "_known": None}

    @property
    def _paths(self) -> dict[str, tuple[str | int, ...]]:
        if self._known is None:
            tensors, objects = self._reader.catalog.tensors, self._reader.catalog.objects
            if isinstance(tensors, Entries):
                found = dict(zip(tensors.manifest.tensors.names, tensors.manifest.tensors.keys, strict=True))
            else:
                found = {name: entry.key for name, entry in tensors.items()}
            found.update({name: entry.key for name, entry in objects.items()})
            self._known = {name: path for name, path in found.items() if path}
        return self._known

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __getitem__(self, name: str) -> tuple[str | int, ...]:
        return self._paths[name]


_METADATA = re.compile(r"(?:__\d+)?\.metadata(?:\.tmp)?")
_DATA = re.compile(r"__\d+_\d+\.distcp")


class DCPWriter(StorageWriter):
    """Writes DCP checkpoints that torch can read.

    Writes several files at once, computes digests and CRCs in the same pass, and fsyncs the files.

    `.metadata` is written last. If `.metadata` exists, the checkpoint is complete. `manifest.safetensors` contains a
    digest of every slice. If the state has shards of tensor subclasses, they are stored as torch stores them, and there
    is no manifest. If any worker fails, the save fails. A local directory is locked during the save: a second job that
    saves to the same directory gets a LeaseHeldError.

    A failed `dcp.save` or `dcp.load` raises torch's CheckpointException, a BaseException that `except Exception` does
    not catch. The text of this exception contains ckptkit's error. Its `failures[rank][0]` is ckptkit's error, or
    torch's AssertionError if `.metadata` was not readable.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        sync: bool = True,
        workers: int = 0,
        overwrite: bool = False,
    ) -> None:
        """Write to the directory at `url`, which is created if needed.

        Args:
            storage_options: Options for the fsspec file system of a remote URL.
            sync: Make the files and their names durable before `dcp.save` returns.
            workers: Number of files that a rank writes at once. 0 means 8 on an object store. On other storage, 0 means
                the rank's share of the CPU cores (at most 4).
            overwrite: Replace an existing checkpoint. If False, an existing checkpoint raises a CheckpointExistsError.
        """
        super().__init__()
        check_storage_options(storage_options=storage_options)
        check_flags(sync=sync, overwrite=overwrite)
        check_int("workers", workers, least=0)
        self.url = location("url", url)
        self.storage_options = storage_options
        self.sync = sync
        self.workers = workers
        self.overwrite = overwrite
        self.save_id = uuid.uuid4().hex[:16]
        self.rank: int | None = None
        self.collective = True
        self._meta = WriterMeta()
        self._held: HeldDirectory | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.url = os.fspath(checkpoint_id)
        self.save_id = uuid.uuid4().hex[:16]

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL."""
        return self.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        if not is_itself(self, DCPWriter, ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")):
            return StorageMeta(checkpoint_id=self.url, save_id=self.save_id)
        self._meta = WriterMeta(checkpoint_id=self.url, save_id=self.save_id)
        return self._meta

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.collective = kwargs.get("use_collectives", True)
        self._meta.rank, self._meta.collective = self.rank or 0, self.collective

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.collective or self.rank is None:
            return plan
        self._clear(f"__{self.rank}_", f"__{self.rank}.metadata")
        return dataclasses.replace(plan, storage_data=f"__{self.rank}_")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.collective:
            self._held = hold(self._store())
            self._clear("__", ".metadata")
        return [
            plan if plan.storage_data is not None else dataclasses.replace(plan, storage_data=f"__{i}_")
            for i, plan in enumerate(plans)
        ]

    def _store(self) -> Store:
        return open_store(self.url, storage_options=self.storage_options).with_free_names()  # checked by `_clear`

    def _clear(self, prefix: str, metadata: str) -> None:
        """Delete the files of an unfinished save. With `overwrite`, also delete the files of an existing checkpoint.

        Deletes the metadata first, so that a half-deleted checkpoint is not taken for a complete one.

        Raises:
            CheckpointExistsError: The directory contains a checkpoint that must not be overwritten.
        """
        store = self._store()
        names = [item.path for item in store.list() if item.kind == "file"]
        if RECORD_NAME in names:
            raise CheckpointExistsError(
                f"{self.url} is a committed checkpoint of a CheckpointManager, which is never overwritten."
            )

        def is_index(name: str) -> bool:
            return name == metadata or (
                self.collective and (name == MANIFEST_NAME or _METADATA.fullmatch(name) is not None)
            )

        indexes = [name for name in names if is_index(name)]
        if any(name != MANIFEST_NAME and not name.endswith(".tmp") for name in indexes) and not self.overwrite:
            raise CheckpointExistsError(
                f"{self.url} holds a checkpoint. Save to another directory, or pass DCPWriter(..., overwrite=True)."
            )
        store.delete(indexes)
        if indexes and self.sync:
            store.sync_directory()
        parts = {name: match[1] for name in names if (match := UNFINISHED.fullmatch(name))}
        data = [n for n in names if _DATA.fullmatch(parts.get(n, n)) and parts.get(n, n).startswith(prefix)]
        store.delete([*data, *(part for part, name in parts.items() if is_index(name))])

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        sharded = plan.planner_data
        if isinstance(sharded, ShardedPlan):
            part = sharded.write(self._store(), sync=self.sync, workers=self.workers)
            nbytes = sum(item.nbytes for item in part.written.files.values())
            future.set_result([WriteResult(MetadataIndex(""), nbytes, part)])
        else:
            future.set_result(self._write_items(plan, planner))
        return future

    def _write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors: list[WriteItem] = []
        others: list[WriteItem] = []
        records: list[bytes] = []
        resolved = _Resolved(planner)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                others.append(item)
                records.append(cast(io.BytesIO, planner.resolve_data(item)).getvalue())
            elif (record := resolved.whole_record(item)) is not None:
                others.append(item)
                records.append(record)
            else:
                tensors.append(item)
        resolved.items = tensors
        frames = [frame_tensor(_dtype_of(item), tuple(_chunk(item).sizes)) for item in tensors]
        written = write_records(
            self._store(), plan.storage_data, frames, resolved, records, workers=self.workers, sync=self.sync
        )
        results = []
        for row, item in enumerate([*tensors, *others]):
            _, number, start, length, payload, digest = written.rows[row].tolist()
            path = written.paths[number]
            payload, nbytes = (payload, frames[row].nbytes) if row < len(tensors) else (-1, 0)
            is_shard = payload < 0 and item.type == WriteItemType.SHARD
            place = WrittenItem(path, start, length, payload, nbytes, digest, written.files[path], is_shard)
            results.append(WriteResult(item.index, length, place))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            self._finish(metadata, results)
        finally:
            if self._held is not None:
                self._held.release()

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = "1.0.0"
        metadata.storage_meta = StorageMeta(checkpoint_id=self.url, save_id=self.save_id)
        parts = [found[0].storage_data for found in results if found]
        if any(isinstance(part, RankPart) for part in parts):
            write_index(parts, self._store(), save_id=self.save_id, sync=self.sync, kind="dcp")
            written = DCPReader(self.url, storage_options=self.storage_options)
            metadata.state_dict_metadata = CatalogMetadata(written)  # type: ignore[assignment]
            metadata.planner_data, metadata.storage_data = CatalogPaths(written), {}
            return
        name = ".metadata" if self.collective or self.rank is None else f"__{self.rank}.metadata"
        # A manifest has no entries for shards of tensor subclasses. Each shard is a record that only torch describes.
        in_records = any(result.storage_data.is_shard for found in results for result in found)
        manifest = name == ".metadata" and not in_records
        # The storage data are not added to `metadata`, because torch would broadcast them to all ranks.
        places = {result.index: result.storage_data for found in results for result in found}
        infos = {index: _StorageInfo(p.path, p.offset, p.length) for index, p in places.items()}
        data = pickle.dumps(dataclasses.replace(metadata, storage_data=infos), protocol=4)
        store = self._store()
        if manifest:
            files = {place.path: place.file for place in sorted(places.values(), key=lambda place: place.path)}
            files[name] = FileRecord(len(data), hex_digest_of(data))
            catalog = _catalog(metadata, places, files, self.save_id, len(results))
            store.write(MANIFEST_NAME, Manifest.of(catalog).to_bytes(), sync=self.sync)
        store.write(name, data, sync=self.sync)


class _Resolved(Sequence[torch.Tensor]):
    """The tensors for a list of write items.

    Each tensor is resolved only when it is written, because a planner may allocate memory to resolve a tensor. With
    torch's default planner, which returns views, `whole_record` resolves the tensor earlier.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self.items: list[WriteItem] = []
        self._known: dict[int, torch.Tensor] = {}  # by the item's id(); `items` keeps the item alive
        # Only the default planner is known to return views. Any other planner may copy, and resolving ahead would then
        # copy everything.
        self._views = getattr(type(planner), "transform_object", None) is DefaultSavePlanner.transform_object
        self._views = self._views and type(planner).resolve_data is DefaultSavePlanner.resolve_data

    def whole_record(self, item: WriteItem) -> bytes | None:
        """Return the bytes to store for a tensor that is not dense.

        Returns None for a dense tensor, or if the planner might copy the tensor.

        Raises:
            SaveError: A load could not restore the tensor.
        """
        if not self._views:
            return None
        self._known[id(item)] = tensor = cast(torch.Tensor, self.planner.resolve_data(item))
        why = why_not_dense(tensor)
        if why and item.type == WriteItemType.SHARD and not hasattr(tensor, "__tensor_flatten__"):
            raise SaveError(f"{item.index.fqn}: it {why}.")
        return whole_record(item.index.fqn, tensor) if why else None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> torch.Tensor:  # type: ignore[override]
        item = self.items[row]
        tensor = self._known.get(id(item))
        if tensor is None:
            tensor = cast(torch.Tensor, self.planner.resolve_data(item))
        why = why_not_dense(tensor)
        if why:
            raise SaveError(f"{item.index.fqn}: it {why}.")
        wanted, sizes = _dtype_of(item), tuple(_chunk(item).sizes)
        found = dtype_name(tensor.dtype)
        if (found, tuple(tensor.shape)) != (wanted, sizes):
            raise SaveError(
                f"{item.index.fqn}: the planner returned {found} {list(tensor.shape)}, but planned {wanted} "
                f"{list(sizes)}. A planner that transforms tensors must plan the properties of the result."
            )
        return without_subclass(tensor)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return dtype_name(item.tensor_data.properties.dtype)


class DCPReader(StorageReader):
    """Reads DCP checkpoints that ckptkit or torch wrote.

    Reads only the bytes needed, straight into the tensors' own memory where possible, and checks digests. Runs no code
    from the checkpoint: `.metadata` is parsed, and objects are loaded by torch's weights_only rules.

    `dcp.save` and `DCPWriter` pickle each shard of a tensor subclass. DCPReader, `CheckpointManager.load` and `reshard`
    read the inner tensors from these pickles. For torchao's classes, this works on any number of ranks, without running
    the class. For other classes, one pickle must hold the whole tensor, and the job must have allowed the class
    (`torch.serialization.add_safe_globals`). `reshard` writes the inner tensors as separate tensors, which can be
    loaded with `CheckpointManager` or DCPReader.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: Verify | str = Verify.READ,
        workers: int = 0,
        cast: bool = False,
    ) -> None:
        """Read the checkpoint at `url`.

        Args:
            storage_options: Options for the fsspec file system of a remote URL.
            verify: "read" checks the slices that are read whole anyway. "full" reads all slices whole and checks them.
                "off" checks no slices.
            workers: Number of concurrent reads. 0 means 8 on an object store. On other storage, 0 means twice this
                rank's share of the CPU cores (at most 8).
            cast: Convert a tensor if its dtype differs. If False, a different dtype raises a CheckpointMismatchError.
        """
        super().__init__()
        check_storage_options(storage_options=storage_options)
        check_flags(cast=cast)
        check_int("workers", workers, least=0)
        if verify not in list(Verify):
            raise wrong("verify", verify, "'read', 'full' or 'off'")
        self.url = location("url", url)
        self.storage_options = storage_options
        self.verify = Verify(verify)
        self.workers = workers
        self.cast = cast
        self.load_id = uuid.uuid4().hex
        self._catalog: Catalog | None = None
        self._base: Store | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None, "_base": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.url = os.fspath(checkpoint_id)
        self._catalog = self._base = None
        self.load_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL."""
        return self.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    @property
    def catalog(self) -> Catalog:
        """The checkpoint's contents."""
        if self._catalog is None:
            try:
                self._catalog = _open(self.store)
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                raise type(error)(f"{self.url}: {error}") from error
        return self._catalog

    @property
    def store(self) -> Store:
        """The checkpoint's directory."""
        if self._base is None:
            self._base = open_store(self.url, storage_options=self.storage_options)
        return self._base

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        paths = CatalogPaths(self)
        is_plannable = is_itself(self, DCPReader, ("prepare_local_plan", "prepare_global_plan", "read_data"))
        entries = CatalogMetadata(self, is_plannable=is_plannable)
        return Metadata(
            state_dict_metadata=entries,  # type: ignore[arg-type]
            planner_data=paths if paths else None,
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.url, load_id=self.load_id),
            version="1.0.0",
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        future: Future[None] = Future()
        if isinstance(planner, DCPLoadPlanner) and planner.reads is not None:
            planner.reads.run()
            planner.reads = None
        else:
            self._read_items(plan, planner)
        future.set_result(None)
        return future

    def _read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        catalog, store = self.catalog, self.store
        filler = Filler(store, verify=self.verify, workers=self.workers, cast=self.cast)
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        state = getattr(planner, "state_dict", {})
        by_class: dict[str, bool] = {}  # whether the tensor is a subclass that is read in parts
        destinations: dict[str, TensorEntry] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            name = item.storage_index.fqn
            if name not in by_class:
                by_class[name] = add_class(filler, catalog, name, state.get(item.dest_index.fqn))
            if by_class[name]:
                continue
            entry = catalog.tensors[name]
            destinations[item.dest_index.fqn] = entry
            target = planner.resolve_tensor(item).detach()
            memory = own_memory(target)
            # The planner's index of a slice is only a hint: the offsets decide.
            begin = item.storage_index.offset or (0,) * target.dim()
            offsets = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
            filler.add(entry, Box(offsets, tuple(target.shape)), memory)
            if why := why_not_dense(memory):
                raise CheckpointMismatchError(f"tensor {item.dest_index.fqn!r} of the state {why}.")
            filled.append((item, target))
        _check_filled(filled, planner)
        filler.plan()
        whole = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        values = load_objects(store, {i.storage_index.fqn: catalog.objects[i.storage_index.fqn] for i in whole})
        check_shared_memory(store, state, destinations, cast=self.cast)
        for item in whole:
            check_fits(state.get(item.dest_index.fqn), values[item.storage_index.fqn], item.dest_index.fqn)
        filler.run()
        for item, target in filled:
            planner.commit_tensor(item, target)
        for item in whole:
            _load_bytes(planner, item, values[item.storage_index.fqn])


def _open(store: Store) -> Catalog:
    catalog = own.open_manifest(store) if store.asking_costs else None
    if catalog is not None and catalog.info.format == "dcp":
        return catalog  # there is no commit record to look for: `DCPWriter` refuses a directory that has one
    if find_record(store) is not None:
        return own.open_catalog(store)
    return catalog or own.open_manifest(store) or dcp.open_catalog(store)


def _check_filled(filled: Sequence[tuple[ReadItem, torch.Tensor]], planner: LoadPlanner) -> None:
    """Check that the items fill each tensor completely. In a gap, the tensor would keep its old values."""
    state = getattr(planner, "state_dict", None)
    if state is None:
        return
    filled_numel: dict[tuple[str, Any], int] = {}
    for item, target in filled:
        key = (item.dest_index.fqn, item.dest_index.offset)
        filled_numel[key] = filled_numel.get(key, 0) + target.numel()
    for (name, _), numel in filled_numel.items():
        value = state.get(name)
        if isinstance(value, DTensor):
            expected = value._local_tensor.numel()
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            expected = value.numel()
        else:
            continue
        if numel < expected:
            raise IncompleteCheckpointError(
                f"tensor {name!r}: the checkpoint has only {numel} of the {expected} elements this rank needs."
            )


def _load_bytes(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Pass an object to the planner.

    torch's own planner would unpickle the bytes of the file without restrictions, so it gets the loaded value instead.
    Any other planner expects bytes. It gets a new pickle of the loaded value.
    """
    name = item.dest_index.fqn
    if isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
        value = filled_by(planner.state_dict.get(name), value)
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], value)
        else:
            planner.state_dict[name] = value
        return
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=pickle)
    buffer.seek(0)
    planner.load_bytes(item, buffer)
