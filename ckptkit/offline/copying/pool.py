"""Processes items in order, in worker threads. The first failure stops all threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckptkit.storage.retry import hurry, patient

T = TypeVar("T")


class Stopped(Exception):
    """Raised in a worker thread to stop the thread, after another thread failed or the user interrupted."""


class Worker:
    """The two buffers of one thread, which are reused for each item."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.uint8)] * 2

    def buffer(self, nbytes: int, *, made: bool = False) -> npt.NDArray[np.uint8]:
        """Return the buffer for bytes that are read, or for bytes that are `made` from them, cut to `nbytes` bytes."""
        if len(self._buffers[made]) < nbytes:
            self._buffers[made] = np.empty(nbytes, np.uint8)
        return self._buffers[made][:nbytes]


class Pool:
    """Threads that process items in order. The first failure stops all threads, and `run` raises it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.stopped = threading.Event()
        self._running = 0
        self._change = threading.Condition()

    @patient()
    def run(self, do: Callable[[T, Worker], None], items: Sequence[T]) -> None:
        """Call `do` with each item. If any call fails, raise the first error after all threads have stopped."""
        waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
        for item in items:
            waiting.put(item)
        failures: list[BaseException] = []
        # Not Thread.join: up to Python 3.12, a join that a signal interrupts marks the thread as ended. Cleanup would
        # then delete files, or the process would exit, while threads still write. Not WorkerPool either: it loses a
        # thread if it is interrupted while that thread starts.
        try:
            for i in range(min(self._workers, len(items))):
                name = f"ckptkit-copy-{i}"
                work = (copy_context().run, self._work, do, waiting, failures)  # in the caller's context
                threading.Thread(target=work[0], args=work[1:], name=name, daemon=True).start()
            with self._change:
                self._change.wait_for(lambda: not self._running and (waiting.empty() or self.stopped.is_set()))
        except BaseException:
            hurry()  # so that workers do not keep waiting for unreachable storage
            with self._change:
                self.stopped.set()  # so that workers begin no more items
                self._change.wait_for(lambda: not self._running)
            raise
        if failures:
            raise failures[0]

    def _work(
        self, do: Callable[[T, Worker], None], waiting: queue.SimpleQueue[T], failures: list[BaseException]
    ) -> None:
        with self._change:
            if self.stopped.is_set():
                return
            self._running += 1
        try:
            worker = Worker()
            while not self.stopped.is_set():
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    return
                do(item, worker)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: raised by `run`
            failures.append(error)
            self.stopped.set()
        finally:
            with self._change:
                self._running -= 1
                self._change.notify_all()
