"""Adapts another system's checkpoint to the names, sections and objects that a load expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

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
from ckptkit.formats.dcp.roles import Path, setting_place, state_place
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.hf import safetensors
from ckptkit.formats.nested import dicts_with, insert, with_lists
from ckptkit.formats.pickles.objects import TensorValue, read_object
from ckptkit.formats.state_names import (
    ACCELERATE_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PARAM_GROUPS,
    SCALER_STATE,
    SCHEDULER_STATE,
    STEPS,
)
from ckptkit.formats.torch_save import open_file
from ckptkit.formats.trainers.lightning import with_trained_weights
from ckptkit.formats.trainers.merge import assembled, model_of, numbered, renamed, state_files
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    import numpy as np
    import torch

_OF_MODEL = re.compile(r"model_(\d+)\.(.+)")  # their parameters' names
_RNG_FILE = re.compile(r"(?:random_states|rng_state|extra_state)(?:[._](\d+))?")
_SCHEDULER_FILE = re.compile(r"scheduler(?:[._](\d+))?")
_SPLIT = re.compile(r"(?:(?:lr_)?scheduler|(?:grad_|amp_)?scaler)s?(?:_states?|_state_dict)?")  # keys of these
_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_OWNER = re.compile(r"(.*?)\.?(?<![^.])(?:state|master|param_groups)(?:\.|$)")  # group 1: the optimizer's prefix
_KIND = r"(?:opt(?:im(?:izer)?)?|(?:lr_)?sched(?:uler)?|(?:grad_|amp_)?scaler)s?"
_KIND_WORD = re.compile(rf"^{_KIND}_?|_?{_KIND}$")
_BITSANDBYTES = "__bnb_optimizer_quant_state__"  # bitsandbytes' state_dict adds this level to its states
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")
_SAMPLES = 8
_MAX_OBJECT_BYTES = 1 << 20  # of the tensors in one object that is neither a model nor an optimizer
Entry = TypeVar("Entry", ObjectEntry, TensorEntry)
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
    models = {int(match[1]): name for name in files if (match := MODEL_FILE.fullmatch(name))}
    optimizers = {int(match[1] or 0): name for name in sorted(files) if (match := OPTIMIZER_FILE.fullmatch(name))}
    if not any(map(ACCELERATE_FILE.fullmatch, files)):  # the numbers of other programs are steps or epochs
        models, optimizers = {}, {index: name for index, name in optimizers.items() if not index}
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


def _schedulers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all saved schedulers by key or number, in the order in which they were saved."""
    for holder in (values, values.get("meta")):  # Lightning stores them at the top level, or in meta.pt
        listed = holder.get("lr_schedulers") if isinstance(holder, Mapping) else None
        if isinstance(listed, (list, tuple)):
            return {str(i): dict(item) for i, item in enumerate(listed) if isinstance(item, Mapping)}
    files = {int(m[1] or 0): v for k, v in values.items() if (m := _SCHEDULER_FILE.fullmatch(k)) and v is not None}
    if files:  # transformers, accelerate, LightRFT
        return {str(index): files[index] for index in sorted(files)}
    for name in ("lr_scheduler", "extra_state.0"):
        value = values.get(name)
        if name == "extra_state.0" and isinstance(value, Mapping):  # verl
            value = value.get("lr_scheduler")
        if isinstance(value, Mapping):
            return {name: dict(value)}
    flat = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("lr_scheduler.")}
    return {"lr_scheduler": flat} if flat else {}  # torchtitan


def _matched(values: Mapping[str, Any], catalog: Catalog, state: TrainState, notes: list[str]) -> dict[str, Any]:
    """Return the states of schedulers and gradient scalers by key, if as many were saved as are live.

    Scripts save them under any key, and perhaps below another key, such as "app" or "state".

    Several are matched by name, or by order if the checkpoint numbers them; otherwise a note says that they are not.
    """
    tree: dict[Any, Any] = {}
    for name, value in values.items():
        insert(tree, (catalog.objects[name].key if name in catalog.objects else ()) or (name,), value)
    whole = with_lists(tree)
    schedulers = _schedulers(values) or _with_keys(whole, SCHEDULER_STATE)
    found: dict[str, Any] = {}
    for kind, saved in (("scheduler", schedulers), ("grad_scaler", _with_keys(whole, SCALER_STATE))):
        live = list(state.parts(kind))
        if len(live) != len(saved):
            continue
        named = _by_name(list(saved), live)
        if not named and (len(live) == 1 or _are_in_order(saved)):
            named = dict(zip(saved, live, strict=True))
        if saved and not named:
            notes.append(f"{', '.join(saved)}: not restored, because their names are not those of {', '.join(live)}.")
        found |= {section(kind, name): saved[key] for key, name in named.items()}
    return found


def _with_keys(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the saved dicts with these keys, by name. Users choose the names under which Fabric and scripts save."""
    return {name: found for key, value in values.items() for name, found in dicts_with(keys, value, key).items()}


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
        cpu = states.get("cpu", states.get("torch_manual_seed", states.get("torch")))
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
    Optimizers are matched by name or order. Settings, schedulers and random states are read from where Lightning,
    transformers, accelerate, verl, LightRFT, DeepSpeed, torchtitan and scripts store them. The rest become `extra`.
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
            return read_object(store, entry, tensor=_as_torch)
        except CkptkitError as error:
            unread[entry.name] = str(error)
            return None

    groups = {owner: _groups(catalog, store, owner, read) for owner in sections}
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
        states = _states(catalog, store, owner, named, read, _live(state, key))
        if not groups[owner]:
            continue
        trees = []
        for index, group in enumerate(groups[owner]):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            params = [named(name) for name in group.get("params", ())]
            trees.append({**encode(settings, f"{key}.param_groups.{index}", refs), "params": params})
        encoded = {fqn: encode(dict(one), f"{key}.values.{fqn}", refs) for fqn, one in states.items()}
        objects[key] = {"param_groups": trees, "values": encoded, "shared": {}}
    loose = {
        name: entry
        for name, entry in catalog.objects.items()
        if entry.role is not Role.OPTIMIZER and ".param_groups" not in f".{name}" and name != SUBCLASSES
    }
    values = {name: read(entry) for name, entry in loose.items()}
    flattened = {name: f"extra.{name}" for name, item in state.extra.items() if is_stateful(item)}
    for name, item in state.parts("dataloader").items():
        if own_merge(item):  # otherwise it is unknown which rank's state this is
            flattened[section("dataloader", name)] = f"{section('dataloader', name)}.0"
    _join_parts(values, tensors, catalog, store, flattened)
    for key, value in (_matched(values, catalog, state, notes) | _random_states(values)).items():
        objects[key] = encode(value, key, refs)
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
    step = catalog.info.step if catalog.info.step is not None else _step(values, catalog)
    if step is None and sections:
        notes.append("the checkpoint records no step; TrainState.step is unchanged, set it yourself.")
    return Adopted(Catalog(tensors, catalog.objects, replace(catalog.info, step=step)), objects, refs, notes)


def _step(values: Mapping[str, Any], catalog: Catalog) -> int | None:
    """Return the step that a script saved beside the model, perhaps as a tensor; None if there is none."""
    import torch

    homes = {entry.key[:-2] for entry in catalog.by_role(Role.MODEL).values()}
    home = homes.pop() if len(homes) == 1 else ()
    for value in (values.get(".".join(map(str, (*home, name)))) for name in STEPS):
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if type(number) is int and number >= 0:
            return number
    return None


def _join_parts(
    values: dict[str, Any],
    tensors: dict[str, TensorEntry],
    catalog: Catalog,
    store: Store,
    without: Collection[str],
) -> None:
    """Join the objects that were split: by DCP, or by the reader because they contain tensors (a scheduler's rates).

    Objects with many tensors, such as a moving average of the weights, stay in parts, and their tensors are not read.

    Args:
        values: The objects' parts by name. An object with tensors replaces its parts.
        tensors: The load's tensors. Those that are read are removed.
        without: Objects that stay in parts.
    """
    from ckptkit.formats.dcp.fill import read_whole

    objects: dict[str, list[TensorEntry]] = {}
    for name, entry in catalog.tensors.items():
        if entry.role is Role.OTHER and f"other.{name}" in tensors:
            objects.setdefault(str((entry.key or (name,))[0]), []).append(entry)
    keys = {name: catalog.objects[name].key or (name,) for name in values}
    for key in keys.values():
        if len(key) > 1 and _SPLIT.fullmatch(str(key[0])):
            objects.setdefault(str(key[0]), [])
    held: dict[str, list[str]] = {}
    for name, key in keys.items():
        held.setdefault(str(key[0]), []).append(name)
    small = {
        top: [entry.name for entry in entries]
        for top, entries in objects.items()
        if top not in without and sum(entry.nbytes for entry in entries) <= _MAX_OBJECT_BYTES
    }
    read: dict[str, torch.Tensor] = {}
    try:
        read = read_whole(catalog, store, [name for names in small.values() for name in names])
    except CkptkitError:  # leave out those that cannot be read
        for names in small.values():
            with suppress(CkptkitError):
                read |= read_whole(catalog, store, names)
    for top, names in small.items():
        if not all(name in read for name in names):
            continue
        entries = objects[top]
        parts: list[tuple[Path, Any]] = [((entry.key or (entry.name,)), read[entry.name]) for entry in entries]
        parts += [(keys[name], values.pop(name)) for name in held.get(top, ())]
        tree: dict[Any, Any] = {}
        for path, value in parts:
            insert(tree, path, value)
        values.update(with_lists(tree, catalog.info.extra.get("containers", {})))
        for entry in entries:
            tensors.pop(f"other.{entry.name}")


def _as_torch(array: np.ndarray[Any, Any] | TensorValue) -> torch.Tensor:
    import torch

    if not isinstance(array, TensorValue):
        return torch.from_numpy(array)
    dtype = getattr(torch, array.dtype)
    flat = torch.frombuffer(bytearray(array.data), dtype=dtype) if array.data else torch.empty(0, dtype=dtype)
    return flat.reshape(array.shape)


def _put_extras(
    values: Mapping[str, Any], objects: dict[str, JSON], refs: dict[str, torch.Tensor], notes: list[str]
) -> None:
    """Add the remaining objects as `extra.<name>`.

    A load restores each of these objects, or reports that it was not used.
    """
    schedules = any(key.partition("_")[0] == "scheduler" for key in objects)
    for name, value in values.items():
        random = _RNG_FILE.fullmatch(name)
        used = f"rng.{random[1] or 0}" in objects if random else schedules and _SCHEDULER_FILE.fullmatch(name)
        if value is None or used:
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
    numbers: Mapping[str, str] = field(default_factory=dict)
    front: str = ""  # what the optimizer's parameters may start with in the checkpoint

    def __call__(self, name: Any) -> str:
        fqn = self.numbers.get(str(name))
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


def _owner(entry: TensorEntry | ObjectEntry) -> str | None:
    """Return the part of a raw name before "state", "master" or "param_groups"; None if it contains none of these.

    If the name is nested, the last of these keys counts: ("state", "optimizers", "AdamW", "state", fqn, "exp_avg").
    """
    ends = [i for i, part in enumerate(entry.key) if part == PARAM_GROUPS]
    # After "state", it is a parameter's name.
    ends += [i for i, part in enumerate(entry.key[:-1]) if part == "master" and entry.key[max(i - 1, 0)] != "state"]
    ends += [i for i, part in enumerate(entry.key[:-2]) if part == "state"]
    if not ends and entry.key[-1:] == ("state",):
        ends = [len(entry.key) - 1]  # the empty state of an optimizer without momentum
    below = ".".join(str(part) for part in entry.key[max(ends) :]) if ends else ""
    if below and entry.name.endswith(below):  # a reader may have added a prefix to the name
        return entry.name.removesuffix(below).rstrip(".")
    found = _OWNER.match(entry.name)
    return found[1] if found else None


def _sections(catalog: Catalog, live: Sequence[str], url: str) -> dict[str, str]:
    """Map the prefixes of the saved optimizers to the keys of the live optimizers, by name or by order."""
    entries = [entry for entry in catalog.tensors.values() if entry.role in (Role.OPTIMIZER, Role.MASTER)]
    settings = [entry for entry in catalog.objects.values() if entry.role is Role.OPTIMIZER]  # plain SGD has no tensors
    found = {owner for owner in (*map(_owner, entries), *map(_owner, settings)) if owner is not None}
    owners = sorted(found, key=lambda owner: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", owner)])
    if not owners or not live:
        return {}
    if len(owners) != len(live):
        raise CheckpointMismatchError(
            f"{url} contains {len(owners)} optimizers ({', '.join(owners)}), but the training state has "
            f"{len(live)}. Pass as many optimizers, by name: TrainState(optimizer={{...}}). Or skip them: "
            'optimizer="skip".'
        )
    if len(owners) > 1 and (named := _by_name(owners, live)):
        return {owner: section("optimizer", name) for owner, name in named.items()}
    numbered = any(not entry.fqn or entry.fqn.isdigit() for entry in entries if entry.state)
    if len(owners) > 1 and numbered and not _are_in_order(owners):
        raise CheckpointMismatchError(
            f"{url} contains the optimizers {', '.join(owners)}, and numbers their parameters. Give the training "
            f'state\'s optimizers ({", ".join(live)}) the same names, or skip them: optimizer="skip".'
        )
    return {owner: section("optimizer", name) for owner, name in zip(owners, live, strict=True)}


def _by_name(saved: Sequence[str], live: Sequence[str]) -> dict[str, str]:
    """Map each saved object's key to the live object whose name it contains; {} unless there is one for each key.

    Both "optimizers.gen" and "gen_optim" contain "gen".
    """
    words = {key: {*key.split("."), *(_KIND_WORD.sub("", part) for part in key.split("."))} for key in saved}
    named = {key: [name for name in live if name in words[key]] for key in saved}
    found = {key: names[0] for key, names in named.items() if len(names) == 1}
    return found if sorted(found.values()) == sorted(live) and len(found) == len(saved) else {}


def _are_in_order(keys: Iterable[str]) -> bool:
    """Return whether the keys of saved objects are only numbers, such as "optimizers.0", so that their order counts."""
    ends = [_KIND_WORD.sub("", key.rpartition(".")[2]) for key in keys]
    return all(end == "" or end.isdigit() for end in ends)


def _renamed(
    catalog: Catalog,
    rename: Callable[[str], str],
    sections: Mapping[str, str],
    tied: Mapping[str, str],
    numbers: Mapping[str, Mapping[str, str]],
) -> dict[str, TensorEntry]:
    """Return the checkpoint's tensors under the names that ckptkit uses. Omits moments that no live optimizer uses."""
    found: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        if entry.role is Role.MODEL:
            fqn = rename(entry.fqn)
            name = f"model.{fqn}"
        elif entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.state:
            owner = _owner(entry) or ""
            place = state_place(entry.key)
            if place is not None and _is_nested(place[1]):
                continue  # a part of a list or dict, which `_states` restores
            number = numbers.get(owner, {}).get(place[0], "") if place is not None else ""
            fqn = number or (rename(entry.fqn.removesuffix(f".{_BITSANDBYTES}")) if entry.fqn else "")
            fqn = tied.get(fqn, fqn)
            key = sections.get(owner, "optimizer" if entry.role is Role.MASTER else None)  # a master may fill a weight
            if key is None or not fqn:
                continue
            part = f"master.{fqn}" if entry.role is Role.MASTER else f"state.{fqn}.{_state(entry)}"
            name = f"{key}.{part}"
        elif entry.role is Role.OPTIMIZER and f".{PARAM_GROUPS}." in f".{entry.name}":
            continue  # a setting, which `_groups` reads
        else:
            name, fqn = f"other.{entry.name}", entry.fqn
        found[name] = replace(entry, name=name, fqn=fqn, state=_state(entry))
    return found


def _is_nested(path: Sequence[str | int]) -> bool:
    """Return whether this path below a parameter's state leads into a list or a dict."""
    return len(path) > 1 and path[0] != _BITSANDBYTES


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


def _groups(catalog: Catalog, store: Store, owner: str, read: Callable[[ObjectEntry], Any]) -> list[dict[str, Any]]:
    """Return one optimizer's param groups.

    They may be one object, one object or tensor per setting, or one per parameter and setting (torch's flattened form,
    as in torchtitan).
    """
    from ckptkit.formats.dcp.fill import read_whole

    front = f"{owner}.{PARAM_GROUPS}" if owner else PARAM_GROUPS
    whole = catalog.objects.get(front)
    if whole is not None:
        value = read(whole)
        fits = isinstance(value, (list, tuple)) and all(isinstance(group, Mapping) for group in value)
        return [dict(group) for group in value] if fits else []
    objects = {name: entry for name, entry in catalog.objects.items() if name.startswith(f"{front}.")}
    tensors = {name: entry for name, entry in catalog.tensors.items() if name.startswith(f"{front}.")}
    values = {name: read(entry) for name, entry in objects.items()}
    values |= read_whole(catalog, store, list(tensors)) if tensors else {}
    numbered: dict[int, dict[Any, Any]] = {}
    flattened: dict[str, dict[Any, Any]] = {}
    keys = {name: entry.key for name, entry in objects.items()} | {name: entry.key for name, entry in tensors.items()}
    for name, key in keys.items():
        owned, path = setting_place(key or (name,))
        group = numbered.setdefault(int(owned), {}) if owned.isdigit() else flattened.setdefault(owned, {})
        if path:
            insert(group, path, values[name])
        elif isinstance(values[name], Mapping):
            group.update(values[name])
    if not numbered:
        return [{**with_lists(group), "params": [fqn]} for fqn, group in flattened.items()]
    return [with_lists(numbered[index]) for index in sorted(numbered)]


def _live(state: TrainState, key: str) -> Any:
    return next(item for name, item in state.parts("optimizer").items() if section("optimizer", name) == key)


def _states(
    catalog: Catalog,
    store: Store,
    owner: str,
    name_of: Callable[[Any], str],
    read: Callable[[ObjectEntry], Any],
    live: Any,
) -> dict[str, dict[str, Any]]:
    """Return each parameter's state that is not a tensor, such as a step count or a list of tensors, by live FQN.

    For torch's optimizers, step counts become tensors, because these optimizers would convert them on load anyway.
    Other optimizers keep numbers.

    Raises:
        CheckpointMismatchError: Lists or dicts contain tensors, and the live parameters are sharded.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from ckptkit.formats.dcp.fill import read_whole

    homes = {kind.__module__ for kind in type(getattr(live, "optimizer", live)).__mro__} - {"torch.optim.optimizer"}
    in_tensors = any(home.startswith("torch.optim.") for home in homes)
    found: dict[str, dict[Any, Any]] = {}

    def places(entries: Iterable[Entry]) -> Iterator[tuple[Entry, str, Path]]:
        for entry in entries:
            place = state_place(entry.key) if entry.role is Role.OPTIMIZER else None
            if place is not None and _owner(entry) == owner:
                yield entry, name_of(place[0]), place[1]

    for item, fqn, path in places(catalog.objects.values()):
        value = read(item)
        if path == ("step",) and type(value) in (int, float) and in_tensors:
            value = torch.tensor(float(value))
        insert(found.setdefault(fqn, {}), path, value)
    parts = [part for part in places(catalog.tensors.values()) if _is_nested(part[2])]
    if parts and any(isinstance(p, DTensor) for group in live.param_groups for p in group["params"]):
        entry, fqn, path = parts[0]
        raise CheckpointMismatchError(
            f"the optimizer's state {path[0]!r} of {fqn} is a list or dict of tensors, which cannot be restored for "
            'sharded parameters. Skip the optimizer: optimizer="skip".'
        )
    tensors = read_whole(catalog, store, [entry.name for entry, _, _ in parts]) if parts else {}
    for entry, fqn, path in parts:
        insert(found.setdefault(fqn, {}), path, tensors[entry.name])
    return {fqn: with_lists(state) for fqn, state in found.items()}


def _by_position(
    catalog: Catalog, owner: str, groups: Sequence[Mapping[str, Any]], key: str, state: TrainState
) -> dict[str, str]:
    """Map each numbered parameter to its live FQN. Return {} if the saved groups contain names.

    The numbers are strings, because DCP stores the keys of dicts as strings.

    If the saved and the live groups have the same lengths and the shapes match, parameters are matched by order. This
    assumes that the saving job created its optimizer with the same code. Otherwise the saved parameters are matched to
    the model's parameters by shape and order, provided that only one assignment is possible.
    """
    params = [list(group.get("params", ())) for group in groups]
    if not any(params) or any(isinstance(number, str) for listed in params for number in listed):
        return {}
    params = [[str(number) for number in listed] for listed in params]
    numbers = [number for listed in params for number in listed]
    names = parameter_names(state)
    live = _live(state, key)
    shapes: dict[str, list[tuple[int, ...]]] = {}  # of each number's states, without scalars such as step counts
    for entry in catalog.tensors.values():
        place = state_place(entry.key) if entry.role is Role.OPTIMIZER and entry.shape else None
        if place is not None and len(place[1]) == 1 and _owner(entry) == owner:
            shapes.setdefault(place[0], []).append(tuple(entry.shape))
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
