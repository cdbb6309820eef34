"""Adapts another system's checkpoint to the names, sections and objects that a load expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, TensorEntry
from ckptkit.checkpoint.state.train_state import (
    TrainState,
    is_stateful,
    live_tensors,
    own_merge,
    parameter_names,
    section,
)
from ckptkit.checkpoint.state.values import JSON, encode
from ckptkit.errors import CheckpointMismatchError, CkptkitError
from ckptkit.formats.dcp.class_records import in_parts, renamed_recipes
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.hf import safetensors
from ckptkit.formats.pickles.objects import read_object
from ckptkit.formats.torch_save import open_file
from ckptkit.formats.trainers.lightning import with_trained_weights
from ckptkit.formats.trainers.merge import assembled, model_of, numbered, renamed, state_files
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    import torch

# transformers and accelerate store the optimizer, the scheduler and the random state next to an unsharded model.
_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?\.(?:bin|pt)")
_MODEL = re.compile(r"(?:pytorch_)?model_(\d+)\.(?:safetensors|bin)")  # accelerate's further models
_OF_MODEL = re.compile(r"model_(\d+)\.(.+)")  # their parameters' names
_RNG_FILE = re.compile(r"(?:random_states|rng_state|extra_state)(?:[._](\d+))?")
_SCHEDULER_FILE = re.compile(r"scheduler(?:[._](\d+))?")
_SCHEDULER = ("last_epoch", "_last_lr")  # keys in every torch scheduler's state
_SCALER = ("scale", "growth_factor", "backoff_factor")  # keys in the state of a GradScaler that is enabled
_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_OWNER = re.compile(r"(.*?)\.?(?<![^.])(?:state|master|param_groups)(?:\.|$)")  # group 1: the optimizer's prefix
_BITSANDBYTES = "__bnb_optimizer_quant_state__"  # bitsandbytes' state_dict adds this level to its states
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")
_SAMPLES = 8
# PEFT's files omit these parts of a PEFT model's names.
_ADAPTER = re.compile(
    r"(?<=\.)modules_to_save\.[^.]+\."
    r"|(?<=\.lora_magnitude_vector)\.[^.]+\.weight$"
    r"|(?:(?<=\.lora_[AB])|(?<=\.lora_embedding_[AB]))\.(?!(?:weight|bias)$)[^.]+"
)


def with_files_beside(catalog: Catalog, store: Store) -> Catalog:
    """Return the catalog, extended by the optimizer, scheduler and random-state files in the directory of the weights.

    A catalog that already contains an optimizer is returned unchanged.
    """
    if not catalog.info.format.startswith("safetensors") and catalog.info.format not in ("torch", "hf"):
        return catalog
    if any(entry.role is Role.OPTIMIZER for entry in catalog.tensors.values()):
        return catalog
    files = {item.path: item.size for item in store.list() if item.kind == "file"}
    parts = [catalog]
    models = {int(match[1]): name for name in files if (match := _MODEL.fullmatch(name))}
    optimizers = {int(match[1] or 0): name for name in sorted(files) if (match := _OPTIMIZER.fullmatch(name))}
    for index, name in sorted(models.items()):
        open_model = safetensors.open_file if name.endswith(".safetensors") else open_file
        parts.append(numbered(open_model(store, name), index))
    for index, name in sorted(optimizers.items()):
        part = renamed(open_file(store, name), "optimizer")
        parts.append(numbered(part, index) if index else part)
    objects = {kind: name for kind, name in state_files(files).items() if kind not in catalog.objects}
    if len(parts) == 1 and not objects:
        return catalog
    return assembled(store, parts, catalog.info, objects)


# --- schedulers, random state and other objects


def _schedulers(values: Mapping[str, Any]) -> list[Any]:
    """Return the states of all saved schedulers, in the order in which they were saved."""
    for holder in (values, values.get("meta")):  # Lightning stores them at the top level, or in meta.pt
        listed = holder.get("lr_schedulers") if isinstance(holder, Mapping) else None
        if isinstance(listed, (list, tuple)):
            return [dict(item) for item in listed if isinstance(item, Mapping)]
    files = {int(m[1] or 0): v for k, v in values.items() if (m := _SCHEDULER_FILE.fullmatch(k)) and v is not None}
    if files:  # transformers, accelerate, LightRFT
        return [files[index] for index in sorted(files)]
    for name in ("lr_scheduler", "extra_state.0"):
        value = values.get(name)
        if name == "extra_state.0" and isinstance(value, Mapping):  # verl
            value = value.get("lr_scheduler")
        if isinstance(value, Mapping):
            return [dict(value)]
    flat = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("lr_scheduler.")}
    return [flat] if flat else _with_keys(values, _SCHEDULER)  # torchtitan


def _by_order(values: Mapping[str, Any], state: TrainState) -> dict[str, Any]:
    """Return the states of schedulers and gradient scalers by key, if as many were saved as are live."""
    found: dict[str, Any] = {}
    for kind, saved in (("scheduler", _schedulers(values)), ("grad_scaler", _with_keys(values, _SCALER))):
        live = [section(kind, name) for name in state.parts(kind)]
        found |= dict(zip(live, saved, strict=True)) if len(live) == len(saved) else {}
    return found


def _with_keys(values: Mapping[str, Any], keys: Collection[str]) -> list[Any]:
    """Return the saved dicts with these keys, in order. Users choose the names under which Fabric and scripts save."""
    for holder in (values, values.get("meta")):
        items = holder.values() if isinstance(holder, Mapping) else ()
        found = [dict(item) for item in items if isinstance(item, Mapping) and all(key in item for key in keys)]
        if found:
            return found
    return []


def _random_states(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved random states of all ranks, by key. Omits a state without Python's or torch's generator."""
    import numpy as np
    import torch

    found: dict[str, Any] = {}
    for file, value in values.items():
        match = _RNG_FILE.fullmatch(file)
        states = value.get("rng", value) if match is not None and isinstance(value, Mapping) else None
        if match is None or not isinstance(states, Mapping):
            continue
        python = states.get("python", states.get("random", states.get("random_state")))
        cpu = states.get("cpu", states.get("torch_manual_seed"))
        array = states.get("numpy", states.get("numpy_random_seed"))
        if python is None or cpu is None:
            continue
        version, words, gauss = python
        made: dict[str, Any] = {
            "python": {"version": int(version), "words": torch.tensor(list(words), dtype=torch.int64), "gauss": gauss},
            "torch": torch.as_tensor(np.asarray(cpu)) if not isinstance(cpu, torch.Tensor) else cpu,
        }
        if array is not None:
            name, keys, position, has_gauss, cached = array
            made["numpy"] = {
                "name": str(name),
                "words": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
        found[f"rng.{match[1] or 0}"] = made
    return found


@dataclass(frozen=True, slots=True)
class Adopted:
    """Holds another system's checkpoint in the form that a load expects; see `adopt`."""

    catalog: Catalog  # the tensors, under ckptkit's names and with the live models' FQNs
    objects: dict[str, JSON] = field(default_factory=dict)  # JSON by key, as in `objects.json`
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors that the objects refer to
    notes: list[str] = field(default_factory=list)  # what was adapted, and what could not be read


def adopt(catalog: Catalog, store: Store, state: TrainState, *, optimizer: bool = True) -> Adopted:
    """Adapt another system's checkpoint to `state`. Does not communicate. Reads only objects and the tensors of
    `extra`.

    FQNs in the checkpoint and in the models may differ by a prefix (a LightningModule's attribute, a wrapper). The
    prefix that makes the most names match is added or removed. PEFT's files omit the adapter's name; it is inserted.
    Optimizers are matched by order. Settings, schedulers and random states are read from the files in which Lightning,
    transformers, accelerate, verl, LightRFT, DeepSpeed and torchtitan store them. Other objects become `extra`.
    """
    trained = with_trained_weights(catalog)
    said = trained.info.notes[len(catalog.info.notes) :]
    catalog = in_parts(store, with_files_beside(trained, store), optimizer=optimizer)
    rename, notes = _aligned(catalog, state)
    notes += said
    tied = _tied(state)
    sections = _sections(catalog, list(state.parts("optimizer")), store.url) if optimizer else {}
    objects: dict[str, JSON] = {}
    refs: dict[str, torch.Tensor] = {}
    unread: dict[str, str] = {}

    def read(entry: ObjectEntry) -> Any:
        try:
            return read_object(store, entry)
        except CkptkitError as error:
            unread[entry.name] = str(error)
            return None

    groups = {owner: _groups(catalog, owner, read) for owner in sections}
    numbers = {owner: _by_position(catalog, owner, groups[owner], key, state) for owner, key in sections.items()}
    tensors = _renamed(catalog, rename, sections, tied, numbers)
    homes = {id(entry.slices): name for name, entry in tensors.items()}
    if recipes := renamed_recipes(catalog, lambda entry: homes.get(id(entry.slices))):
        objects[SUBCLASSES] = recipes
    known = {entry.fqn for entry in tensors.values() if entry.fqn}
    names = _LiveNames(rename, known, str(catalog.info.extra.get("module_prefix", "")), tied)
    for owner, key in sections.items():
        if numbers[owner]:
            notes.append(f"{key}: the checkpoint numbers its parameters; they were matched by order.")
        named = replace(names, numbers=numbers[owner], front=model_of(owner))
        states = _states(catalog, owner, named, read, _live(state, key))
        if not groups[owner]:
            continue
        trees = []
        for index, group in enumerate(groups[owner]):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            params = [named(name) for name in group.get("params", ())]
            trees.append({**encode(settings, f"{key}.param_groups.{index}", {}), "params": params})
        encoded = {fqn: encode(dict(one), f"{key}.values.{fqn}", refs) for fqn, one in states.items()}
        objects[key] = {"param_groups": trees, "values": encoded, "shared": {}}
    loose = {
        name: entry
        for name, entry in catalog.objects.items()
        if entry.role is not Role.OPTIMIZER and ".param_groups" not in f".{name}" and name != SUBCLASSES
    }
    values = {name: read(entry) for name, entry in loose.items()}
    for key, value in (_by_order(values, state) | _random_states(values)).items():
        objects[key] = encode(value, key, refs)
    flattened = {name: f"extra.{name}" for name, item in state.extra.items() if is_stateful(item)}
    for name, item in state.parts("dataloader").items():
        if own_merge(item):  # otherwise it is unknown which rank's state this is
            flattened[section("dataloader", name)] = f"{section('dataloader', name)}.0"
    for name, part in _flattened(list(flattened), values, tensors, store, catalog).items():
        objects[flattened[name]] = encode(part, flattened[name], refs)
        values = {key: value for key, value in values.items() if not key.startswith(f"{name}.")}
    _put_extras(values, objects, refs, notes)
    others = [name.removeprefix("other.") for name in tensors if name.startswith("other.")]
    if others:
        notes.append(
            f"{counted(len(others), 'tensor', 'are')} neither weights nor optimizer state, and not loaded: "
            f"{first_few(others, 3)}."
        )
    notes += [f"{name} was not read: {why}" for name, why in unread.items()]
    if doubt := catalog.info.extra.get("unproved"):
        notes.append(f"not proved: {doubt}")
    if catalog.info.step is None and sections:
        notes.append("the checkpoint records no step; TrainState.step is unchanged, set it yourself.")
    return Adopted(Catalog(tensors, catalog.objects, catalog.info), objects, refs, notes)


def _put_extras(
    values: Mapping[str, Any], objects: dict[str, JSON], refs: dict[str, torch.Tensor], notes: list[str]
) -> None:
    """Add the remaining objects as `extra.<name>`.

    A load restores each of these objects, or reports that it was not used.
    """
    for name, value in values.items():
        if value is None or _RNG_FILE.fullmatch(name) or _SCHEDULER_FILE.fullmatch(name):
            continue
        key = f"extra.{_NAME.sub('_', name)}"
        try:
            objects[key] = encode(value, key, refs)
        except CkptkitError as error:
            notes.append(f"{name} was skipped: {error}")


# --- names


def _aligned(catalog: Catalog, state: TrainState) -> tuple[Callable[[str], str], list[str]]:
    """Return a function that maps saved FQNs to live ones, and notes for the report."""
    live = live_tensors(state).keys()
    saved = {entry.fqn for entry in catalog.by_role(Role.MODEL).values()}
    best, hits = ("", ""), len(saved & live)  # best: (removed prefix, added prefix)
    candidates: set[tuple[str, str]] = set()
    # Try long names first, because they are unlikely to be a suffix of another name by accident.
    for fqn in sorted(saved, key=lambda name: (-len(name), name))[:_SAMPLES]:
        candidates |= {("", name[: -len(fqn)]) for name in live if name.endswith(f".{fqn}")}
    for fqn in sorted(live, key=lambda name: (-len(name), name))[:_SAMPLES]:
        candidates |= {(name[: -len(fqn)], "") for name in saved if name.endswith(f".{fqn}")}
    for drop, add in sorted(candidates):  # in the same order on every rank
        fit = sum(1 for fqn in saved if fqn.startswith(drop) and add + fqn[len(drop) :] in live)
        if fit > hits:
            best, hits = (drop, add), fit
    in_order = _in_order([*state.parts("model")])
    if sum(1 for fqn in saved if in_order(fqn) in live) > hits:
        return in_order, ["models: the checkpoint numbers them; they were matched by order."]
    drop, add = best
    adapted = _adapter_names(live)

    def rename(fqn: str) -> str:
        fqn = add + fqn[len(drop) :] if fqn.startswith(drop) else fqn
        return adapted.get(fqn, fqn)

    if not drop and not add:
        return rename, []
    how = f"{drop!r} was removed from" if drop else f"{add!r} was added to"
    return rename, [f"names: the prefix {how} the checkpoint's names, to match the model's."]


def _in_order(models: Sequence[str]) -> Callable[[str], str]:
    """Return a function that gives a numbered model's parameters the name of the live model at the same position."""

    def rename(fqn: str) -> str:
        match = _OF_MODEL.fullmatch(fqn)
        index, rest = (int(match[1]), match[2]) if match else (0, fqn)
        return f"{models[index]}.{rest}" if index < len(models) else fqn

    return rename


def _adapter_names(live: Collection[str]) -> dict[str, str]:
    """Map the names in PEFT's files to the names in a live PEFT model. Omits a name that fits several adapters."""
    found: dict[str, str] = {}
    shared: set[str] = set()
    for fqn in live:
        stored = _ADAPTER.sub("", fqn)
        if stored != fqn and stored not in live:
            if stored in found:
                shared.add(stored)
            found[stored] = fqn
    return {stored: fqn for stored, fqn in found.items() if stored not in shared}


@dataclass(frozen=True, slots=True)
class _LiveNames:
    """Maps the parameter names in saved param groups to live FQNs. The saved names may include prefixes of wrappers."""

    rename: Callable[[str], str]
    known: set[str]
    prefix: str
    tied: Mapping[str, str]
    numbers: Mapping[Any, str] = field(default_factory=dict)
    front: str = ""  # what the optimizer's parameters may start with in the checkpoint

    def __call__(self, name: Any) -> str:
        fqn = self.numbers.get(name)
        if not fqn:
            clean = str(name)
            for wrapper in _WRAPPERS:
                clean = clean.replace(wrapper, "")
            usual = self.rename(clean.removeprefix(self.prefix))
            options = (
                self.rename(self.front + clean),
                self.rename(clean),
                usual,
                self.rename(clean.removeprefix("module.")),
            )
            fqn = next((option for option in options if option in self.known), usual)
        return self.tied.get(fqn, fqn)


def _tied(state: TrainState) -> dict[str, str]:
    """Map every name of a tied parameter to the name under which this job stores the parameter's optimizer state."""
    names = parameter_names(state)
    holders = {fqn: names.get(id(tensor), fqn) for fqn, tensor in live_tensors(state).items()}
    return {fqn: holder for fqn, holder in holders.items() if holder != fqn}


# --- sections


def _owner(name: str) -> str | None:
    """Return the part of a raw name before "state", "master" or "param_groups".

    Returns None if none of these words occurs.
    """
    found = _OWNER.match(name)
    return found[1] if found else None


def _sections(catalog: Catalog, live: Sequence[str], url: str) -> dict[str, str]:
    """Map the prefixes of the saved optimizers to the keys of the live optimizers, by order."""
    names = [entry.name for entry in catalog.tensors.values() if entry.role in (Role.OPTIMIZER, Role.MASTER)]
    names += [
        entry.name for entry in catalog.objects.values() if entry.role is Role.OPTIMIZER
    ]  # plain SGD has no tensors
    found = {owner for name in names if (owner := _owner(name)) is not None}
    owners = sorted(found, key=lambda owner: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", owner)])
    if not owners or not live:
        return {}
    if len(owners) != len(live):
        raise CheckpointMismatchError(
            f"{url} contains {len(owners)} optimizers ({', '.join(owners)}), but the training state has "
            f"{len(live)}. Pass as many optimizers, by name: TrainState(optimizer={{...}}). Or skip them: "
            'optimizer="skip".'
        )
    return {owner: section("optimizer", name) for owner, name in zip(owners, live, strict=True)}


def _renamed(
    catalog: Catalog,
    rename: Callable[[str], str],
    sections: Mapping[str, str],
    tied: Mapping[str, str],
    numbers: Mapping[str, Mapping[Any, str]],
) -> dict[str, TensorEntry]:
    """Return the checkpoint's tensors under the names that ckptkit uses. Omits moments that no live optimizer uses."""
    found: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        if entry.role is Role.MODEL:
            fqn = rename(entry.fqn)
            name = f"model.{fqn}"
        elif entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.state:
            owner = _owner(entry.name) or ""
            fqn = (
                rename(entry.fqn.removesuffix(f".{_BITSANDBYTES}"))
                if entry.fqn
                else numbers.get(owner, {}).get(entry.key[-2], "")
            )
            fqn = tied.get(fqn, fqn)
            key = sections.get(owner, "optimizer" if entry.role is Role.MASTER else None)  # a master may fill a weight
            if key is None or not fqn:
                continue
            part = f"master.{fqn}" if entry.role is Role.MASTER else f"state.{fqn}.{_state(entry)}"
            name = f"{key}.{part}"
        else:
            name, fqn = f"other.{entry.name}", entry.fqn
        found[name] = replace(entry, name=name, fqn=fqn, state=_state(entry))
    return found


def _state(entry: TensorEntry) -> str:
    return entry.state.removeprefix(f"{_BITSANDBYTES}.")


def _flattened(
    names: Sequence[str], values: Mapping[str, Any], tensors: dict[str, TensorEntry], store: Store, catalog: Catalog
) -> dict[str, dict[str, Any]]:
    """Return the states of named objects that torch's DCP stored flattened, with keys such as "train_state.step".

    Removes the tensors of these states from `tensors`.
    """
    from ckptkit.formats.dcp.fill import read_whole

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        front = f"{name}."
        whole = [
            entry for entry in catalog.tensors.values() if entry.role is Role.OTHER and entry.name.startswith(front)
        ]
        read = read_whole(catalog, store, [entry.name for entry in whole]) if whole else {}
        parts = {**{key: value for key, value in values.items() if key.startswith(front)}, **read}
        if parts:
            found[name] = {key.removeprefix(front): value for key, value in parts.items()}
        for entry in whole:
            tensors.pop(f"other.{entry.name}", None)
    return found


# --- optimizer settings


def _groups(catalog: Catalog, owner: str, read: Callable[[ObjectEntry], Any]) -> list[dict[str, Any]]:
    """Return one optimizer's param groups.

    The param groups may be saved as one object, as one object per setting, or as one object per parameter and setting
    (torch's flattened form, which torchtitan uses).
    """
    front = f"{owner}.param_groups" if owner else "param_groups"
    whole = catalog.objects.get(front)
    if whole is not None:
        value = read(whole)
        fits = isinstance(value, (list, tuple)) and all(isinstance(group, Mapping) for group in value)
        return [dict(group) for group in value] if fits else []
    numbered: dict[int, dict[str, Any]] = {}
    flattened: dict[str, dict[str, Any]] = {}
    for name, entry in catalog.objects.items():
        if not name.startswith(f"{front}."):
            continue
        rest, _, setting = name[len(front) + 1 :].rpartition(".")
        if rest.isdigit():
            numbered.setdefault(int(rest), {})[setting] = read(entry)
        elif rest:
            flattened.setdefault(rest, {"params": [rest]})[setting] = read(entry)
    return [numbered[index] for index in sorted(numbered)] or list(flattened.values())


def _live(state: TrainState, key: str) -> Any:
    return next(item for name, item in state.parts("optimizer").items() if section("optimizer", name) == key)


def _states(
    catalog: Catalog, owner: str, name_of: Callable[[Any], str], read: Callable[[ObjectEntry], Any], live: Any
) -> dict[str, dict[str, Any]]:
    """Return each parameter's non-tensor state, such as a step count, by live FQN.

    For torch's own optimizers, step counts become tensors, because those optimizers convert step counts when they load
    them. For other optimizers, step counts stay numbers.
    """
    import torch

    homes = {kind.__module__ for kind in type(getattr(live, "optimizer", live)).__mro__} - {"torch.optim.optimizer"}
    in_tensors = any(home.startswith("torch.optim.") for home in homes)
    found: dict[str, dict[str, Any]] = {}
    for entry in catalog.objects.values():
        if entry.role is Role.OPTIMIZER and entry.key[-3:-2] == ("state",) and _owner(entry.name) == owner:
            value = read(entry)
            if entry.key[-1] == "step" and type(value) in (int, float) and in_tensors:
                value = torch.tensor(float(value))
            found.setdefault(name_of(entry.key[-2]), {})[str(entry.key[-1])] = value
    return found


def _by_position(
    catalog: Catalog, owner: str, groups: Sequence[Mapping[str, Any]], key: str, state: TrainState
) -> dict[Any, str]:
    """Map each numbered parameter to its live FQN. Return {} if the saved groups contain names.

    If the saved and the live groups have the same lengths and the shapes match, parameters are matched by order. This
    assumes that the saving job created its optimizer with the same code. Otherwise the saved parameters are matched to
    the model's parameters by shape and order, provided that only one assignment is possible.
    """
    params = [list(group.get("params", ())) for group in groups]
    numbers = [number for listed in params for number in listed]
    if not numbers or any(isinstance(number, str) for number in numbers):
        return {}
    names = parameter_names(state)
    live = _live(state, key)
    shapes: dict[Any, list[tuple[int, ...]]] = {}  # of each number's states, without scalars such as step counts
    for entry in catalog.tensors.values():
        if entry.role is Role.OPTIMIZER and len(entry.key) > 1 and entry.shape and _owner(entry.name) == owner:
            shapes.setdefault(entry.key[-2], []).append(tuple(entry.shape))
    listed = [[p for p in group["params"] if id(p) in names] for group in live.param_groups]
    flat = [p for group in listed for p in group]
    if [len(group) for group in listed] == [len(group) for group in params] and all(
        _fits(shapes.get(number, ()), tuple(p.shape)) for number, p in zip(numbers, flat, strict=True)
    ):
        return {number: names[id(p)] for number, p in zip(numbers, flat, strict=True)}
    trained = {id(p) for p in flat}
    modules = [p for module in state.parts("model").values() for p in module.parameters() if id(p) in trained]
    found = assign(
        [Param(names[id(p)], tuple(p.shape)) for p in modules],
        [[max(shapes.get(number, ()), key=len, default=None) for number in group] for group in params],
        [group.get("weight_decay") == 0 for group in groups],
    )
    if found is None:
        lengths = [", ".join(str(len(group)) for group in one) for one in (params, listed)]
        raise CheckpointMismatchError(
            f"{key}: the checkpoint numbers its parameters, in groups of {lengths[0]}; the live "
            f"optimizer has groups of {lengths[1]}, and the shapes do not determine which is which. "
            "Create the optimizer with the groups that were saved (the Trainer uses decay and no decay), "
            'or skip it: optimizer="skip".'
        )
    return dict(zip(numbers, (fqn for group in found for fqn in group), strict=True))


def _fits(states: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Return whether states of these shapes can belong to a parameter of `shape`.

    At least one state must have the parameter's shape, or this shape without one of the last two dimensions.
    """
    return not states or any(found in (shape, shape[:-1], (*shape[:-2], *shape[-1:])) for found in states)
