"""Plans how a load restores the weights of the models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.checkpoint.load.differences import KeyFilter, match_tensors
from ckptkit.checkpoint.load.plan import ModelTensor, ObjectTarget, Planning, unlike
from ckptkit.checkpoint.state.capture import joined_weights
from ckptkit.checkpoint.state.layout import Shard, as_global, matches, shards_of
from ckptkit.checkpoint.state.model_tensors import computed_state
from ckptkit.checkpoint.state.train_state import section
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.dcp.host_bytes import dtype_name, expanded_ones, hidden_ones
from ckptkit.formats.dcp.subclasses import Recipe, lower_bits_of, open_all, outer_name, same_recipe

if TYPE_CHECKING:
    import torch


def plan_weights(load: Planning) -> None:
    """Match the live tensors of all models with the saved ones, and plan how to restore the modules' extra states."""
    tables = load.plan.catalog.info.extra.get("aliases", {})
    for table in tables.values() if isinstance(tables, Mapping) else [tables]:
        if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table.values()):
            raise CorruptCheckpointError("the table of tied weights in the manifest is malformed.")
    chosen = KeyFilter(load.options.include, load.options.exclude)
    weights, mismatches = load.entries(Role.MODEL), load.plan.mismatches
    names: set[str] = set()
    fqns: list[str] = []
    declared: dict[int, tuple[Shard, ...]] = {}  # the layout's shards, by tensor id
    for name, module in load.state.parts("model").items():
        key, prefix = section("model", name), f"{name}." if name else ""
        saved = {fqn[len(prefix) :]: entry for fqn, entry in weights.items() if fqn.startswith(prefix)}
        tensors, extra_state, handed = computed_state(module)
        load.live[key] = tensors
        fqns += [prefix + fqn for fqn in tensors]
        if handed is not None:
            load.plan.handed.append((module, handed))
            mismatches.add("unexpected", key, _not_taken(module, handed))
        live = dict(tensors)
        if not chosen.takes_all:
            outers = {fqn: outer_name(fqn, load.recipes, f"{key}.") for fqn in saved}
            names.update(
                tensors, extra_state, (outer_name(f.removeprefix(prefix), load.recipes, f"{key}.") for f in weights)
            )
            live = {fqn: tensor for fqn, tensor in tensors.items() if chosen(fqn)}
            saved = {fqn: entry for fqn, entry in saved.items() if chosen(outers[fqn])}
            left = [f"{key}.{fqn}" for fqn in outers if fqn not in saved]
            load.plan.skipped.update(dict.fromkeys(left, "not included"))
        joined_here = joined_weights(name, live, load.state.layout) if load.state.layout else {}
        live, recipes, reasons = open_all(live, joined_here)
        if recipes or load.recipes:
            live, saved = _parts(load, key, live, saved, recipes)
        for fqn, tensor in live.items() if load.state.layout else ():
            if outer_name(fqn, recipes) == fqn:  # parts of a subclass come from a joined tensor
                declared.setdefault(id(tensor), shards_of(load.state.layout, prefix + fqn))
        if hidden := {**hidden_ones(live), **reasons}:
            mismatches.add("others", key, [f"{fqn} here {why}" for fqn, why in hidden.items()])
            live = {fqn: tensor for fqn, tensor in live.items() if fqn not in hidden}
            saved = {fqn: entry for fqn, entry in saved.items() if fqn not in hidden}
        _model(load, key, prefix, live, saved, tables.get(key, {}), declared)
        _extra_state(load, f"{key}.extra_state", module, extra_state, chosen)
    if load.state.layout:
        load.plan.globs.update(matches(load.state.layout, fqns))
    idle = [] if chosen.takes_all else chosen.idle(names)
    idle = [f"{rule} matches no tensor of the models or the checkpoint" for rule in idle]
    if load.options.strict:
        mismatches.add("others", "model", idle)
    else:
        load.plan.notes += idle
    if load.from_masters:
        load.plan.notes.append(
            f"weights: {len(load.from_masters)} were restored from the fp32 masters, because the live dtype "
            "differs from the saved one."
        )
    load.spent = {target.lower_bits.name for target in load.plan.models if target.lower_bits is not None}
    if load.spent:
        text = "were restored exactly, with the lower bits that flashoptim keeps."
        load.plan.notes.append(f"weights: {len(load.spent)} {text}")


def _parts(
    load: Planning,
    key: str,
    live: dict[str, torch.Tensor],
    saved: dict[str, TensorEntry],
    recipes: Mapping[str, Recipe],
) -> tuple[dict[str, torch.Tensor], dict[str, TensorEntry]]:
    """Return `live` and `saved` without the tensor subclasses that are split differently in the two.

    Reports these as mismatches. `recipes` describes how the live tensor subclasses are split into the plain tensors
    in `live`.
    """
    head = f"{key}."
    stored = {name[len(head) :]: recipe for name, recipe in load.recipes.items() if name.startswith(head)}
    here = {fqn: outer_name(fqn, recipes) for fqn in live}
    there = {fqn: outer_name(fqn, stored) for fqn in saved}
    both = set(here.values()) & set(there.values()) | {here[fqn] for fqn in live if fqn in saved}
    differing = {fqn for fqn in both if not same_recipe(recipes.get(fqn), stored.get(fqn))}
    texts = [unlike(fqn, recipes.get(fqn), stored.get(fqn)) for fqn in sorted(differing)]
    load.plan.mismatches.add("others", key, texts)
    return (
        {fqn: tensor for fqn, tensor in live.items() if here[fqn] not in differing},
        {fqn: entry for fqn, entry in saved.items() if there[fqn] not in differing},
    )


def _extra_state(load: Planning, key: str, module: torch.nn.Module, live: Collection[str], chosen: KeyFilter) -> None:
    """Plan how to restore the extra state of modules (see `get_extra_state` in torch).

    Compares live and saved state module by module. `chosen` selects extra states by their names in the state dict.
    """
    tree = load.objects.get(key, {})
    if not chosen.takes_all:
        live = [name for name in live if chosen(name)]
    if not chosen.takes_all and isinstance(tree, dict):
        left = [f"{key}.{name}" for name in tree if not chosen(name)]
        load.plan.skipped.update(dict.fromkeys(left, "not included"))
        tree = {name: value for name, value in tree.items() if chosen(name)}
    if load.foreign:
        if live:
            text = "values are left unchanged: ckptkit restores only those that it saved"
            load.plan.skipped[key] = f"{len(live)} {text}"
    elif isinstance(tree, dict):
        load.plan.mismatches.add("missing", key, [name for name in live if name not in tree])
        load.plan.mismatches.add("unexpected", key, [name for name in tree if name not in live])
        tree = {name: value for name, value in tree.items() if name in live}
    if tree:
        load.plan.objects.append(ObjectTarget("model", key, module, (tree,)))


def _model(
    load: Planning,
    key: str,
    prefix: str,
    live: Mapping[str, torch.Tensor],
    saved: dict[str, TensorEntry],
    aliases: Mapping[str, str],
    declared: Mapping[int, tuple[Shard, ...]],
) -> None:
    """Match one model's live and saved tensors. `declared`: the layout's shards, by tensor id."""
    mismatches = load.plan.mismatches
    lower_bits: dict[str, TensorEntry] | None = None  # of flashoptim, by FQN; None before the first cast

    def target(tensor: torch.Tensor, fqn: str, entry: TensorEntry) -> ModelTensor:
        nonlocal lower_bits
        bits = None
        if entry.role is Role.MODEL and entry.dtype != dtype_name(tensor.dtype):
            lower_bits = lower_bits_of(load.plan.catalog) if lower_bits is None else lower_bits
            bits = lower_bits.get(entry.fqn)
        return ModelTensor(f"{key}.{fqn}", tensor, entry, declared.get(id(tensor), ()), bits)

    names: dict[int, list[str]] = {}
    for fqn, tensor in live.items():
        names.setdefault(id(tensor), []).append(fqn)
    wanted: dict[str, tuple[torch.Tensor, TensorEntry]] = {}  # by a live name
    claimed: set[str] = set()
    missing = []
    for group in names.values():
        # The names of weights that are tied in the checkpoint: one saved tensor may fill several live ones.
        candidates = [*group, *(aliases[fqn] for fqn in group if fqn in aliases)]
        found = [fqn for fqn in dict.fromkeys(candidates) if fqn in saved]
        if not found:
            missing.append(group[0])
            continue
        tensor = live[group[0]]
        if len(found) > 1:
            load.plan.twins.append([target(tensor, fqn, saved[fqn]) for fqn in found])
        claimed.update(found)
        name = found[0] if found[0] in group else group[0]
        wanted[name] = tensor, _exact(load, prefix, candidates, saved[found[0]], tensor)
    mismatches.add("missing", key, missing)
    sides = {
        fqn: (dtype_name(t.dtype), tuple(as_global(f"{key}.{fqn}", t, declared.get(id(t), ())).shape))
        for fqn, (t, _) in wanted.items()
    }
    theirs = {fqn: entry for fqn, entry in saved.items() if fqn not in claimed}
    theirs |= {fqn: entry for fqn, (_, entry) in wanted.items()}
    mine = {fqn: (entry.dtype, entry.shape) for fqn, entry in theirs.items()}
    good = match_tensors(mismatches, key, sides, mine, convert_dtype=load.options.convert_dtype)
    targets = [target(wanted[fqn][0], fqn, wanted[fqn][1]) for fqn in good]
    load.plan.models += targets
    expanded = expanded_ones({one.key: one.live for one in targets})
    mismatches.add("others", key, [f"{name} {why}" for name, why in expanded.items()])


def _exact(load: Planning, prefix: str, names: Sequence[str], entry: TensorEntry, live: torch.Tensor) -> TensorEntry:
    """Return the saved tensor from which to load a weight.

    This is the saved weight, with one exception: if its dtype differs from the live weight's, and the checkpoint
    has an fp32 master weight, it is the master weight.
    """
    if entry.dtype == dtype_name(live.dtype):
        return entry
    masters = load.entries(Role.MASTER)
    master = next((masters[prefix + name] for name in names if prefix + name in masters), None)
    if master is None or master.shape != entry.shape or master.dtype == entry.dtype:
        return entry
    load.from_masters.add(master.fqn)
    return master


def _not_taken(module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the entries of a module's state dict that the module's `load_state_dict` does not accept.

    Such entries were added by a hook. They are found by loading the module's own state dict back into it.
    """
    import torch

    with torch.no_grad():
        left = module.load_state_dict(dict(state), strict=False).unexpected_keys
    return [f"{name} (the module's state_dict has it, but its load_state_dict does not accept it)" for name in left]
