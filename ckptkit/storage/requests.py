"""The basic requests of a store: get, put, create-only put, list, delete, multipart upload."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ckptkit.errors import StorageError
from ckptkit.storage.body import Content
from ckptkit.storage.connection import PART_BYTES, Connection
from ckptkit.storage.store import UnfinishedUpload, Uploads

__all__ = [
    "Entries",
    "Entry",
    "FsspecApi",
    "LostUploadError",
    "NotConditionalError",
    "Range",
    "ObjectApi",
    "Sink",
    "Upload",
    "Uploads",
    "Together",
]

# Many requests of one caller at once, in the thread that all connections share: no thread each that only waits.


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


Entry = Mapping[str, Any]
"""One entry of a listing or of a look, as fsspec gives it: name, type, size, a time, a tag."""

Entries = list[Entry]  # classes here have a method called list

Sink = Callable[[int, "bytes | memoryview"], None]
"""Gets (where a piece starts, counted from the first byte asked for, the piece)."""


Range = tuple[str, int, int, Sink]
"""(name, start, stop, who gets the bytes)."""


class NotConditionalError(StorageError):
    """The store cannot be asked to write only where nothing is."""


class LostUploadError(StorageError, FileNotFoundError):
    """The store knows an upload no more, or will not complete it: all of its parts have to be sent anew."""


class Upload(Protocol):
    """One object on its way in parts; nothing is visible before `complete`."""

    in_order: bool  # whether a part may start only when the one before has ended

    def part(self, number: int, content: Content, *, last: bool) -> None:
        """Send part `number`, from 1. May be called again after a failure. Raises LostUploadError."""

    def complete(self) -> str:
        """Let the object appear, and return its tag, "" where that is not told. May be called again after a failure.
        Raises FileExistsError, LostUploadError."""

    def anew(self) -> Upload:
        """Begin the same upload once more, where this one is lost."""

    def abort(self) -> None:
        """Discard the upload."""


class ObjectApi(Protocol):
    """Requests by full name ("bucket/key"). No retries here: each method is tried again as a whole by its caller."""

    read_bytes: int
    """What one ranged read asks for where there are few."""

    checked: bool
    """Whether a CRC-32 goes with what is put."""

    def endpoint(self) -> str:
        """Return the address of the server, "" where it is not known (yet). No request is made."""

    def held(self, content: Content) -> int:
        """Return how much memory one request needs for itself to send this."""

    def info(self, name: str) -> Entry:
        """Return what is at `name`. Raises FileNotFoundError."""

    paged: bool
    """Whether a listing comes in pages, of a request each; else as one, however many requests that takes."""

    def page(self, name: str, *, recursive: bool, after: str) -> tuple[Entries, str]:
        """Return some of what lies below `name`, and what to give as `after` for more, "" at the end as at first."""

    def get(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), fewer where the object ends."""

    def get_into(self, name: str, start: int, stop: int, sink: Sink) -> int:
        """Give the bytes [start, stop) to `sink` as they come, in order, and return how many there were."""

    def begin(self, ranges: Sequence[Range]) -> Together[tuple[int, int]] | None:
        """Begin `get_into` of each range, once, and return what waits for (how many bytes there were, how many the
        object has in all) of each; None where each has to be asked for by a thread of its own."""

    def get_whole(self, name: str) -> tuple[bytes, int]:
        """Return the first bytes of an object, and its size."""

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        """Write an object in one request, and return its tag, "" where that is not told.

        `if_absent`: raises FileExistsError, where the store can. `mark` goes with it where the store has a place
        for that.
        """

    def copy(self, name: str, target: str) -> None:
        """Copy an object inside of the store; replaces what is at `target`, at once."""

    def exists(self, name: str) -> bool:
        """Tell whether there is an object, not a folder, at `name`."""

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        """Tell whether what is there is what try `tries`, which was refused, or one before it has put."""

    def upload(self, name: str) -> Upload:
        """Begin an upload in parts, if absent where the store can."""

    def delete(self, names: Sequence[str], *, folder: str = "") -> None:
        """Delete objects; what is gone already is no error. Nor is it that `folder`, one of the names, stays: there
        may be nothing of that name, or what a store over directories will not remove while it has a file open."""

    def unfinished(self, name: str) -> Uploads:
        """Return the unfinished uploads below `name`."""

    def abort(self, upload: UnfinishedUpload) -> None:
        """Throw away an unfinished upload."""

    def is_conditional(self) -> bool | None:
        """Tell whether put-if-absent is known to work, or not to; None: try it."""


class FsspecApi:
    """The plain interface of fsspec, for whatever it opens."""

    read_bytes = PART_BYTES
    checked = False
    paged = False

    def endpoint(self) -> str:
        return ""

    def held(self, content: Content) -> int:
        return content.nbytes  # it goes as one, whatever it was lent as

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @property
    def fs(self) -> Any:
        return self.connection.fs

    def info(self, name: str) -> Entry:
        found: Entry = self.fs.info(name)
        return found

    def page(self, name: str, *, recursive: bool, after: str) -> tuple[Entries, str]:
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if recursive:
                return list(self.fs.find(name, detail=True).values()), ""
            return list(self.fs.ls(name, detail=True)), ""
        return [], ""

    def get(self, name: str, start: int, stop: int) -> bytes:
        try:
            data = bytes(self.fs.cat_file(name, start=start, end=stop))
            whole = len(data) > stop - start
            if start and 0 < len(data) < stop - start:
                whole = len(data) == int(self.info(name).get("size") or 0)
            return self._cut(name, data, start, stop) if whole else data
        except (OSError, ValueError):
            if start and int(self.info(name).get("size") or 0) <= start:
                return b""  # a range that starts past the end is an error to many stores (416)
            raise
        except Exception as error:  # each fsspec file system has its own class for a refused range
            if "416" in (str(getattr(error, "code", "")), str(getattr(error, "status_code", ""))):
                return b""
            raise

    @staticmethod
    def _cut(name: str, data: bytes, start: int, stop: int) -> bytes:
        """Return a range of what a server gave whole, as some do over HTTP: of a large file each range would be it."""
        if len(data) > PART_BYTES:
            raise StorageError(
                errno.ENOTSUP,
                f"{name}: the server does not serve ranges of a file: {len(data)} bytes came where {stop - start} were "
                "asked for. Download it, and give the local copy.",
            )
        return data[start:stop]

    def exists(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.info(name).get("type") != "directory"
        return False

    def get_into(self, name: str, start: int, stop: int, sink: Sink) -> int:
        data = self.get(name, start, stop)
        sink(0, data)
        return len(data)

    def begin(self, ranges: Sequence[Range]) -> Together[tuple[int, int]] | None:
        return None

    def get_whole(self, name: str) -> tuple[bytes, int]:
        data = bytes(self.fs.cat_file(name))
        return data, len(data)

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        data = Content.of(data).joined()
        return tries > 1 and self.get(name, 0, len(data) + 1) == data

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        data = Content.of(data).joined()
        if not if_absent:
            self.fs.pipe_file(name, data)
            return ""
        try:
            self.fs.pipe_file(name, data, mode="create")
        except TypeError as error:  # a file system that knows no modes
            raise NotConditionalError(errno.ENOTSUP, f"{name}: no put-if-absent here: {error}") from error
        return ""

    def copy(self, name: str, target: str) -> None:
        self.fs.cp_file(name, target)

    def upload(self, name: str) -> Upload:
        return _FileUpload(self.fs.open(name, "wb", autocommit=False, block_size=PART_BYTES))

    def delete(self, names: Sequence[str], *, folder: str = "") -> None:
        def remove(name: str) -> None:
            with contextlib.suppress(OSError if name == folder else FileNotFoundError):
                self.fs.rm_file(name)

        for name in names:
            remove(name)

    def unfinished(self, name: str) -> Uploads:
        return []

    def abort(self, upload: UnfinishedUpload) -> None:
        raise StorageError(errno.ENOTSUP, f"{upload.name}: fsspec tells of no unfinished uploads here, nor ends them")

    def is_conditional(self) -> bool | None:
        return None


class _FileUpload:
    """A file of fsspec that is committed at the end."""

    in_order = True

    def __init__(self, handle: Any) -> None:
        # Not fs.transaction: that is one switch for every thread that shares the file system object.
        self._handle = handle
        self._broken: str | None = None

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """Refuse a second try: what a failed write had already taken over is not known."""
        if self._broken is not None:
            raise OSError(errno.EINVAL, self._broken)
        try:
            yield
        except Exception as error:  # whatever it is, it goes on to the caller
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def part(self, number: int, content: Content, *, last: bool) -> None:
        with self._once():
            self._handle.write(content.joined())

    def complete(self) -> str:
        with self._once():
            self._handle.close()
            self._handle.commit()
        return ""

    def anew(self) -> Upload:
        raise StorageError(errno.ENOTSUP, "fsspec tells of no upload that it is lost")

    def abort(self) -> None:
        try:
            self._handle.discard()
        finally:
            self._handle.closed = True  # its destructor would flush, and publish, what is left
