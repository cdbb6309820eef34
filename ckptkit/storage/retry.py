"""Retries failed requests to a remote store. Decides what to retry, and for how long. Writes error messages."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from ckptkit.errors import StorageError, UsageError
from ckptkit.redact import without_secrets
from ckptkit.storage.store import SERVICES
from ckptkit.units import parse_duration

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Timeouts of one try. A slow server is tolerated; a silent one fails after a bounded time.
SOON_S = 15.0  # for the response to a small request; a lease lasts 45 s, so there is time for a second try
BODY_S = 60.0  # for progress of an upload, and for the response after it: the server may wait for its disk
WHOLE_S = 300.0  # for completing an upload, because some stores first assemble the object; HTTP clients wait as long
_LARGE_BODY = 1 << 20  # bytes; after a body of at least this size, a server may wait for its disk before it responds

silences: ContextVar[int] = ContextVar("ckptkit_silences", default=0)
"""The number of tries of the current call that timed out. It decides the timeout of the next try (see `patiently`).

This is a context variable because fsspec runs requests in its own thread and copies the context there.
"""


class SilenceError(OSError):
    """A try timed out. This is not a TimeoutError, because fsspec would replace it with an error without a message."""


async def patiently(
    request: Coroutine[Any, Any, T],
    *,
    least_s: float | None = None,
    body: Any = None,
    given_s: float | None = None,
) -> T:
    """Await `request`. Raises SilenceError if it makes no progress within the timeout.

    After this error, the store may still carry out the request. HTTP clients themselves would wait forever in an upload
    to a server that stops reading.

    Args:
        least_s: Timeout of the first try, instead of the usual one. Later tries wait up to four times as long.
        body: The body that is being transferred. The request makes progress as long as `body.tell()` advances.
        given_s: The timeout that the user has set. Replaces all other timeouts.
    """
    import asyncio  # imported lazily: asyncio and ssl take 40 ms, and commands on a local disk need neither

    usual_s = BODY_S if getattr(body, "nbytes", 0) >= _LARGE_BODY else SOON_S
    limit = given_s or min(WHOLE_S, min(4, 2 ** silences.get()) * (least_s or usual_s))
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
        task.cancel()  # does nothing if the task is done
    await asyncio.wait({task}, timeout=1)
    raise SilenceError(errno.ETIMEDOUT, f"the server made no progress for {limit:g} s")


# --- advice for the user

_ADVICE = (
    (("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"),
     ". The token has expired. Provide a new one with {given}"),
    (("RequestTimeTooSkewed", "RequestInTheFuture"),
     ". The clock of this machine differs from the store's clock: correct it"),
    (("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "401"),
     ". Provide credentials that the store accepts with {given}"),
    (("NoSuchUpload", "InvalidPart"), ". The server has lost a part of the upload: try again"),
    (("MethodNotAllowed", "405"), ". The server does not accept this request: is the endpoint the right one?"),
    (("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"),
     ". The store is full or a quota is used up: free some space there (prune runs) or ask for more"),
)  # fmt: skip
_ELSEWHERE = (
    *("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    *("301", "302", "307", "308"),
)


def advice_on(error: BaseException, protocol: str) -> str:
    """Return advice to append to the store's error message. "" if there is none."""
    answer = _answer(error)
    code = error_code(error) or str(getattr(error.__cause__, "code", ""))
    credentials = SERVICES[protocol].credentials if protocol in SERVICES else "storage_options={...}"
    given = f"{credentials}, or --storage-option NAME=VALUE"
    if code == "" and "Credential" in type(error).__name__:
        code = "401"
    for codes, text in _ADVICE:
        if code in codes:
            return text.replace("{given}", given)
    if code in _ELSEWHERE or _is_redirect_loop(error):
        return _elsewhere(answer)
    if code.startswith("KMS."):
        return ". The key that encrypts the objects can't be used: ask its administrator (KMS)"
    if "SSL" in type(error).__name__:
        return (
            ". Does the endpoint use TLS (https://, not http://), and is its certificate trusted here "
            "(AWS_CA_BUNDLE, SSL_CERT_FILE)?"
        )
    if isinstance(error, PermissionError):
        what = getattr(error.__cause__, "operation_name", "") or "This"
        return (
            f". {what} is not allowed here. Provide credentials that may list, read, write and delete below this "
            f"URL with {given}"
        )
    if code == "400" and answer:  # a response to HEAD has no body
        return ". The store gives no reason. Possible causes: an expired token, or a bucket in another region"
    return ""


def _is_redirect_loop(error: BaseException) -> bool:
    """Return whether botocore followed redirects in a loop until the stack overflowed."""
    inner = getattr(error, "kwargs", None)
    return isinstance(error, RecursionError) or (
        isinstance(inner, dict) and isinstance(inner.get("error"), RecursionError)
    )


def words_of(error: BaseException) -> str:
    """Return the message of an error. The message is never empty and contains no secrets."""
    if _is_redirect_loop(error):
        return "a redirect loop"
    text = str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error).strip()
    answer = _answer(error)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status:
        details = answer.get("Error", {})
        code, message = (str(details.get(name) or "").strip() for name in ("Code", "Message"))
        code = "" if code == str(status) else code
        message = "the server gives no reason" if message in ("", "None") else message
        text = f"{code}: {message} (HTTP {status})" if code else f"{message} (HTTP {status})"
    elif text in ("", "None"):
        text = f"{type(error).__name__} without a message"
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


# --- retries

TIMEOUT_S = 120.0  # from the first try; only the first _LEAST tries may start later
BACKGROUND_S = 600.0  # the same limit for a save in the background
BRIEF_S = 5.0  # the same limit for the release of leases and pins at the end; they expire anyway
_LEAST = 3  # minimum number of tries, because one large upload can take all of TIMEOUT_S
WAIT_S = 0.1  # wait before the second try; the wait doubles with each further try
WAIT_MAX_S = 8.0
_HURRIED_WAIT_S = 0.1  # the longest wait before another try, after `hurry()`
_QUIET_S = 2.0  # in the first seconds of a call, retries are not logged as warnings
_WARN_EVERY_S = 30.0
TIMEOUT_VARIABLE = "CKPTKIT_STORAGE_TIMEOUT"

_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_TRANSIENT_ERRNO = frozenset(
    [errno.EBUSY, errno.EAGAIN, errno.EIO, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
     errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH,
     getattr(errno, "EREMOTEIO", errno.EIO)]  # s3fs raises it for 500
)  # fmt: skip
_TRANSIENT_STATUS = frozenset([408, 425, 429, 500, 502, 503, 504])
_FINAL_STATUS = range(400, 500)
# Class names, because aiohttp, botocore, urllib3 and gcsfs may not be installed.
_TRANSIENT_NAMES = frozenset(
    ["ClientConnectionError", "ClientConnectorError", "ClientOSError", "ClientPayloadError", "ConnectTimeoutError",
     "ConnectionClosedError", "EndpointConnectionError", "FSTimeoutError", "HTTPClientError", "IncompleteRead",
     "IncompleteReadError", "ReadTimeoutError", "ResponseStreamingError", "ServerDisconnectedError",
     "ServerTimeoutError", "ChecksumError",
     "ProxyError",  # gcsfs raises it for 502
     "ResponseParserError",  # truncated XML
     "TimeoutError",  # asyncio's, in Python 3.10
     "TransportError",  # raised by httpx and google-auth
     *(name for service in SERVICES.values() for name in service.transient)]
)  # fmt: skip


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed (throttling, connection resets, timeouts, 5xx)."""
    if isinstance(error, _FINAL) or _is_redirect_loop(error):
        return False
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    status = http_status(error)
    if status is not None and (status >= 500 or status in _FINAL_STATUS):
        return status in _TRANSIENT_STATUS or error_code(error) in ("ConditionalRequestConflict", "OperationAborted")
    if any(base.__name__ in _TRANSIENT_NAMES for base in type(error).__mro__):
        return True
    return isinstance(error, SilenceError) or (isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO)


def is_outage(error: BaseException) -> bool:
    """Return whether the store could not be reached, even with retries. Nothing is known about its content."""
    cause = error.__cause__ if isinstance(error, StorageError) else None
    return cause is not None and is_transient(cause)


def may_yet_happen(error: BaseException) -> bool:
    """Return whether the store may have carried out a failed request, or may still do so.

    A gateway that answers 5xx may have forwarded the request, for example.
    """
    if not isinstance(error, Exception):
        return True
    cause = error.__cause__ if isinstance(error, StorageError) else error
    return cause is None or is_transient(cause)


def _is_silence(error: BaseException) -> bool:
    """Return whether a try timed out while it waited for the server."""
    names = {base.__name__ for base in type(error).__mro__}
    timed_out = isinstance(error, (SilenceError, TimeoutError)) and not isinstance(error, ConnectionError)
    return timed_out or not names.isdisjoint(("FSTimeoutError", "ReadTimeoutError", "ServerTimeoutError"))


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error from gcsfs, aiohttp, botocore or huggingface_hub. None if unknown."""
    for candidate in (getattr(error, "code", None), getattr(error, "status", None)):
        if isinstance(candidate, (int, str)) and str(candidate).isdigit():
            return int(candidate)
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    status = getattr(answer, "status_code", None)  # errors of requests and httpx, which huggingface_hub uses
    return status if isinstance(status, int) else None


def error_code(error: BaseException) -> str:
    """Return the error code of S3, or "" if there is none."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def timeout_s(default: float | None = None) -> float:
    """Return how many seconds a call is retried. CKPTKIT_STORAGE_TIMEOUT (such as "90s") overrides the default."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return TIMEOUT_S if default is None else default
    try:
        return parse_duration(text)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r} is not a duration; write 90s or 5m.") from error


class Patience:
    """Decides how long the storage calls of one operation (a save, a load, a command) are retried.

    All calls of an operation, in all threads, share one Patience. After one call has given up, the others give up soon.

    Args:
        limit_s: No call is retried later than this many seconds after its first try. There is one exception: if the
            limit is at least `TIMEOUT_S`, a call gets at least `_LEAST` tries. None means `timeout_s()`.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = timeout_s() if limit_s is None else limit_s
        self.gave_up = False  # a call has given up, and the store has not responded to any call since
        self._hurried = threading.Event()
        self._warned_at: float | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[Patience]:
        """Apply this Patience to all storage calls inside the block, including calls in thread pools."""
        token = _current.set(self)
        try:
            yield self
        finally:
            with contextlib.suppress(ValueError):  # the block may be left in a different context
                _current.reset(token)

    def hurry(self) -> None:
        """End all waits. A call that is waiting makes its last try immediately. Later calls make at most two tries."""
        self._hurried.set()

    def wait_before(self, failures: int, waited_s: float, error: Exception) -> float | None:
        """Return how many seconds to wait before the next try, or None to give up.

        Args:
            failures: Number of failed tries of this call.
            waited_s: Seconds since its first try.
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
        """Wait before the next try. `hurry` shortens the wait."""
        if self._hurried.is_set():
            time.sleep(min(seconds, _HURRIED_WAIT_S))
        else:
            self._hurried.wait(seconds)

    def log(self, place: str, error: Exception, waited_s: float, wait: float) -> None:
        """Log a retry at level DEBUG or, after some time of retrying, as a warning (at most one every 30 s)."""
        now, left = time.monotonic(), max(wait, self.limit_s - waited_s)
        late = waited_s + wait > _QUIET_S and (self._warned_at is None or now - self._warned_at > _WARN_EVERY_S)
        if late:
            self._warned_at = now
        logger.log(
            logging.WARNING if late else logging.DEBUG,
            "%s does not answer (%s): retrying, next try in %.1f s, giving up in %.0f s (at %s)",
            place or "the store",
            words_of(error)[:200],
            wait,
            left,
            time.strftime("%H:%M:%S", time.localtime(time.time() + left)),
        )


_current: ContextVar[Patience | None] = ContextVar("ckptkit_patience", default=None)


@contextlib.contextmanager
def patient() -> Iterator[Patience]:
    """Use one Patience for all storage calls inside the block, or that of an outer block. Also a decorator."""
    now = _current.get()
    with contextlib.nullcontext(now) if now is not None else Patience().entered() as patience:
        yield patience


def hurry() -> None:
    """Call `Patience.hurry` for the current operation, if there is one."""
    patience = _current.get()
    if patience is not None:
        patience.hurry()


def call_with_retries(function: Callable[[], T], *, place: str = "") -> T:
    """Call `function` until it succeeds, with increasing, random waits after transient errors.

    `place` is the name of the server in log messages.
    """
    patience = _current.get() or Patience()
    started, failures, before = time.monotonic(), 0, silences.set(0)
    try:
        while True:
            try:
                result = function()
            except Exception as error:
                if not is_transient(error):
                    patience.gave_up = False  # the store responds
                    raise
                failures, waited = failures + 1, time.monotonic() - started
                wait = patience.wait_before(failures, waited, error)
                if wait is None:
                    patience.gave_up = True
                    raise
                patience.log(place, error, waited, wait)
            except BaseException:  # Ctrl-C: cleanup must not wait for an unreachable store
                patience.hurry()
                raise
            else:
                patience.gave_up = False
                return result
            patience.sleep(wait)
    finally:
        silences.reset(before)
