"""Uploads one object from a stream of writes: in one request if it is small, otherwise in parallel parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ckptkit.digests import crc32
from ckptkit.storage.body import Collected, Content
from ckptkit.storage.connection import UPLOAD_BYTES, Connection
from ckptkit.storage.pool import result_of
from ckptkit.storage.requests import FsspecApi, LostUploadError, Upload

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MANY = 8000  # from this many parts on, parts are larger, because S3 accepts at most 10 000
_LARGE = 512 << 20
_LEAST = 5 << 20  # the smallest part that S3 accepts, except for the last
_TIMES = 3  # how often to send an object at most, if the store keeps losing the upload


class PartWriter:
    """Splits a stream of writes into parts. Sends several at once, or one by one if the store needs them in order.

    `write` copies its data. A writer buffers at most two parts. `Connection.own.budget` limits the memory that all
    writers of the process have in flight. While the writers together buffer a lot, new uploads use smaller parts and
    buffer only one.

    `lend` does not copy. If the store loses an upload whose data was all lent, it is sent again.

    If a part fails, the next write, or `finish`, raises its error. Only one thread may use a writer.

    Attributes:
        nbytes: Number of bytes written so far.

    Args:
        attempt: Calls a function with retries. Raises a Store's errors.
    """

    def __init__(
        self, connection: Connection, api: FsspecApi, name: str, attempt: Callable[[Callable[[], object]], object]
    ) -> None:
        self._connection = connection
        self._api = api
        self._name = name
        self._attempt = attempt
        self.nbytes = 0
        self._parts = [self._collected()]  # not sent yet; several may become one request
        self._crc32 = 0  # of these parts together
        self._part_bytes = UPLOAD_BYTES  # size of all parts but the last: some stores require equal sizes
        self._most = 2  # how many parts may become one request
        self._copied = 0  # bytes that are buffered and not sent
        self._upload: Upload | None = None
        self._sent: list[Future[object]] = []
        self._count = 0
        self._lent: list[Content] | None = []  # everything sent; None once copied data was sent, because it is not kept
        self._lost: LostUploadError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append a copy of `data`."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            room, step = self._room(copying=True), _step()
            piece = view[at : at + min(room, step - self._parts[-1].nbytes % step)]
            self._parts[-1].copy(piece)
            self._collect(len(piece))
            self._note(piece)
            at += len(piece)

    def lend(self, data: memoryview, start: int, stop: int, *, owner: object) -> None:
        """Append the bytes [start, stop) of `data` without copying them.

        They must not change until the writer's block has ended and the store's `settle` has returned. `owner` keeps the
        memory alive until then.
        """
        if self._upload is None and len(self._parts) == 1 and self._parts[0].nbytes < UPLOAD_BYTES:
            self._part_bytes, self._most = _part_of(len(data)), 2  # lent memory needs no buffer, so parts may be large
        while start < stop:
            end = min(stop, start + self._room())
            self._parts[-1].lend(data, start, end, owner)
            self._note(data[start:end])
            start = end

    def _collected(self) -> Collected:
        return Collected(checked=self._api.checked)

    def _note(self, piece: memoryview) -> None:
        self.nbytes += len(piece)
        if len(self._parts) > 1 and self._api.checked:  # the first part has its own CRC-32
            self._crc32 = crc32(piece, self._crc32)

    def _collect(self, nbytes: int) -> None:
        self._copied += nbytes
        self._connection.own.budget.collect(nbytes)

    def _room(self, *, copying: bool = False) -> int:
        """Return how many more bytes fit into the current part. A full part is sent once more data follows."""
        if copying and self._is_crowded():
            self._part_bytes = self._parts[0].nbytes
        most = self._part_bytes if self._count < _MANY else _LARGE
        room = most - self._parts[-1].nbytes
        if room > 0:
            return room
        # Sending both parts in one request saves two requests and a wait.
        if self._upload is not None or len(self._parts) == self._most or self._is_crowded():
            self._send(last=False)
        elif len(self._parts) == 1:
            self._crc32 = self._parts[0].crc32
        self._parts.append(self._collected())
        return most

    def _is_crowded(self) -> bool:
        """Return whether to send the first part early, because all writers together have buffered too much."""
        if self._upload is not None or len(self._parts) > 1 or not self._copied:
            return False
        nbytes = self._parts[0].nbytes
        return nbytes > 0 and nbytes % _step() == 0 and self._connection.own.budget.crowded

    def finish(self) -> str | Content:
        """Complete the object and return its tag.

        If one request is enough, return the content for the caller to put.
        """
        if self._upload is None:
            *before, last = self._parts
            self._collect(-self._copied)
            self._copied = 0
            return last.content(after=before, crc32=self._crc32)
        self._send(last=True)
        for _ in range(_TIMES - 1):
            try:
                return self._complete()
            except LostUploadError:
                if self._lent is None:
                    raise
            self._begin_again()
        return self._complete()

    def _complete(self) -> str:
        assert self._upload is not None
        self._wait()
        if self._lost is None:
            try:
                return str(self._attempt(self._upload.complete))
            except LostUploadError as error:
                self._lose(error)
        assert self._lost is not None
        raise self._lost

    def _lose(self, error: LostUploadError) -> None:
        """Record that the upload is lost. Raises the error if its parts can't be sent again."""
        if self._lent is None:
            raise error
        self._lost = error

    def _begin_again(self) -> None:
        """Start the upload again and send everything."""
        assert self._upload is not None and self._lent is not None
        logger.info("the store lost an upload (%s); sending it again", self._lost)
        self._end_upload()
        anew, lent, self._lent = self._upload.anew, self._lent, []
        made: list[Upload] = []
        self._attempt(lambda: made.append(anew()))
        self._upload, self._lost, self._count = made[0], None, 0
        for content in lent:
            self._send_part(content, last=content is lent[-1])

    def abort(self) -> None:
        """Discard the upload. Never raises, because the caller already has an error."""
        for future in self._sent:
            future.cancel()
        for future in self._sent:  # a part that arrives after the abort would cost money
            if not future.cancelled():
                future.exception()
        self._end_upload()
        self._parts = [self._collected()]
        self._collect(-self._copied)

    def _end_upload(self) -> None:
        if self._upload is not None:
            try:
                self._attempt(self._upload.abort)
            except Exception as error:  # noqa: BLE001 - the caller has an error already, or tries again
                logger.warning("an unfinished upload is left; the next prune of its run removes it: %s", error)

    def _send(self, *, last: bool) -> None:
        """Send all collected parts."""
        if self._upload is None:
            made: list[Upload] = []
            self._attempt(lambda: made.append(self._api.upload(self._name)))
            self._upload = made[0]
        parts, self._parts = self._parts, []
        for i, part in enumerate(parts):
            content = part.content()
            self._send_part(content, last=last and i == len(parts) - 1)
            self._collect(-content.copied)

    def _send_part(self, content: Content, *, last: bool) -> None:
        assert self._upload is not None
        if self._upload.in_order:
            self._wait()
        self._raise_early()
        if content.copied:
            self._lent = None
        elif self._lent is not None:
            self._lent.append(content)
        if self._lost is not None:
            self._lose(self._lost)
            return
        self._count += 1
        job = partial(self._upload.part, self._count, content, last=last)
        self._sent.append(self._connection.upload(lambda: self._attempt(job), self._api.held(content)))

    def _raise_early(self) -> None:
        """Raise a failed part's error. Forget the parts that are done."""
        waiting = []
        for future in self._sent:
            if not future.done():
                waiting.append(future)
                continue
            try:
                future.result()
            except LostUploadError as error:
                self._lose(error)
        self._sent = waiting

    def _wait(self) -> None:
        for future in self._sent:
            with contextlib.suppress(Exception):
                result_of(future)
        self._raise_early()


def _step() -> int:
    """Return the granularity of parts in bytes: a part may end at any multiple. GCS requires multiples of 256 KiB."""
    return max(_LEAST, UPLOAD_BYTES // 3)


def _part_of(nbytes: int) -> int:
    """Return the size of a part, if `nbytes` are uploaded without a copy.

    It is an eighth of `nbytes`, for eight connections, but at least 108 MiB and at most 216 MiB.

    Larger parts need fewer requests, but if a part fails, all of it is sent again.
    """
    return max(3 * UPLOAD_BYTES, min(6 * UPLOAD_BYTES, -(-nbytes // (8 * _step())) * _step()))
