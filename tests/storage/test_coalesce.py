"""Many ranges become few reads: of exactly these ranges, or of blocks that hold small ones."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import IncompleteCheckpointError, StorageError
from ckptkit.storage import coalesce
from ckptkit.storage.coalesce import BlockReader, Scatter
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import ReadInto

RANGES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)).map(lambda r: (r[0], r[0] + r[1])), max_size=40)


@given(RANGES, st.integers(0, 100), st.integers(1, 2000))
def test_every_range_is_in_exactly_one_span_and_only_a_single_range_exceeds_max_span(ranges, gap, span):
    spans = coalesce.coalesce(ranges, max_gap=gap, max_span=span)
    assert sorted(i for s in spans for i in s.members) == list(range(len(ranges)))
    for s in spans:
        inside = [ranges[i] for i in s.members]
        assert all(s.start <= start and stop <= s.stop for start, stop in inside)
        assert s.stop - s.start <= max(span, max(stop - start for start, stop in inside))


def test_a_gap_above_max_gap_splits():
    spans = coalesce.coalesce([(0, 10), (15, 20), (40, 50)], max_gap=5, max_span=100)
    assert [span.members for span in spans] == [(0, 1), (2,)]


def test_arriving_bytes_are_copied_to_every_overlapping_view():
    data = bytes(range(200))
    wanted = [(0, 200), (40, 3), (38, 30), (150, 50), (199, 1), (60, 0)]
    views = [bytearray(length) for _, length in wanted]
    reads = [ReadInto("x", start, memoryview(view)) for (start, _), view in zip(wanted, views, strict=True)]
    for low, high in ((0, 41), (41, 130), (130, 200)):  # as three requests bring it
        scatter = Scatter([read for read in reads if read.start < high], low)
        for at in range(low, high, 7):
            scatter(at - low, data[at : min(at + 7, high)])
    assert [bytes(view) for view in views] == [data[start : start + length] for start, length in wanted]


# --- blocks


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
        self.requests += [read.view.nbytes for read in reads]
        super().read_many(reads, workers=workers)


FILES = {name: random.Random(name).randbytes(50_000) for name in "abc"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    for name, value in {"_LEAST_BLOCK": 256, "_MOST": 1024, "_HELD": 8192, "_CALL": 0}.items():
        monkeypatch.setattr(coalesce, name, value)
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return Counting(tmp_path)


def read(reader: BlockReader, path: str, start: int, size: int) -> None:
    """Read a range, and compare it with the file."""
    data = bytearray(size)
    reader.read_into(path, start, memoryview(data))
    assert data == FILES[path][start : start + size]


def test_concurrent_ranges_return_the_bytes_of_the_file(store):
    reader, rng = BlockReader(store, 3), random.Random(0)
    wanted = []
    for _ in range(300):
        size = rng.choice([0, 1, 7, 255, 256, 257, 1024, 9000])
        start = rng.randrange(50_000 - size + 1)
        wanted.append((rng.choice("abc"), start, bytearray(size)))

    def read_part(part: int) -> None:
        for i in range(3 * part, 300, 12):
            reader.read_many([ReadInto(path, start, memoryview(data)) for path, start, data in wanted[i : i + 3]])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read_part, range(4)))
    assert all(data == FILES[path][start : start + len(data)] for path, start, data in wanted)


def test_small_sequential_ranges_make_one_request_per_block(store):
    reader = BlockReader(store)
    for start in range(0, 50_000, 50):
        read(reader, "a", start, 50)
    assert len(store.requests) == 49 and sum(store.requests) == 50_000


def test_a_long_range_is_read_directly(store):
    read(BlockReader(store), "a", 100, 5000)
    assert store.requests == [5000]


def test_random_access_does_not_read_much_more_than_needed(store):
    reader, rng = BlockReader(store), random.Random(1)
    for _ in range(2000):
        read(reader, rng.choice("abc"), rng.randrange(49_990), 4)
    assert sum(store.requests) <= 8192 + 9 * 4 * 2000 + 2 * 1024


def test_a_range_past_the_end_reports_a_short_file(store):
    reader = BlockReader(store)
    for start in (49_990, 60_000):
        with pytest.raises(IncompleteCheckpointError, match="a: the file has"):
            reader.read_into("a", start, memoryview(bytearray(20)))


def test_a_failed_block_is_read_again(store):
    reader, store.fails = BlockReader(store), True
    for _ in range(2):
        with pytest.raises(StorageError, match="down"):
            read(reader, "a", 0, 10)
    store.fails = False
    read(reader, "a", 0, 10)


def test_an_interrupted_reader_releases_waiting_threads(store, monkeypatch):
    reader, fetching, waiting = BlockReader(store), threading.Event(), threading.Event()

    def interrupted(*_: object) -> None:
        fetching.set()
        assert waiting.wait(60)
        raise KeyboardInterrupt

    def second() -> None:
        assert fetching.wait(60)
        waiting.set()
        read(reader, "a", 0, 10)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(reader, "_fetch", interrupted)
        other = pool.submit(second)
        with pytest.raises(KeyboardInterrupt):
            read(reader, "a", 0, 10)
        with pytest.raises(KeyboardInterrupt):
            other.result(60)
    read(reader, "a", 0, 10)
