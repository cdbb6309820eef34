"""Turns the values in pickles, which are nested dicts and lists, into the entries of a catalog.

The nesting of a value shows whether the value is a weight, an optimizer state or something else. The rules are in
`formats.dcp.roles`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.dcp.roles import EntryRole, RoleTable
from ckptkit.formats.pickles.tensors import DTensorRecord, StoredTensor, is_tensor
from ckptkit.formats.state_names import PARAM_GROUPS
from ckptkit.keymaps.wrappers import without_infixes

Path = tuple[str | int, ...]


def entries_of(
    values: Mapping[str, Any], *, sharded: bool = False, levels: int = 0
) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
    """Return the tensors and the other values, by name.

    Args:
        values: The unpickled content of each file (the result of `pickles.objects.plain`), by file name.
        sharded: True if the files are shards of one model. In that case, a name may occur only once.
        levels: Number of levels on which each dict is split into entries even if it contains no tensors.
    """
    leaves: dict[str, _Leaf] = {}
    for file, value in values.items():
        for leaf in _leaves(value, (), file, {}, levels):
            _add(leaves, leaf, sharded=sharded)
    tensors = {name: leaf for name, leaf in leaves.items() if is_tensor(leaf.value)}
    table = RoleTable({name: leaf.path for name, leaf in leaves.items()}, tensors)
    names = _parameter_names(leaves)
    roles = _unwrapped({name: _named(table.of(name), leaf.path, names) for name, leaf in tensors.items()})
    entries = {name: _entry(name, leaf, roles[name]) for name, leaf in tensors.items()}
    objects: dict[str, ObjectEntry] = {}
    for name, leaf in leaves.items():
        if name not in tensors:
            role = Role.OPTIMIZER if table.of(name).role is Role.OPTIMIZER else Role.OTHER
            objects[name] = ObjectEntry(name, leaf.file, encoding="value", value=leaf.value, role=role, key=leaf.path)
    return entries, objects


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of a saved value, with the leaf's path: a tensor, or a whole subtree without tensors and optimizers."""

    path: Path
    file: str
    value: Any


def _leaves(value: Any, path: Path, file: str, known: dict[int, bool], levels: int = 0) -> Iterator[_Leaf]:
    """Yield the leaves of a plain value. The caller has limited the value's nesting and size with `plain`.

    Args:
        known: A cache of the results of `has_parts`.
        levels: The number of levels of dicts that are opened even if they have no tensors.
    """
    # An optimizer may have no tensors, and a parameter's state may consist of numbers.
    opened = is_optimizer(value) or (levels > 0 and isinstance(value, dict) and value)
    if is_tensor(value) or not isinstance(value, (dict, list, tuple)) or not (opened or has_parts(value, known)):
        yield _Leaf(path, file, value)
        return
    items: Sequence[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, item in items:
        below = 2 * (key == "state") if is_optimizer(value) else levels - 1
        yield from _leaves(item, (*path, key if type(key) in (str, int) else str(key)), file, known, below)


def is_optimizer(value: Any) -> bool:
    """Return whether a value looks like a result of `Optimizer.state_dict()`, perhaps flattened by torch."""
    if not isinstance(value, dict):
        return False
    return {"state", PARAM_GROUPS} <= value.keys() or any(str(key).startswith(f"{PARAM_GROUPS}.") for key in value)


def has_parts(value: Any, known: dict[int, bool]) -> bool:
    """Return whether a nested value contains a tensor, or an optimizer, which may have no tensors.

    `known` caches the result for each container, by id.
    """
    if is_tensor(value) or is_optimizer(value):
        return True
    if not isinstance(value, (dict, list, tuple)):
        return False
    if id(value) not in known:
        known[id(value)] = False
        items = value.values() if isinstance(value, dict) else value
        known[id(value)] = any(has_parts(item, known) for item in items)
    return known[id(value)]


def _add(leaves: dict[str, _Leaf], leaf: _Leaf, *, sharded: bool) -> None:
    name = ".".join(str(part) for part in leaf.path) or "value"
    if name in leaves:
        if sharded:
            raise CorruptCheckpointError(f"{leaf.file}: tensor {name!r:.120} is also in {leaves[name].file}.")
        if leaves[name].path == leaf.path:
            raise CorruptCheckpointError(f"{leaf.file}: {name!r:.120} occurs twice.")
        # Two paths may join to the same name, as in {"a": {"b.c": ...}, "a.b": {"c": ...}}.
        name = "/".join(str(part) for part in leaf.path)
        if name in leaves:
            raise CorruptCheckpointError(f"{leaf.file}: {name!r:.120} occurs twice.")
    leaves[name] = leaf


def _entry(name: str, leaf: _Leaf, role: EntryRole) -> TensorEntry:
    tensor = _whole(leaf)
    slices = [tensor.slice()] if tensor.numel else []
    return TensorEntry(
        name,
        tensor.dtype,
        tensor.shape,
        SliceArray.of(slices, len(tensor.shape)),
        role.role,
        role.fqn,
        role.state,
        leaf.path,
    )


def _whole(leaf: _Leaf) -> StoredTensor:
    """Return the leaf's tensor. A DTensor or ShardedTensor is accepted only if this file contains all of it."""
    value, name = leaf.value, ".".join(str(part) for part in leaf.path)
    if isinstance(value, StoredTensor):
        return value
    if isinstance(value, DTensorRecord):
        if value.local.shape == value.shape and all(p.kind != "partial" for p in value.placements):
            return value.local
        world, rank = int(value.mesh.ranks.size), value.rank
    else:
        if len(value.shards) == 1 and value.shards[0].box == Box.whole(value.shape):
            tensor: StoredTensor = value.shards[0].tensor
            return tensor
        world, rank = value.world_size or len(value.boxes), value.rank
    raise IncompleteCheckpointError(
        f"{leaf.file}: {name!r:.120} of shape {list(value.shape)} is only the part of rank {rank} of {world}. "
        "Give the directory that holds the files of all ranks."
    )


# --- numbered optimizer states, for which param_groups may hold the parameters' names


def _parameter_names(leaves: Mapping[str, _Leaf]) -> dict[Path, dict[str, str]]:
    """Return the names of each optimizer's parameters, by the optimizer's path and the parameter's number.

    The names come from `param_names` in the param groups (torch >= 2.6).
    """
    found: dict[Path, dict[str, str]] = {}
    for leaf in leaves.values():
        if leaf.path[-1:] != (PARAM_GROUPS,) or not isinstance(leaf.value, list):
            continue
        for group in leaf.value:
            params, names = (group.get("params"), group.get("param_names")) if isinstance(group, dict) else (None, None)
            if isinstance(params, list) and isinstance(names, list) and len(params) == len(names):
                pairs = {str(p): n for p, n in zip(params, names, strict=True) if isinstance(n, str)}
                found.setdefault(leaf.path[:-1], {}).update(pairs)
    return found


def _named(role: EntryRole, path: Path, names: Mapping[Path, Mapping[str, str]]) -> EntryRole:
    if role.role not in (Role.OPTIMIZER, Role.MASTER) or "state" not in path:
        return role
    at = path.index("state")
    if at + 1 < len(path) and isinstance(path[at + 1], int):
        return EntryRole(role.role, names.get(path[:at], {}).get(role.fqn, ""), role.state)
    return role


def _unwrapped(roles: Mapping[str, EntryRole]) -> dict[str, EntryRole]:
    """Remove the components that torch.compile and similar wrappers insert, such as "_orig_mod", from the roles' FQNs.

    Changes no FQN if two weights would get the same FQN.
    """
    weights = {role.fqn for role in roles.values() if role.role is Role.MODEL}
    if len({without_infixes(fqn) for fqn in weights}) < len(weights):
        return dict(roles)
    return {name: role._replace(fqn=without_infixes(role.fqn)) for name, role in roles.items()}


# --- values that are split into several entries


class _Node(dict[Any, Any]):
    """An inner node of the tree that `insert` builds. Any other dict in the tree is a value."""


def insert(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Set the value at this path of a tree of dicts.

    A position in a list is stored as a dict key. `with_lists` later turns such dicts into lists.
    """
    for part in path[:-1]:
        inner = tree.setdefault(part, _Node())
        if not isinstance(inner, _Node):  # "a.b" is inserted after "a"
            inner = tree[part] = _Node({"": inner})
        tree = inner
    last = path[-1]
    if isinstance(tree.get(last), _Node):  # "a" is inserted after "a.b"
        tree, last = tree[last], ""
    tree[last] = value


def with_lists(tree: Mapping[Any, Any], containers: Mapping[str, Sequence[Sequence[str | int]]] = {}) -> dict[str, Any]:
    """Return a tree with lists in place of the inner dicts whose keys are list positions.

    Args:
        containers: The paths of inner dicts that become tuples instead, and of inner dicts that stay dicts (see
            `other_containers`).
    """
    kinds: dict[Path, type] = {tuple(path): dict for path in containers.get("dict", ())}
    kinds |= {tuple(path): tuple for path in containers.get("tuple", ())}
    return {str(key): _with_lists(value, (key,), kinds) for key, value in tree.items()}


def _with_lists(value: Any, path: Path, kinds: Mapping[Path, type]) -> Any:
    if not isinstance(value, _Node):
        return value
    made = {key: _with_lists(item, (*path, key), kinds) for key, item in value.items()}
    kind = kinds.get(path, list) if made.keys() == set(range(len(made))) else dict
    return made if kind is dict else kind(made[i] for i in range(len(made)))


def dicts_with(keys: Collection[str], value: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return the dicts inside `value` that have all of `keys`: name -> dict, in order of occurrence.

    Does not search inside a dict that has the keys.

    Args:
        name: The name of `value`. The name of each result begins with this name.
    """
    if isinstance(value, dict) and all(key in value for key in keys):
        return {name: value}
    found: dict[str, dict[str, Any]] = {}
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found |= dicts_with(keys, item, f"{name}.{key}")
    return found


def other_containers(values: Iterable[Any]) -> dict[str, list[list[str | int]]]:
    """Return the paths of tuples, and of dicts with the keys 0, 1, 2, ..., that contain tensors or optimizers.

    The names of the entries look as if these containers were lists. Optimizers are left out, because their states are
    always dicts.
    """
    found: dict[str, list[list[str | int]]] = {}
    known: dict[int, bool] = {}

    def walk(value: Any, path: list[str | int]) -> None:
        if not has_parts(value, known) or not isinstance(value, (dict, list, tuple)):
            return
        if isinstance(value, dict):
            if is_optimizer(value):
                return
            if value.keys() == set(range(len(value))):
                found.setdefault("dict", []).append(path)
        elif isinstance(value, tuple):
            found.setdefault("tuple", []).append(path)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            walk(item, [*path, key if type(key) in (str, int) else str(key)])

    for value in values:
        walk(value, [])
    return found
