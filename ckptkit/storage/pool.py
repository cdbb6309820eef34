"""Provides thread pools that accept work until the process ends.

If no thread can be started, the work is done in the caller's thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import thread as _futures  # must come first: its exit hook must be registered before ours
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ckptkit.storage.retry import hurry

P = ParamSpec("P")
T = TypeVar("T")
_MAY_START = sys.version_info < (3, 12)  # later versions start no threads once the main thread has ended
_calls: list[Callable[[], object]] = []
_ending = False


class WorkerPool(ThreadPoolExecutor):
    """A pool that accepts work until the last thread of the process has ended, as a background save may need.

    Python's own pools close when the main thread ends. Each function runs in the context of the caller.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if not _no_more_threads():
            return super().submit(partial(copy_context().run, fn, *args, **kwargs))
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised by `result`, as in a pool
            future.set_exception(error)
        return future

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None and not isinstance(error, Exception):
            hurry()  # Ctrl-C: the work must not wait for an unreachable store
        return super().__exit__(kind, error, trace)


def result_of(future: Future[T]) -> T:
    """Wait for a future and return its result.

    In a single long wait, the main thread would not notice a Ctrl-C that the system delivers to another thread.
    """
    while not future.done():
        wait((future,), timeout=1)
    return future.result()


def start_or_do_without(thread: threading.Thread) -> None:
    """Start a thread. If no thread can be started because the process is ending, do nothing."""
    try:
        thread.start()
    except RuntimeError:
        if not _ending:
            raise


def before_end(call: Callable[[], object]) -> None:
    """Register `call` to run after the main thread has ended, while pools still accept work."""
    if not _calls:
        # `atexit` is too late: its functions run after pools are closed and threads are joined.
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
