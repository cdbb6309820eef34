"""Stores files remotely: in a bucket, or in any other file system that fsspec opens."""

from __future__ import annotations

import contextlib
import copy
import datetime
import errno
import importlib
import logging
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ckptkit.errors import CkptkitError, IncompleteCheckpointError, StorageError
from ckptkit.redact import keep_secret, without_secrets
from ckptkit.storage.body import Content
from ckptkit.storage.coalesce import Job, Scatter, cut_reads
from ckptkit.storage.connection import PART_BYTES, Connection
from ckptkit.storage.requests import Entries, Entry, FsspecApi, Got, NotConditionalError
from ckptkit.storage.retry import advice_on, call_with_retries, hurry, is_outage, is_transient, patient, words_of
from ckptkit.storage.store import (
    SERVICES,
    FileInfo,
    ReadInto,
    Store,
    UnfinishedUpload,
    Uploads,
    checked_path,
    is_path,
    split_url,
)
from ckptkit.storage.upload import PartWriter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAGES = 16  # most pages (of 1000 names) to list; beyond that, one request per folder is faster
_ERRNO: dict[type[OSError], int] = {  # fsspec's errors have no errno
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
}
_PASSED_ON = tuple(_ERRNO)
KNOWN_BYTES = 4 << 20  # larger files are not cached
_Infos = list[FileInfo]  # inside the class, `list` is a method


class RemoteStore(Store):
    """Files under a URL that fsspec opens. Listings are never cached.

    Attributes:
        url: The URL without secrets, so that messages, logs and records may contain it.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self.protocol, rest = split_url(url)
        self.storage_options = dict(storage_options or {})
        self._place = f"{self.protocol}://{rest.rstrip('/')}"
        keep_secret([self.storage_options, self._place])
        api = _api_of(self.protocol)
        self._connection = Connection.shared(self.protocol, self.storage_options, api.open)
        self._api = api(self._connection)
        self.url = without_secrets(self._place)
        self._names_are_free = False
        self._around: Callable[[Callable[[], str]], str] | None = None

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    asking_costs = True
    sizes_are_free = False

    @property
    def fs(self) -> Any:
        """This process's fsspec file system."""
        return self._connection.fs

    def child(self, path: str) -> RemoteStore:
        checked_path(path)
        store = RemoteStore(f"{self._place}/{path}", storage_options=self.storage_options)
        store._connection, store._api = self._connection, self._api
        return store

    def with_free_names(self) -> RemoteStore:
        store = copy.copy(self)
        store._names_are_free = True
        return store

    def with_each_put(self, around: Callable[[Callable[[], str]], str]) -> RemoteStore:
        store = copy.copy(self)
        store._around = around
        return store

    # --- names and errors

    def _full(self, path: str, *, root_allowed: bool = False) -> str:
        checked_path(path, root_allowed=root_allowed)
        return str(self.fs._strip_protocol(f"{self._place}/{path}" if path else self._place))

    def _shown(self, path: str) -> str:
        return without_secrets(f"{self._place}/{path}" if path else self._place)

    @property
    def _bucket(self) -> str:
        return self._full("", root_allowed=True).partition("/")[0]

    def _server(self) -> str:
        """Return the URL and the server's address, for messages."""
        endpoint = without_secrets(self._api.endpoint())
        return f"{self.url} (at {endpoint})" if endpoint else self.url

    def _call(self, path: str, function: Callable[[], T]) -> T:
        """Call `function`, with retries, and return the result. Raises the errors that `Store` documents."""
        with self._errors(path):
            return call_with_retries(function, place=self._server())

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Translate the client's errors into the errors that `Store` documents."""
        started = time.monotonic()
        try:
            yield
        except _PASSED_ON as error:
            text = f"{self._shown(path)}: {words_of(error)}{advice_on(error, self.protocol)}"
            kind = next(kind for kind in _ERRNO if isinstance(error, kind))
            raise type(error)(error.errno or _ERRNO[kind], text) from _without_secrets(error)
        except CkptkitError:
            raise
        except Exception as error:  # noqa: BLE001 - file systems raise anything
            text = f"{self._shown(path)}: {words_of(error)}{advice_on(error, self.protocol)}"
            if is_transient(error):
                text += f" (tried for {time.monotonic() - started:.0f} s; CKPTKIT_STORAGE_TIMEOUT=10m tries longer)"
            raise StorageError(getattr(error, "errno", None) or errno.EIO, text) from _without_secrets(error)

    # --- lookups

    def info(self, path: str) -> FileInfo | None:
        full = self._full(path, root_allowed=True)
        try:
            return _file_info(path, self._call(path, lambda: self._api.info(full)))
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        full = self._full(path)
        return self._call(path, lambda: self._api.exists(full))

    def list(self, path: str = "", *, recursive: bool = False) -> _Infos:
        full = self._full(path, root_allowed=True)
        found = [item for page in self._pages(path, full, recursive=recursive) for item in page]
        # Some stores list a marker object for the folder itself.
        return [item for item in self._listed(found) if item.path != path]

    def list_at_once(self, path: str = "") -> _Infos | None:
        """Return every file under `path`, sorted by path. Returns None if this would take too many requests."""
        full = self._full(path, root_allowed=True)
        if not self._api.paged:
            return None
        found: list[Entry] = []
        for number, page in enumerate(self._pages(path, full, recursive=True)):
            if number == _PAGES:
                return None
            found += page
        return self._listed(found)

    def _listed(self, found: Entries) -> _Infos:
        """Return the entries of a listing, sorted by path. Leaves out keys that are not valid paths."""
        start = len(self._full("", root_allowed=True))
        named = ((item["name"][start:].removeprefix("/").removesuffix("/"), item) for item in found)
        return sorted((_file_info(path, item) for path, item in named if is_path(path)), key=lambda item: item.path)

    def _pages(self, path: str, full: str, *, recursive: bool) -> Iterator[Entries]:
        """Yield a listing page by page, each with its own retries: a retry of a long listing might never succeed."""
        after = ""
        while True:
            page, after = self._call(
                path,
                lambda after=after: self._api.page(full, recursive=recursive, after=after),  # type: ignore[misc]
            )
            yield page
            if not after:
                return

    # --- reading

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        full = self._full(path)
        if stop is not None and stop <= start:
            return b""
        if stop is not None and stop - start <= PART_BYTES:
            return self._call(path, lambda: self._api.get(full, start, stop))
        if start == 0 and stop is None:
            data, total = self._call(path, lambda: self._api.get_whole(full))
            return data if len(data) >= total else data + self._range(path, len(data), total)
        found = self.info(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, f"{self._shown(path)} does not exist")
        return self._range(path, start, found.size if stop is None else min(stop, found.size))

    def _range(self, path: str, start: int, stop: int) -> bytes:
        data = bytearray(max(0, stop - start))
        self.read_into(path, start, memoryview(data))
        return bytes(data)

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        jobs = cut_reads(reads, large=self._api.read_bytes)
        again = []
        for job, first in zip(jobs, self._get_once(jobs), strict=True):
            if isinstance(first, BaseException) or first[0] != job[2] - job[1]:
                again.append((job, first))
        self._connection.each(lambda tried: self._read_again(*tried), again)

    def _get_once(self, jobs: Sequence[Job]) -> Sequence[Got]:
        ranges = [(self._full(path), start, stop, Scatter(items, start)) for path, start, stop, items in jobs]
        return self._api.get_ranges(ranges) if ranges else []

    def _read_again(self, job: Job, first: Got) -> None:
        """Read a range again, with retries, after a first try. `first` is the result of the first try."""
        path, start, stop, _ = job
        tried = [first]

        def get() -> int:
            answer = tried.pop() if tried else self._get_once([job])[0]
            if isinstance(answer, BaseException):
                raise answer
            return answer[0]

        got = self._call(path, get)
        if got != stop - start:
            raise IncompleteCheckpointError(
                f"{self._shown(path)}: the object ends at byte {start + got}, but bytes up to {stop} are "
                "needed. It is truncated."
            )

    # --- writing

    @contextlib.contextmanager
    def writer(self, path: str, *, sync: bool = True) -> Iterator[PartWriter]:
        full = self._full(path)
        with patient():
            writer = PartWriter(self._connection, self._api, full, lambda job: self._call(path, job))
            try:
                yield writer
                left = writer.finish()
                if isinstance(left, Content):  # the whole object fits into one request
                    self._put(path, full, left)
                else:
                    self._confirmed(full, writer.nbytes, left)
            except BaseException as error:
                if not isinstance(error, Exception):
                    hurry()
                writer.abort()
                raise

    def _confirmed(self, full: str, nbytes: int, tag: str) -> None:
        """Called after the store has confirmed that an object is complete. Subclasses may record this."""

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        full, body = self._full(path), bytes(data)
        if overwrite:
            put = partial(self._api.put, full, body, if_absent=False)
            self._note(full, self._call(path, put if self._around is None else partial(self._around, put)), body)
            return
        if not self._names_are_free and not self._knows_conditional() and self.exists(path):
            raise FileExistsError(errno.EEXIST, f"{self._shown(path)} exists already")
        self._note(full, self._put(path, full, body), body)

    def copy_to(self, path: str, target: RemoteStore, name: str) -> None:
        """Copy an object to `name` in `target`, a directory of the same store. Replaces an existing object."""
        source, full = self._full(path), target._full(name)
        self._call(path, lambda: self._api.copy(source, full))

    def try_conditional(self, path: str, data: bytes) -> None:
        if self._knows_conditional() is not None:
            return
        full, known = self._full(path), False
        try:
            # Put the same content again, so that nothing changes even if the store accepts the put. Only a put to an
            # existing object shows whether the store really supports conditions.
            self._note(full, self._call(path, lambda: self._api.put(full, data, if_absent=True)), data)
        except FileExistsError:
            known = True
        except StorageError as error:
            logger.debug("%s refuses conditional writes: %s", self.url, error)
            if is_outage(error):
                return
        self._connection.learn(self._bucket, conditional=known)

    @property
    def has_conditional_writes(self) -> bool | None:
        return self._connection.conditional.get(self._bucket)

    def _knows_conditional(self) -> bool | None:
        """Return whether the store has conditional writes, without a request. None if only a test can tell."""
        if self.has_conditional_writes is None and self._call("", self._api.is_conditional):
            self._connection.learn(self._bucket, conditional=True)
        return self.has_conditional_writes

    def _note(self, full: str, tag: str, data: bytes) -> None:
        if len(data) <= KNOWN_BYTES:
            self._connection.known.put(full, _plain(tag), data)

    def _put(self, path: str, full: str, data: bytes | Content) -> str:
        """Create an object, and return its tag. A store without create-only puts replaces an existing object."""
        tries, mark, around = 0, secrets.token_hex(8), self._around

        def put() -> str:
            nonlocal tries
            tries += 1
            try:
                return self._api.put(full, data, if_absent=True, mark=mark)
            except NotConditionalError:
                self._connection.learn(self._bucket, conditional=False)
                return self._api.put(full, data, if_absent=False)
            except FileExistsError:
                # An earlier try may have succeeded, but its response was lost.
                if not self._api.is_mine(full, data, mark=mark, tries=tries):
                    raise
                return ""

        with self._errors(path):  # not `_call`, to keep the call stack of a put short
            return call_with_retries(put if around is None else partial(around, put), place=self._server())

    # --- deleting

    def delete(self, paths: Iterable[str]) -> None:
        names = list(paths)
        full = [self._full(path) for path in names]
        if full:
            self._call(names[0], lambda: self._api.delete(full))  # a retry deletes only what is left

    def delete_tree(self, path: str) -> None:
        """Delete the object at `path`, or everything under it. Also abort the unfinished uploads there."""
        self._full(path)  # checks the path
        self.delete([item.path for item in self.list(path, recursive=True)] or [path])
        self.end_uploads(self.unfinished_uploads(path))

    def unfinished_uploads(self, path: str = "", *, older_than_s: float = 0.0) -> Uploads:
        full = self._full(path, root_allowed=True)
        try:
            found = self._call(path, lambda: self._api.unfinished(full))
        except (FileNotFoundError, PermissionError, StorageError) as error:
            # Listing uploads needs a separate permission (s3:ListBucketMultipartUploads).
            log = logger.warning if isinstance(error, PermissionError) else logger.debug
            log("%s does not list unfinished uploads. If some are left, they cost money: %s", self.url, error)
            return []
        start, now = len(self._full("", root_allowed=True)) + 1, time.time()
        return [replace(item, path=item.name[start:]) for item in found if now - item.started >= older_than_s]

    def end_uploads(self, found: Sequence[UnfinishedUpload]) -> None:
        for upload in found:
            self._call("", lambda upload=upload: self._api.abort(upload))  # type: ignore[misc]


def _api_of(protocol: str) -> type[FsspecApi]:
    if protocol not in SERVICES:
        return FsspecApi
    module, _, name = SERVICES[protocol].api.partition(".")
    api: type[FsspecApi] = getattr(importlib.import_module(f"ckptkit.storage.{module}"), name)
    return api


def _file_info(path: str, found: Entry) -> FileInfo:
    kind = "directory" if found.get("type") == "directory" else "file"
    size = int(found.get("size") or 0) if kind == "file" else 0
    when = found.get("LastModified") or found.get("mtime") or found.get("updated") or found.get("created")
    if isinstance(when, datetime.datetime):
        when = when.timestamp()
    tag = _plain(str(found.get("generation") or found.get("ETag") or found.get("blob_id") or ""))
    return FileInfo(path, kind, size, float(when) if isinstance(when, (int, float)) else 0.0, tag)


def _plain(tag: str) -> str:
    return tag.strip('"')


def _without_secrets(error: BaseException) -> BaseException | None:
    """Return `error`, or None if its message or the message of one of its causes contains a secret."""
    text = "".join(traceback.format_exception(error))
    return error if without_secrets(text) == text else None
