"""Converts DTensor placements to the regions of the full tensor that a rank's local tensor holds. Does not need torch.

Placements are applied one mesh dimension at a time. A rank holds a list of index ranges along each tensor dimension.
`Shard` keeps one chunk of these indices (ceil(n / parts) of n; the last chunks may be shorter or empty).
`_StridedShard` first splits the indices into `split_factor` pieces, and keeps one chunk of each piece. The result is
the rank's indices, in the order of its local tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.entry import TensorSlice
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.tensors import PlacementRecord, StoredTensor

_MAX_SPLIT = 1 << 16
_MAX_RUNS = 1 << 20  # most runs to handle; real tensors have a few per rank
Run = tuple[int, int]  # indices [start, stop) along one dimension of the whole tensor


@dataclass(frozen=True, slots=True)
class LocalPart:
    """One region of the whole tensor, and the offsets of the region in the rank's local tensor."""

    box: Box
    local_offsets: tuple[int, ...]


def local_parts(
    shape: tuple[int, ...],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[PlacementRecord],
    *,
    local_shape: tuple[int, ...] | None = None,
) -> list[LocalPart]:
    """Return the regions that the rank at `coordinate` holds, in the order of its local tensor.

    There is one region, unless a strided shard has indices that are not adjacent. A rank without elements has one empty
    region.

    Args:
        shape: Shape of the whole tensor.
        local_shape: Shape of the rank's local tensor, to check the result. FSDP2 may unevenly split a tensor that
            tensor parallelism has already split (7 rows over dp 3, tp 2). The rank's rows then differ from those
            that torch computes from the placements. Both results are tried, FSDP2's first. An empty local tensor
            matches an empty result of any shape, because FSDP2 changes all sizes of an empty local tensor.
    """
    return list(_local_parts(shape, tuple(mesh_shape), tuple(coordinate), tuple(placements), local_shape))


@functools.lru_cache(maxsize=1024)  # a model's thousands of tensors have few distinct shapes and placements
def _local_parts(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[PlacementRecord, ...],
    local_shape: tuple[int, ...] | None,
) -> tuple[LocalPart, ...]:
    _check_placements(shape, mesh_shape, coordinate, placements)
    orders: list[tuple[Sequence[int], bool]] = [(range(len(placements)), False)]
    if local_shape is not None and (nested := _nested(mesh_shape, placements)):
        orders.insert(0, (nested, True))
    found: tuple[int, ...] = ()
    for mesh_dims, plain in orders:
        rows = _rows(shape, mesh_shape, coordinate, placements, mesh_dims, plain=plain)
        found = tuple(sum(stop - start for start, stop in runs) for runs in rows)
        if local_shape is None or found == local_shape or (0 in found and 0 in local_shape):
            return tuple(_boxes(shape, rows))
    raise CorruptCheckpointError(
        f"the local tensor has shape {list(local_shape or ())}, but {_describe(placements)} of shape {list(shape)} on "
        f"a mesh of shape {list(mesh_shape)} at coordinate {list(coordinate)} gives {list(found)}."
    )


def _nested(mesh_shape: Sequence[int], placements: Sequence[PlacementRecord]) -> list[int]:
    """Return the mesh dimensions in the order in which FSDP2 split a tensor with strided shards.

    FSDP2 applies a strided shard after some of the later mesh dimensions, for example after tensor parallelism. The
    split factor is the product of the sizes of these mesh dimensions. Returns [] if a split factor is not such a
    product (FSDP2 did not make these placements), or if there are no strided shards.
    """
    order: list[int] = []

    def split(mesh_dim: int) -> bool:
        placement, left = placements[mesh_dim], placements[mesh_dim].split_factor
        if placement.kind == "strided_shard":
            for inner in range(mesh_dim + 1, len(placements)):
                if left > 1 and placements[inner].kind != "replicate" and placements[inner].dim == placement.dim:
                    left = left // mesh_shape[inner] if left % mesh_shape[inner] == 0 else 0
                    if inner not in order and not split(inner):
                        return False
        order.append(mesh_dim)
        return placement.kind != "strided_shard" or left == 1

    strided = any(placement.kind == "strided_shard" for placement in placements)
    return order if strided and all(mesh_dim in order or split(mesh_dim) for mesh_dim in range(len(placements))) else []


def slices_of(parts: Sequence[LocalPart], local: StoredTensor, rank: int) -> list[TensorSlice]:
    """Return one catalog slice for each region of a local tensor in a file."""
    found = []
    for part in parts:
        view = local
        if part.box.sizes != local.shape:
            skip = sum(o * s for o, s in zip(part.local_offsets, local.strides, strict=True))
            view = replace(local, shape=part.box.sizes, offset=local.offset + skip)
        found.append(view.slice(part.box, rank=rank))
    return found


def mesh_coordinate(rank: int, mesh_shape: Sequence[int], ranks: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Return the coordinate of `rank` in the mesh, or None if the mesh does not contain the rank.

    Args:
        ranks: Ranks of the mesh in row-major order; by default 0, 1, 2, ...
    """
    position = rank if ranks is None else (list(ranks).index(rank) if rank in ranks else -1)
    if not 0 <= position < math.prod(mesh_shape):
        return None
    coordinate = []
    for stride, size in zip(row_major_strides(tuple(mesh_shape)), mesh_shape, strict=True):
        coordinate.append(position // stride % size)
    return tuple(coordinate)


def ranks_with_copy(
    ranks: npt.NDArray[np.int64], coordinate: Sequence[int], replicated: Sequence[bool]
) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a tensor as the rank at `coordinate`, in the order of the mesh.

    Args:
        ranks: The mesh's ranks, in the mesh's shape.
        replicated: Whether each mesh dimension replicates the tensor.
    """
    same = tuple(slice(None) if copies else at for at, copies in zip(coordinate, replicated, strict=True))
    return tuple(ranks[same].flatten().tolist())


def _check_placements(
    shape: tuple[int, ...], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[PlacementRecord]
) -> None:
    inside = len(coordinate) == len(mesh_shape) and all(0 <= c < n for c, n in zip(coordinate, mesh_shape, strict=True))
    if len(placements) != len(mesh_shape) or not inside:
        raise CorruptCheckpointError(
            f"{len(placements)} placements and coordinate {list(coordinate)} do not fit a mesh of {list(mesh_shape)}."
        )
    for placement in placements:
        if placement.kind == "partial":
            raise UnsupportedFormatError(
                "the tensor has a Partial placement: its values must still be summed over the ranks. "
                "Redistribute it to Shard or Replicate before the save."
            )
        if placement.kind == "replicate":
            continue
        if placement.kind not in ("shard", "strided_shard") or not 1 <= placement.split_factor <= _MAX_SPLIT:
            raise UnsupportedFormatError(f"placement {placement} is unknown.")
        if not 0 <= placement.dim < len(shape):
            raise CorruptCheckpointError(f"{_describe([placement])} does not fit a tensor of shape {list(shape)}.")


def _rows(
    shape: tuple[int, ...],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[PlacementRecord],
    mesh_dims: Sequence[int],
    *,
    plain: bool,
) -> list[list[Run]]:
    """Return the rank's indices along each dimension. With `plain`, strided shards are treated as plain shards."""
    rows: list[list[Run]] = [[(0, n)] for n in shape]
    for mesh_dim in mesh_dims:
        placement = placements[mesh_dim]
        if placement.kind not in ("shard", "strided_shard"):
            continue
        pieces = 1 if plain or placement.kind == "shard" else placement.split_factor
        runs = rows[placement.dim]
        if pieces * len(runs) > _MAX_RUNS:
            raise CorruptCheckpointError(f"{_describe(placements)} splits a dimension into too many parts.")
        rows[placement.dim] = [
            run
            for piece in range(pieces)
            for run in _chunk(_chunk(runs, pieces, piece), mesh_shape[mesh_dim], coordinate[mesh_dim])
        ]
    return [_joined(runs) for runs in rows]


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Return chunk `index` of the indices in `runs`, split into `parts` chunks as by torch.chunk."""
    total = sum(stop - start for start, stop in runs)
    length = -(-total // parts)
    first, last = min(index * length, total), min((index + 1) * length, total)
    found = []
    position = 0
    for start, stop in runs:
        a, b = max(first - position, 0), min(last - position, stop - start)
        if a < b:
            found.append((start + a, start + b))
        position += stop - start
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return found


def _boxes(shape: tuple[int, ...], rows: Sequence[Sequence[Run]]) -> Iterator[LocalPart]:
    filled = [runs or [(n, n)] for runs, n in zip(rows, shape, strict=True)]  # an empty part starts at n
    if math.prod(map(len, filled)) > _MAX_RUNS:
        raise CorruptCheckpointError(f"a local tensor of shape {list(shape)} consists of too many boxes.")
    local = [[0, *itertools.accumulate(stop - start for start, stop in runs)] for runs in filled]
    for index in itertools.product(*(range(len(runs)) for runs in filled)):
        chosen = [runs[i] for runs, i in zip(filled, index, strict=True)]
        box = Box(tuple(start for start, _ in chosen), tuple(stop - start for start, stop in chosen))
        yield LocalPart(box, tuple(offsets[i] for offsets, i in zip(local, index, strict=True)))


def _describe(placements: Sequence[PlacementRecord]) -> str:
    texts = {"shard": "Shard({0})", "strided_shard": "_StridedShard({0}, {1})", "replicate": "Replicate()"}
    names = [texts.get(p.kind, p.kind).format(p.dim, p.split_factor) for p in placements]
    return f"({', '.join(names)})"
