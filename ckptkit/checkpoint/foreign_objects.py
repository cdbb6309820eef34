"""Encodes the objects of another system's training state as ckptkit stores them: as the trees in `objects.json`.

A load (`load/foreign.py`) and a reshard (`offline/resharding/own_state.py`) choose the names of parameters and objects
in different ways. This module encodes the objects for both, once the names are chosen. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.checkpoint.state.values import JSON, Reference, encode
from ckptkit.errors import CkptkitError, SaveError
from ckptkit.formats.nested import insert, with_lists
from ckptkit.formats.state_names import PARAM_GROUPS
from ckptkit.formats.training_state import SavedOptimizer, SavedState, extra_keys, loadable

if TYPE_CHECKING:
    import torch


def own_name(part: SavedState[TensorEntry], key: str, fqn: str) -> str:
    """Return the name that a tensor of the optimizer `key` has in a checkpoint of ckptkit."""
    if part.is_nested:
        return f"{key}.values.{fqn}.{part.state}"
    return f"{key}.master.{fqn}" if part.entry.role is Role.MASTER else f"{key}.state.{fqn}.{part.state}"


@dataclass(slots=True)
class ForeignObjects:
    """Collects the trees of objects, and the reason for each object that has no tree.

    Attributes:
        tensors: Receives the large tensors of objects. None: all tensors become part of the trees.
        max_bytes: The maximum size of an object's tree as JSON.
        trees: The trees by key.
        lost: (name, reason) of each object, or part of one, that has no tree.
    """

    tensors: dict[str, torch.Tensor] | None = None
    max_bytes: int | None = None
    trees: dict[str, JSON] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, key: str, value: Any) -> bool:
        """Add the object `name` under `key`. Return whether this was possible."""
        try:
            tree = encode(value, key, self.tensors)
            if self.max_bytes is not None and len(json.dumps(tree)) > self.max_bytes:
                raise SaveError(f"it is larger than {self.max_bytes >> 20} MiB as JSON")
        except CkptkitError as error:
            self.lost.append((name, str(error)))
            return False
        self.trees[key] = tree
        return True

    def add_extras(self, values: Mapping[str, Any], keys: Mapping[str, str], unread: Mapping[str, str]) -> None:
        """Add objects, and leave out the parts that cannot be loaded.

        Args:
            keys: The key of each stateful object, by its name in `values`. If any part of a stateful object cannot be
                loaded, the whole object is left out. All other objects become `extra`.
            unread: The parts of `values` that could not be read, each with the reason.
        """
        extras = extra_keys(values)
        for name, value in values.items():
            lost = {part: why for part, why in unread.items() if name in keys and part.startswith(f"{name}.")}
            try:
                kept = loadable(value, name, self._check, lost)
            except CkptkitError as error:
                self.lost.append((name, str(error)))
                continue
            if lost and name in keys:
                self.lost.append((name, next(iter(lost.values()))))
                continue
            self.lost += lost.items()
            self.add(name, keys.get(name, extras[name]), kept)

    def add_optimizer(
        self,
        prefix: str,
        key: str,
        saved: SavedOptimizer,
        fqn_of: Callable[[Any], str | None],
        why_unknown: Callable[[Any], str],
    ) -> None:
        """Add an optimizer: its parameter groups, and its states that are not single tensors.

        Args:
            prefix: The prefix of the saved optimizer's names.
            fqn_of: Returns the FQN of a saved parameter, given its name or number, or None if it is not known.
            why_unknown: Returns the reason why `fqn_of` returns None.
        """
        states: dict[str, dict[Any, Any]] = {}
        for part in saved.values:
            fqn = fqn_of(part.param)
            if fqn is None:
                self.lost.append((part.entry.name, why_unknown(part.param)))
            elif self._can_load(part.entry.name, part.value):
                insert(states.setdefault(fqn, {}), part.path, part.value)
        for item in saved.tensors:
            if item.is_nested and (fqn := fqn_of(item.param)):
                insert(states.setdefault(fqn, {}), item.path, Reference(own_name(item, key, fqn)))
        unknown = [param for group in saved.groups for param in group["params"] if fqn_of(param) is None]
        if unknown:
            self.lost.append((f"{prefix}.{PARAM_GROUPS}", why_unknown(unknown[0])))
        groups: list[dict[str, JSON]] = []
        for index, group in enumerate(saved.groups if not unknown else ()):
            settings = {
                setting: encode(value, f"{key}.{PARAM_GROUPS}.{index}.{setting}", self.tensors)
                for setting, value in group.items()
                if setting != "params" and self._can_load(f"{prefix}.{PARAM_GROUPS}.{index}.{setting}", value)
            }
            alike = (other for other in groups if {**other, "params": []} == {**settings, "params": []})
            into = next(alike, None) if saved.is_flattened else None  # a flattened state has a group per parameter
            if into is None:
                groups.append(into := {**settings, "params": []})
            into["params"] += [fqn_of(param) for param in group["params"]]
        if groups:  # without groups, no job could load the values
            values = {fqn: encode(with_lists(of), f"{key}.values.{fqn}", self.tensors) for fqn, of in states.items()}
            self.trees[key] = {PARAM_GROUPS: groups, "values": values, "shared": {}}
        elif states:
            self.lost.append((f"{prefix}.state", "the settings of its parameters are missing"))

    def _check(self, value: Any, name: str) -> None:
        """Raise SaveError if a value cannot be loaded."""
        encode(value, name, None if self.tensors is None else {})

    def _can_load(self, name: str, value: Any) -> bool:
        try:
            self._check(value, name)
        except SaveError as error:
            self.lost.append((name, str(error)))
            return False
        return True
