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
from ckptkit.formats.dcp_bytes import is_dense
from ckptkit.formats.dcp_encode import frame_tensor

__all__ = ["Layout", "Path", "PlannedKey", "PlannedSlice", "Source", "local_box"]

_SPLIT = 1 << 20  # below, a replica is not worth cutting up
Path = tuple[str | int, ...]
Source = tuple[str, int]
"""A local piece of memory: the name of its tensor, and which of that one's shards it is."""


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
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    placement: tuple[int, tuple[str, ...]] | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, int]


class Layout:
    """The keys of a state, the boxes that this rank writes of them, and its objects.

    Attributes:
        objects: (name, path) of each object this rank writes.
        sources, narrows, sizes: Of each slice, the memory it is a part of, which part, and its shape.
    """

    def __init__(
        self, rank: int, world_size: int, private: frozenset[str], holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._private, self._holders = private, holders
        self._cuts: dict[Any, _Cut | None] = {}
        self._meshes: dict[DeviceMesh, int] = {}
        self._keys: list[tuple[str, Path, _Cut]] = []
        self._slices: list[tuple[int, tuple[int, ...]]] = []
        self._shared_objects: list[str] = []
        self.objects: list[tuple[str, Path]] = []
        self.sources: list[Source] = []
        self.narrows: list[tuple[int, int, int] | None] = []
        self.sizes: list[tuple[int, ...]] = []

    def add(self, name: str, path: Path, value: Any, looks: tuple[Any, ...]) -> None:
        """Add one value of the state. `looks` is what all have in common that are cut alike; empty for objects."""
        if isinstance(value, DTensor):
            key = looks
        elif isinstance(value, ShardedTensor):
            self._add_shards(name, path, value)
            return
        elif isinstance(value, torch.Tensor) and is_dense(value):
            key = (*looks, self._place(name))
        else:
            self._add_object(name, path)
            return
        try:
            cut = self._cuts[key]
        except KeyError:
            cut = self._cuts[key] = self._cut(name, value)
        if cut is not None:
            self._keys.append((name, path, cut))
            self._add_box(name, cut)

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
        rows = zip(self._slices, self.sizes, self.sources, self.narrows, strict=True)
        return [PlannedSlice(key, offsets, sizes, source, narrow) for (key, offsets), sizes, source, narrow in rows]

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
        for row, (name, _) in enumerate(self.sources):
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
        cut = _Cut(len(self._cuts), _dtype_name(value.dtype), shape, None, (), (), (0, 1))
        self._cuts[name,] = cut
        self._keys.append((name, path, cut))
        for i, shard in enumerate(value.local_shards()):
            meta = shard.metadata
            self._add_box(name, cut, i, tuple(meta.shard_offsets), tuple(meta.shard_sizes))

    def _cut(self, name: str, value: torch.Tensor) -> _Cut | None:
        number, dtype, shape = len(self._cuts), _dtype_name(value.dtype), tuple(value.shape)
        if not isinstance(value, DTensor):
            return _Cut(number, dtype, shape, None, (0,) * len(shape), shape, self._place(name))
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
        return _Cut(number, dtype, shape, (index, tuple(map(_text, placements))), offsets, sizes, (turn, count))

    def _add_box(
        self,
        name: str,
        cut: _Cut,
        shard: int = 0,
        offsets: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        """Add the pieces of a local box that this of its holders writes."""
        offsets, sizes = cut.offsets if offsets is None else offsets, cut.sizes if sizes is None else sizes
        number, count = cut.place
        if 0 in sizes:
            if 0 in cut.shape and number == 0:
                self._add_slice((name, shard), offsets, sizes, None)
            return
        if count == 1:
            self._add_slice((name, shard), offsets, sizes, None)
            return
        turn = zlib.crc32(name.encode("utf-8", "surrogatepass")) % count
        nbytes = math.prod(sizes) * getattr(torch, cut.dtype).itemsize
        dim = next((d for d, n in enumerate(sizes) if n > 1), 0)
        parts = min(count, nbytes // _SPLIT, sizes[dim] if sizes else 1)
        if parts <= 1:
            if number == turn:
                self._add_slice((name, shard), offsets, sizes, None)
            return
        part = (number - turn) % count
        if part < parts:
            start, stop = part * sizes[dim] // parts, (part + 1) * sizes[dim] // parts
            cut_offsets = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            cut_sizes = (*sizes[:dim], stop - start, *sizes[dim + 1 :])
            self._add_slice((name, shard), cut_offsets, cut_sizes, (dim, start, stop - start))

    def _add_slice(
        self, source: Source, offsets: tuple[int, ...], sizes: tuple[int, ...], narrow: tuple[int, int, int] | None
    ) -> None:
        self._slices.append((len(self._keys) - 1, offsets))
        self.sources.append(source)
        self.sizes.append(sizes)
        self.narrows.append(narrow)


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
