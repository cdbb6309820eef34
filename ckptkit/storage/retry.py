"""Which failures of a remote store are worth another try, how often, and after how long."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import stamina

from ckptkit.errors import StorageError, UsageError
from ckptkit.storage.patience import SilenceError, silences
from ckptkit.units import parse_duration

__all__ = ["call_with_retries", "is_outage", "is_transient", "may_yet_happen", "timeout_s"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 8
TIMEOUT_S = (
    40.0  # no try starts later than this, but for the first of a slow server: `patience` says how long one waits
)
_LEAST = 3  # one that sends much, or waits for an answer, may take all that time
WAIT_MAX_S = 8.0
_SAID_AT = 4  # failures in a row: less is nothing to speak of
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
    ]
)


def is_transient(error: BaseException) -> bool:
    """Tell whether the same call may well succeed a moment later: throttling, resets, timeouts, 5xx.

    What is not found, denied, exists already or is malformed stays so.
    """
    if isinstance(error, _FINAL):
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


def timeout_s() -> float:
    """Return how long a call is tried again, in seconds: CKPTKIT_STORAGE_TIMEOUT ("90s") or the default."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return TIMEOUT_S
    try:
        return parse_duration(text)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{TIMEOUT_VARIABLE}={text!r} is no duration; write 90s or 5m.") from error


def call_with_retries(function: Callable[[], T], *, least: bool = False) -> T:
    """Return what `function` returns, called again after transient errors with growing, jittered waits.

    Args:
        least: Try once again only: the storage has just failed for as long as anybody waits.

    It takes no arguments: the library logs those of what it retries, and they may be megabytes, or secret.
    """
    patience, started = timeout_s(), time.monotonic()
    attempts = 2 if least else ATTEMPTS if patience <= TIMEOUT_S else None
    sure = _LEAST if patience >= TIMEOUT_S and not least else 1
    failures = 0
    before = silences.set(0)

    def worth_it(error: Exception) -> bool:
        nonlocal failures
        if not is_transient(error):
            return False
        failures += 1
        if _is_silence(error):
            silences.set(silences.get() + 1)
            if least:
                return False
        if failures >= sure and time.monotonic() - started >= patience:
            return False
        say = logger.warning if failures == _SAID_AT else logger.debug
        say("the storage does not answer (%s); trying again for up to %g s", type(error).__name__, patience)
        return True

    @stamina.retry(on=worth_it, attempts=attempts, timeout=None, wait_initial=0.1, wait_max=WAIT_MAX_S, wait_jitter=0.5)
    def ckptkit_request() -> T:
        return function()

    try:
        return ckptkit_request()
    finally:
        silences.reset(before)


def _is_others(record: logging.LogRecord) -> bool:
    return "ckptkit_request" not in str(getattr(record, "stamina.callable", ""))


# It warns of each retry, as "stamina.retry_scheduled"; what is worth a word is said above. Others' retries stay.
logging.getLogger("stamina").addFilter(_is_others)
