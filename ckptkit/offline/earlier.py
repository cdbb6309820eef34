"""What a run has before a checkpoint that can't be used: what a person asks next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.checkpoint.inventory import list_checkpoints
from ckptkit.checkpoint.pins import split_checkpoint_url
from ckptkit.errors import CkptkitError

__all__ = ["earlier_checkpoint"]


def earlier_checkpoint(url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the URL of the committed checkpoint before the one at `url`, in the order of the run; "" where there is
    none, or where `url` is no checkpoint of a run of ours."""
    try:
        root, name = split_checkpoint_url(url, storage_options=storage_options)
        committed = [item.name for item in list_checkpoints(root).committed]
    except (CkptkitError, OSError):
        return ""
    older = committed[: committed.index(name)] if name in committed else committed
    return f"{url.rstrip('/').rpartition('/')[0]}/{older[-1]}" if older else ""
