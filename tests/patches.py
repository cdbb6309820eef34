"""Functions that a test puts in place of others: they act, look or fail, and then call the original."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


def failing(error: BaseException | int) -> Callable[..., Any]:
    """Return a function that raises this error, or an `OSError` with this number, whatever its arguments are."""

    def fail(*args: Any, **more: Any) -> Any:
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return fail


def die(*args: Any, **more: Any) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Run `act` with the arguments of each call of `owner.name`, before the call."""
    real = getattr(owner, name)

    def called(*args: Any, **more: Any) -> Any:
        act(*args, **more)
        return real(*args, **more)

    patch.setattr(owner, name, called)


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Run `act` with the result and the arguments of each call of `owner.name`, after the call."""
    real = getattr(owner, name)

    def called(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        act(result, *args, **more)
        return result

    patch.setattr(owner, name, called)


def refuse(
    patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException | int, *, when: Callable[..., bool]
) -> None:
    """Make the calls of `owner.name` fail whose arguments fulfil the condition `when`."""
    before(patch, owner, name, lambda *args, **more: when(*args, **more) and failing(error)())
