"""Objects in a bucket, or on anything else that fsspec opens. The only module that talks to fsspec."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ckptkit.errors import IncompleteCheckpointError, MissingExtraError, StorageError, UsageError
from ckptkit.storage.coalesce import coalesce
from ckptkit.storage.paths import checked_path
from ckptkit.storage.retry import retrying
from ckptkit.storage.store import FileInfo, ReadInto, split_url

__all__ = ["RemoteStore", "without_secrets"]

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_MAX_GAP = 512 << 10  # a request costs about as long as reading this much
_PART = 16 << 20  # one ranged read or one part of an upload
_IN_FLIGHT = 8
_PASSED_ON = (FileNotFoundError, FileExistsError, PermissionError)
_Infos = list[FileInfo]  # the class has a method called list


class RemoteStore:
    """Files below a URL that fsspec opens.

    Listings are never cached: a reader sees a checkpoint as soon as it is committed. One file system
    object serves a process; a forked rank makes its own, since event loops do not survive a fork.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self.protocol, rest = split_url(url)
        self.storage_options = dict(storage_options or {})
        self.url = f"{self.protocol}://{rest.rstrip('/')}"
        self._lock = threading.Lock()
        self._fs: Any = None
        self._pid = -1

    def __repr__(self) -> str:
        return f"RemoteStore({without_secrets(self.url)!r})"

    @property
    def local_root(self) -> str | None:
        return None

    @property
    def fs(self) -> Any:
        """The fsspec file system of this process."""
        with self._lock:
            if self._pid != os.getpid():
                self._fs, self._pid = _open_file_system(self.protocol, self.storage_options), os.getpid()
            return self._fs

    def _full(self, path: str, *, root_allowed: bool = False) -> str:
        checked_path(path, root_allowed=root_allowed)
        full = f"{self.url}/{path}" if path else self.url
        return str(self.fs._strip_protocol(full))

    def _call(self, path: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            return retrying(function)(*args, **kwargs)
        except _PASSED_ON as error:
            raise type(error)(error.errno or errno.EIO, f"{self._shown(path)}: {error}") from error
        except Exception as error:
            if isinstance(error, (StorageError, IncompleteCheckpointError)):
                raise
            raise StorageError(
                getattr(error, "errno", None) or errno.EIO,
                f"{self._shown(path)}: {type(error).__name__}: {without_secrets(str(error))}",
            ) from error

    def _shown(self, path: str) -> str:
        return without_secrets(f"{self.url}/{path}" if path else self.url)

    def child(self, path: str) -> RemoteStore:
        checked_path(path)
        store = RemoteStore(f"{self.url}/{path}", storage_options=self.storage_options)
        store._fs, store._pid = self.fs, self._pid
        return store

    # --- looking

    def info(self, path: str) -> FileInfo | None:
        full = self._full(path, root_allowed=True)
        try:
            found = self._call(path, self.fs.info, full)
        except FileNotFoundError:
            return None
        return _file_info(path, found)

    def list(self, path: str = "", *, recursive: bool = False) -> _Infos:
        full = self._full(path, root_allowed=True)
        root = self._full("", root_allowed=True)
        self.fs.invalidate_cache()
        try:
            if recursive:
                found = list(self._call(path, self.fs.find, full, detail=True).values())
            else:
                found = self._call(path, self.fs.ls, full, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = [_file_info(item["name"].rstrip("/")[len(root) :].lstrip("/"), item) for item in found]
        # A store may list the folder itself, as a marker object.
        return sorted((e for e in entries if e.path not in ("", path)), key=lambda e: e.path)

    def free_bytes(self) -> int | None:
        return None

    # --- reading

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        full = self._full(path)
        if stop is not None and stop <= start:
            return b""
        if start == 0 and stop is None:
            return bytes(self._call(path, self.fs.cat_file, full))
        try:
            return bytes(self._call(path, self.fs.cat_file, full, start=start, end=stop))
        except (StorageError, ValueError):
            # A range that starts past the end of an object is an error to the store (416).
            found = self.info(path)
            if found is not None and start >= found.size:
                return b""
            raise

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        by_file: dict[str, list[ReadInto]] = {}
        for read in reads:
            for piece in _cut(read):
                by_file.setdefault(read.path, []).append(piece)
        jobs: list[tuple[str, int, int, list[ReadInto]]] = []
        for path, items in by_file.items():
            ranges = [(item.start, item.start + item.view.nbytes) for item in items]
            for span in coalesce(ranges, max_gap=_MAX_GAP, max_span=_PART):
                jobs.append((path, span.start, span.stop, [items[i] for i in span.members]))
        batch = workers or _IN_FLIGHT
        for i in range(0, len(jobs), batch):
            self._read_jobs(jobs[i : i + batch])

    def _read_jobs(self, jobs: Sequence[tuple[str, int, int, Sequence[ReadInto]]]) -> None:
        paths = [self._full(job[0]) for job in jobs]
        starts, stops = [job[1] for job in jobs], [job[2] for job in jobs]
        answers = self.fs.cat_ranges(paths, starts, stops, batch_size=_IN_FLIGHT, on_error="return")
        for (path, start, stop, items), answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception):
                # Alone, with its own retries and its own message.
                answer = self.read(path, start, stop)  # noqa: PLW2901
            if len(answer) != stop - start:
                answer = self._read_again(path, start, stop)  # noqa: PLW2901
            for item in items:
                low = item.start - start
                item.view.cast("B")[:] = answer[low : low + item.view.nbytes]

    def _read_again(self, path: str, start: int, stop: int) -> bytes:
        # A connection cut in mid-body can look like a short answer.
        answer = self.read(path, start, stop)
        if len(answer) != stop - start:
            raise IncompleteCheckpointError(
                f"{self._shown(path)}: the object ends at byte {start + len(answer)}, but bytes up to {stop} are "
                "needed. It is truncated."
            )
        return answer

    # --- writing

    @contextlib.contextmanager
    def writer(self, path: str, *, sync: bool = True) -> Iterator[_RemoteWriter]:
        full = self._full(path)
        if self.info(path) is not None:
            raise FileExistsError(errno.EEXIST, f"{self._shown(path)} exists already")
        # autocommit=False: nothing is visible before commit(). Not fs.transaction: that is one switch for
        # every thread that shares the file system object.
        handle = self._call(path, self.fs.open, full, "wb", autocommit=False, block_size=_PART)
        try:
            yield _RemoteWriter(self, path, handle)
            self._call(path, handle.close)
            self._call(path, handle.commit)
        except BaseException:
            with contextlib.suppress(Exception):
                handle.discard()
            handle.closed = True  # its destructor would flush, and publish, what is left
            raise

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        full = self._full(path)
        if overwrite:
            self._call(path, self.fs.pipe_file, full, bytes(data))
            return
        if self.info(path) is not None:
            raise FileExistsError(errno.EEXIST, f"{self._shown(path)} exists already")
        self._put_if_absent(path, full, bytes(data))

    def _put_if_absent(self, path: str, full: str, data: bytes) -> None:
        try:
            self._call(path, self.fs.pipe_file, full, data, mode="create")
        except StorageError as error:
            # Ceph words a failed precondition so that s3fs gives EINVAL. Look whether that is what it was.
            if error.errno == errno.EINVAL and self.info(path) is not None:
                raise FileExistsError(errno.EEXIST, f"{self._shown(path)} exists already") from error
            raise

    # --- deleting

    def delete(self, paths: Iterable[str]) -> None:
        names = list(paths)
        full = [self._full(path) for path in names]
        for i in range(0, len(full), 1000):  # what one request of S3 takes
            with contextlib.suppress(FileNotFoundError):
                self._call(names[i], self.fs.rm, full[i : i + 1000])

    def delete_tree(self, path: str) -> None:
        found = self.info(path)
        if found is not None and found.kind == "file":
            self.delete([path])
        self.delete([item.path for item in self.list(path, recursive=True)])


class _RemoteWriter:
    def __init__(self, store: RemoteStore, path: str, handle: Any) -> None:
        self._store, self._path, self._handle = store, path, handle

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PART):
            self._store._call(self._path, self._handle.write, view[start : start + _PART])


def _open_file_system(protocol: str, options: Mapping[str, Any]) -> Any:
    import fsspec

    settings: dict[str, Any] = {"use_listings_cache": False, **options}
    if protocol in ("s3", "s3a"):
        # A checksum of the whole object says nothing of a range, and some servers send it all the same.
        config = {"response_checksum_validation": "when_required", **settings.get("config_kwargs", {})}
        settings["config_kwargs"] = config
    if protocol in ("gs", "gcs") and os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs asks for the kind of bucket over gRPC, which no emulator answers: it waits a minute instead.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        return fsspec.filesystem(protocol, skip_instance_cache=True, **settings)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"Install it from the checkout with: pip install -e '.[{extra}]'" if extra else str(error)
        raise MissingExtraError(f"{protocol}:// needs a package that is not installed. {hint}") from error
    except ValueError as error:
        raise UsageError(f"{protocol}:// is no protocol that fsspec knows: {error}") from error


def _file_info(path: str, found: Mapping[str, Any]) -> FileInfo:
    kind = "directory" if found.get("type") == "directory" else "file"
    size = int(found.get("size") or 0) if kind == "file" else 0
    when = found.get("LastModified") or found.get("mtime") or found.get("updated") or found.get("created")
    if isinstance(when, datetime.datetime):
        when = when.timestamp()
    return FileInfo(path, kind, size, float(when) if isinstance(when, (int, float)) else 0.0)


def _cut(read: ReadInto) -> Iterator[ReadInto]:
    view = read.view.cast("B")
    for start in range(0, len(view), _PART):
        yield ReadInto(read.path, read.start + start, view[start : start + _PART])


_SECRET = re.compile(r"(?i)((?:secret|token|password|key|signature|credential)[a-z_-]*=)[^&\s]+")
_USERINFO = re.compile(r"(\w+://)[^/@\s]+@")


def without_secrets(text: str) -> str:
    """Return `text` with user info and key-like query values of URLs replaced."""
    return _SECRET.sub(r"\1***", _USERINFO.sub(r"\1***@", text))
