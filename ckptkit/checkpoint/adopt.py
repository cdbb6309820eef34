"""What a run goes on from where its root holds nothing of ours yet, but what another system saved."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.inventory import Inventory, list_checkpoints
from ckptkit.checkpoint.state import TrainState
from ckptkit.errors import CheckpointNotFoundError, UnsupportedFormatError, UsageError
from ckptkit.formats.detect import Source, open_source
from ckptkit.formats.steps import ordered
from ckptkit.storage.store import Store

__all__ = ["adoptable"]

_log = logging.getLogger(__name__)


def adoptable(url: str, root: Store, state: TrainState, *, storage_options: Mapping[str, Any] | None) -> str:
    """Return the URL of another system's newest checkpoint below `url`; "" where there is none to go on from.

    An attempt of ours that was never committed is none. Nor are weights alone where there is an optimizer to restore:
    they may be what the training starts from, and whoever wants that names them.

    Raises:
        CorruptCheckpointError: It is damaged. To start anew beside it nobody can have meant.
    """
    inventory = list_checkpoints(root)
    if inventory.committed or not inventory.foreign:
        return ""
    for place in _places(url, inventory):
        try:
            source = open_source(place, storage_options=storage_options)
        except CheckpointNotFoundError:
            continue
        except (UnsupportedFormatError, UsageError) as error:
            _log.warning("%s is not gone on from: %s", place, error)
            continue
        if state.optimizer is None or _has_optimizer(source):
            return source.url
        _log.warning(
            "%s has weights and no optimizer: the run starts anew. To start from them: "
            "load(state, %r, optimizer='skip').",
            source.url,
            source.url,
        )
        return ""
    return ""


def _places(url: str, inventory: Inventory) -> Iterator[str]:
    """Where to look: the root as a whole, or each folder that is not ours, where some are."""
    if inventory.in_progress or inventory.abandoned or inventory.skipped:
        for step in ordered(inventory.foreign):
            yield f"{url.rstrip('/')}/{step.name}"
    else:
        yield url


def _has_optimizer(source: Source) -> bool:
    return any(entry.role in (Role.OPTIMIZER, Role.MASTER) for entry in source.catalog.tensors.values())
