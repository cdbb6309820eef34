"""The values of digests, and what they prove."""

import zlib

import pytest
import xxhash

from ckptkit.digests import (
    CRC,
    DIGEST,
    SHA256,
    crc32,
    digest_of,
    hash_of,
    hex_digest_of,
    mismatch,
    new_hasher,
    proves_equality,
)
from ckptkit.errors import UnsupportedFormatError

DATA = bytes(range(256)) * 999


@pytest.mark.parametrize("algorithm", [CRC, DIGEST, SHA256])
def test_pieces_have_the_digest_of_the_whole(algorithm):
    hasher = new_hasher(algorithm)
    for start in range(0, len(DATA), 1000):
        hasher.update(DATA[start : start + 1000])
    assert hasher.intdigest() == hash_of((DATA,), algorithm) == int(hasher.hexdigest(), 16)


def test_the_digests_are_those_of_the_formats():
    assert digest_of(DATA) == xxhash.xxh3_64_intdigest(DATA) == int(hex_digest_of(DATA), 16)
    assert crc32(DATA[9:], crc32(DATA[:9])) == zlib.crc32(DATA)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(UnsupportedFormatError, match="md4"):
        new_hasher("md4")


def test_a_crc_does_not_prove_equality():
    assert [proves_equality(name) for name in (DIGEST, CRC, None)] == [True, False, False]


def test_a_mismatch_shows_all_digits_of_both_digests():
    expected, found = hex_digest_of(b"91"), hex_digest_of(b"0")
    assert expected.startswith("00")
    said = mismatch(DIGEST, int(expected, 16), int(found, 16), 3, 9)
    assert said == f"checksum mismatch in bytes [3, 9): expected xxh3_64 {expected}, found {found}."
