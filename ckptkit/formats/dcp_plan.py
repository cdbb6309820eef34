"""Who writes which part of a training state. Each rank works it out alone; nothing is written here.

A replica (plain tensors, HSDP) is written once: small ones by one of their holders, chosen by the name,
large ones cut into as many pieces as there are holders, so that the bytes are spread evenly by construction.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckptkit.catalog.box import Box
from ckptkit.errors import SaveError
from ckptkit.formats.columns import pack, pack_texts
from ckptkit.formats.dcp_bytes import is_dense
from ckptkit.formats.dcp_encode import frame_object, frame_tensor, is_plain
from ckptkit.formats.dcp_same import Place, flat_values, moved, place_of
from ckptkit.formats.torch_bytes import dump_object

__all__ = ["PlannedKey", "PlannedSlice", "ShardedPlan", "local_boxes", "plan_sharded"]

_DIGEST = 16
_SPLIT = 1 << 20  # below, a replica is not worth cutting up
Flat = dict[str, Any]
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class PlannedKey:
    """One tensor of the state, as every rank that has it sees it.

    Attributes:
        placement: (mesh index in the plan, one text a mesh dimension); None for plain tensors.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    placement: tuple[int, tuple[str, ...]] | None

    def fields(self) -> list[Any]:
        """Return everything but the name, as JSON."""
        return [self.dtype, self.shape, self.path, self.placement]


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """One box this rank writes.

    Attributes:
        key: Index of the tensor in the plan.
        source: Index of the local piece of memory it is a part of; `narrow` cuts it out: (dim, start, length).
    """

    key: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: tuple[str, int]
    narrow: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """What this rank writes.

    Attributes:
        keys: The tensors of this rank's state, the private ones last.
        shared: How many of them are not private.
        slices: What this rank writes of them.
        tensors: The memory of each slice: detached views of the live state.
        objects: (name, path) of each object this rank writes; `records` are their encoded bytes.
        table: The shared keys as bytes: equal on all ranks of an SPMD job, so that one of them sends it.
        digest: 16 bytes; equal on all ranks whose tables and objects are equal.
        framed: Bytes of the records of all slices, alignment excluded.
        reused: The layout is that of `previous`.
    """

    rank: int
    world_size: int
    keys: list[PlannedKey]
    shared: int
    slices: list[PlannedSlice]
    tensors: list[torch.Tensor]
    objects: list[tuple[str, Path]]
    records: list[bytes]
    meshes: list[dict[str, Any]]
    table: bytes = field(repr=False)
    digest: bytes
    framed: int
    reused: bool
    structure: tuple[Any, ...] = field(repr=False)
    flat: Flat = field(repr=False)
    paths: Mapping[str, Path] = field(repr=False)
    private: frozenset[str] = field(repr=False)
    holders: Mapping[str, tuple[int, ...]] = field(repr=False)
    settled: tuple[bytes, ...] = field(default=(), repr=False)
    places: list[Place] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes this rank writes, frames included, alignment excluded."""
        return self.framed + sum(map(len, self.records))

    @property
    def signature(self) -> bytes:
        """24 bytes to exchange before a save: `digest`, and what this rank settled last."""
        return self.digest + _settlement(self.settled)

    @property
    def sends_table(self) -> bool:
        """Whether this rank is the lowest one with its table: the others only name it."""
        return not self.settled or self.settled.index(self.digest) == self.rank

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> ShardedPlan:
        """Return the plan that fits what the other ranks hold. All ranks call it, with the same signatures.

        Where all signatures are equal, or those of the last save, nothing is exchanged; else every rank sends the
        hashes of its replicated keys once.
        """
        known = tuple(signature[:_DIGEST] for signature in signatures)
        if len(set(known)) == 1:
            return _assigned(self, {}, known) if self.holders else replace(self, settled=known)
        # Every rank must decide alike: what each settled last is in its signature, not only in its memory.
        if {signature[_DIGEST:] for signature in signatures} == {_settlement(known)}:
            return self
        shapes = {item[0]: repr(item) for item in self.structure}
        hashes = {name: _hash(shapes[name]) for name in _replicated(self)}  # another shape is another tensor
        mine = np.fromiter(hashes.values(), np.uint64, len(hashes))
        tables = [np.frombuffer(data, np.uint64) for data in all_gather(mine.astype("<u8").tobytes())]
        holders: dict[str, tuple[int, ...]] = {}
        present = [np.isin(mine, table) for table in tables]
        for i, name in enumerate(hashes):
            ranks = tuple(rank for rank, found in enumerate(present) if found[i])
            if len(ranks) != self.world_size:
                holders[name] = ranks
        return _assigned(self, holders, known)


def plan_sharded(
    state_dict: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    previous: ShardedPlan | None = None,
    private: Collection[str] = (),
) -> ShardedPlan:
    """Return what this rank writes of a state, taking plain tensors and objects as replicated on all ranks.

    Nothing is communicated. Objects are encoded at once: the plan keeps a snapshot of them, but views of the
    tensors.

    Args:
        state_dict: Nested or flat: DTensors, tensors, objects.
        previous: The plan of the save before; its layout is taken over where keys, shapes, dtypes, meshes and
            placements are the same.
        private: Flattened keys that only this rank has ("rng.3.torch"): it writes them whatever others hold.

    Raises:
        SaveError: A tensor is a partial sum, or an object would not load without running code.
    """
    # A tensor is told first: asking whether it follows a protocol takes as long as all else about it.
    plain = (torch.Tensor, dict)
    values = {
        k: v.state_dict() if not isinstance(v, plain) and isinstance(v, Stateful) else v for k, v in state_dict.items()
    }
    own = frozenset(private)
    fresh = None if previous is None or own != previous.private else _refreshed(previous, values)
    if fresh is not None:
        return fresh
    flat, paths = flatten_state_dict(values)
    structure = tuple(_shape_of(name, value) for name, value in flat.items())
    empty = ShardedPlan(
        rank=rank,
        world_size=world_size,
        keys=[],
        shared=0,
        slices=[],
        tensors=[],
        objects=[],
        records=[],
        meshes=[],
        table=b"",
        digest=b"",
        framed=0,
        reused=False,
        structure=structure,
        flat=flat,
        paths=paths,
        private=own,
        holders={},
    )
    return _assigned(empty, {}, ())


def _refreshed(previous: ShardedPlan, values: Mapping[str, Any]) -> ShardedPlan | None:
    """Return the plan of the save before with this state's memory, None where the structure is another."""
    flat = flat_values(values)
    names = None if flat is None else moved(flat, previous.flat, previous.places)
    if flat is None or names is None:
        return None
    shapes = dict(zip(flat, previous.structure, strict=True)) if names else {}
    if any(_shape_of(name, flat[name]) != shapes[name] for name in names):
        return None
    return _filled(replace(previous, flat=flat, reused=True), names)


# --- what the state looks like


def _shape_of(name: str, value: Any) -> tuple[Any, ...]:
    """What must stay the same for a plan to be reused."""
    if isinstance(value, DTensor):
        spec = value._spec
        return (name, value.dtype, value.shape, spec.mesh, spec.placements)
    if isinstance(value, ShardedTensor):
        boxes = tuple((*s.metadata.shard_offsets, *s.metadata.shard_sizes) for s in value.local_shards())
        return (name, value.dtype, value.size(), boxes)
    if isinstance(value, torch.Tensor) and is_dense(value):
        return (name, value.dtype, value.shape)
    return (name,)


def _replicated(plan: ShardedPlan) -> list[str]:
    return [n for n, v in plan.flat.items() if n not in plan.private and not isinstance(v, (DTensor, ShardedTensor))]


def _table(keys: Sequence[PlannedKey], meshes: list[dict[str, Any]]) -> bytes:
    names = pack_texts([key.name for key in keys], "names")
    return pack(names, {"keys": [key.fields() for key in keys], "meshes": meshes})


def _digest(plan: ShardedPlan, table: bytes) -> bytes:
    tensors = {item[0] for item in plan.structure if len(item) > 1}
    objects = sorted(name for name in plan.flat if name not in tensors and name not in plan.private)
    state = xxhash.xxh3_128(table)
    state.update("\0".join(objects).encode("utf-8", "surrogatepass"))
    return state.digest()


def _settlement(digests: Sequence[bytes]) -> bytes:
    return xxhash.xxh3_64_digest(b"".join(digests)) if digests else bytes(8)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


# --- who writes what


def _assigned(plan: ShardedPlan, holders: Mapping[str, tuple[int, ...]], settled: tuple[bytes, ...]) -> ShardedPlan:
    """Lay out what this rank writes, given the replicated keys that not all ranks hold."""
    made = _Layout(plan, holders)
    for name in sorted(plan.flat, key=lambda name: name in plan.private):  # the order within both is kept
        made.add(name, plan.flat[name])
    meshes = [_mesh_fields(mesh) for mesh in made.meshes]
    shared = sum(key.name not in plan.private for key in made.keys)
    table = _table(made.keys[:shared], meshes)
    laid = replace(
        plan,
        keys=made.keys,
        shared=shared,
        table=table,
        digest=_digest(plan, table),
        slices=made.slices,
        objects=made.objects,
        meshes=meshes,
        holders=dict(holders),
        settled=settled,
        framed=sum(frame_tensor(made.keys[s.key].dtype, s.sizes).length for s in made.slices),
        tensors=[torch.empty(0)] * len(made.slices),
        records=[],
        places=[()] * len(plan.flat),
    )
    return _filled(laid, list(plan.flat))


class _Layout:
    """Collects the keys of a state, and the slices and objects this rank writes."""

    def __init__(self, plan: ShardedPlan, holders: Mapping[str, tuple[int, ...]]) -> None:
        self.plan = plan
        self.holders = holders
        self.keys: list[PlannedKey] = []
        self.slices: list[PlannedSlice] = []
        self.objects: list[tuple[str, Path]] = []
        self.meshes: dict[DeviceMesh, int] = {}

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, DTensor):
            self._add_dtensor(name, value)
        elif isinstance(value, ShardedTensor):
            self._key(name, value.dtype, value.size(), None)
            for i, shard in enumerate(value.local_shards()):
                meta = shard.metadata
                self._slice(name, (name, i), tuple(meta.shard_offsets), tuple(meta.shard_sizes), (0, 1))
        elif isinstance(value, torch.Tensor) and is_dense(value):
            self._key(name, value.dtype, value.shape, None)
            self._slice(name, (name, 0), (0,) * value.dim(), tuple(value.shape), self._place(name))
        elif self._place(name)[0] == 0:  # of differing objects the lowest rank's wins, as with torch
            self.objects.append((name, self.plan.paths[name]))

    def _place(self, name: str) -> tuple[int, int]:
        """(this rank's number among the holders of a replicated key, how many there are)."""
        if name in self.plan.private:
            return 0, 1
        ranks = self.holders.get(name)
        if ranks is None:
            return self.plan.rank, self.plan.world_size
        return ranks.index(self.plan.rank), len(ranks)

    def _add_dtensor(self, name: str, value: DTensor) -> None:
        spec = value._spec
        mesh, placements = spec.mesh, spec.placements
        if any(isinstance(p, Partial) for p in placements):
            raise SaveError(f"{name}: a DTensor placed {placements} is a partial sum; redistribute it before saving.")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return
        index = self.meshes.setdefault(mesh, len(self.meshes))
        self._key(name, value.dtype, value.shape, (index, tuple(map(_placement_text, placements))))
        sizes, offsets = _local_box(value.shape, mesh, placements)
        number, count = 0, 1
        for dim, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                number = number * mesh.size(dim) + coordinate[dim]
                count *= mesh.size(dim)
        if 0 in value.shape and any(
            c for c, p in zip(coordinate, placements, strict=True) if not isinstance(p, Replicate)
        ):
            return  # an empty tensor is recorded once
        self._slice(name, (name, 0), offsets, sizes, (number, count))

    def _key(self, name: str, dtype: torch.dtype, shape: Any, placement: tuple[int, tuple[str, ...]] | None) -> None:
        self.keys.append(PlannedKey(name, self.plan.paths[name], _dtype_name(dtype), tuple(shape), placement))

    def _slice(
        self,
        name: str,
        source: tuple[str, int],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        place: tuple[int, int],
    ) -> None:
        """Add the pieces of a local box that holder `place[0]` of `place[1]` writes."""
        key, (number, count) = len(self.keys) - 1, place
        whole = PlannedSlice(key, offsets, sizes, source, None)
        if 0 in sizes:
            if 0 in self.keys[key].shape and number == 0:
                self.slices.append(whole)
            return
        turn = zlib.crc32(name.encode("utf-8", "surrogatepass")) % count
        nbytes = math.prod(sizes) * getattr(torch, self.keys[key].dtype).itemsize
        dim = next((d for d, n in enumerate(sizes) if n > 1), 0)
        parts = min(count, nbytes // _SPLIT, sizes[dim] if sizes else 1)
        if parts <= 1:
            if number == turn:
                self.slices.append(whole)
            return
        part = (number - turn) % count
        if part < parts:
            start, stop = part * sizes[dim] // parts, (part + 1) * sizes[dim] // parts
            cut_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            cut_sizes = (*sizes[:dim], stop - start, *sizes[dim + 1 :])
            self.slices.append(PlannedSlice(key, cut_offsets, cut_sizes, source, (dim, start, stop - start)))


@lru_cache(maxsize=65536)
def _local_box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def _placement_text(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    split = getattr(placement, "split_factor", None)
    dim = placement.dim  # type: ignore[attr-defined]
    return f"S({dim})" if split is None else f"SS({dim},{split})"


@lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mesh_fields(mesh: DeviceMesh) -> dict[str, Any]:
    ranks = mesh.mesh.flatten().tolist()
    names = list(mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)])
    fields: dict[str, Any] = {"shape": list(mesh.mesh.shape), "names": names}
    return fields if ranks == list(range(len(ranks))) else {**fields, "ranks": ranks}


# --- what is in memory


def local_boxes(value: Any) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor that this rank holds, each with its memory (detached, shared)."""
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []
        sizes, offsets = _local_box(value.shape, value.device_mesh, tuple(value.placements))
        return [(Box(offsets, sizes), _local(value, 0))]
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        metas = [shard.metadata for shard in shards]
        boxes = [Box(tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in metas]
        return list(zip(boxes, (shard.tensor.detach() for shard in shards), strict=True))
    return [(Box.whole(tuple(value.shape)), _local(value, 0))]


def _filled(plan: ShardedPlan, names: Sequence[str]) -> ShardedPlan:
    """Point the plan at the memory of these keys of its state, and encode its objects."""
    wanted, tensors, places = set(names), list(plan.tensors), list(plan.places)
    memory: dict[tuple[str, int], torch.Tensor] = {}
    rows = [row for row, item in enumerate(plan.slices) if item.source[0] in wanted] if wanted else []
    for name, index in dict.fromkeys(plan.slices[row].source for row in rows):
        memory[name, index] = local = _local(plan.flat[name], index)
        if not is_dense(local):
            raise SaveError(
                f"{name}: its shards are {type(local).__name__}, which are not plain memory, so that no part of them "
                "could be loaded alone. Save their inner tensors instead."
            )
    for row in rows:
        item = plan.slices[row]
        tensors[row] = piece = _cut(memory[item.source], item.narrow)
        if tuple(piece.shape) != item.sizes:
            raise SaveError(
                f"{plan.keys[item.key].name}: this rank holds {list(piece.shape)}, its placement says "
                f"{list(item.sizes)}."
            )
    if wanted:
        places = [place_of(v) if n in wanted else p for (n, v), p in zip(plan.flat.items(), places, strict=True)]
    records = [_encode(name, plan.flat[name]) for name, _ in plan.objects]
    return replace(plan, tensors=tensors, records=records, places=places)


def _local(value: Any, index: int) -> torch.Tensor:
    if isinstance(value, DTensor):
        local = value._local_tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            local = value.to_local()
    elif isinstance(value, ShardedTensor):
        local = value.local_shards()[index].tensor
    else:
        local = value
    return local.detach() if local.requires_grad else local


def _cut(tensor: torch.Tensor, narrow: tuple[int, int, int] | None) -> torch.Tensor:
    return tensor if narrow is None else tensor.narrow(*narrow)


def _encode(name: str, value: Any) -> bytes:
    """The record of an object: as torch.save frames it, and loadable with weights_only=True."""
    if is_plain(value):
        return frame_object(value)
    return dump_object(value, name=name, advice="or allow its class with torch.serialization.add_safe_globals.")
