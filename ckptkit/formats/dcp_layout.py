"""Which boxes of which tensors a rank writes, worked out once for all tensors that are cut alike.

What only the files need (records of each key and slice, the table of keys as bytes) is put together when it is asked
for: a training that waits for its snapshot does not wait for that.
"""

from __future__ import annotations

import json
import marshal
import math
import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress, count, repeat
from typing import Any

import torch
import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckptkit.errors import SaveError
from ckptkit.formats.columns import pack, pack_texts
from ckptkit.formats.dcp_encode import frame_tensor
from ckptkit.formats.dcp_same import Kinds, Looks

__all__ = ["Layout", "Path", "Piece", "PlannedKey", "PlannedSlice", "Source", "local_box"]

_SPLIT = 1 << 20  # below, a replica is not worth cutting up
Path = tuple[str | int, ...]
Source = tuple[str, int]
"""A local piece of memory: the name of its tensor, and which of that one's shards it is."""
Piece = tuple[int, tuple[int, ...], tuple[int, ...], Source, tuple[int, int, int] | None]
"""The fields of a `PlannedSlice`."""
_offsets_of, _sizes_of, _is_whole = map(operator.attrgetter, ("offsets", "sizes", "whole"))


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
        fields = map(_offsets_of, cuts), map(_sizes_of, cuts), zip(names, repeat(0), strict=False), repeat(None)
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
