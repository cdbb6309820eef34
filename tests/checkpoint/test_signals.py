"""A signal on one rank becomes one decision of all, at one step."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from ckptkit.checkpoint.coordinator import Coordinator
from ckptkit.checkpoint.signals import SignalWatch
from ckptkit.errors import UsageError
from tests.ranks import run_ranks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_seen_at_the_next_step_until_it_is_cleared(number: int) -> None:
    with SignalWatch(Coordinator()) as watch:
        assert not watch.agreed()
        os.kill(os.getpid(), number)
        assert watch.agreed() and watch.agreed()
        watch.clear()
        assert not watch.agreed()


def test_closing_puts_the_old_handlers_back_and_they_are_called() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with SignalWatch(Coordinator(), signals=[signal.SIGUSR1]) as watch:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert watch.agreed() and seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_can_not_install_handlers() -> None:
    caught: list[BaseException] = []

    def make() -> None:
        try:
            SignalWatch(Coordinator())
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_asking_every_third_step_answers_at_the_third() -> None:
    with SignalWatch(Coordinator(), every=3) as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        assert [watch.agreed() for _ in range(6)] == [False, False, True, False, False, True]


def _steps() -> Any:
    c = Coordinator(timeout_s=20)
    with SignalWatch(c, signals=[signal.SIGUSR1]) as watch:
        for step in range(1, 20):
            if step == 7 and c.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if watch.agreed():
                return step
    return None


def test_all_ranks_agree_at_the_same_step() -> None:
    assert run_ranks(_steps, 3) == [7, 7, 7]
