"""Decodes and validates a checkpoint's values before anything is changed, then applies them to the live state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.load.plan import LoadPlan, ObjectTarget, OptimizerPlan
from ckptkit.checkpoint.load.read import Reading
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.state.optimizer import apply_settings, apply_state
from ckptkit.checkpoint.state.rng import check_rng, reseed, restore_rng, shared_stream
from ckptkit.checkpoint.state.train_state import PerRank, TrainState, canonical_modules, is_stateful
from ckptkit.checkpoint.state.values import JSON, decode
from ckptkit.errors import CorruptCheckpointError, LoadError
from ckptkit.formats.dcp.host_bytes import forget_computed

if TYPE_CHECKING:
    import torch

Tensors = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class DecodedOptimizer:
    """An optimizer's decoded non-tensor state.

    Attributes:
        values: Non-tensor state, by FQN and state name.
        shared: State that belongs to no parameter.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A plan's decoded values.

    Attributes:
        objects: For each of `plan.objects`, the decoded values of its JSON trees.
        optimizers: The decoded state of each optimizer, in the order of `plan.optimizers`.
        rng: The argument of `restore_rng`; None if nothing is restored.
        leftovers: Extra state that the training state does not use, by name.
    """

    objects: list[list[Any]]
    optimizers: list[DecodedOptimizer]
    rng: Any
    leftovers: dict[str, Any]


def decode_plan(plan: LoadPlan, tensor: Tensors) -> Decoded:
    """Decode all of the plan's trees.

    Args:
        tensor: Returns the tensor for a key. Its elements may be read later.

    Raises:
        CorruptCheckpointError, LoadError: A tree is malformed; names its key.
    """
    objects = [[_named(target.key, tree, tensor) for tree in target.trees] for target in plan.objects]
    for target, values in zip(plan.objects, objects, strict=True):
        if target.merge is None:
            _check_object(target, values[0])
    rng = None
    if plan.rng is not None:
        rng = _named("rng", plan.rng, tensor)
        check_rng(rng)
    optimizers = [_optimizer(item, tensor) for item in plan.optimizers]
    leftovers = {name: _named(f"extra.{name}", tree, tensor) for name, tree in plan.leftovers.items()}
    return Decoded(objects, optimizers, rng, leftovers)


def _optimizer(plan: OptimizerPlan, tensor: Tensors) -> DecodedOptimizer:
    values = {
        fqn: {name: _named(f"{plan.key}.{fqn}.{name}", tree, tensor) for name, tree in trees.items()}
        for fqn, trees in plan.values.items()
        if fqn in plan.parameters
    }
    return DecodedOptimizer(values, {name: _named(plan.key, tree, tensor) for name, tree in plan.shared.items()})


def _named(key: str, tree: JSON, tensor: Tensors) -> Any:
    try:
        return decode(tree, tensor)
    except (CorruptCheckpointError, LoadError) as error:
        raise type(error)(f"{key}: {error}") from error


def _check_object(target: ObjectTarget, value: Any) -> None:
    """Check that the saved state of a model, scheduler or scaler is a mapping.

    Other objects check their own state when it is loaded.
    """
    if target.kind in ("model", "scheduler", "grad_scaler") and not isinstance(value, Mapping):
        raise CorruptCheckpointError(f"{target.key}: the saved state is a {type(value).__name__}, expected a mapping.")


def apply_objects(state: TrainState, plan: LoadPlan, decoded: Decoded | None, report: LoadReport) -> None:
    """Restore the user's objects. Must run before `apply_tensors`, because an object may refuse its state."""
    assert decoded is not None
    for target, values in zip(plan.objects, decoded.objects, strict=True):
        _apply_object(state, target, values)
        report.loaded.append(target.key)
    report.extra.update(decoded.leftovers)


def apply_tensors(plan: LoadPlan, reading: Reading, decoded: Decoded | None, report: LoadReport, rank: int) -> None:
    """Finish the models, whose tensors have been read. Restore the optimizers and random number generators."""
    import torch

    assert decoded is not None
    reading.finish()
    for target in plan.models:
        forget_computed(target.live)
        report.loaded.append(target.key)
        if plan.sources:
            report.sources[target.key] = plan.sources[target.entry.fqn]
        live = str(target.live.dtype).removeprefix("torch.")
        if live != target.entry.dtype:
            report.notes.append(f"{target.key}: cast from {target.entry.dtype} to {live}")
    with torch.no_grad():
        for module, handed in plan.handed:
            module.load_state_dict(handed, strict=False)
    loaded = {id(target.live) for target in plan.models}
    for optimizer, states, other in zip(plan.optimizers, reading.states, decoded.optimizers, strict=True):
        apply_optimizer(optimizer, states, other, loaded)
        if not optimizer.skip:
            report.loaded.append(optimizer.key)
    if plan.rng is not None:
        _apply_rng(plan, decoded.rng, report, rank)


def _apply_object(state: TrainState, target: ObjectTarget, values: Sequence[Any]) -> None:
    import torch

    value = values[0]
    if target.merge is not None:
        import torch.distributed as dist

        ready = dist.is_available() and dist.is_initialized()
        value = target.merge(values, dist.get_rank() if ready else 0, dist.get_world_size() if ready else 1)
    item = target.item.value if isinstance(target.item, PerRank) else target.item
    if target.kind == "model":
        _apply_extra_state(target.item, value)
    elif target.kind == "extra" and isinstance(item, torch.nn.Module):
        item.load_state_dict(value, strict=False)  # the plan has reported or accepted any differences
    elif target.kind != "extra" or is_stateful(item):
        item.load_state_dict(value)
        if target.kind == "dataloader":
            _make_iterator(item)
    else:
        name = target.key.removeprefix("extra.")
        state.extra[name] = PerRank(value) if isinstance(target.item, PerRank) else value


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
            raise LoadError(f"the model's load_state_dict does not accept {', '.join(left)}, which its state_dict has.")


def _make_iterator(dataloader: Any) -> None:
    """Create the iterator of torchdata's StatefulDataLoader now. The next `iter` call returns it.

    Creating it draws a random number. The saved run drew that number before the save, so a load must draw it before it
    restores the generators.
    """
    from torch.utils.data import DataLoader

    if isinstance(dataloader, DataLoader):
        dataloader.state_dict()  # type: ignore[attr-defined]  # the only way in; torch's own has no state


def apply_optimizer(
    plan: OptimizerPlan, states: Mapping[str, Any], other: DecodedOptimizer, loaded: Collection[int]
) -> None:
    """Replace an optimizer's state and settings. A master weight that was not saved is copied from the loaded weight.

    Args:
        loaded: The ids of the parameters whose weights were loaded.
    """
    if not plan.skip:
        new = {fqn: dict(state) for fqn, state in states.items()}
        for fqn, values in other.values.items():
            new.setdefault(fqn, {}).update(values)
        _kept_masters(plan, new)
        apply_state(plan.optimizer, plan.parameters, new, other.shared, keep=plan.keep)
        apply_settings(plan.optimizer, plan.groups.settings)
    _follow_weights(plan, loaded)


def _kept_masters(plan: OptimizerPlan, new: dict[str, dict[str, Any]]) -> None:
    """Add to `new` the live master weights that the checkpoint lacks. `_follow_weights` sets their values."""
    if plan.master_name is None:
        return
    for fqn, entry in plan.masters.items():
        live = plan.optimizer.state.get(plan.parameters[fqn], {})
        if entry is None and plan.master_name in live:
            new.setdefault(fqn, {})[plan.master_name] = live[plan.master_name]


def _follow_weights(plan: OptimizerPlan, loaded: Collection[int]) -> None:
    import torch

    if plan.master_name is None:
        return
    with torch.no_grad():
        for fqn, entry in plan.masters.items():
            parameter = plan.parameters[fqn]
            master = plan.optimizer.state.get(parameter, {}).get(plan.master_name)
            if entry is None and master is not None and id(parameter) in loaded:
                master.copy_(parameter)  # both have the same placement, so this does not communicate


def _apply_rng(plan: LoadPlan, saved: Mapping[str, Any], report: LoadReport, rank: int) -> None:
    if plan.reseed:
        # Ranks that share a random stream get the same seed.
        seed = reseed(saved["torch"].tolist(), shared_stream(rank, 0)[0])
        report.notes.append(f"rng: seeded with {seed} on rank {rank}")
        return
    missing = restore_rng(saved)
    report.loaded.append("rng")
    report.notes += [f"rng: the state of {name} was not restored: there is no such generator here" for name in missing]
