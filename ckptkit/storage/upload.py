"""Uploads one object from a stream of writes: small ones in one request, large ones in parallel parts."""

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
from ckptkit.storage.requests import LostUploadError, ObjectApi, Upload

__all__ = ["PartWriter"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MANY = 8000  # S3 takes 10 000 parts
_LARGE = 512 << 20
_LEAST = 5 << 20  # S3 takes no smaller part before the last
_TIMES = 3  # that an object is sent, where the store loses the upload


class PartWriter:
    """Collects what is written into parts and sends them, several at once where the store takes any order.

    What is written is copied: two parts are held at most, and `Connection.budget` bounds what all writers of the
    process have on its way. Where they hold much beside that, a writer that begins to send takes smaller parts, and
    does not collect two. What is lent is held by its owner; an object of which nothing was copied is sent again where
    the store loses an upload. A failed part is raised by the next write, or by `finish`. Used by one thread.

    Attributes:
        nbytes: All that was written.

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
        self.nbytes = 0
        self._parts = [self._collected()]  # not sent; as many as may yet become one request together
        self._crc32 = 0  # of those together
        self._part_bytes = UPLOAD_BYTES  # the same for all parts but the last: some stores want that
        self._most = 2  # parts that one request takes
        self._copied = 0  # of what is not sent
        self._upload: Upload | None = None
        self._sent: list[Future[None]] = []
        self._count = 0
        self._kept: list[Content] | None = []  # all that was sent; None where some of it is gone
        self._lost: LostUploadError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take over `data`; it may be changed afterwards."""
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
        """Append the bytes [start, stop) of `data` without a copy.

        They must stay as they are until the block of the writer has ended and, where the store has `settle`, that has
        returned. `owner` keeps the memory alive until then.
        """
        if self._upload is None and len(self._parts) == 1 and self._parts[0].nbytes < UPLOAD_BYTES:
            self._part_bytes, self._most = _part_of(len(data)), 2  # it costs no memory
        while start < stop:
            end = min(stop, start + self._room())
            self._parts[-1].lend(data, start, end, owner)
            self._note(data[start:end])
            start = end

    def _collected(self) -> Collected:
        return Collected(checked=self._api.checked)

    def _note(self, piece: memoryview) -> None:
        self.nbytes += len(piece)
        if len(self._parts) > 1 and self._api.checked:  # of the first part alone it is the part's
            self._crc32 = crc32(piece, self._crc32)

    def _collect(self, nbytes: int) -> None:
        self._copied += nbytes
        self._connection.budget.collect(nbytes)

    def _room(self, *, copying: bool = False) -> int:
        """Return how much goes into the last part; one that is full is sent once it is known not to be the last."""
        if copying and self._is_crowded():
            self._part_bytes = self._parts[0].nbytes
        most = self._part_bytes if self._count < _MANY else _LARGE
        room = most - self._parts[-1].nbytes
        if room > 0:
            return room
        # One request in place of two parts is two requests and a wait less.
        if self._upload is not None or len(self._parts) == self._most or self._is_crowded():
            self._send(last=False)
        elif len(self._parts) == 1:
            self._crc32 = self._parts[0].crc32
        self._parts.append(self._collected())
        return most

    def _is_crowded(self) -> bool:
        """Whether what is collected so far should be the first part, and go: all writers together hold much."""
        if self._upload is not None or len(self._parts) > 1 or not self._copied:
            return False
        nbytes = self._parts[0].nbytes
        return nbytes > 0 and nbytes % _step() == 0 and self._connection.budget.crowded

    def finish(self) -> str | Content:
        """Let the object appear, and return its tag; where one request will do, return all of it, to be put."""
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
                if self._kept is None:
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
        """Remember that the upload is lost; raises that, where what it had can't be sent again."""
        if self._kept is None:
            raise error
        self._lost = error

    def _begin_again(self) -> None:
        """Send all of it once more."""
        assert self._upload is not None and self._kept is not None
        logger.info("the store lost an upload (%s); it begins again", self._lost)
        self._end_upload()
        anew, kept, self._kept = self._upload.anew, self._kept, []
        made: list[Upload] = []
        self._attempt(lambda: made.append(anew()))
        self._upload, self._lost, self._count = made[0], None, 0
        for content in kept:
            self._send_part(content, last=content is kept[-1])

    def abort(self) -> None:
        """Leave nothing behind. Never raises: the caller has an error already."""
        for future in self._sent:
            future.cancel()
        for future in self._sent:  # a part that arrives after the abort would begin to cost again
            if not future.cancelled():
                future.exception()
        self._end_upload()
        self._parts = [self._collected()]
        self._collect(-self._copied)

    def _end_upload(self) -> None:
        if self._upload is not None:
            try:
                self._attempt(self._upload.abort)
            except Exception as error:  # noqa: BLE001 - the caller has an error already, or begins again
                logger.warning("an unfinished upload was left behind; the next prune of its run removes it: %s", error)

    def _send(self, *, last: bool) -> None:
        """Send all that was collected, in parts."""
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
            self._kept = None
        elif self._kept is not None:
            self._kept.append(content)
        if self._lost is not None:
            self._lose(self._lost)
            return
        self._count += 1
        job = partial(self._upload.part, self._count, content, last=last)
        self._sent.append(self._connection.upload(lambda: self._part(job), self._api.held(content)))

    def _part(self, job: Callable[[], None]) -> None:
        self._attempt(job)

    def _raise_early(self) -> None:
        """Raise what a part failed with; forget those that are done."""
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
                future.result()
        self._raise_early()


def _step() -> int:
    """Return where a part may end early: a whole part is a multiple of it, and GCS wants multiples of 256 KiB."""
    return max(_LEAST, UPLOAD_BYTES // 3)


def _part_of(nbytes: int) -> int:
    """Return how large the parts of an object are that lends so many bytes in a row: an eighth, which goes up over as
    many connections, of 108 to 216 MiB. Each part is a request; but what fails is sent again as a whole."""
    return max(3 * UPLOAD_BYTES, min(6 * UPLOAD_BYTES, -(-nbytes // (8 * _step())) * _step()))
