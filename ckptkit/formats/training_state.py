"""Finds everything except the weights in a training state that another program saved.

Finds optimizers, schedulers, gradient scalers, random states, the step, and all other objects. The roles of the
catalog's entries, and the keys that programs commonly use (see `state_names`), tell which part an entry belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeGuard, TypeVar

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, TensorEntry
from ckptkit.errors import (
    UNREADABLE,
    CheckpointMismatchError,
    CkptkitError,
    MissingExtraError,
    SaveError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.dcp.roles import Path, is_flattened, optimizer_role, setting_place, state_place
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.nested import dicts_with, insert, with_lists
from ckptkit.formats.pickles.objects import TensorValue, read_object
from ckptkit.formats.sources import read_box
from ckptkit.formats.state_names import (
    PARAM_GROUPS,
    RANDOM_KEY,
    RANDOM_WORD,
    SCALER_STATE,
    SCHEDULER_KEY,
    SCHEDULER_STATE,
    STEPS,
)
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.keymaps.wrappers import strip_infixes, without_infixes
from ckptkit.storage.store import Store

MAX_OBJECT_BYTES = 1 << 20  # of the tensors in one object that is neither a model nor an optimizer
_OWNER = re.compile(r"(.*?)\.?(?<![^.])(?:state|master|param_groups)(?:\.|$)")  # group 1: the optimizer's prefix
_KIND = r"(?:opt(?:im(?:izer)?)?|(?:lr_)?sched(?:uler)?|(?:grad_|amp_)?scaler)s?"
_KIND_WORD = re.compile(rf"^{_KIND}_?|_?{_KIND}$")
_BITSANDBYTES = "__bnb_optimizer_quant_state__"  # bitsandbytes' state_dict adds this level to its states
_MAX_STEP = 10**18
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_CUDA_BYTES = 16  # of a CUDA generator's state: the seed and the offset
_MAX_DIGITS = 9  # of a param group's number
# Errors that an undamaged object may cause. All other errors, such as that of a damaged object, make the load fail.
_NOT_LOADABLE = (UnsupportedFormatError, UnsafePickleError, CheckpointMismatchError, MissingExtraError)


MakeTensor: TypeAlias = "Callable[[np.ndarray[Any, Any] | TensorValue], Any]"
ReadTensors: TypeAlias = "Callable[[Sequence[TensorEntry]], Mapping[str, Any]]"

Entry = TypeVar("Entry", TensorEntry, ObjectEntry)


@dataclass(frozen=True, slots=True)
class SavedState(Generic[Entry]):
    """An entry of a parameter's optimizer state, or a parameter's master weight.

    Attributes:
        param: The parameter's name or number, as saved.
        path: The path to the entry in the parameter's state: ("exp_avg",), or ("GG", 0) for the first item of a list.
        fqn: The parameter's FQN, or "" if the checkpoint has only the parameter's number.
        value: The value of an entry that is not a tensor.
    """

    entry: Entry
    param: str
    path: Path
    fqn: str = ""
    value: Any = None

    @property
    def state(self) -> str:
        """The name of the state, such as "exp_avg". The name of a nested state contains dots: "GG.0"."""
        return ".".join(map(str, self.path))

    @property
    def is_nested(self) -> bool:
        """Whether the entry is an item of a list or dict in the parameter's state."""
        return len(self.path) > 1


@dataclass(slots=True)
class SavedOptimizer:
    """A saved optimizer.

    Attributes:
        groups: The param groups in order. `params` holds names or numbers, as saved.
        is_flattened: Whether the settings were saved for each parameter, as torch's `flatten_optimizer_state_dict`
            does. In this case, each parameter has its own group.
        names: The names of numbered parameters, by number. torch saves them since version 2.6, if the optimizer was
            created with names.
        tensors: The states that are tensors, and the master weights.
        values: The states that are not tensors.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    is_flattened: bool = False
    names: dict[str, str] = field(default_factory=dict)
    tensors: list[SavedState[TensorEntry]] = field(default_factory=list)
    values: list[SavedState[ObjectEntry]] = field(default_factory=list)

    @property
    def is_numbered(self) -> bool:
        """Whether the groups list their parameters by number instead of by name."""
        params = [param for group in self.groups for param in group["params"]]
        return bool(params) and not any(isinstance(param, str) for param in params)

    def shapes(self) -> dict[str, set[tuple[int, ...]]]:
        """Return the shapes of each parameter's states. Scalars, such as step counts, are left out."""
        found: dict[str, set[tuple[int, ...]]] = {}
        for part in self.tensors:
            entry = part.entry
            if entry.role is Role.OPTIMIZER and not part.is_nested and entry.shape not in ((), (1,)):
                found.setdefault(part.param, set()).add(tuple(entry.shape))
        return found

    def assigned(self, params: Sequence[Param]) -> dict[str, str] | None:
        """Return the name of each numbered parameter, or None if the order and the shapes do not determine all names.

        The numbers in the result are strings, because DCP stores dict keys as strings.
        """
        shapes = self.shapes()
        numbers = [[str(param) for param in group["params"]] for group in self.groups]
        wanted = [[full_shape(shapes.get(number, ())) for number in group] for group in numbers]
        found = assign(params, wanted, [group.get("weight_decay") == 0 for group in self.groups])
        if found is None:
            return None
        return {n: fqn for ns, fqns in zip(numbers, found, strict=True) for n, fqn in zip(ns, fqns, strict=True)}


def full_shape(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the parameter's shape, given the shapes of its states.

    This is the shape with the most dimensions, because a factored state has fewer dimensions than its parameter. The
    factored states of torch's Adafactor, [n, 1] and [1, m], give [n, m].

    Returns None if there are no shapes. If the states do not determine the shape, returns (-1,), which fits no
    parameter.
    """
    most = max(map(len, shapes), default=0)
    longest = [shape for shape in shapes if len(shape) == most]
    if not longest:
        return None
    sizes = [{size for size in found if size != 1} or {1} for found in zip(*longest, strict=True)]
    return tuple(found.pop() for found in sizes) if all(len(found) == 1 for found in sizes) else (-1,)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random state of a rank: its name in the checkpoint, and its generators in the form that ckptkit saves."""

    name: str
    generators: dict[str, Any]


@dataclass(slots=True)
class TrainingState:
    """The parts of a training state.

    Attributes:
        step: The step, or None if it is not recorded.
        optimizers: The optimizers, by the common prefix of their entries' names.
        schedulers, scalers: The states by key, such as "lr_schedulers.0", in the order in which they were saved.
        random: The random states by rank.
        unknown_random: The names of values that are random states according to their keys, but have an unknown form.
        objects: All other objects by top-level key. Objects that contain schedulers or scalers are included.
        tensors: Tensors that belong to none of the other parts. Their values were not read.
        large: The keys of objects whose tensors were not read because of their size.
        unread: The undamaged entries that could not be read or used: name -> reason.
    """

    step: int | None = None
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    scalers: dict[str, dict[str, Any]] = field(default_factory=dict)
    random: dict[int, RandomState] = field(default_factory=dict)
    unknown_random: list[str] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorEntry] = field(default_factory=list)
    large: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    def optimizer(self, entry: TensorEntry | ObjectEntry) -> SavedOptimizer:
        """Return the optimizer to which an entry belongs. Creates it for the optimizer's first entry."""
        return self.optimizers.setdefault(_owner(entry), SavedOptimizer())

    def rest(self, used: Collection[str]) -> dict[str, Any]:
        """Return the objects that the caller has not restored, or has restored only in part.

        Omits objects that are None. Programs save None in place of an object that they do not have.

        Args:
            used: The keys of the restored schedulers, scalers and objects, such as "lr_schedulers.0".
        """

        def is_used(name: str, value: Any) -> bool:
            items = value.items() if isinstance(value, dict) else [*enumerate(value)] if _is_list(value) else ()
            return name in used or (len(items) > 0 and all(is_used(f"{name}.{key}", item) for key, item in items))

        return {name: value for name, value in self.objects.items() if value is not None and not is_used(name, value)}


def read_training_state(
    store: Store,
    catalog: Catalog,
    *,
    tensor: MakeTensor | None = None,
    read: ReadTensors | None = None,
    optimizers: bool = True,
    whole: Collection[str] = (),
) -> TrainingState:
    """Return the parts of a training state. Reads objects and small tensors, but no tensors of optimizer states.

    Args:
        tensor: Converts a tensor inside an object to the caller's type of tensor. The default is `TensorValue`.
        read: Reads the tensors of the given entries, and returns them by name. By default, they become `TensorValue`s.
        optimizers: Whether to read the settings of the optimizers, and the optimizer states that are not tensors.
        whole: The keys of objects that are read even if they are large.
    """
    tensor, read = tensor or _tensor_value, read or partial(_read_tensors, store)
    found = TrainingState(step=saved_step(store, catalog))
    settings: dict[str, list[tuple[TensorEntry | ObjectEntry, Any]]] = {}
    chosen: dict[str, TensorEntry] = {}  # settings that are tensors
    loose: list[TensorEntry] = []  # tensors of other objects
    for entry in catalog.tensors.values():
        if entry.role is Role.MODEL:
            continue
        if entry.role is Role.OTHER:
            loose.append(entry)
        elif entry.role is Role.MASTER or entry.state:
            found.optimizer(entry).tensors.append(_tensor_state(entry))
        elif _is_setting(entry):
            chosen[entry.name] = entry
        else:
            found.tensors.append(entry)
    values = _read_values(found, store, catalog, tensor, settings=settings if optimizers else None)
    if optimizers and chosen:
        for name, value in read([*chosen.values()]).items():
            settings.setdefault(_owner(chosen[name]), []).append((chosen[name], value))
    for parts in settings.values():
        _add_groups(found.optimizer(parts[0][0]), parts, found.unread)
    found.optimizers = {prefix: found.optimizers[prefix] for prefix in in_natural_order(found.optimizers)}
    _add_objects(found, catalog, values, loose, tensor, read, whole)
    return found


def _tensor_value(array: np.ndarray[Any, Any] | TensorValue) -> TensorValue:
    return array if isinstance(array, TensorValue) else TensorValue(array.dtype.name, array.shape, array.tobytes())


def _read_tensors(store: Store, entries: Sequence[TensorEntry]) -> dict[str, TensorValue]:
    return {
        entry.name: TensorValue(entry.dtype, entry.shape, bytes(read_box(store, entry, Box.whole(entry.shape))))
        for entry in entries
    }


def _read_values(
    found: TrainingState,
    store: Store,
    catalog: Catalog,
    tensor: MakeTensor,
    *,
    settings: dict[str, list[tuple[TensorEntry | ObjectEntry, Any]]] | None,
) -> dict[str, Any]:
    """Return, by name, the values of the objects that belong to no optimizer. Adds optimizer states to `found`.

    Args:
        settings: Receives the settings (param groups) of each optimizer. None: the optimizers are not read.
    """
    values: dict[str, Any] = {}
    for name, entry in catalog.objects.items():
        is_optimizer = entry.role is Role.OPTIMIZER
        if name == SUBCLASSES or (is_optimizer and settings is None):
            continue
        try:
            value = read_object(store, entry, tensor=tensor)
        except _NOT_LOADABLE as error:
            found.unread[name] = str(error)
            continue
        if not is_optimizer:
            values[name] = value
        elif settings is not None and _is_setting(entry):
            settings.setdefault(_owner(entry), []).append((entry, value))
        elif (state := _value_state(entry, value)) is not None:
            found.optimizer(entry).values.append(state)
        elif value != {}:  # an optimizer without momentum has an empty state
            found.unread[name] = "torch optimizers have no such entry"
    return values


def loadable(value: Any, name: str, check: Callable[[Any, str], object], lost: dict[str, str]) -> Any:
    """Return the object without the parts that cannot be loaded without running code.

    Leaves out as little as possible, but only values of dicts. A list with such a part is left out as a whole, because
    the other items must keep their positions.

    Args:
        name: The name of the object.
        check: Raises SaveError or UnsupportedFormatError if the value with this name cannot be loaded.
        lost: Receives the name of each part that is left out, and the reason.

    Raises:
        CkptkitError: The whole object would be left out.
    """
    if _is_list(value):
        return type(value)([loadable(item, f"{name}.{i}", check, lost) for i, item in enumerate(value)])
    if not isinstance(value, dict):
        check(value, name)
        return value
    kept: dict[Any, Any] = {}
    parts: dict[str, str] = {}
    failed: CkptkitError | None = None
    for key, item in value.items():
        try:
            check(key, name)
            kept[key] = loadable(item, f"{name}.{key}", check, parts)
        except (SaveError, *UNREADABLE) as error:
            parts[f"{name}.{key}"], failed = str(error), error
    if failed is not None and not kept:
        raise failed
    lost.update(parts)
    return kept


def extra_keys(names: Iterable[str]) -> dict[str, str]:
    """Return, by name, the keys under which ckptkit stores another program's objects: "extra." and the object's name.

    Replaces characters that a key cannot contain. A name without such characters is never changed.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: bool(_NO_NAME.search(name))):
        key = f"extra.{_NO_NAME.sub('_', name)}"
        while key in taken:  # "lr.best" after "lr_best"
            key += "_"
        taken.add(key)
        found[name] = key
    return found


def without_kind(word: str) -> str:
    """Remove the kind of an object from a part of its key: "gen_optim" and "scheduler_gen" both become "gen"."""
    return _KIND_WORD.sub("", word)


# --- optimizers


def possible_fqns(name: str, front: str, module: str) -> list[str]:
    """Return the FQNs that a parameter may have in the catalog, given its name in an optimizer. Likely ones come first.

    Args:
        front: A prefix that only the catalog's names may have, such as "model_1.".
        module: A prefix that only the optimizer's names may have, such as "model." in a LightningModule.
    """
    clean = without_infixes(name).removeprefix("_forward_module.")
    plain = strip_infixes([name])[name]
    return [front + clean, front + plain, name, clean, clean.removeprefix(module), plain, plain.removeprefix(module)]


def _owner(entry: TensorEntry | ObjectEntry) -> str:
    """Return the prefix that the names of an optimizer's entries have before "state", "master" or "param_groups".

    If several of these words are in the key, the last one counts. For example, the entry
    ("state", "optimizers", "AdamW", "state", fqn, "exp_avg") has the prefix "state.optimizers.AdamW".
    """
    ends = [i for i, part in enumerate(entry.key) if part == PARAM_GROUPS]
    # In ("state", "master", ...), "master" is the name of a parameter.
    ends += [i for i, part in enumerate(entry.key[:-1]) if part == "master" and entry.key[max(i - 1, 0)] != "state"]
    ends += [i for i, part in enumerate(entry.key[:-2]) if part == "state"]
    is_empty = entry.key[-1:] == ("state",) and "state" not in entry.key[-3:-1]  # of an optimizer without momentum
    if is_empty or is_flattened(entry.key):
        ends.append(len(entry.key) - 1)
    below = ".".join(str(part) for part in entry.key[max(ends) :]) if ends else ""
    if below and entry.name.endswith(below):  # a reader may have added a prefix to the name
        return entry.name.removesuffix(below).rstrip(".")
    found = _OWNER.match(entry.name)
    return found[1] if found else ""


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Sort names. Numbers in names are compared as numbers: "scheduler_2" precedes "scheduler_10"."""

    def parts(name: str) -> list[tuple[int, str]]:
        return [(len(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted(names, key=parts)


def _is_setting(entry: TensorEntry | ObjectEntry) -> bool:
    return f".{PARAM_GROUPS}." in f".{entry.name}."


def _tensor_state(entry: TensorEntry) -> SavedState[TensorEntry]:
    place = _place(entry.key)
    fqn = entry.fqn.removesuffix(f".{_BITSANDBYTES}")
    if place is None or entry.role is Role.MASTER:
        state = entry.state.removeprefix(f"{_BITSANDBYTES}.")
        return SavedState(entry, place[0] if place else fqn, (state,), fqn)
    return SavedState(entry, *place, fqn)


def _value_state(entry: ObjectEntry, value: Any) -> SavedState[ObjectEntry] | None:
    place = _place(entry.key)
    if place is None:
        below = entry.name.removeprefix(f"{_owner(entry)}.")
        role = optimizer_role((below,))
        place = (role.fqn, (role.state,)) if role.state else None
    return SavedState(entry, *place, value=value) if place is not None else None


def _place(key: Path) -> tuple[str, Path] | None:
    """Return what `state_place` returns, but without the dict key that bitsandbytes adds to the path."""
    place = state_place(key)
    if place is None or place[1][0] != _BITSANDBYTES:
        return place
    return place[0], place[1][1:]


def _add_groups(
    saved: SavedOptimizer, parts: Iterable[tuple[TensorEntry | ObjectEntry, Any]], unread: dict[str, str]
) -> None:
    """Add the param groups to `saved`.

    Depending on the program, `parts` contains the list of all groups, each setting of each group, or each setting of
    each parameter.
    """
    numbered: dict[int, dict[Any, Any]] = {}
    flattened: dict[str, dict[Any, Any]] = {}
    for entry, value in parts:
        owner, path = setting_place(entry.key or (entry.name,))
        if not owner and isinstance(value, (list, tuple)) and all(isinstance(group, Mapping) for group in value):
            numbered.update({index: dict(group) for index, group in enumerate(value)})
            continue
        is_number = owner.isdecimal() and len(owner) < _MAX_DIGITS
        group = numbered.setdefault(int(owner), {}) if is_number else flattened.setdefault(owner, {})
        if path:
            insert(group, path, value)
        elif owner and isinstance(value, Mapping):
            group.update(value)
        else:
            unread[entry.name] = f"expected param groups, found a {type(value).__name__}"
    flattened.pop("", None)
    for index in sorted(numbered):
        settings = with_lists(numbered[index])
        params, names = (settings.pop(key, None) for key in ("params", "param_names"))
        saved.groups.append({**settings, "params": list(params) if _is_list(params) else []})
        if _is_list(params) and _is_list(names) and len(params) == len(names):
            saved.names.update(zip(map(str, params), map(str, names), strict=True))
    saved.groups += [{**with_lists(group), "params": [name]} for name, group in flattened.items()]
    saved.is_flattened = bool(flattened)


# --- other objects


def _add_objects(
    found: TrainingState,
    catalog: Catalog,
    values: dict[str, Any],
    tensors: Sequence[TensorEntry],
    tensor: MakeTensor,
    read: ReadTensors,
    whole: Collection[str],
) -> None:
    """Add the objects to `found`, and the schedulers, scalers and random states that they contain.

    DCP and some readers split an object into an entry per value. The object is put together again here, unless it is
    large, such as a moving average of the weights. The tensors of a large object are not read.
    """
    _take_random_states(found, values, tensor)
    held: dict[str, list[TensorEntry]] = {}
    for entry in tensors:
        held.setdefault(str(_path(entry)[0]), []).append(entry)
    found.large = [
        top
        for top, entries in held.items()
        if top not in whole and sum(entry.nbytes for entry in entries) > MAX_OBJECT_BYTES
    ]
    small = {top: entries for top, entries in held.items() if top not in found.large}
    got = _read_objects(small, read, found.unread)
    found.tensors += [entry for entry in tensors if entry.name not in got]
    tree: dict[Any, Any] = {}
    apart: dict[str, Any] = {}
    for name, value in values.items():
        path = _path(catalog.objects[name])
        insert(tree, path, value)
        if str(path[0]) in found.large or str(path[0]) in found.unread:
            apart[name] = value
    for entry in tensors:
        if entry.name in got:
            insert(tree, _path(entry), got[entry.name])
    joined = with_lists(tree, catalog.info.extra.get("containers", {}))
    _take_random_states(found, joined, tensor)
    found.random = dict(sorted(found.random.items()))
    found.schedulers = _schedulers(joined)
    for name, value in joined.items():
        found.scalers |= dicts_with(SCALER_STATE, value, name)
    parted = {*found.large, *found.unread}
    found.objects = {**{name: value for name, value in joined.items() if name not in parted}, **apart}
    loose = (name for name in (*found.unread, *(entry.name for entry in found.tensors)) if RANDOM_WORD.search(name))
    found.unknown_random = list(dict.fromkeys((*_random_names(found.objects), *loose)))


def _path(entry: TensorEntry | ObjectEntry) -> Path:
    """Return an entry's path in the nested state. If a reader has renamed the entry, splits the new name at dots."""
    path = entry.key or tuple(entry.name.split(".", maxsplit=1))
    return path if ".".join(map(str, path)) == entry.name else tuple(entry.name.split("."))


def _read_objects(
    objects: Mapping[str, Sequence[TensorEntry]],
    read: ReadTensors,
    unread: dict[str, str],
) -> dict[str, Any]:
    """Return, by name, the tensors of these objects.

    If reading all of them together fails, reads one object at a time, and adds the unreadable objects to `unread`.
    """
    entries = [entry for parts in objects.values() for entry in parts]
    if not entries:
        return {}
    try:
        return dict(read(entries))
    except _NOT_LOADABLE:
        found: dict[str, Any] = {}
        for top, parts in objects.items():
            try:
                found.update(read(parts))
            except _NOT_LOADABLE as error:
                unread[top] = str(error)
        return found


def is_usual_scheduler(key: str) -> bool:
    """Return whether the key of a scheduler's state begins with one of the keys that programs use for schedulers."""
    return bool(SCHEDULER_KEY.fullmatch(key.removeprefix("meta.").partition(".")[0]))


def _schedulers(objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, by key, the states of schedulers.

    These are all values under a usual key for schedulers, and all dicts that look like the state of a torch scheduler.
    The keys alone are not enough, because users of Fabric and of scripts choose their own keys. Lightning may save the
    usual keys inside "meta".
    """
    meta = objects.get("meta")
    below = {f"meta.{key}": value for key, value in meta.items()} if isinstance(meta, dict) else {}
    found: dict[str, dict[str, Any]] = {}
    for name, value in {**objects, **below}.items():
        if is_usual_scheduler(name):
            found |= _scheduler_states(name, value)
        elif name != "meta" or not below:
            found |= dicts_with(SCHEDULER_STATE, value, name)
    return found


def _scheduler_states(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Return the scheduler states in `value`, by their full key. `name` is the key of `value`.

    `value` may be one state, or a list or dict of states. A dict that contains no state of a torch scheduler counts
    as one state, because a scheduler of the user's own class may have any state.
    """
    if _is_list(value):
        return {k: v for i, item in enumerate(value) for k, v in _scheduler_states(f"{name}.{i}", item).items()}
    if not isinstance(value, dict) or not value:
        return {}
    is_one = any(key in value for key in SCHEDULER_STATE)  # a ChainedScheduler has no last_epoch
    return ({} if is_one else dicts_with(SCHEDULER_STATE, value, name)) or {name: value}


def _is_list(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, (list, tuple))


# --- random states


def _take_random_states(found: TrainingState, values: dict[str, Any], tensor: MakeTensor) -> None:
    """Move the random states of the ranks from `values` to `found`.

    verl saves other objects in the dict of each rank's random state. If such an object is equal on several ranks,
    `values` keeps one copy of the object.
    """
    seen: dict[str, Any] = {}
    for name, value in list(values.items()):
        match = RANDOM_KEY.fullmatch(name)
        if match and not match[1] and isinstance(value, list):
            _take_list(found, values, name, tensor)
            continue
        generators = _generators(value.get("rng", value), tensor) if match and isinstance(value, dict) else None
        rank = int(match[1] or 0) if match else 0
        if generators is None or rank in found.random:
            continue
        found.random[rank] = RandomState(name, generators)
        if (count := len(_gpus(value.get("rng", value)))) > 1:
            found.unread[f"{name}.cuda"] = f"it does not say which of {count} GPUs was the rank's"
        beside = {key: item for key, item in value.items() if key != "rng"} if "rng" in value else {}
        beside = {key: item for key, item in beside.items() if not (key in seen and _are_equal(item, seen[key]))}
        seen = {**beside, **seen}
        del values[name]
        if beside:
            values[name] = beside


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if _is_list(one):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if hasattr(one, "all"):  # an array or a tensor
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def _take_list(found: TrainingState, values: dict[str, Any], name: str, tensor: MakeTensor) -> None:
    """Move the list `values[name]` to `found` if it has one random state for each rank, as saved by Composer."""
    ranks = [_generators(states, tensor) for states in values[name]]
    if ranks and not found.random and all(ranks):
        found.random = {rank: RandomState(f"{name}.{rank}", made) for rank, made in enumerate(ranks) if made}
        del values[name]


def _random_names(values: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """Return the dotted paths in a nested dict at which the keys suggest a random state ("torch_rng"). Omits seeds."""
    found: list[str] = []
    for key, value in values.items():
        if value is None or isinstance(value, (bool, int, float, str)):
            continue
        if RANDOM_WORD.search(str(key)):
            found.append(f"{prefix}{key}")
        elif isinstance(value, dict):
            found += _random_names(value, f"{prefix}{key}.")
    return found


def _generators(states: Any, tensor: MakeTensor) -> dict[str, Any] | None:
    """Return a rank's random state in the form that ckptkit saves.

    Returns None if Python's or torch's generator is missing or has an unknown form.
    """
    if not isinstance(states, dict):
        return None
    python = states.get("python", states.get("random", states.get("random_state")))
    cpu = states.get("cpu", states.get("torch_manual_seed", states.get("torch")))
    array = states.get("numpy", states.get("numpy_random_seed"))
    if python is None or cpu is None:
        return None
    try:
        version, words, gauss = python
        cpu = np.asarray(cpu, np.uint8) if _is_list(cpu) else cpu
        if len(cpu.shape) != 1 or not str(cpu.dtype).endswith("uint8"):
            return None
        made: dict[str, Any] = {
            "python": {"version": int(version), "words": tensor(_integers(words)), "gauss": gauss},
            "torch": tensor(cpu) if isinstance(cpu, np.ndarray) else cpu,
        }
        if array is not None:
            name, keys, position, has_gauss, cached = array
            made["numpy"] = {
                "name": str(name),
                "words": tensor(_integers(keys)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
        if len(gpus := _gpus(states)) == 1:
            made["cuda"] = gpus[0]
    except (AttributeError, TypeError, ValueError, OverflowError):  # values that are not random states
        return None
    return made


def _gpus(states: Mapping[Any, Any]) -> list[Any]:
    """Return the random states of GPUs. There may be several: accelerate saves one for each GPU that a rank can see."""
    found = states.get("cuda", states.get("torch_cuda_manual_seed"))
    listed = found if _is_list(found) else [found]
    return [
        state
        for state in listed
        if getattr(state, "shape", None) == (_CUDA_BYTES,) and str(state.dtype).endswith("uint8")
    ]


def _integers(values: Any) -> np.ndarray[Any, Any]:
    array = np.frombuffer(values.data, values.dtype) if isinstance(values, TensorValue) else np.asarray(values)
    return array.astype(np.int64).reshape(len(array))


# --- the step


def saved_step(store: Store, catalog: Catalog) -> int | None:
    """Return the step from the catalog's info, or from a saved integer under a usual key for steps (`STEPS`).

    Returns None if neither contains a step.
    """
    if catalog.info.step is not None:
        return catalog.info.step
    homes = {entry.key[:-2] for entry in catalog.tensors.values() if entry.role is Role.MODEL}
    home = homes.pop() if len(homes) == 1 else ()
    values: dict[str, Any] = {}  # a cache: each value is read once

    def value_of(name: str) -> Any:
        if name not in values:
            values[name] = _number_or_object(store, catalog, name)
        return values[name]

    for top in dict.fromkeys((".".join(map(str, home)), "", "train_state", "trainer_state")):
        for key in STEPS:
            value = value_of(f"{top}.{key}" if top else key)
            if value is None and isinstance(value_of(top), dict):
                value = value_of(top).get(key)
            if type(value) is int and 0 <= value < _MAX_STEP:
                return value
    return None


def _number_or_object(store: Store, catalog: Catalog, name: str) -> Any:
    """Return a saved object, or the integer in a tensor of one element. Returns None if there is no readable value."""
    entry, item = catalog.tensors.get(name), catalog.objects.get(name)
    try:
        if entry is not None and entry.dtype in _INTEGERS and entry.numel == 1:
            return int(read_box(store, entry, Box.whole(entry.shape)).view(entry.dtype).item())
        return read_object(store, item, tensor=_number) if item is not None else None
    except UNREADABLE:
        return None


def _number(array: np.ndarray[Any, Any] | TensorValue) -> Any:
    return array.item() if isinstance(array, np.ndarray) and array.size == 1 and array.dtype.kind in "iu" else None
