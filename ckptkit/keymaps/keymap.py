"""Applies, checks and inverts key maps, which map one system's tensor names to another system's names.

    mapped = key_map.apply({name: Target.of(entry, name) for ...}, config=config)

The result consists of `Target`s. A `Target` only lists boxes of source tensors. Applying a map reads no tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.keymaps.rules import Rule, RuleState, check_rule, inverse_rules, run


@dataclass(frozen=True, slots=True)
class Mapped:
    """The result of applying a key map.

    Attributes:
        targets: The resulting tensors by name.
        dropped: The names of the dropped source tensors, each with the reason (a rule, or the map's `rest`).
        unused: The rules that matched no tensor, as texts such as "rule 2 (drop rope_cache)".
    """

    targets: Mapping[str, Target]
    dropped: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NameMap:
    """Rules that are applied in order. Each rule is applied to the results of the rules before it.

    Attributes:
        name: The map's name for --key-map.
        rules: See `ckptkit.keymaps.rules`.
        rest: What to do with tensors that no rule matches: "keep" their names, "drop" the tensors, or "refuse" (raise).
        note: A one-sentence description.
        back: The rules of the inverse map. () if they can be computed by inverting `rules`. For example, a map that
            accepts both old and new names needs `back`, because its inverse writes only new names.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    rest: Literal["keep", "drop", "refuse"] = "keep"
    note: str = ""
    back: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for number, rule in enumerate(self.rules, start=1):
            try:
                check_rule(rule)
            except UsageError as error:
                raise UsageError(f"key map {self.name!r}, rule {number} ({_kind(rule)}): {error}") from error

    def apply(self, targets: Mapping[str, Target], *, config: Mapping[str, Any] | None = None) -> Mapped:
        """Apply the rules to the tensors `targets`.

        Args:
            config: The model's config.json. Needed only if rules use its keys.

        Raises:
            CheckpointMismatchError: The map does not fit the tensors. For example, two names collide, a tensor that a
                rule needs is missing, or `rest` is "refuse" and no rule matches a tensor. The message lists all errors.
            UsageError: A rule uses a key that `config` lacks.
        """
        work = RuleState(dict(targets), config or {})
        unused: list[str] = []
        for number, rule in enumerate(self.rules, start=1):
            faults = len(work.faults)
            if run(rule, work) == 0 and len(work.faults) == faults:
                unused.append(f"rule {number} ({_kind(rule)} {_source(rule)})")
            work.faults[faults:] = [f"rule {number} ({_kind(rule)}): {text}" for text in work.faults[faults:]]
        rest = [name for name in work.targets if name not in work.touched]
        if self.rest == "refuse":
            work.faults += [f"no rule matches {name!r} {list(work.targets[name].shape)}" for name in rest]
        elif self.rest == "drop":
            work.drop(rest, f"no rule of key map {self.name!r} matches it")
        if work.faults:
            raise CheckpointMismatchError(
                f"key map {self.name!r} does not fit this checkpoint:\n  " + "\n  ".join(work.faults)
            )
        check_one_to_one(targets, work.targets, work.dropped_numel)
        return Mapped(work.targets, work.dropped, tuple(unused))

    def inverse(self) -> NameMap:
        """Return the map that undoes this map. Raises UsageError if a rule cannot be inverted."""
        rules = self.back or inverse_rules(self.name, self.rules)
        return NameMap(f"inverse of {self.name}", rules, self.rest)

    def then(self, other: NameMap) -> NameMap:
        """Return a map that applies the rules of this map, then the rules of `other`.

        `other.rest` says what to do with tensors that no rule of the two maps matches.
        """
        return NameMap(f"{self.name}, then {other.name}", self.rules + other.rules, other.rest)


def check_one_to_one(
    before: Mapping[str, Target], after: Mapping[str, Target], dropped: Mapping[str, int] | None = None
) -> None:
    """Check that each source element is used exactly once or dropped, and that every resulting tensor is complete.

    Only the numbers of elements are compared, not their positions.

    Args:
        dropped: The number of dropped elements of each source.

    Raises:
        CheckpointMismatchError: The check failed. The message lists the sources and targets that are wrong.
    """
    wanted: dict[str, int] = {}
    found = dict(dropped or {})
    faults: list[str] = []
    for target in before.values():
        for part in target.parts:
            wanted[part.source] = wanted.get(part.source, 0) + part.source_box.numel
    for target in after.values():
        filled = 0
        for part in target.parts:
            found[part.source] = found.get(part.source, 0) + part.source_box.numel
            filled += part.target_box.numel
        if filled != target.numel:
            faults.append(f"target {target.name!r}: {filled} of {target.numel} elements are filled")
    for source, numel in wanted.items():
        used = found.get(source, 0)
        if used != numel:
            faults.append(f"source {source!r}: {used} of {numel} elements are used")
    if faults:
        raise CheckpointMismatchError("names do not map one to one:\n  " + "\n  ".join(faults))


def _kind(rule: Rule) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(rule).__name__).lower()


def _source(rule: Rule) -> str:
    return ", ".join(str(p) for p in rule.source) if isinstance(rule.source, tuple) else str(rule.source)
