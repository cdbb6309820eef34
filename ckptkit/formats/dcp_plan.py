"""Who writes which part of a training state. Each rank works it out alone; nothing is written here.

A replica (plain tensors, HSDP) is written once: small ones by one of their holders, chosen by the name,
large ones cut into as many pieces as there are holders, so that the bytes are spread evenly by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ckptkit.catalog.box import Box
from ckptkit.errors import SaveError
from ckptkit.formats.dcp_bytes import is_dense
from ckptkit.formats.dcp_encode import frame_object, is_plain
from ckptkit.formats.dcp_layout import Layout, Path, PlannedKey, PlannedSlice, Source, local_box
from ckptkit.formats.dcp_same import Flattened, Kinds, Looks, Places, flat_values
from ckptkit.formats.torch_bytes import dump_plain

__all__ = ["PlannedKey", "PlannedSlice", "ShardedPlan", "local_boxes", "plan_sharded"]

_DIGEST = 16
_NO_PROTOCOL = frozenset((torch.Tensor, torch.nn.Parameter, DTensor, dict))
Flat = dict[str, Any]
_shape_of, _sizes_of, _dtype_of_meta = attrgetter("shape"), itemgetter(2), itemgetter(2)


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """What this rank writes.

    Attributes:
        tensors: The memory of each slice: the local tensors of the live state, or views of them. The very same ones as
            in the plan before where it is the same memory, others where it is not.
        records: The encoded bytes of each object.
        flat, paths: The state, and where each of its values stands.
        kinds: What the values of `flat` are.
        reused: The layout is that of `previous`.
    """

    rank: int
    world_size: int
    tensors: list[torch.Tensor]
    records: list[bytes]
    reused: bool
    kinds: Kinds = field(repr=False)
    flat: Flat = field(repr=False)
    paths: Sequence[Path] = field(repr=False)
    private: frozenset[str] = field(repr=False)
    places: Places = field(repr=False)
    layout: Layout = field(repr=False)
    holders: Mapping[str, tuple[int, ...]] = field(repr=False)
    settled: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def keys(self) -> list[PlannedKey]:
        """The tensors of this rank's state, the private ones last."""
        return self.layout.keys

    @property
    def shared(self) -> int:
        """How many keys are not private."""
        return self.layout.shared

    @property
    def slices(self) -> list[PlannedSlice]:
        """What this rank writes of them."""
        return self.layout.slices

    @property
    def objects(self) -> list[tuple[str, Path]]:
        """(name, path) of each object this rank writes."""
        return self.layout.objects

    @property
    def meshes(self) -> list[dict[str, Any]]:
        return self.layout.meshes

    @property
    def table(self) -> bytes:
        """The shared keys as bytes: equal on all ranks of an SPMD job, so that one of them sends it."""
        return self.layout.table

    @property
    def digest(self) -> bytes:
        """16 bytes; equal on all ranks whose tables and objects are equal."""
        return self.layout.digest

    @property
    def nbytes(self) -> int:
        """Bytes this rank writes, frames included, alignment excluded."""
        return self.layout.framed + sum(map(len, self.records))

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
        hashes = self.replicated()
        mine = np.fromiter(hashes.values(), np.uint64, len(hashes))
        tables = [np.frombuffer(data, np.uint64) for data in all_gather(mine.astype("<u8").tobytes())]
        holders: dict[str, tuple[int, ...]] = {}
        present = [np.isin(mine, table) for table in tables]
        for i, name in enumerate(hashes):
            ranks = tuple(rank for rank, found in enumerate(present) if found[i])
            if len(ranks) != self.world_size:
                holders[name] = ranks
        return _assigned(self, holders, known)

    def replicated(self) -> dict[str, int]:
        """Return the keys that every rank is taken to hold, and a hash of what each is, of another shape another."""
        named = zip(self.flat.items(), self.kinds.numbers, strict=True)
        return {
            name: _hash(repr((name, *self.kinds.looks[number])))
            for (name, value), number in named
            if name not in self.private and not isinstance(value, (DTensor, ShardedTensor))
        }

    def placed(self, *, rank: int, world_size: int, holders: Mapping[str, tuple[int, ...]]) -> ShardedPlan:
        """Return the plan of this rank of so many, given which ranks hold the replicated keys that not all do."""
        if (self.rank, self.world_size, dict(self.holders)) == (rank, world_size, dict(holders)):
            return self
        return _assigned(replace(self, rank=rank, world_size=world_size), holders, ())


def plan_sharded(
    state_dict: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    previous: ShardedPlan | None = None,
    private: Collection[str] = (),
    copied: bool = False,
) -> ShardedPlan:
    """Return what this rank writes of a state, taking plain tensors and objects as replicated on all ranks.

    Nothing is communicated. Objects are encoded at once: the plan keeps a snapshot of them, but views of the
    tensors.

    Args:
        state_dict: Nested or flat: DTensors, tensors, objects.
        previous: The plan of the save before; its layout is taken over where keys, shapes, dtypes, meshes and
            placements are the same.
        private: Flattened keys that only this rank has ("rng.3.torch"): it writes them whatever others hold.
        copied: `Places.moved` may leave to the copy of the tensors, and to `confirm`, what they notice.

    Raises:
        SaveError: A tensor is a partial sum, or an object would not load without running code.
    """
    values = state_dict
    if not _NO_PROTOCOL.issuperset(map(type, state_dict.values())):  # asking takes as long as all else about a tensor
        values = {
            k: v.state_dict() if type(v) not in _NO_PROTOCOL and isinstance(v, Stateful) else v
            for k, v in state_dict.items()
        }
    own = frozenset(private)
    fresh = None if previous is None or own != previous.private else _refreshed(previous, values, copied)
    if fresh is not None:
        return fresh
    found = Flattened.of(values)
    if found is None:
        flat, paths = flatten_state_dict(dict(values))
        found = Flattened(flat, list(paths.values()))
    places = Places.of(found.values, spots=False)
    empty = ShardedPlan(
        rank=rank,
        world_size=world_size,
        tensors=[],
        records=[],
        reused=False,
        kinds=Kinds.of(places, list(found.values.values()), _looks_of),
        flat=found.values,
        paths=found.paths,
        private=own,
        places=places,
        layout=Layout(rank, world_size, own, {}),
        holders={},
    )
    return _assigned(empty, {}, ())


def _refreshed(previous: ShardedPlan, values: Mapping[str, Any], copied: bool) -> ShardedPlan | None:
    """Return the plan of the save before with this state's memory, None where the structure is another."""
    flat = flat_values(values)
    moved = None if flat is None else previous.places.moved(flat, copied=copied)
    if flat is None or moved is None:
        return None
    names = previous.places.names
    if any(_looks_of(flat[names[row]]) != previous.kinds.look(row) for row in moved):
        return None
    places = previous.places.after(flat, moved)
    pieces = [piece for row in moved for piece in previous.layout.rows.get(names[row], ())]
    return _filled(replace(previous, flat=flat, places=places, reused=True), pieces)


# --- what the state looks like


def _looks_of(value: Any) -> Looks:
    if isinstance(value, DTensor):
        spec = value._spec
        return (value.dtype, value.shape, spec.mesh, spec.placements)
    if isinstance(value, ShardedTensor):
        boxes = tuple((*s.metadata.shard_offsets, *s.metadata.shard_sizes) for s in value.local_shards())
        return (value.dtype, value.size(), boxes)
    if isinstance(value, torch.Tensor) and is_dense(value):
        return (value.dtype, value.shape)
    return ()


def _settlement(digests: Sequence[bytes]) -> bytes:
    return xxhash.xxh3_64_digest(b"".join(digests)) if digests else bytes(8)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


# --- who writes what


def _assigned(plan: ShardedPlan, holders: Mapping[str, tuple[int, ...]], settled: tuple[bytes, ...]) -> ShardedPlan:
    """Lay out what this rank writes, given the replicated keys that not all ranks hold."""
    layout = Layout(plan.rank, plan.world_size, plan.private, holders)
    layout.add(plan.places.names, plan.paths, list(plan.flat.values()), plan.kinds)
    tensors, left = _memory(plan.places, layout)
    made = _filled(replace(plan, layout=layout, holders=dict(holders), settled=settled, tensors=tensors), left)
    return replace(made, places=made.places.viewed(made.tensors))


# --- what is in memory


def local_boxes(value: Any) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor that this rank holds, each with its memory (detached, shared)."""
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []
        sizes, offsets = local_box(value.shape, value.device_mesh, tuple(value.placements))
        return [(Box(offsets, sizes), _local(value, 0))]
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        metas = [shard.metadata for shard in shards]
        boxes = [Box(tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in metas]
        return list(zip(boxes, (shard.tensor.detach() for shard in shards), strict=True))
    return [(Box.whole(tuple(value.shape)), _local(value, 0))]


def _memory(places: Places, layout: Layout) -> tuple[list[torch.Tensor], list[int]]:
    """Return the memory of each piece, as far as it can be told of many at once; and which are left to look at."""
    tensors = [torch.empty(0)] * len(layout.pieces)
    left: list[int] = []
    cut, stop = len(places.dtensors), 0
    if list(map(_dtype_of_meta, places.columns[2])) != list(places.columns[4][:cut]):
        return tensors, list(range(len(tensors)))  # one of them is refused
    local = chain(places.memory[:cut], map(torch.Tensor.detach, places.memory[cut:]))
    memory = dict(zip(places.rows, local, strict=True))
    for first, rows in layout.runs:
        left += range(stop, first)
        stop = first + len(rows)
        if all(map(memory.__contains__, rows)):
            found = list(map(memory.__getitem__, rows))
            if list(map(_shape_of, found)) == list(map(_sizes_of, layout.pieces[first:stop])):
                tensors[first:stop] = found
                continue
        left += range(first, stop)
    left += range(stop, len(tensors))
    return tensors, left


def _filled(plan: ShardedPlan, rows: Sequence[int]) -> ShardedPlan:
    """Point these slices of the plan at the memory of its state, and encode its objects."""
    tensors, pieces, memory = list(plan.tensors), plan.layout.pieces, dict[Source, torch.Tensor]()
    for row in rows:
        _, _, sizes, source, narrow = pieces[row]
        local = memory.get(source)
        if local is None:
            local = memory[source] = _dense(source[0], plan.flat[source[0]], source[1])
        tensors[row] = local = local if narrow is None else local.narrow(*narrow)
        if local.shape != sizes:
            raise SaveError(f"{source[0]}: this rank holds {list(local.shape)}, its placement says {list(sizes)}.")
    records = [_encode(name, plan.flat[name]) for name, _ in plan.layout.objects]
    return replace(plan, tensors=tensors, records=records)


def _local(value: Any, index: int) -> torch.Tensor:
    if isinstance(value, DTensor):
        local = value._local_tensor
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            local = value.to_local()
    elif isinstance(value, ShardedTensor):
        local = value.local_shards()[index].tensor
    else:
        local = value
    return local.detach()


def _dense(name: str, value: Any, index: int) -> torch.Tensor:
    local = _local(value, index)
    if not is_dense(local):
        raise SaveError(
            f"{name}: its shards are {type(local).__name__}, which are not plain memory, so that no part of them could "
            "be loaded alone. Save their inner tensors instead."
        )
    if local.is_meta:
        raise SaveError(f"{name}: the tensor is on the meta device: it has no values to save.")
    if local.dtype != value.dtype:
        raise SaveError(f"{name}: it says that it is {value.dtype}, this rank holds {local.dtype}.")
    return local


def _encode(name: str, value: Any) -> bytes:
    """The record of an object: as torch.save frames it, and of plain data that our reader takes."""
    if is_plain(value):
        return frame_object(value)
    return dump_plain(value, name=name, advice="or allow its class with torch.serialization.add_safe_globals.")
