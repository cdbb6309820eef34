"""How long one request waits: a slow server is no failure, one that says nothing for good is one in bounded time."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

__all__ = ["BACKSTOP_S", "BODY_S", "SOON_S", "WHOLE_S", "Progress", "SilenceError", "patiently", "silences"]

T = TypeVar("T")

SOON_S = (
    15.0  # for an answer to what carries little: the lease has to be renewed within 45 s, if need be by a second try
)
BODY_S = 60.0  # without a byte that goes up, and for the answer to the last one: it may wait for a disk, or other parts
WHOLE_S = 300.0  # for what an object is put together in, which some stores do before they answer
BACKSTOP_S = 300.0  # of the HTTP client, which does not know what it waits for

silences: ContextVar[int] = ContextVar("ckptkit_silences", default=0)
"""How many tries of the call that is under way had no answer in time: each waits longer than the one before.

A context variable: fsspec hands requests to a thread of its own, and contexts go with them.
"""


class SilenceError(OSError):
    """Nothing was heard for as long as a try waits. No TimeoutError: fsspec makes one of its own of that, that says
    nothing."""


class Progress(Protocol):
    """A body that is read as it goes up."""

    def tell(self) -> int: ...


async def patiently(
    request: Coroutine[Any, Any, T],
    *,
    least_s: float = SOON_S,
    body: Progress | None = None,
    given_s: float | None = None,
) -> T:
    """Return what `request` returns, waited for as long as it gets on.

    Args:
        least_s: How long the first try waits; later ones do so up to four times as long.
        body: What goes up with it: while more of it is taken, nobody is late. HTTP clients bound the wait for an
            answer only, not that for a server that stops to read.
        given_s: How long the user wants to wait, in place of all that.

    Raises:
        SilenceError: Nothing came, and nothing went, for that long. The request was given up; the server may still
            carry it out.
    """
    limit = given_s or min(WHOLE_S, min(4, 2 ** silences.get()) * least_s)
    task = asyncio.ensure_future(request)
    try:
        while True:
            before = None if body is None else body.tell()
            done, _ = await asyncio.wait({task}, timeout=limit)
            if done:
                return task.result()
            if body is None or body.tell() == before:
                break
    finally:
        task.cancel()  # nothing, where it is done
    await asyncio.wait({task}, timeout=1)
    raise SilenceError(errno.ETIMEDOUT, f"the server did not get on for {limit:g} s")
