"""Saves that go on in the background: one at a time, their errors never lost."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

from ckptkit.checkpoint.report import SaveReport
from ckptkit.errors import CkptkitError, SaveError, UsageError
from ckptkit.storage.pool import before_end
from ckptkit.storage.retry import Patience

__all__ = ["SaveHandle", "collecting_later"]

_HEAD_START_S = 1.0
_LOOK_S = 0.5
_log = logging.getLogger(__name__)
_unasked: weakref.WeakSet[SaveHandle] = weakref.WeakSet()


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Let no garbage be collected inside of the block: to look through all that torch and a model consist of takes
    longer than to capture thousands of tensors, and would happen just then, for that makes thousands of objects."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class SaveHandle:
    """A save in progress. `result` waits for its commit and raises what went wrong; so does the manager's next call, on
    ranks that have not asked. Ask on all ranks or on none: they must go on, or stop, together.

    Args:
        patience: How long storage calls of the save are retried. Ctrl-C while somebody waits for it ends that.
    """

    def __init__(self, step: int, work: Callable[[], SaveReport], patience: Patience | None = None) -> None:
        self.step = step
        self._patience = patience or Patience()
        self._work: Callable[[], SaveReport] | None = work
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._asked = False
        self._pid = os.getpid()
        self._done = threading.Event()
        self._training_goes_on = threading.Event()
        # Not a daemon: a process that ends waits for its checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"ckptkit-save-{step}", daemon=False)

    def start(self) -> SaveHandle:
        """Begin the background work."""
        _unasked.add(self)
        self._thread.start()
        self._training_goes_on.set()
        return self

    def _run(self) -> None:
        # Else this thread would keep the interpreter to itself for a while, just when the training gets it back.
        self._training_goes_on.wait(_HEAD_START_S)
        work, self._work = self._work, None
        try:
            if work is not None:
                with self._patience.entered():
                    self._report = work()
        except BaseException as error:  # noqa: BLE001  the boundary of a thread: `result` raises it
            self._error = error
        finally:
            self._done.set()

    def wait_at_end(self) -> None:
        """Return once the thread of the save, if it is one of this process, has ended."""
        while self._thread.is_alive() and not self._waited(_LOOK_S):  # after a fork it is not alive
            pass

    def _waited(self, timeout_s: float | None) -> bool:
        try:
            return self._done.wait(timeout_s)
        except BaseException:  # Ctrl-C
            self.hurry()
            raise

    def hurry(self) -> None:
        """Let the save go on only while the storage answers."""
        self._patience.hurry()

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Return the report once the checkpoint is committed.

        Raises:
            SaveError: The save failed; nothing was published.
            TimeoutError: It is not done after `timeout_s`; it continues.
            UsageError: This is a fork of the process that saves.
        """
        if os.getpid() != self._pid and not self._done.is_set():
            raise UsageError(f"the save of step {self.step} runs in process {self._pid}; wait for it there.")
        if not self._waited(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is not done after {timeout_s} s; it is still running.")
        self._asked = True
        _unasked.discard(self)
        if self._error is not None:
            if isinstance(self._error, CkptkitError):
                raise self._error
            raise SaveError(f"the save of step {self.step} failed: {self._error}") from self._error
        if self._report is None:
            raise SaveError(f"the save of step {self.step} ended without a report.")
        return self._report

    def exception(self) -> BaseException | None:
        """Return what went wrong, None while the save continues and if it went well. Does not count as asked."""
        return self._error

    @property
    def asked(self) -> bool:
        """Whether somebody has seen the outcome."""
        return self._asked


def _report_unasked() -> None:
    """At exit: say loudly what nobody has asked for."""
    for handle in list(_unasked):
        error = handle.exception()
        if error is not None:
            text = f"the save of step {handle.step} failed, and nothing was published: {error}"
            _log.error("%s", text)
            if not _is_heard() and sys.stderr is not None:
                sys.stderr.write(f"ckptkit: {text}\n")


def _is_heard() -> bool:
    """Whether what is logged here reaches anybody: a program without logging must learn of a lost save, too."""
    logger: logging.Logger | None = _log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _wait_for_saves() -> None:
    """At the end of the main thread: let the saves in progress end before Python closes what they work with."""
    for handle in list(_unasked):
        handle.wait_at_end()


before_end(_wait_for_saves)
atexit.register(_report_unasked)
