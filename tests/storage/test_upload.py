"""How much writers buffer before they send: bounded for all writers together, in parts of one size."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.storage.body import Content
from ckptkit.storage.connection import Budget
from ckptkit.storage.upload import PartWriter

STEP = 12 << 20


class _Api:
    """An object store that keeps the parts it receives."""

    checked = in_order = False

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


class _Connection:
    def __init__(self, most_bytes: int) -> None:
        self.own = SimpleNamespace(budget=Budget(8, most_bytes))

    def upload(self, job: Callable[[], None], nbytes: int) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(job())
        return done


def _writer(most_bytes: int) -> tuple[PartWriter, _Api, Budget]:
    connection, api = _Connection(most_bytes), _Api()
    made: Any = PartWriter(connection, api, "x", lambda job: job())
    return made, api, connection.own.budget


@pytest.mark.parametrize("before", [0, 1 << 20])
def test_parts_are_small_and_equal_while_other_writers_buffer_much(before: int) -> None:
    writer, api, budget = _writer(16 << 20)
    budget.collect(15 << 20)  # of others
    data = os.urandom(3 * STEP + 77)
    writer.lend(memoryview(data), 0, before, owner=data)
    writer.write(memoryview(data)[before:])
    assert writer.finish() == "tag"
    assert [len(api.parts[number]) for number in sorted(api.parts)] == [STEP, STEP, STEP, 77]
    assert b"".join(api.parts[number] for number in sorted(api.parts)) == data
    budget.collect(-(15 << 20))
    assert budget.collected == 0


def test_a_single_writer_sends_two_parts_in_one_request() -> None:
    writer, api, budget = _writer(144 << 20)
    data = os.urandom(5 * STEP)
    writer.write(data)
    assert budget.collected == len(data)
    content = writer.finish()
    assert isinstance(content, Content) and content.joined() == data and not api.parts and budget.collected == 0


@pytest.mark.parametrize(("mib", "parts"), [(217, 3), (512, 5), (1024, 8), (1700, 8), (4096, 19)])
def test_lent_memory_is_sent_in_few_large_parts(mib: int, parts: int) -> None:
    writer, api, budget = _writer(144 << 20)
    sizes: dict[int, int] = {}
    api.part = lambda number, content, *, last: sizes.update({number: content.nbytes})
    data = memoryview(mmap.mmap(-1, mib << 20))  # no page of it is touched
    for start in range(0, len(data), 4 << 20):
        writer.lend(data, start, min(len(data), start + (4 << 20)), owner=data)
    assert writer.finish() == "tag"
    assert len(sizes) == parts and sum(sizes.values()) == mib << 20 and budget.collected == 0
    assert len({sizes[number] for number in range(1, parts)}) == 1 and max(sizes.values()) <= 216 << 20


def test_lent_memory_up_to_two_parts_is_one_request() -> None:
    writer, _, _ = _writer(144 << 20)
    data = memoryview(mmap.mmap(-1, 216 << 20))
    writer.lend(data, 0, len(data), owner=data)
    content = writer.finish()
    assert isinstance(content, Content) and content.nbytes == 216 << 20


def test_a_failed_writer_releases_its_buffer() -> None:
    writer, _, budget = _writer(144 << 20)
    writer.write(os.urandom(1 << 20))
    writer.abort()
    assert budget.collected == 0
