"""One fsspec file system, its threads and its memory per process: nothing of it survives a fork."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gzip
import hashlib
import ipaddress
import json
import logging
import os
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ckptkit.digests import sha256_of
from ckptkit.errors import MissingExtraError, UsageError
from ckptkit.gc_pause import collector_paused
from ckptkit.storage.body import Body, Content
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.retry import BACKSTOP_S, BODY_S, SOON_S, hurry, patient, patiently

__all__ = ["PART_BYTES", "UPLOAD_BYTES", "Connection", "quick_session", "skip_unused_tls", "sign_beside", "signed_as"]

# The session of botocore that a client of S3 is made of, made quickly: it is a third of a small first save.


logger = logging.getLogger(__name__)


def quick_session(options: Mapping[str, Any]) -> Any:
    """Return a session that reads what it has to of botocore's models, as it is, and looks through no others for it.

    By itself it looks into each of 400 folders, twice, whether there is an S3; and has Python, not the parser, make a
    dictionary of each of 30,000 objects. None where that fails: s3fs, which makes its own then, says why.
    """
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

    try:
        session = AioSession(**options)
        loader = session.get_component("data_loader")
    except (BotoCoreError, TypeError, ValueError) as error:
        logger.debug("no session: %s", type(error).__name__)
        return None
    loader.file_loader = _Files()
    every = loader.list_available_services
    loader.list_available_services = lambda type_name: _Services(type_name, every)
    return session


def skip_unused_tls(client: Any) -> None:
    """Let a client that speaks plain HTTP not parse the certificates of all authorities before its first request: that
    takes as long as making the client. They are parsed, and verify as ever, once an answer sends it on to TLS."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    usual = getattr(session, "_build_ssl_contexts", None)
    if usual is None or urlsplit(str(client.meta.endpoint_url)).scheme != "http":
        return

    def contexts(proxy_url: str | None) -> tuple[ssl.SSLContext, ssl.SSLContext | None]:
        made: tuple[ssl.SSLContext, ssl.SSLContext | None] = (
            (_Later(usual), None) if proxy_url is None else usual(proxy_url)
        )
        return made

    session._build_ssl_contexts = contexts  # type: ignore[union-attr]


class _Later(ssl.SSLContext):
    """What botocore would have made, made when the first connection is to be wrapped."""

    _make: Callable[[None], tuple[ssl.SSLContext, Any]]
    _made: ssl.SSLContext | None = None

    def __new__(cls, make: Callable[[None], tuple[ssl.SSLContext, Any]]) -> _Later:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._make = make
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        if self._made is None:
            self._made = self._make(None)[0]
        return self._made.wrap_bio(*args, **kwargs)


class _Services:
    """The names of services; that of S3 is known."""

    def __init__(self, type_name: str, every: Callable[[str], list[str]]) -> None:
        self._every = partial(every, type_name)

    def __contains__(self, name: object) -> bool:
        return name == "s3" or name in self._every()

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())


class _Files:
    """What botocore has as its loader of files, with the dictionaries of today, which keep their order."""

    def exists(self, path: str) -> bool:
        return any(os.path.isfile(path + ending) for ending in _ENDINGS)

    def load_file(self, path: str) -> Any:
        for ending, read in _ENDINGS.items():
            if os.path.isfile(path + ending):
                return json.loads(read(path + ending))
        return None


def _plain(path: str) -> bytes:
    return Path(path).read_bytes()


def _packed(path: str) -> bytes:
    return gzip.decompress(_plain(path))


_ENDINGS: dict[str, Callable[[str], bytes]] = {".json": _plain, ".json.gz": _packed}


# What a signature says of a body, found beside the thread that all connections share.


_NAME = "ckptkit-s3v4"  # of our own: other clients of botocore in this process sign as before
_UNSIGNED = "UNSIGNED-PAYLOAD"


def sign_beside(client: Any) -> None:
    """Let `client` take what a signature says of a `Body` from that, where it is known.

    botocore takes the SHA-256 itself as it signs: in the event loop, where no other request is sent or answered
    meanwhile.
    """
    import botocore.auth  # type: ignore[import-untyped]

    if _NAME not in botocore.auth.AUTH_TYPE_MAPS:
        botocore.auth.AUTH_TYPE_MAPS[_NAME] = _signer(botocore.auth.S3SigV4Auth)
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"choose-signer.s3.{operation}", _choose)


def signed_as(client: Any, content: Content, *, checked: bool) -> str | None:
    """Return what the signature of a put says of its body; None: let botocore see to it.

    Over plain HTTP it is the SHA-256, so that nobody on the way can change the bytes. Over TLS nobody can, and botocore
    leaves it out where a checksum goes with the body (`checked`). So do we on the way to this very machine, where
    nobody is: `config_kwargs={"s3": {"payload_signing_enabled": True}}` signs it there, too.
    """
    asked = (getattr(client.meta.config, "s3", None) or {}).get("payload_signing_enabled")
    place = urlsplit(str(client.meta.endpoint_url))
    if asked is False or (asked is None and place.scheme == "https"):
        return None
    if asked is None and checked and _is_here(place.hostname or ""):
        return _UNSIGNED
    digest = hashlib.sha256()
    for piece in content.pieces:
        digest.update(piece)
    return digest.hexdigest()


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _choose(signature_version: Any, signing_name: Any, context: Any, **_: Any) -> str | None:
    usual = signature_version in ("v4", "s3v4") and signing_name == "s3" and context.get("auth_type") in (None, "v4")
    return _NAME if usual and not context.get("unsigned_payload") else None


def _signer(base: Any) -> Any:
    class Signer(base):  # type: ignore[misc]
        def payload(self, request: Any) -> str:
            known = request.body.signed_as if isinstance(request.body, Body) else None
            if known is None or self._is_streaming_checksum_payload(request):
                return str(super().payload(request))
            return known

    return Signer


T = TypeVar("T")
R = TypeVar("R")

PART_BYTES = 16 << 20  # one ranged read, where there are few
UPLOAD_BYTES = 36 << 20  # one part of an upload; what is no larger than two goes up in one request
_THREADS = 16  # requests in flight; what they read goes straight to where it is wanted
_READS = _THREADS + 4  # ranges in flight
_UPLOADS = 8  # on their way up at once, by all writers of a process
_HELD_BYTES = 144 << 20  # of those, what is held for them alone: four parts, or two files of one request each
_MUCH = 1 << 20  # of a body that goes up: the server may have to wait for its disk before it answers
_WORKS = "What works: paths, s3://, gs://; hf://, http:// and https:// to read from."
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


# What s3fs, gcsfs and HfFileSystem read when they connect.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "GCSFS_", "CLOUDSDK_", "STORAGE_EMULATOR", "HF_", "FSSPEC_", "HOME")
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
    if protocol in ("gs", "gcs"):
        _prepare_gcs(settings)
    try:
        made = fsspec.filesystem(protocol, skip_instance_cache=True, **settings)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"Install it from the checkout with: pip install -e '.[{extra}]'" if extra else str(error)
        raise MissingExtraError(f"{protocol}:// needs a package that is not installed. {hint}") from error
    except ValueError as error:
        raise UsageError(f"{protocol}:// is no protocol that fsspec knows: {error}. {_WORKS}") from error
    except TypeError as error:  # its file system wants to be told more
        raise UsageError(
            f"{protocol}:// can't be opened by its URL alone: {error}. Give what is missing as storage options "
            f"(--storage-option NAME=VALUE). {_WORKS}"
        ) from error
    _close_only_here(made)
    if protocol in ("s3", "s3a"):
        made.retries = 1
        if made.session is None:
            made.session = quick_session(made.kwargs)
        _send_bodies_as_they_are(made)
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


def _send_bodies_as_they_are(fs: Any) -> None:
    """Let S3 get a body with its request, not after a round trip that asks whether it wants one; and let the CRC-32
    that we give vouch for it, where TLS does for the rest: no other digest of it, and no frames around its pieces."""
    inner = fs.set_session
    seen: Any = None

    async def set_session(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        with contextlib.nullcontext() if seen is not None else collector_paused():  # of tens of thousands of objects
            client = await inner(*args, **kwargs)
        if client is not seen and hasattr(client, "meta"):
            from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

            client.meta.events.unregister("before-call.s3", add_expect_header)
            client.meta.events.register("before-call.s3", _vouch_by_crc)
            sign_beside(client)
            skip_unused_tls(client)
            seen = client
        return client

    fs.set_session = set_session


def _vouch_by_crc(params: Any, context: Any, **_: Any) -> None:
    """Tell botocore of the CRC-32 that is given: else it signs by SHA-256 of the body also over TLS."""
    name = "x-amz-checksum-crc32"
    if name in params["headers"] and not context.get("checksum", {}).get("request_algorithm"):
        algorithm = {"algorithm": "crc32", "in": "header", "name": name}
        context["checksum"] = {**context.get("checksum", {}), "request_algorithm": algorithm}


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
