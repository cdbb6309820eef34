"""Computes digests. Only this module names algorithms; ckptkit writes all its digests with `DIGEST`.

Another algorithm is a row in `_HASHERS` and a change of `DIGEST`, `digest_of` and `hex_digest_of`; the names of columns
and fields on disk follow from `DIGEST` (a new version of the format: docs/format.md).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from ckptkit.errors import UnsupportedFormatError

if TYPE_CHECKING:  # else imported where it is needed: `ckptkit ls` needs none
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "CRC",
    "DIGEST",
    "Fingerprint",
    "Hasher",
    "NAMES",
    "SHA256",
    "crc32",
    "crc32_combine",
    "digest_of",
    "fingerprint_of_runs",
    "hash_of",
    "hex_digest_of",
    "hex_width",
    "new_hasher",
    "new_signer",
    "proves_equality",
    "sha256_of",
    "signature_of",
]

DIGEST = "xxh3_64"
"""The digest of slices and files that ckptkit writes: 64 bits, no cryptographic one."""
CRC = "crc32"
"""The digest inside zip archives, and so of everything that torch writes."""
SHA256 = "sha256"
"""The digest of whole files in SHA256SUMS."""

try:  # three to four times as fast as zlib's; a wheel for every platform is not promised
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

crc32: Callable[..., int] = _crc32
"""crc32(data, value=0): the CRC-32 of zip and zlib, continued from `value`."""


class Hasher(Protocol):
    """A digest that is being computed."""

    def update(self, data: Any, /) -> None: ...

    def intdigest(self) -> int: ...

    def hexdigest(self) -> str: ...


class Signer(Hasher, Protocol):
    """A signature that is being computed."""

    def digest(self) -> bytes: ...


class _Crc32:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

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


_HASHERS: dict[str, Callable[[], Hasher]] = {CRC: _Crc32, DIGEST: xxhash.xxh3_64, SHA256: _Sha256}
NAMES = tuple(_HASHERS)
"""Algorithms, for tables that state them by their place here."""

digest_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""The `DIGEST` of some bytes, as a number below 2^64."""
hex_digest_of: Callable[[Any], str] = xxhash.xxh3_64_hexdigest
"""The `DIGEST` of some bytes, as 16 hex digits."""
new_signer: Callable[[], Signer] = xxhash.xxh3_128
signature_of: Callable[[Any], bytes] = xxhash.xxh3_128_digest
"""16 bytes that tell plans and contents apart within one version of ckptkit."""


def new_hasher(algorithm: str = DIGEST) -> Hasher:
    """Return a fresh digest.

    Raises:
        UnsupportedFormatError: The algorithm is unknown.
    """
    if algorithm not in _HASHERS:
        raise UnsupportedFormatError(f"digest algorithm {algorithm!r} is unknown. Known: {CRC}, {DIGEST}.")
    return _HASHERS[algorithm]()


def hash_of(chunks: Iterable[Any], algorithm: str = DIGEST) -> int:
    """Return the digest of bytes that come in chunks."""
    hasher = new_hasher(algorithm)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.intdigest()


def sha256_of(data: bytes) -> bytes:
    """Return the 32 bytes of a SHA-256."""
    return hashlib.sha256(data).digest()


def hex_width(algorithm: str) -> int:
    """Return how many hex digits a message shows at least."""
    return 64 if algorithm == SHA256 else 1


def proves_equality(algorithm: str | None) -> bool:
    """Return whether equal digests mean equal bytes, unless somebody chose the bytes to collide. 32 bits are too
    few."""
    return algorithm == DIGEST


# --- CRC-32 of two pieces laid end to end, from theirs: Adler and Plank's x^(8 n) mod p, as in zlib's crc32.c

_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's, with reflected bits."""
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
    """Return x^(2^power) modulo the polynomial."""
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
    """Return the CRC-32 of two concatenated pieces, from the CRC-32 of each."""
    return _multiply(_shift(second_nbytes), first) ^ second if second_nbytes else first


# --- A fingerprint of a tensor's bits that is additive over its parts, so that any sharding gives the same one.
#
# F1 = sum of bits, F2 = sum of bits times the row-major index in the whole tensor, both modulo 2^64
# (bits: an element as an unsigned number). It finds every flipped bit, swapped rows and shards at the wrong
# place; it is not a cryptographic digest.

_MODULUS = 1 << 64
_BLOCK = 1 << 14  # elements at a time: what is widened to 64 bits stays in the cache


@functools.cache
def _ramp(count: int) -> npt.NDArray[np.uint64]:
    import numpy as np

    return np.arange(count, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The sums (f1, f2) over a part of a tensor or all of it. `a + b` is that of two disjoint parts together."""

    f1: int = 0
    f2: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.f1 + other.f1) % _MODULUS, (self.f2 + other.f2) % _MODULUS)


def fingerprint_of_runs(bits: npt.NDArray[Any], starts: npt.NDArray[np.uint64], run: int) -> Fingerprint:
    """Return the contribution of runs of elements to their tensor's fingerprint.

    Args:
        bits: Elements as unsigned numbers, one run after the other.
        starts: [n] the index in the tensor of the first element of each run.
        run: Number of elements in each run.
    """
    import numpy as np

    ramp = _ramp(_BLOCK)
    f1 = f2 = 0
    if run >= _BLOCK or len(starts) == 1:
        for i, start in enumerate(starts.tolist()):
            for at in range(0, run, _BLOCK):
                block = bits[i * run + at : i * run + min(at + _BLOCK, run)].astype(np.uint64)
                total = int(block.sum())
                f1 += total
                f2 += (start + at) * total + int(np.dot(block, ramp[: len(block)]))
        return Fingerprint(f1 % _MODULUS, f2 % _MODULUS)
    rows, ramp, step = bits.reshape(-1, run), ramp[:run], max(1, _BLOCK // run)
    for at in range(0, len(rows), step):
        block = rows[at : at + step].astype(np.uint64)
        totals = block.sum(axis=1, dtype=np.uint64)
        f1 += int(totals.sum())
        f2 += int(np.dot(totals, starts[at : at + step])) + int(np.dot(block, ramp).sum())
    return Fingerprint(f1 % _MODULUS, f2 % _MODULUS)
