"""Which relative paths a store accepts."""

from __future__ import annotations

from ckptkit.errors import UnsafePathError

__all__ = ["checked_path", "is_safe_name"]

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
    if path == "" and root_allowed:
        return path
    parts = path.split("/")
    bad = any(part in ("", ".", "..") for part in parts)
    bad = bad or "\\" in path or any(ord(c) < 32 or ord(c) == 127 or _is_half(c) for c in path)
    if bad or len(path) > 4096:
        raise UnsafePathError(
            f"path {path!r} is refused: it must be relative, with '/' between its parts, and may not have "
            "'.', '..', a backslash, a control character or half a character."
        )
    return path


def _is_half(char: str) -> bool:
    """Whether no file system takes it: a surrogate that stands for no byte of a name that is not UTF-8."""
    return "\ud800" <= char <= "\udfff" and not "\udc80" <= char <= "\udcff"


def is_safe_name(name: str) -> bool:
    """Tell whether `name` is one plain file name on any system: no separator, drive, device or trailing dot."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name not in (".", "..")
        and not any(c in '/\\:*?"<>|' or ord(c) < 32 or ord(c) == 127 for c in name)
        and not name.endswith((" ", "."))
        and name.split(".", maxsplit=1)[0].lower() not in _DEVICES
    )
