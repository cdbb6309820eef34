"""Concurrent requests on the event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from ckptkit.storage.requests import run_together


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@pytest.mark.parametrize("when", ["before they begin", "while they run"])
def test_after_an_interrupt_no_request_is_running(loop, monkeypatch, when):
    began, free, running, wait = threading.Event(), threading.Event(), [0], threading.Event.wait

    async def endless() -> None:
        running[0] += 1
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            running[0] -= 1

    def interrupted(event: threading.Event, seconds: float | None = None) -> bool:
        if seconds == 1:  # raises as a signal during the wait would
            if when == "while they run":
                wait(began)
            loop.call_later(0.05, free.set)
            raise KeyboardInterrupt
        free.set()
        return wait(event, seconds)

    if when == "before they begin":
        loop.call_soon_threadsafe(wait, free)  # the loop is busy
    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_together(loop, [endless, endless])
    assert running == [0]
