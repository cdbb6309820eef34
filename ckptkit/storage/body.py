"""Builds request bodies for uploads as lists of buffers, which are sent without being joined or copied."""

from __future__ import annotations

import base64
import io
import mmap
import sys
from collections.abc import Sequence
from types import TracebackType

from ckptkit.digests import crc32

_LITTLE = 256 << 10
_BLOCK = 4 << 20
_PIECE = 512 << 10  # target size of the pieces that `read` returns, because each piece has a fixed cost


class Content:
    """The content of an object, or of one of its upload parts.

    Attributes:
        nbytes: Size of the whole content in bytes.
        copied: How many bytes were copied for this request, which is its cost in memory.
        crc32: CRC-32 of the whole content if it was computed during the writes; otherwise None.
    """

    __slots__ = ("_owners", "copied", "crc32", "nbytes", "pieces")

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview],
        *,
        copied: int,
        crc32: int | None = None,
        owners: Sequence[object] = (),
    ) -> None:
        self.pieces = pieces
        self.nbytes = sum(len(piece) for piece in pieces)
        self.copied = copied
        self.crc32 = crc32
        self._owners = owners

    @classmethod
    def of(cls, data: bytes | Content) -> Content:
        return data if isinstance(data, Content) else cls([data], copied=len(data))

    def joined(self) -> bytes:
        """Return the content as one bytes object, copying only if necessary."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], bytes):
            return self.pieces[0]
        return b"".join(self.pieces)

    def crc32_base64(self) -> str:
        """Return the CRC-32 in base64, as HTTP headers carry it."""
        found = self.crc32
        if found is None:
            found = 0
            for piece in self.pieces:
                found = crc32(piece, found)
        return base64.b64encode(found.to_bytes(4, "big")).decode()


class Collected:
    """Collects the pieces of one request. Each piece is either copied or lent (used in place)."""

    def __init__(self, *, checked: bool) -> None:
        self.nbytes = 0
        self.crc32 = 0
        self._checked = checked
        self._copied = 0
        self._pieces: list[bytes | memoryview] = []
        self._owners: list[object] = []
        self._buffer = io.BytesIO()  # for small writes
        self._block: memoryview | None = None  # for large writes
        self._filled = 0
        self._lent: tuple[memoryview, int, int] | None = None  # the last lent piece; the next one may extend it

    def copy(self, data: memoryview) -> None:
        """Append a copy of `data`."""
        self._flush_lent()
        self._copied += len(data)
        self._count(data)
        if self._block is None and self._buffer.tell() + len(data) <= _LITTLE:
            self._buffer.write(data)
            return
        while data:
            if self._block is None or self._filled == len(self._block):
                self._flush_buffer()
                self._block = _block()
            room = self._block[self._filled : self._filled + len(data)]
            room[:] = data[: len(room)]
            self._filled += len(room)
            data = data[len(room) :]

    def lend(self, source: memoryview, start: int, stop: int, owner: object) -> None:
        """Append source[start:stop] without copying it. The memory must not change until it has been sent."""
        self._flush_buffer()
        if self._lent is not None and self._lent[0] is source and self._lent[2] == start:
            self._lent = (source, self._lent[1], stop)
        else:
            self._flush_lent()
            self._lent = (source, start, stop)
            self._owners.append(owner)
        self._count(source[start:stop])

    def _count(self, data: memoryview) -> None:
        self.nbytes += len(data)
        if self._checked:
            self.crc32 = crc32(data, self.crc32)

    def _flush_lent(self) -> None:
        if self._lent is not None:
            source, start, stop = self._lent
            self._pieces.append(source[start:stop])
            self._lent = None

    def _flush_buffer(self) -> None:
        if self._buffer.tell():
            self._pieces.append(self._buffer.getvalue())
            self._buffer = io.BytesIO()
        if self._block is not None:
            self._pieces.append(self._block[: self._filled].toreadonly())
            self._block, self._filled = None, 0

    def content(self, *, after: Sequence[Collected] = (), crc32: int | None = None) -> Content:
        """Return a Content with the pieces of `after`, followed by our own.

        Args:
            crc32: CRC-32 of all these pieces together. Not needed if `after` is empty.
        """
        collected = (*after, self)
        for one in collected:
            one._flush_lent()
            one._flush_buffer()
        crc = crc32 if after else self.crc32
        return Content(
            [piece for one in collected for piece in one._pieces],
            copied=sum(one._copied for one in collected),
            crc32=crc if self._checked else None,
            owners=[owner for one in collected for owner in one._owners],
        )


def _block() -> memoryview:
    """Return a buffer whose memory goes back to the system when the buffer is freed.

    With malloc, allocations from many threads would fragment its arenas: eight files would take twice their size.
    """
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return memoryview(mmap.mmap(-1, _BLOCK, **private))


class Body(io.BytesIO):
    """A file object that reads a Content. Subclasses BytesIO because HTTP clients copy any other file object."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content
        self._at = 0  # position in the content
        self._piece = 0
        self._inside = 0  # position in the piece

    @property
    def nbytes(self) -> int:
        return self._content.nbytes

    def getbuffer(self) -> memoryview:
        # HTTP clients use this buffer only to get the length.
        return _Length(self._content.nbytes)  # type: ignore[return-value]

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.nbytes}[whence]
        self._at = self._inside = max(0, min(self._content.nbytes, base + position))
        self._piece = 0
        pieces = self._content.pieces
        while self._piece < len(pieces) and self._inside >= len(pieces[self._piece]):
            self._inside -= len(pieces[self._piece])
            self._piece += 1
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes: at least _PIECE / 2 if that many remain, even if fewer were requested."""
        if size is None or size < 0:
            size = self._content.nbytes
        wanted, found = max(size, _PIECE), list[memoryview]()
        while wanted > 0 and self._piece < len(self._content.pieces):
            piece = memoryview(self._content.pieces[self._piece])[self._inside : self._inside + wanted]
            found.append(piece)
            wanted -= len(piece)
            self._at += len(piece)
            self._inside += len(piece)
            if self._inside >= len(self._content.pieces[self._piece]):
                self._piece, self._inside = self._piece + 1, 0
            if len(found) == 1 and len(piece) >= _PIECE // 2:
                return piece  # type: ignore[return-value]  # callers also accept a view
        return b"".join(found)


class _Length:
    """A stand-in for a buffer: it has a length but no content."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __enter__(self) -> _Length:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
