"""Tensors that were flattened end to end: FSDP1's flat parameters, the partitions of ZeRO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptkit.catalog.box import flat_range_boxes, row_major_strides
from ckptkit.catalog.entry import SliceArray, TensorSlice
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats._torch_records import StoredTensor

__all__ = ["FlatVector", "Piece", "range_slices"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, start + numel) of a flat vector: `tensor`, 1-D, as one rank stores it."""

    start: int
    tensor: StoredTensor
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel


class FlatVector:
    """A flat vector in pieces, in order of their start. Padding at the end is part of it."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.start)

    @classmethod
    def of_ranks(cls, tensors: Iterable[tuple[int, StoredTensor]]) -> FlatVector:
        """Return the vector of each rank's tensor, laid end to end."""
        pieces, position = [], 0
        for rank, tensor in tensors:
            pieces.append(Piece(position, tensor, rank))
            position += tensor.numel
        return cls(pieces)

    @property
    def numel(self) -> int:
        return max((piece.stop for piece in self.pieces), default=0)

    @property
    def dtype(self) -> str:
        return self.pieces[0].tensor.dtype

    def slices(self, shape: tuple[int, ...], start: int, numel: int) -> SliceArray:
        """Return the slices of a tensor of `shape` that lies at [start, start + numel) of the vector."""
        found: list[TensorSlice] = []
        for piece in self.pieces:
            a, b = max(start, piece.start), min(start + numel, piece.stop)
            if a < b:
                found += range_slices(shape, a - start, b - start, piece.tensor, a - piece.start, piece.rank)
        return SliceArray.of(found, len(shape))


def range_slices(
    shape: tuple[int, ...], start: int, stop: int, tensor: StoredTensor, offset: int, rank: int
) -> list[TensorSlice]:
    """Return the row-major elements [start, stop) of a tensor of `shape` as slices of the 1-D `tensor`,
    where they lie from element `offset` on."""
    if len(tensor.shape) != 1 or not tensor.contiguous or offset + stop - start > tensor.numel:
        raise CorruptCheckpointError(
            f"{tensor.path}: a flat tensor of shape {list(tensor.shape)} can't hold {offset + stop - start} elements."
        )
    found = []
    for box in flat_range_boxes(shape, start, stop):
        view = replace(tensor, shape=box.sizes, strides=row_major_strides(box.sizes), offset=tensor.offset + offset)
        found.append(view.slice(box, rank=rank))
        offset += box.numel
    return found
