"""Digests: their values, and that another algorithm needs changes in one module only."""

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
from tests.ranks import run_script

DATA = bytes(range(256)) * 999

ANOTHER = """
import sys
for name in [name for name in sys.modules if name.startswith("ckptkit")]:
    del sys.modules[name]

import xxhash
from ckptkit import digests
digests.DIGEST = "xxh64"
digests._HASHERS["xxh64"] = xxhash.xxh64
digests.NAMES = tuple(digests._HASHERS)
digests.digest_of, digests.hex_digest_of = xxhash.xxh64_intdigest, xxhash.xxh64_hexdigest
digests.new_hasher.__defaults__ = digests.hash_of.__defaults__ = ("xxh64",)

import json, pathlib
import torch
from ckptkit import CheckpointManager, TrainState, verify
model = torch.nn.Linear(300, 200)
with CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, TrainState(model=model))
    wanted = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert manager.load(TrainState(model=model)) is not None
    assert torch.equal(model.weight, wanted)
step = pathlib.Path(sys.argv[1], "step_00000001")
text = (step / "checkpoint.json").read_text()
assert "xxh3" not in text and "xxh64" in text, text
assert b"slice.xxh64" in (step / "manifest.safetensors").read_bytes()
assert verify(str(step)).ok
file = next(step.glob("*.distcp"))
data = bytearray(file.read_bytes())
data[len(data) // 2] ^= 1
file.write_bytes(data)
assert not verify(str(step)).ok
"""


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


def test_changing_the_digest_affects_only_one_module(tmp_path):
    code, said = run_script(ANOTHER, str(tmp_path))
    assert code == 0, said


def test_a_mismatch_shows_all_digits_of_both_digests():
    expected, found = hex_digest_of(b"91"), hex_digest_of(b"0")
    assert expected.startswith("00")
    said = mismatch(DIGEST, int(expected, 16), int(found, 16), 3, 9)
    assert said == f"checksum mismatch in bytes [3, 9): expected xxh3_64 {expected}, found {found}."
