"""Defines the JSON that describes a saved optimizer: validates it, merges the trees of several ranks, renames it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.checkpoint.state.optimizer.layout import PLAIN, SHARD, Held
from ckptkit.checkpoint.state.values import JSON, decode, is_order
from ckptkit.checkpoint.state.views import View
from ckptkit.errors import SaveError
from ckptkit.formats.own.json import TABLE, Check, field_of, is_texts
from ckptkit.units import first_few

UNITED = ("held", "orders", "same", "views", "kinds", "containers", "tied")
"""Keys of an optimizer's tree that describe states.

If their values differ between ranks, the values of all ranks are saved.
"""


GROUP_NAMES = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """Holds the values in `CapturedOptimizer.tree` after validation. "own" is split into `layouts` and `states`."""

    param_groups: list[dict[str, JSON]]
    values: dict[str, dict[str, JSON]]
    shared: dict[str, JSON]
    held: dict[str, Held]  # how states are stored, by key; omitted if a load can derive this from the parameter
    orders: dict[str, list[int]]  # order of plain states' dimensions in memory, by key; omitted if a new state has it
    layouts: list[JSON]  # how the parameters were sharded, if `states` is not empty
    states: list[str]  # "<fqn>.<name>" of states with plain tensors whose values may differ between ranks
    same: list[list[str]]  # [fqn, name, other fqn, other name]: two parameters' states that are one tensor
    views: list[list[View]]  # states that shared an allocation
    kinds: dict[str, dict[str, JSON]]  # by FQN and name: the tags that `described` returns for tensors
    containers: dict[str, JSON]  # by FQN: an OrderedDict or defaultdict without values, if a state is not a plain dict
    tied: dict[str, str]  # other names of tied parameters -> the name in the groups

    @classmethod
    def of(cls, tree: JSON, what: str) -> OptimizerTree:
        """Validate `tree`, and return its parts."""
        given = field_of({"the saved optimizer": tree}, "the saved optimizer", TABLE, what)
        parts = {
            name: field_of(_OPTIONAL | given, name, check, f"{what}: saved optimizer")
            for name, check in _FIELDS.items()
        }
        own = parts.pop("own")
        views = [[(fqn, name) for fqn, name in rows] for rows in parts.pop("views")]
        return cls(**parts, layouts=own["layouts"], states=own["states"], views=views)

    def renamed(self, fqn: str, name: str, old: str, new: str) -> OptimizerTree:
        """Return a copy of this tree in which the parameter `fqn` has the name `name`.

        Args:
            old, new: The prefix of the keys of this parameter's states, before and after the renaming.
        """
        names = {fqn: name}
        tables: dict[str, Any] = {part: with_new_head(getattr(self, part), old, new) for part in ("held", "orders")}
        for part in ("values", "kinds", "containers"):
            tables[part] = {names.get(key, key): value for key, value in getattr(self, part).items()}
        groups = [{**group, "params": [names.get(a, a) for a in group["params"]]} for group in self.param_groups]
        same = [[names.get(a, a), one, names.get(b, b), other] for a, one, b, other in self.same]
        views = [[(names.get(a, a), one) for a, one in rows] for rows in self.views]
        return replace(self, param_groups=groups, same=same, views=views, **tables)


def with_new_head(table: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a copy of the table in which keys with the prefix `old` have the prefix `new` instead."""
    return {new + key[len(old) :] if key.startswith(old) else key: item for key, item in table.items()}


def _is_list_of(value: Any, holds: Callable[[Any], Any]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


def _is_table_of(value: Any, holds: Callable[[Any], Any]) -> bool:
    return isinstance(value, dict) and all(map(holds, value.values()))


def _is_tensor(tree: JSON) -> bool:
    import torch

    return isinstance(decode(tree, lambda _: torch.empty(0)), torch.Tensor)


def _is_empty_dict(tree: JSON) -> bool:
    made = decode(tree, lambda _: True)
    return isinstance(made, dict) and not any(made.values())


_FIELDS: dict[str, Check] = {
    "param_groups": (
        "a list of objects, each with 'params', a list of names",
        (list,),
        lambda groups: _is_list_of(groups, lambda group: isinstance(group, dict) and is_texts(group.get("params"))),
    ),
    "values": (
        "an object of objects, by parameter",
        (dict,),
        lambda table: _is_table_of(table, lambda x: isinstance(x, dict)),
    ),
    "shared": TABLE,
    "held": (
        "an object of placements",
        (dict,),
        lambda table: _is_table_of(table, lambda how: how in (PLAIN, SHARD) or is_texts(how)),
    ),
    "orders": ("an object of orders of dimensions", (dict,), lambda table: _is_table_of(table, is_order)),
    "own": (
        "an object with 'layouts', a list, and 'states', a list of names",
        (dict,),
        lambda own: isinstance(own.get("layouts"), list) and is_texts(own.get("states")),
    ),
    "same": (
        "a list of lists of four names",
        (list,),
        lambda rows: _is_list_of(rows, lambda row: is_texts(row) and len(row) == 4),
    ),
    "views": (
        "a list of lists of pairs of names",
        (list,),
        lambda views: _is_list_of(views, lambda rows: _is_list_of(rows, lambda row: is_texts(row) and len(row) == 2)),
    ),
    "kinds": (
        "an object of objects of tensors, by parameter",
        (dict,),
        lambda table: _is_table_of(table, lambda kinds: _is_table_of(kinds, _is_tensor)),
    ),
    "containers": ("an object of dicts without values", (dict,), lambda table: _is_table_of(table, _is_empty_dict)),
    "tied": ("an object of names", (dict,), lambda table: is_texts([*table.values()])),
}
_OPTIONAL: dict[str, Any] = {
    **{name: {} for name in ("held", "orders", "kinds", "containers", "tied")},
    "own": {"layouts": [], "states": []},
    "same": [],
    "views": [],
}


def united(trees: Sequence[JSON]) -> JSON:
    """Merge the trees of an optimizer whose parameters are spread over the ranks (one tree per pipeline stage).

    A group is merged into a group with equal settings. The group at the same position is tried first, then all groups
    in order.

    Raises:
        SaveError: Trees have different values for one parameter.
    """
    first = {
        **trees[0],
        "param_groups": [{**group, "params": list(group["params"])} for group in trees[0]["param_groups"]],
    }
    groups = first["param_groups"]
    known = {fqn for group in groups for fqn in group["params"]}
    for tree in trees[1:]:
        for index, group in enumerate(tree["param_groups"]):
            if group["params"] and known.issuperset(group["params"]):
                continue
            same = [other for other in [*groups[index : index + 1], *groups] if _settings(other) == _settings(group)]
            if not same:
                same = [{**group, "params": []}]
                groups += same
            same[0]["params"] += [fqn for fqn in group["params"] if fqn not in known]
            known.update(group["params"])
        both = tree["values"].keys() & first["values"].keys()
        if unlike := sorted(fqn for fqn in both if tree["values"][fqn] != first["values"][fqn]):
            raise SaveError(
                f"the optimizer states of {first_few(unlike)} differ between pipeline stages that have the same "
                "parameter, so only one stage's values would be saved. Nothing was saved."
            )
        for fqn, kinds in tree.get("kinds", {}).items():
            first["kinds"] = {**first.get("kinds", {}), fqn: {**kinds, **first.get("kinds", {}).get(fqn, {})}}
        for part in ("values", "shared", "held", "orders", "containers", "tied"):
            if part in tree:
                first[part] = {**tree[part], **first.get(part, {})}
        if own := tree.get("own"):
            before = first.get("own", {**own, "states": []})
            first["own"] = {**before, "states": list(dict.fromkeys([*before["states"], *own["states"]]))}
        for part in ("same", "views"):
            if part in tree:
                rows = first.get(part, [])
                first[part] = [*rows, *(row for row in tree[part] if row not in rows)]
    return first


def _settings(group: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in group.items() if key != "params"}
