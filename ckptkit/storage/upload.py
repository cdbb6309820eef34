"""Uploads one object from a stream of writes: in one request if the object is small, otherwise in parallel parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ckptkit.storage.body import Collected, Content
from ckptkit.storage.connection import Connection
from ckptkit.storage.pool import result_of
from ckptkit.storage.requests import FsspecApi, Upload

logger = logging.getLogger(__name__)

UPLOAD_BYTES = 24 << 20  # size of a part that was copied; lent memory is sent in larger parts
_STEP = 1 << 20  # the first part ends at a multiple of this; GCS requires multiples of 256 KiB
_MANY = 8000  # from this many parts on, parts are larger, because S3 accepts at most 10 000
_LARGE = 512 << 20


class PartWriter:
    """Splits a stream of writes into parts. Sends several parts at a time, or one by one if the store needs the order.

    `write` copies the data, and `lend` does not. The next `write` or `finish` raises the error of a part. Only one
    thread may use a writer.

    Args:
        attempt: A function that calls another function with retries, and raises the errors that `Store` documents.
    """

    def __init__(
        self, connection: Connection, api: FsspecApi, name: str, attempt: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._connection = connection
        self._api = api
        self._name = name
        self._attempt = attempt
        self.nbytes = 0
        self._part = Collected()  # not sent yet
        self._part_bytes = UPLOAD_BYTES  # size of all parts but the last: some stores require equal sizes
        self._upload: Upload | None = None
        self._count = 0
        self._sending: list[Future[object]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append a copy of `data`."""
        view = memoryview(data).cast("B")
        while view:
            aligned = self._part.nbytes % _STEP == 0
            if self._upload is None and aligned and self._part.copied >= UPLOAD_BYTES:
                self._part_bytes = self._part.nbytes
            count = min(len(view), self._room(), _STEP - self._part.nbytes % _STEP)
            self._part.copy(view[:count])
            self.nbytes += count
            view = view[count:]

    def lend(self, data: memoryview, start: int, stop: int, *, owner: object) -> None:
        """Append the bytes [start, stop) of `data` without copying them.

        They must not change until the block of the writer has ended and `settle` of the store has returned. A reference
        to `owner` is kept until then.
        """
        if self._upload is None and self._part.nbytes < UPLOAD_BYTES:
            self._part_bytes = _lent_part(len(data))
        while start < stop:
            end = min(stop, start + self._room())
            self._part.lend(data, start, end, owner)
            self.nbytes += end - start
            start = end

    def _room(self) -> int:
        """Return how many more bytes fit into the current part. If the current part is full, first sends it."""
        most = self._part_bytes if self._count < _MANY else _LARGE
        if self._part.nbytes >= most:
            if self._upload is None:
                self._upload = self._attempt(lambda: self._api.upload(self._name))
            part, self._part = self._part, Collected()
            self._send(part.content(), last=False)
        return most - self._part.nbytes

    def finish(self) -> str | Content:
        """Complete the object, and return its tag.

        If no part has been sent yet, returns the content instead, which the caller puts in one request.
        """
        if self._upload is None:
            return self._part.content()
        self._send(self._part.content(), last=True)
        for future in self._sending:
            result_of(future)
        return str(self._attempt(self._upload.complete))

    def _send(self, content: Content, *, last: bool) -> None:
        assert self._upload is not None
        waiting = []
        for future in self._sending:
            if future.done() or self._upload.in_order:
                result_of(future)
            else:
                waiting.append(future)
        self._count += 1
        job = partial(self._upload.part, self._count, content, last=last)
        sent = self._connection.upload(lambda: self._attempt(job), self._api.held(content))
        self._sending = [*waiting, sent]

    def abort(self) -> None:
        """Discard the upload. Never raises, because the caller is already handling an error."""
        for future in self._sending:
            future.cancel()
        for future in self._sending:  # a part that arrives after the abort would cost money
            if not future.cancelled():
                future.exception()
        if self._upload is None:
            return
        try:
            self._attempt(self._upload.abort)
        except Exception as error:  # noqa: BLE001 - the caller has an error already
            logger.warning("an unfinished upload is left; the next prune of its run removes it: %s", error)


def _lent_part(nbytes: int) -> int:
    """Return the size of the parts in which lent memory of `nbytes` is uploaded.

    Up to 216 MiB are one part. A larger buffer is divided into eight parts, for eight connections, of 108 to 216 MiB: a
    part that fails is sent again as a whole.
    """
    least, most = UPLOAD_BYTES * 9 // 2, 9 * UPLOAD_BYTES
    return most if nbytes <= most else max(least, min(most, -(-nbytes // (8 * _STEP)) * _STEP))
