"""What the objects of a checkpoint become, made and looked at before a load touches anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.checkpoint.load_plan import LoadPlan, ObjectTarget, OptimizerPlan
from ckptkit.checkpoint.rng import check_rng
from ckptkit.checkpoint.state import canonical_modules
from ckptkit.checkpoint.values import JSON, decode
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, LoadError

__all__ = ["Decoded", "DecodedOptimizer", "decode_plan"]

Tensors = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class DecodedOptimizer:
    """State of an optimizer that is no tensor of the checkpoint: by FQN and name, and that of no parameter."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The values of a plan's trees.

    Attributes:
        objects: For each of `plan.objects`, the value of each of its trees.
        optimizers: In the order of `plan.optimizers`.
        rng: What `restore_rng` takes; None where nothing is restored.
        leftovers: Extra state that nothing takes, by name.
    """

    objects: list[list[Any]]
    optimizers: list[DecodedOptimizer]
    rng: Any
    leftovers: dict[str, Any]


def decode_plan(plan: LoadPlan, tensor: Tensors) -> Decoded:
    """Return all that the plan's trees stand for.

    Args:
        tensor: The tensor under a key; its elements may be read later.

    Raises:
        CorruptCheckpointError, LoadError: A tree is none that a save writes; names its key.
        CheckpointMismatchError: A value is nothing that the live object it is for could take.
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
    """Look at what is taken apart by key: of all else, the object that takes it is the judge."""
    if target.kind in ("model", "scheduler", "grad_scaler") and not isinstance(value, Mapping):
        raise CorruptCheckpointError(f"{target.key}: the saved state is a {type(value).__name__}, expected a mapping.")
    if target.kind == "model":
        modules = canonical_modules(target.item)
        strangers = [str(name) for name in value if module_name(str(name)) not in modules]
        if strangers:
            raise CheckpointMismatchError(
                f"{target.key}: the model has no module for {', '.join(map(repr, strangers[:5]))}; nothing was loaded."
            )


def module_name(key: str) -> str:
    """Return the name of the module whose extra state stands under `key`."""
    return key.removesuffix("_extra_state").removesuffix(".")
