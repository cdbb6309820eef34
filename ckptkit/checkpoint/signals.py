"""A signal on any rank becomes one decision of all ranks, between two training steps."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ckptkit.checkpoint.coordinator import Coordinator
from ckptkit.errors import UsageError

__all__ = ["SAVE_SIGNALS", "SignalWatch"]

logger = logging.getLogger(__name__)

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SignalWatch:
    """Remembers that a signal came, and lets the ranks agree on it at a step boundary.

    The handlers only set a flag: a save inside a handler would run in the middle of a collective. A handler
    that was installed before runs as well, unless it is the default one, which would end the process.

    Args:
        coordinator: The ranks that must agree; not used by any other thread.
        signals: By default SIGTERM (a scheduler that preempts) and SIGUSR1 (`sbatch --signal=USR1@300`).
        every: Ask the other ranks at each `every`-th call of `agreed`, the same ones on every rank.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        signals: Iterable[int] = SAVE_SIGNALS,
        every: int = 1,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signal handlers can be installed by the main thread only: make the manager there.")
        if every < 1:
            raise UsageError(f"every is {every}, expected a whole number from 1.")
        self.coordinator = coordinator
        self.every = every
        self.received: int | None = None
        self._calls = 0
        self._before: dict[int, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def agreed(self) -> bool:
        """Return True on every rank at the same call, once some rank has had a signal. All ranks call it.

        Stays True until `clear`.
        """
        self._calls += 1
        if self._calls % self.every:
            return False
        seen = self.coordinator.any(self.received is not None)
        if seen:
            logger.info("%s: saving", "a signal came" if self.received is None else signal.Signals(self.received).name)
        return seen

    def clear(self) -> None:
        """Forget the signal: it was acted upon."""
        self.received = None

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def __enter__(self) -> SignalWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
