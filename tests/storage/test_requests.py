"""Concurrent requests on the event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from ckptkit.storage.requests import ConcurrentRequests


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_answers_and_errors_are_in_order(loop: asyncio.AbstractEventLoop) -> None:
    async def fail() -> int:
        raise ValueError("no")

    async def give() -> int:
        await asyncio.sleep(0)
        return 7

    first, second, third = ConcurrentRequests(loop, [give, fail, give], most=2).answers()
    assert (first, third) == (7, 7) and isinstance(second, ValueError)


def test_no_more_requests_run_than_allowed(loop: asyncio.AbstractEventLoop) -> None:
    now, most = 0, 0

    async def one() -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1
        return 0

    ConcurrentRequests(loop, [one] * 20, most=3).answers()
    assert most == 3


def test_after_an_interrupt_no_request_is_running(loop: asyncio.AbstractEventLoop) -> None:
    began, ended = threading.Event(), []

    async def endless() -> int:
        try:
            began.set()
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        return 0

    running = ConcurrentRequests(loop, [endless, endless], most=2)
    real, interrupted = running._ended, []

    class Ended:  # raises as a signal during the wait would
        def wait(self, seconds: float | None = None) -> bool:
            if interrupted:
                return real.wait(seconds)
            interrupted.append(began.wait())
            raise KeyboardInterrupt

        def set(self) -> None:
            real.set()

    running._ended = Ended()
    with pytest.raises(KeyboardInterrupt):
        running.answers()
    assert len(ended) in (1, 2) and real.is_set()  # the second one need not have begun
