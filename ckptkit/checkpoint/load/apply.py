"""Decodes and validates a checkpoint's values before anything is changed, then applies them to the live state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.load.plan import LoadPlan, ObjectTarget, OptimizerPlan
from ckptkit.checkpoint.load.read import Reading
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.state.model_tensors import canonical_modules
from ckptkit.checkpoint.state.optimizer.equal import same_tensors
from ckptkit.checkpoint.state.optimizer.layout import fill_from_whole
from ckptkit.checkpoint.state.optimizer.restore import apply_state
from ckptkit.checkpoint.state.rng import reseed, restore_rng, rng_settings, shared_stream
from ckptkit.checkpoint.state.train_state import PerRank, TrainState, is_stateful
from ckptkit.checkpoint.state.values import JSON, decode, references
from ckptkit.checkpoint.state.views import memories, separated
from ckptkit.checkpoint.state.without_values import mark_filled
from ckptkit.errors import CorruptCheckpointError, LoadError
from ckptkit.formats.dcp.host_bytes import forget_computed, why_not_dense
from ckptkit.formats.dcp.subclasses import ERROR_BITS, keeps_parts
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded values of a load plan's objects and settings."""

    objects: list[Any]  # the new state of each of `plan.objects`
    optimizers: list[tuple[dict[str, dict[str, Any]], dict[str, Any]]]  # each: state by FQN and name, and shared state
    rng: Any  # the argument of `restore_rng`; None if nothing is restored
    leftovers: dict[str, Any]  # extra state that the training state does not use, by name


def decode_plan(plan: LoadPlan, tensor: Callable[[str], Any], *, rank: int, world_size: int) -> Decoded:
    """Decode the saved JSON trees of a plan. If an object combines the states of several ranks, merge these states.

    Args:
        tensor: Returns the tensor for a key. The tensor's elements may be filled in later, unless the plan merges
            states.
    """

    def named(key: str, tree: JSON) -> Any:
        try:
            return decode(tree, tensor)
        except (CorruptCheckpointError, LoadError) as error:
            raise type(error)(f"{key}: {error}") from error

    objects = []
    for target in plan.objects:
        states = [named(target.key, tree) for tree in target.trees]
        value = states[0] if target.merge is None else target.merge(states, rank, world_size)
        # Other objects check their own state when it is loaded.
        if target.kind in ("model", "scheduler", "grad_scaler") and not isinstance(value, Mapping):
            raise CorruptCheckpointError(
                f"{target.key}: the saved state is a {type(value).__name__}, expected a mapping."
            )
        objects.append(value)
    rng = None
    if plan.rng is not None:
        rng = named("rng", plan.rng)
        rng_settings(rng)  # raises if a state is invalid
    optimizers = []
    for one in plan.optimizers:
        values = {
            fqn: {name: named(f"{one.key}.{fqn}.{name}", tree) for name, tree in trees.items()}
            for fqn, trees in one.values.items()
            if fqn in one.parameters
        }
        optimizers.append((values, {name: named(one.key, tree) for name, tree in one.shared.items()}))
    return Decoded(objects, optimizers, rng, {key: named(f"extra.{key}", tree) for key, tree in plan.leftovers.items()})


def apply_objects(state: TrainState, plan: LoadPlan, decoded: Decoded | None, report: LoadReport) -> None:
    """Restore the user's objects. Runs before `apply_tensors`: an object may refuse its state, which ends the load."""
    assert decoded is not None
    for target, value in zip(plan.objects, decoded.objects, strict=True):
        _apply_object(state, target, value)
        report.loaded.append(target.key)
    report.extra.update(decoded.leftovers)


def apply_tensors(plan: LoadPlan, reading: Reading, decoded: Decoded | None, report: LoadReport, rank: int) -> None:
    """Finish loading the models, and restore optimizers and random number generators. The tensors are already read."""
    import torch

    assert decoded is not None
    reading.finish()
    for target in plan.models:
        forget_computed(target.live)
        report.loaded.append(target.key)
        if plan.sources:
            report.sources[target.key] = plan.sources[target.entry.fqn]
        live = str(target.live.dtype).removeprefix("torch.")
        if live != target.entry.dtype and target.lower_bits is None:
            report.notes.append(f"{target.key}: cast from {target.entry.dtype} to {live}")
    mark_filled(target.live for target in plan.models if target.key not in plan.padded)
    with torch.no_grad():
        for module, handed in plan.handed:
            module.load_state_dict(_with_restored_values(module, handed), strict=False)
        loaded = {id(target.live) for target in plan.models}
        for optimizer, states, other in zip(plan.optimizers, reading.states, decoded.optimizers, strict=True):
            apply_optimizer(optimizer, states, *other, loaded)
            if not optimizer.skip:
                report.loaded.append(optimizer.key)
                _tell_separated(optimizer, plan.weights(optimizer) if optimizer.views else {}, report, rank)
    if plan.reseed:
        # Ranks that share a random stream get the same seed.
        seed = reseed(decoded.rng["torch"].tolist(), shared_stream(rank, 0)[0])
        report.notes.append(f"rng: seeded with {seed} on rank {rank}")
    elif plan.rng is not None:
        lacking = restore_rng(decoded.rng)
        report.loaded.append("rng")
        report.notes += [f"not restored: the random state of {name}, because there is no such generator here"
                         for name in lacking]  # fmt: skip
    for text in plan.warnings if rank == 0 else ():
        _log.warning("%s: %s.", report.url, text)


def _with_restored_values(module: torch.nn.Module, handed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of `handed` with the module's current values in place of all values that are not tensors.

    The values in `handed` are from before the load. `apply_objects` has since restored those of the module.
    """
    import torch

    others = [n for n, v in handed.items() if n.endswith("_extra_state") or not isinstance(v, torch.Tensor)]
    present = module.state_dict() if others else {}
    return {**handed, **{name: present[name] for name in others if name in present}}


def _tell_separated(plan: OptimizerPlan, weights: Mapping[str, torch.Tensor], report: LoadReport, rank: int) -> None:
    """Report optimizer states that shared memory when they were saved, but no longer share memory after the load."""
    if not plan.views:
        return
    for names in separated(plan.views, memories(plan.optimizer, weights)):
        note = (
            f"{plan.key}: {first_few(names)} shared memory when they were saved, but no longer do. If the optimizer "
            "changes one of them through another, training continues differently. To avoid this, let them share memory "
            "before the load: then they still share it afterwards, unless they are in lists or dicts"
        )
        report.notes.append(note)
        if rank == 0:
            _log.warning("%s.", note)


def _apply_object(state: TrainState, target: ObjectTarget, value: Any) -> None:
    import torch

    item = target.item.value if isinstance(target.item, PerRank) else target.item
    if target.kind == "extra" and is_stateful(item) and not isinstance(target.item, PerRank):
        value = _placed_as(item.state_dict(), value)
    if target.kind == "model":
        _apply_extra_state(target.item, value)
    elif target.kind == "extra" and isinstance(item, torch.nn.Module):
        item.load_state_dict(value, strict=False)  # the plan has reported or accepted any differences
    elif target.kind != "extra" or is_stateful(item):
        item.load_state_dict(value)
        if target.kind == "dataloader" and isinstance(item, torch.utils.data.DataLoader):
            # Let torchdata's StatefulDataLoader create its iterator now; the next `iter` call returns this iterator.
            # Creating it draws a random number. The saved run drew this number before the save, so the generators must
            # be restored afterwards.
            item.state_dict()  # type: ignore[attr-defined]  # torch's own DataLoader lacks the method
    else:
        name = target.key.removeprefix("extra.")
        state.extra[name] = PerRank(value) if isinstance(target.item, PerRank) else value


def _placed_as(live: Any, value: Any) -> Any:
    """Return the saved state `value`, with plain tensors converted to DTensors where `live` has DTensors.

    Only small tensors can be plain here: they come from `objects.json`. Large tensors were read into DTensors.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(live, Mapping) and isinstance(value, dict):
        for key in value.keys() & live.keys():
            value[key] = _placed_as(live[key], value[key])
    elif isinstance(live, (list, tuple)) and type(value) is type(live) and len(value) == len(live):
        return type(value)(map(_placed_as, live, value)) if type(value) in (list, tuple) else value
    elif isinstance(live, DTensor) and type(value) in (torch.Tensor, torch.nn.Parameter) and value.shape == live.shape:
        made = torch.empty_like(live, dtype=value.dtype, requires_grad=False)
        fill_from_whole(made, value.detach())
        return torch.nn.Parameter(made, value.requires_grad) if isinstance(value, torch.nn.Parameter) else made
    return value


def _apply_extra_state(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    modules, rest = canonical_modules(module), {}
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "_extra_state" and path in modules:
            modules[path].set_extra_state(value)
        else:
            rest[name] = value  # a custom `state_dict` adds it, so `load_state_dict` must accept it
    if rest:
        result = module.load_state_dict({**module.state_dict(), **rest}, strict=False)
        left = [name for name in getattr(result, "unexpected_keys", ()) if name in rest]
        if left:
            raise LoadError(f"the model's load_state_dict rejects {', '.join(left)}, although its state_dict has it.")


def apply_optimizer(
    plan: OptimizerPlan,
    states: Mapping[str, Any],
    values: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Any],
    loaded: Collection[int],
) -> None:
    """Replace an optimizer's state and settings. If a master weight was not saved, copy the loaded weight to it.

    Args:
        loaded: The `id()`s of the parameters whose weights were loaded.
    """
    live, name = plan.optimizer.state, plan.master_name
    # The live master weights that the checkpoint lacks.
    unsaved = [fqn for fqn, entry in plan.masters.items() if entry is None]
    masters = {f: live[p][name] for f in unsaved if (p := plan.parameters[f]) in live and name in live[p]}
    if not plan.skip:
        new = {fqn: decode(plan.containers.get(fqn, {}), states.__getitem__) for fqn in [*states, *values]}
        for fqn, state in new.items():
            loaded_here = {**states.get(fqn, {}), **values.get(fqn, {})}
            state.update(loaded_here)
            for key in state.keys() - loaded_here.keys():
                del state[key]
        for fqn, trees in plan.kinds.items():
            for state_name in trees.keys() & states.get(fqn, {}).keys():
                tree = trees[state_name]
                read = dict.fromkeys(references(tree), states[fqn][state_name])
                new[fqn][state_name] = decode(tree, read.__getitem__)
        for fqn, master in masters.items():
            new.setdefault(fqn, {})[str(name)] = master
        for fqn, state_name, other, other_name in plan.same:
            if state_name in new.get(fqn, {}) and other_name in new.get(other, {}):
                one, first = new[fqn][state_name], new[other][other_name]
                # If another rank recorded `same`, the two states may have been different tensors on this rank.
                if why_not_dense(one) or same_tensors(one, first):
                    new[fqn][state_name] = first
        apply_state(plan.optimizer, plan.parameters, new, shared, plan.groups.settings, keep=plan.keep)
    for fqn, master in masters.items():
        if id(plan.parameters[fqn]) in loaded:
            master.copy_(plan.parameters[fqn])  # both have the same placement, so this does not communicate
    if plan.skip and keeps_parts(plan.optimizer):
        for parameter in plan.parameters.values():
            if id(parameter) in loaded and ERROR_BITS in live.get(parameter, {}):
                live[parameter][ERROR_BITS].zero_()
