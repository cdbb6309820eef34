"""Builds dates and numpy arrays from their pickled descriptions, after checking every argument."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptkit.errors import UnsupportedFormatError

_NUMPY_DTYPE = re.compile(r"[<>|=]?(?:[biufc](?:1|2|4|8|16)|\?|[SU]\d{1,6})")
_MAX_DIMS = 32


def numpy_dtype(name: Any, order: Any = "=") -> np.dtype[Any]:
    """Return the numpy dtype with this name. `order` is ">" for big-endian bytes.

    Raises:
        UnsupportedFormatError: The dtype is not one of numbers or strings.
    """
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name):
        raise UnsupportedFormatError(f"holds a numpy array of dtype {name!r:.60}, which is not supported.")
    found: np.dtype[Any] = np.dtype(name)
    return np.dtype(found.newbyteorder(">")) if order == ">" else found


def check_array(shape: Any, dtype: np.dtype[Any], raw: Any) -> None:
    """Raise ValueError if `raw` can't be the memory of an array with this shape and dtype."""
    if (
        type(shape) is not tuple
        or len(shape) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    ):
        raise ValueError("a numpy array's shape is not valid")
    if not isinstance(raw, (bytes, bytearray)) or len(raw) != int(np.prod([*shape, dtype.itemsize], dtype=object)):
        raise ValueError("a numpy array's data do not fit its shape")


def numpy_array(shape: Any, dtype: np.dtype[Any], fortran: Any, raw: Any) -> np.ndarray[Any, Any]:
    """Return a writable array whose memory is a copy of `raw`. Raises ValueError as `check_array` does."""
    check_array(shape, dtype, raw)
    made: np.ndarray[Any, Any] = np.frombuffer(bytearray(raw), dtype).reshape(shape, order="F" if fortran else "C")
    return made


def numpy_scalar(dtype: np.dtype[Any], raw: Any) -> Any:
    """Return the number or string that the bytes `raw` represent. Raises ValueError if `raw` has a wrong length."""
    if not isinstance(raw, bytes) or len(raw) != dtype.itemsize:
        raise ValueError("a numpy scalar's data do not fit its dtype")
    return np.frombuffer(raw, dtype)[0] if raw else np.zeros((), dtype)[()]


def typed(
    make: Callable[..., Any], problem: str, *kinds: type[Any], rest: type[Any] | None = None
) -> Callable[..., Any]:
    """Return a function that checks the types of its arguments, and then calls `make` with them.

    Args:
        problem: Message of the ValueError that the function raises if a type is wrong.
        kinds: The exact type of each argument.
        rest: Type of all further arguments. None if there must be no further arguments.
    """

    def call(*args: Any) -> Any:
        wanted = (*kinds, *[rest] * len(args))
        if any(type(arg) is not kind for arg, kind in zip(args, wanted, strict=False)):
            raise ValueError(problem)
        return make(*args)

    return call


def _moment(kind: Any, nbytes: int) -> Callable[..., Any]:

    def make(raw: Any, *zone: Any) -> Any:
        if not isinstance(raw, bytes) or len(raw) != nbytes or len(zone) > 1:
            raise ValueError("a date or a time is malformed")
        if not all(isinstance(item, datetime.timezone) for item in zone):
            raise ValueError("a time's zone is not a time zone")
        return kind(raw, *zone)

    return make


MOMENTS: dict[Any, Callable[..., Any]] = {
    datetime.datetime: _moment(datetime.datetime, 10),
    datetime.date: _moment(datetime.date, 4),
    datetime.time: _moment(datetime.time, 6),
    datetime.timedelta: typed(datetime.timedelta, "a timedelta is malformed", int, int, int),
}
"""For each type, a function that makes a value from the pickled arguments.

The arguments are the bytes of a date or time and, optionally, a time zone. For a timedelta, the arguments are days,
seconds and microseconds.
"""
