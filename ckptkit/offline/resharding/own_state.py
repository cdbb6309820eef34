"""Converts a source's tensors and objects to ckptkit's keys, so that a training job can load them.

If another program wrote the source as a DCP checkpoint, and the result is also a DCP checkpoint, the result keeps the
source's keys and pickled objects. A job can then load both checkpoints into the same state, with torch or with ckptkit.
Otherwise tensors are renamed to `model.<fqn>`, `optimizer.state.<fqn>.<name>` and `optimizer.master.<fqn>`. Objects
become trees (nested JSON values) in `objects.json`. Parameter groups name their parameters by FQN. The keys of all
values other than optimizers, schedulers and gradient scalers start with `extra.`. Each object that cannot be converted
is listed with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.foreign_objects import ForeignObjects, own_name
from ckptkit.errors import UnsupportedFormatError, UsageError
from ckptkit.formats.dcp.class_records import recipes_of, renamed_recipes
from ckptkit.formats.dcp.records import frame_object
from ckptkit.formats.dcp.roles import Path
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.models import prefix_of_optimizer
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.formats.parameter_names import ParameterNames, parameter_names, without_wrappers
from ckptkit.formats.pickles.objects import decode_record, read_object
from ckptkit.formats.pickles.zip import Archive, memory_store
from ckptkit.formats.state_names import PARAM_GROUPS
from ckptkit.formats.training_state import (
    SavedOptimizer,
    TrainingState,
    possible_fqns,
    read_training_state,
    without_kind,
)
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.units import counted

if TYPE_CHECKING:
    from ckptkit.storage.store import Store


# --- another program's objects as trees for `objects.json`: settings by parameter name, schedulers


_MAX_TREE_BYTES = 2 << 20  # as JSON, which is larger than the tensors in it
_MAX_STEP = 2**63  # maximum step count, because a hostile checkpoint may contain integers too large for a float
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9_-]*")  # the name of one of several objects; not a number
_UNKNOWN = (
    "the optimizer numbers its parameters, and their shapes do not prove which is which. A job can load the source "
    "instead, because its optimizer shows the order"
)


def _add_trees(
    found: OwnState, catalog: Catalog, saved: TrainingState, sections: Mapping[str, str], names: ParameterNames
) -> None:
    """Convert the objects of a source that ckptkit did not write, and add them to `found.trees`."""
    objects = ForeignObjects(max_bytes=_MAX_TREE_BYTES)
    known = {entry.fqn for entry in catalog.tensors.values() if entry.fqn}
    module = str(catalog.info.extra.get("module_prefix", ""))
    for prefix, section in sections.items():
        one, front, named = saved.optimizers[prefix], prefix_of_optimizer(prefix), names[prefix]

        def fqn_of(param: Any, front: str = front, named: Mapping[str, str] = named) -> str | None:
            """Return the FQN of a saved name or number, or None if the model has no such parameter."""
            name = named.get(str(param), param)
            options = possible_fqns(name, front, module) if isinstance(name, str) else ()
            return next((fqn for fqn in options if fqn in known), None)

        def why_unknown(param: Any, one: SavedOptimizer = one) -> str:
            return _UNKNOWN if one.is_numbered else f"the model has no parameter {param!r}"

        values = []
        for part in one.values:
            fqn, count = fqn_of(part.param), part.value
            if fqn and part.state == "step" and type(count) in (int, float) and abs(count) < _MAX_STEP:
                found.steps[section, fqn] = float(count)  # becomes a tensor later
            else:
                values.append(part)
        objects.add_optimizer(prefix, section, replace(one, values=values), fqn_of, why_unknown)
        _add_missing_notes(found, objects.trees, one, section, {*named.values()})
    for random in saved.random.values():
        found.leftovers.append((random.name, "random states belong to the old ranks; the new ranks are reseeded"))
    if saved.large:
        found.notes.append(
            f"{', '.join(saved.large)}: neither weights nor optimizer state; a job does not load these tensors. They "
            "keep their names, so DCPReader reads them"
        )
    used = []
    for kind, states in (("scheduler", saved.schedulers), ("grad_scaler", saved.scalers)):
        for name, section in _sections_of(kind, states).items():
            used.append(name)
            if objects.add(name, section, states[name]) and kind == "scheduler":
                found.notes.append(f"{name} is the state of a torch scheduler: the job's scheduler loads it")
    objects.add_extras(saved.rest(used), {}, {})
    found.trees |= objects.trees
    found.leftovers += [(name, f"it can't be read: {why[:160]}") for name, why in saved.unread.items()]
    found.leftovers += objects.lost


def _sections_of(kind: str, keys: Collection[str]) -> dict[str, str]:
    """Return ckptkit's name for each saved object of one kind, such as "scheduler", by the object's key.

    A single object is named after its kind: "scheduler". If there are several objects, a name consists of the kind and
    the last part of the key that says more than the kind. For example, the key "gen_sched" becomes "scheduler_gen", and
    so does "schedulers.gen". Returns {} if a key has no such part, or if two objects would get the same name.
    """
    if len(keys) == 1:
        return dict.fromkeys(keys, kind)
    words = {key: [word for part in key.split(".") if (word := without_kind(part))] for key in keys}
    names = {key: parts[-1] for key, parts in words.items() if parts and _NAME.fullmatch(parts[-1])}
    is_complete = len({*names.values()}) == len(keys)
    return {key: f"{kind}_{name}" for key, name in names.items()} if is_complete else {}


def _add_missing_notes(
    found: OwnState, trees: Mapping[str, Any], saved: SavedOptimizer, section: str, having: Collection[str]
) -> None:
    """Add a note if an optimizer has no settings (lr, betas), or if parameters with state are in no parameter group.

    Args:
        having: The FQNs of the parameters with state.
    """
    if not saved.groups:
        found.notes.append(f"{section}: the source has no settings (lr, betas); the new job's settings stay")
    elif section in trees:
        grouped = {fqn for group in trees[section][PARAM_GROUPS] for fqn in group["params"]}
        if loose := sorted({*having} - grouped):
            found.notes.append(
                f"{section}: {len(loose)} parameters with state are in no group of the source: {loose[0]}, ..."
            )


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """One tensor of the result.

    Attributes:
        tensor: How to make the tensor from source tensors. `tensor.name` is the key in the result.
        source: The tensor's entry in the source's catalog. If the source has no such tensor (for example, it stores a
            step count as a number), an entry without slices.
    """

    tensor: OutputTensor
    source: TensorEntry
    role: Role
    fqn: str
    state: str
    key: Path


@dataclass(slots=True)
class OwnState:
    """The contents of a resharded checkpoint.

    Attributes:
        trees: Contents of `objects.json`. The file is written only if this is not empty.
        steps: Step counts that the source stores as numbers, by (optimizer, FQN).
        records: The objects to copy into the DCP checkpoint, with their bytes.
        leftovers: (name, reason) of each tensor or object that the result omits.
    """

    tensors: list[OwnTensor] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)
    steps: dict[tuple[str, str], float] = field(default_factory=dict)
    records: list[tuple[ObjectEntry, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    leftovers: list[tuple[str, str]] = field(default_factory=list)


def own_state(store: Store, catalog: Catalog, *, step: int, sharded: bool) -> OwnState:
    """Return the contents of a ckptkit checkpoint made from a source. Reads the source's objects, but no tensors.

    Args:
        sharded: Whether the result is a DCP checkpoint.

    Raises:
        UnsupportedFormatError: A tensor can be read only by its Python class.
        UsageError: The source contains several models.
    """
    is_foreign = _is_foreign_dcp(catalog)
    as_it_is = sharded and is_foreign and not recipes_of(catalog)
    carried = catalog.objects.keys() if as_it_is else ()  # copied byte for byte
    opaque = [f"{name} {why}" for name, why in catalog.opaque().items() if name not in carried]
    if opaque:
        listed = "\n  ".join(opaque)
        raise UnsupportedFormatError(
            f"{len(opaque)} tensors cannot be split for a different number of ranks without their classes:\n"
            f"  {listed}\nLoad the checkpoint in a job that imports these classes, and save it there."
        )
    if as_it_is:
        found = OwnState()
        for name, entry in catalog.tensors.items():
            key = entry.key if ".".join(map(str, entry.key)) == name else (name,)
            found.tensors.append(_copy(entry, name, entry.role, entry.fqn, entry.state, key))
        found.records = [(item, _record(store, item)) for item in catalog.objects.values()]
        found.notes.append(
            "keys and values are unchanged: dcp.load reads the result with the same state dict as the source"
        )
        return found
    if catalog.info.format.startswith("ckptkit-") and not is_foreign:
        return _of_ours(store, catalog, sharded=sharded)
    return _of_others(store, catalog, step)


# --- other programs' DCP checkpoints


def _is_foreign_dcp(catalog: Catalog) -> bool:
    """Return whether the source is a DCP checkpoint with another program's keys, even if ckptkit has resharded it.

    The source may consist of several DCP directories, because LightRFT stores the optimizer in a separate directory.
    """
    if catalog.info.format.startswith("ckptkit-"):
        return catalog.info.format == "ckptkit-sharded" and all(
            entry.path.rpartition("/")[2] != OBJECTS_NAME for entry in catalog.objects.values()
        )
    paths = catalog.paths()
    return all(path.endswith(".distcp") for path in paths) and any("/" not in path for path in paths)


def _record(store: Store, item: ObjectEntry) -> bytes:
    """Return the stored bytes of an object, from which torch.load reads the object. Checks the CRCs of the bytes."""
    if item.encoding != "torch_save":
        return frame_object(read_object(store, item))
    if item.codec is not None:
        data = decode_record(store, item.path, item.codec)
    else:
        data = store.read(item.path, item.start, item.start + item.nbytes if item.nbytes else None)
    if data[:2] != b"PK":
        return data
    archive = Archive(memory_store(item.path, data), item.path, file=f"{item.path}: the record of {item.name!r}")
    archive.check()
    return data


# --- ckptkit's checkpoints


def _of_ours(store: Store, catalog: Catalog, *, sharded: bool) -> OwnState:
    found = OwnState()
    for name, entry in catalog.tensors.items():
        found.tensors.append(_copy(entry, name, entry.role, entry.fqn, entry.state, entry.key))
    found.trees = {name: entry.value for name, entry in catalog.objects.items() if entry.encoding == "value"}
    if sharded:
        kept = [entry for entry in catalog.objects.values() if entry.encoding == "torch_save"]
        found.records = [(entry, _record(store, entry)) for entry in kept]
    return found


def _copy(entry: TensorEntry, name: str, role: Role, fqn: str, state: str, key: Path) -> OwnTensor:
    return OwnTensor(Target.of(entry, name), entry, role, fqn, state, key or _key(name, role, fqn, state))


def _key(name: str, role: Role, fqn: str, state: str) -> Path:
    """Return a tensor's path in the nested state dict. A parameter name with its dots is one component of the path."""
    if not fqn or role is Role.OTHER:
        return tuple(name.split("."))
    top = name.partition(".")[0]
    if role is Role.MODEL:
        return top, name[len(top) + 1 :]
    return (top, "master", fqn) if role is Role.MASTER else (top, "state", fqn, state)


# --- other formats


def _of_others(store: Store, catalog: Catalog, step: int) -> OwnState:
    catalog = without_wrappers(catalog)
    found = OwnState()
    saved = read_training_state(store, catalog)
    sections = _sections_of("optimizer", saved.optimizers)
    sections = sections or {prefix: f"optimizer_{i}" for i, prefix in enumerate(saved.optimizers)}
    names = parameter_names(catalog, saved)
    if any(one.is_numbered and not one.names and names[prefix] for prefix, one in saved.optimizers.items()):
        found.notes.append("the optimizer numbers its parameters; they were matched to the model's by order and shape")
    owns = {entry.name: (f"model.{entry.fqn}", entry.fqn, "") for entry in catalog.by_role(Role.MODEL).values()}
    for prefix, one in saved.optimizers.items():
        for part in one.tensors:
            if fqn := names[prefix].get(part.param):
                whole = ("", "") if part.is_nested else (fqn, part.state)
                owns[part.entry.name] = own_name(part, sections[prefix], fqn), *whole
    masters = _weights_are_masters(catalog)
    used: dict[str, str] = {}
    for name, entry in catalog.tensors.items():
        if entry.role is Role.MASTER and entry.fqn in masters:
            found.leftovers.append((name, "it equals the fp32 weight"))
            continue
        own, fqn, state = owns.get(name, (name, "", ""))
        if used.setdefault(own, name) != name:
            raise UsageError(
                f"{used[own]!r} and {name!r} would both become {own!r}: the source contains several models. "
                "Convert one of them at a time."
            )
        key = entry.key if ".".join(map(str, entry.key)) == own else ()
        found.tensors.append(_copy(entry, own, entry.role, fqn, state, key))
    if masters:
        found.notes.append(
            f"{len(masters)} fp32 masters are skipped: the weights are fp32 and equal them. An optimizer with masters "
            "starts from the weights; if the model has a different dtype, load with convert_dtype=True"
        )
    recipes = renamed_recipes(catalog, lambda entry: owns[entry.name][0] if entry.name in owns else entry.name)
    if recipes:
        kind = next(iter(recipes.values()))["class"]
        found.notes.append(
            f"{counted(len(recipes), 'tensor', 'are')} of a tensor subclass ({kind}) and stored in parts, as ckptkit "
            "saves them: load them with CheckpointManager or DCPReader"
        )
    _add_trees(found, catalog, saved, sections, names)
    found.trees["step"] = step
    if recipes:
        found.trees[SUBCLASSES] = recipes
    for (section, fqn), count in found.steps.items():  # as tensors, which torch's optimizers expect
        name = f"{section}.state.{fqn}.step"
        if name in used:
            continue
        tensor = ComputedTensor(name, "float32", (), (), partial(_constant, count), f"step {count:g}")
        empty = np.zeros(0, np.int64)
        nothing = SliceArray([], empty.astype(np.int32), empty, empty, empty.reshape(0, 0), empty.reshape(0, 0))
        entry = TensorEntry(name, "float32", (), nothing, Role.OPTIMIZER, fqn, "step")
        key = (section, "state", fqn, "step")
        found.tensors.append(OwnTensor(tensor, entry, Role.OPTIMIZER, fqn, "step", key))
    return found


def _weights_are_masters(catalog: Catalog) -> set[str]:
    """Return the FQNs whose weight and master weight are the same bytes in the same file, as DeepSpeed stores them."""
    weights = catalog.by_role(Role.MODEL)
    found = set()
    for fqn, master in catalog.by_role(Role.MASTER).items():
        weight = weights.get(fqn)
        if weight is not None and (weight.dtype, weight.shape) == (master.dtype, master.shape):
            a, b = weight.slices, master.slices
            same = len(a) == len(b) and np.array_equal(a.starts, b.starts) and np.array_equal(a.offsets, b.offsets)
            if same and [a.paths[i] for i in a.files.tolist()] == [b.paths[i] for i in b.files.tolist()]:
                found.add(fqn)
    return found


def _constant(value: float, _: Sequence[Any], out: npt.NDArray[np.uint8]) -> int:
    out.view(np.float32)[:] = value
    return 0
