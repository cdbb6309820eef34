"""Digests of a source that several threads bring the pieces of."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import IntegrityError
from ckptkit.offline.copying import checks
from ckptkit.offline.copying.checks import RecordTable, Verifier

PIECES = (b"first piece", b"second piece")


class SlowHasher:
    """A CRC-32 that stays in its first update until somebody else has begun one, or nobody does for a while."""

    def __init__(self) -> None:
        self.value, self.began, self.others = 0, threading.Event(), threading.Event()

    def update(self, data: Any) -> None:
        if self.began.is_set():
            self.others.set()
        else:
            self.began.set()
            self.others.wait(0.3)
        self.value = zlib.crc32(data, self.value)

    def intdigest(self) -> int:
        return self.value


def verifier_of(data: bytes, digest: int) -> Verifier:
    one = np.array([0], np.int64)
    table = RecordTable(one, one, np.array([len(data)], np.int64), np.array([digest], np.uint64), one, one)
    return Verifier(table, lambda record: f"model.safetensors: tensor {record}")


def feed_side_by_side(verifier: Verifier, hasher: SlowHasher, pieces: tuple[bytes, ...]) -> list[BaseException]:
    """Feed each piece from a thread of its own; the second one comes while the first is hashed."""
    failures: list[BaseException] = []

    def feed(start: int, piece: bytes) -> None:
        try:
            verifier.feed(0, start, memoryview(piece))
        except BaseException as error:
            failures.append(error)

    threads, start = [], 0
    for piece in pieces:
        threads.append(threading.Thread(target=feed, args=(start, piece)))
        threads[-1].start()
        assert hasher.began.wait(10)
        start += len(piece)
    for thread in threads:
        thread.join(10)
    return failures


def test_neighbouring_pieces_from_two_threads_are_hashed_in_the_order_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hasher = SlowHasher()
    monkeypatch.setattr(checks, "new_hasher", lambda algorithm: hasher)
    verifier = verifier_of(b"".join(PIECES), zlib.crc32(b"".join(PIECES)))
    assert not feed_side_by_side(verifier, hasher, PIECES)
    assert verifier.proved.tolist() == [True]


def test_a_damaged_piece_is_found_however_many_threads_bring_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = SlowHasher()
    monkeypatch.setattr(checks, "new_hasher", lambda algorithm: hasher)
    pieces = (PIECES[0], b"SECOND piece")
    (failure,) = feed_side_by_side(verifier_of(b"".join(pieces), zlib.crc32(b"".join(PIECES))), hasher, pieces)
    assert isinstance(failure, IntegrityError)
    assert "damaged" in str(failure)
