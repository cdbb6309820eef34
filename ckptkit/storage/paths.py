"""Which relative paths a store accepts."""

from __future__ import annotations

import re

from ckptkit.errors import UnsafePathError

__all__ = ["checked_path", "is_path", "is_safe_name"]

# A part that is empty, "." or "..", and characters that no path may have: halves of some, too, but for those that stand
# for a byte of a name that is not UTF-8.
_REFUSED = re.compile("(?:^|/)[.]{0,2}(?:/|\\Z)|[\\\\\\x00-\\x1f\\x7f\ud800-\udc7f\udd00-\udfff]")

# Names that Windows keeps for devices, whatever the extension: a checkpoint must be portable.
_DEVICES = frozenset(
    [
        "con",
        "prn",
        "aux",
        "nul",
        "conin$",
        "conout$",
        *(f"{port}{i}" for port in ("com", "lpt") for i in "123456789¹²³"),
    ]
)


def checked_path(path: str, *, root_allowed: bool = False) -> str:
    """Return `path` if it names something below a store.

    Raises:
        UnsafePathError: It is absolute, empty, or has "." or "..", an empty part, NUL, a control
            character or a backslash.
    """
    if not (is_path(path) or (path == "" and root_allowed)):
        raise UnsafePathError(
            f"path {path!r} is refused: it must be relative, with '/' between its parts, and may not have "
            "'.', '..', a backslash, a control character or half a character."
        )
    return path


def is_path(path: str) -> bool:
    """Tell whether `path` names something below a store; others' keys may be such as none can read or delete here."""
    return len(path) <= 4096 and not _REFUSED.search(path)


def is_safe_name(name: str) -> bool:
    """Tell whether `name` is one plain file name on any system: no separator, drive, device or trailing dot."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name not in (".", "..")
        and not any(c in '/\\:*?"<>|' or ord(c) < 32 or ord(c) == 127 for c in name)
        and not name.endswith((" ", "."))
        and name.split(".", maxsplit=1)[0].lower() not in _DEVICES
    )
