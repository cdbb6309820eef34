"""Plans how a load restores the optimizers: settings, states and fp32 master weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.checkpoint.load.differences import Mismatches
from ckptkit.checkpoint.load.plan import OptimizerPlan, Planning, is_class_known, of_another_class, unlike
from ckptkit.checkpoint.state.layout import as_global, shards_of
from ckptkit.checkpoint.state.local_part import this_rank
from ckptkit.checkpoint.state.model_tensors import parameter_names
from ckptkit.checkpoint.state.optimizer.capture import joined, named_parameters
from ckptkit.checkpoint.state.optimizer.groups import GroupChanges, group_changes
from ckptkit.checkpoint.state.optimizer.layout import (
    SHARD,
    Held,
    cuts,
    is_shard,
    layouts,
    placed_whole,
    places,
    shard_names,
)
from ckptkit.checkpoint.state.optimizer.methods import inner_optimizers, with_inner
from ckptkit.checkpoint.state.optimizer.tree import OptimizerTree, with_new_head
from ckptkit.checkpoint.state.train_state import section
from ckptkit.errors import CorruptCheckpointError, SaveError, UsageError
from ckptkit.formats.dcp.host_bytes import dtype_name, has_load_hooks, local_part, placed_like, why_not_dense
from ckptkit.formats.dcp.subclasses import (
    SEPARATOR,
    STATES,
    is_state_in_parts,
    keeps_parts,
    new_tensor,
    open_all,
    outer_name,
    same_recipe,
)

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.state.values import JSON

_OF_ANY = ("params", "initial_lr", "step")  # settings that any optimizer may have; schedulers add initial_lr


def plan_optimizers(load: Planning) -> None:
    """Match the live optimizers with the saved ones, by the names of their parameters."""
    optimizers = load.state.parts("optimizer")
    if not optimizers:
        return
    if load.options.key_map is not None and load.options.optimizer == "restore":
        raise UsageError(
            "key_map= loads weights only, so the optimizer would not be restored. To start it without state, "
            "pass optimizer='skip'."
        )
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    names = parameter_names(
        load.state,
        load.live if load.options.model == "restore" else None,
        [parameter for group in groups for parameter in group["params"]],
    )
    for name, optimizer in optimizers.items():
        key = section("optimizer", name)
        plan = OptimizerPlan(key, optimizer, named_parameters(optimizer, names, key))
        plan.shards = {fqn: found for fqn in plan.parameters if (found := shards_of(load.state.layout, fqn))}
        if load.options.optimizer != "restore":
            plan.skip = True
            load.plan.skipped[key] = f'optimizer="{load.options.optimizer}"'
            if plan.master_name is not None:
                plan.masters = dict.fromkeys(plan.parameters)
            load.plan.optimizers.append(plan)
            continue
        # Master weights that neither an optimizer nor a weight uses count as unexpected, unless weights are skipped
        # or filtered, or another system wrote the checkpoint.
        left = [fqn for fqn in _optimizer(load, plan, names) if fqn not in load.from_masters]
        whole = load.options.model == "restore" and not load.options.include and not load.options.exclude
        if whole and not load.foreign:
            load.plan.mismatches.add("unexpected", key, [f"master.{fqn}" for fqn in left])
        elif left:
            load.plan.notes.append(f"{key}: {len(left)} fp32 masters were skipped: no optimizer here uses masters.")
        load.plan.notes += plan.groups.notes
        load.plan.optimizers.append(plan)


def _optimizer(load: Planning, plan: OptimizerPlan, names: Mapping[int, str]) -> list[str]:
    """Complete one optimizer's plan. Return the FQNs of the saved master weights that the load does not use."""
    import torch

    found, catalog, objects = load.plan.mismatches, load.plan.catalog, load.objects
    tree = objects.get(plan.key)
    saved = None if tree is None else OptimizerTree.of(tree, plan.key)
    owners = {fqn for group in saved.param_groups for fqn in group["params"]} if saved else set()
    states, masters = _saved(load, plan.key, owners)
    # The checkpoint has the optimizer state of a tied weight under one of its names. A rank with only another name
    # (the last pipeline stage, for example, has `lm_head` but not the embedding) loads that state.
    for name, fqn in saved.tied.items() if saved is not None else ():
        if saved is not None and name in plan.parameters and fqn in owners and fqn not in plan.parameters:
            old, new = f"{plan.key}.state.{fqn}.", f"{plan.key}.state.{name}."
            saved = saved.renamed(fqn, name, old, new)
            load.recipes = with_new_head(load.recipes, old, new)
            owners = {*owners - {fqn}, name}
            states = {name if key == fqn else key: entries for key, entries in states.items()}
            masters = {name if key == fqn else key: entry for key, entry in masters.items()}
    is_known = is_class_known(plan.key, objects)
    if is_known:
        other = of_another_class(plan.key, plan.optimizer, objects)
    else:
        other = _other_settings(plan.optimizer, saved.param_groups if saved is not None else ())
    if other or (tree is None and not states):
        found.add("missing", plan.key, [f"the whole optimizer{other and f' ({other})'}"])
        plan.groups = GroupChanges([{} for _ in plan.optimizer.param_groups])
        plan.keep = list(plan.parameters)  # with strict=False, the live state stays
        return list(masters)
    if saved is not None:
        plan.groups = group_changes(
            plan.optimizer, names, saved.param_groups, partial(_setting, load, plan, saved), plan.key
        )
        plan.values, plan.shared, plan.held, plan.orders = saved.values, saved.shared, saved.held, saved.orders
        plan.same, plan.views, plan.kinds, plan.containers = saved.same, saved.views, saved.kinds, saved.containers
        plan.groups.unexpected += [f"{fqn}.{name}" for fqn in states if fqn not in owners for name in states[fqn]]
        if saved.states or load.own.bound:
            found.add("others", plan.key, _of_other_ranks(load, plan, saved))
    else:
        plan.groups = GroupChanges(
            [{} for _ in plan.optimizer.param_groups], notes=[f"{plan.key}: no settings were saved"]
        )
        plan.groups.missing = [fqn for fqn in plan.parameters if fqn not in states]
        plan.groups.unexpected = [fqn for fqn in states if fqn not in plan.parameters]
    head = f"{plan.key}.state."
    opaque = catalog.info.extra.get("opaque", {})
    lost = {name.removeprefix(head): why for name, why in opaque.items() if name.startswith(head)}
    known = {f"{fqn}.{name}" for fqn, entries in states.items() for name in entries} if lost else ()
    found.add("unexpected", plan.key, [f"{name} ({why})" for name, why in lost.items() if name not in known])
    found.add("missing", plan.key, plan.groups.missing)
    found.add("unexpected", plan.key, plan.groups.unexpected)
    found.add("unexpected", plan.key, plan.groups.switches)
    found.add("others", plan.key, plan.groups.conflicts)
    plan.keep = [fqn for fqn in plan.groups.missing if fqn in plan.parameters]
    plan.states = {fqn: entries for fqn, entries in states.items() if fqn in plan.parameters}
    found.add("others", plan.key, [*_of_their_state_dict(load, plan), *_of_no_parameter(plan)])
    if any(map(has_load_hooks, with_inner(plan.optimizer))):
        plan.groups.notes.append(
            f"{plan.key}: its load_state_dict pre-hooks change nothing: a load restores the saved values directly"
        )
    plan.live = {fqn: dict(plan.optimizer.state.get(item, {})) for fqn, item in plan.parameters.items()}
    plan.held = {**_shards_here(plan), **plan.held}
    values = [value for state in plan.live.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor) or is_state_in_parts(value)]
    if load.recipes or any(is_state_in_parts(tensor) or why_not_dense(tensor) for tensor in tensors):
        for fqn, parameter in plan.parameters.items():
            _opened_states(load, plan, fqn, parameter)
    if not is_known:  # a job of ckptkit saves all states of its optimizer
        found.add("missing", plan.key, _lacking_states(plan))
    weights = load.entries(Role.MODEL)
    _check_states(plan, weights, found)
    _cast_states(load, plan, weights, masters)
    return _plan_masters(plan, masters, weights, found)


def _other_settings(optimizer: Any, groups: Sequence[Mapping[str, JSON]]) -> str:
    """Describe why saved settings are those of another class of optimizer. Returns "" if they may be of this class.

    The classes differ if the saved settings lack numbers that the live ones have, and the live settings lack numbers
    that the saved ones have. For example, SGD has a momentum, and Adam has betas. If only one side has more numbers, or
    if only switches (True or False) differ, another version or implementation of the class may have saved them.
    """
    defaults = getattr(getattr(optimizer, "base", optimizer), "defaults", {})
    saved = {name: value for group in groups for name, value in group.items()}
    lacking = [name for name, value in defaults.items() if name not in saved and type(value) in (int, float, tuple)]
    more = [
        name
        for name, value in saved.items()
        if name not in (*defaults, *_OF_ANY) and (type(value) in (int, float) or isinstance(value, dict))
    ]
    return f"saved with {', '.join(more)} instead of {', '.join(lacking)}" if lacking and more else ""


def _shards_here(plan: OptimizerPlan) -> dict[str, Held]:
    """Map saved states that have the full shape, but are plain shards in the live optimizer, to SHARD, by key."""
    live = {fqn: (parameter, plan.live[fqn]) for fqn, parameter in plan.parameters.items()}
    names = shard_names(live.values())
    found = {(fqn, name): entry for fqn, entries in plan.states.items() for name, entry in entries.items()}
    return {
        f"{plan.key}.state.{fqn}.{name}": SHARD
        for (fqn, name), entry in found.items()
        if name in names and entry.shape == plan.shape(fqn) and is_shard(live[fqn][1].get(name), live[fqn][0])
    }


def _saved(
    load: Planning, key: str, owners: Collection[str]
) -> tuple[dict[str, dict[str, TensorEntry]], dict[str, TensorEntry]]:
    """Return an optimizer's saved states by FQN and state name, and its fp32 master weights by FQN.

    Args:
        owners: The FQNs of the parameters in the saved settings.
    """
    states: dict[str, dict[str, TensorEntry]] = {}
    masters: dict[str, TensorEntry] = {}
    for entry in load.plan.catalog.tensors.values():
        first = entry.name.partition(".")[0]
        owner = first if first.startswith("optimizer_") else "optimizer"
        if entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.fqn and owner == key:
            if entry.role is Role.MASTER:
                masters[entry.fqn] = entry
            elif entry.name not in load.spent:
                fqn, name = _owner_and_state(entry, owners)
                states.setdefault(fqn, {})[name] = entry
    return states, masters


def _setting(load: Planning, plan: OptimizerPlan, saved: OptimizerTree, key: str) -> torch.Tensor:
    """Return a param group's tensor setting (such as lr). A setting saved as a DTensor becomes one if possible."""
    return placed_whole(plan.parameters.values(), saved.held.get(key), load.small(key))


def _opened_states(load: Planning, plan: OptimizerPlan, fqn: str, parameter: torch.Tensor) -> None:
    """Match the live and saved states of one parameter that are tensor subclasses, such as torchao's.

    If the live optimizer does not have such a state yet, creates its tensor.
    """
    import torch
    from torch.distributed.tensor import DTensor

    live, entries = dict(plan.live[fqn]), plan.states.get(fqn, {})
    head = f"{plan.key}.state.{fqn}."
    outers = dict.fromkeys(outer_name(name, load.recipes, head) for name in entries)
    stored = {name: load.recipes[head + name] for name in outers if name not in entries}
    tensors = {k: v for k, v in live.items() if isinstance(v, torch.Tensor) or is_state_in_parts(v)}
    shards = plan.shards.get(fqn, ())
    try:
        declared = joined(head.rstrip("."), tensors, parameter, shards)
    except SaveError as error:
        load.plan.mismatches.add("others", plan.key, [str(error)])
        return
    _, recipes, reasons = open_all(
        {**tensors, **declared}, {k: parameter for k, v in tensors.items() if is_state_in_parts(v)}
    )
    wholes = {name: live[name] for name in recipes}
    others = [f"{fqn}.{name} here {why}" for name, why in reasons.items()]
    for name, recipe in stored.items():
        try:
            if name not in live:
                front = name + SEPARATOR
                parts = {part.removeprefix(front): item for part, item in entries.items() if part.startswith(front)}
                is_declared = bool(shards) and recipe.get("class") in STATES
                place = as_global(fqn, parameter, shards) if is_declared else parameter
                wholes[name] = new_tensor(recipe, place, parts)
                if is_declared:
                    declared[name], local = wholes[name], local_part(wholes[name])
                    wholes[name] = placed_like(parameter, local) if isinstance(parameter, DTensor) else local
            tensor = declared.get(name, wholes.get(name, live.get(name)))
            opened, made, _ = open_all({name: tensor}, {name: parameter} if is_state_in_parts(tensor) else {})
            if not same_recipe(made.get(name), recipe):
                others.append(unlike(f"{fqn}.{name}", made.get(name), recipe, tensor))
            elif opened.keys() - entries.keys():
                raise CorruptCheckpointError(f"{head}{name}: not all of its parts are in the checkpoint.")
        except SaveError as error:
            others.append(f"{fqn}.{name} in the checkpoint {error}")
            continue
        plan.live[fqn].update(opened)
        plan.joined.update((fqn, part) for part in opened if name in declared)
        others += [
            f"{fqn}.{part} is {entries[part].dtype} in the checkpoint, {dtype_name(tensor.dtype)} here"
            for part, tensor in opened.items()
            if part in entries and entries[part].dtype != dtype_name(tensor.dtype)
        ]
    for name, recipe in recipes.items():  # a tensor subclass here, but a single tensor in the checkpoint
        if name in entries and (why := entries[name].slices.opaque):
            others.append(
                f"{fqn}.{name} {why} in the checkpoint: torch's dcp.save pickled each shard as an object of its "
                "class, which only the class can read. Load them with torch's dcp.load on the same number of "
                "ranks, and save them again"
            )
        elif name in entries:
            others.append(unlike(f"{fqn}.{name}", recipe, None))
    plan.wholes[fqn] = {name: tensor for name, tensor in wholes.items() if name in stored}
    load.plan.mismatches.add("others", plan.key, others)


def _of_their_state_dict(load: Planning, plan: OptimizerPlan) -> list[str]:
    """Describe saved states that are not split into parts, although the live optimizer splits them.

    Only flashoptim's optimizers split their live states. Their `state_dict` returns the states unsplit. Checkpoints
    that other systems wrote, or that contain a different optimizer, therefore have unsplit states.
    """
    if not keeps_parts(plan.optimizer):
        return []
    spec, names = {*plan.optimizer.quantized_state_spec, *["error_bits"] * load.foreign}, list[str]()
    for fqn, entries in plan.states.items():
        plain = [name for name in entries if outer_name(name, load.recipes, f"{plan.key}.state.{fqn}.") == name]
        names += [f"{fqn}.{name}" for name in plain if name.partition(SEPARATOR)[0] in spec]
    if not names:
        return []
    more, kind = f" and {len(names) - 5} more" if len(names) > 5 else "", type(plan.optimizer).__name__
    text = f"{', '.join(names[:5])}{more}: {kind} keeps these states in a different form. Load the checkpoint with"
    return [f"{text} dcp.load and {kind}.load_state_dict, and save it again"]


def _of_other_ranks(load: Planning, plan: OptimizerPlan, saved: OptimizerTree) -> list[str]:
    """Describe the saved states that were computed from shards which this rank may not have.

    This job cannot use these states; see `checkpoint/state/optimizer/layout`.
    """
    cut = cuts(plan.parameters)
    here, place = layouts(cut), load.own.places.get(plan.key)
    # Earlier checkpoints do not contain the ranks' positions in the meshes.
    alike = here == saved.layouts if place is None else places(cut, this_rank()) == place
    own = [key[len(plan.key) + 1 :] for key in load.own.bound if key.startswith(f"{plan.key}.")]
    own = [key.removeprefix("state.").removeprefix("values.") for key in own]
    mine, others = ({fqn for key, fqn in found if key == plan.key} for found in (load.own.mine, load.own.others))
    # Whether this rank had parameters that it lacks now, and has some that only other ranks had (pipeline stages).
    moved = mine - plan.parameters.keys() and others & plan.parameters.keys()
    if own and (moved or not (load.own.fits and alike)):
        names, whose = own, f"each of the {load.own.ranks} ranks that saved them has its own"
    elif here and saved.states and not saved.layouts:
        names, whose = saved.states, "they may have been computed from whole parameters"
    else:
        return []
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    order = ", in a different order" if here == saved.layouts and load.own.fits else ""
    return [
        f"{', '.join(names[:5])}{more}: {whose}, so they load only where the parameters are sharded the same way "
        f"(saved by {load.own.ranks or load.plan.catalog.info.world_size} ranks: {_cuts(saved.layouts)}; here, on "
        f"{load.world_size} ranks: {_cuts(here)}{order}). Load them there, or pass "
        'optimizer="skip"'
    ]


def _owner_and_state(entry: TensorEntry, owners: Collection[str]) -> tuple[str, str]:
    """Return the (FQN, state name) of an optimizer state.

    Some formats store both as a single string. If the state's name contains dots, only `owners`, the FQNs of the saved
    parameters, show where the state's name begins.
    """
    if entry.fqn in owners or not owners:
        return entry.fqn, entry.state
    parts = entry.fqn.split(".")
    heads = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    fqn = next((head for head in heads if head in owners), entry.fqn)
    return fqn, f"{entry.fqn}.{entry.state}".removeprefix(f"{fqn}.")


def _of_no_parameter(plan: OptimizerPlan) -> list[str]:
    """Describe the saved states that belong to no parameter. Returns [] if there is only one live optimizer."""
    several = len(inner_optimizers(plan.optimizer)) > 1
    why = "belongs to no parameter, and several optimizers are loaded as one here"
    return [f"{name} {why}" for name in plan.shared] if several else []


def _check_states(plan: OptimizerPlan, weights: Mapping[str, TensorEntry], found: Mismatches) -> None:
    for fqn, entries in plan.states.items():
        parameter = plan.parameters[fqn]
        live = plan.live.get(fqn, {})
        wanted, weight = plan.shape(fqn), weights.get(fqn)
        # If the saved weight has the parameter's shape, accept a state of another shape, such as a lookup table.
        same_weight = weight is not None and weight.shape == wanted
        for name, entry in entries.items():
            shape = entry.shape
            if plan.held and plan.held.get(f"{plan.key}.state.{fqn}.{name}") == SHARD:
                shape = wanted  # the live state is only a shard: take the shape of the whole parameter
            elif name in live:
                shape = tuple(getattr(live[name], "shape", shape))
                shape = wanted if shape == tuple(parameter.shape) and (fqn, name) not in plan.joined else shape
            elif not same_weight and len(shape) == len(wanted) and entry.numel > 1:
                # Factored moments have one row or one column.
                fits = all(size in (1, whole) for size, whole in zip(shape, wanted, strict=True))
                shape = shape if fits else wanted
            if shape != entry.shape:
                text = f"{fqn}.{name} ({list(entry.shape)} in the checkpoint, expected {list(shape)})"
                found.add("shapes", plan.key, [text])


def _cast_states(
    load: Planning, plan: OptimizerPlan, weights: Mapping[str, TensorEntry], masters: Mapping[str, TensorEntry]
) -> None:
    """Plan casts of the states whose saved dtype is that of the tensor that the optimizer updated.

    An optimizer updates a parameter's fp32 master if there is one, and otherwise the weight itself. States with the
    dtype of the updated tensor must keep matching it. So they are cast to the dtype of the live state. If there is no
    live state yet, they are cast to the dtype of the tensor that the live optimizer updates, as in torch's
    `load_state_dict`. Step counts and states of other dtypes, such as the fp32 moments of a bf16 weight without a
    master, are not cast.

    Without `convert_dtype`, states are cast only for an optimizer with masters, and only to a wider dtype. If only the
    saved optimizer had masters, its states are reported as mismatches, because the next step would fail. This holds for
    torch's optimizers, whose states have the dtype of the parameter. Other classes may keep their states in fp32. If
    such an optimizer has no live state yet, states of masters are neither cast nor reported.
    """
    import torch

    if keeps_parts(plan.optimizer):
        return
    is_like_parameter = plan.master_name is not None or type(plan.optimizer).__module__.startswith("torch.optim.")
    casts: dict[tuple[str, str], torch.dtype] = {}
    for fqn, entries in plan.states.items():
        parameter, updated = plan.parameters[fqn], masters.get(fqn, weights.get(fqn))
        if updated is None or not parameter.is_floating_point():
            continue
        has_master = plan.master_name is not None and parameter.itemsize < torch.float32.itemsize
        stepped = torch.float32 if has_master else parameter.dtype
        if updated.dtype == dtype_name(stepped) or (fqn in masters and not is_like_parameter and not plan.live[fqn]):
            continue
        for name, entry in entries.items():
            outer = outer_name(name, load.recipes, f"{plan.key}.state.{fqn}.")
            if name != "step" and outer == name and entry.dtype == updated.dtype:
                live = plan.live[fqn].get(name)
                wanted = live.dtype if isinstance(live, torch.Tensor) else stepped
                if dtype_name(wanted) != entry.dtype:
                    casts[fqn, name] = wanted
    if load.options.convert_dtype or plan.master_name is not None:
        plan.casts = casts
        notes = [f"{plan.key}: {len(casts)} states were cast, like the weights they belong to."] if casts else []
        plan.groups.notes += notes
        return
    texts = [
        f"{fqn}.{name} ({plan.states[fqn][name].dtype} in the checkpoint, like the master weight; expected "
        f"{dtype_name(wanted)})"
        for (fqn, name), wanted in casts.items()
        if fqn in masters
    ]
    load.plan.mismatches.add("dtypes", plan.key, texts)


def _lacking_states(plan: OptimizerPlan) -> list[str]:
    """Return the missing states ("FQN.state") of parameters for which the checkpoint has at least one state.

    There are two ways to find them:

    - A live state that has its parameter's shape is missing if it is not saved.
    - If the live states do not show what is complete (there are none yet, or some are not saved), the saved states are
      compared with those of other parameters in the group. If another parameter has the same states and more, the
      additional ones are missing. For example, exp_avg_sq is missing if one parameter has only exp_avg, and another has
      both.
    """
    lacking: list[str] = []
    names = {id(parameter): fqn for fqn, parameter in plan.parameters.items()}
    for group in plan.optimizer.param_groups:
        fqns = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        states = {fqn: frozenset(plan.states.get(fqn, ())) | frozenset(plan.values.get(fqn, ())) for fqn in fqns}
        kinds = dict.fromkeys(states.values())
        for fqn, own in states.items():
            if not own:
                continue  # the optimizer never updated this parameter
            shape = plan.parameters[fqn].shape
            live = {name for name, value in plan.live[fqn].items() if getattr(value, "shape", None) == shape}
            live -= plan.wholes.get(fqn, {}).keys()  # their parts are listed
            is_complete = bool(plan.live[fqn]) and plan.live[fqn].keys() <= own | {plan.master_name}
            wider = own if is_complete else next((kind for kind in kinds if own < kind), own)
            lacking += [f"{fqn}.{name}" for name in sorted((live | wider) - own - {plan.master_name})]
    return lacking


def _cuts(found: Sequence[Any]) -> str:
    """Describe how parameters are sharded. `found` is the result of `layouts`."""
    return " and ".join(f"{', '.join(map(str, texts))} on {list(shape)}" for shape, texts in found) or "not sharded"


def _plan_masters(
    plan: OptimizerPlan, masters: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry], found: Mismatches
) -> list[str]:
    """Find the saved tensor for each live fp32 master weight.

    That is the saved master weight or, if there is none, the saved weight, provided that it is fp32 or fp64.
    Returns the FQNs of the saved master weights that match no live one.
    """
    if plan.master_name is None:
        return list(masters)
    for fqn, parameter in plan.parameters.items():
        if fqn in masters:
            if masters[fqn].shape != plan.shape(fqn):
                shapes = f"{list(masters[fqn].shape)} in the checkpoint, expected {list(plan.shape(fqn))}"
                found.add("shapes", plan.key, [f"master.{fqn} ({shapes})"])
            plan.masters[fqn] = masters[fqn]
        elif plan.master_name in plan.optimizer.state.get(parameter, {}):
            weight = weights.get(fqn)
            wide = weight is not None and weight.dtype in ("float32", "float64") and weight.shape == plan.shape(fqn)
            plan.masters[fqn] = weight if wide else None
            if not wide and fqn not in plan.keep:
                found.add("missing", plan.key, [f"master.{fqn}"])
    return [fqn for fqn in masters if fqn not in plan.parameters]
