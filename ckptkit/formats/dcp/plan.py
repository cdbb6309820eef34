"""Who writes which part of a training state. Each rank works it out alone; nothing is written here.

A replica (plain tensors, HSDP) is written once: small ones by one of their holders, chosen by the name,
large ones cut into as many pieces as there are holders, so that the bytes are spread evenly by construction.
"""

from __future__ import annotations

import json
import marshal
import math
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, compress, count, repeat
from operator import attrgetter, itemgetter
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
from torch.nn.parameter import is_lazy

from ckptkit.catalog.box import Box
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.host_bytes import is_dense, is_sparse_or_quantized, why_not_dense, without_subclass
from ckptkit.formats.dcp.records import frame_object, frame_tensor, is_plain
from ckptkit.formats.dcp.unchanged import Flattened, Kinds, Looks, Places, flat_values
from ckptkit.formats.own.columns import pack, pack_texts
from ckptkit.formats.pickles.exact import dump_plain

__all__ = [
    "PlannedKey",
    "PlannedSlice",
    "ShardedPlan",
    "local_boxes",
    "plan_sharded",
    "whole_record",
    "Layout",
    "Path",
    "Piece",
    "Source",
    "local_box",
]

# Which boxes of which tensors a rank writes, worked out once for all tensors that are cut alike.
#
# What only the files need (records of each key and slice, the table of keys as bytes) is put together when it is asked
# for: a training that waits for its snapshot does not wait for that.


_SPLIT = 1 << 20  # below, a replica is not worth cutting up
Path = tuple[str | int, ...]
Source = tuple[str, int]
"""A local piece of memory: the name of its tensor, and which of that one's shards it is."""
Piece = tuple[int, tuple[int, ...], tuple[int, ...], Source, tuple[int, int, int] | None]
"""The fields of a `PlannedSlice`."""
_offsets_of, _layout_sizes, _is_whole = map(operator.attrgetter, ("offsets", "sizes", "whole"))


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
    source: Source
    narrow: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is the same of all tensors of one dtype and shape that are cut alike.

    Attributes:
        place: (this rank's number among the holders of its part, how many there are).
        whole: This rank writes all that it holds, for nobody else does.
        uncut: One of the holders writes it all: there is something of it, and too little to cut.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    placement: tuple[int, tuple[str, ...]] | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, int]
    whole: bool
    uncut: bool


class Layout:
    """The keys of a state, the boxes that this rank writes of them, and its objects.

    Attributes:
        objects: (name, path) of each object this rank writes.
        pieces: The fields of each slice.
        runs: (first piece, values of the state): each of these is one piece, all of its local part.
        shared: How many keys are not private.
    """

    def __init__(
        self, rank: int, world_size: int, private: frozenset[str], holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._private, self._holders = private, holders
        self._cuts: dict[Any, _Cut | None] = {}
        self._meshes: dict[DeviceMesh, int] = {}
        self._keys: list[tuple[str, Path, _Cut]] = []
        self._shared_objects: list[str] = []
        self.objects: list[tuple[str, Path]] = []
        self.pieces: list[Piece] = []
        self.runs: list[tuple[int, Sequence[int]]] = []
        self.shared = 0

    def add(self, names: Sequence[str], paths: Sequence[Path], values: Sequence[Any], kinds: Kinds) -> None:
        """Add the values of a state, the private ones last."""
        private = list(compress(count(), map(self._private.__contains__, names))) if self._private else []
        cuts: list[_Cut | None] = [None, *self._uncut(names, values, kinds, private)]
        rows = [*compress(count(), map(operator.is_, cuts[1:], repeat(None))), len(names)]
        hidden, start = set(private), 0
        for row in rows:
            if start < row:
                self._add_uncut(start, names[start:row], paths[start:row], cuts[start + 1 : row + 1])
            if row < len(names) and row not in hidden:
                self._add(names[row], paths[row], values[row], kinds.look(row))
            start = row + 1
        self.shared = len(self._keys)
        for row in private:
            self._add(names[row], paths[row], values[row], kinds.look(row))

    def _uncut(
        self, names: Sequence[str], values: Sequence[Any], kinds: Kinds, private: Sequence[int]
    ) -> list[_Cut | None]:
        """Return how each value is cut that one rank writes whole, told by its kind alone; None of others."""
        numbers = kinds.numbers.copy()
        for row in private:
            numbers[row] = -1
        for row in compress(count(), map(self._holders.__contains__, names)) if self._holders else ():
            numbers[row] = -1
        cuts: dict[int, _Cut | None] = {-1: None}
        first = dict(zip(reversed(numbers), reversed(range(len(numbers))), strict=True))
        for row in sorted(first.values()):
            looks = kinds.look(row)
            cut = self._cut_of(names[row], values[row], looks) if len(looks) in (2, 4) and numbers[row] >= 0 else None
            cuts[numbers[row]] = cut if cut is not None and cut.uncut else None
        return list(map(cuts.__getitem__, numbers))

    def _add_uncut(self, row: int, names: Sequence[str], paths: Sequence[Path], cuts: Sequence[Any]) -> None:
        """Add a run of values whose local part is one piece, of this rank or of another."""
        rows: Sequence[int] = range(row, row + len(names))
        fields = map(_offsets_of, cuts), map(_layout_sizes, cuts), zip(names, repeat(0), strict=False), repeat(None)
        pieces = zip(count(len(self._keys)), *fields, strict=False)
        if all(map(_is_whole, cuts)):
            mine: Iterable[Piece] = pieces
        else:
            writes = [
                cut.whole or _turn(name, cut.place[1]) == cut.place[0] for name, cut in zip(names, cuts, strict=True)
            ]
            rows, mine = list(compress(rows, writes)), compress(pieces, writes)
        self.runs.append((len(self.pieces), rows))
        self.pieces.extend(mine)
        self._keys.extend(zip(names, paths, cuts, strict=True))

    def _add(self, name: str, path: Path, value: Any, looks: Looks) -> None:
        """Add one value of the state."""
        kind = len(looks)
        if not kind:
            self._add_object(name, path)
            return
        if kind == 3:  # a ShardedTensor says itself where its parts are
            self._add_shards(name, path, value)
            return
        cut = self._cut_of(name, value, looks)
        if cut is None:
            return
        self._keys.append((name, path, cut))
        if cut.whole:
            self.pieces.append((len(self._keys) - 1, cut.offsets, cut.sizes, (name, 0), None))
        else:
            self._add_box((name, 0), cut, cut.offsets, cut.sizes)

    # --- for the agreement

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of the shared keys and objects: whoever has the same has the same `table`."""
        _, paths, cuts = zip(*self._keys[: self.shared], strict=True) if self.shared else ((), (), ())
        kinds: dict[Any, int] = {}
        numbers = list(map(operator.attrgetter("number"), cuts))
        of_cut = {
            number: kinds.setdefault((cut.dtype, cut.shape, cut.placement), len(kinds))
            for number, cut in dict(zip(numbers, cuts, strict=True)).items()
        }
        kind_of = list(map(of_cut.__getitem__, numbers))
        return _digest([paths, kind_of, list(kinds), self.meshes, sorted(self._shared_objects)])

    # --- for the files

    @cached_property
    def keys(self) -> list[PlannedKey]:
        return [PlannedKey(name, path, cut.dtype, cut.shape, cut.placement) for name, path, cut in self._keys]

    @cached_property
    def slices(self) -> list[PlannedSlice]:
        return [PlannedSlice(*piece) for piece in self.pieces]

    @cached_property
    def meshes(self) -> list[dict[str, Any]]:
        return [_mesh_fields(mesh) for mesh in self._meshes]

    @cached_property
    def table(self) -> bytes:
        """The shared keys as bytes."""
        keys = self.keys[: self.shared]
        names = pack_texts([key.name for key in keys], "names")
        return pack(names, {"keys": [key.fields() for key in keys], "meshes": self.meshes})

    @cached_property
    def framed(self) -> int:
        """Bytes of the records of all slices, alignment excluded."""
        return sum(frame_tensor(self.keys[s.key].dtype, s.sizes).length for s in self.slices)

    @cached_property
    def rows(self) -> dict[str, list[int]]:
        """Which slices each tensor has."""
        found: dict[str, list[int]] = {}
        for row, (_, _, _, (name, _), _) in enumerate(self.pieces):
            found.setdefault(name, []).append(row)
        return found

    # --- inside

    def _add_object(self, name: str, path: Path) -> None:
        if name not in self._private:
            self._shared_objects.append(name)
        if self._place(name)[0] == 0:  # of differing objects the lowest rank's wins, as with torch
            self.objects.append((name, path))

    def _place(self, name: str) -> tuple[int, int]:
        """(this rank's number among the holders of a replicated key, how many there are)."""
        if name in self._private:
            return 0, 1
        ranks = self._holders.get(name)
        if ranks is None:
            return self._rank, self._world_size
        return ranks.index(self._rank), len(ranks)

    def _cut_of(self, name: str, value: torch.Tensor, looks: Looks) -> _Cut | None:
        key = looks if len(looks) > 3 else (*looks, self._place(name))
        try:
            return self._cuts[key]
        except KeyError:
            cut = self._cuts[key] = self._cut(name, value)
            return cut

    def _add_shards(self, name: str, path: Path, value: ShardedTensor) -> None:
        shape = tuple(value.size())
        cut = _Cut(len(self._cuts), _dtype_name(value.dtype), shape, None, (), (), (0, 1), False, False)
        self._cuts[name,] = cut
        self._keys.append((name, path, cut))
        for i, shard in enumerate(value.local_shards()):
            meta = shard.metadata
            self._add_box((name, i), cut, tuple(meta.shard_offsets), tuple(meta.shard_sizes))

    def _cut(self, name: str, value: torch.Tensor) -> _Cut | None:
        number, dtype, shape = len(self._cuts), _dtype_name(value.dtype), tuple(value.shape)
        if not isinstance(value, DTensor):
            place = self._place(name)
            return _Cut(number, dtype, shape, None, (0,) * len(shape), shape, place, *_ways(dtype, shape, place))
        spec = value._spec
        mesh, placements = spec.mesh, spec.placements
        if any(isinstance(p, Partial) for p in placements):
            raise SaveError(f"{name}: a DTensor placed {placements} is a partial sum; redistribute it before saving.")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return None
        index = self._meshes.setdefault(mesh, len(self._meshes))
        sizes, offsets = local_box(value.shape, mesh, placements)
        turn, count = 0, 1
        for dim, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                turn = turn * mesh.size(dim) + coordinate[dim]
                count *= mesh.size(dim)
        if 0 in shape and any(c for c, p in zip(coordinate, placements, strict=True) if not isinstance(p, Replicate)):
            turn = count  # an empty tensor is recorded once
        texts, place = tuple(map(_text, placements)), (turn, count)
        return _Cut(number, dtype, shape, (index, texts), offsets, sizes, place, *_ways(dtype, sizes, place))

    def _add_box(self, source: Source, cut: _Cut, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Add the pieces of a local box that this of its holders writes."""
        key, (number, count) = len(self._keys) - 1, cut.place
        whole = (key, offsets, sizes, source, None)
        if 0 in sizes:
            if 0 in cut.shape and number == 0:
                self.pieces.append(whole)
            return
        turn = _turn(source[0], count)
        dim, parts = _parts(cut.dtype, sizes, count)
        if parts <= 1:
            if number == turn:
                self.pieces.append(whole)
            return
        part = (number - turn) % count
        if part < parts:
            start, stop = part * sizes[dim] // parts, (part + 1) * sizes[dim] // parts
            cut_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            cut_sizes = (*sizes[:dim], stop - start, *sizes[dim + 1 :])
            self.pieces.append((key, cut_offsets, cut_sizes, source, (dim, start, stop - start)))


def _turn(name: str, count: int) -> int:
    """Return which of so many holders begins."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % count


def _parts(dtype: str, sizes: tuple[int, ...], count: int) -> tuple[int, int]:
    """Return along which dimension, and into how many parts, so many holders cut what they all have."""
    nbytes = math.prod(sizes) * getattr(torch, dtype).itemsize
    dim = next((d for d, n in enumerate(sizes) if n > 1), 0)
    return dim, min(count, nbytes // _SPLIT, sizes[dim] if sizes else 1)


def _ways(dtype: str, sizes: tuple[int, ...], place: tuple[int, int]) -> tuple[bool, bool]:
    """Return a cut's `whole` and `uncut`."""
    is_there, alone = 0 not in sizes, place[1] == 1
    return is_there and alone, is_there and (alone or _parts(dtype, sizes, place[1])[1] <= 1)


def _digest(parts: list[Any]) -> bytes:
    try:
        data = marshal.dumps(parts, 0)  # of the first version: what it writes depends on nothing but the values
    except ValueError:  # of a type that is like str or int
        data = json.dumps(parts, separators=(",", ":")).encode()
    return xxhash.xxh3_128_digest(data)


@lru_cache(maxsize=65536)
def local_box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (sizes, offsets) of what this rank holds of a DTensor."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def _text(placement: Placement) -> str:
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
    return local if is_lazy(local) else local.detach()


def _dense(name: str, value: Any, index: int) -> torch.Tensor:
    local = _local(value, index)
    why = why_not_dense(local)
    if why:
        raise SaveError(f"{name}: it {why}.")
    if local.dtype != value.dtype:
        raise SaveError(f"{name}: it says that it is {value.dtype}, this rank holds {local.dtype}.")
    return without_subclass(local)


def _encode(name: str, value: Any) -> bytes:
    """The record of an object: as torch.save frames it, and of plain data that our reader takes."""
    if is_plain(value):
        return frame_object(value)
    if isinstance(value, torch.Tensor):
        return whole_record(name, value)
    return dump_plain(value, name=name, advice="or allow its class with torch.serialization.add_safe_globals.")


def whole_record(name: str, tensor: torch.Tensor) -> bytes:
    """Return the record of a tensor that is not dense, as torch.save frames it: sparse or quantized, or of a class that
    torch's weights_only loader gives back.

    Raises:
        SaveError: A load would not give it back.
    """
    by_parts = hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested  # its class says how to make it again
    if not by_parts and not is_sparse_or_quantized(tensor):
        raise SaveError(f"{name}: it {why_not_dense(tensor)}.")
    advice = "or allow its class with torch.serialization.add_safe_globals."
    return dump_plain(tensor.detach() if tensor.is_cpu else tensor.detach().cpu(), name=name, advice=advice)
