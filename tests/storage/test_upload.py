"""The body of a request, and how much writers buffer before they send: one part of a writer, all parts of one size."""

from __future__ import annotations

import io
import mmap
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.storage.body import Body, Collected, Content
from ckptkit.storage.connection import Budget
from ckptkit.storage.upload import UPLOAD_BYTES, PartWriter


class _Api:
    """An object store that keeps the parts it receives."""

    in_order = False

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}

    def held(self, content: Content) -> int:
        return content.copied

    def upload(self, name: str) -> _Api:
        return self

    def part(self, number: int, content: Content, *, last: bool) -> None:
        self.parts[number] = content.joined()

    def complete(self) -> str:
        return "tag"

    def abort(self) -> None:
        self.parts.clear()


def _writer() -> tuple[PartWriter, _Api]:
    def upload(job: Callable[[], None], nbytes: int) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(job())
        return done

    connection: Any = SimpleNamespace(upload=upload)
    api: Any = _Api()
    return PartWriter(connection, api, "x", lambda job: job()), api


@pytest.mark.parametrize("lent", [0, 1 << 20, (1 << 20) - 5])
def test_parts_are_equal_and_buffer_little(lent):
    writer, api = _writer()
    part = UPLOAD_BYTES + (1 << 20 if lent else 0)
    data = os.urandom(2 * part + 77)
    writer.lend(memoryview(data), 0, lent, owner=data)
    writer.write(memoryview(data)[lent:])
    assert writer.finish() == "tag"
    assert [len(api.parts[number]) for number in sorted(api.parts)] == [part, part, 77]
    assert b"".join(api.parts[number] for number in sorted(api.parts)) == data


@pytest.mark.parametrize(("mib", "parts"), [(216, 0), (217, 3), (512, 5), (1024, 8), (1700, 8), (4096, 19)])
def test_lent_memory_is_sent_in_one_request_or_a_few_large_parts(mib, parts):
    writer, api = _writer()
    sizes: dict[int, int] = {}
    api.part = lambda number, content, *, last: sizes.update({number: content.nbytes})
    data = memoryview(mmap.mmap(-1, mib << 20))  # no page of it is touched
    for start in range(0, len(data), 4 << 20):
        writer.lend(data, start, min(len(data), start + (4 << 20)), owner=data)
    content = writer.finish()
    if parts:
        assert len(sizes) == parts and sum(sizes.values()) == mib << 20
        assert len({sizes[number] for number in range(1, parts)}) == 1 and max(sizes.values()) <= 216 << 20
    else:
        assert isinstance(content, Content) and content.nbytes == mib << 20 and not sizes


# --- the body of one request

SIZES = [1, 300, 700_000, 20, 5_500_000, 40_000, 262_144, 5]


def collected(data: bytes) -> Collected:
    """Collect `data` in pieces of SIZES, alternately lent and copied; what was copied changes afterwards."""
    found, source, at = Collected(), memoryview(data), 0
    for i, size in enumerate(SIZES):
        if i % 2:
            given = bytearray(source[at : at + size])
            found.copy(memoryview(given))
            given[:] = bytes(size)
        else:
            middle = at + size // 2
            found.lend(source, at, middle, None)
            found.lend(source, middle, at + size, None)
        at += size
    return found


def test_a_body_reads_as_its_concatenated_pieces():
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


def test_lent_memory_is_not_copied_and_adjacent_pieces_are_joined():
    data = bytearray(os.urandom(1 << 20))
    found, source = Collected(), memoryview(data)
    for start in range(0, len(data), 1 << 16):
        found.lend(source, start, start + (1 << 16), None)
    content = found.content()
    assert (len(content.pieces), content.copied) == (1, 0)
    data[0] ^= 1
    assert content.pieces[0][0] == data[0]


def test_a_request_larger_than_the_budget_runs_alone():
    budget = Budget(100)
    budget.acquire(1000)
    done = threading.Event()
    budget.acquire(0)  # lent memory takes no room
    thread = threading.Thread(target=lambda: (budget.acquire(1), done.set()), daemon=True)
    thread.start()
    assert not done.wait(0.05)
    budget.release(1000)
    assert done.wait(30)
