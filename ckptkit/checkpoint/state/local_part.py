"""Describes this rank's part of a tensor: the regions (`Box`) that it covers, and which ranks have replicas."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import DTYPES
from ckptkit.errors import SaveError, UnsupportedFormatError
from ckptkit.formats.dcp.host_bytes import dtype_name, local_part, why_not_dense, without_subclass
from ckptkit.formats.dcp.shared_memory import Claim
from ckptkit.formats.pickles.tensors import PlacementRecord
from ckptkit.formats.trainers.shards import LocalPart, local_parts, mesh_coordinate, ranks_with_copy

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

    from ckptkit.catalog.entry import TensorEntry


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Describes how a tensor is sharded over ranks."""

    mesh_shape: tuple[int, ...]  # the device mesh's shape, outermost dimension first
    mesh_names: tuple[str, ...]  # the names of the mesh's dimensions
    mesh_ranks: tuple[int, ...]  # the mesh's ranks, in row-major order
    placements: tuple[PlacementRecord, ...]  # one per mesh dimension

    def mesh_json(self) -> dict[str, Any]:
        """Return the mesh in the form that the manifest stores in `info.extra["meshes"]`."""
        return {"shape": list(self.mesh_shape), "names": list(self.mesh_names), "ranks": list(self.mesh_ranks)}

    def texts(self) -> tuple[str, ...]:
        """Return the placements in the form that the manifest stores: "S(0)", "R", "SS(0,2)"."""
        words = {"shard": "S({0})", "strided_shard": "SS({0},{1})", "replicate": "R"}
        return tuple(words[p.kind].format(p.dim, p.split_factor) for p in self.placements)


@dataclass(frozen=True, slots=True)
class PartView:
    """Describes this rank's part of one tensor."""

    key: str  # name in the checkpoint
    shape: tuple[int, ...]  # the full tensor's shape
    local: torch.Tensor  # this rank's elements; shares memory with the live tensor
    layout: ShardLayout | None  # None for a plain tensor, which is complete on every rank that has the key
    parts: tuple[LocalPart, ...]  # this rank's boxes

    def claim(self, entry: TensorEntry) -> Claim:
        """Return the request to load the saved tensor `entry` into this part."""
        return Claim(self.key, entry, self.shape, self.local, self.parts)

    def within(self, boxes: Iterable[Box]) -> PartView:
        """Return this part restricted to the elements in the given regions, which must not overlap."""
        inside = [
            LocalPart(found, tuple(map(operator.add, part.local_offsets, found.relative_to(part.box).offsets)))
            for part in self.parts
            for box in boxes
            if (found := part.box.intersect(box)) is not None
        ]
        return replace(self, parts=tuple(inside))

    @property
    def dtype(self) -> str:
        return dtype_name(self.local.dtype)

    @property
    def nbytes(self) -> int:
        return self.local.numel() * self.local.element_size()


def this_rank() -> int:
    """Return this process's rank in the default group. Meshes refer to ranks by this number.

    The `Coordinator`'s rank is a different number if only some ranks save.
    """
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def part_view(key: str, tensor: torch.Tensor) -> PartView:
    """Return this rank's part of a live tensor. Does not communicate.

    Raises:
        SaveError: The tensor type is not supported (sparse, quantized, some subclasses).
        UnsupportedFormatError: The tensor is a partial sum.
    """
    local = local_part(tensor)
    why = why_not_dense(local)
    if why and not local.is_meta:
        raise SaveError(f"tensor {key!r} {why}.")
    try:
        layout, parts = parts_here(tensor, local)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"tensor {key!r}: {error}") from error
    return PartView(key, tuple(tensor.shape), without_subclass(local).detach(), layout, parts)


def parts_here(tensor: torch.Tensor, local: torch.Tensor) -> tuple[ShardLayout | None, tuple[LocalPart, ...]]:
    """Return a tensor's layout (None for a plain tensor), and the regions of the tensor that `local` contains."""
    from torch.distributed.tensor import DTensor

    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return None, _whole(shape)
    return _placed(tensor.device_mesh, tuple(tensor.placements), shape, tuple(local.shape), this_rank())


def check_safetensors(views: Iterable[PartView]) -> None:
    """Raise UnsupportedFormatError if a tensor's dtype has no name in safetensors."""
    for view in views:
        if DTYPES[view.dtype].safetensors is None:
            raise UnsupportedFormatError(
                f"tensor {view.key!r} is {view.dtype}, which safetensors cannot store. Save it as SHARDED."
            )


def layout_of(tensor: DTensor) -> ShardLayout:
    return _layout(tensor.device_mesh, tuple(tensor.placements))


@functools.lru_cache(maxsize=1 << 10)
def holders_of(layout: ShardLayout, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a tensor as `rank`. () if the mesh does not contain `rank`."""
    coordinate = mesh_coordinate(rank, layout.mesh_shape, layout.mesh_ranks)
    if coordinate is None:
        return ()
    ranks = np.array(layout.mesh_ranks).reshape(layout.mesh_shape)
    return ranks_with_copy(ranks, coordinate, [placement.kind == "replicate" for placement in layout.placements])


@functools.lru_cache(maxsize=256)
def _layout(mesh: Any, placements: tuple[Any, ...]) -> ShardLayout:
    from ckptkit.formats.dcp.plan import placement_record

    return ShardLayout(
        tuple(mesh.shape),
        tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim))),
        tuple(mesh.mesh.flatten().tolist()),
        tuple(map(placement_record, placements)),
    )


@functools.lru_cache(maxsize=65536)
def _placed(
    mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...], local_shape: tuple[int, ...], rank: int
) -> tuple[ShardLayout, tuple[LocalPart, ...]]:
    layout = _layout(mesh, placements)
    return layout, _parts(shape, layout, rank, local_shape)


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> tuple[LocalPart, ...]:
    return (LocalPart(Box.whole(shape), (0,) * len(shape)),)


def _parts(
    shape: tuple[int, ...], layout: ShardLayout, rank: int, local_shape: tuple[int, ...] | None
) -> tuple[LocalPart, ...]:
    coordinate = mesh_coordinate(rank, layout.mesh_shape, layout.mesh_ranks)
    if coordinate is None:
        return ()
    return tuple(local_parts(shape, layout.mesh_shape, coordinate, layout.placements, local_shape=local_shape))


@functools.lru_cache(maxsize=65536)
def boxes_of(
    shape: tuple[int, ...], layout: ShardLayout | None, rank: int, local_shape: tuple[int, ...] | None
) -> tuple[Box, ...]:
    """Return the regions that `rank` stores of a tensor with the given layout."""
    if layout is None:
        return (Box.whole(shape),)
    return tuple(part.box for part in _parts(shape, layout, rank, local_shape))
