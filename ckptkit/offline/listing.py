"""The checkpoints of a run: what each is, in which state, and what rotation makes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.checkpoint.delete import plan_rotation
from ckptkit.checkpoint.inventory import Attempt, Committed, Inventory, list_checkpoints
from ckptkit.checkpoint.retention import Decision, RetentionPolicy
from ckptkit.errors import CheckpointNotFoundError
from ckptkit.storage.store import open_store

__all__ = ["Listed", "Listing", "list_run", "policy_of"]

SCHEMA = "ckptkit.ls/1"


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `ckptkit ls`.

    Attributes:
        state: "committed", "in progress", "abandoned" or "skipped".
        keep: What rotation would do; None where it has no say.
        why: The reasons; for what is no checkpoint, what it is.
        age_s: Since it was saved, by the clocks of the machines; None where unknown.
    """

    name: str
    state: str
    step: int | None = None
    nbytes: int | None = None
    type: str = ""
    world_size: int | None = None
    metrics: Mapping[str, float] | None = None
    created: float | None = None
    age_s: float | None = None
    keep: bool | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """All of a run, the newest last; `total_bytes` of what is committed."""

    url: str
    checkpoints: tuple[Listed, ...]
    foreign: tuple[str, ...]
    total_bytes: int
    policy: RetentionPolicy | None

    def to_json(self) -> dict[str, Any]:
        """Return the listing as plain JSON values (schema "ckptkit.ls/1")."""
        rows = [{name: getattr(row, name) for name in Listed.__slots__} for row in self.checkpoints]
        policy = None if self.policy is None else {n: getattr(self.policy, n) for n in RetentionPolicy.__slots__}
        return {
            "schema": SCHEMA,
            "url": self.url,
            "total_bytes": self.total_bytes,
            "policy": policy,
            "checkpoints": rows,
            "foreign": list(self.foreign),
        }


def list_run(
    url: str, *, policy: RetentionPolicy | None = None, storage_options: Mapping[str, Any] | None = None
) -> Listing:
    """Return the checkpoints below `url`, reading their commit records only.

    Args:
        policy: What to decide by; None takes the policy that the newest checkpoint recorded.

    Raises:
        CheckpointNotFoundError: There is no such directory, or nothing of ours in it.
    """
    root = open_store(url, storage_options=storage_options)
    inventory = list_checkpoints(root)
    if not (inventory.committed or inventory.in_progress or inventory.abandoned or inventory.skipped):
        raise CheckpointNotFoundError(_nothing(url, inventory, root.info("") is not None))
    policy = policy or policy_of(inventory)
    decisions = {d.name: d for d in plan_rotation(inventory, root, policy or RetentionPolicy())}
    now = time.time()
    rows = [
        *(_committed(item, decisions[item.name], now) for item in inventory.committed),
        *(_attempt(item, "in progress") for item in inventory.in_progress),
        *(_attempt(item, "abandoned") for item in inventory.abandoned),
        *(Listed(item.path, "skipped", why=item.reason) for item in inventory.skipped),
    ]
    total = sum(item.record.total_bytes for item in inventory.committed)
    return Listing(url, tuple(rows), inventory.foreign, total, policy)


def policy_of(inventory: Inventory) -> RetentionPolicy | None:
    """Return the retention policy that the newest checkpoint was saved under, None where it recorded none."""
    stated = inventory.latest.record.extra.get("retention") if inventory.latest is not None else None
    if not isinstance(stated, Mapping):
        return None
    fields = {name: stated[name] for name in RetentionPolicy.__slots__ if stated.get(name) is not None}
    if isinstance(fields.get("keep_best"), list):
        fields["keep_best"] = tuple(fields["keep_best"])
    try:
        return RetentionPolicy(**fields)
    except (TypeError, ValueError):
        return None  # a newer ckptkit's policy: decide nothing by it


def _committed(item: Committed, decision: Decision, now: float) -> Listed:
    record = item.record
    why = decision.reason + ("; of a branch that was rolled back" if item.superseded else "")
    return Listed(
        item.name,
        "committed",
        record.step,
        record.total_bytes,
        record.state_dict_type,
        record.world_size,
        dict(record.metrics),
        record.created or None,
        max(0.0, now - record.created) if record.created else None,
        decision.keep,
        why,
    )


def _attempt(item: Attempt, state: str) -> Listed:
    owner = f"by {item.owner}" if item.owner is not None else "by an unknown process"
    why = f"being written {owner}" if state == "in progress" else f"left {owner}; the next save, or prune, removes it"
    return Listed(item.name, state, why=why)


def _nothing(url: str, inventory: Inventory, there: bool) -> str:
    if not there:
        return (
            f"{url}: there is no such directory. Give the root of a run, the directory that holds step_... directories."
        )
    others = f" It holds {', '.join(inventory.foreign[:5])}." if inventory.foreign else " It is empty."
    return (
        f"{url} holds no checkpoint of ckptkit.{others} To look at another system's checkpoint: ckptkit inspect {url}"
    )
