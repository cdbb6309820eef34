"""Resolves checkpoint names to URLs: RUN/latest, RUN/latest~1, RUN/best, RUN/1200."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.errors import CheckpointNotFoundError, CkptkitError, CorruptCheckpointError, command_line
from ckptkit.storage.local import is_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store, check_url, split_url

if TYPE_CHECKING:
    from ckptkit.checkpoint.run.inventory import Inventory

NAMED_CHECKPOINT = re.compile(r"(latest(~[0-9]{1,6})?|best(:[^/]{1,128})?|[0-9]{1,18})")


def resolve_url(url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the URL of the checkpoint that `url` names (RUN/latest, RUN/1200). Return any other URL unchanged.

    Raises:
        CheckpointNotFoundError: The run has no such checkpoint. The message lists the existing checkpoints.
        CorruptCheckpointError: `url` is RUN/latest, but the latest checkpoint's record cannot be read.
    """
    check_url(url)  # before trailing slashes are removed below
    head, separator, name = url.rstrip("/").rpartition("/")
    if not NAMED_CHECKPOINT.fullmatch(name) or head.endswith(":/"):
        if split_url(url)[0] == "file" and head and not os.path.lexists(url):
            _refuse_unknown(head, name)
        return url
    root = open_store(head or ("/" if separator else "."), storage_options=storage_options)
    if name.isdigit() or name.startswith("best:"):
        found = root.info(name) if name.isdigit() else None
        if found is not None and found.kind == "directory":
            return url  # a directory with this name exists
    from ckptkit.checkpoint.run.inventory import (  # a lazy import: most URLs do not need it
        list_checkpoints,
        resolve,
    )

    inventory = list_checkpoints(root)
    if not inventory.committed:
        if not name.isdigit():
            _refuse_nothing(root, inventory, name)
        return url
    chosen = resolve(inventory, name)
    protocol, _ = split_url(url)
    place = root.url if protocol == "file" else head
    lost = inventory.newest_damaged if name == "latest" else None
    if lost is not None:
        error = CorruptCheckpointError(f"{url} is {lost.path}, which cannot be opened: {lost.reason}")
        error.checkpoint = f"{place}/{lost.path}"
        raise error
    return f"{place}/{chosen.path}"


def checkpoint_named(url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the checkpoint's URL if `url` is a name of a checkpoint, such as RUN/latest (see `resolve_url`).

    Returns "" for other URLs, and if there is no such checkpoint. A damaged checkpoint's URL is returned too.
    """
    if not NAMED_CHECKPOINT.fullmatch(url.rstrip("/").rpartition("/")[2]):
        return ""
    try:
        found = resolve_url(url, storage_options=storage_options)
    except CorruptCheckpointError as error:
        return error.checkpoint
    except CkptkitError:  # there is no such checkpoint
        return ""
    return "" if found == url else found


def resolve_checkpoint(url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Like `resolve_url`, but the root of a run stands for its newest checkpoint."""
    from ckptkit.checkpoint.run.inventory import list_checkpoints

    address = resolve_url(url, storage_options=storage_options)
    if address != url:
        return address
    try:
        root = open_store(url, storage_options=storage_options)
        inventory = list_checkpoints(root)
    except NotADirectoryError:
        return url
    return f"{url.rstrip('/')}/{inventory.latest.path}" if inventory.latest is not None else url


def _refuse_nothing(root: Store, inventory: Inventory, name: str) -> None:
    """Raise an error that says that the run has no checkpoint `name`, unless a directory is called `name`."""
    found = root.info(name)
    if found is not None and found.kind == "directory":
        return
    if is_directory(root) and os.path.isdir(os.path.join(root.url, name)):
        return
    if is_directory(root) and not os.path.isdir(root.url):
        from ckptkit.formats.detect import not_there  # imported lazily, because it imports numpy

        is_file = os.path.exists(root.url)
        missing = f"{root.url} is a file, not the root of a run." if is_file else not_there(root.url, root.url)
        raise CheckpointNotFoundError(missing)
    there = f"; {len(inventory.skipped)} directories were skipped (`{command_line('ls', '--all', root.url)}`)" * bool(
        inventory.skipped
    )
    raise CheckpointNotFoundError(
        f"{root.url} has no committed checkpoint of ckptkit, so there is no {name!r}{there}. "
        f"To use the newest step of another system's run, give its root: {root.url}"
    )


def _refuse_unknown(head: str, name: str) -> None:
    """If `head` is a run, raise an error that says that it has no checkpoint `name`, and lists its checkpoints."""
    if not os.path.isdir(head):
        return
    import difflib

    from ckptkit.checkpoint.run.inventory import list_checkpoints, said_of

    inventory = list_checkpoints(open_store(head))
    if inventory.committed:
        known = ["latest", "best", *(item.name for item in inventory.committed)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {head}/{near[0]}?" if near else ""
        raise CheckpointNotFoundError(f"{head} has no checkpoint {name!r}. {said_of(inventory.committed)}.{hint}")
