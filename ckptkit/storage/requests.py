"""Makes the basic requests of a store: get, put, create-only put, list, delete, multipart upload."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckptkit.errors import StorageError
from ckptkit.storage.body import Content
from ckptkit.storage.connection import PART_BYTES, Connection
from ckptkit.storage.store import UnfinishedUpload, Uploads

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

Entry = Mapping[str, Any]
"""One entry of a listing, in fsspec's form: name, type, size, and perhaps a time and a tag."""

Entries = list[Entry]  # inside these classes, `list` is a method

Sink = Callable[[int, "bytes | memoryview"], None]
"""Function that receives each piece of a range. The arguments are the offset in the range and the piece."""

Range = tuple[str, int, int, Sink]
"""One ranged read: (name, start, stop, sink). The sink receives the bytes in order, as they arrive."""

Got = tuple[int, int] | BaseException
"""The result of a ranged read: (bytes read, object size or -1 if unknown), or the error."""


class NotConditionalError(StorageError):
    """The store has no create-only puts."""


def run_together(
    loop: asyncio.AbstractEventLoop, requests: Sequence[Callable[[], Coroutine[Any, Any, T]]]
) -> list[T | BaseException]:
    """Run requests (functions that return coroutines) on the event loop of another thread. Return results or errors.

    When this function returns or raises, no request is running, even after Ctrl-C.
    """
    import asyncio  # lazy, as in `patiently`

    answers: list[T | BaseException] = []
    tasks: list[asyncio.Task[Any] | None] = []
    stopped, ended = False, threading.Event()

    async def run() -> None:
        tasks.append(asyncio.current_task())
        try:
            if not stopped:
                answers.extend(await asyncio.gather(*(request() for request in requests), return_exceptions=True))
        finally:
            ended.set()

    def stop() -> None:
        nonlocal stopped
        stopped = True
        for task in tasks:
            assert task is not None
            task.cancel()

    asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        while not ended.wait(1):  # with a timeout, so that signals are handled
            pass
    except BaseException:
        loop.call_soon_threadsafe(stop)
        ended.wait()
        raise
    return answers


class Upload(Protocol):
    """An upload in parts. The object exists after `complete`."""

    in_order: bool  # whether a part may start only after the previous one has ended

    def part(self, number: int, content: Content, *, last: bool) -> None:
        """Send a part. `number` starts at 1. May be called again after a failure."""

    def complete(self) -> str:
        """Publish the object, and return its tag ("" if unknown). May be called again after a failure."""

    def abort(self) -> None:
        """Discard the upload."""


class FsspecApi:
    """Makes requests through fsspec's generic interface. Subclasses call the client of a store directly.

    Names are complete ("bucket/key"). No method retries: callers repeat the whole call.
    """

    read_bytes = PART_BYTES
    """Size of one ranged read in bytes, if there are few reads."""

    paged = False
    """Whether `page` returns a listing page by page, with one request per page."""

    streams = False
    """Whether a put sends lent memory without a copy."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @classmethod
    def open(cls, protocol: str, options: Mapping[str, Any]) -> Any:
        """Open the fsspec file system. Makes no request."""
        import fsspec

        return fsspec.filesystem(protocol, skip_instance_cache=True, **{"use_listings_cache": False, **options})

    @property
    def fs(self) -> Any:
        return self.connection.fs

    def endpoint(self) -> str:
        """Return the address of the server, or "" if unknown. Makes no request."""
        return ""

    def held(self, content: Content) -> int:
        """Return how many bytes of additional memory a request needs to send `content`."""
        return content.copied if self.streams else content.nbytes

    def info(self, name: str) -> Entry:
        """Return the entry of the object or folder `name`. Raises FileNotFoundError."""
        found: Entry = self.fs.info(name)
        return found

    def exists(self, name: str) -> bool:
        """Return whether `name` is an object, not a folder."""
        with contextlib.suppress(FileNotFoundError):
            return self.info(name).get("type") != "directory"
        return False

    def page(self, name: str, *, recursive: bool, after: str) -> tuple[Entries, str]:
        """Return one page of the entries under `name`, and `after` for the next page ("" if there is none)."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if recursive:
                return list(self.fs.find(name, detail=True).values()), ""
            return list(self.fs.ls(name, detail=True)), ""
        return [], ""

    def get(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer at the end of the object."""
        try:
            data = bytes(self.fs.cat_file(name, start=start, end=stop))
            whole = len(data) > stop - start
            if start and 0 < len(data) < stop - start:
                whole = len(data) == int(self.info(name).get("size") or 0)
            return self._cut(name, data, start, stop) if whole else data
        except (OSError, ValueError):
            if start and int(self.info(name).get("size") or 0) <= start:
                return b""  # many stores refuse a range that starts past the end (416)
            raise
        except Exception as error:  # each fsspec file system has its own error class for a refused range
            if "416" in (str(getattr(error, "code", "")), str(getattr(error, "status_code", ""))):
                return b""
            raise

    @staticmethod
    def _cut(name: str, data: bytes, start: int, stop: int) -> bytes:
        """Cut the bytes [start, stop) out of a whole file that an HTTP server has sent. Refuses large files."""
        if len(data) > PART_BYTES:
            raise StorageError(
                errno.ENOTSUP,
                f"{name}: the server ignores ranges: {stop - start} bytes were requested, {len(data)} bytes came. "
                "Download the file and use the local copy.",
            )
        return data[start:stop]

    def get_ranges(self, ranges: Sequence[Range]) -> list[Got]:
        """Make all reads concurrently, without retries. Return each error, or (bytes read, object size or -1)."""

        def get(item: Range) -> Got:
            name, start, stop, sink = item
            try:
                data = self.get(name, start, stop)
            except Exception as error:  # noqa: BLE001 - the caller decides
                return error
            sink(0, data)
            return len(data), -1

        return self.connection.each(get, ranges)

    def get_whole(self, name: str) -> tuple[bytes, int]:
        """Return an object's bytes and its size. Subclasses may return only the first bytes of a large object."""
        data = bytes(self.fs.cat_file(name))
        return data, len(data)

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        """Write an object in one request, and return its ETag or generation ("" if unknown).

        Args:
            if_absent: Raise FileExistsError if the object exists, or NotConditionalError if the store can't tell.
            mark: A text that identifies this put. It is stored in the object's metadata if the store supports this.
        """
        data = Content.of(data).joined()
        if not if_absent:
            self.fs.pipe_file(name, data)
            return ""
        try:
            self.fs.pipe_file(name, data, mode="create")
        except TypeError as error:  # this file system's `pipe_file` has no `mode`
            raise NotConditionalError(errno.ENOTSUP, f"{name}: the store has no put-if-absent: {error}") from error
        return ""

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        """Return whether an existing object was written by an earlier try of the same put.

        Args:
            mark: The text that identifies the put, as for `put`.
            tries: Number of tries so far, including the one that found the object.
        """
        data = Content.of(data).joined()
        return tries > 1 and self.get(name, 0, len(data) + 1) == data

    def copy(self, name: str, target: str) -> None:
        """Copy an object to `target`, a name in the same store, in one step. Replaces an existing object."""
        self.fs.cp_file(name, target)

    def upload(self, name: str) -> Upload:
        """Begin an upload in parts. The upload is create-only if the store supports that."""
        return _FileUpload(self.fs.open(name, "wb", autocommit=False, block_size=PART_BYTES))

    def delete(self, names: list[str]) -> None:
        """Delete objects. Removes each deleted object from `names`, so that a retry continues with the rest.

        Ignores missing objects.
        """

        def failure(name: str) -> Exception | None:
            try:
                self.delete_one(name)
            except FileNotFoundError:
                pass
            except PermissionError as error:
                return PermissionError(errno.EACCES, f"{name} was not deleted: {error}")
            except Exception as error:  # noqa: BLE001 - raised below
                return error
            return None

        errors = self.connection.each(failure, names)
        names[:] = [name for name, error in zip(names, errors, strict=True) if error is not None]
        for error in filter(None, errors):
            raise error

    def delete_one(self, name: str) -> None:
        """Delete an object. Raises FileNotFoundError if the store reports that the object is missing."""
        self.fs.rm_file(name)

    def unfinished(self, name: str) -> Uploads:
        """Return the unfinished uploads under `name`."""
        return []

    def abort(self, upload: UnfinishedUpload) -> None:
        """Abort an unfinished upload."""
        raise StorageError(errno.ENOTSUP, f"{upload.name}: fsspec can't abort uploads here")

    def is_conditional(self) -> bool:
        """Return whether put-if-absent is known to work. If False, the caller must test the store."""
        return False


class _FileUpload:
    """An upload through an open fsspec file. `complete` commits the file."""

    in_order = True

    def __init__(self, handle: Any) -> None:
        # Not fs.transaction, which would apply to every thread that shares the file system object.
        self._handle = handle
        self._failure: str | None = None

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """Raise if an earlier try has failed. A write can't be repeated, as it is unknown how much data was sent."""
        if self._failure is not None:
            raise OSError(errno.EINVAL, self._failure)
        try:
            yield
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def part(self, number: int, content: Content, *, last: bool) -> None:
        with self._once():
            self._handle.write(content.joined())

    def complete(self) -> str:
        with self._once():
            self._handle.close()
            self._handle.commit()
        return ""

    def abort(self) -> None:
        try:
            self._handle.discard()
        finally:
            self._handle.closed = True  # an open file's destructor would flush and publish the rest
