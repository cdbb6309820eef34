"""Lists a run's root: the committed checkpoints, and all other entries, each with the reason why it was skipped."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import operator
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.checkpoint.run.unnamed import deleted_records, named_paths, unnamed_files
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    IncompleteCheckpointError,
    StorageError,
    UnsafePathError,
    UsageError,
)
from ckptkit.formats.own.record import LATEST_HINT, MANIFEST_NAME, CommitRecord, find_record, record_path, step_of_name
from ckptkit.formats.replaceable import may_be_saved
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.lock import STATE_DIRECTORY, Attempts, open_attempts
from ckptkit.storage.open import open_store
from ckptkit.storage.owner import Owner
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.retry import is_outage, patient
from ckptkit.storage.staging import is_abandoned, leftover_of, owner_path, read_owner
from ckptkit.storage.store import FILE_SYSTEM_FOLDERS, Store
from ckptkit.units import first_few

_log = logging.getLogger(__name__)
_NO_CHECKPOINTS = (STATE_DIRECTORY, *FILE_SYSTEM_FOLDERS)
_NONCE = re.compile(r"[0-9a-f]{16}")
_REPLACEMENT = re.compile(r"(.+)@([0-9a-f]{16})")  # "@" cannot be part of a tag
_LATEST = re.compile(r"latest(?:~([0-9]{1,6}))?")
_MAX_LISTINGS = 10
_MAX_NAMED = 3
_MAX_LOOKS = 32
_NO_RECORD = "it has no checkpoint.json: an incomplete copy, or not saved by ckptkit"
_NO_ATTEMPT = "no known save of this run wrote it"
_AGE = operator.attrgetter("record.sequence", "record.step", "record.created", "record.save_id")
_BEST = re.compile(r"best(?::(.+?)(?::(min|max))?)?")


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed checkpoint.

    Attributes:
        path: The directory. It is the checkpoint's name, unless a save that replaced a checkpoint was killed.
        superseded: Whether the run was rolled back to a lower step and saved again after this checkpoint.
    """

    path: str
    record: CommitRecord
    superseded: bool = False

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def step(self) -> int:
        return self.record.step


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save that is running or was abandoned. `owner` is None if unknown."""

    path: str
    name: str
    owner: Owner | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A directory that looks like a checkpoint but is not one.

    Attributes:
        damaged: It may be a checkpoint, but its commit record is unreadable or belongs to another checkpoint.
        unanswered: The record could not be read, because the store failed or denied access.
        kept_files: Foreign files that are left in the directory after its checkpoint was deleted.
        deleted: A checkpoint was deleted from the directory, so a new checkpoint may have this name.
        unknown: The directory has no commit record, and it is not known which save wrote it.
    """

    path: str
    reason: str
    damaged: bool = False
    unanswered: bool = False
    kept_files: tuple[str, ...] = ()
    deleted: bool = False
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """All entries of a run's root.

    Attributes:
        committed: The checkpoints, newest last (see `in_order`).
        in_progress, abandoned: Saves that are running, and saves whose process died.
        skipped: Directories that look like checkpoints but are not.
        foreign: Paths of entries that no save seems to have written.
    """

    url: str
    committed: tuple[Committed, ...] = ()
    in_progress: tuple[Attempt, ...] = ()
    abandoned: tuple[Attempt, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def latest(self) -> Committed | None:
        """The checkpoint to resume from; None if there is none."""
        return self.committed[-1] if self.committed else None

    @property
    def newest_damaged(self) -> Skipped | None:
        """The damaged directory that may have been the latest checkpoint, by the step in its name, or None."""
        last = -1 if self.latest is None else self.latest.step
        found = {step: item for item in self.skipped if item.damaged and (step := step_of_name(item.path)) is not None}
        newest = max(found, default=-1)
        return found[newest] if newest > last else None

    def find(self, name: str) -> Committed | None:
        """Return the committed checkpoint called `name`, or None."""
        return next((item for item in self.committed if item.name == name), None)


@patient()
def list_checkpoints(root: Store, *, view: Store | None = None) -> Inventory:
    """Return the inventory of `root`. Trusts only commit records, not names or dates. Does not import torch."""
    found, names = _list_once(root, view or snapshot(root))
    # If nothing was found, list again: rotation may have deleted the only checkpoint before its record was read.
    for _ in range(_MAX_LISTINGS):
        if found.committed or not names:
            break
        before = names
        found, names = _list_once(root, snapshot(root))
        if names == before:
            break
    return found


def _list_once(root: Store, view: Store) -> tuple[Inventory, list[str]]:
    """Return the inventory of `root`, and the names of all directories that may be checkpoints.

    Reads `view`, a snapshot, or `root` itself for files that may be newer than the snapshot.
    """
    candidates: list[str] = []
    running: list[Attempt] = []
    abandoned: list[Attempt] = []
    foreign: list[str] = []
    odd: list[Skipped] = []
    for item in view.list():
        ours = item.path.startswith(".") and item.path.endswith((".owner", ".part")) and item.kind == "file"
        if ours or item.path in _NO_CHECKPOINTS or (item.path == LATEST_HINT and item.kind == "file"):
            continue
        kept = leftover_of(item.path)
        if kept is not None and item.kind == "directory":
            stated = read_owner(view, owner_path(item.path))
            inside = [] if stated or kept.kind != "tmp" else view.list(item.path, recursive=True)
            if inside and not any(may_be_saved(file.path) for file in inside):
                foreign.append(item.path)  # the attempt's own files are gone, and only foreign files are left
                continue
            attempt = Attempt(item.path, kept.name, stated.owner if stated else None)
            (abandoned if is_abandoned(root, kept) else running).append(attempt)
        elif item.kind == "directory":
            candidates.append(item.path)
        elif step_of_name(item.path) is not None:
            odd.append(Skipped(item.path, f"it is a {item.kind}, not a directory"))
        else:
            foreign.append(item.path)  # including symlinks
    unknown: list[Skipped] = []
    if is_directory(root):
        looks = [_look(root, name) for name in candidates]
    else:
        lists: dict[str, list[Any]] = {"running": running, "abandoned": abandoned, "unknown": unknown}
        looks, found_inside = _look_remotely(root, view, candidates)
        for kind, entry in found_inside:
            lists[kind].append(entry)
    committed, replaced = in_order([look for look in looks if isinstance(look, Committed)])
    explained = {attempt.name for attempt in running + abandoned if "/" in attempt.path}
    skipped = [look for look in looks if isinstance(look, Skipped) and look.path not in explained] + replaced + odd
    alone = {item.path for item in skipped}  # a directory's reason also covers the folders in it
    skipped += [item for item in unknown if item.path.rpartition("/")[0] not in alone]
    foreign += [look for look in looks if isinstance(look, str) and look not in explained]
    left = tuple(running), tuple(abandoned), tuple(skipped), tuple(sorted(foreign))
    return Inventory(root.url, tuple(committed), *left), candidates


def _look_remotely(
    root: Store, view: Store, names: Sequence[str]
) -> tuple[list[Committed | Skipped | str], list[tuple[str, Any]]]:
    """Return what each directory is (see `_look`), and the uncommitted saves in them (see `_look_inside`)."""
    if view.sizes_are_free:
        view.fetch(record_path(name) for name in names)
        folders = [_attempt_folders(view, name) for name in names]
        looks = [_look(view, name) for name in names]
    else:
        with WorkerPool(16, thread_name_prefix="ckptkit-ls") as pool:
            folders = list(pool.map(lambda name: _attempt_folders(view, name), names))
            looks = list(pool.map(lambda name: _look(view, name), names))
    known = {f"{look.path}/{look.record.data}" for look in looks if isinstance(look, Committed)}
    others = {name: [p for p in found if p not in known] for name, found in zip(names, folders, strict=True)}
    if not any(others.values()):
        return looks, []
    attempts = open_attempts(root)
    return looks, [entry for name, found in others.items() for entry in _look_inside(root, view, name, found, attempts)]


def _look(root: Store, path: str) -> Committed | Skipped | str:
    """Return a directory's checkpoint, or why it has none (`Skipped`), or its path if it does not seem to be ours."""
    try:
        record = find_record(root, record_path(path))
    except CkptkitError as error:
        # A later version of ckptkit may also have written the record.
        return Skipped(path, str(error), damaged=True, unanswered=is_outage(error))
    except OSError as error:
        reason = f"{root.url}/{record_path(path)} cannot be read: {error.strerror or error}"
        return Skipped(path, reason, damaged=True, unanswered=isinstance(error, PermissionError))
    if record is None:
        gone = deleted_records(root, path)
        if gone:
            files = tuple(sorted({file for deleted in gone for file in unnamed_files(root, path, deleted)}))
            shown = first_few(files, _MAX_NAMED) or "none"
            reason = f"its checkpoint was deleted; kept files that its record did not name: {shown}"
            return Skipped(path, reason, kept_files=files, deleted=True)
        if step_of_name(path) is None and not _is_of_a_save(root, path):
            return path
        return Skipped(path, _NO_RECORD, unknown=True)
    replacement = _REPLACEMENT.fullmatch(path)
    if record.name == path or (replacement and replacement.groups() == (record.name, record.save_id)):
        return Committed(path, record)
    # A directory named after a step is damaged: it is a copy, or its record was overwritten.
    reason = f"its record is that of {record.name}, so it was copied or renamed"
    return Skipped(path, reason, damaged=step_of_name(path) is not None)


def _is_of_a_save(root: Store, path: str) -> bool:
    """Return whether a directory without a commit record has a manifest from `CheckpointManager` (not `DCPWriter`)."""
    if root.info(f"{path}/{MANIFEST_NAME}") is None:
        return False
    from ckptkit.formats.own.reader import is_of_a_save  # imports numpy, which listings of other directories don't need

    return is_of_a_save(root.child(path))


def _look_inside(
    root: Store, view: Store, name: str, folders: Sequence[str], attempts: Attempts
) -> list[tuple[str, Attempt | Skipped]]:
    """Return the uncommitted saves that have files under `name`, as ("running", "abandoned" or "unknown", entry).

    Args:
        folders: The folders under `name`, except the committed checkpoint's. Each save writes into its own folder.
        attempts: The saves that the lease records, read after `view` was taken, so that all running saves are included.
    """
    gone = {record.data: record for record in deleted_records(view, name)} if folders else {}
    found: list[tuple[str, Attempt | Skipped]] = []
    for path in folders:
        folder = path.rpartition("/")[2]
        if folder in gone:  # a deleted checkpoint, whose deletion is unfinished if any of its own files are left
            if any(view.info(f"{name}/{inner}") for inner in named_paths(gone[folder])):
                found.append(("abandoned", Attempt(path, name, None)))
        elif folder in attempts.ids and any(map(may_be_saved, (i.path for i in view.list(path, recursive=True)))):
            dead = attempts.owner is None or attempts.owner.alive() is False
            found.append(("abandoned" if dead else "running", Attempt(path, name, attempts.owner)))
        else:
            found.append(("unknown", Skipped(path, _NO_ATTEMPT, unknown=True)))
    if found:
        # Read the record last, because an attempt may have been committed since the snapshot.
        try:
            record = find_record(root, record_path(name))
        except (CkptkitError, OSError):
            return []  # the unreadable record may name these files
        committed = "" if record is None else f"{name}/{record.data}"
        found = [entry for entry in found if entry[1].path != committed]
    return found


def _attempt_folders(view: Store, name: str) -> list[str]:
    return [i.path for i in view.list(name) if i.kind == "directory" and _NONCE.fullmatch(i.path.rpartition("/")[2])]


def check_new(root: Store, inventory: Inventory) -> None:
    """Raise if a new run must not start in `root`: nothing is committed there, but something looks like a checkpoint.

    Raises:
        IncompleteCheckpointError: Names the directories that look like checkpoints, and says why they are not.
        StorageError: The store could not read a commit record.
        UsageError: The root is not a directory.
    """
    if is_directory(root):
        _check_directory(Path(root.url))
    found = [item for item in inventory.skipped if not item.deleted]
    if inventory.committed or not found:
        return
    unanswered = next((item for item in found if item.unanswered), None)
    if unanswered is not None:
        raise StorageError(unanswered.reason)
    named = "\n".join(f"  {item.path}: {item.reason}" for item in found[:_MAX_NAMED])
    more = f"\n  and {len(found) - _MAX_NAMED} more" * (len(found) > _MAX_NAMED)
    raise IncompleteCheckpointError(
        f"{root.url} has no committed checkpoint, but it is not empty:\n{named}{more}\n"
        "If it was copied, copy the rest of it. To start over, use another directory, move these away, or pass "
        "start_fresh='if_none_committed' (to CheckpointManager or FSDPStrategy.load_ckpt)."
    )


def _check_directory(path: Path) -> None:
    for place in (path, *path.parents):
        if os.path.isdir(place):
            return
        if os.path.islink(place):
            raise UsageError(f"{path}: {place} is a symbolic link to {os.readlink(place)}, which does not exist.")
        if os.path.lexists(place):
            raise UsageError(f"{path}: {place} is a file; a run needs a directory.")


def about_new(root: Store, inventory: Inventory) -> str:
    """Return the log message for a new run. It names leftovers of killed saves, and runs that may have been meant."""
    text = f"{root.url} has no checkpoint yet"
    left = [item.path for item in inventory.abandoned + inventory.in_progress]
    if left:
        text += f"; {left[0]} is left by an uncommitted save" + f", and {len(left) - 1} more" * (len(left) > 1)
    runs = runs_inside(root, inventory)
    if runs:
        text += f". Did you mean one of the runs in it? {', '.join(runs[:_MAX_NAMED])}"
    elif is_directory(root) and not os.path.lexists(root.url):
        parent, name = os.path.split(root.url)
        with contextlib.suppress(OSError):
            near = difflib.get_close_matches(name, os.listdir(parent), n=1, cutoff=0.8)
            if near and _is_run(open_store(f"{parent}/{near[0]}")):
                text += f". Did you mean {parent}/{near[0]}? It has checkpoints."
    return text


def runs_inside(root: Store, inventory: Inventory) -> list[str]:
    """Return the names of directories in `root` that seem to be runs."""
    return [name for name in inventory.foreign[:_MAX_LOOKS] if _is_run(root.child(name))]


def _is_run(store: Store) -> bool:
    """Return whether a directory seems to contain checkpoints. Looks only at names."""
    with contextlib.suppress(OSError, UnsafePathError):  # UnsafePathError: a link to somewhere else
        return any(step_of_name(i.path) is not None and store.info(record_path(i.path)) for i in store.list())
    return False


def in_order(found: Sequence[Committed]) -> tuple[list[Committed], list[Skipped]]:
    """Return the current checkpoints in order, and separately those that a later save replaced under the same name.

    The order follows the saves' sequence numbers. After a rollback (a later save has a lower step), the abandoned
    branch comes first, so "latest~1" is the previous checkpoint on the current branch.
    """
    key = sorted(found, key=_AGE)
    newest_of = {item.name: item for item in key}
    replaced = [
        Skipped(item.path, f"it was replaced by {newest_of[item.name].path}")
        for item in key
        if newest_of[item.name] is not item
    ]
    lowest = math.inf
    ordered: list[Committed] = []
    for item in reversed(key):
        if newest_of[item.name] is item:
            ordered.append(replace(item, superseded=item.record.step > lowest))
            lowest = min(lowest, item.record.step)
    ordered.reverse()
    return [i for i in ordered if i.superseded] + [i for i in ordered if not i.superseded], replaced


# --- names that users give


def choose(
    root: Store,
    which: str | int,
    *,
    damaged: Collection[str] = (),
    best: tuple[str, str] | None = None,
    view: Store | None = None,
) -> tuple[str, CommitRecord] | Skipped | None:
    """Return the path and the record of the checkpoint `which`, or None if the run has no checkpoint yet.

    For "latest", return a damaged directory (`Skipped`) if it may have been the newest checkpoint.

    Args:
        damaged: Names of checkpoints that cannot be loaded. The newest earlier checkpoint is chosen instead.
        best: As for `resolve`.
        view: A snapshot of `root`.
    """
    inventory = list_checkpoints(root, view=view)
    found: Committed | None
    if which == "latest":
        lost = inventory.newest_damaged
        if lost is not None and lost.path not in damaged:
            return lost
        found = inventory.latest
        for item in inventory.skipped if found is not None else ():
            step = step_of_name(item.path)  # there is no record, so use the step in the name
            if found is not None and (item.damaged if step is None else step > found.step):
                _log.warning("%s/%s is ignored (%s); latest is %s", root.url, item.path, item.reason, found.name)
    else:
        found = resolve(inventory, str(which), best=best)
    if found is not None and found.name in damaged:
        before = inventory.committed[: inventory.committed.index(found)]
        found = next((item for item in reversed(before) if item.name not in damaged), None)
    return None if found is None else (found.path, found.record)


def resolve(root: Store | Inventory, name: str = "latest", *, best: tuple[str, str] | None = None) -> Committed:
    """Return the checkpoint that `name` means.

    Args:
        name: "latest", "latest~1" (the checkpoint before "latest", also if that one is damaged), "best",
            "best:loss:min", a directory's name, or a step.
        best: (metric, "min" | "max") for "best". Default: the objective of the newest record that has one.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint. The error lists the existing checkpoints, and the skipped
            directories with the reasons.
        UsageError: The metric for "best" is unknown.
    """
    inventory = root if isinstance(root, Inventory) else list_checkpoints(root)
    found = _resolve(inventory, name, best)
    if found is None:
        raise CheckpointNotFoundError(_not_found(inventory, name))
    return found


def _resolve(inventory: Inventory, name: str, best: tuple[str, str] | None) -> Committed | None:
    exact = inventory.find(name)
    if exact is not None:
        return exact
    latest = _LATEST.fullmatch(name)
    if latest:
        back = int(latest[1] or 0) + 1
        if back > 1 and inventory.newest_damaged is not None:  # it is "latest", so the newest other one is "latest~1"
            back -= 1
        return inventory.committed[-back] if back <= len(inventory.committed) else None
    wanted = _BEST.fullmatch(name)
    if wanted:
        metric, mode = _objective(inventory, wanted[1], wanted[2], best)
        ranked = rank_by([item.record for item in inventory.committed], metric, mode)
        return inventory.find(ranked[0].name) if ranked else None
    if name.isdecimal() and name.isascii():
        same = [item for item in inventory.committed if item.step == int(name)]
        return next((item for item in same if item.record.tag is None), same[-1] if same else None)
    return None


def _objective(
    inventory: Inventory, metric: str | None, mode: str | None, best: tuple[str, str] | None
) -> tuple[str, str]:
    stated = best or next((i.record.objective for i in reversed(inventory.committed) if i.record.objective), None)
    if stated is not None and metric in (None, stated[0]):
        return stated[0], mode or stated[1]
    if metric is not None and mode is not None:
        check_metric(inventory, metric)
        return metric, mode
    if metric is not None:
        check_metric(inventory, metric)
        raise UsageError(f"{inventory.url}: is the lowest {metric!r} the best? Write 'best:{metric}:min' or ':max'.")
    known = sorted({name for item in inventory.committed for name in item.record.metrics})
    raise UsageError(
        f"{inventory.url}: 'best' by which metric? No checkpoint records this. Write 'best:METRIC:min' or "
        f"'best:METRIC:max'. Existing metrics: {', '.join(known) or 'none'}."
    )


def check_metric(inventory: Inventory, metric: str) -> None:
    """Raise UsageError, with the existing metrics, if no checkpoint has the metric."""
    known = sorted({name for item in inventory.committed for name in item.record.metrics})
    if inventory.committed and metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Existing metrics: {', '.join(known) or 'none'}."
        wanted = "Write best:METRIC:min or best:METRIC:max." if ":" in metric else ""
        raise UsageError(f"no checkpoint of {inventory.url} has the metric {metric!r}. {hint} {wanted}".rstrip())


def rank_by(records: Sequence[CommitRecord], metric: str, mode: str) -> list[CommitRecord]:
    """Return the records that have `metric`, best first. Omits NaN. On a tie, the newest comes first."""
    sign = 1 if mode == "min" else -1
    known = [record for record in reversed(records) if not math.isnan(record.metrics.get(metric, math.nan))]
    return sorted(known, key=lambda record: sign * record.metrics[metric])


def said_of(committed: Sequence[Committed]) -> str:
    """Return a phrase that names the last five checkpoints, without a full stop. `committed` must not be empty."""
    shown = ", ".join(item.name for item in committed[-5:])
    if len(committed) > 5:
        return f"It has {len(committed)}; the last five are {shown}"
    return f"It has {shown}" if len(committed) > 1 else f"It has only {shown}"


def _not_found(inventory: Inventory, name: str) -> str:
    if not inventory.committed:
        text = f"{inventory.url} has no committed checkpoint"
    else:
        text = f"{inventory.url} has no checkpoint {name!r}. {said_of(inventory.committed)}"
    skipped = "; ".join(f"{item.path}: {item.reason}" for item in inventory.skipped[:3])
    if skipped:
        text += f". Skipped: {skipped}"
    if inventory.in_progress:
        text += f". Being saved: {inventory.in_progress[0].name} by {inventory.in_progress[0].owner}"
    return text.rstrip(".") + "."  # a reason may already end with a full stop
