"""Requests that are under way together, on a loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from ckptkit.storage.requests import Together


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_answers_come_in_order_and_failures_among_them(loop: asyncio.AbstractEventLoop) -> None:
    async def fail() -> int:
        raise ValueError("no")

    async def give() -> int:
        await asyncio.sleep(0)
        return 7

    first, second, third = Together(loop, [give, fail, give], most=2).answers()
    assert (first, third) == (7, 7) and isinstance(second, ValueError)


def test_no_more_are_under_way_than_allowed(loop: asyncio.AbstractEventLoop) -> None:
    now, most = 0, 0

    async def one() -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1
        return 0

    Together(loop, [one] * 20, most=3).answers()
    assert most == 3


def test_who_is_interrupted_leaves_none_under_way(loop: asyncio.AbstractEventLoop) -> None:
    began, ended = threading.Event(), []

    async def endless() -> int:
        try:
            began.set()
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        return 0

    together = Together(loop, [endless, endless], most=2)
    real, interrupted = together._ended, []

    class Ended:  # a signal that comes while it is waited for
        def wait(self, seconds: float | None = None) -> bool:
            if interrupted:
                return real.wait(seconds)
            interrupted.append(began.wait())
            raise KeyboardInterrupt

        def set(self) -> None:
            real.set()

    together._ended = Ended()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        together.answers()
    assert len(ended) in (1, 2) and real.is_set()  # the second one need not have begun
