"""A checkpoint of another system, seen as one of ours: the names, sections and objects that a load looks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, TensorEntry
from ckptkit.checkpoint.foreign_files import with_files_beside
from ckptkit.checkpoint.foreign_objects import foreign_extras, foreign_rng, foreign_schedulers
from ckptkit.checkpoint.state import TrainState, model_tensors, parameter_names, section
from ckptkit.checkpoint.values import JSON, encode
from ckptkit.errors import CheckpointMismatchError, CkptkitError
from ckptkit.formats.objects import read_object

if TYPE_CHECKING:
    import torch

    from ckptkit.storage.store import Store

__all__ = ["Adopted", "adopt"]

_OWNER = re.compile(r"(.*?)\.?(?<![^.])(?:state|master|param_groups)(?:\.|$)")
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")
_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Adopted:
    """What `adopt` made of a checkpoint.

    Attributes:
        catalog: Its tensors under the names of ours: FQNs are the live models'.
        objects: JSON by key, as `objects.json` would hold it.
        tensors: What the objects refer to.
        notes: What was read into it, and what could not be read.
    """

    catalog: Catalog
    objects: dict[str, JSON] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def adopt(catalog: Catalog, store: Store, state: TrainState, *, optimizer: bool = True) -> Adopted:
    """Return a foreign checkpoint as `state` can take it. No communication; no tensor is read but small objects.

    The FQNs of one side may have a prefix that the other has not (a LightningModule's attribute, a wrapper): the one
    that makes more names fit is added or taken away. Optimizers are matched in their order. Settings, schedulers
    and random numbers are taken from where Lightning, transformers, accelerate, verl, LightRFT, DeepSpeed and
    torchtitan keep them; other objects become `extra`.

    Raises:
        CheckpointMismatchError: It holds another number of optimizers than `state`, more than none.
    """
    catalog = with_files_beside(catalog, store)
    rename, notes = _aligned(catalog, state)
    tied = _tied(state)
    owners = _owners(catalog)
    sections = _sections(owners, list(state.parts("optimizer")), store.url) if optimizer else {}
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
    numbers = {owner: _by_position(groups[owner], key, state) for owner, key in sections.items()}
    tensors = _masters(_renamed(catalog, rename, sections, tied, numbers), state, notes)
    known = {entry.fqn for entry in tensors.values() if entry.fqn}
    names = _Names(rename, known, str(catalog.info.extra.get("module_prefix", "")), tied)
    for owner, key in sections.items():
        if numbers[owner]:
            notes.append(f"{key}: the checkpoint numbers the parameters; they were matched by their order.")
        _put_groups(objects, key, groups[owner], replace(names, numbers=numbers[owner]))
    loose = {
        name: entry
        for name, entry in catalog.objects.items()
        if entry.role is not Role.OPTIMIZER and ".param_groups" not in f".{name}"
    }
    values = {name: read(entry) for name, entry in loose.items()}
    for found in (foreign_schedulers(values, list(state.parts("scheduler"))), foreign_rng(values)):
        for key, value in found.items():
            objects[key] = encode(value, key, refs)
    foreign_extras(values, objects, refs, notes)
    notes += [f"{name} was not read: {why}" for name, why in unread.items()]
    return Adopted(Catalog(tensors, catalog.objects, catalog.info), objects, refs, notes)


# --- names


def _aligned(catalog: Catalog, state: TrainState) -> tuple[Callable[[str], str], list[str]]:
    """Return how a saved FQN becomes a live one."""
    models = state.parts("model")
    live = {f"{name}.{fqn}" if name else fqn for name, module in models.items() for fqn in model_tensors(module)[0]}
    saved = {entry.fqn for entry in catalog.by_role(Role.MODEL).values()}
    best, hits = ("", ""), len(saved & live)  # (taken away, added)
    for drop, add in _candidates(saved, live):
        fit = sum(1 for fqn in saved if fqn.startswith(drop) and add + fqn[len(drop) :] in live)
        if fit > hits:
            best, hits = (drop, add), fit
    drop, add = best

    def rename(fqn: str) -> str:
        return add + fqn[len(drop) :] if fqn.startswith(drop) else fqn

    if not drop and not add:
        return rename, []
    how = f"{drop!r} was taken from" if drop else f"{add!r} was put before"
    return rename, [f"names: {how} those of the checkpoint, to fit the model's."]


def _candidates(saved: set[str], live: set[str]) -> set[tuple[str, str]]:
    if not saved or not live:
        return set()
    found: set[tuple[str, str]] = set()
    # The longest names are the least likely to be the tail of one they have nothing to do with.
    for fqn in sorted(saved, key=lambda name: (-len(name), name))[:_SAMPLES]:
        found |= {("", name[: -len(fqn)]) for name in live if name.endswith(f".{fqn}")}
    for fqn in sorted(live, key=lambda name: (-len(name), name))[:_SAMPLES]:
        found |= {(name[: -len(fqn)], "") for name in saved if name.endswith(f".{fqn}")}
    return found


@dataclass(frozen=True, slots=True)
class _Names:
    """Makes live FQNs of the names in a param group, which are as the wrappers had them."""

    rename: Callable[[str], str]
    known: set[str]
    prefix: str
    tied: Mapping[str, str]
    numbers: Mapping[Any, str] = field(default_factory=dict)

    def __call__(self, name: Any) -> str:
        fqn = self.numbers.get(name) or self._fqn(str(name))
        return self.tied.get(fqn, fqn)

    def _fqn(self, name: str) -> str:
        clean = name
        for wrapper in _WRAPPERS:
            clean = clean.replace(wrapper, "")
        options = (clean, clean.removeprefix(self.prefix), clean.removeprefix("module."))
        for option in options:
            renamed = self.rename(option)
            if renamed in self.known:
                return renamed
        return self.rename(clean.removeprefix(self.prefix))


def _tied(state: TrainState) -> dict[str, str]:
    """Return the other names of each tied parameter -> the one its optimizer state goes by here."""
    names = parameter_names(state)
    found: dict[str, str] = {}
    for name, module in state.parts("model").items():
        for fqn, tensor in model_tensors(module)[0].items():
            full = f"{name}.{fqn}" if name else fqn
            holder = names.get(id(tensor), full)
            if holder != full:
                found[full] = holder
    return found


# --- sections


def _owner(name: str) -> str | None:
    """Return what stands before "state", "master" or "param_groups" in a raw name; None where it has none of them."""
    found = _OWNER.match(name)
    return found[1] if found else None


def _owners(catalog: Catalog) -> list[str]:
    """Return the optimizers of a checkpoint by the prefix of their names, in their order."""
    names = [entry.name for entry in catalog.tensors.values() if entry.role in (Role.OPTIMIZER, Role.MASTER)]
    found = dict.fromkeys(owner for name in names if (owner := _owner(name)) is not None)
    return sorted(found, key=lambda owner: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", owner)])


def _sections(owners: Sequence[str], live: Sequence[str], url: str) -> dict[str, str]:
    """Return the key of the live optimizer that each one of the checkpoint belongs to."""
    if not owners or not live:
        return {}
    if len(owners) != len(live):
        raise CheckpointMismatchError(
            f"{url} holds {len(owners)} optimizers ({', '.join(owners)}), the training state has {len(live)}. "
            'Give as many, by name: TrainState(optimizer={...}); or leave them out: optimizer="skip".'
        )
    return {owner: section("optimizer", name) for owner, name in zip(owners, live, strict=True)}


def _renamed(
    catalog: Catalog,
    rename: Callable[[str], str],
    sections: Mapping[str, str],
    tied: Mapping[str, str],
    numbers: Mapping[str, Mapping[Any, str]],
) -> dict[str, TensorEntry]:
    """Return the tensors by names of ours, without the optimizers that nothing here takes."""
    found: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        if entry.role is Role.MODEL:
            fqn = rename(entry.fqn)
            name = f"model.{fqn}"
        elif entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.state:
            owner = _owner(entry.name) or ""
            fqn = rename(entry.fqn) if entry.fqn else numbers.get(owner, {}).get(entry.key[-2], "")
            fqn = tied.get(fqn, fqn)
            key = sections.get(owner)
            if key is None or not fqn:
                continue
            part = f"master.{fqn}" if entry.role is Role.MASTER else f"state.{fqn}.{entry.state}"
            name = f"{key}.{part}"
        else:
            name, fqn = f"other.{entry.name}", entry.fqn
        found[name] = replace(entry, name=name, fqn=fqn)
    return found


def _masters(tensors: dict[str, TensorEntry], state: TrainState, notes: list[str]) -> dict[str, TensorEntry]:
    """Let fp32 masters be the weights where the live model is fp32 itself and no live optimizer has masters."""
    masters = {e.fqn: name for name, e in tensors.items() if e.role is Role.MASTER}
    if not masters or any(getattr(o, "master_state_name", None) for o in state.parts("optimizer").values()):
        return tensors
    live: dict[str, str] = {}
    for name, module in state.parts("model").items():
        for fqn, tensor in model_tensors(module)[0].items():
            live[f"{name}.{fqn}" if name else fqn] = str(tensor.dtype).removeprefix("torch.")
    taken = 0
    for fqn, name in masters.items():
        master = tensors.pop(name)
        weight = tensors.get(f"model.{fqn}")
        if weight is not None and weight.dtype != live.get(fqn) == master.dtype and weight.shape == master.shape:
            tensors[weight.name] = replace(master, name=weight.name, role=Role.MODEL, state="")
            taken += 1
    notes.append(
        f"weights: {taken} of {len(masters)} come from the fp32 masters, as the live model has their dtype."
        if taken
        else f"{len(masters)} fp32 masters were left out: no optimizer here keeps masters."
    )
    return tensors


# --- the settings of optimizers


def _groups(catalog: Catalog, owner: str, read: Callable[[ObjectEntry], Any]) -> list[dict[str, Any]]:
    """Return the param groups of one optimizer: one object, an object a setting, or an object a parameter and setting
    (torch's flattened form, which torchtitan saves)."""
    front = f"{owner}.param_groups" if owner else "param_groups"
    whole = catalog.objects.get(front)
    if whole is not None:
        value = read(whole)
        return [dict(group) for group in value] if _are_groups(value) else []
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


def _are_groups(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(group, Mapping) for group in value)


def _put_groups(
    objects: dict[str, JSON], key: str, groups: Sequence[Mapping[str, Any]], name_of: Callable[[Any], str]
) -> None:
    if not groups:
        return
    trees = []
    for index, group in enumerate(groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        params = [name_of(name) for name in group.get("params", ())]
        trees.append({**encode(settings, f"{key}.param_groups.{index}", {}), "params": params})
    objects[key] = {"param_groups": trees, "values": {}, "shared": {}}


def _by_position(groups: Sequence[Mapping[str, Any]], key: str, state: TrainState) -> dict[Any, str]:
    """Return the live name of each number, where the saved groups number their parameters and are as long as the live
    ones; else nothing."""
    params = [list(group.get("params", ())) for group in groups]
    numbers = [number for listed in params for number in listed]
    if not numbers or any(isinstance(number, str) for number in numbers):
        return {}
    names = parameter_names(state)
    live = next(opt for name, opt in state.parts("optimizer").items() if section("optimizer", name) == key)
    listed = [[names[id(p)] for p in group["params"] if id(p) in names] for group in live.param_groups]
    if [len(group) for group in listed] != [len(group) for group in params]:
        return {}
    return dict(zip(numbers, (fqn for group in listed for fqn in group), strict=True))
