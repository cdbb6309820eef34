"""Compares the settings of saved and live parameter groups."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.checkpoint.state.optimizer.equal import is_real, number, same_values
from ckptkit.checkpoint.state.optimizer.tree import GROUP_NAMES
from ckptkit.checkpoint.state.values import JSON, decode
from ckptkit.units import first_few

MODE = "train_mode"  # schedule-free optimizers' setting, which their methods train() and eval() change
IMPLEMENTATION_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that affect how a step is computed, but not its result. A load keeps their live values."""


@dataclass(slots=True)
class GroupChanges:
    """The settings that a load gives to an optimizer's parameter groups, and what does not match.

    A group's settings are its values other than its parameters, such as lr.
    """

    settings: list[dict[str, Any]]  # the new settings for each live group
    order: list[int | None] = field(default_factory=list)  # by live group: the first saved group with its parameters
    saved: int = 0  # number of saved groups
    missing: list[str] = field(default_factory=list)  # parameters and groups that the checkpoint's optimizer lacks
    unexpected: list[str] = field(default_factory=list)  # parameters and groups that the live optimizer lacks
    notes: list[str] = field(default_factory=list)  # messages about settings that the load adds, keeps or rounds
    switches: list[str] = field(default_factory=list)  # boolean settings whose saved and live values differ
    conflicts: list[str] = field(default_factory=list)  # saved groups that can't be merged, values that can't be set


def group_changes(
    optimizer: Any,
    names: Mapping[int, str],
    saved: Sequence[Mapping[str, JSON]],
    tensor: Callable[[str], Any],
    what: str,
) -> GroupChanges:
    """Return the changes that give each live group the settings of the saved groups with the same parameters.

    Parameters are matched by name, so groups may have been reordered, split or merged since the save. If the parameters
    of one live group come from saved groups with different settings, this is a conflict.

    A live group without parameters gets the settings of the saved group at the same position, if this rank has no
    parameter of that saved group (they may be on other pipeline stages). Otherwise, it gets the settings of the first
    saved group that has no parameters and whose settings no other live group gets.
    """
    live_names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved_of = {fqn: i for i, group in enumerate(saved) for fqn in group["params"]}
    settings = [{k: decode(v, tensor) for k, v in g.items() if k not in GROUP_NAMES} for g in saved]
    live = {fqn for fqns in live_names for fqn in fqns}
    here = {i for i, fqns in enumerate(live_names[: len(saved)]) if not fqns and live.isdisjoint(saved[i]["params"])}
    empty = [i for i, group in enumerate(saved) if not group["params"] and i not in here]
    changes = GroupChanges([], saved=len(saved))
    parts: dict[int, list[int]] = {}  # by saved group: the live groups that have its parameters
    for index, fqns in enumerate(live_names):
        sources = dict.fromkeys(saved_of[fqn] for fqn in fqns if fqn in saved_of)
        if not fqns:
            sources = dict.fromkeys([index] if index in here else empty[:1])
            empty = [i for i in empty if i not in sources]
            changes.missing += [] if sources else [f"group {index} without parameters"]
        for source in sources:
            parts.setdefault(source, []).append(index)
        changes.order.append(next(iter(sources), None))
        changes.settings.append(
            _group_settings(changes, optimizer.param_groups[index], index, list(sources), settings, what)
        )
    _check_shared(changes, optimizer.param_groups, what)
    for indices in dict.fromkeys(map(tuple, parts.values())):
        _note_split(changes, optimizer.param_groups, indices, what)
    changes.missing += [fqn for fqns in live_names for fqn in fqns if fqn not in saved_of]
    changes.unexpected = [fqn for fqn in saved_of if fqn not in live]
    changes.unexpected += [f"group {i} without parameters: lr={settings[i].get('lr')}" for i in empty]
    return changes


def _note_split(changes: GroupChanges, live: Sequence[Mapping[str, Any]], indices: Sequence[int], what: str) -> None:
    """Add a note about the settings that differ between the live groups `indices`.

    The groups were one group when they were saved, so the load gives them equal settings.
    """
    replaced = []
    for key, value in changes.settings[indices[0]].items():
        ours = [live[index][key] for index in indices if key in live[index]]
        if not all(same_values(ours[0], other) for other in ours[1:]):
            replaced.append(f"{key}={reprlib.repr(value)} replaces {first_few([*map(reprlib.repr, ours)])}")
    if replaced:
        changes.notes.append(
            f"{what} groups {first_few([*map(str, indices)])} have parameters of one saved group and get its settings: "
            f"{'; '.join(replaced)}. To keep other values, set them in param_groups after the load"
        )


def _check_shared(changes: GroupChanges, live: Sequence[Mapping[str, Any]], what: str) -> None:
    """Add a conflict for each tensor that several live groups share, if the load would set it to different values."""
    import torch

    first: dict[int, tuple[int, Any]] = {}
    for index, (group, new) in enumerate(zip(live, changes.settings, strict=True)):
        for key in new:
            if isinstance(group.get(key), torch.Tensor):
                other, value = first.setdefault(id(group[key]), (index, new[key]))
                if not same_values(value, new[key]):
                    changes.conflicts.append(
                        f"{what} groups {other} and {index} have one tensor as {key} here, but {value!r} and "
                        f"{new[key]!r} in the checkpoint. Give each group its own tensor"
                    )


def _group_settings(
    changes: GroupChanges,
    live: Mapping[str, Any],
    index: int,
    sources: Sequence[int],
    settings: Sequence[Mapping[str, Any]],
    what: str,
) -> dict[str, Any]:
    import torch

    if not sources:
        return {}
    first = settings[sources[0]]
    for other in sources[1:]:
        compared = {key: settings[other].get(key) for key in first if key not in IMPLEMENTATION_SETTINGS}
        if differing := [key for key, value in compared.items() if not same_values(first[key], value)]:
            changes.conflicts.append(
                f"{what} group {index} combines parameters of the saved groups {sources[0]} and {other}, which differ "
                f"in {', '.join(differing)}"
            )
    new: dict[str, Any] = {}
    for key, value in first.items():
        if key in IMPLEMENTATION_SETTINGS:
            if key in live and not same_values(live[key], value):
                changes.notes.append(f"{what} group {index}: kept {key}={live[key]!r}; the checkpoint has {value!r}")
            continue
        if not _fits(live.get(key), value):
            changes.conflicts.append(
                f"{what} group {index}: {key} is {reprlib.repr(value)} in the checkpoint, but {live[key]!r} here"
            )
        elif isinstance(value, bool) and isinstance(live.get(key), bool) and value is not live[key]:
            switched = f"{key}={value} of group {index} (here it is {live[key]})"
            if key == MODE:  # belongs to the saved weights, and the next train() or eval() changes both
                changes.notes.append(f"restored {switched}")
            else:
                changes.switches.append(switched)
        rounded = number(value, live.get(key))
        if isinstance(live.get(key), torch.Tensor) and is_real(value) and not same_values(rounded, value):
            changes.notes.append(
                f"{what} group {index}: {key}={value!r} becomes {rounded!r} in a {live[key].dtype} tensor"
            )
        if key not in live:
            changes.notes.append(f"{what} group {index}: added {key}={value!r} from the checkpoint")
        new[key] = value
    for key in live:
        if key not in first and key not in GROUP_NAMES:
            changes.notes.append(f"{what} group {index}: kept {key}={live[key]!r}; the checkpoint has none")
    return new


def _fits(live: Any, value: Any) -> bool:
    """Return whether a saved setting can replace the live one.

    A number, possibly in a tensor, can replace a number. A tensor can replace a tensor of the same shape, if the live
    tensor's dtype can hold the values. A sequence can replace a sequence of equal length. Other values are not checked.
    """
    import torch

    if isinstance(live, (tuple, list)):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(live)
            and all(_fits(a, b) for a, b in zip(live, value, strict=True))
        )
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        exact = value.dtype == live.dtype or torch.equal(value.to(live.dtype).to(value.dtype), value)
        return exact and (value.numel() == live.numel() == 1 or value.shape == live.shape)
    if isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
        return value.numel() == 1
    if isinstance(live, torch.Tensor) and not (live.is_floating_point() or live.is_complex()):
        return live.numel() == 1 and is_real(value) and float(value).is_integer()
    if isinstance(live, (int, float)) or (isinstance(live, torch.Tensor) and live.numel() == 1):
        return is_real(value)
    return not isinstance(live, torch.Tensor)
