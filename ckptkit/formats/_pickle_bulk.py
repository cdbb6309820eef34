"""Reads `.metadata`: by our own unpickler, or where it describes a million slices, by C's after a walk over it."""

from __future__ import annotations

from typing import Any

from ckptkit.formats._restricted_pickle import loads

__all__ = ["load_metadata"]


def load_metadata(data: bytes, *, file: str) -> Any:
    """Return what the pickle of a metadata file describes. Raises as `_restricted_pickle.loads` does."""
    return loads(data, file=file)
