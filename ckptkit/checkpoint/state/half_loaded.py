"""Remembers which live objects a failed load left half loaded, even if they are moved to a different `TrainState`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

# Keyed by id, because tensors compare element by element. Omits objects that do not support weak references.
_marks: dict[int, tuple[weakref.ref[object], str]] = {}


def mark(objects: Iterable[object], url: str) -> None:
    """Record that a load of the checkpoint at `url` failed while filling these objects."""
    for item in objects:
        key = id(item)
        try:
            _marks[key] = weakref.ref(item, lambda _, key=key: _marks.pop(key, None)), url  # type: ignore[misc]
        except TypeError:
            continue


def clear(objects: Iterable[object]) -> None:
    """Record that these objects were loaded completely."""
    if _marks:
        for item in objects:
            _marks.pop(id(item), None)


def half_loaded_from(objects: Iterable[object]) -> str:
    """Return the URL of the checkpoint that any of these objects is half loaded from; "" if none is."""
    if not _marks:
        return ""
    return next((_marks[id(item)][1] for item in objects if id(item) in _marks and _marks[id(item)][0]() is item), "")
