"""Computes digests. Every digest that ckptkit writes uses `DIGEST`, and no other module names that algorithm.

To change the algorithm, add a row to `_HASHERS` and change `DIGEST`, `digest_of` and `hex_digest_of`. Columns and
fields on disk are named after `DIGEST`, so the change needs a new format version (docs/format.md).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from ckptkit.errors import UnsupportedFormatError

if TYPE_CHECKING:  # numpy is imported lazily, because `ckptkit ls` does not need it
    import numpy as np
    import numpy.typing as npt

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


def mismatch(algorithm: str, expected: int, found: int, start: int, stop: int) -> str:
    """Return the message that the bytes [start, stop) have a wrong digest. Shows all hex digits of both digests."""
    digits = {CRC: 8, DIGEST: 16}.get(algorithm, 64)
    shown = f"expected {algorithm} {expected:0{digits}x}, found {found:0{digits}x}."
    return f"checksum mismatch in bytes [{start}, {stop}): {shown}"


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


# --- A fingerprint of a tensor's bits. The fingerprints of all shards add up to the fingerprint of the whole tensor, so
# it does not depend on the sharding.
#
# The bits of each element are read as an unsigned integer. F1 is the sum of these integers. F2 is the sum of
# integer * index, where index is the element's row-major index in the whole tensor. Both sums are taken modulo 2^64.
# The fingerprint detects every flipped bit, swapped rows and misplaced shards. It is not a cryptographic digest.

_MODULUS = 1 << 64
_BLOCK = 1 << 14  # elements; a block fits in the cache, even as 64-bit integers


@functools.cache
def _ramp(count: int) -> npt.NDArray[np.uint64]:
    import numpy as np

    return np.arange(count, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The sums F1 and F2 (see the comment above) over some elements of a tensor.

    If `a` and `b` are the fingerprints of disjoint sets of elements, `a + b` is the fingerprint of both sets together.
    """

    f1: int = 0
    f2: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.f1 + other.f1) % _MODULUS, (self.f2 + other.f2) % _MODULUS)


def fingerprint_of_runs(bits: npt.NDArray[Any], starts: npt.NDArray[np.uint64], run: int) -> Fingerprint:
    """Return the fingerprint of several runs of a tensor. A run is a sequence of consecutive elements.

    Args:
        bits: The elements as unsigned integers, one run after the other.
        starts: The row-major index of each run's first element in the whole tensor.
        run: The number of elements in each run.
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
