"""Parses and formats sizes and durations, for all other modules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptkit.errors import UsageError

# SI prefixes are powers of ten, IEC prefixes powers of two (ISO 80000-13): 1 GB = 10^9, 1 GiB = 2^30 bytes.
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|min|h|d)?\s*", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str | int | float, name: str = "") -> int:
    """Return a size in bytes. Accepts "40GiB", "512MB", "1.5T" or 1024.

    A bare number counts bytes. Units without an "i" are powers of ten: "5G" equals "5GB". Error messages show `name`
    as the name of the argument.

    Raises:
        UsageError: The size is malformed, negative or infinite.
    """
    shown = f"{name}: {text!r}" if name else repr(text)
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < float("inf"):
            raise UsageError(f"{shown} is not a size: it must be 0 or more bytes, and finite.")
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{shown} is not a size. Give bytes or a size such as '512MB' (10^6) or '40GiB' (2^30).")
    number, prefix, binary, _ = match.groups()
    if binary and not prefix:
        raise UsageError(f"{shown} is not a size: 'i' needs a prefix, as in '40GiB'.")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def format_size(nbytes: int) -> str:
    """Return `nbytes` as text with a decimal unit: 14_200_000_000 -> "14.2 GB"."""
    if abs(nbytes) < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000.0
        if abs(value) < 999.95 or unit == "PB":
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def parse_duration(text: str | int | float, name: str = "") -> float:
    """Return a duration in seconds. Accepts "90s", "5m", "1.5h", "2d" or 30.

    Error messages show `name` as the name of the argument.

    Raises:
        UsageError: The duration is malformed, negative or infinite.
    """
    shown = f"{name}: {text!r}" if name else repr(text)
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < float("inf"):
            raise UsageError(f"{shown} is not a duration: it must be 0 or more seconds, and finite.")
        return float(text)
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"{shown} is not a duration. Give seconds or a duration such as '90s', '5m' or '2h'.")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def format_duration(seconds: float) -> str:
    """Return `seconds` as text: 0.0384 -> "38 ms", 4000 -> "1 h 6 min"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s"


def format_count(count: int) -> str:
    """Return a number of parameters as text: 7_241_732_096 -> "7.24B"."""
    for limit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:.2f}{suffix}"
    return str(count)


def counted(count: int, noun: str, verb: str = "") -> str:
    """Return a number with a noun and a verb: counted(1, "tensor", "are") -> "1 tensor is"."""
    if count == 1:
        verb = {"are": "is", "have": "has", "differ": "differs"}.get(verb, verb)
    return f"{count} {noun}{'s' * (count != 1)}{' ' * bool(verb)}{verb}"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return at most `most` names as text, and count the remaining names: "a, b, c, d, e and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
