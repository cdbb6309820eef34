"""Computes digests. No other module names an algorithm. Every digest that ckptkit writes uses `DIGEST`.

To change the algorithm, add a row to `_HASHERS` and change `DIGEST`, `digest_of` and `hex_digest_of`. Columns and
fields on disk are named after `DIGEST`, so the change needs a new format version (docs/format.md).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import xxhash

from ckptkit.errors import UnsupportedFormatError

DIGEST = "xxh3_64"
"""The digest that ckptkit records for slices and files: 64 bits, not cryptographic."""
CRC = "crc32"
"""The digest in zip archives. `torch.save` writes zip archives."""
SHA256 = "sha256"
"""The digest of whole files in SHA256SUMS."""

try:  # isal's is three to four times as fast as zlib's, but some platforms have no wheel
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32
"""crc32(data, value=0): the CRC-32 that zip and zlib use. `value` is the CRC-32 of the bytes before `data`."""


class Hasher(Protocol):
    """An incremental digest, with the interface of hashlib."""

    def update(self, data: Any, /) -> None: ...

    def intdigest(self) -> int: ...

    def hexdigest(self) -> str: ...


class Signer(Hasher, Protocol):
    """An incremental 16-byte hash. It is not cryptographic."""

    def digest(self) -> bytes: ...


class Crc32:
    """An incremental CRC-32. `value` is the CRC-32 of all bytes so far."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def update(self, data: Any, /) -> None:
        self.value = crc32(data, self.value)

    def intdigest(self) -> int:
        return self.value

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


class _Sha256:
    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def update(self, data: Any, /) -> None:
        self._state.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._state.digest(), "big")

    def hexdigest(self) -> str:
        return self._state.hexdigest()


_HASHERS: dict[str, Callable[[], Hasher]] = {CRC: Crc32, DIGEST: xxhash.xxh3_64, SHA256: _Sha256}
NAMES = tuple(_HASHERS)
"""The known algorithms. Tables store an algorithm as its index in this tuple."""

digest_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""The `DIGEST` of some bytes, as a number below 2^64."""
hex_digest_of: Callable[[Any], str] = xxhash.xxh3_64_hexdigest
"""The `DIGEST` of some bytes, as 16 hex digits."""
new_signer: Callable[[], Signer] = xxhash.xxh3_128
signature_of: Callable[[Any], bytes] = xxhash.xxh3_128_digest
"""Return a 16-byte hash of a plan or of data. Another version of ckptkit may return another hash."""


def new_hasher(algorithm: str = DIGEST) -> Hasher:
    """Return a new hasher. Raises UnsupportedFormatError if the algorithm is unknown."""
    if algorithm not in _HASHERS:
        raise UnsupportedFormatError(f"digest algorithm {algorithm!r} is unknown. Known: {CRC}, {DIGEST}.")
    return _HASHERS[algorithm]()


def hash_of(chunks: Iterable[Any], algorithm: str = DIGEST) -> int:
    """Return the digest of the concatenated chunks."""
    hasher = new_hasher(algorithm)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.intdigest()


def sha256_of(data: bytes) -> bytes:
    """Return the SHA-256 of `data` as 32 bytes."""
    return hashlib.sha256(data).digest()


def hex_width(algorithm: str) -> int:
    """Return the number of hex digits to which messages pad a digest with zeros. 1 means no padding."""
    return 64 if algorithm == SHA256 else 1


def proves_equality(algorithm: str | None) -> bool:
    """Return whether equal digests prove that the data are equal, unless somebody has constructed a collision.

    A CRC-32 is too short to prove this.
    """
    return algorithm == DIGEST


# --- Combining the CRC-32s of two adjacent pieces: multiply by x^(8 n) mod p, after Adler and Plank (zlib's crc32.c)

_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """Return the product of two bit-reflected polynomials modulo the CRC polynomial."""
    product = 0
    bit = 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=64)
def _square(power: int) -> int:
    """Return x^(2^power) modulo the CRC polynomial."""
    return 1 << 30 if power == 0 else _multiply(_square(power - 1), _square(power - 1))


@functools.lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    result, power = 1 << 31, 3
    while nbytes:
        if nbytes & 1:
            result = _multiply(_square(power), result)
        nbytes >>= 1
        power += 1
    return result


def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two concatenated pieces. `first` and `second` are the CRC-32s of the pieces."""
    return _multiply(_shift(second_nbytes), first) ^ second if first and second_nbytes else first ^ second
