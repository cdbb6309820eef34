"""One object from a stream of writes: small ones in one request, large ones in parts that go while the caller works."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ckptkit.storage.connection import UPLOAD_BYTES, Connection
from ckptkit.storage.object_api import ObjectApi, Upload

__all__ = ["PartWriter"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MANY = 8000  # S3 takes 10 000 parts
_LARGE = 512 << 20


class PartWriter:
    """Collects what is written into parts and sends them, several at once where the store takes any order.

    Holds two parts at most, and as many more as are on their way: `Connection.slots` bounds those of all writers of the
    process together. A failed part is raised by the next write, or by `finish`. Used by one thread.

    Args:
        attempt: Calls a function with retries, and turns what fails into the errors of a Store.
    """

    def __init__(
        self, connection: Connection, api: ObjectApi, name: str, attempt: Callable[[Callable[[], object]], object]
    ) -> None:
        self._connection = connection
        self._api = api
        self._name = name
        self._attempt = attempt
        self._buffer = io.BytesIO()  # gives what was collected as bytes without another copy
        self._held = 0
        self._upload: Upload | None = None
        self._sent: list[Future[None]] = []
        self._count = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take over `data`; it may be changed afterwards."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            room = self._part_bytes() - self._held
            if room <= 0:  # only now is it known that this part is not the last
                self._send(last=False)
                continue
            taken = self._buffer.write(view[at : at + room])
            self._held += taken
            at += taken

    def _part_bytes(self) -> int:
        if self._upload is None:
            return 2 * UPLOAD_BYTES  # a request less than in two parts is two requests and a wait less
        return UPLOAD_BYTES if self._count < _MANY else _LARGE

    def finish(self, put: Callable[[bytes], object]) -> None:
        """Let the object appear; `put` writes one that is no larger than a part."""
        if self._upload is None:
            put(self._take())
            return
        self._send(last=True)
        self._wait()
        self._attempt(self._upload.complete)

    def abort(self) -> None:
        """Leave nothing behind. Never raises: the caller has an error already."""
        for future in self._sent:
            future.cancel()
        for future in self._sent:  # a part that arrives after the abort would begin to cost again
            if not future.cancelled():
                future.exception()
        if self._upload is not None:
            try:
                self._attempt(self._upload.abort)
            except Exception as error:  # noqa: BLE001 - the caller has an error already
                logger.warning("an unfinished upload was left behind; ckptkit prune removes it: %s", error)
        self._take()

    def _take(self) -> bytes:
        """Return what was collected, and begin anew."""
        data = self._buffer.getvalue()
        self._buffer, self._held = io.BytesIO(), 0
        return data

    def _send(self, *, last: bool) -> None:
        if self._upload is None:
            made: list[Upload] = []
            self._attempt(lambda: made.append(self._api.upload(self._name)))
            self._upload = made[0]
        data = self._take()
        if not last and len(data) > self._part_bytes():  # what could have been a small object
            self._send_part(data[:UPLOAD_BYTES], last=False)
            data = data[UPLOAD_BYTES:]
        self._send_part(data, last=last)

    def _send_part(self, data: bytes, *, last: bool) -> None:
        assert self._upload is not None
        if self._upload.in_order:
            self._wait()
        self._raise_early()
        self._count += 1
        slots = self._connection.slots
        slots.acquire()
        try:
            job = partial(self._upload.part, self._count, data, last=last)
            future: Future[None] = self._connection.submit(lambda: self._part(job))
        except BaseException:
            slots.release()
            raise
        future.add_done_callback(lambda _: slots.release())
        self._sent.append(future)

    def _part(self, job: Callable[[], None]) -> None:
        self._attempt(job)

    def _raise_early(self) -> None:
        """Raise what a part failed with; forget those that are done."""
        waiting = []
        for future in self._sent:
            if future.done():
                future.result()
            else:
                waiting.append(future)
        self._sent = waiting

    def _wait(self) -> None:
        for future in self._sent:
            with contextlib.suppress(Exception):
                future.result()
        self._raise_early()
