"""Names for checkpoints in the place of a URL: RUN/latest, RUN/latest~1, RUN/best, RUN/1200."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptkit.checkpoint.inventory import list_checkpoints, resolve
from ckptkit.storage.store import open_store, split_url

__all__ = ["resolve_url"]

_NAMED = re.compile(r"(latest(~[0-9]{1,6})?|best(:[^/]{1,128})?|[0-9]{1,18})")


def resolve_url(url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the URL of the checkpoint that `url` names; `url` itself where its last part is no such name, or where
    its parent is no run of ours.

    Raises:
        CheckpointNotFoundError: The run has no such checkpoint; lists those it has.
    """
    head, separator, name = url.rstrip("/").rpartition("/")
    if not _NAMED.fullmatch(name) or head.endswith(":/"):
        return url
    root = open_store(head or ("/" if separator else "."), storage_options=storage_options)
    if name.isdigit() or name.startswith("best:"):
        found = root.info(name) if name.isdigit() else None
        if found is not None and found.kind == "directory":
            return url  # a directory that is really called so
    inventory = list_checkpoints(root)
    if not inventory.committed:
        return url
    chosen = resolve(inventory, name)
    protocol, _ = split_url(url)
    return f"{root.url if protocol == 'file' else head}/{chosen.path}"
