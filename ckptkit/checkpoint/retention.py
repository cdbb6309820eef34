"""Decides which checkpoints to keep, and why. A pure function of the policy and the committed checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ckptkit.checkpoint.run.inventory import rank_by
from ckptkit.errors import UsageError
from ckptkit.formats.own.record import CommitRecord
from ckptkit.units import counted, format_size, parse_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Sets the limits of rotation, and the checkpoints that are exempt from these limits.

    `max_num` and `max_mem` are limits; without them, nothing is ever deleted. `keep_every`, `keep_daily` and
    `keep_best` exempt checkpoints from both limits. The newest checkpoint, pinned checkpoints, and the checkpoint that
    the run was resumed from are always exempt.

    Attributes:
        max_num: Keep this many of the newest checkpoints, plus older checkpoints that are exempt.
        max_mem: Keep the total size at or below this: "1TB" is 10^12 bytes, "1TiB" is 2^40. Counts every committed
            checkpoint, including exempt ones, but not the commit records. The oldest are deleted first.
        keep_every: Keep each checkpoint whose step is a multiple of this number.
        keep_best: Keep the `count` best checkpoints by a metric: (metric, "min" or "max", count). If `count` is
            omitted, it is 1.
        keep_daily: Keep the newest checkpoint of each of the last `keep_daily` days that have a checkpoint. Days are in
            UTC, and are taken from the time in the commit record.
    """

    max_num: int | None = None
    max_mem: int | str | None = None
    keep_every: int | None = None
    keep_best: tuple[str, str] | tuple[str, str, int] | None = None
    keep_daily: int | None = None

    def __post_init__(self) -> None:
        for name, what in (("max_num", "keep all checkpoints"), ("keep_every", "exempt no steps"),
                           ("keep_daily", "exempt no days")):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise UsageError(f"{name} is {value!r}, expected an integer of at least 1. To {what}, omit it.")
        if self.max_mem is not None:
            nbytes = parse_size(self.max_mem, "max_mem")
            if nbytes < 1:
                raise UsageError(f"max_mem is {self.max_mem!r}, expected more than 0 bytes. For no limit, omit it.")
            object.__setattr__(self, "max_mem", nbytes)
        if self.keep_best is not None:
            object.__setattr__(self, "keep_best", _checked_best(self.keep_best))

    @classmethod
    def recorded(cls, stated: Mapping[str, Any]) -> RetentionPolicy:
        """Return the policy that a commit record contains.

        Raises:
            UsageError: The policy has a rule that this version does not know, or an invalid value.
        """
        fields = {name: value for name, value in stated.items() if value is not None}
        unknown = sorted(fields.keys() - set(cls.__slots__))
        if unknown:
            raise UsageError(
                f"the run's own policy has {', '.join(unknown)}, which this version of ckptkit can't apply."
            )
        return cls(**fields)

    def with_exemptions_of(self, other: RetentionPolicy) -> RetentionPolicy:
        """Return a copy of this policy in which unset exemptions (`keep_...`) are taken from `other`."""
        silent = [name for name in self.__slots__ if name.startswith("keep_") and getattr(self, name) is None]
        return replace(self, **{name: getattr(other, name) for name in silent})

    @property
    def exemptions(self) -> tuple[str, ...]:
        """Phrases that say what is kept regardless of the limits."""
        best = self.keep_best and f"keeps the best by {self.keep_best[0]} ({self.keep_best[1]})"
        every = self.keep_every and f"keeps every {self.keep_every} steps"
        daily = self.keep_daily and f"keeps the newest of each of the last {self.keep_daily} days"
        return tuple(str(words) for words in (every, best, daily) if words)

    @property
    def objective(self) -> tuple[str, str] | None:
        """The (metric, mode) that defines "best", for the commit record."""
        return None if self.keep_best is None else (self.keep_best[0], self.keep_best[1])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _checked_best(given: object) -> tuple[str, str, int]:
    if isinstance(given, str):
        raise UsageError(
            f"keep_best is {given!r}, expected a metric and a mode: keep_best=({given!r}, 'min'), or 'max'."
        )
    value = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(value) == 2:
        value = (*value, 1)
    if len(value) != 3 or not isinstance(value[0], str) or not value[0] or value[1] not in ("min", "max"):
        raise UsageError(
            f"keep_best is {given!r}, expected (metric, 'min' or 'max', count), for example ('val_loss', 'min', 2)."
        )
    count = value[2]
    if not _is_count(count):
        raise UsageError(f"keep_best keeps {count!r}, expected an integer of at least 1. To keep none, omit keep_best.")
    return value[0], str(value[1]), count


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to keep one checkpoint, and why."""

    name: str
    step: int
    nbytes: int
    keep: bool
    reasons: tuple[str, ...]

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


def decide(
    records: Sequence[CommitRecord], policy: RetentionPolicy, *, protected: Mapping[str, str] | None = None
) -> list[Decision]:
    """Decide for each checkpoint whether to keep it. The decisions are in the order of `records`.

    Args:
        records: The committed checkpoints, newest last, as in `Inventory.committed`.
        protected: Names of checkpoints that must stay, each with the reason: pinned, resumed from, being read.
    """
    exempt = _exempt(records, policy, protected or {})
    doomed: dict[str, str] = {}
    kept = "no limit set" if policy.max_num is None and policy.max_mem is None else "within the limits"
    if policy.max_num is not None:
        newest = "the newest" if policy.max_num == 1 else f"the {policy.max_num} newest"
        for record in records[::-1][policy.max_num :]:
            if record.name not in exempt:
                doomed[record.name] = f"older than {newest} (max_num)"
    if policy.max_mem is not None:
        limit = int(policy.max_mem)
        total = sum(record.total_bytes for record in records if record.name not in doomed)
        for record in records:  # oldest first
            if total > limit and record.name not in exempt and record.name not in doomed:
                doomed[record.name] = f"the total of {format_size(total)} exceeds {format_size(limit)} (max_mem)"
                total -= record.total_bytes
    return [
        Decision(
            record.name,
            record.step,
            record.total_bytes,
            record.name not in doomed,
            (doomed[record.name],) if record.name in doomed else tuple(exempt.get(record.name, (kept,))),
        )
        for record in records
    ]


def warn_of_excess(decisions: Sequence[Decision], policy: RetentionPolicy | None) -> None:
    """Log a warning if the checkpoints that are kept exceed `max_mem`."""
    kept = [item for item in decisions if item.keep]
    total, limit = sum(item.nbytes for item in kept), policy.max_mem if policy is not None else None
    if limit is not None and total > int(limit):
        logger.warning(
            "%s are kept, more than max_mem=%s, because %s exempt from the limit (%s). Set max_mem to several times "
            "the size of one checkpoint.",
            format_size(total),
            format_size(int(limit)),
            counted(len(kept), "checkpoint", "are"),
            "; ".join(f"{item.name}: {item.reasons[0]}" for item in kept[-4:]),
        )


def _exempt(
    records: Sequence[CommitRecord], policy: RetentionPolicy, protected: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the checkpoints that are exempt from all limits: name to reasons."""
    exempt: dict[str, list[str]] = {record.name: ["the newest"] for record in records[-1:]}
    for name in protected.keys() & {record.name for record in records}:
        exempt.setdefault(name, []).append(protected[name])
    if policy.keep_best is not None:
        metric, mode, count = _checked_best(policy.keep_best)
        for place, record in enumerate(rank_by(records, metric, mode)[:count], 1):
            which = "the best" if place == 1 else f"number {place}"
            exempt.setdefault(record.name, []).append(f"{which} by {metric} ({record.metrics[metric]:g})")
    if policy.keep_every is not None:
        for record in records:
            if record.step % policy.keep_every == 0:
                exempt.setdefault(record.name, []).append(f"a multiple of {policy.keep_every} (keep_every)")
    if policy.keep_daily is not None:
        days = {
            record.name: datetime.fromtimestamp(record.created, timezone.utc) for record in records if record.created
        }
        newest = {day.date().isoformat(): name for name, day in days.items()}
        for day in sorted(newest)[-policy.keep_daily :]:
            exempt.setdefault(newest[day], []).append(f"the newest of {day} (keep_daily)")
    return exempt
