"""Which parameter an optimizer's integer index means, where the names were not saved.

An optimizer numbers the parameters of its groups in order. The model's state dict has them in module order,
as `model.parameters()` does; so each group is a subsequence of it. The assignment is used only where the
shapes leave no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Param", "assign"]

_NO_DECAY = ("bias", "norm.weight", "layernorm.weight", "layer_norm.weight", "ln_f.weight")
Shape = tuple[int, ...] | None  # None: the index has no state that would tell


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the model: its name and its whole shape."""

    fqn: str
    shape: tuple[int, ...]


def assign(
    params: Sequence[Param], groups: Sequence[Sequence[Shape]], no_decay: Sequence[bool] = ()
) -> list[list[str]] | None:
    """Return the names of each group's parameters, None where shapes and order do not prove them.

    Args:
        params: In module order, tied ones once.
        groups: The shapes of each group's parameters, in the order of its indices.
        no_decay: Which groups have a weight decay of 0: tells groups of equal shapes apart.
    """
    for candidates in (list(params), [p for p in params if "lora_" in p.fqn or "modules_to_save" in p.fqn]):
        found = _match(candidates, groups, no_decay)
        if found is not None:
            return found
    return None


def _match(
    params: Sequence[Param], groups: Sequence[Sequence[Shape]], no_decay: Sequence[bool]
) -> list[list[str]] | None:
    if len(params) != sum(map(len, groups)):
        return None
    names: list[list[str]] = [[] for _ in groups]
    for param in params:
        fitting = [
            index
            for index, shapes in enumerate(groups)
            if len(names[index]) < len(shapes) and shapes[len(names[index])] in (None, param.shape)
        ]
        if len(fitting) > 1 and len(no_decay) == len(groups):
            wanted = param.fqn.lower().endswith(_NO_DECAY)
            fitting = [index for index in fitting if no_decay[index] is wanted]
        if len(fitting) != 1:
            return None
        names[fitting[0]].append(param.fqn)
    return names
