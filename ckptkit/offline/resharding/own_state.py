"""Converts a source's tensors and objects to ckptkit's keys, so that a training job can load them.

If the source is another program's DCP checkpoint, and the result is a DCP checkpoint, too, keys and records do not
change. torch and ckptkit can then load both checkpoints into the same state. Otherwise tensors are renamed to
`model.<fqn>`, `optimizer.state.<fqn>.<name>` and `optimizer.master.<fqn>`. Objects become trees in `objects.json`: an
optimizer's parameter groups by FQN, a scheduler, and all other values under `extra.`. Each object that cannot be
converted is listed with the reason.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import CkptkitError, UnsupportedFormatError, UsageError
from ckptkit.formats.dcp.class_records import recipes_of, renamed_recipes
from ckptkit.formats.dcp.records import frame_object
from ckptkit.formats.dcp.roles import setting_place, state_place
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.nested import dicts_with, insert, with_lists
from ckptkit.formats.own.reader import OBJECTS_NAME, role_of
from ckptkit.formats.pickles.objects import TensorValue, decode_record, read_object
from ckptkit.formats.pickles.zip import Archive, memory_store
from ckptkit.formats.sources import read_box
from ckptkit.formats.state_names import PARAM_GROUPS, SCALER_STATE, SCHEDULER_STATE
from ckptkit.formats.trainers.merge import model_of
from ckptkit.formats.trainers.optimizer_files import is_state_dicts, names_by_key
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.keymaps.wrappers import strip_infixes
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.units import counted

if TYPE_CHECKING:
    from ckptkit.storage.store import Store


# --- another program's objects as trees for `objects.json`: settings by parameter name, schedulers


_MAX_TREE_BYTES = 1 << 20
_MAX_STEP = 2**63  # maximum step count, because a hostile checkpoint may contain integers too large for a float
_RANDOM = re.compile(r"(random_states?|rng_states?|rng)(_\d+)?")
_SCHEDULER = re.compile(r"(lr_)?schedulers?(_states?)?(_\d+)?")
_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")  # buffers, some with the shape of a weight


class _NoTree(Exception):
    """The value has a type that `objects.json` cannot represent."""


def _add_trees(
    found: OwnState,
    store: Store,
    catalog: Catalog,
    sections: Mapping[str, str],
    numbers: Mapping[str, Mapping[Any, str]],
) -> None:
    """Add the trees for a source that ckptkit did not write. Reads its objects without running their code.

    Args:
        sections: Maps an optimizer's key prefix (the part before ".state.") to ckptkit's name for the optimizer.
    """
    values: dict[str, tuple[ObjectEntry, Any]] = {}
    for name, entry in catalog.objects.items():
        if name == SUBCLASSES:
            continue
        if entry.role is not Role.OPTIMIZER and _is_random(found, name):
            continue
        try:
            values[name] = (entry, read_object(store, entry, tensor=_tensor_value))
        except CkptkitError as error:
            found.leftovers.append((name, f"it can't be read: {str(error)[:160]}"))
    groups: _Groups = {}
    for name, (entry, value) in list(values.items()):
        if entry.role is not Role.OPTIMIZER:
            continue
        del values[name]
        taken = _take_group(groups, name, entry.key, value)
        taken = taken or _take_state(found, name, entry, value, sections, numbers)
        if not taken and value != {}:  # an optimizer without momentum has an empty state
            found.leftovers.append((name, "torch optimizers have no such entry"))
    for name, tensor in catalog.tensors.items():
        if _is_setting(tensor):
            data = bytes(read_box(store, tensor, Box.whole(tensor.shape)))
            _take_group(groups, name, tensor.key, TensorValue(tensor.dtype, tensor.shape, data))
    _add_groups(found, groups, sections, catalog, numbers)
    _add_rest(found, _nested({**values, **_other_tensors(found, store, catalog)}, catalog))


def _is_random(found: OwnState, name: str) -> bool:
    if not _RANDOM.fullmatch(name.split(".", maxsplit=1)[0]):
        return False
    found.leftovers.append((name, "random states belong to the old ranks; the new ranks are reseeded"))
    return True


# --- optimizers


# Parameter groups' settings: key prefix (before "param_groups") -> group's index or parameter -> settings.
_Groups: TypeAlias = dict[str, dict[str | int, dict[str, Any]]]


def _take_group(found: _Groups, name: str, key: Key, value: Any) -> bool:
    """Store the value if it is a parameter group's setting, and return whether it is.

    The key contains the group's index or, in a flattened state dict, the parameter's name.
    """
    at = name.find(PARAM_GROUPS)
    if at < 0:
        return False
    groups = found.setdefault(name[:at].rstrip("."), {})
    owner, path = setting_place(key or (name,))
    if path:
        insert(groups.setdefault(int(owner) if owner.isdecimal() else owner, {}), path, value)
    elif isinstance(value, (list, tuple)):  # a single object contains all groups
        groups.update(enumerate(dict(group) for group in value if isinstance(group, Mapping)))
    elif owner and isinstance(value, Mapping):
        groups.setdefault(int(owner) if owner.isdecimal() else owner, {}).update(value)
    else:
        return False
    return True


def _is_setting(entry: TensorEntry) -> bool:
    """Return whether a tensor is an optimizer's setting, such as a learning rate."""
    return entry.role is Role.OPTIMIZER and not entry.state and f".{PARAM_GROUPS}" in f".{entry.name}"


def _take_state(
    found: OwnState,
    name: str,
    entry: ObjectEntry,
    value: Any,
    sections: Mapping[str, str],
    numbers: Mapping[str, Mapping[Any, str]],
) -> bool:
    """Store the object if it is optimizer state but not a tensor, and return whether it is.

    A step count becomes a tensor later. Other values are stored unchanged.
    """
    at = name.find(".state.")
    if at < 0:
        return False
    fqn, _, state = name[at + len(".state.") :].rpartition(".")
    place = state_place(entry.key)
    if place is not None:
        if len(place[1]) > 1:
            return False  # a part of a list or a dict
        fqn, state = place[0], str(place[1][0])
        if fqn.isdecimal():
            fqn = numbers.get(name[:at], {}).get(int(fqn), fqn)
    section = sections.get(name[:at], "optimizer")
    if state == "step" and type(value) in (int, float) and abs(value) < _MAX_STEP:
        found.steps[section, fqn] = float(value)
        return True
    try:
        tree = _tree(value)
    except _NoTree:
        return False
    _optimizer(found, section)["values"].setdefault(fqn, {})[state] = tree
    return True


def _optimizer(found: OwnState, section: str) -> dict[str, Any]:
    fresh: dict[str, Any] = {PARAM_GROUPS: [], "values": {}, "shared": {}}
    tree: dict[str, Any] = found.trees.setdefault(section, fresh)
    return tree


def _add_groups(
    found: OwnState,
    groups: _Groups,
    sections: Mapping[str, str],
    catalog: Catalog,
    numbers: Mapping[str, Mapping[Any, str]],
) -> None:
    known = {entry.fqn for entry in catalog.tensors.values() if entry.fqn}
    stated = catalog.info.extra.get("module_prefix")
    module = stated if isinstance(stated, str) else ""

    def fqn_of(name: str, front: str) -> str | None:
        """Return the FQN of a parameter in the catalog. Returns None if there is no such parameter."""
        plain = strip_infixes([name])[name]
        candidates = (front + plain, name, plain, name.removeprefix(module), plain.removeprefix(module))
        return next((candidate for candidate in candidates if candidate in known), None)

    for prefix, by_owner in groups.items():
        section = sections.get(prefix) or ("optimizer" if len(groups) == 1 else prefix.replace(".", "_"))
        listed = _joined({owner: with_lists(group) for owner, group in by_owner.items()})
        front, named = model_of(prefix), numbers.get(prefix, {})
        for group in listed:
            group["params"] = [named.get(p, p) for p in group["params"]]
        unknown = [p for group in listed for p in group["params"] if not isinstance(p, str) or fqn_of(p, front) is None]
        if unknown:
            reason = f"the model has no parameter {unknown[0]!r}"
            if not isinstance(unknown[0], str):
                reason = (
                    "the optimizer numbers its parameters, and their shapes do not prove which is which. A job can "
                    "load the source instead, because its optimizer shows the order"
                )
            found.leftovers.append((f"{prefix}.{PARAM_GROUPS}", reason))
            continue
        tree = _optimizer(found, section)
        for index, group in enumerate(listed):
            made: dict[str, Any] = {}
            for setting, value in group.items():
                try:
                    made[setting] = [fqn_of(p, front) for p in value] if setting == "params" else _tree(value)
                except _NoTree as error:
                    found.leftovers.append((f"{prefix}.{PARAM_GROUPS}.{index}.{setting}", str(error)))
            tree[PARAM_GROUPS].append(made)
    # Parameters may have state but no settings. If no parameter has settings, drop the tree.
    having: dict[str, set[str]] = {}
    for entry in catalog.tensors.values():
        if entry.role is Role.OPTIMIZER and entry.fqn:
            having.setdefault(sections[_prefix(entry.name)], set()).add(entry.fqn)
    for section in dict.fromkeys(sections.values()):
        if not found.trees.get(section, {}).get(PARAM_GROUPS):
            found.trees.pop(section, None)
            found.notes.append(f"{section}: the source has no settings (lr, betas); the new job's settings stay")
            continue
        loose = sorted(
            having.get(section, set())
            - {fqn for group in found.trees[section][PARAM_GROUPS] for fqn in group["params"]}
        )
        if loose:
            found.notes.append(
                f"{section}: {len(loose)} parameters with state are in no group of the source: {loose[0]}, ..."
            )


def _joined(by_owner: Mapping[str | int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups in order. Groups of a single parameter are merged if their settings are equal."""
    groups: list[dict[str, Any]] = []
    for index in sorted(o for o in by_owner if isinstance(o, int)):
        params = by_owner[index].get("params")
        groups.append({**by_owner[index], "params": list(params) if isinstance(params, (list, tuple)) else []})
    merged: dict[str, dict[str, Any]] = {}
    for owner, settings in by_owner.items():
        if isinstance(owner, str):
            mine = {key: value for key, value in settings.items() if key != "params"}
            group = merged.setdefault(repr(sorted(mine.items(), key=repr)), {**mine, "params": []})
            group["params"].append(owner)
    return [*groups, *merged.values()]


# --- other objects


def _other_tensors(found: OwnState, store: Store, catalog: Catalog) -> dict[str, tuple[ObjectEntry | TensorEntry, Any]]:
    """Return the tensors that are neither weights nor optimizer state, with their values.

    The result keeps them as tensors, too. Objects with large tensors, such as a moving average of the weights, are
    only named.
    """
    objects: dict[str, list[TensorEntry]] = {}
    for entry in catalog.by_role(Role.OTHER).values():
        if not _is_random(found, entry.name):
            objects.setdefault(str((entry.key or (entry.name,))[0]), []).append(entry)
    read: dict[str, tuple[ObjectEntry | TensorEntry, Any]] = {}
    large: list[str] = []
    for top, entries in objects.items():
        if sum(entry.nbytes for entry in entries) > _MAX_TREE_BYTES // 2:
            large.append(top)
            continue
        for entry in entries:
            data = bytes(read_box(store, entry, Box.whole(entry.shape)))
            read[entry.name] = entry, TensorValue(entry.dtype, entry.shape, data)
    if large:
        found.notes.append(
            f"{', '.join(large)}: neither weights nor optimizer state; a job does not load these tensors. They keep "
            "their names, so DCPReader reads them"
        )
    return read


def _nested(values: Mapping[str, tuple[ObjectEntry | TensorEntry, Any]], catalog: Catalog) -> dict[str, Any]:
    """Return the nested values that DCP flattened, as in {"lr_scheduler": {"last_epoch": 2}}."""
    nested: dict[Any, Any] = {}
    for name, (entry, value) in values.items():
        path = entry.key or (name,)
        insert(nested, path if ".".join(map(str, path)) == name else tuple(name.split(".")), value)
    return with_lists(nested, catalog.info.extra.get("containers", {}))


def _add_rest(found: OwnState, nested: Mapping[str, Any]) -> None:
    parts = {f"extra.{name.replace('.', '_')}": (name, value) for name, value in nested.items()}
    schedulers: dict[str, Any] = {}
    scalers: dict[str, Any] = {}
    for name, value in nested.items():
        keys = ("last_epoch",) if _SCHEDULER.fullmatch(name) else SCHEDULER_STATE
        schedulers |= dicts_with(keys, value, name)
        scalers |= dicts_with(SCALER_STATE, value, name)
    for section, states in (("scheduler", schedulers), ("grad_scaler", scalers)):
        if len(states) == 1:  # several have names that are unknown here
            ((name, state),) = states.items()
            top = name.removesuffix(".0")
            if nested.get(top) is state or (isinstance(nested.get(top), (list, tuple)) and len(nested[top]) == 1):
                del parts[f"extra.{top.replace('.', '_')}"]
            parts[section] = name, state
    for own, (name, value) in parts.items():
        try:
            tree = _tree(value)
        except _NoTree as error:
            found.leftovers.append((name, str(error)))
            continue
        if len(json.dumps(tree)) > _MAX_TREE_BYTES:
            found.leftovers.append((name, "it is larger than 1 MiB as JSON"))
            continue
        found.trees[own] = tree
        if own == "scheduler":
            found.notes.append(f"{name} is the state of a torch scheduler: the job's scheduler loads it")


# --- values as JSON


def _tree(value: Any, depth: int = 0) -> Any:
    """Convert a value from a reader to the JSON form of `checkpoint/state/values.py`, without torch."""
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
        tensor: The description of how to make the tensor from source tensors. Its name is the key.
        source: The tensor's entry in the source's catalog. For a new tensor, an entry without slices.
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
    """Return the bytes from which torch.load reads an object, after checking their CRCs."""
    if item.encoding != "torch_save":
        return frame_object(read_object(store, item))
    if item.codec is not None:
        data = decode_record(store, item.path, item.codec)
    else:
        data = store.read(item.path, item.start, item.start + item.nbytes if item.nbytes else None)
    if data[:2] != b"PK":
        return data
    archive = Archive(memory_store(item.path, data), item.path, file=f"{item.path}: the record of {item.name!r}")
    for name, member in archive.layout.members.items():
        if member.crc32:
            archive.member(name)
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
    """Return a key's path in the nested state dict, in which parameter names keep their dots."""
    if not fqn or role is Role.OTHER:
        return tuple(name.split("."))
    top = name.partition(".")[0]
    if role is Role.MODEL:
        return top, name[len(top) + 1 :]
    return (top, "master", fqn) if role is Role.MASTER else (top, "state", fqn, state)


# --- other formats


def _of_others(store: Store, catalog: Catalog, step: int) -> OwnState:
    found = OwnState()
    numbers = _numbered(store, catalog)
    if numbers:
        tensors = dict(catalog.tensors)
        for name, entry in catalog.tensors.items():
            if (numbered := _number(entry)) is not None and numbered[0] in numbers:
                tensors[name] = replace(entry, fqn=numbers[numbered[0]].get(numbered[1], ""))
        catalog = Catalog(tensors, catalog.objects, catalog.info)
        found.notes.append("the optimizer numbers its parameters; they were matched to the model's by order and shape")
    sections = _sections(catalog)
    masters = _weights_are_masters(catalog)
    used: dict[str, str] = {}
    for name, entry in catalog.tensors.items():
        if entry.role is Role.MASTER and entry.fqn in masters:
            found.leftovers.append((name, "it equals the fp32 weight"))
            continue
        own = _own_name(entry, sections)
        if used.setdefault(own, name) != name:
            raise UsageError(
                f"{used[own]!r} and {name!r} would both become {own!r}: the source contains several models. "
                "Convert one of them at a time."
            )
        role, fqn, state = role_of(own)
        if own != name or role is not entry.role:
            fqn, state = entry.fqn, entry.state
        key = entry.key if ".".join(map(str, entry.key)) == own else ()
        found.tensors.append(_copy(entry, own, entry.role, fqn if fqn in own else "", state, key))
    if masters:
        found.notes.append(
            f"{len(masters)} fp32 masters are skipped: the weights are fp32 and equal them. An optimizer with masters "
            "starts from the weights; if the model has another dtype, load with convert_dtype=True"
        )
    recipes = renamed_recipes(catalog, lambda entry: _own_name(entry, sections))
    if recipes:
        kind = next(iter(recipes.values()))["class"]
        found.notes.append(
            f"{counted(len(recipes), 'tensor', 'are')} of a tensor subclass ({kind}) and stored in parts, as ckptkit "
            "saves them: load them with CheckpointManager or DCPReader"
        )
    _add_trees(found, store, catalog, sections, numbers)
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


def _number(entry: TensorEntry) -> tuple[str, int] | None:
    """Return the optimizer's key prefix and the parameter's number, for state of a parameter without a name."""
    place = state_place(entry.key) if entry.role is Role.OPTIMIZER and entry.state and not entry.fqn else None
    return (_prefix(entry.name), int(place[0])) if place is not None and place[0].isdecimal() else None


def _numbered(store: Store, catalog: Catalog) -> dict[str, dict[Any, str]]:
    """Return the FQN of each parameter that an optimizer stores by number, by key prefix and number.

    An optimizer is left out if the order and the shapes of the model's tensors do not prove the FQNs.
    """
    shapes: dict[str, dict[Any, set[tuple[int, ...]]]] = {}
    for entry in catalog.tensors.values():
        numbered = _number(entry)
        if numbered is not None and entry.shape not in ((), (1,)):
            shapes.setdefault(numbered[0], {}).setdefault(numbered[1], set()).add(entry.shape)
    params: dict[tuple[str, int, str], Param] = {}  # by their place on disk; of tied weights, only the first counts
    for entry in catalog.by_role(Role.MODEL).values():
        if entry.fqn.rpartition(".")[2] not in _BATCH_NORM and len(entry.slices):
            part = entry.slices[0]
            place = (part.path, part.start, entry.fqn if not part.nbytes else "")
            params.setdefault(place, Param(entry.fqn, entry.shape))
    found = {}
    for prefix, known in shapes.items():
        holder = catalog.objects.get(f"{prefix}.{PARAM_GROUPS}")
        groups: Any = read_object(store, holder) if holder is not None else None
        if not is_state_dicts([{"state": {}, PARAM_GROUPS: groups}]):
            continue
        wanted = [[_only(known.get(number)) for number in group["params"]] for group in groups]
        assigned = assign(list(params.values()), wanted, [group.get("weight_decay") == 0 for group in groups])
        if assigned is not None:
            found[prefix] = names_by_key(groups, assigned)
    return found


def _only(shapes: set[tuple[int, ...]] | None) -> tuple[int, ...] | None:
    """Return the only shape. Returns None without shapes, and a shape that fits no parameter for several shapes."""
    return (next(iter(shapes)) if len(shapes) == 1 else (-1,)) if shapes else None


def _sections(catalog: Catalog) -> dict[str, str]:
    """Return ckptkit's names for the optimizers, by key prefix."""
    prefixes: dict[str, None] = {}
    for entry in catalog.tensors.values():
        if entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.fqn:
            prefixes[_prefix(entry.name)] = None
    if len(prefixes) <= 1:
        return dict.fromkeys(prefixes, "optimizer")
    return {prefix: f"optimizer_{i}" for i, prefix in enumerate(prefixes)}


def _prefix(name: str) -> str:
    """Return the prefix of a key that identifies the optimizer, or "" if the key has no such prefix."""
    cuts = [at for part in (".state.", ".master.", ".param_groups") if (at := name.find(part)) >= 0]
    return name[: min(cuts)] if cuts else ""


def _own_name(entry: TensorEntry, sections: Mapping[str, str]) -> str:
    if entry.role is Role.MODEL:
        return f"model.{entry.fqn}"
    section = sections.get(_prefix(entry.name), "optimizer")
    if entry.role is Role.MASTER:
        return f"{section}.master.{entry.fqn}"
    if entry.role is Role.OPTIMIZER and entry.fqn and entry.state:
        return f"{section}.state.{entry.fqn}.{entry.state}"
    return entry.name


def _weights_are_masters(catalog: Catalog) -> set[str]:
    """Return the FQNs whose weight and master weight are the same bytes in the same file, as in DeepSpeed."""
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
