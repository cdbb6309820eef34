"""Computes the outline of a file: the file's bytes, with each large slice replaced by the slice's 8-byte digest.

A file's digest is the hash of its outline. The digest therefore depends on every byte of the file. As a writer computes
the digests of the slices anyway, it hashes each byte only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ckptkit.errors import CorruptCheckpointError

LEAST = 64 << 10
"""Minimum size in bytes of a slice that is replaced by its digest."""
PREFIX = "outline:"
"""Prefix of a digest string that is the digest of an outline, not of a whole file. 16 hex digits follow."""
SPARES = "spares"
"""Key in the manifest's `info.extra` that lists large records that are not slices (omitted replicas).

Each record is stored as [path, start, bytes, 16 hex digits]. In an outline, these records are replaced by digests, too.
"""
Spare = tuple[str, int, int, int]
Part = tuple[int, int, int]
"""A slice, or a large record that is not a slice: (start, bytes, digest)."""
_Bytes = memoryview | bytes


def parts_of(found: Iterable[Part]) -> list[Part]:
    """Return, in file order, the slices and other records in `found` that a file's outline replaces by digests."""
    parts: list[Part] = []
    at = 0
    for start, nbytes, digest in sorted(set(found)):
        if nbytes >= LEAST and start >= at:  # tied tensors may share bytes
            parts.append((start, nbytes, digest))
            at = start + nbytes
    return parts


def outline(nbytes: int, parts: Iterable[Part], read: Callable[[int, int], Iterable[_Bytes]]) -> Iterator[_Bytes]:
    """Yield the bytes of a file, with the bytes of each of `parts` replaced by their 8-byte digest.

    `nbytes` is the size of the file. `read` returns the file's bytes [start, stop).
    """
    at = 0
    for start, length, digest in parts:
        yield from read(at, start)
        yield digest.to_bytes(8, "little")
        at = start + length
    yield from read(at, nbytes)


def spare_fields(spares: Iterable[Spare]) -> dict[str, Any]:
    """Return the field of `info.extra` that lists `spares` (see `SPARES`), or {} if there are none."""
    rows = [[path, start, nbytes, f"{digest:016x}"] for path, start, nbytes, digest in spares]
    return {SPARES: rows} if rows else {}


def spares_of(extra: Mapping[str, Any], prefix: str = "") -> list[Spare]:
    """Return the records that `info.extra` lists under the key `SPARES`: (path, start, bytes, digest).

    Args:
        prefix: Directory to put before each path.

    Raises:
        CorruptCheckpointError: The list is malformed.
    """
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
