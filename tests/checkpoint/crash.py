"""Count the file operations of a process, and kill the process or fail an operation at the Nth."""

import contextlib
import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptkit.storage import local, publish

OPERATIONS = (
    "open", "write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "close", "rename", "replace", "link",
    "unlink", "remove", "rmdir", "mkdir", "ftruncate", "truncate", "posix_fallocate", "sendfile", "copy_file_range",
)  # fmt: skip
_PLACES = ((local, "_rename_noreplace"), (publish, "_exchange"))


def watch(before: Callable[[str, tuple[Any, ...]], None], after: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Call `before` and `after` around every file operation of this process, permanently."""

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            seen = args
            if kwargs.get("dir_fd") is not None:  # rmtree uses names relative to a descriptor
                folder = os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}")
                seen = (os.path.join(folder, os.fspath(args[0])), *args[1:])
            before(name, seen)
            result = function(*args, **kwargs)
            after(name, seen)
            return result

        return operation

    for name in OPERATIONS:
        if hasattr(os, name):
            setattr(os, name, wrapped(name, getattr(os, name)))
    for module, name in _PLACES:
        setattr(module, name, wrapped(name, getattr(module, name)))


def kill_at(nth: int, group: int | None = None) -> Callable[[], int]:
    """SIGKILL this process before its nth file operation from now; the previous operation is carried out.

    With `group`, all processes of that group die at once. Returns a counter of the operations so far.
    """
    left = nth

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL) if group is None else os.killpg(group, signal.SIGKILL)

    watch(count, lambda name, args: None)
    return lambda: nth - left


def fail_at(nth: int, error: int) -> None:
    """Let the nth operation fail with errno `error`, counted from now."""
    left = nth

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(error, os.strerror(error))

    watch(count, lambda name, args: None)


@dataclass(slots=True)
class Fault:
    """An operation that fails once, the nth time that it is done to a file whose path matches `pattern`."""

    operation: str
    pattern: str
    error: int = errno.ENOSPC
    nth: int = 1


@contextlib.contextmanager
def failing(armed: list[Fault]) -> Iterator[None]:
    """Let the operations that `armed` names fail; one that has failed is removed from it."""
    import pytest  # not in the processes that are killed

    def checked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
            if armed and armed[0].operation == name and re.search(armed[0].pattern, path):
                armed[0].nth -= 1
                if armed[0].nth == 0:
                    error = armed.pop().error
                    if name == "close":
                        real(*args)  # the descriptor is closed, whatever is reported
                    raise OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "write", "fsync", "close"):
            patch.setattr(os, name, checked(name, getattr(os, name)))
        for module, name in _PLACES:
            patch.setattr(module, name, checked(name, getattr(module, name)))
        yield


def kill_at_request(nth: int) -> None:
    """SIGKILL this process before its nth S3 request other than reads of data; the previous one has been answered."""
    from ckptkit.storage.s3 import S3Api

    ask, lock, count = S3Api._call, threading.Lock(), 0

    def request(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        with lock:
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        return ask(*args, **kwargs)

    S3Api._call = request  # type: ignore[method-assign]
