"""Releases leases that a test left open."""

import sys
from collections.abc import MutableMapping
from typing import Any

Tables = list[MutableMapping[Any, Any]]


def lease_tables() -> Tables:
    """Return the open managers' leases and all leases of this process."""
    places = [("ckptkit.checkpoint.run.hold", "_shared"), ("ckptkit.storage.lock", "_held_leases")]
    return [getattr(sys.modules.get(module), name, {}) for module, name in places]


def release_leases(before: list[set[Any]] | None = None) -> None:
    """Release this process's leases, except those that are in `before`."""
    tables = lease_tables()
    for table, old in zip(tables, before or [set()] * len(tables), strict=True):
        for key in set(table) - old:
            left = table.pop(key, None)
            if left is not None:
                getattr(left, "lease", left).release()
