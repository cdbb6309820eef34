"""Lists the checkpoints of a run, their states, and which checkpoints rotation would delete."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.arguments import Location, location, wrong
from ckptkit.checkpoint.retention import Decision, RetentionPolicy, warn_of_excess
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.checkpoint.run.delete import plan_rotation
from ckptkit.checkpoint.run.inventory import Attempt, Committed, Inventory, check_metric, list_checkpoints, runs_inside
from ckptkit.checkpoint.run.unnamed import unnamed_files
from ckptkit.errors import CheckpointNotFoundError, UsageError, command_line
from ckptkit.formats.own.record import LATEST_HINT, RECORD_NAME, step_of_name
from ckptkit.offline.report import plain
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store
from ckptkit.units import first_few

_log = logging.getLogger(__name__)

SCHEMA = "ckptkit.ls/1"
_RESUMED = "the last job resumed from it and kept it; that job has ended, so the next save or prune deletes it"


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of `ckptkit ls`.

    Attributes:
        state: "committed", "in progress", "abandoned" or "skipped".
        keep: Whether rotation keeps the checkpoint. None if rotation does not apply.
        why: The reasons for `keep`. For an entry that is not committed, a description of the entry.
        kept_files: Files that would remain after rotation deletes this checkpoint, because the checkpoint's commit
            record does not name them.
        age_s: Seconds since the save. None if unknown. Wrong if the clocks of this machine and of the job's machine
            differ.
        absent_before: Number of checkpoints that were saved between the previous entry and this entry but no longer
            exist, for example because of rotation.
        damaged: Whether a skipped entry is probably a damaged checkpoint: its commit record is unreadable, or belongs
            to a different checkpoint.
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
    absent_before: int = 0
    kept_files: tuple[str, ...] = ()
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries of a run: first the committed checkpoints, newest last, then all other entries.

    Attributes:
        total_bytes: Total size of all committed checkpoints.
        absent: Number of checkpoints that were saved but no longer exist, according to the save counters.
    """

    url: str
    checkpoints: tuple[Listed, ...]
    foreign: tuple[str, ...]
    total_bytes: int
    policy: RetentionPolicy | None
    absent: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the listing as plain JSON values (schema "ckptkit.ls/1")."""
        names = ("url", "total_bytes", "absent", "policy", "checkpoints", "foreign")
        return {"schema": SCHEMA, **{name: plain(getattr(self, name)) for name in names}}


def list_run(
    url: Location,
    *,
    policy: RetentionPolicy | None = None,
    recorded: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Listing:
    """Return the checkpoints under `url`. Reads only their commit records.

    Args:
        policy: The rotation policy. None uses the policy that is recorded in the newest checkpoint.
        recorded: Also apply the recorded exemptions (`keep_...`) that `policy` does not set.
        storage_options: Options for the fsspec file system of a remote URL.

    Raises:
        UsageError: `policy` keeps the best checkpoints by a metric that no checkpoint has. Also raised if the recorded
            exemptions are to be added to `policy`, but this version cannot apply the recorded policy.
        CheckpointNotFoundError: The directory does not exist, or does not contain a ckptkit run.
    """
    url = location("url", url)
    if policy is not None and not isinstance(policy, RetentionPolicy):
        raise wrong("policy", policy, "RetentionPolicy(max_num=3, ...)")
    root = open_store(url, storage_options=storage_options)
    view = snapshot(root)
    inventory = list_checkpoints(root, view=view)
    if not (inventory.committed or inventory.in_progress or inventory.abandoned or inventory.skipped):
        raise CheckpointNotFoundError(nothing_of_ours(url, inventory, root, storage_options=storage_options))
    ahead = look_ahead(root, view, inventory, policy, recorded=recorded)
    warn_of_excess(ahead.decisions, ahead.policy)
    gaps, last = {}, 0  # how many saves are missing between each checkpoint and the previous one that still exists
    for saved in sorted(inventory.committed, key=lambda item: item.record.sequence):
        gaps[saved.name] = max(0, saved.record.sequence - last - 1)
        last = saved.record.sequence
    now = time.time()
    rows = [
        *(
            _committed(item, decision, now, gaps[item.name], ahead.kept_files.get(item.name, ()))
            for item, decision in zip(inventory.committed, ahead.decisions, strict=True)
        ),
        *(_attempt(item, "in progress") for item in inventory.in_progress),
        *(_attempt(item, "abandoned") for item in inventory.abandoned),
    ]
    for item in inventory.skipped:
        rows.append(Listed(item.path, "skipped", why=item.reason, kept_files=item.kept_files, damaged=item.damaged))
    total = sum(item.record.total_bytes for item in inventory.committed)
    return Listing(url, tuple(rows), inventory.foreign, total, ahead.policy, sum(gaps.values()))


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a rotation would do if it ran now, for `ls` and `prune --dry-run`.

    Attributes:
        policy: The applied policy. None if there is no policy that can be applied, so that all checkpoints are kept.
        decisions: One decision per committed checkpoint, in the run's order.
        kept_files: For each checkpoint to delete, the files that would remain in its directory, because its commit
            record does not name them.
    """

    policy: RetentionPolicy | None
    decisions: tuple[Decision, ...]
    kept_files: Mapping[str, tuple[str, ...]]


def look_ahead(
    root: Store, view: Store, inventory: Inventory, given: RetentionPolicy | None, *, recorded: bool
) -> Outlook:
    """Return what a rotation would do if it ran now.

    Without a given policy, applies the policy that the run has recorded. If this version does not know one of its
    rules, logs a warning and applies no policy. With `recorded`, adds the exemptions (`keep_...`) of the recorded
    policy to a given policy.

    Args:
        view: The snapshot of `root` from which the inventory was made.

    Raises:
        UsageError: The given policy keeps the best checkpoints by a metric that no checkpoint has. Also raised if the
            recorded exemptions are to be added to it, but this version cannot apply the recorded policy.
    """
    policy = given
    if given is not None and given.keep_best is not None:  # a misspelt metric must not delete the best checkpoint
        check_metric(inventory, given.keep_best[0])
    stated = inventory.latest.record.extra.get("retention") if inventory.latest is not None else None
    if isinstance(stated, Mapping) and (given is None or recorded):
        try:
            own = RetentionPolicy.recorded(stated)
            policy = own if given is None else given.with_exemptions_of(own)
        except UsageError as error:
            if given is not None:
                raise UsageError(f"{error} To ignore the recorded policy: --forget-recorded.") from error
            _log.warning("%s: %s No recorded limit or exemption is applied. Use a newer ckptkit.", root.url, error)
    origin = inventory.latest.record.extra.get("resumed_from") if inventory.latest else None
    decisions, kept = [], {}
    for item, decision in zip(
        inventory.committed, plan_rotation(inventory, root, policy or RetentionPolicy()), strict=True
    ):
        more: tuple[str, ...] = ("on a branch that was rolled back",) if item.superseded else ()
        if not decision.keep:
            kept[item.name] = tuple(unnamed_files(view, item.path, item.record))
            if item.name == origin:
                more += (_RESUMED,)
        decisions.append(replace(decision, reasons=decision.reasons + more))
    return Outlook(policy, tuple(decisions), kept)


def _committed(item: Committed, decision: Decision, now: float, gap: int, kept_files: tuple[str, ...]) -> Listed:
    record, why = item.record, decision.reason
    if kept_files:
        why += f"; these files stay, because its record does not name them: {first_few(kept_files, 3)}"
    age_s = max(0.0, now - record.created) if record.created else None
    return Listed(
        item.name, "committed", record.step, record.total_bytes, record.state_dict_type, record.world_size,
        dict(record.metrics), record.created or None, age_s, decision.keep, why, gap, kept_files,
    )  # fmt: skip


def _attempt(item: Attempt, state: str) -> Listed:
    owner = f"by {item.owner}" if item.owner is not None else "by an unknown process"
    why = f"being written {owner}" if state == "in progress" else f"left {owner}; the next save or prune removes it"
    return Listed(item.name, state, step_of_name(item.name), why=why)


def nothing_of_ours(
    url: str, inventory: Inventory, root: Store, *, storage_options: Mapping[str, Any] | None = None
) -> str:
    """Return a message that says what `url` contains instead of a run, and which command to use.

    Raises:
        CheckpointNotFoundError: `url` is a name such as RUN/latest or RUN/1200, but the run has no such checkpoint.
    """
    from ckptkit.formats.detect import not_there, real_url  # imported lazily, because it imports numpy

    above, _, name = root.url.rpartition("/")
    if is_directory(root):
        root = open_store(real_url(url))
    found = root.info("")
    if found is not None and found.kind == "symlink":  # to nothing
        found = None
    is_file = found is not None and found.kind != "directory"
    if found is None:
        is_one = resolve_url(url, storage_options=storage_options) != url
    else:
        is_one = name == LATEST_HINT if is_file else root.info(RECORD_NAME) is not None
    if is_one:
        return f"{url} is one checkpoint; to list its run: {command_line('ls', above)}"
    if found is None:
        missing = not_there(url, root.url) if is_directory(root) else f"{url} does not exist."
        return f"{missing} The root of a run is the directory that contains step_... directories."
    look = f"To inspect another system's checkpoint: {command_line('inspect', url)}"
    if is_file:
        return f"{url} is a file, not the root of a run. {look}"
    if found_here := [item.path for item in inventory.skipped + inventory.in_progress]:
        see = command_line("ls", "--all", url)
        return f"{url} contains no usable checkpoint, only {first_few(found_here, 1)}. To see what is wrong: {see}"
    if not inventory.foreign:
        return f"{url} is empty: it contains no checkpoint."
    if runs := runs_inside(root, inventory):
        look = f"To list the run in it: {command_line('ls', url.rstrip('/') + '/' + runs[0])}"
    return f"{url} contains no ckptkit checkpoint. It contains {first_few(inventory.foreign)}. {look}"
