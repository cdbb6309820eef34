"""Converts a source's tensors and objects to ckptkit's keys, so that a training job can load them.

If another program wrote the source as a DCP checkpoint, and the result is also a DCP checkpoint, the result keeps the
source's keys and pickled objects. A job can then load both checkpoints into the same state, with torch or with ckptkit.
Otherwise tensors are renamed to `model.<fqn>`, `optimizer.state.<fqn>.<name>` and `optimizer.master.<fqn>`. Objects
become trees (nested JSON values) in `objects.json`. Parameter groups name their parameters by FQN. The keys of all
values other than optimizers, schedulers and gradient scalers start with `extra.`. Each object that cannot be converted
is listed with the reason.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, CkptkitError, UnsupportedFormatError, UsageError
from ckptkit.formats.dcp.class_records import recipes_of, renamed_recipes
from ckptkit.formats.dcp.records import frame_object
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.models import prefix_of_optimizer
from ckptkit.formats.nested import insert, with_lists
from ckptkit.formats.own.reader import OBJECTS_NAME, role_of
from ckptkit.formats.pickles.objects import TensorValue, decode_record, read_object
from ckptkit.formats.pickles.zip import Archive, memory_store
from ckptkit.formats.sources import read_box
from ckptkit.formats.state_names import PARAM_GROUPS
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.training_state import (
    SavedOptimizer,
    TrainingState,
    extra_keys,
    loadable,
    possible_fqns,
    read_training_state,
    without_kind,
)
from ckptkit.keymaps.wrappers import strip_infixes
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.units import counted

if TYPE_CHECKING:
    from ckptkit.storage.store import Store


# --- another program's objects as trees for `objects.json`: settings by parameter name, schedulers


_MAX_TREE_BYTES = 2 << 20  # as JSON, which is larger than the tensors in it
_MAX_STEP = 2**63  # maximum step count, because a hostile checkpoint may contain integers too large for a float
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9_-]*")  # the name of one of several objects; not a number
_Names: TypeAlias = Mapping[str, Mapping[str, str]]  # FQNs by an optimizer's prefix and a parameter's saved name
_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")  # buffers, some with the shape of a weight


@dataclass(frozen=True, slots=True)
class _Reference:
    """A tensor of the result, in a tree."""

    name: str


class _NoTree(UnsupportedFormatError):
    """Raised for a value of a type that `objects.json` cannot represent."""


def _add_trees(
    found: OwnState, catalog: Catalog, saved: TrainingState, sections: Mapping[str, str], names: _Names
) -> None:
    """Convert the objects of a source that ckptkit did not write, and add them to `found.trees`."""
    found.leftovers += [(name, f"it can't be read: {why[:160]}") for name, why in saved.unread.items()]
    known = {entry.fqn for entry in catalog.tensors.values() if entry.fqn}
    module = str(catalog.info.extra.get("module_prefix", ""))
    for prefix, section in sections.items():
        front, named = prefix_of_optimizer(prefix), names[prefix]

        def fqn_of(param: Any, front: str = front, named: Mapping[str, str] = named) -> str | None:
            """Return the FQN of a saved name or number, or None if the model has no such parameter."""
            name = named.get(str(param), param)
            options = possible_fqns(name, front, module) if isinstance(name, str) else ()
            return next((fqn for fqn in options if fqn in known), None)

        _add_optimizer(found, saved.optimizers[prefix], prefix, section, fqn_of)
        _add_missing_notes(found, saved.optimizers[prefix], section, {*names[prefix].values()})
    for random in saved.random.values():
        found.leftovers.append((random.name, "random states belong to the old ranks; the new ranks are reseeded"))
    if saved.large:
        found.notes.append(
            f"{', '.join(saved.large)}: neither weights nor optimizer state; a job does not load these tensors. They "
            "keep their names, so DCPReader reads them"
        )
    trees: dict[str, tuple[str, Any]] = {}
    for kind, states in (("scheduler", saved.schedulers), ("grad_scaler", saved.scalers)):
        trees |= {section: (name, states[name]) for name, section in _sections_of(kind, states).items()}
    rest = saved.rest([name for name, _ in trees.values()])
    extras = extra_keys(rest)
    trees |= {extras[name]: (name, value) for name, value in rest.items()}
    for own, (name, value) in trees.items():
        lost: dict[str, str] = {}
        try:
            is_extra = own == extras.get(name)
            tree = _tree(loadable(value, name, lambda part, _: _tree(part), lost) if is_extra else value)
        except CkptkitError as error:
            found.leftovers.append((name, str(error)))
            continue
        found.leftovers += lost.items()
        if len(json.dumps(tree)) > _MAX_TREE_BYTES:
            found.leftovers.append((name, f"it is larger than {_MAX_TREE_BYTES >> 20} MiB as JSON"))
            continue
        found.trees[own] = tree
        if own.partition("_")[0] == "scheduler":
            found.notes.append(f"{name} is the state of a torch scheduler: the job's scheduler loads it")


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


# --- optimizers


def _add_optimizer(
    found: OwnState,
    saved: SavedOptimizer,
    prefix: str,
    section: str,
    fqn_of: Callable[[Any], str | None],
) -> None:
    """Add an optimizer to `found`: its parameter groups, and its states that are not single tensors."""

    def why_unknown(param: Any) -> str:
        if saved.is_numbered:
            return (
                "the optimizer numbers its parameters, and their shapes do not prove which is which. A job can "
                "load the source instead, because its optimizer shows the order"
            )
        return f"the model has no parameter {param!r}"

    tree: dict[str, Any] = {PARAM_GROUPS: [], "values": {}, "shared": {}}
    states: dict[str, dict[Any, Any]] = {}
    for part in saved.values:
        fqn, value = fqn_of(part.param), part.value
        try:
            if fqn is None:
                raise _NoTree(why_unknown(part.param))
            if part.state == "step" and type(value) in (int, float) and abs(value) < _MAX_STEP:
                found.steps[section, fqn] = float(value)  # becomes a tensor later
            else:
                _tree(value)  # raises _NoTree
                insert(states.setdefault(fqn, {}), part.path, value)
        except _NoTree as error:
            found.leftovers.append((part.entry.name, str(error)))
    for fqn, path, name in found.items.get(section, ()):
        insert(states.setdefault(fqn, {}), path, _Reference(name))
    tree["values"] = {fqn: _tree(with_lists(state)) for fqn, state in states.items()}
    unknown = [param for group in saved.groups for param in group["params"] if fqn_of(param) is None]
    if unknown:
        found.leftovers.append((f"{prefix}.{PARAM_GROUPS}", why_unknown(unknown[0])))
    for index, group in enumerate(saved.groups if not unknown else ()):
        made: dict[str, Any] = {}
        for setting, value in group.items():
            try:
                made[setting] = [] if setting == "params" else _tree(value)
            except _NoTree as error:
                found.leftovers.append((f"{prefix}.{PARAM_GROUPS}.{index}.{setting}", str(error)))
        alike = (other for other in tree[PARAM_GROUPS] if {**other, "params": []} == made)
        into = next(alike, None) if saved.is_flattened else None  # a flattened state has a group for each parameter
        if into is None:
            tree[PARAM_GROUPS].append(into := made)
        into["params"] += [fqn_of(param) for param in group["params"]]
    if tree[PARAM_GROUPS]:  # without groups, no job could load the values
        found.trees[section] = tree
    elif tree["values"]:
        found.leftovers.append((f"{prefix}.state", "the settings of its parameters are missing"))


def _add_missing_notes(found: OwnState, saved: SavedOptimizer, section: str, having: Collection[str]) -> None:
    """Add a note if an optimizer has no settings (lr, betas), or if parameters with state are in no parameter group.

    Args:
        having: The FQNs of the parameters with state.
    """
    if not saved.groups:
        found.notes.append(f"{section}: the source has no settings (lr, betas); the new job's settings stay")
    elif section in found.trees:
        grouped = {fqn for group in found.trees[section][PARAM_GROUPS] for fqn in group["params"]}
        if loose := sorted({*having} - grouped):
            found.notes.append(
                f"{section}: {len(loose)} parameters with state are in no group of the source: {loose[0]}, ..."
            )


# --- values as JSON


def _tree(value: Any, depth: int = 0) -> Any:
    """Convert a value from a reader to the JSON form that `checkpoint/state/values.py` defines. Does not need torch."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > 100:
        raise _NoTree("it is nested more than 100 deep")
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _tree(item, depth + 1) for key, item in value.items()}
        return {"$dict": [[_tree(key, depth + 1), _tree(item, depth + 1)] for key, item in value.items()]}
    if kind in (list, tuple, set, frozenset):
        items = [_tree(item, depth + 1) for item in (value if kind in (list, tuple) else sorted(value, key=repr))]
        return items if kind is list else {f"${kind.__name__}": items}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, _Reference):
        return {"$ref": value.name}
    if isinstance(value, TensorValue):
        return _tensor(value.dtype, value.shape, value.data)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"$ndarray": _tensor(value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$npscalar": _tensor(value.dtype.name, (), value.tobytes())}
    raise _NoTree(f"it contains a {getattr(value, 'kind', kind.__name__)}, which cannot be loaded without running code")


def _tensor_value(array: np.ndarray[Any, Any] | TensorValue) -> TensorValue:
    return array if isinstance(array, TensorValue) else TensorValue(array.dtype.name, array.shape, array.tobytes())


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    return {"$tensor": {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}}


Key = tuple[str | int, ...]


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
    key: Key


@dataclass(slots=True)
class OwnState:
    """The contents of a resharded checkpoint.

    Attributes:
        trees: Contents of `objects.json`. The file is written only if this is not empty.
        steps: Step counts that the source stores as numbers, by (optimizer, FQN).
        items: The tensors in lists and dicts of states, by optimizer: (FQN, path in the parameter's state, key).
        records: The objects to copy into the DCP checkpoint, with their bytes.
        leftovers: (name, reason) of each tensor or object that the result omits.
    """

    tensors: list[OwnTensor] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)
    steps: dict[tuple[str, str], float] = field(default_factory=dict)
    items: dict[str, list[tuple[str, Key, str]]] = field(default_factory=dict)
    records: list[tuple[ObjectEntry, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    leftovers: list[tuple[str, str]] = field(default_factory=list)


def own_state(store: Store, catalog: Catalog, *, step: int, sharded: bool) -> OwnState:
    """Return the contents of a ckptkit checkpoint made from a source. Reads the source's objects, but no tensors.

    Args:
        sharded: Whether the result is a DCP checkpoint, which stores tied weights under each of their names. FULL and
            LOCAL checkpoints store tied weights once.
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
        return _of_ours(store, catalog, untie=sharded)
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


def _of_ours(store: Store, catalog: Catalog, *, untie: bool) -> OwnState:
    found = OwnState()
    for name, entry in catalog.tensors.items():
        found.tensors.append(_copy(entry, name, entry.role, entry.fqn, entry.state, entry.key))
    aliases = catalog.info.extra.get("aliases")
    if untie and isinstance(aliases, Mapping):
        for section, table in aliases.items():
            for alias, holder in table.items():
                source = catalog.tensors.get(f"{section}.{holder}")
                name = f"{section}.{alias}"
                if source is not None and name not in catalog.tensors:
                    role, fqn, state = role_of(name)
                    found.tensors.append(_copy(source, name, role, fqn, state, ()))
    found.trees = {name: entry.value for name, entry in catalog.objects.items() if entry.encoding == "value"}
    if untie:
        kept = [entry for entry in catalog.objects.values() if entry.encoding == "torch_save"]
        found.records = [(entry, _record(store, entry)) for entry in kept]
    return found


def _copy(entry: TensorEntry, name: str, role: Role, fqn: str, state: str, key: Key) -> OwnTensor:
    return OwnTensor(Target.of(entry, name), entry, role, fqn, state, key or _key(name, role, fqn, state))


def _key(name: str, role: Role, fqn: str, state: str) -> Key:
    """Return a tensor's path in the nested state dict. A parameter name with its dots is one component of the path."""
    if not fqn or role is Role.OTHER:
        return tuple(name.split("."))
    top = name.partition(".")[0]
    if role is Role.MODEL:
        return top, name[len(top) + 1 :]
    return (top, "master", fqn) if role is Role.MASTER else (top, "state", fqn, state)


# --- other formats


def _of_others(store: Store, catalog: Catalog, step: int) -> OwnState:
    catalog = _without_wrappers(catalog)
    found = OwnState()
    saved = read_training_state(store, catalog, tensor=_tensor_value, read=partial(_read, store))
    sections = _sections_of("optimizer", saved.optimizers)
    sections = sections or {prefix: f"optimizer_{i}" for i, prefix in enumerate(saved.optimizers)}
    names = _parameter_names(found, catalog, saved)
    owns = {entry.name: (f"model.{entry.fqn}", entry.fqn, "") for entry in catalog.by_role(Role.MODEL).values()}
    for prefix, one in saved.optimizers.items():
        for part in one.tensors:
            if part.is_nested and (fqn := names[prefix].get(part.param)):
                own = f"{sections[prefix]}.values.{fqn}.{part.state}"
                owns[part.entry.name] = own, "", ""
                found.items.setdefault(sections[prefix], []).append((fqn, part.path, own))
            elif fqn := names[prefix].get(part.param):
                kind = "master" if part.entry.role is Role.MASTER else "state"
                end = f".{part.state}" if kind == "state" else ""
                owns[part.entry.name] = f"{sections[prefix]}.{kind}.{fqn}{end}", fqn, part.state
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
            "starts from the weights; if the model has another dtype, load with convert_dtype=True"
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


def _without_wrappers(catalog: Catalog) -> Catalog:
    """Return the catalog without the prefixes of wrappers, such as DDP's "module.", because live names lack them.

    Returns the catalog unchanged if two names would become equal.
    """
    try:
        names = strip_infixes(catalog.by_role(Role.MODEL))
    except CheckpointMismatchError:
        return catalog
    tensors = {name: replace(entry, fqn=names.get(entry.fqn, entry.fqn)) for name, entry in catalog.tensors.items()}
    return replace(catalog, tensors=tensors)


def _read(store: Store, entries: Sequence[TensorEntry]) -> dict[str, TensorValue]:
    return {
        entry.name: TensorValue(entry.dtype, entry.shape, bytes(read_box(store, entry, Box.whole(entry.shape))))
        for entry in entries
    }


def _parameter_names(found: OwnState, catalog: Catalog, saved: TrainingState) -> _Names:
    """Return, for each optimizer, a mapping from the saved names or numbers of its parameters to FQNs.

    If parameters are numbered, the FQNs are derived from the order and the shapes of the model's tensors. If order
    and shapes do not determine the FQNs, the mapping is empty.
    """
    params: dict[tuple[str, int, str], Param] = {}  # by their place on disk; of tied weights, only the first counts
    weights = catalog.by_role(Role.MODEL)
    for entry in weights.values():
        if entry.fqn.rpartition(".")[2] not in _BATCH_NORM and len(entry.slices):
            part = entry.slices[0]
            place = (part.path, part.start, entry.fqn if not part.nbytes else "")
            params.setdefault(place, Param(entry.fqn, entry.shape))
    names: dict[str, dict[str, str]] = {}
    for prefix, one in saved.optimizers.items():
        if one.is_numbered and not one.names:
            names[prefix] = one.assigned([*params.values()]) or {}
            if names[prefix]:
                found.notes.append(
                    "the optimizer numbers its parameters; they were matched to the model's by order and shape"
                )
        else:
            named = {n: name if name in weights else strip_infixes([name])[name] for n, name in one.names.items()}
            names[prefix] = {**named, **{part.param: part.fqn for part in one.tensors if part.fqn}}
    return names


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
