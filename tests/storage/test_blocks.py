"""Small reads from blocks: the same bytes in few requests, and never much more than was asked for."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptkit.errors import IncompleteCheckpointError, StorageError
from ckptkit.storage import coalesce
from ckptkit.storage.coalesce import BlockReader
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import ReadInto


class Counting(LocalStore):
    """Counts reads, and fails on demand."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.requests: list[int] = []
        self.fails = False

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.fails:
            raise StorageError("the store is down")
        data = super().read(path, start, stop)
        self.requests.append(len(data))
        return data

    def read_many(self, reads: object, *, workers: int = 0) -> None:
        self.requests += [read.view.nbytes for read in reads]  # type: ignore[attr-defined]
        super().read_many(reads, workers=workers)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(coalesce, "_LEAST_BLOCK", 256)
    monkeypatch.setattr(coalesce, "_MOST", 1024)
    monkeypatch.setattr(coalesce, "_HELD", 8192)
    monkeypatch.setattr(coalesce, "_CALL", 0)
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(random.Random(name).randbytes(50_000))
    return Counting(tmp_path)


def test_concurrent_ranges_return_the_bytes_of_the_file(store: Counting) -> None:
    reader, rng = BlockReader(store, 3), random.Random(0)
    wanted = []
    for _ in range(300):
        size = rng.choice([0, 1, 7, 255, 256, 257, 1024, 9000])
        start = rng.randrange(50_000 - size + 1)
        wanted.append((rng.choice("abc"), start, bytearray(size)))

    def read(part: int) -> None:
        for i in range(3 * part, 300, 12):
            reader.read_many([ReadInto(path, start, memoryview(data)) for path, start, data in wanted[i : i + 3]])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert all(data == store_bytes(store, path)[start : start + len(data)] for path, start, data in wanted)


def store_bytes(store: Counting, path: str) -> bytes:
    return Path(store.path_of(path)).read_bytes()


def test_small_sequential_ranges_make_one_request_per_block(store: Counting) -> None:
    reader, data = BlockReader(store), bytearray(50)
    for start in range(0, 50_000, 50):
        reader.read_into("a", start, memoryview(data))
        assert data == store_bytes(store, "a")[start : start + 50]
    assert len(store.requests) == 49 and sum(store.requests) == 50_000


def test_a_long_range_is_read_directly(store: Counting) -> None:
    data = bytearray(5000)
    BlockReader(store).read_into("a", 100, memoryview(data))
    assert store.requests == [5000] and data == store_bytes(store, "a")[100:5100]


def test_random_access_does_not_read_much_more_than_needed(store: Counting) -> None:
    reader, rng = BlockReader(store), random.Random(1)
    for _ in range(2000):
        start = rng.randrange(49_990)
        data = bytearray(4)
        reader.read_into("abc"[rng.randrange(3)], start, memoryview(data))
    assert sum(store.requests) <= 8192 + 9 * 4 * 2000 + 2 * 1024


def test_small_reads_far_apart_in_order_use_blocks(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a few bytes costs a call, so reading the bytes between such reads is no waste."""
    monkeypatch.setattr(coalesce, "_CALL", 64)
    reader, data = BlockReader(store), bytearray(4)
    for _ in range(3):
        for path in "abc":
            for start in range(0, 50_000, 400):
                reader.read_into(path, start, memoryview(data))
    assert len(store.requests) <= 3 * 3 * (50_000 // 1024 + 1)


def test_a_range_past_the_end_reports_a_short_file(store: Counting) -> None:
    reader = BlockReader(store)
    for start in (49_990, 60_000):
        with pytest.raises(IncompleteCheckpointError, match="a: the file has"):
            reader.read_into("a", start, memoryview(bytearray(20)))


def test_a_failed_block_is_read_again(store: Counting) -> None:
    reader, data = BlockReader(store), bytearray(10)
    store.fails = True
    for _ in range(2):
        with pytest.raises(StorageError, match="down"):
            reader.read_into("a", 0, memoryview(data))
    store.fails = False
    reader.read_into("a", 0, memoryview(data))
    assert data == store_bytes(store, "a")[:10]


def test_an_interrupted_reader_releases_waiting_threads(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, fetching, failed = BlockReader(store), threading.Event(), threading.Event()
    data = memoryview(bytearray(10))
    original = reader._fetch

    def interrupted(*_: object) -> None:
        fetching.set()
        assert waiting.wait(60)
        raise KeyboardInterrupt

    waiting = threading.Event()
    monkeypatch.setattr(reader, "_fetch", interrupted)

    def second() -> None:
        assert fetching.wait(60)
        waiting.set()
        try:
            reader.read_into("a", 0, data)
        except KeyboardInterrupt:
            failed.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        reader.read_into("a", 0, data)
    thread.join(60)
    assert not thread.is_alive() and failed.is_set()
    monkeypatch.setattr(reader, "_fetch", original)
    reader.read_into("a", 0, data)
    assert bytes(data) == store_bytes(store, "a")[:10]
