"""The body of one request: pieces of memory that the HTTP client reads as a file."""

from __future__ import annotations

import base64
import io
import os
import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.storage.body import Body, Collected, Content
from ckptkit.storage.connection import Budget

SIZES = [1, 300, 700_000, 20, 1_500_000, 40_000, 262_144, 5]


def collected(data: bytes) -> Collected:
    """Collect `data` in pieces of SIZES, alternately copied and lent."""
    found, source, at = Collected(), memoryview(data), 0
    for i, size in enumerate(SIZES):
        if i % 2:
            found.copy(source[at : at + size])
        else:
            middle = at + size // 2
            found.lend(source, at, middle, None)
            found.lend(source, middle, at + size, None)
        at += size
    return found


def test_a_body_reads_as_its_concatenated_pieces() -> None:
    data = os.urandom(sum(SIZES))
    content = collected(data).content()
    assert content.joined() == data
    body = Body(content)
    with body.getbuffer() as buffer:
        assert len(buffer) == len(data)
    for _ in range(2):  # a second time after a seek, as a signature and then a request do
        body.seek(0)
        assert b"".join(iter(lambda: bytes(body.read(1 << 16)), b"")) == data
        assert body.tell() == len(data)
    rng = random.Random(0)
    for at in rng.sample(range(len(data)), 50):
        assert body.seek(at) == at
        piece = bytes(body.read(100))
        assert piece and data[at : at + len(piece)] == piece
    assert body.seek(0, io.SEEK_END) == len(data)
    assert not body.read(10)


def test_lent_memory_is_not_copied_and_adjacent_pieces_are_joined() -> None:
    data = bytearray(os.urandom(1 << 20))
    found, source = Collected(), memoryview(data)
    for start in range(0, len(data), 1 << 16):
        found.lend(source, start, start + (1 << 16), None)
    content = found.content()
    assert (len(content.pieces), content.copied) == (1, 0)
    data[0] ^= 1
    assert content.pieces[0][0] == data[0]


def test_copied_data_may_change_afterwards() -> None:
    data = bytearray(b"before")
    found = Collected()
    found.copy(memoryview(data))
    data[:] = b"after!"
    content = found.content()
    assert (content.joined(), content.copied) == (b"before", 6)


def test_the_crc_covers_all_pieces() -> None:
    data = os.urandom(sum(SIZES))
    expected = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    assert collected(data).content().crc32_base64() == Content.of(data).crc32_base64() == expected


@pytest.mark.parametrize("sizes", [[9 << 20], [100, 5 << 20, 300_000], [200_000] * 50, [1] * 9])
def test_copied_pieces_of_any_size_keep_their_order(sizes: list[int]) -> None:
    found, whole = Collected(), os.urandom(sum(sizes))
    at = 0
    for size in sizes:
        given = bytearray(whole[at : at + size])
        found.copy(memoryview(given))
        given[:] = bytes(size)
        at += size
    content = found.content()
    assert content.joined() == whole and content.copied == content.nbytes == len(whole)


def test_a_budget_is_never_exceeded() -> None:
    budget, lock, held, worst = Budget(100), threading.Lock(), [], [0]

    def go(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            nbytes = rng.choice([0, 10, 40, 100])
            budget.acquire(nbytes)
            with lock:
                held.append(nbytes)
                worst[0] = max(worst[0], sum(held))
            with lock:
                held.remove(nbytes)
            budget.release(nbytes)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(go, range(8)))
    assert 0 < worst[0] <= 100


def test_a_request_larger_than_the_budget_runs_alone() -> None:
    budget = Budget(100)
    budget.acquire(1000)
    done = threading.Event()
    budget.acquire(0)  # lent memory takes no room
    thread = threading.Thread(target=lambda: (budget.acquire(1), done.set()), daemon=True)
    thread.start()
    assert not done.wait(0.05)
    budget.release(1000)
    assert done.wait(30)
