"""Collects all mismatches between a checkpoint and a training state before anything is changed."""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.errors import CheckpointMismatchError
from ckptkit.units import first_few

logger = logging.getLogger(__name__)
_SHOWN = 5  # names of each kind in the message; the log has all
MANAGER = "CheckpointManager.load"

Sides = Mapping[str, tuple[str, tuple[int, ...]]]
"""Maps a tensor's name to (dtype, shape)."""


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Selects parameters by globs, or by a predicate on the FQN. By default, selects all parameters."""

    include: Sequence[str] | Callable[[str], bool] = ()
    exclude: Sequence[str] | Callable[[str], bool] = ()

    def __call__(self, fqn: str) -> bool:
        return (not self.include or _matches(self.include, fqn)) and not (self.exclude and _matches(self.exclude, fqn))

    def idle(self, fqns: Collection[str]) -> list[str]:
        """Return the globs and predicates that match none of `fqns`, as text for messages."""
        found = []
        for name, rule in (("include", self.include), ("exclude", self.exclude)):
            if callable(rule):
                idle = [getattr(rule, "__name__", "the predicate")] if name == "include" else []
            else:
                idle = [rule] if isinstance(rule, str) and rule else list(rule)
            found += [
                f"{name}={glob!r}" for glob in idle
                if not any(_matches(rule if callable(rule) else [glob], fqn) for fqn in fqns)
            ]  # fmt: skip
        return found

    @property
    def takes_all(self) -> bool:
        return not self.include and not self.exclude


def _matches(rule: Sequence[str] | Callable[[str], bool], fqn: str) -> bool:
    if callable(rule):
        return bool(rule(fqn))
    return any(fnmatch.fnmatchcase(fqn, glob) for glob in ([rule] if isinstance(rule, str) else rule))


@dataclass(slots=True)
class Mismatches:
    """Collects mismatches by section of the state ("model", "optimizer", "extra.ema", ...)."""

    missing: dict[str, list[str]] = field(default_factory=dict)  # names that the checkpoint lacks
    unexpected: dict[str, list[str]] = field(default_factory=dict)  # names that the training state lacks
    shapes: dict[str, list[str]] = field(default_factory=dict)  # shapes, dtypes, others: descriptions
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)
    models: Sequence[str] = ()  # the checkpoint's models, if the training state has none with such a name

    def add(self, kind: str, section: str, items: Iterable[str]) -> None:
        """Add mismatches of a kind (the name of a field: "missing", "shapes", ...) in a section."""
        found = list(items)
        if found:
            getattr(self, kind).setdefault(section, []).extend(found)

    def check(self, url: str, *, strict: bool, elsewhere: bool = False, call: str = MANAGER) -> None:
        """Raise CheckpointMismatchError on any mismatch. With strict=False, accept missing and unexpected names.

        The message shows the first five names of each kind, and the log (INFO) all of them.

        Args:
            elsewhere: Accept unexpected names if nothing else differs, because other ranks may have these names.
            call: The function that the user called. The message suggests options of this function. `include` and
                `optimizer` are suggested only for MANAGER.
        """
        kinds = {
            "with a different shape": self.shapes,
            "with a different dtype": self.dtypes,
            "incompatible": self.others,
        }
        if strict:
            kinds = {"missing in the checkpoint": self.missing, "unexpected": self.unexpected, **kinds}
        if elsewhere and not any(sections for sections in kinds.values() if sections is not self.unexpected):
            return
        lines = []
        for title, sections in kinds.items():
            for section, names in sections.items():
                items = [_quoted(item) for item in names]
                lines.append(f"{section}: {len(items)} {title}: {first_few(items, _SHOWN)}")
                if len(items) > _SHOWN:
                    logger.info("%s: %s: %d %s: %s", url, section, len(items), title, ", ".join(items))
        if lines:
            advice = ["convert_dtype=True casts"] if self.dtypes else []
            if self.missing or self.unexpected:
                found = {**self.missing, **self.unexpected}
                texts = ["strict=False loads what matches"] * strict
                if call == MANAGER and any(section.startswith("model") for section in found):
                    texts.append("include=[...] names what to load")  # of the models; the rest is always loaded
                if call == MANAGER and any(section.startswith("optimizer") for section in found):
                    texts.append('optimizer="skip" skips the optimizer')
                advice[:0] = [", ".join(texts)] if texts else []
            raise CheckpointMismatchError(
                f"{url} does not fit the training state; nothing was loaded.\n  "
                + "\n  ".join(sorted(lines))
                + (f"\n{_choose(self.models)}" if self.models else "")
                + (f"\nOptions of {call}: {'; '.join(advice)}." if advice else "")
            )

    def everything(self, kind: str) -> list[str]:
        """Return the mismatches of one kind in all sections, as "section.item"."""
        return [f"{section}.{item}" for section, items in getattr(self, kind).items() for item in items]


def _choose(models: Sequence[str]) -> str:
    return (
        f"The checkpoint contains the models {first_few(models)}. To load one of them, give the live model its name: "
        f"TrainState(model={{{models[0]!r}: model}})."
    )


def _quoted(item: str) -> str:
    """Return a name with control characters or line breaks as a Python string literal, and any other name unchanged."""
    return item if item.isprintable() else repr(item)


def in_all(tables: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return, by section, the names that are in the tables of all ranks.

    A name with a reason, as in "NAME (why)", is returned even if it is in the table of only one rank.
    """
    found: dict[str, list[str]] = {}
    for section in dict.fromkeys(section for table in tables for section in table):
        counts = Counter(item for table in tables for item in set(table.get(section, ())))
        items = dict.fromkeys(item for table in tables for item in table.get(section, ()))
        left = [item for item in items if counts[item] == len(tables) or " (" in item]
        if left:
            found[section] = left
    return found


def match_tensors(
    found: Mismatches, section: str, wanted: Sides, saved: Sides, *, convert_dtype: bool, where: str = ""
) -> list[str]:
    """Compare names, shapes and dtypes of the live tensors (`wanted`) with those of the checkpoint (`saved`).

    Returns the names of the tensors that can be loaded. Adds the mismatches to `found`.

    Args:
        where: If the saved tensors are for this rank only: the rank, as " (rank 0)". See `in_all`.
    """
    found.add("missing", section, (name for name in wanted if name not in saved))
    found.add("unexpected", section, (f"{name}{where}" for name in saved if name not in wanted))
    good = []
    for name, (dtype, shape) in wanted.items():
        if name not in saved:
            continue
        saved_dtype, saved_shape = saved[name]
        if saved_shape != shape:
            found.add("shapes", section, [f"{name} ({list(saved_shape)} in the checkpoint, expected {list(shape)})"])
        elif saved_dtype != dtype and not convert_dtype:
            found.add("dtypes", section, [f"{name} ({saved_dtype} in the checkpoint, expected {dtype})"])
        else:
            good.append(name)
    return good
