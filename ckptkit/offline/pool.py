"""Threads that do jobs in order; the first failure stops them all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Job", "Pool", "Stopped", "Worker"]


class Stopped(Exception):
    """Another worker failed or the user interrupted: whatever is being done is given up."""


class Worker:
    """What one thread keeps between jobs."""

    def __init__(self, chunk: int) -> None:
        self.buffer = np.empty(chunk, np.uint8)
        self._room = np.empty(0, np.uint8)

    def room(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a second buffer of `nbytes`, the same memory each time."""
        if len(self._room) < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        return self._room[:nbytes]


Job: TypeAlias = Callable[[Worker], None]


class Pool:
    """Threads that take jobs in order; the first failure stops all and is raised."""

    def __init__(self, workers: int, chunk: int) -> None:
        self._workers = workers
        self._chunk = chunk
        self.stopped = threading.Event()

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs. Raises what the first failed job raised, once every thread has stopped."""
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=self._work, args=(waiting, failures), name=f"ckptkit-copy-{i}", daemon=True)
            for i in range(min(self._workers, len(jobs)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self.stopped.set()
            for thread in threads:
                thread.join()
            raise
        if failures:
            raise failures[0]

    def _work(self, waiting: queue.SimpleQueue[Job], failures: list[BaseException]) -> None:
        worker = Worker(self._chunk)
        while not self.stopped.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                job(worker)
            except BaseException as error:  # noqa: BLE001 - a thread's boundary: raised by `run`
                failures.append(error)
                self.stopped.set()
