"""Maps an optimizer's integer indices to parameters when the names were not saved.

An optimizer numbers its parameters in order, group by group. The parameters usually come from `model.parameters()`,
which has the same order as the model's state dict. Each group is then a subsequence of the state dict's parameters. An
assignment of numbers to names is accepted only if the shapes rule out every other assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_NO_DECAY = ("bias", "norm.weight", "layernorm.weight", "layer_norm.weight", "ln_f.weight")
_MAX_STATES = 256  # most partial assignments to track at once; a real optimizer needs one or two
Shape = tuple[int, ...] | None  # None: no state at this index has the parameter's shape
Fits = Callable[[int, int, str], bool]
_Taken: TypeAlias = "tuple[()] | tuple[_Taken, int, str]"


@dataclass(frozen=True, slots=True)
class Param:
    """A model parameter: its name and full shape."""

    fqn: str
    shape: tuple[int, ...]


def assign(
    params: Sequence[Param],
    groups: Sequence[Sequence[Shape]],
    no_decay: Sequence[bool] = (),
    fits: Fits | None = None,
) -> list[list[str]] | None:
    """Return the parameter names in each group, or None if shapes and order do not determine all names.

    Args:
        params: The model's parameters and buffers, in module order. Tied parameters are listed once. A frozen parameter
            or a buffer need not be in any group.
        groups: Shapes of each group's parameters, in index order.
        no_decay: For each group, whether the weight decay is 0. This distinguishes groups with equal shapes, if only
            some of them have weight decay.
        fits: Is called with (group, position) and a name. Returns whether the values saved at this position can belong
            to the parameter with this name.
    """
    adapters = [p for p in params if "lora_" in p.fqn or "modules_to_save" in p.fqn]
    wanted = sum(map(len, groups))
    for candidates in (params, adapters):
        if len(candidates) == wanted:
            found = _match(candidates, groups, no_decay, fits)
            if found is not None:
                return found
    return _match(params, groups, no_decay, fits) if len(params) > wanted else None


def _match(
    params: Sequence[Param], groups: Sequence[Sequence[Shape]], no_decay: Sequence[bool], fits: Fits | None
) -> list[list[str]] | None:
    """Return the assignment of `params` to the groups, or None if no assignment or more than one is possible.

    Goes through the parameters once, and tracks all partial assignments that are still possible.
    """
    spare = len(params) - sum(map(len, groups))
    # For the position reached in each group: the assignment that leads there, or None if several do. An assignment is a
    # linked list (the assignment before, group, name), which is extended without a copy.
    states: dict[tuple[int, ...], _Taken | None] = {(0,) * len(groups): ()}
    for done, param in enumerate(params):
        following: dict[tuple[int, ...], _Taken | None] = {}
        for position, before in states.items():
            if done - sum(position) < spare:
                _reach(following, position, before)
            fitting = _fitting(param, position, groups, no_decay)
            for index in [i for i in fitting if fits is None or fits(i, position[i], param.fqn)]:
                moved = tuple(n + (i == index) for i, n in enumerate(position))
                _reach(following, moved, None if before is None else (before, index, param.fqn))
        states = following
        if len(states) > _MAX_STATES:
            return None
    taken = states.get(tuple(map(len, groups)))
    if taken is None:
        return None
    names: list[list[str]] = [[] for _ in groups]
    while taken:
        taken, index, fqn = taken
        names[index].append(fqn)
    return [group[::-1] for group in names]


def _reach(states: dict[tuple[int, ...], _Taken | None], position: tuple[int, ...], taken: _Taken | None) -> None:
    states[position] = None if position in states else taken


def _fitting(
    param: Param, position: tuple[int, ...], groups: Sequence[Sequence[Shape]], no_decay: Sequence[bool]
) -> list[int]:
    """Return the groups whose next parameter may be `param`."""
    fitting = [
        index
        for index, shapes in enumerate(groups)
        if position[index] < len(shapes) and shapes[position[index]] in (None, param.shape)
    ]
    if len(no_decay) == len(groups) and len({no_decay[index] for index in fitting}) == 2:
        wanted = param.fqn.lower().endswith(_NO_DECAY)
        return [index for index in fitting if no_decay[index] is wanted]
    return fitting
