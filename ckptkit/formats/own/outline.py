"""The outline of a file: its bytes, with each large slice replaced by the 8 bytes of its digest.

A file's digest is the hash of its outline, so that a writer hashes each byte once: it needs the slices' digests anyway.
Together, these digests cover every byte of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptkit.errors import CorruptCheckpointError

__all__ = ["LEAST", "PREFIX", "SPARES", "Part", "Spare", "outline", "parts_of", "spare_fields", "spares_of"]

LEAST = 64 << 10
"""Slices of at least this many bytes are replaced by their digests."""
PREFIX = "outline:"
"""Prefix of the 16 hex digits in a text that may have either digest of a file."""
SPARES = "spares"
"""Key of the manifest's `info.extra`: large records that are not slices (omitted replicas), as [path, start, bytes, 16
hex digits]. An outline contains their digests, too."""
Spare = tuple[str, int, int, int]
Part = tuple[int, int, int]
"""(start, bytes, digest) of a slice or a spare."""
_Bytes = memoryview | bytes


def parts_of(found: Iterable[Part]) -> list[Part]:
    """Return the slices and spares of a file that its outline replaces by digests, in file order."""
    parts: list[Part] = []
    at = 0
    for start, nbytes, digest in sorted(set(found)):
        if nbytes >= LEAST and start >= at:  # tied tensors may share their bytes
            parts.append((start, nbytes, digest))
            at = start + nbytes
    return parts


def outline(nbytes: int, parts: Iterable[Part], read: Callable[[int, int], Iterable[_Bytes]]) -> Iterator[_Bytes]:
    """Yield the outline of a file of `nbytes`, piece by piece. `read` returns the bytes [start, stop) of the file."""
    at = 0
    for start, length, digest in parts:
        yield from read(at, start)
        yield digest.to_bytes(8, "little")
        at = start + length
    yield from read(at, nbytes)


def spare_fields(spares: Iterable[Spare]) -> dict[str, Any]:
    """Return the `info.extra` entry for large records that are not slices, or {} if there are none."""
    rows = [[path, start, nbytes, f"{digest:016x}"] for path, start, nbytes, digest in spares]
    return {SPARES: rows} if rows else {}


def spares_of(extra: Mapping[str, Any], prefix: str = "") -> list[Spare]:
    """Return the large records that are not slices. `prefix` is added to their paths. Raises CorruptCheckpointError."""
    found: list[Spare] = []
    try:
        for path, start, nbytes, digest in extra.get(SPARES, ()):
            value = int(digest, 16)
            if min(start, nbytes, value) < 0 or value >= 1 << 64:
                raise ValueError(digest)
            found.append((prefix + path, start, nbytes, value))
    except (TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the manifest's {SPARES!r} are not a list of records: {error}.") from error
    return found
