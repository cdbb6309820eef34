"""How much writers buffer before they send: one part of a writer, all parts of one size."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ckptkit.storage.body import Content
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


class _Connection:
    def upload(self, job: Callable[[], None], nbytes: int) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(job())
        return done


def _writer() -> tuple[PartWriter, _Api]:
    connection, api = _Connection(), _Api()
    made: Any = PartWriter(connection, api, "x", lambda job: job())
    return made, api


@pytest.mark.parametrize(
    ("lent", "part"),
    [
        pytest.param(0, UPLOAD_BYTES, id="none is lent"),
        pytest.param(1 << 20, UPLOAD_BYTES + (1 << 20), id="some is lent"),
        pytest.param((1 << 20) - 5, UPLOAD_BYTES + (1 << 20), id="an odd number of bytes is lent"),
    ],
)
def test_parts_are_equal_and_buffer_little(lent: int, part: int) -> None:
    writer, api = _writer()
    data = os.urandom(2 * part + 77)
    writer.lend(memoryview(data), 0, lent, owner=data)
    writer.write(memoryview(data)[lent:])
    assert writer.finish() == "tag"
    assert [len(api.parts[number]) for number in sorted(api.parts)] == [part, part, 77]
    assert b"".join(api.parts[number] for number in sorted(api.parts)) == data


def test_a_small_object_is_one_request() -> None:
    writer, api = _writer()
    data = os.urandom(UPLOAD_BYTES)
    writer.write(data)
    content = writer.finish()
    assert isinstance(content, Content) and content.joined() == data and not api.parts


@pytest.mark.parametrize(("mib", "parts"), [(217, 3), (512, 5), (1024, 8), (1700, 8), (4096, 19)])
def test_lent_memory_is_sent_in_few_large_parts(mib: int, parts: int) -> None:
    writer, api = _writer()
    sizes: dict[int, int] = {}
    api.part = lambda number, content, *, last: sizes.update({number: content.nbytes})
    data = memoryview(mmap.mmap(-1, mib << 20))  # no page of it is touched
    for start in range(0, len(data), 4 << 20):
        writer.lend(data, start, min(len(data), start + (4 << 20)), owner=data)
    assert writer.finish() == "tag"
    assert len(sizes) == parts and sum(sizes.values()) == mib << 20
    assert len({sizes[number] for number in range(1, parts)}) == 1 and max(sizes.values()) <= 216 << 20


def test_lent_memory_up_to_216_mib_is_one_request() -> None:
    writer, _ = _writer()
    data = memoryview(mmap.mmap(-1, 216 << 20))
    writer.lend(data, 0, len(data), owner=data)
    content = writer.finish()
    assert isinstance(content, Content) and content.nbytes == 216 << 20
