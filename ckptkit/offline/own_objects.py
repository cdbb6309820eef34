"""What a foreign checkpoint holds besides tensors, as the trees of our `objects.json`: settings by name, schedulers."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.entry import Catalog, ObjectEntry, Role
from ckptkit.catalog.wrappers import strip_infixes
from ckptkit.errors import CkptkitError
from ckptkit.formats.objects import TensorValue, read_object

if TYPE_CHECKING:
    from ckptkit.storage.store import Store

__all__ = ["Trees", "own_trees"]

_MAX_TREE_BYTES = 1 << 20
_MAX_STEP = 2**63  # of an optimizer; JSON in a hostile checkpoint may hold numbers that no float takes
_RANDOM = re.compile(r"(random_states?|rng_states?|rng)(_\d+)?")
_SCHEDULER = re.compile(r"(lr_)?schedulers?(_states?)?(_\d+)?")
_GROUPS = "param_groups"


class _NoTree(Exception):
    """The value is of a kind that `objects.json` does not take."""


@dataclass(slots=True)
class Trees:
    """Trees for `objects.json`.

    Attributes:
        steps: (optimizer, FQN) -> step, where the source keeps it as a number.
        leftovers: (name, reason) of what became no tree.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    steps: dict[tuple[str, str], float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    leftovers: list[tuple[str, str]] = field(default_factory=list)


def own_trees(store: Store, catalog: Catalog, sections: Mapping[str, str]) -> Trees:
    """Return the trees of a source that ckptkit did not write. Reads its objects; runs nothing that they hold.

    Args:
        sections: What stands before ".state." in the keys of an optimizer -> our name of it.
    """
    found = Trees()
    values: dict[str, tuple[ObjectEntry, Any]] = {}
    for name, entry in catalog.objects.items():
        if entry.role is not Role.OPTIMIZER and _RANDOM.fullmatch(name.split(".")[0]):
            found.leftovers.append((name, "random states belong to the old ranks; the new ones are seeded anew"))
            continue
        try:
            values[name] = (entry, read_object(store, entry))
        except CkptkitError as error:
            found.leftovers.append((name, f"it can't be read: {str(error)[:160]}"))
    known = _Names(catalog)
    groups = _Groups()
    for name, (entry, value) in list(values.items()):
        if entry.role is not Role.OPTIMIZER:
            continue
        del values[name]
        if not groups.take(name, value) and not _take_state(found, name, entry, value, sections):
            found.leftovers.append((name, "it is nothing that an optimizer of torch has"))
    _add_groups(found, groups, known, sections, catalog)
    _add_rest(found, _nested(values))
    return found


# --- optimizers


@dataclass(slots=True)
class _Groups:
    """Settings of parameter groups, by what stands before "param_groups" in their keys, then by index or name."""

    found: dict[str, dict[str | int, dict[str, Any]]] = field(default_factory=dict)

    def take(self, name: str, value: Any) -> bool:
        """Take a setting; False where the object is none. A group is told by its index, or in a flattened state
        dict by the parameter."""
        at = name.find(_GROUPS)
        if at < 0:
            return False
        prefix, rest = name[:at].rstrip("."), name[at + len(_GROUPS) + 1 :]
        if not rest and not isinstance(value, (list, tuple)):
            return False
        groups = self.found.setdefault(prefix, {})
        if not rest:  # all groups in one value
            groups.update(enumerate(dict(group) for group in value if isinstance(group, Mapping)))
            return True
        owner, _, setting = rest.rpartition(".")
        groups.setdefault(int(owner) if owner.isdecimal() else owner, {})[setting] = value
        return True


class _Names:
    """The FQNs that parameters have in the catalog, by those that the source's settings use."""

    def __init__(self, catalog: Catalog) -> None:
        self._known = {entry.fqn for entry in catalog.tensors.values() if entry.fqn}
        prefix = catalog.info.extra.get("module_prefix")
        self._prefix = prefix if isinstance(prefix, str) else ""

    def of(self, name: str) -> str | None:
        """Return the FQN; None where there is no such parameter."""
        plain = strip_infixes([name])[name]
        for candidate in (name, plain, name.removeprefix(self._prefix), plain.removeprefix(self._prefix)):
            if candidate in self._known:
                return candidate
        return None


def _take_state(found: Trees, name: str, entry: ObjectEntry, value: Any, sections: Mapping[str, str]) -> bool:
    """Take a state that is a number: a step count becomes a tensor later, others stay as they are."""
    at = name.find(".state.")
    if at < 0:
        return False
    fqn, _, state = name[at + len(".state.") :].rpartition(".")
    if len(entry.key) >= 2 and isinstance(entry.key[-2], str):
        fqn, state = entry.key[-2], str(entry.key[-1])
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


def _optimizer(found: Trees, section: str) -> dict[str, Any]:
    fresh: dict[str, Any] = {_GROUPS: [], "values": {}, "shared": {}}
    tree: dict[str, Any] = found.trees.setdefault(section, fresh)
    return tree


def _add_groups(found: Trees, groups: _Groups, names: _Names, sections: Mapping[str, str], catalog: Catalog) -> None:
    for prefix, by_owner in groups.found.items():
        section = sections.get(prefix) or ("optimizer" if len(groups.found) == 1 else prefix.replace(".", "_"))
        listed = _joined(by_owner)
        unknown = [p for group in listed for p in group["params"] if not isinstance(p, str) or names.of(p) is None]
        if unknown:
            reason = f"its parameters are {unknown[0]!r} and the like, which are no names of the model"
            found.leftovers.append((f"{prefix}.{_GROUPS}", reason))
            continue
        tree = _optimizer(found, section)
        for index, group in enumerate(listed):
            made: dict[str, Any] = {}
            for setting, value in group.items():
                try:
                    made[setting] = [names.of(p) for p in value] if setting == "params" else _tree(value)
                except _NoTree as error:
                    found.leftovers.append((f"{prefix}.{_GROUPS}.{index}.{setting}", str(error)))
            tree[_GROUPS].append(made)
    for section in set(sections.values()):
        _check_covered(found, section, catalog)


def _joined(by_owner: Mapping[str | int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups in order; those of single parameters with equal settings are one."""
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


def _check_covered(found: Trees, section: str, catalog: Catalog) -> None:
    """Say which parameters have state and no settings. Without any settings, a tree would promise what isn't there."""
    tree = found.trees.get(section)
    if tree is not None and not tree[_GROUPS]:
        del found.trees[section]
        tree = None
    if tree is None:
        found.notes.append(f"{section}: the source has no settings (lr, betas); those of the new job stay")
        return
    listed = {fqn for group in tree[_GROUPS] for fqn in group["params"]}
    having = {e.fqn for e in catalog.tensors.values() if e.role is Role.OPTIMIZER and e.fqn}
    loose = sorted(having - listed)
    if loose:
        found.notes.append(
            f"{section}: {len(loose)} parameters with state are in no group of the source: {loose[0]}, ..."
        )


# --- the rest


def _nested(values: Mapping[str, tuple[ObjectEntry, Any]]) -> dict[str, Any]:
    """What DCP has flattened, joined again below its top key: {"lr_scheduler": {"last_epoch": 2}}."""
    nested: dict[str, Any] = {}
    for name, (entry, value) in values.items():
        path = [str(part) for part in entry.key] or [name]
        if ".".join(path) != name:
            path = name.split(".")
        place = nested
        for part in path[:-1]:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = place[part] = {"": inner}
            place = inner
        place[path[-1]] = value
    return nested


def _add_rest(found: Trees, nested: Mapping[str, Any]) -> None:
    for name, value in nested.items():
        scheduler = _scheduler(name, value)
        own = "scheduler" if scheduler is not None and "scheduler" not in found.trees else f"extra.{_safe(name)}"
        try:
            tree = _tree(value if own != "scheduler" else scheduler)
        except _NoTree as error:
            found.leftovers.append((name, str(error)))
            continue
        if len(json.dumps(tree)) > _MAX_TREE_BYTES:
            found.leftovers.append((name, "it is larger than a megabyte"))
            continue
        found.trees[own] = tree
        if own == "scheduler":
            found.notes.append(f"{name} is the state of a scheduler of torch: a job's scheduler takes it")
            if isinstance(value, Mapping) and value is not scheduler:
                found.leftovers.append((f"the rest of {name}", "only the scheduler's state in it was taken"))


def _safe(name: str) -> str:
    return name.replace(".", "_")


def _scheduler(name: str, value: Any) -> Any:
    """The state of a torch LRScheduler in this value; None where it is none, or several."""
    if _SCHEDULER.fullmatch(name):
        candidates = value if isinstance(value, (list, tuple)) else [value]
    elif isinstance(value, Mapping) and isinstance(value.get("lr_schedulers"), (list, tuple)):
        candidates = value["lr_schedulers"]
    else:
        return None
    if len(candidates) == 1 and isinstance(candidates[0], Mapping) and "last_epoch" in candidates[0]:
        return candidates[0]
    return None


# --- values as JSON


def _tree(value: Any, depth: int = 0) -> Any:
    """The JSON of `checkpoint/values.py` for what the readers give; no torch is needed."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > 100:
        raise _NoTree("it is nested more than 100 deep")
    if isinstance(value, dict):
        return _dict(value, depth)
    if kind in (list, tuple, set, frozenset):
        items = [_tree(item, depth + 1) for item in (value if kind in (list, tuple) else sorted(value, key=repr))]
        return items if kind is list else {f"${kind.__name__}": items}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, TensorValue):
        return _tensor(value.dtype, value.shape, value.data)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _tensor(value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$npscalar": _tensor(value.dtype.name, (), value.tobytes())}
    raise _NoTree(f"it holds a {getattr(value, 'kind', kind.__name__)}, which does not load without running code")


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    return {"$tensor": {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}}


def _dict(value: Mapping[Any, Any], depth: int) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _tree(item, depth + 1) for key, item in value.items()}
    return {"$dict": [[_tree(key, depth + 1), _tree(item, depth + 1)] for key, item in value.items()]}
