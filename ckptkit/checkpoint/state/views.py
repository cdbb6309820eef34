"""Finds optimizer states that share memory. A change to one of these states also changes the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.formats.dcp.host_bytes import local_part

if TYPE_CHECKING:
    import torch

View = tuple[str, str]
"""Identifies a tensor of an optimizer by a parameter's FQN and a name.

The name consists of a state's name and the keys inside the state ("factors.0"). The name is "" for the parameter
itself. The FQN is "" for state that belongs to no parameter ("shared.count") and for settings ("param_groups.0.lr").
"""


def memories(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[View, int]:
    """Return, for each tensor, the address of its allocation.

    Omits empty tensors, and tensors whose values are not in a single allocation.
    """
    found: dict[View, int] = {}
    for view, tensor in _tensors(optimizer, parameters):
        local = in_one_memory(tensor)
        if local is not None:
            found[view] = local.untyped_storage().data_ptr()
    return found


def in_one_memory(tensor: Any) -> torch.Tensor | None:
    """Return this rank's part of a tensor (for a DTensor, its local tensor).

    Returns None if the part is empty, or if its values are not in one allocation.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        return None
    local = local_part(tensor)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided or local.is_nested:
        return None
    return None if local.is_meta or not local.data_ptr() else local


def shared_views(memory: Mapping[View, int], same: Iterable[Sequence[str]]) -> list[list[View]]:
    """Return the groups of tensors that share an allocation. Omits groups that contain only weights.

    Args:
        memory: The result of `memories`.
        same: States of different parameters that are one tensor (see `OptimizerTree`). Only one of them is put into a
            group.
    """
    again = {(fqn, name) for fqn, name, *_ in same}
    groups: dict[int, list[View]] = {}
    for view, address in memory.items():
        if view not in again:
            groups.setdefault(address, []).append(view)
    return [group for group in groups.values() if len(group) > 1 and any(name for _, name in group)]


def separated(groups: Iterable[Sequence[View]], memory: Mapping[View, int]) -> list[list[str]]:
    """Return the groups of tensors that shared one allocation in the save, but do not share one now.

    Each group is a list of the tensors' names.

    Args:
        groups: The groups at the time of the save (see `shared_views`).
        memory: The result of `memories` now.
    """
    here = ([view for view in group if view in memory] for group in groups)
    return [[".".join(filter(None, view)) for view in group] for group in here if len({memory[v] for v in group}) > 1]


def _tensors(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[View, torch.Tensor]]:
    for fqn, parameter in parameters.items():
        yield (fqn, ""), parameter
        for name, value in optimizer.state.get(parameter, {}).items():
            yield from _inside(value, fqn, name, set())
    for key, state in optimizer.state.items():
        if isinstance(key, str):
            yield from _inside(state, "", f"shared.{key}", set())
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _inside(value, "", f"param_groups.{index}.{key}", set())


def _inside(value: Any, fqn: str, name: str, above: set[int]) -> Iterator[tuple[View, torch.Tensor]]:
    """Yield the tensors in a value. `above` contains the ids of the lists and dicts that enclose the value."""
    import torch

    if isinstance(value, torch.Tensor):
        yield (fqn, name), value
        return
    if value is None or isinstance(value, (bool, int, float, str)) or id(value) in above:
        return
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        items = vars(value).items()
    else:
        return
    for key, item in items:
        yield from _inside(item, fqn, f"{name}.{key}", above | {id(value)})
