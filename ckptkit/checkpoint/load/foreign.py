"""Adapts another system's checkpoint to the names, sections and objects that a load expects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, Role, TensorEntry, TensorSlice
from ckptkit.checkpoint.foreign_objects import ForeignObjects, own_name
from ckptkit.checkpoint.load.plan import compare_keys
from ckptkit.checkpoint.state.model_tensors import live_tensors, parameter_names
from ckptkit.checkpoint.state.train_state import TrainState, is_stateful, own_merge, section
from ckptkit.checkpoint.state.values import JSON
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.class_records import in_parts, renamed_recipes
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.models import number_of, prefix_of_optimizer, with_trained_weights
from ckptkit.formats.pickles.objects import TensorValue
from ckptkit.formats.trainers.beside import with_files_beside
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.training_state import (
    SavedOptimizer,
    SavedState,
    TrainingState,
    full_shape,
    in_natural_order,
    is_usual_scheduler,
    possible_fqns,
    read_training_state,
    without_kind,
)
from ckptkit.keymaps.wrappers import without_infixes
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    import torch

_OF_RANKS = ("rank-files", "verl", "lightrft", "accelerate", "deepspeed")  # formats with one file per rank
_SAMPLES, _CANDIDATES = 8, 32
_DIGITS = re.compile(r"\d+")
_PEFT_ROOT, _ORIGINAL = "base_model.model.", ".original_module."
# PEFT's files, or the base model's, omit these parts of a PEFT model's names.
_ADAPTER = re.compile(
    r"(?<=\.)modules_to_save\.[^.]+\."
    r"|(?<=\.)original_module\."
    r"|(?<=\.)base_layer\."
    r"|(?<=\.lora_magnitude_vector)\.[^.]+\.weight$"
    r"|(?:(?<=\.lora_[AB])|(?<=\.lora_embedding_[AB]))\.(?!(?:weight|bias)$)[^.]+"
)


Aliases = Mapping[str, Mapping[str, str]]
"""Maps the name of a model's tensor to the name under which the checkpoint has it, by section ("model")."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """Holds another system's checkpoint in the form that a load expects; see `adopt`."""

    catalog: Catalog  # the tensors, under ckptkit's names and with the live models' FQNs
    objects: dict[str, JSON] = field(default_factory=dict)  # JSON by key, as in `objects.json`
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors that the objects refer to
    notes: list[str] = field(default_factory=list)  # what was adapted, and what could not be read
    random: list[str] = field(default_factory=list)  # names of random states of unknown form


def adopt(catalog: Catalog, store: Store, state: TrainState, *, optimizer: bool = True) -> Adopted:
    """Adapt another system's checkpoint to `state`. Does not communicate.

    Reads only objects and the tensors inside them.

    FQNs in the checkpoint and in the models may differ by a prefix (a LightningModule's attribute, a wrapper). The
    prefix that makes the most names match is added or removed. PEFT's files omit the adapter's name; it is inserted.
    Optimizers are matched by name or order. Finds settings, schedulers and random states in the places where Lightning,
    transformers, accelerate, verl, LightRFT, DeepSpeed, torchtitan and scripts store them. All other objects become
    `extra` state.
    """
    trained = with_trained_weights(catalog)
    complete = with_files_beside(trained, store)
    said = [*_notes_on_ranks(catalog), *(note for note in complete.info.notes if note not in catalog.info.notes)]
    catalog = in_parts(store, complete, optimizer=optimizer)
    rename, aliases, notes = aligned(catalog, state)
    notes += said
    tied = _tied(state)
    flattened = {name: f"extra.{name}" for name, item in state.extra.items() if is_stateful(item)}
    for name, item in state.parts("dataloader").items():
        if own_merge(item):  # without a merge, it would be unknown which rank's state this is
            flattened[section("dataloader", name)] = f"{section('dataloader', name)}.0"

    def read(entries: Sequence[TensorEntry]) -> Mapping[str, torch.Tensor]:
        from ckptkit.formats.dcp.fill import read_whole

        return read_whole(catalog, store, [entry.name for entry in entries])

    saved = read_training_state(store, catalog, tensor=_as_torch, read=read, optimizers=optimizer, whole=flattened)
    sections = _sections(saved.optimizers, list(state.parts("optimizer")), store.url) if optimizer else {}
    weights = {rename(entry.fqn) for entry in catalog.by_role(Role.MODEL).values()}
    numbers = {
        prefix: _numbered_parameters(saved.optimizers[prefix], key, state, rename, weights, notes)
        for prefix, key in sections.items()
    }
    tensors = _renamed(catalog, saved, rename, sections, tied, numbers)
    refs: dict[str, torch.Tensor] = {}
    objects = ForeignObjects(refs)
    homes = {id(entry.slices): name for name, entry in tensors.items()}
    if recipes := renamed_recipes(catalog, lambda entry: homes.get(id(entry.slices))):
        objects.trees[SUBCLASSES] = recipes
    known = {entry.fqn for entry in tensors.values() if entry.fqn}
    names = _LiveNames(rename, known, str(catalog.info.extra.get("module_prefix", "")), tied)
    for prefix, key in sections.items():
        named = replace(names, numbers=numbers[prefix], front=prefix_of_optimizer(prefix))
        one = _with_steps(saved.optimizers[prefix], _live(state, key), named)
        objects.add_optimizer(prefix, key, one, named, str)
    used = _add_schedulers(objects, saved, state, notes)
    for rank, random in saved.random.items():
        objects.add(random.name, f"rng.{rank}", random.generators)
    objects.add_extras(saved.rest(used), flattened, saved.unread)
    if saved.tensors:
        notes.append(
            f"not restored: {counted(len(saved.tensors), 'tensor')} (neither weights nor optimizer state): "
            f"{first_few([entry.name for entry in saved.tensors], 3)}."
        )
    notes += [f"not restored: {name}: {why}" for name, why in (*objects.lost, *saved.unread.items())]
    if doubt := catalog.info.extra.get("unproved"):
        notes.append(f"not proved: {doubt}")
    if saved.step is None and sections:
        notes.append("the checkpoint records no step; TrainState.step is unchanged, set it yourself.")
    info = with_aliases(replace(catalog.info, step=saved.step), aliases)
    return Adopted(
        Catalog(tensors, catalog.objects, info),
        objects.trees,
        refs,
        notes,
        saved.unknown_random,
    )


def _notes_on_ranks(catalog: Catalog) -> list[str]:
    """Return the reader's notes about rank files: what was not read, or differs between ranks.

    The notes of other readers also name files that `with_files_beside` reads.
    """
    notes = catalog.info.notes if catalog.info.format in _OF_RANKS else ()
    return [note.replace("not read: ", "not restored: ", 1) for note in notes]


def _add_schedulers(objects: ForeignObjects, saved: TrainingState, state: TrainState, notes: list[str]) -> list[str]:
    """Add the saved schedulers and gradient scalers that match live ones. Return the keys of those that were added.

    Adds a note for each one that is not restored. The caller adds the state of each of these to `extra`.
    """
    used: list[str] = []
    for kind, found in (("scheduler", saved.schedulers), ("grad_scaler", saved.scalers)):
        for name, live in _matched(found, list(state.parts(kind)), notes).items():
            if any(part.startswith(f"{name}.") for part in saved.unread):
                notes.append(f"not restored: {name}, because a part of it could not be read.")
                continue
            unlike, fits = compare_keys(state.parts(kind)[live], found[name])
            if not fits:
                notes.append(f"not restored: {name}, because {unlike}.")
                continue
            if objects.add(name, section(kind, live), found[name]):
                used.append(name)
    return used


def _as_torch(array: np.ndarray[Any, Any] | TensorValue) -> torch.Tensor:
    import torch

    if not isinstance(array, TensorValue):
        return torch.from_numpy(array)
    dtype = getattr(torch, array.dtype)
    flat = torch.frombuffer(bytearray(array.data), dtype=dtype) if array.data else torch.empty(0, dtype=dtype)
    return flat.reshape(array.shape)


# --- names


def aligned(catalog: Catalog, state: TrainState) -> tuple[Callable[[str], str], Aliases, list[str]]:
    """Return three values about the FQNs in the checkpoint and in the live models:

    - a function that maps the former to the latter;
    - live tensors that the checkpoint stores only under another name: see `_adapter_names`;
    - notes for the report.
    """
    own = live_tensors(state).keys()
    saved = {entry.fqn for entry in catalog.by_role(Role.MODEL).values()}
    adapted, copies = _adapter_names(own, is_adapter=any(_PEFT_ROOT in fqn for fqn in saved))
    rename, notes = _renaming(saved, own | adapted.keys(), adapted, [*state.parts("model")])
    filled = {rename(fqn) for fqn in saved} if copies else set()
    heads = [(section("model", name), f"{name}." if name else "") for name in state.parts("model")]
    aliases = {
        key: {
            fqn.removeprefix(head): holder.removeprefix(head)
            for fqn, holder in copies.items() if fqn.startswith(head) and fqn not in filled
        }
        for key, head in heads
    }  # fmt: skip
    return rename, aliases, notes


def _renaming(
    saved: Set[str], live: Set[str], adapted: Mapping[str, str], models: Sequence[str]
) -> tuple[Callable[[str], str], list[str]]:
    """Return the function and the notes of `aligned`. `adapted`: the names in PEFT's files; see `_adapter_names`."""
    if saved <= live:
        return lambda fqn: adapted.get(fqn, fqn), []
    shorter = {without_infixes(fqn) for fqn in saved}  # live names lack "_orig_mod." and similar components, too
    unwrapped: Callable[[str], str] = without_infixes if len(shorter) == len(saved) else str
    saved = {unwrapped(fqn) for fqn in saved}
    best, hits = ("", ""), len(saved & live)  # best: (removed prefix, added prefix)
    votes: Counter[tuple[str, str]] = Counter()  # how many samples each candidate fits
    for fqn in _samples(saved):
        votes.update(("", name[: -len(fqn)]) for name in live if name.endswith(f".{fqn}"))
    for fqn in _samples(live):
        votes.update((name[: -len(fqn)], "") for name in saved if name.endswith(f".{fqn}"))
    # In the same order on every rank. A short name, such as "weight", may be the end of every other name.
    for drop, add in sorted(sorted(votes, key=lambda pair: (-votes[pair], pair))[:_CANDIDATES]):
        fit = sum(1 for fqn in saved if fqn.startswith(drop) and add + fqn[len(drop) :] in live)
        if fit > hits:
            best, hits = (drop, add), fit
    in_order = _in_order(models)
    if sum(1 for fqn in saved if in_order(fqn) in live) > hits:
        return lambda fqn: in_order(unwrapped(fqn)), [
            "models: the checkpoint numbers them; they were matched by order."
        ]
    drop, add = best

    def rename(fqn: str) -> str:
        fqn = unwrapped(fqn)
        fqn = add + fqn[len(drop) :] if fqn.startswith(drop) else fqn
        return adapted.get(fqn, fqn)

    if not drop and not add:
        return rename, []
    how = f"{drop!r} was removed from" if drop else f"{add!r} was added to"
    return rename, [f"names: the prefix {how} the checkpoint's names, to match the model's."]


def with_aliases(info: CatalogInfo, aliases: Aliases) -> CatalogInfo:
    """Return `info` with `aliases` added to the table of tied weights."""
    if not any(aliases.values()):
        return info
    known = info.extra.get("aliases", {})
    both = {key: {**known.get(key, {}), **table} for key, table in aliases.items()}
    return replace(info, extra={**info.extra, "aliases": {**known, **both}})


def _samples(names: Collection[str]) -> list[str]:
    """Return some of the names. No two of them differ only in numbers, such as those of layers or experts."""
    # Long names first. A short name is more likely to be the suffix of an unrelated name.
    kinds: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (-len(name), name)):
        kinds.setdefault(_DIGITS.sub("0", name), name)
        if len(kinds) == _SAMPLES:
            break
    return list(kinds.values())


def _in_order(models: Sequence[str]) -> Callable[[str], str]:
    """Return a function that renames saved FQNs of several models to FQNs of the live models.

    For example, "model_1.layer.weight" (as accelerate stores it) gets the name of the second of `models` as its prefix.
    An FQN without a number gets the name of the first.
    """

    def rename(fqn: str) -> str:
        index, rest = number_of(fqn)
        return f"{models[index]}.{rest}" if index < len(models) else fqn

    return rename


def _adapter_names(live: Collection[str], *, is_adapter: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Map the names in an adapter's files, or in the base model's files, to the names in a live PEFT model.

    Omits names that fit several adapters. A live PEFT model contains each module of `modules_to_save` several times: as
    `original_module`, and as a copy for each adapter. An adapter's files contain only this adapter's copy. The base
    model's files contain the module once, and fill `original_module` and all copies, as in PEFT. For this case, the
    second result maps the names in the copies to the names in `original_module`.

    Args:
        is_adapter: Whether the checkpoint contains an adapter rather than the base model.
    """
    found: dict[str, list[str]] = {}
    for fqn in live:
        stored = _ADAPTER.sub("", fqn)
        if stored != fqn and stored not in live and not (is_adapter and _ORIGINAL in fqn):
            found.setdefault(stored, []).append(fqn)
    names: dict[str, str] = {}
    copies: dict[str, str] = {}
    for stored, fqns in found.items():
        chosen = next((fqn for fqn in fqns if _ORIGINAL in fqn), fqns[0] if len(fqns) == 1 else None)
        if chosen is not None:
            names[stored] = chosen
            copies.update((fqn, chosen) for fqn in fqns if fqn != chosen)
    return names, copies


@dataclass(frozen=True, slots=True)
class _LiveNames:
    """Maps the parameter names in saved param groups to live FQNs. The saved names may include prefixes of wrappers."""

    rename: Callable[[str], str]
    known: set[str]
    prefix: str
    tied: Mapping[str, str]
    numbers: Mapping[str, str] = field(default_factory=dict)
    front: str = ""  # the prefix that the optimizer's parameters may have in the checkpoint

    def __call__(self, name: Any) -> str:
        fqn = self.numbers.get(str(name))
        if not fqn:
            options = [*map(self.rename, possible_fqns(str(name), self.front, self.prefix))]
            fqn = next((option for option in options if option in self.known), options[-1])
        return self.tied.get(fqn, fqn)


def _tied(state: TrainState) -> dict[str, str]:
    """Map every name of a tied parameter to the name under which this job stores the parameter's optimizer state."""
    names = parameter_names(state)
    holders = {fqn: names.get(id(tensor), fqn) for fqn, tensor in live_tensors(state).items()}
    return {fqn: holder for fqn, holder in holders.items() if holder != fqn}


# --- sections


def _sections(saved: Mapping[str, SavedOptimizer], live: Sequence[str], url: str) -> dict[str, str]:
    """Map each saved optimizer to a live optimizer, by name or by order.

    The result maps the prefix of the saved optimizer's names, such as "optimizers.gen", to the live optimizer's key.
    """
    owners = list(saved)
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
    numbered = any(not part.fqn or part.fqn.isdigit() for one in saved.values() for part in one.tensors)
    if len(owners) > 1 and numbered and not _are_in_order(owners):
        raise CheckpointMismatchError(
            f"{url} contains the optimizers {', '.join(owners)}, and numbers their parameters. Give the training "
            f'state\'s optimizers ({", ".join(live)}) the same names, or skip them: optimizer="skip".'
        )
    return {owner: section("optimizer", name) for owner, name in zip(owners, live, strict=True)}


def _matched(saved: Collection[str], live: Sequence[str], notes: list[str]) -> dict[str, str]:
    """Map the keys of saved schedulers or scalers to the names of the live objects.

    If there are more saved objects than live objects, saved objects are ignored unless their keys look like a
    scheduler's, such as "lr_scheduler_0". If the numbers of saved and live objects still differ, returns {}.

    Objects are matched by name. If no names match, they are matched by order, provided that there is only one object,
    or that the checkpoint only numbers the objects. In any other case, adds a note that the objects are not restored.
    """
    every = saved
    if len(saved) > len(live):
        saved = list(filter(is_usual_scheduler, saved))
    if len(live) != len(saved):
        if every and live:
            notes.append(f"not restored: {', '.join(every)}, because the training state has {len(live)} of this kind.")
        return {}
    named = _by_name(list(saved), live)
    if not named and (len(live) == 1 or _are_in_order(saved)):
        named = dict(zip(in_natural_order(saved), live, strict=True))
    if saved and not named:
        notes.append(f"not restored: {', '.join(saved)}, because their names do not match {', '.join(live)}.")
    return named


def _by_name(saved: Sequence[str], live: Sequence[str]) -> dict[str, str]:
    """Map each saved object's key to the live object whose name is in the key.

    For example, "gen" is in "optimizers.gen" and in "gen_optim". Returns {} unless there is exactly one live object for
    each key.
    """
    words = {key: {*key.split("."), *map(without_kind, key.split("."))} for key in saved}
    named = {key: [name for name in live if name in words[key]] for key in saved}
    found = {key: names[0] for key, names in named.items() if len(names) == 1}
    return found if sorted(found.values()) == sorted(live) and len(found) == len(saved) else {}


def _are_in_order(keys: Iterable[str]) -> bool:
    """Return whether the keys of saved objects have numbers instead of names, such as "optimizers.0"."""
    ends = [without_kind(key.rpartition(".")[2]) for key in keys]
    return all(end == "" or end.isdigit() for end in ends)


def _renamed(
    catalog: Catalog,
    saved: TrainingState,
    rename: Callable[[str], str],
    sections: Mapping[str, str],
    tied: Mapping[str, str],
    numbers: Mapping[str, Mapping[str, str]],
) -> dict[str, TensorEntry]:
    """Return the checkpoint's tensors under ckptkit's names. Omits states of optimizers that have no live match."""
    found: dict[str, TensorEntry] = {}
    for entry in catalog.by_role(Role.MODEL).values():
        fqn = rename(entry.fqn)
        if (other := found.get(f"model.{fqn}")) is not None and not _same_bytes(entry, other):
            raise CheckpointMismatchError(
                f"{entry.fqn!r} and another tensor of the checkpoint would both be loaded into {fqn!r}. Choose one "
                "with key_map=."
            )
        found[f"model.{fqn}"] = replace(entry, name=f"model.{fqn}", fqn=fqn)
    for prefix, one in saved.optimizers.items():
        for part in one.tensors:
            is_master = part.entry.role is Role.MASTER
            fqn = numbers.get(prefix, {}).get(part.param) or (rename(part.fqn) if part.fqn else "")
            fqn = tied.get(fqn, fqn)
            key = sections.get(prefix, "optimizer" if is_master else None)  # a master may fill a weight
            if key is None or not fqn:
                continue
            name = own_name(part, key, fqn)
            found[name] = replace(part.entry, name=name, fqn="" if part.is_nested else fqn, state=part.state)
    found.update({f"other.{entry.name}": replace(entry, name=f"other.{entry.name}") for entry in saved.tensors})
    return found


# --- optimizer settings


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two entries refer to the same bytes of a file, or to bytes with equal digests.

    This is the case if two attributes of the saved model hold the same module.
    """

    def content(part: TensorSlice) -> tuple[Any, ...]:
        of, place = part.digest, (part.path, part.start)
        what = place if of is None else (of.algorithm, of.value, of.nbytes, part.start - of.start)
        return part.box, part.nbytes, part.strides, part.codec, what

    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and [content(part) for part in one.slices] == [content(part) for part in other.slices]


def _live(state: TrainState, key: str) -> Any:
    return next(item for name, item in state.parts("optimizer").items() if section("optimizer", name) == key)


def _with_steps(saved: SavedOptimizer, live: Any, name_of: Callable[[Any], str]) -> SavedOptimizer:
    """Return the saved optimizer. If `live` is one of torch's optimizers, convert step counts from numbers to tensors.

    The `load_state_dict` of torch's optimizers does the same. For other optimizers, step counts stay numbers.

    Raises:
        CheckpointMismatchError: Lists or dicts in the state contain tensors, and the live parameters are sharded.
    """
    from torch.distributed.tensor import DTensor

    nested = [part for part in saved.tensors if part.is_nested]
    if nested and any(isinstance(p, DTensor) for group in live.param_groups for p in group["params"]):
        raise CheckpointMismatchError(
            f"the optimizer's state {nested[0].path[0]!r} of {name_of(nested[0].param)} is a list or dict of tensors, "
            'which cannot be restored for sharded parameters. Skip the optimizer: optimizer="skip".'
        )
    homes = {kind.__module__ for kind in type(getattr(live, "optimizer", live)).__mro__} - {"torch.optim.optimizer"}
    if not any(home.startswith("torch.optim.") for home in homes):
        return saved

    def converted(part: SavedState[ObjectEntry]) -> SavedState[ObjectEntry]:
        is_step = part.path == ("step",) and type(part.value) in (int, float)
        return replace(part, value=TensorValue("float32", (), np.float32(part.value).tobytes())) if is_step else part

    return replace(saved, values=[*map(converted, saved.values)])


def _numbered_parameters(
    saved: SavedOptimizer,
    key: str,
    state: TrainState,
    rename: Callable[[str], str],
    weights: set[str],
    notes: list[str],
) -> dict[str, str]:
    """Map each numbered parameter to its live FQN. Return {} if the saved groups contain names.

    torch may save names beside the numbers. These names are used if all of them are names of weights and the live
    optimizer has at least one of them. Names from `model.head.named_parameters()` are not names of weights, because
    they lack the prefix "head.". If names are not used, adds a note that the parameters were matched by order.

    Args:
        weights: The names of the saved weights, as `rename` returns them.
    """
    names, numbers = parameter_names(state), {str(number) for group in saved.groups for number in group["params"]}
    live = {names.get(id(p), "") for group in _live(state, key).param_groups for p in group["params"]}
    tied = _tied(state)
    found = {number: rename(without_infixes(name)) for number, name in saved.names.items()}
    are_weights = weights | live >= {*found.values()}
    found = {number: tied.get(fqn, fqn) for number, fqn in found.items()}
    if saved.is_numbered and found.keys() == numbers and are_weights and live & {*found.values()}:
        return found
    found = _by_position(saved, key, state)
    if found:
        notes.append(f"{key}: the checkpoint numbers its parameters; they were matched by order.")
    return found


def _by_position(saved: SavedOptimizer, key: str, state: TrainState) -> dict[str, str]:
    """Map each numbered parameter to its live FQN. Return {} if the saved groups contain names.

    If the saved and the live groups have the same lengths and the shapes match, parameters are matched by order. This
    assumes that the saving job created its optimizer with the same code. If lengths or shapes differ, the saved
    parameters are matched to the model's parameters by shape and order, provided that only one assignment is possible.

    The numbers in the result are strings, because DCP stores dict keys as strings.
    """
    if not saved.is_numbered:
        return {}
    params = [[str(number) for number in group["params"]] for group in saved.groups]
    numbers = [number for listed in params for number in listed]
    names, shapes = parameter_names(state), saved.shapes()
    live = _live(state, key)
    listed = [[p for p in group["params"] if id(p) in names] for group in live.param_groups]
    flat = [p for group in listed for p in group]
    if [len(group) for group in listed] == [len(group) for group in params] and all(
        _fits(shapes.get(number, ()), tuple(p.shape)) for number, p in zip(numbers, flat, strict=True)
    ):
        return {number: names[id(p)] for number, p in zip(numbers, flat, strict=True)}
    trained = {id(p) for p in flat}
    modules = [p for module in state.parts("model").values() for p in module.parameters() if id(p) in trained]
    found = saved.assigned([Param(names[id(p)], tuple(p.shape)) for p in modules])
    if found is None:
        lengths = [", ".join(str(len(group)) for group in one) for one in (params, listed)]
        raise CheckpointMismatchError(
            f"{key}: the checkpoint numbers its parameters, in groups of {lengths[0]}; the live "
            f"optimizer has groups of {lengths[1]}, and the shapes do not determine which is which. "
            "Create the optimizer with the groups that were saved (transformers' Trainer: with and without decay), "
            'or skip it: optimizer="skip".'
        )
    return found


def _fits(states: Collection[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Return whether optimizer states with the shapes `states` can belong to a parameter with the shape `shape`.

    Returns True in each of these cases:
    - there are no states;
    - at least one state has the parameter's shape;
    - at least one has this shape without one of its last two dimensions, as in transformers' Adafactor;
    - they have the shapes [n, 1] and [1, m] for a parameter of shape [n, m], as in torch's Adafactor.
    """
    whole = (shape, shape[:-1], (*shape[:-2], *shape[-1:]))
    return not states or full_shape(states) == shape or any(found in whole for found in states)
