"""Digests of a source whose pieces come from several threads."""

import itertools
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import digests
from ckptkit.digests import NAMES
from ckptkit.formats.checks import Crcs, RecordTable, Verifier
from tests.patches import after, before

PIECES = (b"first piece", b"second piece")


def verifier_of(data: bytes, digest: int, algorithm: str = "crc32") -> Verifier:
    one, algorithms = np.array([0], np.int64), np.array([NAMES.index(algorithm)])
    table = RecordTable(one, one, np.array([len(data)], np.int64), np.array([digest], np.uint64), algorithms, one)
    return Verifier(table, lambda record: f"model.safetensors: tensor {record}")


def feed(verifier: Verifier, piece: bytes) -> None:
    verifier.feed(0, b"".join(PIECES).index(piece), memoryview(piece))


def test_adjacent_pieces_of_two_threads_are_hashed_in_parallel_and_joined(monkeypatch):
    both = threading.Barrier(2)
    before(monkeypatch, digests, "crc32", lambda *_: both.wait(30))  # until the other thread hashes, too
    verifier = verifier_of(b"".join(PIECES), zlib.crc32(b"".join(PIECES)))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(feed, [verifier] * 2, PIECES))
    assert verifier.proved.tolist() == [True]


def test_a_piece_read_twice_is_not_damage(monkeypatch):
    end = Crcs.end  # by the other thread, before this one looks at the result
    after(monkeypatch, Crcs, "end", lambda _, crcs, first, stop, value: end(crcs, first, stop, value))
    verifier = verifier_of(b"".join(PIECES), zlib.crc32(b"".join(PIECES)))
    for piece in PIECES:
        feed(verifier, piece)
    assert verifier.proved.tolist() == [True]


@given(st.data())
def test_a_crc_does_not_depend_on_the_order_of_its_parts(data):
    content = data.draw(st.binary(min_size=1, max_size=40))
    cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content))))})
    parts = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    again = data.draw(st.lists(st.sampled_from(parts), max_size=3))
    crcs = Crcs()
    for start, stop in [*again, *parts]:
        crcs.feed(start, memoryview(content)[start:stop])
    assert all(crc == zlib.crc32(content[start : start + n]) for start, n, crc in crcs.parts())
    assert again or crcs.parts() == [(0, len(content), zlib.crc32(content))]


def test_a_sequential_digest_is_proved_only_by_pieces_in_order():
    content = b"".join(PIECES)
    for order, proved in ((PIECES, True), (PIECES[::-1], False)):
        verifier = verifier_of(content, xxhash.xxh3_64_intdigest(content), "xxh3_64")
        for piece in order:
            feed(verifier, piece)
        assert verifier.proved.tolist() == [proved]
        assert verifier.unproved().tolist() == ([] if proved else [0])
