"""Threads for work that continues while the process exits; runs the work inline if no thread can be started."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as _futures  # imported before `before_end` registers: what it does at the end
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ckptkit.storage.retry import hurry

__all__ = ["WorkerPool", "before_end", "start_or_do_without"]

P = ParamSpec("P")
T = TypeVar("T")
_MAY_START = sys.version_info < (3, 12)  # later ones start no thread from the end of the main thread on
_calls: list[Callable[[], object]] = []
_ending = False


class WorkerPool(ThreadPoolExecutor):
    """A pool that takes work until the last thread of the process has ended.

    Python closes all pools when the main thread ends, though the threads that it waits for may have more to do: a save
    in the background, say. What is submitted runs in the context of who submits it: it is part of the same operation.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if not _no_more_threads():
            return super().submit(partial(copy_context().run, fn, *args, **kwargs))
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  as in a thread of the pool: who asks for the result gets it
            future.set_exception(error)
        return future

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None and not isinstance(error, Exception):
            hurry()  # Ctrl-C: the work that is waited for here must not wait for a storage that is out of reach
        return super().__exit__(kind, error, trace)


def start_or_do_without(thread: threading.Thread) -> None:
    """Start a thread that the process does not need to end well, unless it is about to end and can't."""
    try:
        thread.start()
    except RuntimeError:
        if not _ending:
            raise


def before_end(call: Callable[[], object]) -> None:
    """Have `call` made once the main thread has ended, while pools still work. Not in processes that are killed."""
    if not _calls:
        # `atexit` comes too late: after the pools have closed, and the threads have been waited for.
        register: Any = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(_end)
    _calls.append(call)


def _end() -> None:
    global _ending
    _ending = True
    for call in _calls:
        call()


def _no_more_threads() -> bool:
    return bool(getattr(_futures, "_shutdown", False)) or (_ending and not _MAY_START)
