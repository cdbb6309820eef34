"""Captures the states and the groups of an optimizer as named tensors and JSON."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.layout import Layout, Shard, global_state, shards_of
from ckptkit.checkpoint.state.optimizer.layout import (
    PLAIN,
    SHARD,
    Held,
    cuts,
    has_plain,
    held_nested,
    layouts,
    memory_order,
    placed,
    shard_names,
)
from ckptkit.checkpoint.state.optimizer.methods import called_before_save, check_whole
from ckptkit.checkpoint.state.optimizer.tree import GROUP_NAMES
from ckptkit.checkpoint.state.values import JSON, described, encode, is_more
from ckptkit.checkpoint.state.views import in_one_memory, memories, shared_views
from ckptkit.errors import SaveError, UsageError
from ckptkit.formats.dcp.host_bytes import expanded_ones, hidden_ones
from ckptkit.formats.dcp.subclasses import SEPARATOR, STATES, Recipe, is_state_in_parts, keeps_parts, open_all
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.state.local_part import ShardLayout


_LISTED = 5


@dataclass(frozen=True, slots=True)
class CapturedOptimizer:
    """Holds an optimizer's captured state.

    Attributes:
        tree: JSON with these keys. "param_groups": the groups, each with "params", a list of FQNs. "values": non-tensor
            state, by FQN. "shared": state that belongs to no parameter. "held", "orders", "own", "same", "views",
            "kinds", "containers" and "tied" are optional; comments in `OptimizerTree` describe them.
        recipes: How tensor subclasses are split into plain tensors (`Recipe`), by (FQN, state name). `tensors` contains
            these plain tensors.
    """

    tensors: dict[tuple[str, str], torch.Tensor]  # live tensors by (fqn, state name); DTensors if the state is sharded
    masters: dict[str, torch.Tensor]  # live fp32 copies of low-precision parameters, by FQN
    tree: JSON
    loose: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors that `tree` refers to
    recipes: dict[tuple[str, str], Recipe] = field(default_factory=dict)
    cut: dict[str, ShardLayout] = field(default_factory=dict)  # layouts of the sharded parameters, by FQN
    unshaped: set[str] = field(default_factory=set)  # keys of plain tensors whose shape may differ between ranks
    joined: set[tuple[str, str]] = field(default_factory=set)  # keys of the tensors that the function `joined` returned


def named_parameters(optimizer: Any, names: Mapping[int, str], what: str) -> dict[str, torch.nn.Parameter]:
    """Return the parameters in all groups by FQN, in the optimizer's order.

    Args:
        names: FQNs in the model, by id(parameter).
        what: The optimizer's key, for errors.

    Raises:
        UsageError: A parameter does not belong to the model.
    """
    found: dict[str, torch.nn.Parameter] = {}
    strangers = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                strangers.append(f"group {index} parameter {position} of shape {list(parameter.shape)}")
            else:
                found[name] = parameter
    if strangers:
        raise UsageError(
            f"{what}: it holds parameters that are not in the model: {first_few(strangers)}. "
            "Was the optimizer built before the model was wrapped? Build it after fully_shard, or add "
            "the missing module to TrainState(model={...})."
        )
    return found


def joined(
    what: str, states: Mapping[str, Any], parameter: torch.Tensor, shards: Sequence[Shard]
) -> dict[str, torch.Tensor]:
    """Return torchao's quantized states of a parameter that is a part of a larger tensor (see `TrainState.layout`).

    Each state is returned, by its name, as this rank's part of the larger tensor's state. Returns {} if `shards` is
    empty, because the layout then does not declare the parameter.

    Raises:
        SaveError: A state has a different shape than the parameter.
    """
    recipes = open_all({k: v for k, v in states.items() if not is_state_in_parts(v)})[1] if shards else {}
    return {
        name: global_state(f"{what}.{name}", states[name], parameter, shards)
        for name, recipe in recipes.items()
        if recipe["class"] in STATES
    }


def capture_optimizer(
    optimizer: Any,
    names: Mapping[int, str],
    what: str,
    layout: Layout | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> CapturedOptimizer:
    """Return the optimizer's state. The captured tensors share memory with the live tensors.

    Does not step the optimizer, and creates or moves no state. First, the optimizer's `state_dict` pre-hooks and its
    own `state_dict` are run, because both may update the state. If other code has changed elements of the weights, the
    fp32 masters take over these elements.

    Args:
        names, what: As for `named_parameters`.
        layout: The layout in `TrainState`.
        weights: All tensors of the models, by FQN. States may share memory with them.

    Raises:
        UsageError: A parameter does not belong to the model.
        SaveError: A state is neither a supported tensor nor a value that loads safely.
    """
    parameters = named_parameters(optimizer, names, what)
    given = called_before_save(optimizer, parameters, what)
    captured = CapturedOptimizer({}, {}, {})
    loose = captured.loose
    by_id = {id(parameter): fqn for fqn, parameter in parameters.items()}
    stepped = {fqn: parameter for fqn, parameter in parameters.items() if parameter in optimizer.state}
    shown = {fqn: _container(optimizer.state[item], f"{what}: the state of {fqn}") for fqn, item in stepped.items()}
    if containers := {fqn: tree for fqn, tree in shown.items() if tree}:
        captured.tree["containers"] = containers
    captured.cut.update(cuts(parameters))
    _capture_states(captured, optimizer, stepped, what)
    of_states = set(loose)
    every = {**(weights or {}), **parameters}
    if views := shared_views(memories(optimizer, every), captured.tree.get("same", [])):
        captured.tree["views"] = views
    declared: dict[str, dict[str, Any]] = {}
    for (fqn, name), value in captured.tensors.items() if layout else ():
        declared.setdefault(fqn, {})[name] = value
    wholes = {
        (fqn, name): whole
        for fqn, states in declared.items()
        for name, whole in joined(f"{what}.state.{fqn}", states, parameters[fqn], shards_of(layout or {}, fqn)).items()
    }
    owners = {key: parameters[key[0]] for key in captured.tensors} if keeps_parts(optimizer) else {}
    table, recipes, reasons = open_all({**captured.tensors, **wholes}, owners)
    captured.recipes.update(recipes)
    captured.joined.update((fqn, name) for fqn, name in table if (fqn, name.partition(SEPARATOR)[0]) in wholes)
    for (fqn, name), recipe in recipes.items():
        if recipe["shape"] != (shape := list(wholes.get((fqn, name), parameters[fqn]).shape)):
            reasons[fqn, name] = (
                f"has the shape {recipe['shape']}, but its parameter has {shape}. A load creates quantized states with "
                "the parameter's shape"
            )
    captured.unshaped.update(
        f"{what}.state.{fqn}.{name}{SEPARATOR}{part}"
        for (fqn, name), recipe in recipes.items()
        for part, spec in recipe["inner"].items()
        if spec["placed"] == "own"
    )
    opened = {f"{fqn}.{name}": tensor for (fqn, name), tensor in table.items()}
    refuse_hidden(f"{what}.state.", opened, reasons={".".join(key): why for key, why in reasons.items()})
    captured.tensors.clear()
    captured.tensors.update(table)
    refuse_hidden(f"{what}.master.", captured.masters)
    for index, group in enumerate(optimizer.param_groups):
        _check_names(group, f"{what}: group {index}")
    captured.tree["param_groups"] = [
        {k: encode(v, f"{what}.param_groups.{i}.{k}", loose) for k, v in group.items() if k not in GROUP_NAMES}
        | {"params": [by_id[id(parameter)] for parameter in group["params"]]}
        for i, group in enumerate(optimizer.param_groups)
    ]
    shared = {key: state for key, state in optimizer.state.items() if isinstance(key, str)}
    captured.tree["shared"] = {key: encode(state, f"{what}.shared.{key}", loose) for key, state in shared.items()}
    captured.unshaped.update(loose)
    if helds := held_nested({key: tensor for key, tensor in loose.items() if key not in of_states}):
        captured.tree["held"] = {**captured.tree.get("held", {}), **helds}
    check_whole(optimizer, given, parameters, what)
    return captured


def _container(state: Any, what: str) -> JSON:
    """Return JSON that describes the class of a parameter's state dict, and the order of its keys.

    The JSON contains null in place of each value. Returns {} if the class is dict.

    Raises:
        SaveError: A load could not create a dict of this class.
    """
    if type(state) is dict:
        return {}
    if type(state) is OrderedDict:
        return encode(OrderedDict.fromkeys(state), what, {})
    if type(state) is defaultdict:
        return encode(defaultdict(state.default_factory, dict.fromkeys(state)), what, {})
    name = type(state).__name__
    raise SaveError(f"{what} is a {name}; only a dict, an OrderedDict or a defaultdict can be saved.")


def _capture_states(
    captured: CapturedOptimizer, optimizer: Any, parameters: Mapping[str, torch.Tensor], what: str
) -> None:
    """Add the states of `parameters` to `captured`: to its `tensors`, its `masters`, or the JSON in its `tree`."""
    import torch

    shards = shard_names((p, optimizer.state[p]) for p in parameters.values())
    master_name = getattr(optimizer, "master_state_name", None)
    values: dict[str, dict[str, JSON]] = {}
    helds: dict[str, Held] = {}
    orders: dict[str, list[int]] = {}
    kinds: dict[str, dict[str, JSON]] = {}
    plain: list[str] = []  # states with plain tensors whose values may differ between ranks
    seen: dict[Any, list[str]] = {}  # by location in memory: FQN and name of the first state that is this tensor
    same: list[list[str]] = []
    loose = captured.loose
    for fqn, parameter in parameters.items():
        state = optimizer.state[parameter]
        if not state:
            values[fqn] = {}
        _check_names(state, f"{what}: the state of {fqn}")
        for name, value in state.items():
            if name == master_name:
                captured.masters[fqn] = value
                continue
            if isinstance(value, torch.Tensor) and (first := seen.setdefault(_place(value), [fqn, name])) != [
                fqn,
                name,
            ]:
                same.append([fqn, name, *first])
            if is_state_in_parts(value):
                captured.tensors[fqn, name] = value
                continue
            if not isinstance(value, torch.Tensor):
                before = len(loose)
                values.setdefault(fqn, {})[name] = encode(value, f"{what}.values.{fqn}.{name}", loose)
                helds.update(held_nested({key: loose[key] for key in islice(reversed(loose), len(loose) - before)}))
                if has_plain(value):
                    plain.append(f"{fqn}.{name}")
                continue
            captured.tensors[fqn, name], held = placed(value, parameter, name, shards)
            key = f"{what}.state.{fqn}.{name}"
            if is_more(value) and (tree := described(value, {"$ref": key}, key)).keys() != {"$ref"}:
                kinds.setdefault(fqn, {})[name] = tree
            if (order := memory_order(value, parameter)) is not None:
                orders[key] = order
            if held is None and (fqn not in captured.cut or value.dim() == 0):
                continue
            if held != SHARD and type(value) is torch.Tensor:
                captured.unshaped.add(key)
            if held is not None:
                helds[key] = held
            if held == PLAIN and value.numel() > 1:
                plain.append(f"{fqn}.{name}")
    own = {"layouts": layouts(captured.cut), "states": plain} if plain else {}
    found = {"held": helds, "orders": orders, "own": own, "same": same, "kinds": kinds}
    captured.tree.update(param_groups=[], values=values, shared={}, **{k: v for k, v in found.items() if v})


def _place(tensor: torch.Tensor) -> Any:
    """Return a key that two tensors share only if they are the same elements of the same memory."""
    local = in_one_memory(tensor)
    if local is None:
        return id(tensor)
    kind = type(tensor), local.dtype, local.is_conj(), local.is_neg(), getattr(tensor, "placements", None)
    return local.data_ptr(), local.shape, local.stride(), tensor.shape, *kind


def _check_names(table: Mapping[Any, Any], what: str) -> None:
    """Raise SaveError if a key is not a string.

    A load would turn the key into a string, and the optimizer would not find it.
    """
    others = [key for key in table if type(key) is not str]
    if others:
        raise SaveError(f"{what} has the key {others[0]!r:.80}, which is not a string. Use a string.")


def refuse_hidden(
    prefix: str, tensors: Mapping[str, torch.Tensor], *, filled: bool = False, reasons: Mapping[str, str] | None = None
) -> None:
    """Raise SaveError if the values of some tensors cannot be saved as plain bytes. The error names the tensors.

    Args:
        filled: Whether a load fills the live tensors. If True, tensors that cannot be written to are refused, too.
        reasons: Why a tensor subclass could not be split into plain tensors, by the tensor's name.
    """
    hidden = {**hidden_ones(tensors), **(reasons or {})} or (expanded_ones(tensors) if filled else {})
    if hidden:
        lines = [f"{prefix}{name} {why}." for name, why in list(hidden.items())[:_LISTED]]
        more = [f"and {len(hidden) - _LISTED} more"] if len(hidden) > _LISTED else []
        raise SaveError("a load could not restore these, so nothing was saved:\n  " + "\n  ".join(lines + more))
