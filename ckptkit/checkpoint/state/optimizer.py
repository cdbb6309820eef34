"""Captures and restores an optimizer's state by parameter name, without stepping the optimizer.

This module reads and sets `optimizer.state` and `optimizer.param_groups` itself, because two torch functions have side
effects. `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` steps an optimizer that has no state yet,
which changes later training. `Optimizer.load_state_dict` casts fp32 state to the dtype of a low-precision parameter.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.layout import Layout, Shard, global_state, shards_of
from ckptkit.checkpoint.state.optimizer_layout import (
    PLAIN,
    SHARD,
    Held,
    cuts,
    has_plain,
    held_nested,
    layouts,
    new_held,
    new_placed,
    placed,
    shard_names,
)
from ckptkit.checkpoint.state.values import JSON, decode, described, encode, is_more, is_order, order_of
from ckptkit.checkpoint.state.views import View, in_one_memory, memories, shared_views
from ckptkit.errors import CorruptCheckpointError, SaveError, UsageError
from ckptkit.formats.dcp.host_bytes import (
    after_load,
    before_state_dict,
    expanded_ones,
    has_state_dict_hooks,
    hidden_ones,
    local_part,
    placed_like,
    row_major,
    why_not_dense,
    without_subclass,
)
from ckptkit.formats.dcp.subclasses import SEPARATOR, STATES, Recipe, is_state_in_parts, keeps_parts, open_all
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.state.local_part import ShardLayout

IMPLEMENTATION_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that affect how a step is computed, but not its result. A load keeps their live values."""

_ONLY_STATE = ("torch.optim.", "bitsandbytes.", "flashoptim.", "ckptkit.")
"""Prefixes of modules. A `load_state_dict` that is defined in them restores only state and groups.

So a load need not call it. bitsandbytes' method would even copy the whole state.
"""

UNITED = ("held", "orders", "same", "views", "kinds", "containers", "tied")
"""Keys of an optimizer's tree that describe states.

If their values differ between ranks, the values of all ranks are saved.
"""

_LISTED = 5
_GROUP_NAMES = frozenset({"params", "param_names"})


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
        weights: All tensors of the models, by FQN. States may share memory with them.

    Raises:
        UsageError: A parameter does not belong to the model.
        SaveError: A state is neither a supported tensor nor a value that loads safely.
    """
    parameters = named_parameters(optimizer, names, what)
    given = _called_before_save(optimizer, parameters, what)
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
        {k: encode(v, f"{what}.param_groups.{i}.{k}", loose) for k, v in group.items() if k not in _GROUP_NAMES}
        | {"params": [by_id[id(parameter)] for parameter in group["params"]]}
        for i, group in enumerate(optimizer.param_groups)
    ]
    shared = {key: state for key, state in optimizer.state.items() if isinstance(key, str)}
    captured.tree["shared"] = {key: encode(state, f"{what}.shared.{key}", loose) for key, state in shared.items()}
    captured.unshaped.update(loose)
    if helds := held_nested({key: tensor for key, tensor in loose.items() if key not in of_states}):
        captured.tree["held"] = {**captured.tree.get("held", {}), **helds}
    _check_whole(optimizer, given, parameters, what)
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
    raise SaveError(
        f"{what} is a {name}; only dicts can be saved, and of their subclasses OrderedDict and defaultdict."
    )


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


def memory_order(state: torch.Tensor, parameter: torch.Tensor) -> list[int] | None:
    """Return the order of a state's dimensions in memory, slowest first.

    Returns None if a load gives a new state this order anyway: the parameter's order if the shapes are equal, otherwise
    row-major. Also returns None if the state is not a plain strided tensor.
    """
    import torch

    strided = (
        type(state) in (torch.Tensor, torch.nn.Parameter) and state.layout is torch.strided and not state.is_nested
    )
    if not strided or state.dim() < 2:
        return None
    order, usual = order_of(state), order_of(parameter) if state.shape == parameter.shape else None
    return None if order == usual else order or list(range(state.dim()))


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


def class_name(item: Any) -> str:
    """Return the class name of an optimizer or scheduler, without the module, because modules may be renamed.

    For an optimizer with master weights, returns the name of the wrapped optimizer. For a scheduler that combines other
    schedulers, the result also names these.
    """
    while type(item).__name__ == "MasterWeightOptimizer":
        item = item.base
    joined = getattr(item, "_schedulers", None) or ()
    inner = f"({', '.join(map(class_name, joined))})" if joined else ""
    return type(item).__name__ + inner


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


def _called_before_save(optimizer: Any, parameters: Mapping[str, torch.Tensor], what: str) -> Any:
    """Run the hooks and methods with which an optimizer may update its state before a save.

    If the optimizer wraps or combines other optimizers, theirs are run, too. Returns the result of `own_state_dict`.

    Raises:
        SaveError: One of the wrapped or combined optimizers has state that would not be saved.
    """
    before_state_dict(optimizer)
    if getattr(optimizer, "master_state_name", None) is not None:
        optimizer.follow_weights()
    if inner := inner_optimizers(optimizer):
        fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
        with optimizer.lend_state() as lent:
            for one in inner:
                its = {fqns[id(lent.get(id(p), p))]: p for group in one.param_groups for p in group["params"]}
                _check_whole(one, _called_before_save(one, its, what), its, what)
                if len(inner) > 1 and (shared := [key for key in one.state if isinstance(key, str)]):
                    raise SaveError(
                        f"{what}: {type(one).__name__}, one of several optimizers that are saved as one, has the state "
                        f"{shared[0]!r}, which belongs to no parameter, so a load could not tell whose it is. Keep it "
                        "in the state of a parameter."
                    )
    return own_state_dict(optimizer, what)


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """Return the optimizers that an optimizer class of ckptkit wraps or combines. Returns () for any other class.

    Access the state of the inner optimizers only inside `with optimizer.lend_state():`.
    """
    found: Sequence[Any] = optimizer.inner_optimizers if hasattr(optimizer, "lend_state") else ()
    return found


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all optimizers that it combines."""
    yield optimizer
    for one in inner_optimizers(optimizer):
        yield from with_inner(one)


def own_state_dict(optimizer: Any, what: str) -> Any:
    """Return the result of the optimizer's `state_dict`.

    Returns None if the method is torch's or ckptkit's and has no hooks, because the result would then contain only the
    state and the groups. Call this function before you read the state, because an optimizer's `state_dict` may update
    the state.

    Raises:
        SaveError: The method does not return a dict like torch's.
    """
    import torch

    torchs = torch.optim.Optimizer.state_dict
    method = getattr(optimizer, "state_dict", torchs)
    method = getattr(method, "__func__", method)
    is_whole = method is torchs or getattr(method, "__module__", "").startswith("ckptkit.")
    if is_whole and not has_state_dict_hooks(optimizer):
        return None
    # For flashoptim, call torch's method, which calls the hooks, too. flashoptim's method fails for uneven shards.
    given: Any = torchs(optimizer) if keeps_parts(optimizer) else optimizer.state_dict()
    if isinstance(given, Mapping) and isinstance(given.get("state", {}), Mapping):
        groups = given.get("param_groups", ())
        if isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups):
            return given
    raise SaveError(
        f"{what}: the state_dict of {type(optimizer).__name__} is {reprlib.repr(given)}, expected a dict with a dict "
        "'state' and a list 'param_groups' of dicts, like torch's. Fix the method or the hook that returns it."
    )


def _check_whole(optimizer: Any, given: Any, parameters: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise SaveError if the optimizer has state that is neither in its groups nor in the `state` of its parameters.

    Args:
        given: The result of `own_state_dict`.
    """
    import torch

    known = set(map(id, parameters.values()))
    others = [key for key in optimizer.state if not isinstance(key, str) and id(key) not in known]
    if others:
        shown = f"a tensor of shape {list(others[0].shape)}" if isinstance(others[0], torch.Tensor) else repr(others[0])
        raise SaveError(
            f"{what}: it has state for {shown}, which is in none of its groups, so a load could not "
            "restore it. Delete it from optimizer.state, or use a string as the key of state that "
            "belongs to no parameter."
        )
    if given is None:
        return
    name, groups = type(optimizer).__name__, given.get("param_groups", ())
    more = [key for key in given if key not in ("state", "param_groups")]
    if not more:
        for group, live in zip(groups, optimizer.param_groups, strict=False):
            more += [key for key in group if key not in live and key not in _GROUP_NAMES]
        strings = [key for key in given.get("state", ()) if isinstance(key, str)]
        more += [key for key in strings if key not in optimizer.state and key not in parameters]
    if more:
        raise SaveError(
            f"{what}: the state_dict of {name} has {', '.join(map(repr, more))}, but only 'state' "
            "and 'param_groups' of an optimizer are saved. Pass the inner optimizer as TrainState(optimizer=), or this "
            "one as TrainState(extra={...})."
        )
    if changed := [f"{key!r} of {where}" for where, key in _changed(given, optimizer, parameters)]:
        raise SaveError(
            f"{what}: the state_dict of {name} returns other values than the optimizer has: {first_few(changed)}. Only "
            "the optimizer's own state and groups are saved. Remove the hook, or apply its change to the optimizer."
        )


def _changed(given: Any, optimizer: Any, parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (parameter or group, name) of each value in the state dict `given` that differs from the live value.

    Live values that `given` lacks do not count, because it is harmless to save them.
    """
    names = {id(parameter): fqn for fqn, parameter in parameters.items()}
    # If a parameter is twice in a group, torch numbers it by its last position.
    fqns = dict(enumerate(names[id(p)] for group in optimizer.param_groups for p in group["params"]))
    found = []
    for key, state in given.get("state", {}).items():
        fqn = fqns.get(key, key)
        live = optimizer.state.get(parameters.get(fqn, key))
        if not isinstance(state, Mapping) or not isinstance(live, Mapping):
            found += [] if _same(live, state) else [(str(fqn), "state")]
            continue
        for name, value in state.items():
            # bitsandbytes puts states into an inner dict.
            packed = {name: value} if name in live or not isinstance(value, Mapping) else value
            if any(key not in live or not _same(live[key], item) for key, item in packed.items()):
                found.append((str(fqn), str(name)))
    groups = given.get("param_groups", optimizer.param_groups)
    if len(groups) != len(optimizer.param_groups):
        return [*found, ("all groups", "param_groups")]
    for index, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        shared = [name for name in group if name in live and name not in _GROUP_NAMES]
        found += [(f"group {index}", name) for name in shared if not _same(live[name], group[name])]
    return found


def united(trees: Sequence[JSON]) -> JSON:
    """Merge the trees of an optimizer whose parameters are spread over the ranks (one tree per pipeline stage).

    A group is merged into a group with equal settings. The group at the same position is tried first, then all groups
    in order.

    Raises:
        SaveError: Trees have different values for one parameter.
    """
    first = {
        **trees[0],
        "param_groups": [{**group, "params": list(group["params"])} for group in trees[0]["param_groups"]],
    }
    groups = first["param_groups"]
    known = {fqn for group in groups for fqn in group["params"]}
    for tree in trees[1:]:
        for index, group in enumerate(tree["param_groups"]):
            if group["params"] and known.issuperset(group["params"]):
                continue
            same = [other for other in [*groups[index : index + 1], *groups] if _settings(other) == _settings(group)]
            if not same:
                same = [{**group, "params": []}]
                groups += same
            same[0]["params"] += [fqn for fqn in group["params"] if fqn not in known]
            known.update(group["params"])
        both = tree["values"].keys() & first["values"].keys()
        if unlike := sorted(fqn for fqn in both if tree["values"][fqn] != first["values"][fqn]):
            raise SaveError(
                f"the optimizer states of {first_few(unlike)} differ between pipeline stages that have the same "
                "parameter, so only one stage's values would be saved. Nothing was saved."
            )
        for fqn, kinds in tree.get("kinds", {}).items():
            first["kinds"] = {**first.get("kinds", {}), fqn: {**kinds, **first.get("kinds", {}).get(fqn, {})}}
        for part in ("values", "shared", "held", "orders", "containers", "tied"):
            if part in tree:
                first[part] = {**tree[part], **first.get(part, {})}
        if own := tree.get("own"):
            before = first.get("own", {**own, "states": []})
            first["own"] = {**before, "states": list(dict.fromkeys([*before["states"], *own["states"]]))}
        for part in ("same", "views"):
            if part in tree:
                rows = first.get(part, [])
                first[part] = [*rows, *(row for row in tree[part] if row not in rows)]
    return first


def _settings(group: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in group.items() if key != "params"}


def new_state_tensor(
    parameter: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    *,
    on_device: bool,
    held: Held | None = None,
) -> torch.Tensor:
    """Return an uninitialized tensor for one of a parameter's states, sharded over ranks like the parameter.

    If the state's shape differs from the parameter's, the state is sharded only along dimensions of equal size.

    Args:
        name: The state's name, such as "exp_avg".
        held: How the state is stored. None: as the parameter is stored.
        on_device: Whether the group keeps step counts on the device (fused or capturable). If False, a tensor of one
            element is put on the CPU, where torch keeps step counts.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = tuple(shape)
    made: torch.Tensor | None = new_held(parameter, held, dtype, shape)
    if made is not None:
        return made
    single = torch.Size(shape).numel() == 1
    if isinstance(parameter, DTensor) and shape != tuple(parameter.shape) and not single:
        # The state has no entry in `held`, so it was saved as a DTensor. Accept only Shard itself: a strided shard
        # (FSDP over tensor parallelism) has different parts.
        least = min(len(shape), parameter.dim())
        same = {dim for dim in range(least) if shape[dim] == parameter.shape[dim]}
        placements = [p if type(p) is Shard and p.dim in same else Replicate() for p in parameter.placements]
        return new_placed(parameter, placements, dtype, shape)
    # If the shape is (), only the name tells a step count from a moment. torch's load_state_dict also uses the name.
    if shape != tuple(parameter.shape) or (not shape and name == "step"):
        device = parameter.device if on_device or not single else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return torch.empty_like(without_subclass(parameter), dtype=dtype, requires_grad=False)
    local = torch.empty_like(without_subclass(local_part(parameter)), dtype=dtype, requires_grad=False)
    return placed_like(parameter, local)


def is_paged(state: torch.Tensor) -> bool:
    """Return whether a tensor is in bitsandbytes' paged memory, which moves between host and device on demand."""
    return bool(getattr(state, "is_paged", False))


def new_paged(
    optimizer: Any, parameter: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Return a new state in bitsandbytes' paged memory, or None if the optimizer would not put this state there.

    A paged optimizer puts only its two moments into paged memory, and only on an accelerator.
    """
    import torch
    from torch.distributed.tensor import DTensor

    pages = next((one for one in with_inner(optimizer) if is_paged(one) and hasattr(one, "get_state_buffer")), None)
    if pages is None or name not in ("state1", "state2") or dtype not in (torch.float32, torch.uint8):
        return None
    if isinstance(parameter, DTensor):
        return None
    allocate = None
    if shape == tuple(parameter.shape):
        allocate = pages.get_state_buffer
    elif shape == (2, *parameter.shape):
        allocate = getattr(pages, "_get_state_double_buffer", None)  # AdEMAMix has two moments in one state
    return None if allocate is None else allocate(parameter, dtype=dtype)


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """Holds the values in `CapturedOptimizer.tree` after validation. "own" is split into `layouts` and `states`."""

    param_groups: list[dict[str, JSON]]
    values: dict[str, dict[str, JSON]]
    shared: dict[str, JSON]
    held: dict[str, Held]  # how states are stored, by key; omitted if a load can derive this from the parameter
    orders: dict[str, list[int]]  # order of plain states' dimensions in memory, by key; omitted if a new state has it
    layouts: list[JSON]  # how the parameters were sharded, if `states` is not empty
    states: list[str]  # "<fqn>.<name>" of states with plain tensors whose values may differ between ranks
    same: list[list[str]]  # [fqn, name, other fqn, other name]: two parameters' states that are one tensor
    views: list[list[View]]  # states that shared an allocation
    kinds: dict[str, dict[str, JSON]]  # by FQN and name: the tags that `described` returns for tensors
    containers: dict[str, JSON]  # by FQN: an OrderedDict or defaultdict without values, if a state is not a plain dict
    tied: dict[str, str]  # other names of tied parameters -> the name in the groups

    @classmethod
    def of(cls, tree: JSON, what: str) -> OptimizerTree:
        """Validate `tree`, and return its parts."""
        import torch

        def need(holds: bool, part: str, expected: str) -> None:
            if not holds:
                raise CorruptCheckpointError(f"{what}: the saved optimizer is malformed: {part} must be {expected}.")

        need(isinstance(tree, dict), "it", "an object with 'param_groups', 'values' and 'shared'")
        groups, values, shared = (tree.get(name) for name in ("param_groups", "values", "shared"))
        need(_is_list_of(groups, dict), "'param_groups'", "a list of objects")
        for index, group in enumerate(groups or ()):
            need(_is_list_of(group.get("params"), str), f"'params' of group {index}", "a list of names")
        need(isinstance(values, dict), "'values'", "an object of objects, by parameter")
        need(_is_list_of(list(values.values()), dict), "'values'", "an object of objects, by parameter")
        need(isinstance(shared, dict), "'shared'", "an object")
        held, own = tree.get("held", {}), tree.get("own", {"layouts": [], "states": []})
        need(isinstance(held, dict), "'held'", "an object")
        need(all(how in (PLAIN, SHARD) or _is_list_of(how, str) for how in held.values()), "'held'", "of placements")
        orders = tree.get("orders", {})
        need(isinstance(orders, dict) and all(map(is_order, orders.values())), "'orders'", "of dimensions")
        need(isinstance(own, dict) and isinstance(own.get("layouts"), list), "'own'", "an object with 'layouts'")
        need(_is_list_of(own.get("states"), str), "'own'", "an object with 'states', a list of names")
        same = tree.get("same", [])
        need(
            isinstance(same, list) and all(_is_list_of(row, str) and len(row) == 4 for row in same), "'same'", "a list"
        )
        views = tree.get("views", [])
        need(
            isinstance(views, list)
            and all(
                isinstance(rows, list) and all(_is_list_of(row, str) and len(row) == 2 for row in rows)
                for rows in views
            ),
            "'views'",
            "lists of names",
        )
        kinds, containers = tree.get("kinds", {}), tree.get("containers", {})
        need(isinstance(kinds, dict) and _is_list_of([*kinds.values()], dict), "'kinds'", "an object of objects")
        made = [decode(tree, lambda _: torch.empty(0)) for trees in kinds.values() for tree in trees.values()]
        need(all(isinstance(value, torch.Tensor) for value in made), "'kinds'", "trees of tensors")
        need(isinstance(containers, dict), "'containers'", "an object")
        empty = [decode(tree, containers.__getitem__) for tree in containers.values()]
        need(
            all(isinstance(one, dict) and not any(one.values()) for one in empty),
            "'containers'",
            "dicts without values",
        )
        tied = tree.get("tied", {})
        need(isinstance(tied, dict) and _is_list_of(list(tied.values()), str), "'tied'", "an object of names")
        pairs = [[(fqn, name) for fqn, name in rows] for rows in views]
        return cls(
            groups, values, shared, held, orders, own["layouts"], own["states"], same, pairs, kinds, containers, tied
        )

    def renamed(self, fqn: str, name: str, old: str, new: str) -> OptimizerTree:
        """Return a copy of this tree in which the parameter `fqn` has the name `name`.

        Args:
            old, new: The prefix of the keys of this parameter's states, before and after the renaming.
        """
        names = {fqn: name}
        tables: dict[str, Any] = {part: with_new_head(getattr(self, part), old, new) for part in ("held", "orders")}
        for part in ("values", "kinds", "containers"):
            tables[part] = {names.get(key, key): value for key, value in getattr(self, part).items()}
        groups = [{**group, "params": [names.get(a, a) for a in group["params"]]} for group in self.param_groups]
        same = [[names.get(a, a), one, names.get(b, b), other] for a, one, b, other in self.same]
        views = [[(names.get(a, a), one) for a, one in rows] for rows in self.views]
        return replace(self, param_groups=groups, same=same, views=views, **tables)


def with_new_head(table: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a copy of the table in which keys with the prefix `old` have the prefix `new` instead."""
    return {new + key[len(old) :] if key.startswith(old) else key: item for key, item in table.items()}


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


@dataclass(slots=True)
class GroupChanges:
    settings: list[dict[str, Any]]  # the new settings for each live group
    order: list[int | None] = field(default_factory=list)  # by live group: the first saved group with its parameters
    saved: int = 0  # number of saved groups
    missing: list[str] = field(default_factory=list)  # parameters and groups that the checkpoint's optimizer lacks
    unexpected: list[str] = field(default_factory=list)  # parameters and groups that the live optimizer lacks
    notes: list[str] = field(default_factory=list)  # messages about settings that the load adds, keeps or rounds
    switches: list[str] = field(default_factory=list)  # boolean settings whose saved and live values differ
    conflicts: list[str] = field(default_factory=list)  # saved groups that can't be merged, values that can't be set


def group_changes(
    optimizer: Any,
    names: Mapping[int, str],
    saved: Sequence[Mapping[str, JSON]],
    tensor: Callable[[str], Any],
    what: str,
) -> GroupChanges:
    """Return the changes that give each live group the settings of the saved groups with the same parameters.

    Parameters are matched by name, so groups may have been reordered, split or merged since the save. If the parameters
    of one live group come from saved groups with different settings, this is a conflict. A live group without
    parameters gets the settings of a saved group that has no parameters on this rank. If possible, this is the saved
    group at the same position.
    """
    live_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved_of = {fqn: i for i, group in enumerate(saved) for fqn in group["params"]}
    settings = [{k: decode(v, tensor) for k, v in g.items() if k not in _GROUP_NAMES} for g in saved]
    live = {fqn for fqns in live_names for fqn in fqns}
    empty = [i for i, group in enumerate(saved) if not group["params"]]
    changes = GroupChanges([], saved=len(saved))
    parts: dict[int, list[int]] = {}  # by saved group: the live groups that have its parameters
    for index, fqns in enumerate(live_names):
        sources = dict.fromkeys(saved_of[fqn] for fqn in fqns if fqn in saved_of)
        if not fqns:
            elsewhere = index < len(saved) and live.isdisjoint(saved[index]["params"])  # on other pipeline stages
            sources = dict.fromkeys([index] if elsewhere else empty[:1])
            empty = [i for i in empty if i not in sources]
            changes.missing += [] if sources else [f"group {index} without parameters"]
        for source in sources:
            parts.setdefault(source, []).append(index)
        changes.order.append(next(iter(sources), None))
        changes.settings.append(
            _group_settings(changes, optimizer.param_groups[index], index, list(sources), settings, what)
        )
    _check_shared(changes, optimizer.param_groups, what)
    for indices in dict.fromkeys(map(tuple, parts.values())):
        _note_split(changes, optimizer.param_groups, indices, what)
    changes.missing += [fqn for fqns in live_names for fqn in fqns if fqn not in saved_of]
    changes.unexpected = [fqn for fqn in saved_of if fqn not in live]
    changes.unexpected += [f"group {i} without parameters: lr={settings[i].get('lr')}" for i in empty]
    return changes


def _note_split(changes: GroupChanges, live: Sequence[Mapping[str, Any]], indices: Sequence[int], what: str) -> None:
    """Add a note about the settings that differ between the live groups `indices`.

    The groups were one group when they were saved, so the load gives them equal settings.
    """
    replaced = []
    for key, value in changes.settings[indices[0]].items():
        ours = [live[index][key] for index in indices if key in live[index]]
        if not all(_same(ours[0], other) for other in ours[1:]):
            replaced.append(f"{key}={reprlib.repr(value)} replaces {first_few([*map(reprlib.repr, ours)])}")
    if replaced:
        changes.notes.append(
            f"{what} groups {first_few([*map(str, indices)])} have parameters of one saved group and get its settings: "
            f"{'; '.join(replaced)}. To keep other values, set them in param_groups after the load"
        )


def _check_shared(changes: GroupChanges, live: Sequence[Mapping[str, Any]], what: str) -> None:
    """Add a conflict for each tensor that several live groups share, if the load would set it to different values."""
    import torch

    first: dict[int, tuple[int, Any]] = {}
    for index, (group, new) in enumerate(zip(live, changes.settings, strict=True)):
        for key in new:
            if isinstance(group.get(key), torch.Tensor):
                other, value = first.setdefault(id(group[key]), (index, new[key]))
                if not _same(value, new[key]):
                    changes.conflicts.append(
                        f"{what} groups {other} and {index} have one tensor as {key} here, but {value!r} and "
                        f"{new[key]!r} in the checkpoint. Give each group its own tensor"
                    )


def _group_settings(
    changes: GroupChanges,
    live: Mapping[str, Any],
    index: int,
    sources: Sequence[int],
    settings: Sequence[Mapping[str, Any]],
    what: str,
) -> dict[str, Any]:
    import torch

    if not sources:
        return {}
    first = settings[sources[0]]
    for other in sources[1:]:
        compared = {key: settings[other].get(key) for key in first if key not in IMPLEMENTATION_SETTINGS}
        if differing := [key for key, value in compared.items() if not _same(first[key], value)]:
            changes.conflicts.append(
                f"{what} group {index} combines parameters of the saved groups {sources[0]} and {other}, which differ "
                f"in {', '.join(differing)}"
            )
    new: dict[str, Any] = {}
    for key, value in first.items():
        if key in IMPLEMENTATION_SETTINGS:
            if key in live and not _same(live[key], value):
                changes.notes.append(f"{what} group {index}: kept {key}={live[key]!r}; the checkpoint has {value!r}")
            continue
        if not _fits(live.get(key), value):
            changes.conflicts.append(
                f"{what} group {index}: {key} is {reprlib.repr(value)} in the checkpoint, but {live[key]!r} here"
            )
        elif isinstance(value, bool) and isinstance(live.get(key), bool) and value is not live[key]:
            changes.switches.append(f"{key}={value} of group {index} (here it is {live[key]})")
        rounded = _number(value, live.get(key))
        if isinstance(live.get(key), torch.Tensor) and _is_real(value) and not _same(rounded, value):
            changes.notes.append(
                f"{what} group {index}: {key}={value!r} becomes {rounded!r} in a {live[key].dtype} tensor"
            )
        if key not in live:
            changes.notes.append(f"{what} group {index}: added {key}={value!r} from the checkpoint")
        new[key] = value
    for key in live:
        if key not in first and key not in _GROUP_NAMES:
            changes.notes.append(f"{what} group {index}: kept {key}={live[key]!r}; the checkpoint has none")
    return new


def _fits(live: Any, value: Any) -> bool:
    """Return whether a saved setting can replace the live one.

    A number, possibly in a tensor, can replace a number. A tensor can replace a tensor of the same shape, if the live
    tensor's dtype can hold the values. A sequence can replace a sequence of equal length. Other values are not checked.
    """
    import torch

    if isinstance(live, (tuple, list)):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(live)
            and all(_fits(a, b) for a, b in zip(live, value, strict=True))
        )
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        exact = value.dtype == live.dtype or torch.equal(value.to(live.dtype).to(value.dtype), value)
        return exact and (value.numel() == live.numel() == 1 or value.shape == live.shape)
    if isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
        return value.numel() == 1
    if isinstance(live, torch.Tensor) and not (live.is_floating_point() or live.is_complex()):
        return live.numel() == 1 and _is_real(value) and float(value).is_integer()
    if isinstance(live, (int, float)) or (isinstance(live, torch.Tensor) and live.numel() == 1):
        return _is_real(value)
    return not isinstance(live, torch.Tensor)


def _is_real(value: Any) -> bool:
    """Return whether `value` is a real number that a float can hold. Infinity counts as a real number."""
    try:
        return isinstance(value, numbers.Real) and isinstance(float(value), float)
    except OverflowError:
        return False


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal.

    A list can equal a tuple. A number can equal a tensor of one element. Two tensors of several elements are equal if
    their dtypes, shapes and bytes are equal. Values of unknown types are equal only if they are the same object.
    """
    import torch

    both = one, other
    if one is other:
        return True
    if all(isinstance(value, (tuple, list)) for value in both):
        return len(one) == len(other) and all(map(_same, one, other))
    if all(isinstance(value, Mapping) for value in both):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    a, b = _number(one, other), _number(other, one)
    if a is not None and b is not None:
        return bool(a == b) or (_is_real(a) and _is_real(b) and math.isnan(a) and math.isnan(b))
    if all(isinstance(value, torch.Tensor) and not why_not_dense(value) for value in both):
        return same_tensors(one, other)
    mine, theirs = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    try:
        trees = encode(one, "", mine), encode(other, "", theirs)
    except SaveError:
        return False
    return trees[0] == trees[1] and all(same_tensors(mine[key], theirs[key]) for key in mine)


def _number(value: Any, like: Any) -> Any:
    """Return `value` if it is a number. If it is a tensor of one element, return the element. Else return None.

    If `like` is a floating-point tensor, a number is rounded to the dtype of `like`.
    """
    import torch

    if isinstance(value, torch.Tensor):
        local = local_part(value)
        return None if why_not_dense(local) or local.numel() != 1 else local.item()
    if isinstance(like, torch.Tensor) and like.is_floating_point() and _is_real(value):
        return torch.tensor(float(value), dtype=like.dtype).item()
    return value if isinstance(value, numbers.Number) else None


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    mine, theirs = (row_major(local_part(t)).cpu().reshape(-1).view(torch.uint8) for t in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(mine, theirs)


def _apply_settings(optimizer: Any, settings: Iterable[Mapping[str, Any]]) -> None:
    """Set the settings of each live group.

    A learning rate in a tensor is updated in place and keeps its device, because compiled steps and schedulers refer to
    the tensor.
    """
    import torch

    for group, new in zip(optimizer.param_groups, settings, strict=True):
        for key, value in new.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor):
                with torch.no_grad():
                    live.copy_(value) if isinstance(value, torch.Tensor) else live.fill_(float(value))
            elif isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
                group[key] = value.item()
            else:
                group[key] = value


def apply_state(
    optimizer: Any,
    parameters: Mapping[str, torch.nn.Parameter],
    states: Mapping[str, dict[str, Any]],
    shared: Mapping[str, Any],
    settings: Iterable[Mapping[str, Any]],
    *,
    keep: Iterable[str] = (),
) -> None:
    """Replace the optimizer's state, and set the settings of each group.

    Args:
        states: The new state of each parameter, by FQN.
        shared: The new state that belongs to no parameter.
        keep: FQNs of parameters that keep their current state.
    """
    kept = {fqn: optimizer.state[parameters[fqn]] for fqn in keep if parameters[fqn] in optimizer.state}
    optimizer.state.clear()
    for fqn, parameter in parameters.items():
        if fqn in kept:
            optimizer.state[parameter] = kept[fqn]
        elif fqn in states:
            optimizer.state[parameter] = states[fqn]
    optimizer.state.update(shared)
    _apply_settings(optimizer, settings)
    finish_load(optimizer)


def finish_load(optimizer: Any, added: Mapping[str, Any] | None = None) -> None:
    """Call the optimizer's own `load_state_dict` or its hooks, so that the optimizer updates its derived values.

    For example, an optimizer class may clear a cache in its `load_state_dict`. Such a method also calls torch's
    `load_state_dict`, which casts states and replaces the tensors in groups. So the restored values are put back
    afterwards. If `optimizer` combines other optimizers, this is first done for them.

    Args:
        added: Entries other than "state" and "param_groups" to pass to the optimizer's own `load_state_dict`.
    """
    if inner := inner_optimizers(optimizer):
        with optimizer.lend_state():
            for one in inner:
                finish_load(one)
    own = getattr(optimizer, "load_state_dict", None)
    if own is None or getattr(own, "__module__", "").startswith(_ONLY_STATE):
        after_load(optimizer)
        return
    groups = [dict(group) for group in optimizer.param_groups]
    states = {key: dict(state) for key, state in optimizer.state.items() if isinstance(state, Mapping)}
    own({**optimizer.state_dict(), **(added or {})})
    for group, restored in zip(optimizer.param_groups, groups, strict=True):
        group.update(restored)
    for key, state in states.items():
        optimizer.state.setdefault(key, {}).update(state)
