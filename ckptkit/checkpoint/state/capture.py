"""Captures a training state as named tensors, which share memory with the live ones, and JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.layout import Layout, as_global, global_state, is_declared, matches, shards_of
from ckptkit.checkpoint.state.model_tensors import (
    by_canonical_name,
    canonical_modules,
    live_state,
    parameter_names,
    refuse_added_entries,
    tied_names,
)
from ckptkit.checkpoint.state.optimizer.capture import CapturedOptimizer, capture_optimizer, refuse_hidden
from ckptkit.checkpoint.state.optimizer.methods import class_name
from ckptkit.checkpoint.state.rng import capture_rng
from ckptkit.checkpoint.state.train_state import PerRank, TrainState, check_name, is_stateful, section
from ckptkit.checkpoint.state.values import JSON, encode
from ckptkit.checkpoint.state.without_values import never_filled
from ckptkit.errors import SaveError, UsageError
from ckptkit.formats.dcp.host_bytes import without_subclass
from ckptkit.formats.dcp.subclasses import SUBCLASSES, Recipe, left_behind, open_all, outer_name, without_values

if TYPE_CHECKING:
    import torch


_UNQUANTIZED = "Declare it 'per_rank', or train with unquantized weights"


@dataclass(slots=True)
class Captured:
    """Holds a captured training state: JSON, and named tensors that share memory with the live ones."""

    models: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # tensors by section and FQN
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)  # by section: tied weight -> stored FQN
    optimizers: dict[str, CapturedOptimizer] = field(default_factory=dict)  # by section
    loose: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors of other objects, by full key
    objects: dict[str, JSON] = field(default_factory=dict)  # JSON by key, the same on every rank
    rank_objects: dict[str, JSON] = field(default_factory=dict)  # JSON by key; the key contains the rank
    modules: set[str] = field(default_factory=set)  # the keys in `objects` of the modules in `extra`
    own: set[str] = field(default_factory=set)  # the keys in `loose` that belong to `rank_objects`
    alike: set[str] = field(default_factory=set)  # plain parameters that must be equal on all ranks
    declared: set[str] = field(default_factory=set)  # tensors that the layout declares as parts of global tensors
    unlike: set[str] = field(default_factory=set)  # tensors that the layout declares as "any_replica"
    globs: dict[str, bool] = field(default_factory=dict)  # layout glob -> whether it matches a tensor of this rank

    def places(self) -> Iterator[tuple[str, str, dict[Any, torch.Tensor], Any]]:
        """Yield (key, stored key, dict that contains the tensor, key in this dict) for each tensor.

        The stored key is the checkpoint key under which the values are stored. It differs from `key` only for the
        other names of a tied tensor.
        """
        for part, tensors in self.models.items():
            aliases = self.aliases.get(part, {})
            for fqn in tensors:
                yield f"{part}.{fqn}", f"{part}.{aliases.get(fqn, fqn)}", tensors, fqn
        for part, taken in self.optimizers.items():
            for fqn in taken.masters:
                yield (key := f"{part}.master.{fqn}"), key, taken.masters, fqn
            for fqn, state in taken.tensors:
                yield (key := f"{part}.state.{fqn}.{state}"), key, taken.tensors, (fqn, state)
        for key in self.loose:
            yield key, key, self.loose, key

    def tensors(self, *, aliases: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with its checkpoint key. With `aliases`, yield a tied weight under each of its names."""
        return ((key, table[name]) for key, shared, table, name in self.places() if aliases or key == shared)

    def is_in_module(self, key: str) -> bool:
        """Return whether a key in `loose` is a tensor of a module in `extra`."""
        return any(key.startswith(f"{module}.") for module in self.modules)

    def add_own(self, key: str, value: Any) -> None:
        """Add state that only this rank saves and restores."""
        before = len(self.loose)
        self.rank_objects[key] = encode(value, key, self.loose)
        self.own.update(islice(reversed(self.loose), len(self.loose) - before))


def capture(state: TrainState, *, rank: int = 0, step: int | None = None) -> Captured:
    """Capture this rank's part of `state`. The captured tensors share memory with the live tensors.

    Does not change values, and does not communicate. (If parameters are unsharded, FSDP2 reshards them locally.)

    Raises:
        UsageError: The optimizer has parameters that are in none of the models.
        SaveError: A value cannot be saved in a form that loads safely, or the state is half loaded.
    """
    from torch.distributed.tensor import DTensor
    from torch.nn import Parameter

    from ckptkit.checkpoint.state.stages import stages_of

    check_whole(state)
    captured = Captured()
    models, optimizers = state.parts("model"), state.parts("optimizer")
    live_models: dict[str, dict[str, torch.Tensor]] = {}
    recipes: dict[str, Recipe] = {}
    for name, module in models.items():
        key = section("model", name)
        live = live_state(module)
        live_models[key], extra_state = by_canonical_name(module, live)
        joined = joined_weights(name, live_models[key], state.layout) if state.layout else {}
        captured.models[key], opened, reasons = open_all(live_models[key], joined)
        captured.declared.update(f"{key}.{fqn}" for fqn in captured.models[key] if outer_name(fqn, opened) in joined)
        reasons |= {fqn: f"{why}. {_UNQUANTIZED}" for fqn, why in reasons.items() if fqn in joined} | never_filled(
            live_models[key]
        )
        if "bitsandbytes" in sys.modules:
            reasons.update(left_behind(canonical_modules(module)))
        refuse_hidden(f"{key}.", captured.models[key], filled=True, reasons=reasons)
        for stage in stages_of(module):
            refuse_added_entries(key, stage, live if stage is module else live_state(stage))
        recipes.update({f"{key}.{fqn}": recipe for fqn, recipe in opened.items()})
        captured.aliases[key] = tied_names(module, live_models[key], captured.models[key], opened)
        if extra_state:
            # Large tensors in the extra state are not weights, so their keys must not begin with the model's section.
            captured.objects[f"{key}.extra_state"] = encode(extra_state, f"extra_state.{key}", captured.loose)
    stepped = [p for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]]
    names, weights = parameter_names(state, live_models, stepped), _by_fqn(live_models)
    for name, optimizer in optimizers.items():
        key = section("optimizer", name)
        captured.optimizers[key] = taken = capture_optimizer(optimizer, names, key, state.layout, weights)
        taken.tree.update(_other_names(weights, names, taken))
        captured.loose.update(taken.loose)
        captured.objects[key] = taken.tree
        recipes.update({f"{key}.state.{fqn}.{item}": recipe for (fqn, item), recipe in taken.recipes.items()})
    if recipes:
        captured.objects[SUBCLASSES] = recipes
    if state.layout:
        _globalize(captured, state.layout, weights)
    for key, tensors in captured.models.items():
        plain = {k: outer_name(k, recipes, f"{key}.") for k, v in tensors.items() if not isinstance(v, DTensor)}
        alike = (k for k, fqn in plain.items() if isinstance(live_models[key][fqn], Parameter))
        captured.alike.update(
            f"{key}.{k}"
            for k in alike
            if not (state.layout and is_declared(state.layout, _fqn(key, plain[k]), "per_rank"))
        )
        tensors.update({k: without_subclass(tensors[k]) for k in plain})  # the live tensors keep their class
    _capture_objects(captured, state, rank)
    captured.objects["step"] = int(state.step if step is None else step)
    return captured


def _capture_objects(captured: Captured, state: TrainState, rank: int) -> None:
    """Add everything but models and optimizers to `captured`."""
    from torch.nn import Module

    kinds = ("optimizer", "scheduler")
    if classes := {section(kind, n): class_name(item) for kind in kinds for n, item in state.parts(kind).items()}:
        captured.objects["classes"] = classes
    for kind in ("scheduler", "grad_scaler"):
        for name, item in state.parts(kind).items():
            key = section(kind, name)
            captured.objects[key] = encode(_state_of(item, key), key, captured.loose)
    for name, item in state.parts("dataloader").items():
        key = f"{section('dataloader', name)}.{rank}"
        captured.add_own(key, _state_of(item, key))
    if state.rng:
        captured.add_own(f"rng.{rank}", capture_rng())
    for name, item in state.extra.items():
        check_name(name, "extra")
        own = isinstance(item, PerRank)
        key, value = (f"extra.{name}.{rank}", item.value) if own else (f"extra.{name}", item)
        is_module, value = isinstance(value, Module), value.state_dict() if is_stateful(value) else value
        if own:
            captured.add_own(key, value)
        elif is_module and isinstance(value, Mapping):  # its names and tensors may differ between ranks
            captured.objects[key] = encode(dict(value), key, captured.loose, inline=False)
            captured.modules.add(key)
        else:
            captured.objects[key] = encode(value, key, captured.loose)
    refuse_hidden("", captured.loose)


def _fqn(section: str, name: str) -> str:
    """Return a tensor's name in optimizers and layouts: if there are several models, with the name of its model."""
    return name if section == "model" else f"{section.removeprefix('model_')}.{name}"


def _by_fqn(models: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all models by FQN. `models`: the models' tensors, by section and name."""
    prefixes = {key: _fqn(key, "") for key in models if key != "model"}
    return {prefixes.get(key, "") + name: tensor for key, own in models.items() for name, tensor in own.items()}


def joined_weights(name: str, live: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """Return, by FQN, a DTensor for each quantized weight that the layout declares as a part of a global tensor.

    The DTensors have no values: they only describe global shapes and placements. They do not contain the quantized
    weight, because its class may not support being the local part of a DTensor.

    Args:
        name: The model's name.
        live: The model's tensors.
    """
    key, prefix = section("model", name), f"{name}." if name else ""
    found: dict[str, torch.Tensor] = {}
    for fqn, tensor in live.items():
        if (shards := shards_of(layout, prefix + fqn)) and (place := without_values(tensor)) is not None:
            found[fqn] = as_global(f"{key}.{fqn}", place, shards)
    return found


def _other_names(
    live: Mapping[str, torch.Tensor], names: Mapping[int, str], taken: CapturedOptimizer
) -> dict[str, dict[str, str]]:
    """Return {"tied": {other name: FQN}} for tied parameters. Their optimizer states are saved only under the FQN.

    Returns {} if no optimizer has a tied parameter.
    """
    own = {fqn for group in taken.tree["param_groups"] for fqn in group["params"]}
    saved = {name: names.get(id(tensor), name) for name, tensor in live.items()}
    found = {name: fqn for name, fqn in saved.items() if fqn != name and fqn in own}
    return {"tied": found} if found else {}


def _globalize(captured: Captured, layout: Layout, live: Iterable[str]) -> None:
    """Turn each tensor that the layout declares into a DTensor, which presents it as a part of a global tensor.

    Call this after all lookups by identity, because the DTensors are new objects.

    Args:
        live: The FQNs of the models' tensors.
    """
    from torch.distributed.tensor import DTensor

    captured.globs.update(matches(layout, live))
    before = {key: id(tensor) for key, tensor in captured.tensors(aliases=True)}
    parameters = _by_fqn(captured.models)
    for key, tensors in captured.models.items():
        for name, tensor in tensors.items():
            if f"{key}.{name}" not in captured.declared:  # `joined_weights` did the others
                tensors[name] = as_global(f"{key}.{name}", tensor, shards_of(layout, _fqn(key, name)))
    for key, taken in captured.optimizers.items():
        for (fqn, name), value in taken.tensors.items():
            if (fqn, name) in taken.joined:
                continue
            what = f"{key}: state {name!r} of {fqn!r}"
            shards = shards_of(layout, fqn) if fqn in parameters else ()
            taken.tensors[fqn, name] = global_state(what, value, parameters.get(fqn, value), shards)
        for fqn, value in taken.masters.items():
            taken.masters[fqn] = as_global(f"{key}.master.{fqn}", value, shards_of(layout, fqn))
        parts = {part: taken.tensors[part] for part in taken.joined}
        captured.declared.update(f"{key}.state.{'.'.join(part)}" for part, t in parts.items() if isinstance(t, DTensor))
    captured.declared.update(k for k, tensor in captured.tensors(aliases=True) if id(tensor) != before[k])
    captured.unlike.update(_any_replica(captured, layout))


def _any_replica(captured: Captured, layout: Layout) -> Iterator[str]:
    """Yield the keys of tensors that the layout declares as "any_replica", and the keys of their optimizer states."""
    word = "any_replica"
    for key, tensors in captured.models.items():
        yield from (f"{key}.{name}" for name in tensors if is_declared(layout, _fqn(key, name), word))
    for key, taken in captured.optimizers.items():
        yield from (f"{key}.state.{fqn}.{item}" for fqn, item in taken.tensors if is_declared(layout, fqn, word))
        yield from (f"{key}.master.{fqn}" for fqn in taken.masters if is_declared(layout, fqn, word))


def check_whole(state: TrainState) -> None:
    """Raise SaveError if a failed load has left the state or one of its objects half loaded."""
    if state.half_loaded:
        raise SaveError(
            f"the state is half loaded from {state.half_loaded}: that load failed. Load a checkpoint "
            'before you save, or set TrainState(...).half_loaded = "" if all its values have been '
            "restored since."
        )


def _state_of(item: Any, key: str) -> Any:
    if not is_stateful(item):
        raise UsageError(f"{key}: {type(item).__name__} has no state_dict and load_state_dict.")
    return item.state_dict()
