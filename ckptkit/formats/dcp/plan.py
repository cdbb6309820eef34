"""Plans which parts of a training state each rank writes. Each rank plans its own writes, without communication.

A tensor that several ranks hold (a plain tensor, or a parameter under HSDP) is written once, and the writes are spread
evenly over the ranks. A small tensor is written by one rank, selected by a hash of the tensor's name. A large tensor is
split into at most one piece per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import is_lazy

from ckptkit.catalog.box import Box
from ckptkit.digests import crc32, digest_of, signature_of
from ckptkit.errors import SaveError, UsageError
from ckptkit.formats.dcp.files import write_records
from ckptkit.formats.dcp.fill import part_of
from ckptkit.formats.dcp.host_bytes import (
    dtype_name,
    is_sparse_or_quantized,
    own_memory,
    why_not_dense,
    without_subclass,
)
from ckptkit.formats.dcp.index import Path, PlannedKey, RankPart, key_table
from ckptkit.formats.dcp.records import RecordFrame, frame_object, frame_tensor, is_plain
from ckptkit.formats.pickles.tensors import PlacementRecord
from ckptkit.formats.pickles.weights_only import dump_plain
from ckptkit.formats.trainers.shards import local_parts, ranks_with_copy
from ckptkit.storage.store import Store

_SPLIT = 1 << 20  # smaller replicas are not split
_DIGEST = 16
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, DTensor))
_UNKNOWN: Any = object()
_NO_PROTOCOL = _PLAIN | {dict}


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """A region that this rank writes. `key` is the index of the region's tensor in `ShardedPlan.keys`."""

    key: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The sharding of a tensor. Tensors with the same dtype, shape and placements share one instance.

    Attributes:
        boxes: (offsets, sizes) of each region that this rank holds.
        within: Offsets of each region in the local tensor. Empty if there is only one region.
        place: (index of this rank among the ranks that hold the same regions, number of these ranks).
    """

    dtype: torch.dtype
    dtype_name: str
    shape: tuple[int, ...]
    placement: tuple[int, tuple[str, ...]] | None
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    place: tuple[int, int]
    within: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """The plan of this rank's writes.

    Attributes:
        keys: The tensors in this rank's state. The first `shared` keys also exist on other ranks. The rest are private.
        meshes: Device meshes that the keys' placements refer to.
        slices: The regions of the tensors that this rank writes.
        frames: For each slice, the bytes around the slice in its file.
        tensors: Memory of each slice: the live state's local tensors, or views of local tensors.
        objects: (name, path) of each object that this rank writes.
        records: Encoded bytes of each object.
        table: The shared keys as bytes. All ranks of an SPMD job have the same table, so only one rank sends the table.
        digest: 16-byte hash of the table and of the objects' names.
        flat, paths: The state's values, and their paths in the nested state, by name.
        private: Names of the keys that only this rank has.
        holders: For each replicated key that only some ranks hold, the ranks that hold the key.
        saving: See `plan_sharded`.
        settled: Digests of all ranks when `holders` was computed. `holders` stays valid until a digest changes.
        sends_table: True if this rank must send `table` to rank 0. False if a lower rank has the same table.
    """

    rank: int
    world_size: int
    keys: list[PlannedKey]
    shared: int
    meshes: list[dict[str, Any]]
    slices: list[PlannedSlice]
    frames: list[RecordFrame]
    tensors: list[torch.Tensor]
    objects: list[tuple[str, Path]]
    records: list[bytes]
    table: bytes = field(repr=False)
    digest: bytes
    flat: Mapping[str, Any] = field(repr=False)
    paths: Mapping[str, Path] = field(repr=False)
    private: frozenset[str] = field(repr=False)
    holders: Mapping[str, tuple[int, ...]] = field(repr=False)
    saving: Collection[int] | None = field(default=None, repr=False)
    settled: tuple[bytes, ...] = field(default=(), repr=False)
    sends_table: bool = True

    file_names = r"__\d+_\d+\.distcp|\.metadata"
    """A pattern that matches the paths of all the checkpoint's files except the manifest and the commit record."""
    indexes: ClassVar[Mapping[str, bytes]] = {}

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank writes, including frames but not padding for alignment."""
        return sum(frame.length for frame in self.frames) + sum(map(len, self.records))

    @property
    def signature(self) -> bytes:
        """The 24 bytes that ranks exchange before a save: `digest`, and a hash of `settled`."""
        return self.digest + _settlement(self.settled)

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> ShardedPlan:
        """Return this plan, adjusted to the keys of the other ranks. All ranks must pass the same `signatures`.

        The ranks exchange nothing if all signatures are equal, or if no signature has changed since the previous save.
        In any other case, each rank sends the hashes of its replicated keys.
        """
        known = tuple(signature[:_DIGEST] for signature in signatures)
        if len(set(known)) == 1:
            plan = self.placed(holders={}) if self.holders else self
        # All ranks must take the same branch, so the condition uses only signatures, which include a hash of `settled`.
        elif {signature[_DIGEST:] for signature in signatures} == {_settlement(known)}:
            plan = self
        else:
            hashes = self.replicated()
            tables = all_gather(np.fromiter(hashes.values(), "<u8", len(hashes)).tobytes())
            partial = partial_holders([np.frombuffer(data, "<u8") for data in tables])
            plan = self.placed(holders={name: partial[key] for name, key in hashes.items() if key in partial})
        return replace(plan, settled=known, sends_table=known.index(self.digest) == self.rank)

    def replicated(self) -> dict[str, int]:
        """Return the keys that all ranks are assumed to have, each with a hash of its name, dtype and shape."""
        found = {}
        for name, value in self.flat.items():
            if name not in self.private and not isinstance(value, (DTensor, ShardedTensor)):
                dense = isinstance(value, torch.Tensor) and not why_not_dense(value)
                text = repr((name, value.dtype, value.shape) if dense else (name,))
                found[name] = digest_of(text.encode("utf-8", "surrogatepass"))
        return found

    def placed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        holders: Mapping[str, tuple[int, ...]],
    ) -> ShardedPlan:
        """Return this plan for a different rank, world size or `holders`."""
        rank = self.rank if rank is None else rank
        world_size = self.world_size if world_size is None else world_size
        if (self.rank, self.world_size, dict(self.holders)) == (rank, world_size, dict(holders)):
            return self
        return _laid_out(self.flat, self.paths, rank, world_size, self.private, holders, self.saving)

    def write(
        self, store: Store, tensors: Sequence[torch.Tensor] | None = None, *, sync: bool = True, workers: int = 0
    ) -> RankPart:
        """Write this rank's files `__<rank>_<n>.distcp`, and return the report for rank 0. Does not communicate.

        Args:
            tensors: Copies of the planned tensors, in the same order, to be written instead of the planned tensors.
            sync: Fsync the files and their directory.
            workers: Number of files to write at once; 0 means `default_workers`.

        Raises:
            NoSpaceError: The storage is full.
            StorageError: A write failed.
            SaveError: `tensors` are not copies of the planned tensors.
        """
        chosen = self.tensors if tensors is None else tensors
        if len(chosen) != len(self.slices):
            raise SaveError(f"expected {len(self.slices)} staged tensors, one per planned slice, found {len(chosen)}.")
        for frame, tensor, item in zip(self.frames, chosen, self.slices, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes != frame.nbytes:
                name = self.keys[item.key].name
                raise SaveError(f"{name}: expected {frame.nbytes} staged bytes, found {nbytes}.")
        prefix = f"__{self.rank}_"
        written = write_records(store, prefix, self.frames, chosen, self.records, workers=workers, sync=sync)
        written.rows["key"][: len(self.slices)] = [s.key for s in self.slices]
        boxes = np.array([n for s in self.slices for n in (*s.offsets, *s.sizes)], np.int64)
        table = self.table if self.sends_table else None
        return RankPart(self.world_size, written, boxes, self.digest, table, self.keys[self.shared :], self.objects)


def partial_holders(tables: Sequence[npt.NDArray[np.uint64]]) -> dict[int, tuple[int, ...]]:
    """Return the ranks that hold each key, by the key's hash. Omits keys that all ranks hold.

    Args:
        tables: For each rank, the hashes of the rank's replicated keys.
    """
    ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    hashes = np.concatenate(tables)
    order = np.argsort(hashes, kind="stable")
    keys, starts, counts = np.unique(hashes[order], return_index=True, return_counts=True)
    ranks, groups = ranks[order], dict[bytes, tuple[int, ...]]()
    found = {}
    for i in np.flatnonzero(counts != len(tables)).tolist():
        held = ranks[starts[i] : starts[i] + counts[i]]
        # Keys held by the same ranks share one tuple, so that a pickle of the result contains it only once.
        found[int(keys[i])] = groups.setdefault(held.tobytes(), tuple(held.tolist()))
    return found


def plan_sharded(
    state_dict: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    previous: ShardedPlan | None = None,
    private: Collection[str] = (),
    saving: Collection[int] | None = None,
) -> ShardedPlan:
    """Plan what this rank writes. Plain tensors and objects are assumed to be replicated on all ranks.

    Does not communicate. The plan keeps views of the tensors. Objects are encoded immediately.

    Args:
        state_dict: Nested or flat dict of DTensors, tensors and objects.
        previous: Plan of the previous save. Its `holders` remain valid if no rank's keys have changed.
        private: Flattened keys that only this rank has and therefore always writes, such as "rng.3.torch".
        saving: The ranks that save, numbered as in the default process group. None means all ranks of each mesh.

    Raises:
        SaveError: A tensor is a partial sum, or an object could not be loaded without running code.
    """
    values = state_dict
    if not _NO_PROTOCOL.issuperset(map(type, state_dict.values())):  # isinstance takes as long as the rest of planning
        values = {
            k: v.state_dict() if type(v) not in _NO_PROTOCOL and isinstance(v, Stateful) else v
            for k, v in state_dict.items()
        }
    flat, paths = flatten_state_dict(dict(values))
    holders = {} if previous is None or previous.rank != rank else previous.holders
    if not flat.keys() >= holders.keys():
        holders = {}
    plan = _laid_out(flat, paths, rank, world_size, frozenset(private), holders, saving)
    return plan if previous is None else replace(plan, settled=previous.settled)


def _laid_out(
    flat: Mapping[str, Any],
    paths: Mapping[str, Path],
    rank: int,
    world_size: int,
    private: frozenset[str],
    holders: Mapping[str, tuple[int, ...]],
    saving: Collection[int] | None,
) -> ShardedPlan:
    """Return this rank's plan. For each replicated key that only some ranks hold, `holders` contains these ranks."""
    keys: list[PlannedKey] = []
    slices: list[PlannedSlice] = []
    frames: list[RecordFrame] = []
    tensors: list[torch.Tensor] = []
    objects: list[tuple[str, Path]] = []
    cuts: dict[Any, _Cut | None] = {}
    meshes: dict[DeviceMesh, int] = {}
    rows = list(paths.items())
    if private:
        rows.sort(key=lambda row: row[0] in private)
    shared = 0
    shared_objects: list[str] = []
    for name, path in rows:
        value = flat[name]
        place = (0, 1) if name in private else (rank, world_size)
        if name in holders:
            place = holders[name].index(rank), len(holders[name])
        sharded = isinstance(value, (DTensor, ShardedTensor))
        if not sharded and (not isinstance(value, torch.Tensor) or why_not_dense(value)):
            if name not in private:
                shared_objects.append(name)
            if place[0] == 0:  # if ranks have different objects, the lowest rank's object is saved, as in torch
                objects.append((name, path))
            continue
        cut = _cut_of(name, value, place, cuts, meshes, saving)
        if cut is None:
            continue
        for number, (offsets, sizes) in enumerate(cut.boxes):
            mine = _mine(name, cut, offsets, sizes)
            if mine is None:
                continue
            own_offsets, own_sizes, narrow = mine
            local = _local(value, number)
            if sharded and (why := why_not_dense(local)):
                raise SaveError(f"{name}: it {why}.")
            local = without_subclass(local)
            if cut.within:
                local = part_of(local, cut.within[number], sizes)
            if local.dtype != cut.dtype:
                raise SaveError(f"{name}: it is declared {cut.dtype}, but its local part is {local.dtype}.")
            local = local if narrow is None else local.narrow(*narrow)
            if local.shape != own_sizes:
                raise SaveError(f"{name}: this rank should hold {list(own_sizes)}, found {list(local.shape)}.")
            slices.append(PlannedSlice(len(keys), own_offsets, own_sizes))
            frames.append(frame_tensor(cut.dtype_name, own_sizes))
            tensors.append(local)
        keys.append(PlannedKey(name, cut.dtype_name, cut.shape, path, cut.placement))
        shared += name not in private
    mesh_fields = [_mesh_fields(mesh) for mesh in meshes]
    table = key_table(keys[:shared], mesh_fields)
    digest = signature_of(table + "\0".join(sorted(shared_objects)).encode("utf-8", "surrogatepass"))
    return ShardedPlan(
        rank,
        world_size,
        keys,
        shared,
        mesh_fields,
        slices,
        frames,
        tensors,
        objects,
        [_encode(name, flat[name]) for name, _ in objects],
        table,
        digest,
        flat,
        paths,
        private,
        dict(holders),
        saving,
    )


def _cut_of(
    name: str,
    value: Any,
    place: tuple[int, int],
    cuts: dict[Any, _Cut | None],
    meshes: dict[DeviceMesh, int],
    saving: Collection[int] | None,
) -> _Cut | None:
    """Return how a tensor is sharded, or None if this rank is not in the tensor's mesh.

    Args:
        place: The value of `_Cut.place` if this is a plain tensor. Not used for other tensors.
        cuts: The results of earlier calls. Updated.
        meshes: The index of each mesh that a result refers to. Updated.
    """
    if isinstance(value, ShardedTensor):  # its metadata already lists its boxes
        metas = [shard.metadata for shard in value.local_shards()]
        boxes = [(tuple(meta.shard_offsets), tuple(meta.shard_sizes)) for meta in metas]
        return _Cut(value.dtype, dtype_name(value.dtype), tuple(value.size()), None, boxes, (0, 1))
    spec = value._spec if isinstance(value, DTensor) else None
    key = (value.dtype, value.shape, place) if spec is None else (value.dtype, value.shape, spec.mesh, spec.placements)
    known: _Cut | None = cuts.get(key, _UNKNOWN)
    if known is _UNKNOWN:
        if spec is None:
            shape = tuple(value.shape)
            whole = [((0,) * len(shape), shape)]
            known = _Cut(value.dtype, dtype_name(value.dtype), shape, None, whole, place)
        else:
            known = _cut_by_mesh(name, value, meshes, saving)
        cuts[key] = known
    return known


def _cut_by_mesh(
    name: str, value: DTensor, meshes: dict[DeviceMesh, int], saving: Collection[int] | None
) -> _Cut | None:
    dtype, shape, mesh, placements = value.dtype, value.shape, value.device_mesh, tuple(value.placements)
    if any(isinstance(p, Partial) for p in placements):
        raise SaveError(f"{name}: a DTensor placed {placements} is a partial sum; redistribute it before saving.")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    index = meshes.setdefault(mesh, len(meshes))
    held = _held(value)
    copies = ranks_with_copy(mesh.mesh.numpy(), coordinate, [isinstance(p, Replicate) for p in placements])
    present = [rank for rank in copies if saving is None or rank in saving]
    turn, count = present.index(mesh.get_rank()), len(present)
    if 0 in shape and any(c for c, p in zip(coordinate, placements, strict=True) if not isinstance(p, Replicate)):
        turn = count  # this rank writes nothing, because one record is enough for an empty tensor
    return _Cut(
        dtype,
        dtype_name(dtype),
        tuple(shape),
        (index, tuple(map(_text, placements))),
        [(box.offsets, box.sizes) for box, _ in held],
        (turn, count),
        [within for _, within in held] if len(held) > 1 else (),
    )


def _mine(
    name: str, cut: _Cut, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int] | None] | None:
    """Return the part of a local region that this rank writes, as (offsets, sizes, arguments for `narrow`).

    Returns None if other ranks write the whole region.
    """
    number, count = cut.place
    if 0 in sizes:
        return (offsets, sizes, None) if 0 in cut.shape and number == 0 else None
    if count == 1:
        return offsets, sizes, None
    turn = crc32(name.encode("utf-8", "surrogatepass")) % count  # spreads small tensors over the ranks
    dim = next((d for d, n in enumerate(sizes) if n > 1), 0)
    nbytes = math.prod(sizes) * cut.dtype.itemsize
    parts = min(count, nbytes // _SPLIT, sizes[dim] if sizes else 1)
    if parts <= 1:
        return (offsets, sizes, None) if number == turn else None
    part = (number - turn) % count
    if part >= parts:
        return None
    start, stop = part * sizes[dim] // parts, (part + 1) * sizes[dim] // parts
    own_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
    own_sizes = (*sizes[:dim], stop - start, *sizes[dim + 1 :])
    return own_offsets, own_sizes, (dim, start, stop - start)


@lru_cache(maxsize=65536)
def local_box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes, offsets) of this rank's part of a DTensor."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def _held(value: DTensor) -> list[tuple[Box, tuple[int, ...]]]:
    """Return this rank's regions of a DTensor, each with the region's offsets in the local tensor.

    A strided shard consists of several regions if its rows are not adjacent.
    """
    mesh, placements, shape = value.device_mesh, tuple(value.placements), tuple(value.shape)
    if any(hasattr(placement, "split_factor") for placement in placements):
        records = [placement_record(placement) for placement in placements]
        local = tuple(value._local_tensor.shape)
        parts = local_parts(shape, tuple(mesh.shape), mesh.get_coordinate() or (), records, local_shape=local)
        return [(part.box, part.local_offsets) for part in parts]
    sizes, offsets = local_box(value.shape, mesh, placements)
    return [(Box(offsets, sizes), (0,) * len(sizes))]


def placement_record(placement: Any) -> PlacementRecord:
    """Convert a torch placement to a PlacementRecord."""
    if placement.is_replicate():
        return PlacementRecord("replicate")
    split_factor = getattr(placement, "split_factor", None)
    if split_factor is not None:
        return PlacementRecord("strided_shard", placement.dim, int(split_factor))
    return PlacementRecord("shard", placement.dim) if placement.is_shard() else PlacementRecord("partial")


def joined_mesh(what: str, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dimensions of all `meshes`, in the order given. All must be slices of the same mesh.

    Args:
        what: Description of the tensor that is placed on the meshes, for errors.

    Raises:
        UsageError: The meshes are not slices of the same mesh, or have a dimension in common.
    """
    if len(meshes) == 1:
        return meshes[0]
    try:
        return DeviceMesh._concatenate(list(meshes))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UsageError(
            f"{what} is sharded or declared over the meshes {', '.join(str(mesh.mesh_dim_names) for mesh in meshes)}, "
            f"which cannot be joined ({error}). A dimension may occur only once. Make one mesh with all dimensions, "
            "and use its slices: init_device_mesh(..., mesh_dim_names=('dp', 'ep'))['ep']."
        ) from error


def _text(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    split = getattr(placement, "split_factor", None)
    dim = placement.dim  # type: ignore[attr-defined]
    return f"S({dim})" if split is None else f"SS({dim},{split})"


def _mesh_fields(mesh: DeviceMesh) -> dict[str, Any]:
    ranks = mesh.mesh.flatten().tolist()
    names = list(mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)])
    fields: dict[str, Any] = {"shape": list(mesh.mesh.shape), "names": names}
    return fields if ranks == list(range(len(ranks))) else {**fields, "ranks": ranks}


def _settlement(digests: Sequence[bytes]) -> bytes:
    return signature_of(b"".join(digests))[:8] if digests else bytes(8)


# --- what is in memory


def local_boxes(value: Any) -> list[tuple[Box, torch.Tensor]]:
    """Return this rank's regions of a tensor, each with a detached view of the region's memory."""
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []
        local, held = _local(value, 0), _held(value)
        return [(box, part_of(local, within, box.sizes) if len(held) > 1 else local) for box, within in held]
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        metas = [shard.metadata for shard in shards]
        boxes = [Box(tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in metas]
        return list(zip(boxes, (shard.tensor.detach() for shard in shards), strict=True))
    return [(Box.whole(tuple(value.shape)), _local(value, 0))]


def _local(value: Any, index: int) -> torch.Tensor:
    if isinstance(value, DTensor):
        local = value._local_tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            local = value.to_local()
    elif isinstance(value, ShardedTensor):
        local = value.local_shards()[index].tensor
    else:
        local = value
    if type(local) not in _PLAIN:
        if is_lazy(local):
            return local
        local = own_memory(local)
    return local.detach() if local.requires_grad else local


def _encode(name: str, value: Any) -> bytes:
    """Encode an object as a torch.save record.

    Raises:
        SaveError: A load could not read the record.
    """
    if is_plain(value):
        return frame_object(value)
    if isinstance(value, torch.Tensor):
        return whole_record(name, value)
    return dump_plain(value, name=name, advice="or allow its class with torch.serialization.add_safe_globals.")


def whole_record(name: str, tensor: torch.Tensor) -> bytes:
    """Return the torch.save record of a tensor that is not dense.

    The tensor must be sparse, quantized, or a tensor subclass that torch's weights_only loader can load.

    Raises:
        SaveError: No load could restore the tensor.
    """
    by_parts = hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested  # its class can rebuild it
    if not by_parts and not is_sparse_or_quantized(tensor):
        raise SaveError(f"{name}: it {why_not_dense(tensor)}.")
    advice = "or allow its class with torch.serialization.add_safe_globals."
    return dump_plain(tensor.detach() if tensor.is_cpu else tensor.detach().cpu(), name=name, advice=advice)
