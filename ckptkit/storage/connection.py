"""Opens fsspec file systems. Each file system has its own threads, memory budget and cache of small files."""

from __future__ import annotations

import collections
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptkit.digests import sha256_of
from ckptkit.errors import MissingExtraError, UsageError
from ckptkit.storage.pool import WorkerPool, result_of
from ckptkit.storage.retry import hurry, patient
from ckptkit.storage.store import SERVICES

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Opens = Callable[[str, Mapping[str, Any]], Any]

PART_BYTES = 16 << 20  # size of one ranged read if there are few reads
_THREADS = 16
READS = 20  # concurrent ranged reads
_UPLOADS = 8  # concurrent upload requests per process
_HELD_BYTES = 144 << 20  # limit for the copies that upload requests hold
_WORKS = "Use a path, s3://, gs:// or abfs://; for reading also hf://, http:// or https://."

# Prefixes of the environment variables that file systems read when they connect.
_ENVIRONMENT = ("HF_", "FSSPEC_", "HOME", *(name for service in SERVICES.values() for name in service.environment))
_connections: weakref.WeakValueDictionary[bytes, Connection] = weakref.WeakValueDictionary()
_latest: collections.deque[Connection] = collections.deque(maxlen=2)  # kept open, because a new store may need them


class Known:
    """A bounded cache of small files. Each file is cached together with its tag (ETag, generation)."""

    def __init__(self, most_bytes: int = 32 << 20) -> None:
        self._most = most_bytes
        self._nbytes = 0
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, bytes]] = {}  # oldest first

    def get(self, name: str, tag: str) -> bytes | None:
        """Return the cached content of `name`. None if the file is not cached, or is cached with another tag."""
        found = self._held.get(name)
        return found[1] if found is not None and tag and found[0] == tag else None

    def put(self, name: str, tag: str, data: bytes) -> None:
        """Cache the content of `name` with the tag `tag`. An empty tag removes `name` from the cache."""
        with self._lock:
            before = self._held.pop(name, None)
            self._nbytes -= len(before[1]) if before else 0
            if not tag or len(data) > self._most // 4:
                return
            self._held[name] = (tag, data)
            self._nbytes += len(data)
            while self._nbytes > self._most:
                self._nbytes -= len(self._held.pop(next(iter(self._held)))[1])


class Budget:
    """Limits the memory of concurrent uploads."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> None:
        """Wait until `nbytes` more bytes fit under the limit, or until nothing else is reserved. Then reserve them."""
        with self._changed:
            self._changed.wait_for(
                lambda: not nbytes or not self._held_bytes or self._held_bytes + nbytes <= self._most_bytes
            )
            self._held_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Release `nbytes` that `acquire` reserved."""
        with self._changed:
            self._held_bytes -= nbytes
            self._changed.notify_all()


class Connection:
    """A file system and its threads. All stores with the same protocol and options share one Connection.

    Attributes:
        known: Caches small files that were recently read or written.
        turns: Limits the concurrent ranged reads, because a read that waits for a free HTTP connection could time out.
        conditional: For each bucket that was tested, whether put-if-absent works.
    """

    def __init__(self, protocol: str, options: Mapping[str, Any], opens: Opens) -> None:
        import asyncio  # lazy, as in `patiently`

        self.protocol = protocol
        self.options = dict(options)
        self.known = Known()
        self.turns = asyncio.Semaphore(READS)
        self.conditional: dict[str, bool] = {}
        self._opens = opens
        self._pid = os.getpid()
        self._fs: Any = None
        self._lock = threading.Lock()
        self._readers = WorkerPool(_THREADS, thread_name_prefix="ckptkit-remote")
        self._uploaders = WorkerPool(_UPLOADS, thread_name_prefix="ckptkit-upload")
        self._budget = Budget(_HELD_BYTES)

    @classmethod
    def shared(cls, protocol: str, options: Mapping[str, Any], opens: Opens) -> Connection:
        """Return this process's connection for the given options and the current environment."""
        given = [(name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)]
        text = repr((os.getpid(), protocol, sorted(options.items(), key=lambda item: item[0]), sorted(given)))
        key = sha256_of(text.encode(errors="surrogateescape"))  # hashed, so that no secret is stored
        found = _connections.get(key)
        if found is None:  # no lock, because a fork could leave it locked; two connections at once are harmless
            found = _connections[key] = cls(protocol, options, opens)
        if found not in _latest:
            _latest.append(found)
        return found

    @property
    def fs(self) -> Any:
        """The fsspec file system. It is opened at first use. Raises UsageError in a forked process."""
        if self._pid != os.getpid():  # a forked process has no copy of the threads, and would share the sockets
            raise UsageError(
                f"This {self.protocol}:// store was opened by process {self._pid}, before a fork. Open it again in "
                f"process {os.getpid()}: connections do not survive a fork."
            )
        with self._lock:
            if self._fs is None:
                self._fs = self._open()
            return self._fs

    def _open(self) -> Any:
        import fsspec

        protocol = self.protocol
        try:
            return self._opens(protocol, self.options)
        except ImportError as error:
            service = SERVICES.get(protocol)
            hint = f"Install it from the checkout with: pip install -e '.[{service.extra}]'" if service else str(error)
            raise MissingExtraError(f"{protocol}:// needs a package that is not installed. {hint}") from error
        except (TypeError, ValueError) as error:
            if protocol not in fsspec.available_protocols():
                raise UsageError(f"{protocol}:// is not a protocol that fsspec knows: {error}. {_WORKS}") from error
            raise UsageError(
                f"{protocol}:// can't be opened with its URL alone: {error}. Pass what is missing as storage options "
                f"(--storage-option NAME=VALUE). {_WORKS}"
            ) from error

    def learn(self, bucket: str, *, conditional: bool) -> None:
        """Remember whether put-if-absent works in a bucket. Logs a warning if it does not."""
        before = self.conditional.get(bucket)
        self.conditional[bucket] = conditional
        if not conditional and before is not False:  # warn once, although each put there may fail again
            logger.warning(
                "%s://%s has no conditional writes: only the lease, which can be lost, keeps two jobs from committing "
                "the same checkpoint. Let one job at a time write there.",
                self.protocol,
                bucket,
            )

    def upload(self, function: Callable[[], T], nbytes: int) -> Future[T]:
        """Wait until the memory budget has room for `nbytes`, then run `function` in a thread.

        `function` must not wait for another upload.
        """
        self._budget.acquire(nbytes)
        try:
            future = self._uploaders.submit(function)
        except BaseException:
            self._budget.release(nbytes)
            raise
        future.add_done_callback(lambda _: self._budget.release(nbytes))
        return future

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call `function` for each item, in several threads. Return the results in order, or raise the first error."""
        todo = list(items)
        if len(todo) <= 1:
            return [function(item) for item in todo]
        with patient():
            futures = [self._readers.submit(function, item) for item in todo]
            try:
                return list(map(result_of, futures))
            except BaseException as error:
                if not isinstance(error, Exception):
                    hurry()
                raise
            finally:
                for future in futures:
                    future.cancel()
                for future in futures:  # no thread may still write into the caller's views after we return
                    if not future.cancelled():
                        future.exception()
