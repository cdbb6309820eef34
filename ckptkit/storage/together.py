"""Many requests of one caller at once, in the thread that all connections share: no thread each that only waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Together"]

T = TypeVar("T")


class Together(Generic[T]):
    """Requests that are under way on the event loop of another thread.

    Args:
        requests: Make one request each.
        most: How many are under way at a time.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[Callable[[], Coroutine[Any, Any, T]]],
        *,
        most: int,
    ) -> None:
        self._loop = loop
        self._answers: list[T | BaseException] = []
        self._ended = threading.Event()
        self._task: asyncio.Task[Any] | None = None
        self._stopped = False
        asyncio.run_coroutine_threadsafe(self._all(requests, most), loop)

    async def _all(self, requests: Sequence[Callable[[], Coroutine[Any, Any, T]]], most: int) -> None:
        turns = asyncio.Semaphore(most)

        async def one(request: Callable[[], Coroutine[Any, Any, T]]) -> T:
            async with turns:
                return await request()

        self._task = asyncio.current_task()
        try:
            if not self._stopped:
                self._answers = await asyncio.gather(*map(one, requests), return_exceptions=True)
        finally:
            self._ended.set()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def answers(self) -> list[T | BaseException]:
        """Wait, and return what each has come to, in order. None is under way any more when this ends, however."""
        try:
            while not self._ended.wait(1):  # so that a signal is seen
                pass
        except BaseException:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._stop)
            self._ended.wait()
            raise
        return self._answers
