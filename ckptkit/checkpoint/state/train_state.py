"""Defines `TrainState`, the objects that a training run saves, and captures it as named tensors and JSON."""

from __future__ import annotations

import enum
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptkit.arguments import check_flags, wrong
from ckptkit.checkpoint.state.layout import (
    Layout,
    as_global,
    check_layout,
    global_state,
    is_declared,
    matches,
    shards_of,
)
from ckptkit.checkpoint.state.optimizer import CapturedOptimizer, capture_optimizer, class_name, refuse_hidden
from ckptkit.checkpoint.state.rng import capture_rng
from ckptkit.checkpoint.state.values import JSON, encode
from ckptkit.checkpoint.state.without_values import never_filled
from ckptkit.errors import SaveError, UsageError
from ckptkit.formats.dcp.host_bytes import local_part, without_subclass
from ckptkit.formats.dcp.subclasses import (
    SEPARATOR,
    SUBCLASSES,
    Recipe,
    left_behind,
    open_all,
    outer_name,
    repeated,
    without_values,
)
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch


class StateDictType(str, enum.Enum):
    """Selects how a checkpoint stores tensors.

    Attributes:
        FULL: Full tensors in safetensors files; `from_pretrained` can load the model.
        SHARDED: Standard DCP. Loads on any number of ranks.
        LOCAL: Each rank's local tensors, one file per rank. Sends no tensors; loads only on the same mesh.
    """

    FULL = "full"
    SHARDED = "sharded"
    LOCAL = "local"

    @classmethod
    def parse(cls, value: StateDictType | str | enum.Enum) -> StateDictType:
        """Return the type for any common spelling: "full", "FULL_STATE_DICT", torch's enum, ...

        Raises:
            UsageError: The type is unknown.
        """
        if isinstance(value, cls):
            return value
        text = value.name if isinstance(value, enum.Enum) else str(value)
        word = text.rpartition(".")[2].lower().replace("-", "_").removesuffix("_state_dict")
        try:
            return cls(word)
        except ValueError:
            raise UsageError(f"unknown state-dict type {text!r}: expected full, sharded or local.") from None


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value in `TrainState.extra` that differs between ranks. Each rank saves and restores its own value.

    If the value has a method `merge_ranks`, a load calls this method, as for a dataloader (see `TrainState`).
    """

    value: Any


Merge = Callable[[Sequence[Any], int, int], Any]
"""Returns a rank's state, given (states of all saved ranks, rank, world size)."""


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WRAPPED = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
_UNQUANTIZED = "Declare it 'per_rank', or train with unquantized weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_EXPECTED = {
    "model": "a module, or several by name. Pass the model itself, not its class or its state dict",
    "optimizer": "an optimizer with param_groups. Pass the optimizer itself, not its class or its state dict",
    "scheduler": "an object with state_dict(). Pass the scheduler itself, not its class or its state dict",
    "grad_scaler": "an object with state_dict(), such as torch.amp.GradScaler()",
    "dataloader": "an object with state_dict(), such as torchdata's StatefulDataLoader",
}

# Objects that a failed load has filled only partly, each with the URL of the checkpoint. They stay marked if they are
# put into a different `TrainState`. Keyed by id, because tensors compare element by element.
_half_loaded: dict[int, tuple[weakref.ref[object], str]] = {}


def mark_half_loaded(objects: Iterable[object], url: str) -> None:
    """Record that a load of the checkpoint at `url` failed while filling `objects`."""
    for item in objects:
        key = id(item)
        try:
            found = weakref.ref(item, lambda _, key=key: _half_loaded.pop(key, None))  # type: ignore[misc]
        except TypeError:
            continue  # it does not support weak references
        _half_loaded[key] = found, url


def clear_half_loaded(objects: Iterable[object]) -> None:
    """Record that `objects` were loaded completely."""
    if _half_loaded:
        for item in objects:
            _half_loaded.pop(id(item), None)


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Holds everything that a run needs to resume. A save reads the objects in the fields; a load fills them in place.

    Attributes:
        model: A module, or several by name: {"actor": a, "critic": c}. A list contains one model's pipeline stages on
            this rank.
        optimizer, scheduler, grad_scaler, dataloader: One object, or several by name. Each needs `state_dict` and
            `load_state_dict`; an optimizer needs `state` and `param_groups`. See below for an optimizer's hooks. A
            dataloader's state is saved per rank. If the dataloader has a method `merge_ranks(states of all saved ranks,
            rank, world size)`, every load calls it to get this rank's state. Without this method, each rank gets its
            own saved state. If the number of ranks has changed, `per_rank_on_resize` applies.
        extra: More state by name: objects with `state_dict` and `load_state_dict`, or plain values, which a load
            replaces in this dict. Only rank 0's values are saved. For a value that differs between ranks, use
            `PerRank(value)`.
        layout: Declares that a rank's tensors are parts of global tensors. For the experts of an expert-parallel rank:
            {"*.experts.*": ckptkit.Shard(0, mesh=device_mesh["ep"])}. The layout also applies to the
            tensors' optimizer states and fp32 master weights.
        step: The training step; a load sets it.
        rng: Whether to include each rank's random number generators.
        half_loaded: The URL of the checkpoint, if a failed load has only partly filled this state or one of its
            objects; otherwise "". Such a state cannot be saved. A successful load clears this field. Clear it yourself
            only after you have set all values in some other way.

    A save reads an optimizer's state directly. So a save raises if a hook or an override changes the values that
    `state_dict()` returns. A save runs `state_dict` pre-hooks, and a load runs `load_state_dict` post-hooks. If a class
    overrides `load_state_dict`, a load calls the override. If the override changes restored values (for example, by a
    cast), the load then sets these values again. All this also applies to the optimizer inside a
    `MasterWeightOptimizer`, and to each of torchtitan's optimizers (one per pipeline stage). A load fills tensors in
    parameter groups (`lr=torch.tensor(...)`) in place. It refuses a value that has another shape, or that the tensor's
    dtype can't hold.
    """

    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module] | None = None
    optimizer: Any = None
    scheduler: Any = None
    grad_scaler: Any = None
    dataloader: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=dict)
    step: int = 0
    rng: bool = True
    _half: str = field(default="", init=False, repr=False, compare=False)  # set while a load fills this state

    def __post_init__(self) -> None:
        check_state(self, "TrainState")
        check_layout(self.layout)

    @property
    def half_loaded(self) -> str:
        """The URL of the checkpoint whose failed load has filled this state only partly; "" if there is none."""
        if self._half or not _half_loaded:
            return self._half
        marks = ((item, _half_loaded.get(id(item))) for item in self.objects())
        return next((known[1] for item, known in marks if known and known[0]() is item), "")

    @half_loaded.setter
    def half_loaded(self, url: str) -> None:
        self._half = url
        if url:
            mark_half_loaded(self.objects(), url)
        else:
            clear_half_loaded(self.objects())

    def objects(self, *kinds: str) -> Iterator[object]:
        """Yield the objects that a load fills: modules, their tensors, optimizers, schedulers, ...

        Args:
            kinds: Yield only objects of these kinds. If none are given, yield all.
        """
        for kind in kinds or ("model", "optimizer", "scheduler", "grad_scaler", "dataloader", "extra"):
            for item in self.parts(kind).values():
                if kind == "model" and hasattr(item, "modules"):
                    yield from (*item.modules(), *item.parameters(), *item.buffers())
                else:
                    yield item.value if isinstance(item, PerRank) else item

    def parts(self, kind: str) -> dict[str, Any]:
        """Return the objects of one kind ("model", "optimizer", ...) by name. A single object has the name "".

        If an object is one of accelerate's wrappers, the wrapped object is returned, because the wrapper hides its
        hooks.
        """
        value = getattr(self, kind)
        if value is None:
            return {}
        if kind == "model" and isinstance(value, (list, tuple)) and all(hasattr(x, "named_modules") for x in value):
            from ckptkit.checkpoint.state.stages import Stages

            return {"": Stages(value)}
        named = value.items() if isinstance(value, Mapping) else [("", value)]
        return {name: getattr(item, _WRAPPED.get(type(item).__name__, ""), item) for name, item in named}


def _check_name(name: Any, kind: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{kind} name {name!r}: use letters, digits, '_' and '-' only, not starting with '_'.")


def section(kind: str, name: str) -> str:
    """Return the prefix of an object's keys: "model", or "model_actor" for a model with the name "actor"."""
    return f"{kind}_{name}" if name else kind


@dataclass(slots=True)
class Captured:
    """Holds a captured training state: JSON, and named tensors that share memory with the live ones."""

    models: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # tensors by section and FQN
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)  # by section: tied weight -> stored FQN
    optimizers: dict[str, CapturedOptimizer] = field(default_factory=dict)  # by section
    loose: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors of other objects, by full key
    objects: dict[str, JSON] = field(default_factory=dict)  # JSON by key, the same on every rank
    rank_objects: dict[str, JSON] = field(default_factory=dict)  # JSON by key; the key contains the rank
    own: set[str] = field(default_factory=set)  # the keys in `loose` that belong to `rank_objects`
    alike: set[str] = field(default_factory=set)  # plain parameters that must be equal on all ranks
    declared: set[str] = field(default_factory=set)  # tensors that the layout declares as parts of global tensors
    unlike: set[str] = field(default_factory=set)  # tensors that the layout declares as "any_replica"
    globs: dict[str, bool] = field(default_factory=dict)  # layout glob -> whether it matches a tensor of this rank

    def places(self) -> Iterator[tuple[str, str, dict[Any, torch.Tensor], Any]]:
        """Yield (key, stored key, dict that contains the tensor, key in this dict) for each tensor.

        The stored key is the checkpoint key under which the values are stored. It differs from `key` only for the
        further names of a tied tensor.
        """
        for section, tensors in self.models.items():
            aliases = self.aliases.get(section, {})
            for fqn in tensors:
                yield f"{section}.{fqn}", f"{section}.{aliases.get(fqn, fqn)}", tensors, fqn
        for section, taken in self.optimizers.items():
            for fqn in taken.masters:
                yield (key := f"{section}.master.{fqn}"), key, taken.masters, fqn
            for fqn, state in taken.tensors:
                yield (key := f"{section}.state.{fqn}.{state}"), key, taken.tensors, (fqn, state)
        for key in self.loose:
            yield key, key, self.loose, key

    def tensors(self, *, aliases: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with its checkpoint key. With `aliases`, yield a tied weight under each of its names."""
        return ((key, table[name]) for key, shared, table, name in self.places() if aliases or key == shared)

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

    check_whole(state)
    captured = Captured()
    models, optimizers = state.parts("model"), state.parts("optimizer")
    live_models: dict[str, dict[str, torch.Tensor]] = {}
    recipes: dict[str, Recipe] = {}
    for name, module in models.items():
        key = section("model", name)
        live = _live_state(module)
        live_models[key], extra_state = _by_canonical_name(module, live)
        joined = joined_weights(name, live_models[key], state.layout) if state.layout else {}
        captured.models[key], opened, reasons = open_all(live_models[key], joined)
        captured.declared.update(f"{key}.{fqn}" for fqn in captured.models[key] if outer_name(fqn, opened) in joined)
        reasons |= {fqn: f"{why}. {_UNQUANTIZED}" for fqn, why in reasons.items() if fqn in joined} | never_filled(
            live_models[key]
        )
        if "bitsandbytes" in sys.modules:
            reasons.update(left_behind(canonical_modules(module)))
        refuse_hidden(f"{key}.", captured.models[key], filled=True, reasons=reasons)
        for stage in getattr(module, "stages", (module,)):
            _refuse_strangers(key, stage, live if stage is module else _live_state(stage))
        recipes.update({f"{key}.{fqn}": recipe for fqn, recipe in opened.items()})
        captured.aliases[key] = _aliases(module, live_models[key], captured.models[key], opened)
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
            f"{key}.{k}" for k in alike if not is_declared(state.layout, _fqn(key, plain[k]), "per_rank")
        )
        tensors.update({k: without_subclass(tensors[k]) for k in plain})  # the live tensors keep their class
    _capture_objects(captured, state, rank)
    captured.objects["step"] = int(state.step if step is None else step)
    return captured


def _capture_objects(captured: Captured, state: TrainState, rank: int) -> None:
    """Add everything but models and optimizers to `captured`."""
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
        _check_name(name, "extra")
        own = isinstance(item, PerRank)
        key, value = (f"extra.{name}.{rank}", item.value) if own else (f"extra.{name}", item)
        value = value.state_dict() if is_stateful(value) else value
        if own:
            captured.add_own(key, value)
        else:
            captured.objects[key] = encode(value, key, captured.loose)
    refuse_hidden("", captured.loose)


def _fqn(section: str, name: str) -> str:
    """Return a tensor's name in optimizers and layouts: if there are several models, with the name of its model."""
    return name if section == "model" else f"{section.removeprefix('model_')}.{name}"


def _by_fqn(models: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all models by FQN. `models`: the models' tensors, by section and name."""
    return {_fqn(key, name): tensor for key, tensors in models.items() for name, tensor in tensors.items()}


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


def _refuse_strangers(key: str, module: torch.nn.Module, live: Mapping[str, Any]) -> None:
    """Raise SaveError if a state_dict hook adds entries that no load would restore.

    A load restores an added tensor if it has the name of a parameter or buffer, or if an enclosing module overrides
    `load_state_dict` or has a pre-hook for it. A load restores no other added values. This function does not call
    overrides or hooks to see what they restore, because that could change the live module.
    """
    from torch import Tensor
    from torch.nn import Module, Parameter

    if type(module).state_dict is not Module.state_dict:
        return
    added = {name: value for name, value in live.items() if not isinstance(value, Parameter)}
    own = {id(value) for value in module.buffers()} if added else set()
    added = {name: v for name, v in added.items() if id(v) not in own and name.rpartition(".")[2] != "_extra_state"}
    if not added:
        return
    prefixes = _canonical_prefixes(module)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    known = {_canonical(name, prefixes) for name, _ in named}
    loading = [
        f"{path}." if path else ""
        for path, part in canonical_modules(module).items()
        if type(part)._load_from_state_dict is not Module._load_from_state_dict
        or type(part).load_state_dict is not Module.load_state_dict
        or part._load_state_dict_pre_hooks
    ]
    names = {raw: _canonical(raw, prefixes) for raw, value in added.items() if isinstance(value, Tensor)}
    lost = [raw for raw in added if raw not in names or not (names[raw] in known or names[raw].startswith((*loading,)))]
    if lost:
        raise SaveError(
            f"{key}: a state_dict hook adds {first_few(lost)}, which a load could not restore. Make the module's "
            "load_state_dict accept the same tensors; pass non-tensor state through get_extra_state and "
            "set_extra_state. Nothing was saved."
        )


def check_state(state: object, call: str) -> None:
    """Check that `state` is a TrainState whose fields contain objects of the expected types.

    Args:
        call: The caller, for example "load(state)". Error messages name it.

    Raises:
        UsageError: `state` is not a TrainState. Or a field contains a class, a state dict or a plain value instead of
            an object. Or a name contains characters other than letters, digits, "_" and "-".
    """
    if not isinstance(state, TrainState):
        given = "model=model, optimizer=optimizer"
        if isinstance(state, Mapping) and not state.keys() - TrainState.__slots__:
            given = ", ".join(f"{name}=..." for name in state) or given
        hint = " The step comes first." if isinstance(state, int) else ""
        raise UsageError(f"{wrong(f'{call}: state', state, f'TrainState({given})')}{hint}")
    for kind, expected in _EXPECTED.items():
        named = isinstance(getattr(state, kind), Mapping)
        for name, item in state.parts(kind).items():
            bare = kind == "optimizer" and not hasattr(item, "param_groups")
            if bare or isinstance(item, type) or not callable(getattr(item, "state_dict", None)):
                where = kind if name == "" else f"{kind}[{name!r}]"
                raise wrong(f"TrainState: {where}", item, expected)
            if named:
                _check_name(name, kind)
            if kind == "dataloader":
                own_merge(item)
    if not isinstance(state.extra, dict):
        raise wrong("TrainState: extra", state.extra, "a dict of objects or values by name")
    for item in state.extra.values():
        if isinstance(item, PerRank):
            own_merge(item)
    check_flags(rng=state.rng)


def check_whole(state: TrainState) -> None:
    """Raise SaveError if a failed load has left the state or one of its objects half loaded."""
    if state.half_loaded:
        raise SaveError(
            f"the state is half loaded from {state.half_loaded}: that load failed. Load a checkpoint "
            'before you save, or set TrainState(...).half_loaded = "" if all its values have been '
            "restored since."
        )


def own_merge(item: Any) -> Merge | None:
    """Return the `merge_ranks` method of a dataloader or `PerRank` value; None if there is no such method.

    Raises:
        UsageError: The attribute `merge_ranks` is not callable.
    """
    owner = item.value if isinstance(item, PerRank) else item
    found: object = getattr(owner, "merge_ranks", None)
    if found is None or callable(found):
        return found
    expected = "a function of (states of all saved ranks, rank, world size)"
    raise wrong(f"TrainState: {type(owner).__name__}.merge_ranks", found, expected)


def is_stateful(value: Any) -> bool:
    """Return whether a value has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _state_of(item: Any, key: str) -> Any:
    if not is_stateful(item):
        raise UsageError(f"{key}: {type(item).__name__} has no state_dict and load_state_dict.")
    return item.state_dict()


def model_tensors(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a model's live parameters and persistent buffers by canonical FQN, and its state dict's other entries.

    The other entries are extra states (`get_extra_state`) and values that are not tensors. Under FSDP2 the tensors are
    sharded. Canonical names lack the prefixes that torch.compile, activation checkpointing, DDP, DataParallel and FSDP1
    add. If a state_dict hook removes an entry, the result does not contain it. If a hook computes an entry, the result
    contains it (see `computed_state`).
    """
    return _by_canonical_name(module, _live_state(module))


def live_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the `model_tensors` of all models. If there are several, names start with the model's name."""
    models = state.parts("model").items()
    return {f"{n}.{fqn}" if n else fqn: t for n, module in models for fqn, t in model_tensors(module)[0].items()}


def computed_state(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any], Mapping[str, Any] | None]:
    """Return the result of `model_tensors`, and the raw state dict if a hook computed any tensor (otherwise None).

    Computed tensors do not belong to the module. After a load has filled them, the raw state dict that contains them
    is passed to the module's `load_state_dict`.
    """
    raw = _live_state(module)
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    tensors, extra_state = _by_canonical_name(module, raw)
    return tensors, extra_state, raw if any(id(tensor) not in own for tensor in tensors.values()) else None


def _live_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's state dict with live tensors, even if its `state_dict` does not accept `keep_vars`."""
    import torch

    parameters = inspect.signature(module.state_dict).parameters.values()
    if any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        found = dict(module.state_dict(keep_vars=True))
        for name in repeated(found):
            del found[name]
        return found
    live = torch.nn.Module.state_dict(module, keep_vars=True)
    given = module.state_dict()
    return {name: live[name] if same_memory(live.get(name), value) else value for name, value in given.items()}


def same_memory(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or tensors that share all their memory."""
    import torch

    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    mine, theirs = local_part(one), local_part(other)
    return mine.shape == theirs.shape and mine.data_ptr() == theirs.data_ptr() and one.dtype == other.dtype


def _by_canonical_name(
    module: torch.nn.Module, raw_state: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    import torch

    tensors: dict[str, torch.Tensor] = {}
    extra_state: dict[str, Any] = {}
    prefixes = _canonical_prefixes(module)
    for raw, value in raw_state.items():
        name = _canonical(raw, prefixes)
        if name in tensors or name in extra_state:
            raise SaveError(f"model: the keys of two modules become {name!r} once wrappers are removed.")
        if isinstance(value, torch.Tensor) and raw.rpartition(".")[2] != "_extra_state":
            tensors[name] = value
        else:
            extra_state[name] = value
    return tensors, extra_state


def canonical_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules by canonical name, which lacks the prefixes that wrappers add. Omits the wrappers."""
    prefixes = _canonical_prefixes(module)
    return {prefixes[raw]: child for raw, child in module.named_modules(remove_duplicate=False)}


def _canonical_prefixes(module: torch.nn.Module) -> dict[str, str]:
    """Return {name in `named_modules`: canonical name, which lacks the prefixes that wrappers add}."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    found = {"": ""}
    modules = dict(module.named_modules(remove_duplicate=False))
    for raw in modules:
        if raw:
            parent, _, child = raw.rpartition(".")
            wrapper = child in _WRAPPERS or (
                child == "module" and isinstance(modules[parent], (DistributedDataParallel, DataParallel))
            )
            base = found[parent]
            found[raw] = base if wrapper else f"{base}.{child}".lstrip(".")
    return found


def _canonical(key: str, prefixes: Mapping[str, str]) -> str:
    parent, _, leaf = key.rpartition(".")
    while parent and parent not in prefixes:  # a state-dict hook added a level, or removed the level of a wrapper
        parent, _, head = parent.rpartition(".")
        leaf = leaf if head in _WRAPPERS else f"{head}.{leaf}"
    return f"{prefixes[parent]}.{leaf}".lstrip(".")


def parameter_names(
    state: TrainState,
    models: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    wanted: Iterable[Any] | None = None,
) -> dict[int, str]:
    """Return every parameter's FQN, by id. If there are several models, FQNs start with the model's name.

    Args:
        models: The results of `model_tensors` by section, if known.
        wanted: The parameters that need names. None: all.
    """
    import torch

    names: dict[int, str] = {}
    for name, module in state.parts("model").items():
        tensors = model_tensors(module)[0] if models is None else models[section("model", name)]
        for fqn, tensor in tensors.items():
            if isinstance(tensor, torch.nn.Parameter):
                names.setdefault(id(tensor), f"{name}.{fqn}" if name else fqn)
        if wanted is not None and all(map(names.__contains__, map(id, wanted))):
            continue
        prefixes = _canonical_prefixes(module)
        for raw, parameter in module.named_parameters():  # adds parameters that a state_dict hook removed or replaced
            fqn = _canonical(raw, prefixes)
            names.setdefault(id(parameter), f"{name}.{fqn}" if name else fqn)
    return names


def _aliases(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], parts: Iterable[str], recipes: Mapping[str, Recipe]
) -> dict[str, str]:
    """Map all other names of each tied tensor to the name under which the tensor is stored.

    A tied tensor is stored under its first name that the model does not list as tied (transformers'
    `_tied_weights_keys`). A tensor of a subclass is stored as several plain tensors; the result then has one item for
    each of these plain tensors instead.
    """
    names: dict[int, list[str]] = {}
    for fqn, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(fqn)
    listed = set(getattr(module, "_tied_weights_keys", None) or ())
    aliases: dict[str, str] = {}
    for group in names.values():
        if len(group) > 1:
            holder = next((fqn for fqn in group if fqn not in listed), group[0])
            aliases.update({fqn: holder for fqn in group if fqn != holder})
    found = {name: holder for name, holder in aliases.items() if name not in recipes}
    for name in parts if recipes else ():
        outer = outer_name(name, recipes)
        if outer != name and outer in aliases:
            found[name] = aliases[outer] + SEPARATOR + name[len(outer) + len(SEPARATOR) :]
    return found
