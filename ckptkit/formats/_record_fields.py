"""Typed fields of a JSON object that nobody vouches for: a missing or wrong one is an error that says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.strict_json import parse

__all__ = ["Fields", "parse_json"]


def parse_json(data: bytes, *, file: str) -> dict[str, Any]:
    """Return the JSON object in `data`: UTF-8, no key twice, no NaN. Raises CorruptCheckpointError."""
    if not data.strip(b" \t\r\n\0"):
        raise CorruptCheckpointError(f"{file} is empty. It was cut off while it was written, or zeroed since.")
    body = parse(data, file=file)
    if not isinstance(body, dict):
        raise CorruptCheckpointError(f"{file} holds a JSON {type(body).__name__}, expected an object.")
    return body


class Fields:
    """The fields of one JSON object; `file` names it in errors."""

    def __init__(self, body: Any, file: str) -> None:
        if not isinstance(body, dict):
            raise CorruptCheckpointError(f"{file} is a JSON {type(body).__name__}, expected an object.")
        self.body: Mapping[str, Any] = body
        self.file = file

    def get(self, name: str) -> Any:
        """Return a field of any type."""
        if name not in self.body:
            raise CorruptCheckpointError(f"{self.file}: the field {name!r} is missing.")
        return self.body[name]

    def _wrong(self, name: str, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.file}: {name} is {self.body[name]!r:.120}, expected {expected}.")

    def whole(self, name: str, most: int) -> int:
        """Return a whole number from 0 to `most`."""
        value = self.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self._wrong(name, f"a whole number from 0 to {most}")
        return value

    def text(self, name: str, pattern: str | None = None) -> str:
        """Return a string, which matches `pattern` as a whole."""
        value = self.get(name)
        if not isinstance(value, str) or (pattern is not None and re.fullmatch(pattern, value) is None):
            raise self._wrong(name, "a string" if pattern is None else f"a string that matches {pattern}")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a string or None."""
        return None if self.get(name) is None else self.text(name)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return an object."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value
