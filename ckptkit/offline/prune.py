"""Rotates a run on command: deletes the checkpoints that a policy does not keep, and the leftovers of killed saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.checkpoint.retention import Decision, RetentionPolicy, warn_of_excess
from ckptkit.checkpoint.run.commit import clean_leftovers, finish_replacements
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import CheckpointNotFoundError, UsageError
from ckptkit.offline.listing import look_ahead, nothing_of_ours
from ckptkit.offline.report import plain
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.publish import check_writable
from ckptkit.storage.retry import patient

SCHEMA = "ckptkit.prune/1"


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What `prune` did, or would do in a dry run.

    Attributes:
        decisions: For each checkpoint, whether it is kept, and why.
        deleted: The deleted checkpoints. Empty in a dry run.
        failed: The checkpoints that could not be deleted, each with the reason.
        cleaned: The deleted leftovers of killed saves. In a dry run, those that would be deleted. If a save was killed
            while it replaced a checkpoint, the old content is a leftover with the checkpoint's name.
        kept_files: Files that stay in the directories of deleted checkpoints, because ckptkit did not write them.
    """

    url: str
    dry_run: bool
    decisions: tuple[Decision, ...]
    deleted: tuple[str, ...]
    failed: Mapping[str, str]
    cleaned: tuple[str, ...]
    kept_files: tuple[str, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """The number of deleted bytes. For a dry run, the number of bytes that would be deleted."""
        gone = {d.name for d in self.decisions if not d.keep} if self.dry_run else set(self.deleted)
        return sum(d.nbytes for d in self.decisions if d.name in gone)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.prune/1")."""
        rows = [
            {"name": d.name, "step": d.step, "nbytes": d.nbytes, "keep": d.keep, "why": d.reason}
            for d in self.decisions
        ]
        names = ("url", "dry_run", "freed_bytes", "deleted", "failed", "cleaned", "kept_files")
        return {"schema": SCHEMA, "checkpoints": rows, **{name: plain(getattr(self, name)) for name in names}}


@patient()
def prune(
    url: str,
    *,
    policy: RetentionPolicy | None = None,
    recorded: bool = True,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> PruneReport:
    """Delete the checkpoints under `url` that `policy` does not keep, and the leftovers of killed saves.

    In each checkpoint, the commit record is deleted before all other files. Never deletes the newest checkpoint,
    pinned checkpoints, or files that ckptkit did not write.

    Args:
        policy: The rotation policy. None uses the policy that is recorded in the newest checkpoint.
        recorded: Also apply the recorded exemptions (`keep_...`) that `policy` does not set.
        dry_run: Only report what would be deleted.
        storage_options: Options for the fsspec file system of a remote URL.

    Raises:
        UsageError: There are no leftovers, and there is no policy that can be applied. Also raised if the policy keeps
            the best checkpoints by a metric that no checkpoint has.
        CheckpointNotFoundError: There is no ckptkit checkpoint under `url`.
    """
    root = open_store(url, storage_options=storage_options)
    view = snapshot(root)
    inventory = list_checkpoints(root, view=view)
    if not (inventory.committed or inventory.abandoned):
        nothing = nothing_of_ours(url, inventory, root, storage_options=storage_options)
        raise CheckpointNotFoundError(f"Nothing was deleted: {nothing}")
    ahead = look_ahead(root, view, inventory, policy, recorded=recorded)
    if ahead.policy is None and not inventory.abandoned:
        raise UsageError(f"{url} has no recorded policy that can be applied. Give one, for example --max-num 3.")
    half_replaced = [item.name for item in inventory.committed if item.path != item.name]
    if dry_run:
        warn_of_excess(ahead.decisions, ahead.policy)
        kept = tuple(f"{name}/{path}" for name, paths in ahead.kept_files.items() for path in paths)
        replaced = [name for name in half_replaced if view.info(name) is not None]
        left = (*replaced, *clean_leftovers(root, dry_run=True, inventory=inventory))
        failed = {}
        if is_directory(root):
            for name in ahead.kept_files:
                try:
                    check_writable(root)
                    check_writable(root.child(name))
                except OSError as error:
                    failed[name] = str(error)
        return PruneReport(url, True, ahead.decisions, (), failed, left, kept)
    finished = finish_replacements(root) if half_replaced else []
    done = rotate(root, ahead.policy or RetentionPolicy(), clean=True)  # a policy without limits deletes only leftovers
    cleaned = (*finished, *done.cleaned)
    return PruneReport(url, False, done.decisions, done.deleted, dict(done.failed or {}), cleaned, done.kept_files)
