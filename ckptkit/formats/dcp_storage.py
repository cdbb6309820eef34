"""`DCPWriter` and `DCPReader`: torch's StorageWriter and StorageReader, for `dcp.save` and `dcp.load` as they are.

    dcp.save(state, storage_writer=ckptkit.DCPWriter(url))
    dcp.load(state, storage_reader=ckptkit.DCPReader(url))

`planner=` may be any; `DCPSavePlanner` and `DCPLoadPlanner` spare the objects that torch's make of each tensor.
What the writer writes, torch's own reader loads; what torch wrote, ours loads.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast, overload

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
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

from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SaveError,
)
from ckptkit.formats import ckptkit as own
from ckptkit.formats import dcp
from ckptkit.formats.dcp_bytes import is_dense
from ckptkit.formats.dcp_encode import frame_tensor
from ckptkit.formats.dcp_files import write_records
from ckptkit.formats.dcp_fill import Filler, Verify
from ckptkit.formats.dcp_finish import Place, write_finish
from ckptkit.formats.dcp_objects import check_fits, filled_by, load_objects
from ckptkit.formats.dcp_plan import ShardedPlan
from ckptkit.formats.dcp_planner import CachedSavePlanner, DCPLoadPlanner, WriterMeta
from ckptkit.formats.dcp_torch_metadata import CatalogMetadata, CatalogPaths, PlannableMetadata
from ckptkit.formats.dcp_write import write_index, write_part
from ckptkit.formats.layout import MANIFEST_NAME, RECORD_NAME, find_record
from ckptkit.storage import Store, open_store
from ckptkit.storage.hold_directory import HeldDirectory
from ckptkit.storage.local import LocalStore
from ckptkit.storage.remote import RemoteStore

__all__ = ["CachedSavePlanner", "DCPReader", "DCPWriter"]

_METADATA = re.compile(r"(?:__\d+)?\.metadata(?:\.tmp)?")
_DATA = re.compile(r"__\d+_\d+\.distcp")
Url = "str | os.PathLike[str]"


class DCPWriter(StorageWriter):
    """Writes DCP checkpoints that torch reads: several files at once, digests and CRC in the same pass, fsynced.

    The checkpoint exists once `.metadata` does, which is written last and durable. `manifest.safetensors` beside it
    holds a digest of every slice. A failure of any worker fails the save. A local directory is locked meanwhile: of two
    jobs at once the second gets a LeaseHeldError.
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
        """Write to the directory at `url`, which is made.

        Args:
            storage_options: For the fsspec file system of a remote URL.
            sync: Files and their names are durable when `dcp.save` returns.
            workers: Files a rank writes at once; 0: its share of the cores, at most 4.
            overwrite: Replace a checkpoint that is there; else that is a CheckpointExistsError.
        """
        super().__init__()
        self.url = os.fspath(url)
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
        return self.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        if not _is_itself(self, DCPWriter, ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")):
            return self._plain_meta()
        self._meta = WriterMeta(checkpoint_id=self.url, save_id=self.save_id)
        return self._meta

    def _plain_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.url, save_id=self.save_id)

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
            root = self._store().local_root
            self._held = None if root is None else HeldDirectory(root)
            self._clear("__", ".metadata")
        return [
            plan if plan.storage_data is not None else dataclasses.replace(plan, storage_data=f"__{i}_")
            for i, plan in enumerate(plans)
        ]

    def _store(self) -> Store:
        store = open_store(self.url, storage_options=self.storage_options)
        return store.with_free_names() if isinstance(store, RemoteStore) else store  # `_clear` has looked

    def _clear(self, prefix: str, metadata: str) -> None:
        """Make room: what an unfinished save left goes; a checkpoint only if asked, its metadata before its data."""
        store = self._store()
        names = [item.path for item in store.list() if item.kind == "file"]
        if RECORD_NAME in names:
            raise CheckpointExistsError(
                f"{self.url} is a committed checkpoint of a CheckpointManager, which is never written again."
            )
        taken = [name for name in names if _METADATA.fullmatch(name) and (self.collective or name == metadata)]
        if any(not name.endswith(".tmp") for name in taken) and not self.overwrite:
            raise CheckpointExistsError(
                f"{self.url} holds a checkpoint. Save to another directory, or pass DCPWriter(..., overwrite=True)."
            )
        own_index = [MANIFEST_NAME] if self.collective and MANIFEST_NAME in names else []
        store.delete([*taken, *own_index])
        if (taken or own_index) and self.sync and isinstance(store, LocalStore):
            store.sync_directory()
        store.delete([name for name in names if _DATA.fullmatch(name) and name.startswith(prefix)])

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        sharded = plan.planner_data
        if isinstance(sharded, ShardedPlan):
            part = write_part(sharded, self._store(), sync=self.sync, workers=self.workers)
            future.set_result([WriteResult(MetadataIndex(""), part.nbytes, part.to_bytes())])
        else:
            future.set_result(self._write_items(plan, planner))
        return future

    def _write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors: list[WriteItem] = []
        others: list[WriteItem] = []
        whole: list[bytes] = []
        lazy = _Resolved(planner)
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                others.append(item)
                whole.append(cast(io.BytesIO, planner.resolve_data(item)).getvalue())
            elif lazy.is_dense(item):
                tensors.append(item)
            else:
                others.append(item)
                whole.append(_saved(cast(torch.Tensor, planner.resolve_data(item))))
        lazy.items = tensors
        frames = [frame_tensor(_dtype_of(item), tuple(_chunk(item).sizes)) for item in tensors]
        written = write_records(
            self._store(), plan.storage_data, frames, lazy, whole, workers=self.workers, sync=self.sync
        )
        results = []
        for row, item in enumerate([*tensors, *others]):
            path = written.paths[int(written.file[row])]
            place = Place(
                path,
                int(written.starts[row]),
                int(written.lengths[row]),
                int(written.payloads[row]) if row < len(tensors) else -1,
                frames[row].nbytes if row < len(tensors) else 0,
                int(written.digests[row]),
                written.files[path],
            )
            results.append(WriteResult(item.index, place.length, place))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            self._finish(metadata, results)
        finally:
            if self._held is not None:
                self._held.release()

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = "1.0.0"
        metadata.storage_meta = self._plain_meta()
        parts = [found[0].storage_data for found in results if found]
        if any(isinstance(part, bytes) for part in parts):
            write_index(parts, self._store(), save_id=self.save_id, sync=self.sync, kind="dcp")
            written = DCPReader(self.url, storage_options=self.storage_options)
            metadata.state_dict_metadata = CatalogMetadata(written)  # type: ignore[assignment]
            metadata.planner_data, metadata.storage_data = CatalogPaths(written), {}
            return
        name = ".metadata" if self.collective or self.rank is None else f"__{self.rank}.metadata"
        write_finish(self._store(), metadata, results, name=name, sync=self.sync, manifest=name == ".metadata")


class _Resolved(Sequence[torch.Tensor]):
    """The tensors of write items, asked for only when they are written: a planner may allocate for each."""

    def __init__(self, planner: SavePlanner) -> None:
        self.planner = planner
        self.items: list[WriteItem] = []
        self._known: dict[int, torch.Tensor] = {}  # by identity of the item, which `items` keeps alive
        # The default planner gives views; any other may transform, so that a look ahead could cost a copy of all.
        self._views = getattr(type(planner), "transform_object", None) is DefaultSavePlanner.transform_object
        self._views = self._views and type(planner).resolve_data is DefaultSavePlanner.resolve_data

    def is_dense(self, item: WriteItem) -> bool:
        if not self._views:
            return True
        self._known[id(item)] = tensor = cast(torch.Tensor, self.planner.resolve_data(item))
        return is_dense(tensor)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, row: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, row: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        item = self.items[row]
        tensor = self._known.get(id(item))
        if tensor is None:
            tensor = cast(torch.Tensor, self.planner.resolve_data(item))
        if tensor.is_meta:
            raise SaveError(f"{item.index.fqn}: the tensor is on the meta device: it has no values to save.")
        wanted, sizes = _dtype_of(item), tuple(_chunk(item).sizes)
        found = str(tensor.dtype).removeprefix("torch.")
        if (found, tuple(tensor.shape)) != (wanted, sizes) or not is_dense(tensor):
            raise SaveError(
                f"{item.index.fqn}: the planner resolved it to {found} {list(tensor.shape)}, its plan says {wanted} "
                f"{list(sizes)}. A planner that transforms tensors must say so in the properties it plans."
            )
        return tensor


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _dtype_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return str(item.tensor_data.properties.dtype).removeprefix("torch.")


def _saved(tensor: torch.Tensor) -> bytes:
    """What torch itself would write of a tensor that is no plain memory."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu(), buffer)
    return buffer.getvalue()


class DCPReader(StorageReader):
    """Reads DCP checkpoints, ours and torch's: only the bytes needed, into the tensors' own memory, digests checked.

    Nothing in the checkpoint is executed: `.metadata` is parsed, objects are loaded by torch's weights_only rules.
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
            storage_options: For the fsspec file system of a remote URL.
            verify: "read" checks what is read whole, "full" reads whole what is needed in part, "off".
            workers: Reads in flight; 0: by the cores.
            cast: Convert where a dtype differs; else that is a CheckpointMismatchError.
        """
        super().__init__()
        self.url = os.fspath(url)
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
        return self.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    @property
    def catalog(self) -> Catalog:
        """What the checkpoint holds."""
        if self._catalog is None:
            try:
                self._catalog = _open(self.store)
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                raise type(error)(f"{self.url}: {error}") from error
        return self._catalog

    @property
    def store(self) -> Store:
        """Where the checkpoint lies."""
        if self._base is None:
            self._base = open_store(self.url, storage_options=self.storage_options)
        return self._base

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        paths = CatalogPaths(self)
        plannable = _is_itself(self, DCPReader, ("prepare_local_plan", "prepare_global_plan", "read_data"))
        entries = PlannableMetadata(self) if plannable else CatalogMetadata(self)
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
        entries: dict[str, TensorEntry] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            name = item.storage_index.fqn
            entry = entries.get(name)
            if entry is None:
                entry = entries[name] = catalog.tensors[name]
            target = planner.resolve_tensor(item).detach()
            filler.add(entry, _row(entry, item), tuple(item.storage_offsets), target)
            filled.append((item, target))
        _check_filled(filled, planner)
        whole = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        values = load_objects(store, {i.storage_index.fqn: catalog.objects[i.storage_index.fqn] for i in whole})
        state = getattr(planner, "state_dict", {})
        for item in whole:
            check_fits(state.get(item.dest_index.fqn), values[item.storage_index.fqn], item.dest_index.fqn)
        filler.run()
        for item, target in filled:
            planner.commit_tensor(item, target)
        for item in whole:
            _load_bytes(planner, item, values[item.storage_index.fqn])


def _open(store: Store) -> Catalog:
    catalog = own.open_manifest(store) if store.local_root is None else None
    if catalog is not None and catalog.info.format == "dcp":
        return catalog  # of a `DCPWriter`, which does not write where a commit record is: none is asked for
    if find_record(store) is not None:
        return own.open_catalog(store)
    return catalog or own.open_manifest(store) or dcp.open_catalog(store)


def _is_itself(made: object, ours: type, steps: Sequence[str]) -> bool:
    """Whether no subclass has its own way of a step: what it does must not be passed over."""
    return all(getattr(type(made), step) is getattr(ours, step) for step in steps)


def _row(entry: TensorEntry, item: ReadItem) -> int:
    """The slice an item is read from. Its index is a hint of the planner's; the offsets decide."""
    row, offset = item.storage_index.index, item.storage_index.offset
    offsets = entry.slices.offsets
    if row is not None and row < len(offsets) and tuple(offsets[row].tolist()) == tuple(offset or ()):
        return row
    for i, found in enumerate(offsets.tolist()):
        if tuple(found) == tuple(offset or ()):
            return i
    raise IncompleteCheckpointError(f"tensor {entry.name!r}: there is no slice at {list(offset or ())}.")


def _check_filled(filled: Sequence[tuple[ReadItem, torch.Tensor]], planner: LoadPlanner) -> None:
    """Check that the items fill each target whole: a checkpoint with a hole must not leave what memory held."""
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
                f"tensor {name!r}: the checkpoint holds {numel} of the {expected} elements this rank needs."
            )


def _load_bytes(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Hand an object over. torch's planner would unpickle the file's bytes without limits: it gets the value, any
    other planner bytes of our own making."""
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
