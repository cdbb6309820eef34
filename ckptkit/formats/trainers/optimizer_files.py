"""Reads optimizer state that each rank saved as `Optimizer.state_dict()`, keyed by index or by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.catalog.entry import ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.pickles.tensors import StoredTensor, is_tensor
from ckptkit.formats.trainers.master_check import MasterSampler
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.formats.trainers.rank_files import FlatVector, Joined, check_steps, join
from ckptkit.storage import Store

PREFIX = "optimizer"


@dataclass(slots=True)
class OptimizerState:
    """The catalog entries of an optimizer."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, param: str | int, state: str, joined: Joined) -> None:
        """Add a state of the parameter with this FQN, or with this number if its FQN is not known."""
        name = state_name(param, state)
        fqn = param if isinstance(param, str) else ""
        entry = joined.entry(name, Role.OPTIMIZER, fqn=fqn, state=state, key=(PREFIX, "state", param, state))
        self.tensors[name] = entry
        self.notes += joined.notes

    def add_value(self, param: str | int, state: str, value: Any) -> None:
        """Add a state that is not a tensor, such as a step that is a plain number."""
        name = state_name(param, state)
        key = (PREFIX, "state", param, state)
        self.objects[name] = ObjectEntry(name, encoding="value", value=value, role=Role.OPTIMIZER, key=key)


def state_name(param: str | int, state: str) -> str:
    """Return the name that DCP would give to a parameter's optimizer state."""
    return f"{PREFIX}.state.{param}.{state}"


def read_optimizer(
    values: Sequence[Any],
    params: Sequence[Param],
    *,
    what: str,
    names: Mapping[Any, str] | None = None,
    replica: Sequence[int] = (),
) -> OptimizerState:
    """Return the optimizer's entries, with the parts of all ranks joined.

    Args:
        values: The `Optimizer.state_dict()` of each rank, in rank order.
        params: The model's parameters in module order, without wrapper names. A tied parameter is listed once. An empty
            list means that the order is unknown.
        names: Parameter name of each index, if known.
        replica: The ranks that hold one replica of the model (see `RankModel`). () means all ranks.
    """
    found = OptimizerState()
    if not is_state_dicts(values):
        odd = next((rank for rank, value in enumerate(values) if not _is_state_dict(value)), 0)
        found.notes.append(f"{what.format(rank=odd)} contains no Optimizer.state_dict(); the optimizer was skipped.")
        return found
    check_steps([list(value["state"].values()) for value in values], [what.format(rank=r) for r in range(len(values))])
    names = _names(values, params) if names is None else names
    if names is None or _differ(values, names):
        of_ranks = f"the optimizer in {what.format(rank='*')}"
        unproved = "the model's names and shapes do not prove which parameter has which index."
        pieces = _has_pieces(values)
        flat = _read_flat({rank: values[rank] for rank in replica or range(len(values))}, params) if pieces else None
        if flat is not None:
            return flat
        if not params or pieces:
            found.notes.append(f"{of_ranks} was skipped: its state is keyed by index, and {unproved}")
            return found
        found.notes.append(f"{of_ranks} is keyed by index, and {unproved} Only a training job can load it, by order.")
        names = {}
    tensors = join([dict(_flat(value["state"])) for value in values], what=what)
    for (index, state), joined in tensors.items():
        found.add(names.get(index, index), state, joined)
    for (index, state), value in _flat(values[0]["state"]):
        if not is_tensor(value) and plain_value(value):
            found.add_value(names.get(index, index), state, value)
    found.objects.update(group_objects(values[0]["param_groups"], names))
    return found


def match_masters(
    store: Store,
    masters: Mapping[tuple[int, int], Joined],
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Param],
    weights: Mapping[str, TensorEntry],
) -> list[list[str]] | None:
    """Return the parameter names of the fp32 master weights in each group, or None if the names remain uncertain.

    Master weights are matched to parameters by shape and order. If several assignments are possible, the values of
    weights and master weights are compared.

    Args:
        masters: The master weights by (group, index in the group). They have no names, but are in the order of the
            optimizer's groups.
        groups: The optimizer's param_groups.
        weights: The model's tensors by FQN.
    """
    shapes: list[list[tuple[int, ...] | None]] = [[] for _ in groups]
    for (group, _), joined in masters.items():
        if group >= len(groups):
            return None
        shapes[group].append(joined.shape)
    if [len(group.get("params", ())) for group in groups] != list(map(len, shapes)):
        return None
    assigned = assign(params, shapes)
    if assigned is None:  # group by weight decay, which is only a hint: the values must confirm it
        no_decay = [group.get("weight_decay") == 0 for group in groups]
        sampler = MasterSampler(store, weights)
        entries = {key: joined.entry("master", Role.MASTER) for key, joined in masters.items()}
        assigned = assign(params, shapes, no_decay, lambda group, i, fqn: sampler.fits(entries[group, i], fqn))
    return assigned


def values_agree(
    store: Store,
    masters: Mapping[tuple[int, int], Joined],
    assigned: Sequence[Sequence[str]],
    weights: Mapping[str, TensorEntry],
) -> bool:
    """Return whether a sample of each master weight, cast to the weight's dtype, equals the weight.

    The optimizer may list parameters of equal shape in a different order than the model. Only the values can show this.
    """
    sampler = MasterSampler(store, weights)
    return all(
        sampler.fits(masters[group, i].entry("master", Role.MASTER), fqn)
        for group, fqns in enumerate(assigned)
        for i, fqn in enumerate(fqns)
    )


def names_by_key(groups: Sequence[Mapping[str, Any]], assigned: Sequence[Sequence[str]]) -> dict[Any, str]:
    """Return {key in the `params` of a group: parameter name}. `assigned` contains each group's names, in order."""
    keys = [key for group in groups for key in group["params"]]
    return dict(zip(keys, [fqn for fqns in assigned for fqn in fqns], strict=True))


def master_entry(fqn: str, joined: Joined) -> TensorEntry:
    """Return the catalog entry of a parameter's fp32 master weight."""
    key = (PREFIX, "master", fqn)
    return joined.entry(f"{PREFIX}.master.{fqn}", Role.MASTER, fqn=fqn, state="master", key=key)


def group_objects(groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str]) -> dict[str, ObjectEntry]:
    """Return the settings of the parameter groups as objects. In `params`, keys are replaced by parameter names."""
    found = {}
    for index, group in enumerate(groups):
        for setting, given in group.items():
            value = [names.get(param, param) for param in given] if setting == "params" else given
            if plain_value(value):
                name = f"{PREFIX}.param_groups.{index}.{setting}"
                key = (PREFIX, "param_groups", index, setting)
                found[name] = ObjectEntry(name, encoding="value", value=value, role=Role.OPTIMIZER, key=key)
    return found


def plain_value(value: Any) -> bool:
    """Return whether a value consists only of None, bools, numbers and strings."""
    if isinstance(value, (list, tuple)):
        return all(map(plain_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and plain_value(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def is_state_dicts(values: Sequence[Any]) -> bool:
    """Return whether every rank saved an `Optimizer.state_dict()`."""
    return bool(values) and all(_is_state_dict(value) for value in values)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in value["param_groups"])
        and all(isinstance(state, dict) for state in value["state"].values())
    )


def _flat(state: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[tuple[Any, str], Any]]:
    for index, values in state.items():
        for name, value in values.items():
            yield (index, str(name)), value


def _names(values: Sequence[Mapping[str, Any]], params: Sequence[Param]) -> dict[Any, str] | None:
    """Return the parameter name for each key in `state`, or None if the keys and shapes do not determine the names."""
    groups = values[0]["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in {*keys, *values[0]["state"]}}
    if not all(set(value["state"]) <= set(keys) for value in values):
        raise CorruptCheckpointError("an optimizer's state has indices that are in none of its groups.")
    by_name = {param.fqn: param for param in params}
    shapes = [[_shape(values, key) for key in group["params"]] for group in groups]
    assigned = assign(params, shapes, [group.get("weight_decay") == 0 for group in groups])
    if assigned is None:
        return None
    names = names_by_key(groups, assigned)
    return names if all(_fits(values, key, by_name[fqn]) for key, fqn in names.items()) else None


def _has_pieces(values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a state may be a flat piece (FSDP1), which can be placed only if the parameters are known."""
    return len(values) > 1 and any(
        isinstance(tensor, StoredTensor) and tensor.shape not in ((), (1,))
        for value in values
        for _, tensor in _flat(value["state"])
    )


def _differ(values: Sequence[Mapping[str, Any]], names: Mapping[Any, str]) -> bool:
    """Return whether the ranks' tensors for a numbered parameter are different pieces, not replicas.

    Pieces have one dimension. Tensors of equal shape with more dimensions are replicas, even if rounding made them
    different.
    """
    seen: dict[tuple[Any, str], StoredTensor] = {}
    found = False
    for value in values:
        for key, tensor in _flat(value["state"]):
            if isinstance(tensor, StoredTensor) and tensor.shape not in ((), (1,)) and names.get(key[0]) != key[0]:
                first = seen.setdefault(key, tensor)
                if first is not tensor and (first.shape != tensor.shape or not first.same_storage(tensor)):
                    if first.shape == tensor.shape and len(tensor.shape) > 1:
                        return False
                    found = True
    return found


def _shape(values: Sequence[Mapping[str, Any]], key: Any) -> tuple[int, ...] | None:
    """Return the shape of the parameter's first state tensor that is not a scalar, or None if all are scalars."""
    for value in values:
        for tensor in value["state"].get(key, {}).values():
            if is_tensor(tensor) and len(tensor.shape) > 0:
                return tuple(tensor.shape)
    return None


def _fits(values: Sequence[Mapping[str, Any]], key: Any, param: Param) -> bool:
    """Return whether each state is a scalar or has the parameter's full shape, and is not a flat 1-D piece."""
    for value in values:
        for tensor in value["state"].get(key, {}).values():
            if isinstance(tensor, StoredTensor) and tensor.shape not in ((), (1,), param.shape):
                return False
    return True


# --- FSDP1's rank-local optimizer state: each rank's 1-D parts of flat parameters, by index
#
# With use_orig_params=True, an index refers to a parameter. With use_orig_params=False, an index refers to a unit: the
# parameters of one wrapped module, concatenated and split into ceil(numel / ranks) elements per rank. The files do not
# record which modules were wrapped. This code tries one unit per block in a module list, then one unit for the whole
# model, and accepts a choice only if every size fits.


_BLOCK = re.compile(r"(.*?\.\d+)\..+")


def _read_flat(values: Mapping[int, Mapping[str, Any]], params: Sequence[Param]) -> OptimizerState | None:
    """Return the entries for FSDP1's rank-local flat state, or None if the sizes do not prove the layout.

    Args:
        values: The `Optimizer.state_dict()` of each rank that has a shard, in the order of the shards. If there are
            several replicas, only the ranks of one replica.
    """
    groups = next(iter(values.values()))["param_groups"]
    numels = [[_numel(_flat_states(values, index)) for index in group["params"]] for group in groups]
    no_decay = [group.get("weight_decay") == 0 for group in groups]
    for units in ([[param] for param in params], _blocks(params), [list(params)]):
        by_first = {unit[0].fqn: unit for unit in units if unit}
        # The flat parameter of several parameters may be padded to a multiple of the number of ranks.
        step = 1 if len(units) == len(params) else len(values)
        sizes = [Param(fqn, (-(-_total(unit) // step),)) for fqn, unit in by_first.items()]
        wanted = [[None if n is None else (-(-n // step),) for n in group] for group in numels]
        assigned = assign(sizes, wanted, no_decay if step == 1 else ())
        if assigned is not None:
            named = {index: by_first[fqn] for index, fqn in names_by_key(groups, assigned).items()}
            found = _flat_entries(values, groups, named)
            if found is not None:
                return found
    return None


def _numel(states: Mapping[str, Sequence[tuple[int, StoredTensor]]]) -> int | None:
    """Return the number of elements of a state on all ranks, or None if there is no state."""
    return next((sum(tensor.numel for _, tensor in pieces) for pieces in states.values()), None)


def _total(unit: Sequence[Param]) -> int:
    return sum(math.prod(param.shape) for param in unit)


def _blocks(params: Sequence[Param]) -> list[list[Param]]:
    """Return each FSDP unit's parameters, assuming one unit per block in a module list ("layers.0", "layers.1").

    The parameters outside of blocks form the first unit. Within a unit, they have the order of `parameters()`.
    """
    units: dict[str, list[Param]] = {"": []}
    for param in params:
        match = _BLOCK.fullmatch(param.fqn)
        units.setdefault(match[1] if match else "", []).append(param)
    return [members for members in units.values() if members]


def _flat_states(values: Mapping[int, Mapping[str, Any]], index: Any) -> dict[str, list[tuple[int, StoredTensor]]]:
    """Return {state name: [(rank, 1-D tensor), ...]} of the parameter or FSDP unit that has this index.

    Includes only ranks that have a part of the state.
    """
    found: dict[str, list[tuple[int, StoredTensor]]] = {}
    for rank, value in values.items():
        for name, tensor in value["state"].get(index, {}).items():
            if isinstance(tensor, StoredTensor) and len(tensor.shape) == 1:
                found.setdefault(name, []).append((rank, tensor))
    return found


def _flat_entries(
    values: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], units: Mapping[Any, Sequence[Param]]
) -> OptimizerState | None:
    """Return the optimizer's entries, assuming that each index stands for the parameters that `units` maps it to.

    Returns None if a size does not fit.
    """
    found = OptimizerState()
    for index, unit in units.items():
        total = _total(unit)
        padded = [-(-total // len(values))] * len(values)
        states = _flat_states(values, index)
        if not states:
            return None
        for state, parts in states.items():
            numels = [tensor.numel for _, tensor in parts]
            if sum(numels) != total and not (len(unit) > 1 and numels == padded):
                return None
            vector = FlatVector.of_ranks(parts)
            position = 0
            for param in unit:
                found.add(param.fqn, state, vector.tensor(param.shape, position))
                position += math.prod(param.shape)
        # A rank without a part of the parameter has no state. All other ranks have the same step counts.
        of_rank: Mapping[str, Any] = next(
            (value["state"][index] for value in values.values() if index in value["state"]), {}
        )
        for state, value in of_rank.items():
            for param in unit:
                if isinstance(value, StoredTensor) and not value.shape:
                    found.add(param.fqn, state, Joined(value.dtype, (), SliceArray.of([value.slice()], 0)))
                elif not is_tensor(value) and plain_value(value):
                    found.add_value(param.fqn, state, value)
    settings = [
        {**group, "params": [param.fqn for index in group["params"] for param in units[index]]} for group in groups
    ]
    found.objects.update(group_objects(settings, {}))
    found.notes.append("FSDP1 optimizer: the wrapped modules were inferred from the sizes, which all match.")
    return found
