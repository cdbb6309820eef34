"""Pauses Python's garbage collector while many objects are created, such as the objects of a catalog or a plan."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_depth = 0
_was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector during short work that creates many objects but no cycles.

    Without the pause, the collector would repeatedly visit all objects created so far, which takes a quarter of the
    total time. Contexts may be nested, and several threads may use them at once. The last exit resumes collection.
    """
    global _depth, _was_on
    with _lock:
        if _depth == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_on:
                gc.enable()
