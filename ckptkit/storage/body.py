"""Builds the bodies of upload requests. A body is a list of buffers, which are sent without being joined or copied."""

from __future__ import annotations

import base64
import contextlib
import io
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ckptkit.digests import crc32

_BLOCK = 4 << 20
_PIECE = 512 << 10  # target size of the pieces that `read` returns, because each piece has a fixed cost


class Content:
    """The content of an object, or of one part of an upload.

    Attributes:
        pieces: The buffers, none of them empty.
        copied: Number of bytes that were copied. The other bytes are used in place and need no additional memory.
    """

    __slots__ = ("_owners", "_stops", "copied", "nbytes", "pieces")

    def __init__(self, pieces: Sequence[bytes | memoryview], *, copied: int, owners: Sequence[object] = ()) -> None:
        self.pieces = [piece for piece in pieces if piece]
        self.copied = copied
        self._stops = list(accumulate(map(len, self.pieces)))
        self.nbytes = self._stops[-1] if self._stops else 0
        self._owners = owners

    @classmethod
    def of(cls, data: bytes | Content) -> Content:
        return data if isinstance(data, Content) else cls([data], copied=len(data))

    def between(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes [start, stop) without copying them."""
        found, index = list[memoryview](), bisect_right(self._stops, start)
        while start < stop:
            piece, end = memoryview(self.pieces[index]), self._stops[index]
            found.append(piece[len(piece) + start - end : len(piece) + stop - end if stop < end else len(piece)])
            start, index = end, index + 1
        return found

    def joined(self) -> bytes:
        """Return the content as one bytes object. Copies the content only if necessary."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], bytes):
            return self.pieces[0]
        return b"".join(self.pieces)

    def crc32_base64(self) -> str:
        """Return the CRC-32 in base64, the encoding of HTTP headers."""
        found = 0
        for piece in self.pieces:
            found = crc32(piece, found)
        return base64.b64encode(found.to_bytes(4, "big")).decode()


class Collected:
    """Collects the buffers of one request body. A buffer is either copied or lent. A lent buffer is used in place."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.copied = 0
        self._pieces: list[tuple[memoryview, int, int]] = []  # (buffer, start, stop)
        self._owners: list[object] = []
        self._block = memoryview(b"")  # the next copies go into this buffer, from `_filled` on
        self._filled = 0

    def copy(self, data: memoryview) -> None:
        """Append a copy of `data`."""
        self.copied += len(data)
        while data:
            if self._filled == len(self._block):
                self._block, self._filled = _block(), 0
            stop = min(len(self._block), self._filled + len(data))
            count = stop - self._filled
            self._block[self._filled : stop] = data[:count]
            self._append(self._block, self._filled, stop)
            self._filled, data = stop, data[count:]

    def lend(self, source: memoryview, start: int, stop: int, owner: object) -> None:
        """Append source[start:stop] without copying it. The memory must not change until the request has been sent."""
        if self._append(source, start, stop):
            self._owners.append(owner)

    def _append(self, source: memoryview, start: int, stop: int) -> bool:
        """Append source[start:stop]. Return True if this adds a piece, and False if it extends the last piece."""
        self.nbytes += stop - start
        if self._pieces and self._pieces[-1][0] is source and self._pieces[-1][2] == start:
            self._pieces[-1] = (source, self._pieces[-1][1], stop)
            return False
        self._pieces.append((source, start, stop))
        return True

    def content(self) -> Content:
        pieces = [source[start:stop].toreadonly() for source, start, stop in self._pieces]
        return Content(pieces, copied=self.copied, owners=self._owners)


def _block() -> memoryview:
    """Return a buffer whose memory goes back to the system when it is freed.

    malloc would fragment its heap: writing eight files would take twice as much memory as the files contain.
    """
    return memoryview(mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Body(io.BytesIO):
    """A file object that reads a `Content`. Subclasses BytesIO because HTTP clients copy any other file object."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content
        self._at = 0
        self.nbytes = content.nbytes

    def getbuffer(self) -> memoryview:
        # aiohttp uses this buffer only to get the length: with body.getbuffer() as buffer: len(buffer)
        return contextlib.nullcontext(range(self.nbytes))  # type: ignore[return-value]

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence]
        self._at = max(0, min(self.nbytes, base + position))
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes: at least _PIECE / 2 bytes (or all that are left), even if `size` is smaller."""
        wanted = self.nbytes if size is None or size < 0 else max(size, _PIECE)
        found = self._content.between(self._at, min(self.nbytes, self._at + wanted))
        if found and len(found[0]) >= _PIECE // 2:
            found = found[:1]
        self._at += sum(map(len, found))
        return found[0] if len(found) == 1 else b"".join(found)  # type: ignore[return-value]  # callers accept views
