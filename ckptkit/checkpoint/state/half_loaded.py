"""Remembers which live objects a failed load has left half loaded, in whichever `TrainState` they are next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

__all__ = ["clear", "half_loaded_from", "mark"]

# By id: tensors compare by their elements. Objects without weak references are left out.
_marks: dict[int, tuple[weakref.ref[object], str]] = {}


def mark(objects: Iterable[object], url: str) -> None:
    """Note that a load of the checkpoint at `url` stopped while it filled these."""
    for item in objects:
        key = id(item)
        try:
            _marks[key] = weakref.ref(item, lambda _, key=key: _marks.pop(key, None)), url  # type: ignore[misc]
        except TypeError:
            continue


def clear(objects: Iterable[object]) -> None:
    """Note that these have got all their values."""
    if _marks:
        for item in objects:
            _marks.pop(id(item), None)


def half_loaded_from(objects: Iterable[object]) -> str:
    """Return the checkpoint that some of these are half loaded from, "" where none is."""
    if not _marks:
        return ""
    return next((_marks[id(item)][1] for item in objects if id(item) in _marks and _marks[id(item)][0]() is item), "")
