"""Runs saves in the background. Every error in such a save is either raised or logged."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable

from ckptkit.checkpoint.report import SaveReport
from ckptkit.errors import CkptkitError, RankFailedError, SaveError, UsageError
from ckptkit.storage.pool import before_end
from ckptkit.storage.retry import Patience

_HEAD_START_S = 1.0
_LOOK_S = 0.5
_log = logging.getLogger(__name__)
_unasked: weakref.WeakSet[SaveHandle] = weakref.WeakSet()


class SaveHandle:
    """A save in progress.

    `result` waits for the commit and raises the save's error. Call `result` on all ranks or on none, so that all ranks
    continue or stop together. If a rank does not call `result`, its next call to the manager raises the error.
    """

    def __init__(self, step: int, work: Callable[[], SaveReport], patience: Patience) -> None:
        self.step = step
        self._patience = patience  # how long the save retries storage calls; Ctrl-C during a wait ends the retries
        self._work: Callable[[], SaveReport] | None = work
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self.asked = False  # whether the caller has called `result` and so seen the outcome
        self._pid = os.getpid()
        self._done = threading.Event()
        self._runner: int | None = None  # the thread that does the work
        self._training_goes_on = threading.Event()
        # Not a daemon thread, because the process must not exit before its checkpoint is saved.
        self._thread = threading.Thread(target=self._run, name=f"ckptkit-save-{step}", daemon=False)

    def start(self) -> SaveHandle:
        """Start the background work."""
        _unasked.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # save anyway: the other ranks' threads have started and wait for this rank
            _log.warning("no thread could be started; training waits for the save of step %d: %s", self.step, error)
            self._training_goes_on.set()
            self._run()
        self._training_goes_on.set()
        return self

    def runs_here(self) -> bool:
        """Return whether this thread does the work, so that it must not wait for the result."""
        return self._runner == threading.get_ident() and not self._done.is_set()

    def _run(self) -> None:
        self._runner = threading.get_ident()
        # Without this wait, the thread would take the interpreter lock just as training resumes.
        self._training_goes_on.wait(_HEAD_START_S)
        work, self._work = self._work, None
        try:
            assert work is not None  # this thread runs once
            with self._patience.entered():
                self._report = work()
        except BaseException as error:  # noqa: BLE001  the boundary of a thread: `result` raises it
            self._error = error
        finally:
            self._done.set()

    def _waited(self, timeout_s: float | None) -> bool:
        try:
            return self._done.wait(timeout_s)
        except BaseException:  # Ctrl-C
            self.hurry()
            raise

    def hurry(self) -> None:
        """From now on, retry each storage call at most once. The save continues as long as the storage responds."""
        self._patience.hurry()

    def done(self) -> bool:
        """Return whether the save has succeeded or failed."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait for the commit, and return the report.

        Raises:
            CkptkitError: The save failed, in most cases with a SaveError. Unless rank 0 died or hung, nothing was
                published.
            TimeoutError: The save has not ended after `timeout_s` seconds. The save continues.
            UsageError: This process is a fork of the process that saves.
        """
        if os.getpid() != self._pid and not self._done.is_set():
            raise UsageError(f"the save of step {self.step} runs in process {self._pid}; wait for it there.")
        if not self._waited(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is not done after {timeout_s} s; it is still running.")
        self.asked = True
        _unasked.discard(self)
        if self._error is not None:
            if isinstance(self._error, CkptkitError):
                raise self._error
            raise SaveError(f"the save of step {self.step} failed: {self._error}") from self._error
        assert self._report is not None
        return self._report

    def exception(self) -> BaseException | None:
        """Return the save's error. Returns None while the save is running, or if it succeeded."""
        return self._error


def _report_unasked() -> None:
    """Log the errors of saves whose `result` was never called. Runs when Python exits."""
    for handle in list(_unasked):
        error = handle.exception()
        if error is not None:
            report_failure(handle.step, error)


def report_failure(step: int, error: BaseException) -> None:
    """Log the error of a save whose `result` will not be called."""
    # If rank 0 has died, it may have published the checkpoint before. The error says so.
    is_unknown = isinstance(error, RankFailedError) and error.interrupted and 0 in error.causes
    result = "" if is_unknown else ", and nothing was published"
    _log.error("the save of step %s failed%s: %s", step, result, error)


def _wait_for_saves() -> None:
    """Wait for running saves after the main thread has ended, before Python shuts down modules that they use."""
    for handle in list(_unasked):
        while handle._thread.is_alive() and not handle._waited(_LOOK_S):  # in a fork, is_alive() is False
            pass


before_end(_wait_for_saves)
atexit.register(_report_unasked)
