"""What dead writers left below a root, removed; what a living one writes is never touched."""

from __future__ import annotations

import logging
import re
import time

from ckptkit.checkpoint.inventory import Attempt, Inventory, list_checkpoints
from ckptkit.checkpoint.lease import store_clock
from ckptkit.checkpoint.publish import settle_replacements
from ckptkit.formats.layout import LATEST_HINT
from ckptkit.storage import staging
from ckptkit.storage.local import LocalStore
from ckptkit.storage.remote import RemoteStore
from ckptkit.storage.snapshot import Snapshot, snapshot
from ckptkit.storage.staging import is_abandoned, is_dead, leftover_of, owner_path, read_owner, remove_leftover
from ckptkit.storage.store import FileInfo, Store

__all__ = ["clean_leftovers"]

logger = logging.getLogger(__name__)

UPLOAD_AGE_S = 86400.0  # of an upload that nobody finished; those of a dead save go with its files at once
_HALF_HINT = re.compile(rf"\.{LATEST_HINT}\.[0-9a-f]{{12}}\.part")  # as LocalStore names what it is writing
_OF_A_SAVE = re.compile(r"[^/]+/[0-9a-f]{16}/")  # how RemotePlace names what it writes
_PROBE = re.compile(r"\.probe-[0-9a-f]{16}\.part")  # as RemoteStore names what it tries conditional writes on


def clean_leftovers(
    root: Store,
    *,
    leased: bool = False,
    dry_run: bool = False,
    inventory: Inventory | None = None,
    view: Store | None = None,
    but: str = "",
) -> list[str]:
    """Remove staging, trash and uploads whose writer is dead, and return their paths.

    Also finishes what a killed overwrite began. A failure to delete is logged: the next call tries again.

    Args:
        leased: The caller holds the lease of the run, so no other save is alive, on whatever machine it was.
        inventory: What the caller has just listed.
        view: The snapshot of `root` that it was listed in. Then old uploads are not looked for, which takes a request
            of its own: those of dead saves go all the same.
        but: The caller's own attempt.
    """
    given, view = view, view or snapshot(root)
    inventory = inventory or list_checkpoints(root, view=view)
    if leased and not dry_run:
        settle_replacements(root, {item.path: item.name for item in inventory.committed})
    dead = [item.path for item in inventory.abandoned]
    dead += [item.path for item in inventory.in_progress if _is_dead(root, item, leased=leased)]
    items = view.list()
    dead += _lone_owners(root, items) + _half_written(items, leased=leased)
    removed = _clean_statements(root, inventory, view, leased=leased, dry_run=dry_run)
    for path in dict.fromkeys(dead):
        if path == but:
            continue
        try:
            if not dry_run:
                _remove(root, path)
            removed.append(path)
        except OSError as error:
            logger.warning("%s/%s could not be removed: %s", root.url, path, error)
    return removed if given is not None else removed + _old_uploads(root, dry_run=dry_run)


def _clean_statements(root: Store, inventory: Inventory, view: Store, *, leased: bool, dry_run: bool) -> list[str]:
    """Remove what writers said of themselves that were killed once their checkpoint was committed."""
    if not isinstance(view, Snapshot):
        return []  # each would have to be asked for; they go with their checkpoint
    placed = [f"{item.path}/{item.record.data}" for item in inventory.committed if item.record.data]
    found = [owner_path(path) for path in placed if view.info(owner_path(path)) is not None]
    dead = [path for path in found if is_dead(root, path, leased=leased)]
    try:
        root.delete([] if dry_run else dead)
    except OSError as error:
        logger.warning("%s/%s could not be removed: %s", root.url, dead[0], error)
        return []
    return dead


def _old_uploads(root: Store, *, dry_run: bool) -> list[str]:
    """Throw away multipart uploads of saves that were begun a day ago: no listing of files shows them, and they cost.
    Others' may take longer than that."""
    if not isinstance(root, RemoteStore):
        return []
    start = len(root._full("", root_allowed=True)) + 1
    found = [u for u in root.unfinished_uploads(older_than_s=UPLOAD_AGE_S) if _OF_A_SAVE.match(u.name[start:])]
    if found and not dry_run:
        now = store_clock(root)  # ours may be ahead of it
        found = [upload for upload in found if now - upload.started >= UPLOAD_AGE_S]
        root.end_uploads(found)
    return [f"unfinished upload of {upload.name}" for upload in found]


def _is_dead(root: Store, attempt: Attempt, *, leased: bool) -> bool:
    kept = leftover_of(attempt.path)
    if kept is not None:
        return bool(is_abandoned(root, kept, leased=leased))
    if read_owner(root, owner_path(attempt.path)) is None:
        return leased  # whoever has the lease, and no other, writes attempts
    return bool(is_dead(root, owner_path(attempt.path), leased=leased))


def _lone_owners(root: Store, items: list[FileInfo]) -> list[str]:
    """Return statements of dead writers whose directory is gone, or was never made."""
    found = [leftover_of(item.path) for item in items]
    return [item.path for item in found if item is not None and item.kind == "owner" and is_abandoned(root, item)]


def _half_written(items: list[FileInfo], *, leased: bool) -> list[str]:
    """Return half-written files of the name `latest`, and probes of a store, that a kill left at the root."""

    def is_left(item: FileInfo) -> bool:
        if _HALF_HINT.fullmatch(item.path) and leased:
            return True
        # A probe asks for no lease, so none says that its maker is dead: only time does.
        old = time.time() - item.mtime > staging.STARTING_S
        return old and bool(_HALF_HINT.fullmatch(item.path) or _PROBE.fullmatch(item.path))

    return [item.path for item in items if item.kind == "file" and is_left(item)]


def _remove(root: Store, path: str) -> None:
    kept = leftover_of(path)
    if isinstance(root, LocalStore):
        if kept is not None:
            remove_leftover(root, kept)
        else:
            root.delete([path])
        return
    logger.info("removing %s/%s, which a dead process left", root.url, path)
    root.delete_tree(path)
    root.delete([owner_path(path)])
