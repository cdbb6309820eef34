"""Huge pages below files on tmpfs: the same bytes and the same room, whether they are to be had or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.storage import hugepages
from ckptkit.storage.hugepages import HugePages

HUGE = 2 << 20
NBYTES = 21 * (1 << 20) + 12345
DATA = os.urandom(NBYTES)
PIECE = 300_001
SHARED_MEMORY = Path("/dev/shm")

pytestmark = pytest.mark.skipif(not os.path.ismount(SHARED_MEMORY), reason="there is no tmpfs at /dev/shm")


@pytest.fixture
def file() -> Iterator[Path]:
    path = SHARED_MEMORY / f"ckptkit-test-{os.getpid()}-{os.urandom(4).hex()}"
    yield path
    path.unlink(missing_ok=True)


def written(path: Path) -> int:
    """Write DATA on huge pages and return how many bytes got them."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        pages = HugePages.below(fd, NBYTES)
        assert pages is not None
        try:
            for start in range(0, NBYTES, PIECE):
                pages.reach(min(NBYTES, start + PIECE))
                os.write(fd, DATA[start : start + PIECE])
        finally:
            pages.close()
        return pages.made
    finally:
        os.close(fd)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_the_bytes_are_those_that_were_written(file: Path) -> None:
    written(file)
    assert file.read_bytes() == DATA


def test_a_file_takes_no_more_room_than_with_small_pages(file: Path) -> None:
    written(file)
    assert 512 * file.stat().st_blocks == -(-NBYTES // os.sysconf("SC_PAGESIZE")) * os.sysconf("SC_PAGESIZE")


def test_huge_pages_are_whole_and_end_before_the_file_does(file: Path) -> None:
    made = written(file)
    if not made:
        pytest.skip("this system makes no huge pages on tmpfs")
    assert made % HUGE == 0
    assert made <= NBYTES


def test_nothing_stays_mapped(file: Path) -> None:
    written(file)
    assert not mapped(file)


def test_without_huge_pages_the_bytes_are_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "_COLLAPSE", 9999)  # as a kernel before 6.1
    assert written(file) == 0
    assert file.read_bytes() == DATA
    assert not mapped(file)


def test_where_they_take_longer_than_they_spare_the_rest_gets_small_ones(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(HugePages, "_make", lambda pages, reserved: bool(tried.append(pages._next // HUGE)) or True)
    monkeypatch.setattr(hugepages, "_SPARES_S", -1.0)
    monkeypatch.setattr(hugepages, "_PATIENCE_S", 3.5 * HUGE / NBYTES)
    written(file)
    assert tried == [0, 1, 2, 3]  # of ten
    assert file.read_bytes() == DATA
    assert not mapped(file)


def test_small_files_have_none(file: Path) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        assert HugePages.below(fd, 4 << 20) is None
    finally:
        os.close(fd)


def test_other_file_systems_have_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "_TMPFS", 0xEF53)  # ext4
    fd = os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        assert HugePages.below(fd, NBYTES) is None
    finally:
        os.close(fd)
