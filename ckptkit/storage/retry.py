"""Decides which failures of a remote store are retried, how often, and with which waits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from ckptkit.errors import StorageError, UsageError
from ckptkit.redact import without_secrets
from ckptkit.storage.store import SERVICES
from ckptkit.units import parse_duration

__all__ = [
    "BACKGROUND_S",
    "BRIEF_S",
    "Patience",
    "call_with_retries",
    "current_limit_s",
    "hurry",
    "is_outage",
    "is_transient",
    "may_yet_happen",
    "patient",
    "timeout_s",
    "BACKSTOP_S",
    "BODY_S",
    "SOON_S",
    "WHOLE_S",
    "Progress",
    "SilenceError",
    "patiently",
    "silences",
    "advice_on",
    "words_of",
]

# How long one request waits: a slow server is no failure, one that says nothing for good is one in bounded time.


T = TypeVar("T")

SOON_S = (
    15.0  # for an answer to what carries little: the lease has to be renewed within 45 s, if need be by a second try
)
BODY_S = 60.0  # without a byte that goes up, and for the answer to the last one: it may wait for a disk, or other parts
WHOLE_S = 300.0  # for what an object is put together in, which some stores do before they answer
BACKSTOP_S = 300.0  # of the HTTP client, which does not know what it waits for

silences: ContextVar[int] = ContextVar("ckptkit_silences", default=0)
"""How many tries of the call that is under way had no answer in time: each waits longer than the one before.

A context variable: fsspec hands requests to a thread of its own, and contexts go with them.
"""


class SilenceError(OSError):
    """Nothing was heard for as long as a try waits. No TimeoutError: fsspec makes one of its own of that, that says
    nothing."""


class Progress(Protocol):
    """A body that is read as it goes up."""

    def tell(self) -> int: ...


async def patiently(
    request: Coroutine[Any, Any, T],
    *,
    least_s: float = SOON_S,
    body: Progress | None = None,
    given_s: float | None = None,
) -> T:
    """Return what `request` returns, waited for as long as it gets on.

    Args:
        least_s: How long the first try waits; later ones do so up to four times as long.
        body: What goes up with it: while more of it is taken, nobody is late. HTTP clients bound the wait for an
            answer only, not that for a server that stops to read.
        given_s: How long the user wants to wait, in place of all that.

    Raises:
        SilenceError: Nothing came, and nothing went, for that long. The request was given up; the server may still
            carry it out.
    """
    limit = given_s or min(WHOLE_S, min(4, 2 ** silences.get()) * least_s)
    task = asyncio.ensure_future(request)
    try:
        while True:
            before = None if body is None else body.tell()
            done, _ = await asyncio.wait({task}, timeout=limit)
            if done:
                return task.result()
            if body is None or body.tell() == before:
                break
    finally:
        task.cancel()  # nothing, where it is done
    await asyncio.wait({task}, timeout=1)
    raise SilenceError(errno.ETIMEDOUT, f"the server did not get on for {limit:g} s")


# What a store that refuses means by it, and what to do about that, in words.


_EXPIRED = frozenset(["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"])
_UNKNOWN = frozenset(["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "401"])
_CLOCK = frozenset(["RequestTimeTooSkewed", "RequestInTheFuture"])
_UNKNOWN_REQUEST = frozenset(["MethodNotAllowed", "405"])
_FULL = frozenset(["QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"])
_ELSEWHERE = frozenset(
    [
        "PermanentRedirect",
        "TemporaryRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "301",
        "302",
        "307",
        "308",
    ]
)


def advice_on(error: BaseException, protocol: str) -> str:
    """Return a sentence on an error of a store, to be appended to its own words; "" where there is nothing to add."""
    answer = _answer(error)
    code = str(answer.get("Error", {}).get("Code", "") or getattr(error.__cause__, "code", ""))
    credentials = SERVICES[protocol].credentials if protocol in SERVICES else "storage_options={...}"
    given = f"{credentials}, or --storage-option NAME=VALUE"
    if code in _EXPIRED:
        return f". The token has expired. Give a new one by {given}"
    if code in _CLOCK:
        return ". The clock of this machine is not the store's: set it right"
    if code in _UNKNOWN or "Credential" in type(error).__name__:
        return f". Give credentials that the store knows by {given}"
    if code in _ELSEWHERE or _goes_in_circles(error):
        return _elsewhere(answer)
    if code in _UNKNOWN_REQUEST:
        return ". The server does not take such a request: is the endpoint the right one?"
    if code in _FULL:
        return ". The store is full, or a quota is used up: free some space there (prune runs), or ask for more"
    if code.startswith("KMS."):
        return ". The key that encrypts the objects can't be used: ask whoever manages it (KMS)"
    if "SSL" in type(error).__name__:
        return (
            ". Does the endpoint speak TLS (https://, not http://), and is its certificate trusted here "
            "(AWS_CA_BUNDLE, SSL_CERT_FILE)?"
        )
    if isinstance(error, PermissionError):
        what = getattr(error.__cause__, "operation_name", "") or "This"
        return (
            f". {what} is not allowed here. Give credentials that may list, read, write and delete below this "
            f"URL by {given}"
        )
    if code == "400" and answer:  # what answers HEAD has no body
        return ". The store gives no reason; an expired token, or a bucket in another region, look like this"
    return ""


def _goes_in_circles(error: BaseException) -> bool:
    """Tell whether botocore followed redirects that lead nowhere, until its HTTP client or itself had no stack left."""
    inner = getattr(error, "kwargs", None)
    return isinstance(error, RecursionError) or (
        isinstance(inner, dict) and isinstance(inner.get("error"), RecursionError)
    )


def words_of(error: BaseException) -> str:
    """Return what a store, or the way to it, said: never nothing, and nothing secret."""
    if _goes_in_circles(error):
        return "each answer is a redirect, and none says where to"
    text = str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error).strip()
    answer = _answer(error)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status:
        told = answer.get("Error", {})
        code, message = (str(told.get(name) or "").strip() for name in ("Code", "Message"))
        code = "" if code == str(status) else code
        message = "the server gives no reason" if message in ("", "None") else message
        text = f"{code}: {message} (HTTP {status})" if code else f"{message} (HTTP {status})"
    elif text in ("", "None"):
        text = f"{type(error).__name__}, without a reason"
    elif not isinstance(error, OSError) or isinstance(error, (ConnectionError, TimeoutError)):
        text = f"{type(error).__name__}: {text}"
    return without_secrets(text)


def _elsewhere(answer: Any) -> str:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or ""
    there, which = region or "...", f", {region}" if region else ""
    return (
        f". The bucket is in another region{which}, or at another endpoint. Set AWS_DEFAULT_REGION={there}, or "
        f'client_kwargs={{"region_name": "{there}"}} in storage_options; for an endpoint AWS_ENDPOINT_URL, or '
        "--storage-option endpoint_url=..."
    )


def _answer(error: BaseException) -> Any:
    for candidate in (error.__cause__, error):
        found = getattr(candidate, "response", None)
        if isinstance(found, dict):
            return found
    return {}


logger = logging.getLogger(__name__)


TIMEOUT_S = 120.0  # no try starts later, but for the first ones of a slow server: `patience` says how long one waits
BACKGROUND_S = 600.0  # of a save that training does not wait for
BRIEF_S = 5.0  # of what is given back at the end: others do without it after a while
_LEAST = 3  # one that sends much, or waits for an answer, may take all that time
WAIT_S = 0.1  # before the second try; then twice as long each time
WAIT_MAX_S = 8.0
_HURRIED_WAIT_S = 0.1  # before the one more try of an operation that is to end
_QUIET_S = 2.0  # a failure that is over by then is not worth a warning
_SAY_EVERY_S = 30.0
TIMEOUT_VARIABLE = "CKPTKIT_STORAGE_TIMEOUT"

_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_TRANSIENT_ERRNO = frozenset(
    [
        errno.EBUSY,
        errno.EAGAIN,
        errno.EIO,
        errno.EPIPE,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        getattr(errno, "EREMOTEIO", errno.EIO),  # what s3fs gives for 500
    ]
)
_TRANSIENT_STATUS = frozenset([408, 425, 429, 500, 502, 503, 504])
_FINAL_STATUS = range(400, 500)
# By name: aiohttp, botocore, urllib3 and gcsfs are not imported here, and may not be installed.
_TRANSIENT_NAMES = frozenset(
    [
        "ClientConnectionError",
        "ClientConnectorError",
        "ClientOSError",
        "ClientPayloadError",
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "EndpointConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProxyError",  # what gcsfs gives for 502
        "ReadTimeoutError",
        "ResponseParserError",  # a body cut in mid-XML
        "ResponseStreamingError",
        "ServerDisconnectedError",
        "ServerTimeoutError",
        "ChecksumError",
        "TimeoutError",  # that of asyncio in Python 3.10
        "TransportError",  # httpx and google-auth
        *(name for service in SERVICES.values() for name in service.passing),
    ]
)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: throttling, connection resets, timeouts, 5xx.

    Not for missing objects, denied access, existing names or malformed requests.
    """
    if isinstance(error, _FINAL) or _goes_in_circles(error):
        return False
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    status = _status(error)
    if status is not None and (status >= 500 or status in _FINAL_STATUS):
        return status in _TRANSIENT_STATUS or _code(error) in ("ConditionalRequestConflict", "OperationAborted")
    if any(base.__name__ in _TRANSIENT_NAMES for base in type(error).__mro__):
        return True
    return isinstance(error, SilenceError) or (isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO)


def is_outage(error: BaseException) -> bool:
    """Tell whether a store failed, though it was asked again and again: that says nothing of what it holds."""
    cause = error.__cause__ if isinstance(error, StorageError) else None
    return cause is not None and is_transient(cause)


def may_yet_happen(error: BaseException) -> bool:
    """Tell whether what failed so may yet be carried out, or has been: nobody said that it was refused for good. A
    gateway that answers 5xx may have passed it on, and so may an HTTP client that sends a request again by itself; who
    is interrupted was waiting for the answer."""
    if not isinstance(error, Exception):
        return True
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return cause is None or is_transient(cause)


def _is_silence(error: BaseException) -> bool:
    """Tell whether nothing was heard for as long as a try waits; not that nobody could be reached."""
    names = {base.__name__ for base in type(error).__mro__}
    timed_out = isinstance(error, (SilenceError, TimeoutError)) and not isinstance(error, ConnectionError)
    return timed_out or not names.isdisjoint(("FSTimeoutError", "ReadTimeoutError", "ServerTimeoutError"))


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of gcsfs, aiohttp or, as the cause, of botocore states."""
    for candidate in (getattr(error, "code", None), getattr(error, "status", None)):
        if isinstance(candidate, (int, str)) and str(candidate).isdigit():
            return int(candidate)
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    status = getattr(answer, "status_code", None)  # requests, httpx: huggingface_hub
    return status if isinstance(status, int) else None


def _code(error: BaseException) -> str:
    """Return S3's own word for an error, "" where it has none."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def timeout_s(default: float | None = None) -> float:
    """Return how long a call is retried, in seconds: CKPTKIT_STORAGE_TIMEOUT ("90s") or the default."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return TIMEOUT_S if default is None else default
    try:
        return parse_duration(text)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r} is no duration; write 90s or 5m.") from error


class Patience:
    """How long the storage calls of one operation (a save, a load, a command) are retried.

    The calls of an operation share it, in whichever threads they are made: once one of them has given up, the others
    do so soon, and so does what cleans up. The next operation starts afresh.

    Args:
        limit_s: No try of a call starts later than this; default `timeout_s()`.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = timeout_s() if limit_s is None else limit_s
        self.gave_up = False  # a call failed for good, and none has had an answer since
        self._hurried = threading.Event()
        self._said_at: float | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[Patience]:
        """Let the calls inside of the block, and in pools that get work from there, share this patience."""
        token = _current.set(self)
        try:
            yield self
        finally:
            with contextlib.suppress(ValueError):  # a block that is left in another context than it was entered in
                _current.reset(token)

    def hurry(self) -> None:
        """Wait no longer: who waits tries once more now, and every later call is tried twice at most."""
        self._hurried.set()

    def wait_before(self, failures: int, waited_s: float, error: Exception) -> float | None:
        """Return how long to wait before the next try, None to give up.

        Args:
            failures: Of the call, one after the other, the last one with `error`.
            waited_s: Since its first try.
        """
        silent = _is_silence(error)
        if silent:
            silences.set(silences.get() + 1)
        wait = min(WAIT_MAX_S, WAIT_S * 2.0 ** min(failures - 1, 10)) * random.uniform(1, 1.5)
        if self._hurried.is_set() or self.gave_up:
            return wait if failures < 2 and not silent else None
        if failures < (_LEAST if self.limit_s >= TIMEOUT_S else 1):
            return wait
        left = self.limit_s - waited_s
        return min(wait, left) if left > 0 else None

    def sleep(self, seconds: float) -> None:
        """Wait before the next try; `hurry`, also one that came just before, cuts it short."""
        if self._hurried.is_set():
            time.sleep(min(seconds, _HURRIED_WAIT_S))
        else:
            self._hurried.wait(seconds)

    def say(self, place: str, error: Exception, waited_s: float, wait: float) -> None:
        """Log that a call is retried: once it takes long, and then now and again."""
        now, left = time.monotonic(), max(wait, self.limit_s - waited_s)
        late = waited_s + wait > _QUIET_S and (self._said_at is None or now - self._said_at > _SAY_EVERY_S)
        if late:
            self._said_at = now
        logger.log(
            logging.WARNING if late else logging.DEBUG,
            "%s does not answer (%s): retrying, next try in %.1f s, giving up in %.0f s (at %s)",
            place or "the storage",
            words_of(error)[:200],
            wait,
            left,
            time.strftime("%H:%M:%S", time.localtime(time.time() + left)),
        )


_current: ContextVar[Patience | None] = ContextVar("ckptkit_patience", default=None)


@contextlib.contextmanager
def patient() -> Iterator[Patience]:
    """Group the calls inside into one operation, or join the enclosing operation. Also a decorator."""
    now = _current.get()
    with contextlib.nullcontext(now) if now is not None else Patience().entered() as patience:
        yield patience


def current_limit_s() -> float:
    """Return how long a call is retried here."""
    patience = _current.get()
    return timeout_s() if patience is None else patience.limit_s


def hurry() -> None:
    """Let the operation that is under way here wait no longer: somebody wants it to end."""
    patience = _current.get()
    if patience is not None:
        patience.hurry()


def call_with_retries(function: Callable[[], T], *, place: str = "") -> T:
    """Return what `function` returns, called again after transient errors with growing, jittered waits.

    Args:
        place: Who does not answer then, for the log.
    """
    patience = _current.get() or Patience()
    started, failures, before = time.monotonic(), 0, silences.set(0)
    try:
        while True:
            try:
                result = function()
            except Exception as error:
                if not is_transient(error):
                    patience.gave_up = False  # the storage answers
                    raise
                failures, waited = failures + 1, time.monotonic() - started
                wait = patience.wait_before(failures, waited, error)
                if wait is None:
                    patience.gave_up = True
                    raise
                patience.say(place, error, waited, wait)
            except BaseException:  # Ctrl-C: what cleans up does not wait for a storage that is out of reach
                patience.hurry()
                raise
            else:
                patience.gave_up = False
                return result
            patience.sleep(wait)
    finally:
        silences.reset(before)
