"""A source's tensors and objects under the keys that our own checkpoints have, so that a training job takes them.

Tensors: `model.<fqn>`, `optimizer.state.<fqn>.<name>`, `optimizer.master.<fqn>`. Objects become the trees of
`objects.json`: an optimizer's parameter groups by FQN, a scheduler, and what is the user's own below `extra.`.
What can't be carried is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.entry import Catalog, Role, SliceArray, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import UsageError
from ckptkit.formats.own_roles import role_of
from ckptkit.offline.own_objects import Trees, own_trees
from ckptkit.offline.plan import ComputedTensor, OutputTensor

if TYPE_CHECKING:
    from ckptkit.storage.store import Store

__all__ = ["OwnState", "OwnTensor", "own_state"]

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """One tensor of the result.

    Attributes:
        tensor: What it is made from; its name is the key.
        source: Its entry in the source's catalog, or for a made-up one an entry without slices.
    """

    tensor: OutputTensor
    source: TensorEntry
    role: Role
    fqn: str
    state: str
    key: Key


@dataclass(slots=True)
class OwnState:
    """All that the result will hold.

    Attributes:
        trees: What goes into `objects.json`.
        leftovers: (name, reason) of what the source holds and the result won't.
    """

    tensors: list[OwnTensor] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    leftovers: list[tuple[str, str]] = field(default_factory=list)


def own_state(store: Store, catalog: Catalog, *, step: int, untie: bool) -> OwnState:
    """Return what a checkpoint of ours holds of a source. Reads its objects, no tensors.

    Args:
        untie: Give tied weights, which FULL and LOCAL store once, under each of their names, as SHARDED has them.
    """
    if catalog.info.format.startswith("ckptkit-"):
        return _of_ours(catalog, untie=untie)
    return _of_others(store, catalog, step)


# --- ours


def _of_ours(catalog: Catalog, *, untie: bool) -> OwnState:
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
    return found


def _copy(entry: TensorEntry, name: str, role: Role, fqn: str, state: str, key: Key) -> OwnTensor:
    return OwnTensor(Target.of(entry, name), entry, role, fqn, state, key or _key(name, role, fqn, state))


def _key(name: str, role: Role, fqn: str, state: str) -> Key:
    """The path in the nested state dict: names of parameters keep their dots."""
    if not fqn or role is Role.OTHER:
        return tuple(name.split("."))
    top = name.partition(".")[0]
    if role is Role.MODEL:
        return top, name[len(top) + 1 :]
    return (top, "master", fqn) if role is Role.MASTER else (top, "state", fqn, state)


# --- others


def _of_others(store: Store, catalog: Catalog, step: int) -> OwnState:
    found = OwnState()
    sections = _sections(catalog)
    trees = own_trees(store, catalog, sections)
    masters = _weights_are_masters(catalog)
    used: dict[str, str] = {}
    for name, entry in catalog.tensors.items():
        if entry.role is Role.MASTER and entry.fqn in masters:
            found.leftovers.append((name, "the fp32 weight is its own master"))
            continue
        own = _own_name(entry, sections)
        if used.setdefault(own, name) != name:
            raise UsageError(
                f"{used[own]!r} and {name!r} of the source would both become {own!r}: it holds several models. "
                "Convert the one you mean."
            )
        role, fqn, state = (entry.role, entry.fqn, entry.state) if own != name else role_of(own)
        if role is not entry.role:
            role, fqn, state = entry.role, entry.fqn, entry.state
        key = entry.key if ".".join(map(str, entry.key)) == own else ()
        found.tensors.append(_copy(entry, own, role, fqn if fqn in own else "", state, key))
    if masters:
        found.notes.append(
            f"{len(masters)} fp32 masters are left out: they are the fp32 weights, and an optimizer with masters takes "
            "those; for a model in another dtype, load with convert_dtype=True"
        )
    _add_steps(found, trees, used)
    found.trees = {**trees.trees, "step": step}
    found.notes += trees.notes
    found.leftovers += trees.leftovers
    return found


def _sections(catalog: Catalog) -> dict[str, str]:
    """What stands before ".state." or ".master." or ".param_groups." in the source's keys -> our name of it."""
    prefixes: dict[str, None] = {}
    for entry in catalog.tensors.values():
        if entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.fqn:
            prefixes[_prefix(entry.name)] = None
    if len(prefixes) <= 1:
        return dict.fromkeys(prefixes, "optimizer")
    return {prefix: f"optimizer_{i}" for i, prefix in enumerate(prefixes)}


def _prefix(name: str) -> str:
    """The part of a key that names the optimizer."""
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
    """FQNs whose master is, byte for byte in the same file, the weight itself: DeepSpeed's exporters see it so."""
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


def _add_steps(found: OwnState, trees: Trees, used: Mapping[str, str]) -> None:
    """Make tensors of step counts that the source keeps as numbers: torch's optimizers want them so."""
    for (section, fqn), step in trees.steps.items():
        name = f"{section}.state.{fqn}.step"
        if name in used:
            continue
        data = np.array([step], np.float32).view(np.uint8)
        tensor = ComputedTensor(name, "float32", (), (), partial(_constant, data), f"step {step:g}")
        empty = np.zeros(0, np.int64)
        nothing = SliceArray([], empty.astype(np.int32), empty, empty, empty.reshape(0, 0), empty.reshape(0, 0))
        entry = TensorEntry(name, "float32", (), nothing, Role.OPTIMIZER, fqn, "step")
        key = (section, "state", fqn, "step")
        found.tensors.append(OwnTensor(tensor, entry, Role.OPTIMIZER, fqn, "step", key))


def _constant(data: Any, _: Sequence[Any]) -> Any:
    return data
