"""Finds parameters in ZeRO's flat groups, which are split over the ranks.

ZeRO-1/2 concatenate a group's parameters and split the resulting vector over the ranks (the last rank's part may lack
its padding). ZeRO-3 splits each parameter into ceil(numel / ranks) elements per rank, and each rank concatenates its
parts (deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptkit.catalog.entry import SliceArray, TensorSlice
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.fsdp1_local import FlatVector, range_slices
from ckptkit.formats.trainers.rank_files import Joined

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Zero12Group:
    """One ZeRO-1/2 parameter group.

    Attributes:
        params: Names and shapes, in flat order.
        vectors: State -> the group's flat vector; "" is the fp32 weights.
        scalars: States that are not flat vectors, such as the step.
        paddings: The number of padding elements after each parameter.
        fragments: For each rank, the parameters that it recorded: name -> (numel, start in its partition).
        slack: The most padding elements that may follow the last parameter.
    """

    params: Mapping[str, Shape]
    vectors: Mapping[str, FlatVector]
    scalars: Mapping[str, Any]
    paddings: Sequence[int]
    fragments: Sequence[Mapping[str, tuple[int, int]]]
    slack: int

    def cut(self, state: str) -> Iterator[tuple[str, Joined]]:
        """Yield each parameter's name and its part of the vector for `state`."""
        vector = self.vectors[state]
        position = 0
        for (name, shape), padding in zip(self.params.items(), self.paddings, strict=True):
            numel = math.prod(shape)
            if position + numel > vector.numel:
                raise IncompleteCheckpointError(
                    f"parameter {name!r} ends at element {position + numel}, but its group has {vector.numel}."
                )
            yield name, Joined(vector.dtype, shape, vector.slices(shape, position, numel))
            position += numel + padding
        if vector.numel - position > self.slack:
            raise CorruptCheckpointError(
                f"a parameter group has {position} elements according to its shapes, but {vector.numel} on the ranks."
            )

    def agrees(self) -> bool:
        """Return whether the positions that the ranks recorded (newer versions only) match those computed from shapes.

        A difference alone proves nothing. With round_robin_gradients, DeepSpeed records wrong positions, because
        link_hp_params gets the parameters in a different order from the flat group's.
        """
        position = 0
        for (name, shape), padding in zip(self.params.items(), self.paddings, strict=True):
            numel = math.prod(shape)
            for piece in self.vectors[""].pieces:
                recorded = self.fragments[piece.rank] if piece.rank < len(self.fragments) else {}
                first, last = max(position, piece.start), min(position + numel, piece.stop)
                wanted = (last - first, first - piece.start) if first < last else None
                if recorded and recorded.get(name) != wanted:
                    return False
            position += numel + padding
        return True


@dataclass(frozen=True, slots=True)
class Zero3Group:
    """All of a ZeRO-3 job's parameters, as one vector per rank. ZeRO-3's subgroups are joined because one parameter may
    span several of them.

    Attributes:
        vectors: State -> each rank's flat vector.
    """

    params: Mapping[str, Shape]
    vectors: Mapping[str, Sequence[FlatVector]]
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, state: str) -> Iterator[tuple[str, Joined]]:
        """Yield each parameter's name and its parts of the ranks' vectors for `state`."""
        vectors = self.vectors[state]
        position = 0
        for name, shape in self.params.items():
            slices = [
                part
                for rank, vector in enumerate(vectors)
                for part in _rank_part(shape, rank, vector, position, vectors)
            ]
            yield name, Joined(vectors[0].dtype, shape, SliceArray.of(slices, len(shape)))
            position += -(-math.prod(shape) // len(vectors))
        if any(vector.numel != position for vector in vectors):
            numels = [vector.numel for vector in vectors]
            raise CorruptCheckpointError(
                f"the parameters have {position} elements per rank, but the ranks have {numels[:8]}."
            )


def _rank_part(
    shape: Shape, rank: int, vector: FlatVector, position: int, vectors: Sequence[FlatVector]
) -> Iterator[TensorSlice]:
    numel = math.prod(shape)
    part = -(-numel // len(vectors))
    begin, end = min(rank * part, numel), min((rank + 1) * part, numel)
    if vector.numel < position + part:
        raise IncompleteCheckpointError(
            f"rank {rank} has {vector.numel} elements, expected at least {position + part}."
        )
    for piece in vector.pieces:
        first, last = max(position, piece.start), min(position + end - begin, piece.stop)
        if first < last:
            start = begin + first - position
            yield from range_slices(shape, start, start + last - first, piece.tensor, first - piece.start, rank)


def flat_states(states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of states that are 1-D tensors in every one of `states` (moments, but not steps)."""
    names = list(states[0]) if states else []
    return [n for n in names if all(isinstance(s.get(n), StoredTensor) and len(s[n].shape) == 1 for s in states)]
