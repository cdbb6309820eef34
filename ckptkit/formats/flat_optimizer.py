"""FSDP1's rank-local optimizer state: each rank's 1-D part of flat parameters, keyed by index.

With use_orig_params=True an index is a parameter. With False it is a unit: the parameters of one wrapped module,
end to end, cut into ceil(numel / ranks) elements a rank. Which modules were wrapped is not recorded; it is taken
to be the blocks of module lists below the root, and accepted only where every size fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.entry import SliceArray
from ckptkit.formats._torch_records import StoredTensor
from ckptkit.formats.flat import FlatVector, Piece
from ckptkit.formats.optimizer_files import OptimizerState, group_objects
from ckptkit.formats.param_order import Param
from ckptkit.formats.rank_files import Joined

__all__ = ["read_flat_optimizer"]

_BLOCK = re.compile(r"(.*?\.\d+)\..+")


@dataclass(frozen=True, slots=True)
class _Unit:
    """The parameters of one index, end to end."""

    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        return sum(math.prod(param.shape) for param in self.params)


def read_flat_optimizer(values: Sequence[Mapping[str, Any]], params: Sequence[Param]) -> OptimizerState | None:
    """Return the entries of rank-local flat optimizer state; None where sizes do not prove the layout.

    Args:
        values: `Optimizer.state_dict()` of each rank.
        params: The model's parameters in module order.
    """
    indices = [index for group in values[0]["param_groups"] for index in group["params"]]
    for units in (_each(params), _blocks(params), [_Unit(tuple(params))]):
        if len(units) == len(indices) and all(_fits(values, i, u) for i, u in zip(indices, units, strict=True)):
            return _entries(values, dict(zip(indices, units, strict=True)))
    return None


def _each(params: Sequence[Param]) -> list[_Unit]:
    """use_orig_params=True: a unit a parameter."""
    return [_Unit((param,)) for param in params]


def _blocks(params: Sequence[Param]) -> list[_Unit]:
    """The root's own parameters first, then each block: the order of `parameters()` over nested units."""
    units: dict[str, list[Param]] = {"": []}
    for param in params:
        match = _BLOCK.fullmatch(param.fqn)
        units.setdefault(match[1] if match else "", []).append(param)
    return [_Unit(tuple(members)) for members in units.values() if members]


def _flat(values: Sequence[Mapping[str, Any]], index: Any) -> dict[str, list[StoredTensor | None]]:
    """The 1-D states of an index by name, in rank order; None where a rank has none of the parameter."""
    found: dict[str, list[StoredTensor | None]] = {}
    for rank, value in enumerate(values):
        for name, tensor in value["state"].get(index, {}).items():
            if isinstance(tensor, StoredTensor) and len(tensor.shape) == 1:
                found.setdefault(name, [None] * len(values))[rank] = tensor
    return found


def _fits(values: Sequence[Mapping[str, Any]], index: Any, unit: _Unit) -> bool:
    states = _flat(values, index)
    part = -(-unit.numel // len(values))
    for parts in states.values():
        numels = [tensor.numel if tensor is not None else 0 for tensor in parts]
        padded = len(unit.params) > 1 and all(numel == part for numel in numels)
        if not padded and sum(numels) != unit.numel:
            return False
    return bool(states)


def _entries(values: Sequence[Mapping[str, Any]], units: Mapping[Any, _Unit]) -> OptimizerState:
    found = OptimizerState()
    for index, unit in units.items():
        for state, parts in _flat(values, index).items():
            vector = FlatVector(_pieces(parts))
            position = 0
            for param in unit.params:
                numel = math.prod(param.shape)
                found.add(
                    param.fqn, state, Joined(vector.dtype, param.shape, vector.slices(param.shape, position, numel))
                )
                position += numel
        for state, value in values[0]["state"].get(index, {}).items():
            if isinstance(value, StoredTensor) and not value.shape:
                for param in unit.params:
                    found.add(param.fqn, state, Joined(value.dtype, (), SliceArray.of([value.slice()], 0)))
    settings = [
        {**group, "params": [param.fqn for index in group["params"] for param in units[index].params]}
        for group in values[0]["param_groups"]
    ]
    found.objects.update(group_objects(settings, {}))
    found.notes.append("FSDP1 optimizer: the wrapped modules were inferred; every size fits them.")
    return found


def _pieces(parts: Sequence[StoredTensor | None]) -> Iterator[Piece]:
    position = 0
    for rank, tensor in enumerate(parts):
        if tensor is not None and tensor.numel:
            yield Piece(position, tensor, rank)
            position += tensor.numel
