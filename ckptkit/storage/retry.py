"""Which failures of a remote store are worth another try, how often, and after how long."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import stamina

__all__ = ["is_transient", "retrying"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 8
TIMEOUT_S = 120.0
WAIT_MAX_S = 15.0

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
        "ReadTimeoutError",
        "ResponseStreamingError",
        "ServerDisconnectedError",
        "ServerTimeoutError",
        "ChecksumError",
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
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, (int, str)) and str(status).isdigit():
        return int(status) in _TRANSIENT_STATUS
    if any(base.__name__ in _TRANSIENT_NAMES for base in type(error).__mro__):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def _worth_it(error: Exception) -> bool:
    if not is_transient(error):
        return False
    logger.debug("retrying after %s: %s", type(error).__name__, error)
    return True


def retrying(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` with retries: backoff grows exponentially with jitter, and ends in bounded time."""

    @functools.wraps(function)
    def attempted(*args: P.args, **kwargs: P.kwargs) -> T:
        caller = stamina.RetryingCaller(attempts=ATTEMPTS, timeout=TIMEOUT_S, wait_initial=0.1, wait_max=WAIT_MAX_S)
        return caller(_worth_it, function, *args, **kwargs)

    return attempted
