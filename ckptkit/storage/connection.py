"""One fsspec file system per process, with its threads and memory; nothing survives a fork."""

from __future__ import annotations

import asyncio
import collections
import ipaddress
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ckptkit.digests import sha256_of
from ckptkit.errors import MissingExtraError, UsageError
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.retry import BACKSTOP_S, BODY_S, SOON_S, hurry, patient, patiently
from ckptkit.storage.store import SERVICES

__all__ = ["PART_BYTES", "UPLOAD_BYTES", "Connection"]

T = TypeVar("T")
R = TypeVar("R")

PART_BYTES = 16 << 20  # one ranged read, where there are few
UPLOAD_BYTES = 36 << 20  # one part of an upload; what is no larger than two goes up in one request
_THREADS = 16  # requests in flight; what they read goes straight to where it is wanted
_READS = _THREADS + 4  # ranges in flight
_UPLOADS = 8  # on their way up at once, by all writers of a process
_HELD_BYTES = 144 << 20  # of those, what is held for them alone: four parts, or two files of one request each
_MUCH = 1 << 20  # of a body that goes up: the server may have to wait for its disk before it answers
_WORKS = "What works: paths, s3://, gs://, abfs://; hf://, http:// and https:// to read from."


# What file systems read when they connect.
_ENVIRONMENT = ("HF_", "FSSPEC_", "HOME", *(name for service in SERVICES.values() for name in service.environment))
_inherited: list[Any] = []  # what a fork has of its parent is never closed here: it would speak on its parent's sockets
_connections: weakref.WeakValueDictionary[bytes, Connection] = weakref.WeakValueDictionary()
_latest: collections.deque[Connection] = collections.deque(maxlen=2)  # whose users may be back in a moment


def _keep_what_was_inherited() -> None:
    _inherited.extend(connection._held for connection in list(_connections.values()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_what_was_inherited)


class Known:
    """Contents of small files by their tags, so that what has not changed is not fetched again. Bounded."""

    def __init__(self, most_bytes: int = 32 << 20) -> None:
        self._most = most_bytes
        self._nbytes = 0
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, bytes]] = {}  # in the order they came

    def get(self, name: str, tag: str) -> bytes | None:
        """Return what `name` holds if it has this tag."""
        found = self._held.get(name)
        return found[1] if found is not None and tag and found[0] == tag else None

    def put(self, name: str, tag: str, data: bytes) -> None:
        """Keep what `name` holds with this tag, in place of what was kept; no tag: forget it."""
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
    """Bounds what is on its way up: how many requests, and how much memory is held for them alone; and knows how much
    is collected that is not on its way yet."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._free, self._free_bytes = most, most_bytes
        self._most, self._most_bytes = most, most_bytes
        self.collected = 0  # not on its way yet
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> None:
        """Wait until one more request may go that holds `nbytes`; one that is too large goes alone."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._free == self._most or (self._free > 0 and (not nbytes or nbytes <= self._free_bytes))
            )
            self._free -= 1
            self._free_bytes -= nbytes

    def release(self, nbytes: int) -> None:
        """Give back what was acquired."""
        with self._changed:
            self._free += 1
            self._free_bytes += nbytes
            self._changed.notify_all()

    def collect(self, nbytes: int) -> None:
        """Count what a writer copied, and (less than 0) what it has let go of."""
        with self._changed:
            self.collected += nbytes

    @property
    def crowded(self) -> bool:
        """Whether writers have collected more than may be on its way."""
        return self.collected > self._most_bytes


@dataclass(frozen=True, slots=True)
class _OfProcess:
    pid: int
    fs: Any
    pool: WorkerPool
    budget: Budget
    known: Known
    turns: asyncio.Semaphore


class Connection:
    """What the stores below one URL share. A forked process opens its own at the first use.

    fsspec runs one event loop in a thread of its own, which a child does not have; a lock that another thread held
    at the fork stays held in the child. So everything here is by process id, the locks included.
    """

    def __init__(self, protocol: str, options: Mapping[str, Any]) -> None:
        self.protocol = protocol
        self.options = dict(options)
        self._locks: dict[int, threading.Lock] = {}
        self._held: _OfProcess | None = None
        # Whether put-if-absent works, by bucket, once that was tried: a server may heed it in one and not in another.
        self.conditional: dict[str, bool] = {}

    @classmethod
    def shared(cls, protocol: str, options: Mapping[str, Any]) -> Connection:
        """Return the connection that others with these options use now, under the same environment; else a new one."""
        given = [(name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)]
        text = repr((protocol, sorted(options.items(), key=lambda item: item[0]), sorted(given)))
        key = sha256_of(text.encode(errors="surrogateescape"))  # no secret is kept by it
        found = _connections.get(key)
        if found is None:  # no lock: two at once do no harm, and a fork could keep it
            found = _connections[key] = cls(protocol, options)
        if found not in _latest:
            _latest.append(found)
        return found

    def _mine(self) -> _OfProcess:
        held, pid = self._held, os.getpid()
        if held is not None and held.pid == pid:
            return held
        with self._locks.setdefault(pid, threading.Lock()):
            if self._held is None or self._held.pid != pid:
                _inherited.append(self._held)
                self._held = _OfProcess(
                    pid,
                    _open_file_system(self.protocol, self.options),
                    WorkerPool(_THREADS, thread_name_prefix="ckptkit-remote"),
                    Budget(_UPLOADS, _HELD_BYTES),
                    Known(),
                    asyncio.Semaphore(_READS),
                )
            return self._held

    @property
    def fs(self) -> Any:
        """The fsspec file system of this process."""
        return self._mine().fs

    @property
    def budget(self) -> Budget:
        """Asked for each part that is on its way: what bounds the memory of uploads."""
        return self._mine().budget

    @property
    def turns(self) -> asyncio.Semaphore:
        """Held for each range that is being read. Else ranges would wait for a connection, which one can't tell from a
        server that says nothing."""
        return self._mine().turns

    @property
    def known(self) -> Known:
        """What this process has read or written lately, by tag."""
        return self._mine().known

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in a thread of the pool. It must not wait for another one there."""
        return self._mine().pool.submit(function)

    def upload(self, function: Callable[[], T], nbytes: int) -> Future[T]:
        """Run `function`, which holds `nbytes` until it ends, in a thread of the pool, once the budget allows it."""
        budget = self.budget
        budget.acquire(nbytes)
        try:
            future = self.submit(function)
        except BaseException:
            budget.release(nbytes)
            raise
        future.add_done_callback(lambda _: budget.release(nbytes))
        return future

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return `function` of each item, several at once; the first failure is raised once all have ended."""
        todo = list(items)
        if len(todo) <= 1:
            return [function(item) for item in todo]
        with patient():
            return self._each(function, todo)

    def _each(self, function: Callable[[T], R], todo: Sequence[T]) -> list[R]:
        pool = self._mine().pool
        futures = [pool.submit(function, item) for item in todo]
        try:
            return [future.result() for future in futures]
        except BaseException as error:
            if not isinstance(error, Exception):
                hurry()
            raise
        finally:
            for future in futures:
                future.cancel()
            for future in futures:  # none may write into a view that the caller believes is his again
                if not future.cancelled():
                    future.exception()


def _open_file_system(protocol: str, options: Mapping[str, Any]) -> Any:
    import fsspec

    settings: dict[str, Any] = {"use_listings_cache": False, **options}
    if protocol in ("s3", "s3a"):
        settings["config_kwargs"] = {
            # A checksum of the whole object says nothing of a range, and some servers send it all the same.
            "response_checksum_validation": "when_required",
            "max_pool_connections": _READS + 4,  # and those of callers' own threads
            "read_timeout": BACKSTOP_S,
            # retry.py does it, for all stores alike. Three layers of retries would multiply into minutes.
            "retries": {"max_attempts": 0, "mode": "standard"},
            **settings.get("config_kwargs", {}),
        }
        _leave_unsigned(settings)
    if protocol in ("gs", "gcs"):
        _prepare_gcs(settings)
    try:
        made = fsspec.filesystem(protocol, skip_instance_cache=True, **settings)
    except ImportError as error:
        service = SERVICES.get(protocol)
        hint = f"Install it from the checkout with: pip install -e '.[{service.extra}]'" if service else str(error)
        raise MissingExtraError(f"{protocol}:// needs a package that is not installed. {hint}") from error
    except (TypeError, ValueError) as error:
        if protocol not in fsspec.available_protocols():
            raise UsageError(f"{protocol}:// is no protocol that fsspec knows: {error}. {_WORKS}") from error
        # its file system wants to be told more
        raise UsageError(
            f"{protocol}:// can't be opened by its URL alone: {error}. Give what is missing as storage options "
            f"(--storage-option NAME=VALUE). {_WORKS}"
        ) from error
    _close_only_here(made)
    if protocol in ("s3", "s3a"):
        made.retries = 1
    if protocol in ("gs", "gcs"):
        _without_inner_retries(made, given="requests_timeout" in options)
    return made


def _close_only_here(fs: Any) -> None:
    """Let a forked process leave the sessions of its parent alone when it ends: it would take their sockets out of the
    parent's selector, which both share, and say goodbye on them."""
    close, mine = getattr(type(fs), "close_session", None), os.getpid()
    if close is None:
        return

    def close_session(*args: Any, **kwargs: Any) -> None:
        if os.getpid() == mine:
            close(*args, **kwargs)

    fs.close_session = close_session  # what s3fs and gcsfs leave to weakref.finalize


def _leave_unsigned(settings: Mapping[str, Any]) -> None:
    """Let bodies to this very machine, where nobody is on the way, go with their CRC-32 alone.

    Over plain HTTP botocore signs their SHA-256, so that nobody can change them; over TLS nobody can, and it does not.
    `config_kwargs={"s3": {"payload_signing_enabled": True}}` signs them here, too.
    """
    given = settings["config_kwargs"]
    checksums = given.get("request_checksum_calculation", os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", ""))
    client = settings.get("client_kwargs") or {}
    url = settings.get("endpoint_url") or client.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL", "")
    if checksums.lower() != "when_required" and _is_here(urlsplit(str(url)).hostname or ""):
        given["s3"] = {"payload_signing_enabled": False, **(given.get("s3") or {})}


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _prepare_gcs(settings: dict[str, Any]) -> None:
    if os.environ.get("STORAGE_EMULATOR_HOST") or str(settings.get("endpoint_url", "")).startswith("http://"):
        # gcsfs asks for the kind of bucket over gRPC, which no emulator answers: it waits a minute instead.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import aiohttp
    except ImportError:
        return
    # By itself gcsfs waits five minutes for a server that accepts and says nothing.
    settings.setdefault("requests_timeout", aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=BODY_S))


def _without_inner_retries(fs: Any, *, given: bool) -> None:
    """Let one call of gcsfs be one request; where it is built otherwise, its own six tries stay.

    Args:
        given: The user has said how long to wait.
    """
    once = getattr(type(fs)._request, "__wrapped__", None)
    if once is None:
        return

    async def request(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        data, asked = kwargs.get("data"), once(fs, method, path, *args, **kwargs)
        if given or "alt=media" in path:
            return await asked  # as long as bytes come
        least_s = BODY_S if getattr(data, "nbytes", 0) >= _MUCH else SOON_S
        return await patiently(asked, least_s=least_s, body=data if hasattr(data, "tell") else None)

    fs._request = request
