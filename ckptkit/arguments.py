"""Checks the arguments of public functions. Each error states the expected and the actual value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from ckptkit.errors import UsageError

Location: TypeAlias = str | os.PathLike[str]

_COLLAPSED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")  # Path("s3://bucket") is "s3:/bucket"


def wrong(name: str, value: object, expected: str) -> UsageError:
    """Return the error for a wrong argument.

    For example, its message is "retention is of type dict, expected RetentionPolicy(max_num=3, ...).".
    """
    if isinstance(value, type):
        found = f"the class {value.__name__}"
    elif value is None or isinstance(value, (bool, int, float, str)):
        found = f"{value!r:.80}"
    else:
        found = f"of type {type(value).__name__}"
    return UsageError(f"{name} is {found}, expected {expected}.")


def location(name: str, value: object) -> str:
    """Return a path or URL as a str.

    Raises:
        UsageError: `value` is neither a str nor a path, or it is a `Path` that was made from a URL. `Path` changes
            "s3://" to "s3:/".
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise wrong(name, value, "a path or a URL, such as 's3://bucket/run'")
    if text is not value and _COLLAPSED.match(text):
        raise UsageError(f"{name} is {value!r}: Path has changed '://' to ':/'. Pass a URL as a str.")
    return text


def globs(name: str, value: object) -> tuple[str, ...]:
    """Return globs as a tuple. A single str is one glob."""
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if found is None or not all(isinstance(item, str) for item in found):
        raise wrong(name, value, "globs of names, such as ['*.lora_*']")
    return found


def check_flags(**values: object) -> None:
    """Raise UsageError if any value is not a bool. The string "no" is an error too: Python would treat it as true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise wrong(name, value, "True or False")


def check_int(name: str, value: object, *, least: int) -> None:
    """Raise UsageError unless `value` is an integer of at least `least`."""
    index: Any = getattr(type(value), "__index__", None)
    if index is None or isinstance(value, bool) or index(value) < least:
        raise wrong(name, value, f"an integer of at least {least}")


def check_storage_options(**values: object) -> None:
    """Raise UsageError unless each value is a mapping or None."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Mapping):
            raise wrong(name, value, "a dict of options for fsspec")
