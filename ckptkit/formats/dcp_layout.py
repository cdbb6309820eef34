"""Which boxes of which tensors a rank writes, worked out once for all tensors that are cut alike.

What only the files need (records of each key and slice, the table of keys as bytes) is put together when it is asked
for: a training that waits for its snapshot does not wait for that.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
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

__all__ = ["Layout", "Path", "Piece", "PlannedKey", "PlannedSlice", "Source", "local_box"]

_SPLIT = 1 << 20  # below, a replica is not worth cutting up
Path = tuple[str | int, ...]
Source = tuple[str, int]
"""A local piece of memory: the name of its tensor, and which of that one's shards it is."""
Piece = tuple[int, tuple[int, ...], tuple[int, ...], Source, tuple[int, int, int] | None]
"""The fields of a `PlannedSlice`."""


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
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    placement: tuple[int, tuple[str, ...]] | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, int]
    whole: bool


class Layout:
    """The keys of a state, the boxes that this rank writes of them, and its objects.

    Attributes:
        objects: (name, path) of each object this rank writes.
        pieces: The fields of each slice.
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

    def add(self, name: str, path: Path, value: Any, looks: tuple[Any, ...]) -> None:
        """Add one value of the state. `looks` is what all have in common that are cut alike; empty for objects."""
        kind = len(looks)
        if not kind:
            self._add_object(name, path)
            return
        if kind == 3:  # a ShardedTensor says itself where its parts are
            self._add_shards(name, path, value)
            return
        key = looks if kind > 3 else (*looks, self._place(name))
        try:
            cut = self._cuts[key]
        except KeyError:
            cut = self._cuts[key] = self._cut(name, value)
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
        shared = self._keys[: self.shared]
        kinds: dict[Any, int] = {}
        of_cut = {
            cut.number: kinds.setdefault((cut.dtype, cut.shape, cut.placement), len(kinds))
            for cut in {cut.number: cut for _, _, cut in shared}.values()
        }
        parts = [
            [path for _, path, _ in shared],
            [of_cut[cut.number] for _, _, cut in shared],
            list(kinds),
            self.meshes,
            sorted(self._shared_objects),
        ]
        return xxhash.xxh3_128_digest(json.dumps(parts, separators=(",", ":")).encode())

    @cached_property
    def shared(self) -> int:
        """How many keys are not private."""
        return sum(name not in self._private for name, _, _ in self._keys)

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

    def _add_shards(self, name: str, path: Path, value: ShardedTensor) -> None:
        shape = tuple(value.size())
        cut = _Cut(len(self._cuts), _dtype_name(value.dtype), shape, None, (), (), (0, 1), False)
        self._cuts[name,] = cut
        self._keys.append((name, path, cut))
        for i, shard in enumerate(value.local_shards()):
            meta = shard.metadata
            self._add_box((name, i), cut, tuple(meta.shard_offsets), tuple(meta.shard_sizes))

    def _cut(self, name: str, value: torch.Tensor) -> _Cut | None:
        number, dtype, shape = len(self._cuts), _dtype_name(value.dtype), tuple(value.shape)
        if not isinstance(value, DTensor):
            place = self._place(name)
            return _Cut(number, dtype, shape, None, (0,) * len(shape), shape, place, place[1] == 1 and 0 not in shape)
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
        whole, texts = count == 1 and 0 not in sizes, tuple(map(_text, placements))
        return _Cut(number, dtype, shape, (index, texts), offsets, sizes, (turn, count), whole)

    def _add_box(self, source: Source, cut: _Cut, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Add the pieces of a local box that this of its holders writes."""
        key, (number, count) = len(self._keys) - 1, cut.place
        whole = (key, offsets, sizes, source, None)
        if 0 in sizes:
            if 0 in cut.shape and number == 0:
                self.pieces.append(whole)
            return
        turn = zlib.crc32(source[0].encode("utf-8", "surrogatepass")) % count
        nbytes = math.prod(sizes) * getattr(torch, cut.dtype).itemsize
        dim = next((d for d, n in enumerate(sizes) if n > 1), 0)
        parts = min(count, nbytes // _SPLIT, sizes[dim] if sizes else 1)
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
