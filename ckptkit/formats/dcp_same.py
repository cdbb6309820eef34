"""Which tensors of a state are those of the save before, where they were: told in half a microsecond each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Place", "flat_values", "moved", "place_of"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TENSORS = frozenset((*_PLAIN, DTensor))
Place = tuple[Any, ...]
"""Of a tensor: its local part, with address, shape, strides and dtype; of a DTensor, what says how it is cut. Empty of
tensors that must be looked at anew at each save, [None] of what is no tensor."""


def place_of(value: Any) -> Place:
    """Return where a tensor lies and how it is cut."""
    if not isinstance(value, torch.Tensor):
        return (None,)
    local = value._local_tensor if type(value) is DTensor else value
    if type(local) not in _PLAIN or local.layout is not torch.strided or local.is_quantized:
        return ()
    place = (local, local.data_ptr(), local.shape, local.stride(), local.dtype)
    if type(value) is not DTensor:
        return place
    spec = value._spec
    return (*place, spec, spec.mesh, spec.placements, spec.tensor_meta)


def moved(flat: Mapping[str, Any], before: Mapping[str, Any], places: Sequence[Place]) -> list[str] | None:
    """Return which tensors of a flat state are not those of one before, or not where they were; None where its names,
    or their order, are others. `places` are of the tensors before.

    Whoever keeps `before` keeps the memory of its tensors, so that no other tensor has their addresses.
    """
    if list(flat) != list(before):
        return None
    return [
        name
        for (name, value), old, place in zip(flat.items(), before.values(), places, strict=True)
        if not (_is_there(value, place) if value is old else len(place) == 1 and not isinstance(value, torch.Tensor))
    ]


def _is_there(value: Any, place: Place) -> bool:
    """Whether a tensor is as it was when `place` was its place, and where it was."""
    if len(place) < 2:
        return bool(place)
    local = value
    if len(place) > 5:
        local, spec = value._local_tensor, value._spec
        if local is not place[0] or spec is not place[5] or spec.tensor_meta is not place[8]:
            return False
        if spec.mesh is not place[6] or spec.placements is not place[7]:
            return False
    # `p.data = ...`, `set_`, `resize_` and `t_` leave the tensor what it is, and put it elsewhere or otherwise.
    if local.data_ptr() != place[1] or local.dtype is not place[4]:
        return False
    return bool(local.shape == place[2] and local.stride() == place[3])


def flat_values(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what torch's `flatten_state_dict` does, without the paths; None where two values would have one name."""
    flat: dict[str, Any] = {}
    count = 0

    def visit(name: str, value: Any) -> None:
        nonlocal count
        if type(value) not in _TENSORS:
            if isinstance(value, Mapping):
                for key, item in value.items():
                    visit(f"{name}.{key}", item)
                return
            if isinstance(value, list) and not _is_leaf(value):
                for i, item in enumerate(value):
                    visit(f"{name}.{i}", item)
                return
        flat[name] = value
        count += 1

    for key, item in values.items():
        visit(str(key), item)
    return flat if len(flat) == count else None


def _is_leaf(items: list[Any]) -> bool:
    """Whether a list is one value: no tensors, dicts or lists of such are in it."""
    return not any(
        isinstance(item, (Mapping, torch.Tensor)) or (isinstance(item, list) and not _is_leaf(item)) for item in items
    )
