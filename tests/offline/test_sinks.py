"""The sink of local files: bytes arrive by either way into a file, and a full file system is told, never a signal."""

from __future__ import annotations

import os

import pytest

from ckptkit.errors import NoSpaceError
from ckptkit.offline import kernel
from ckptkit.offline.mapped import MappedFiles
from ckptkit.offline.plan import OutputFile
from ckptkit.offline.sinks import LocalSink
from ckptkit.storage.local import LocalStore
from tests.checkpoint.full_disk import disk

NBYTES = 1 << 20


def made_sink(folder, nbytes: int = NBYTES) -> LocalSink:
    sink = LocalSink(LocalStore(str(folder)), [OutputFile("file", nbytes)])
    sink.create(0)
    return sink


def test_bytes_go_into_the_memory_of_a_file_while_another_thread_writes_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "_file_system", lambda _: "tmpfs")
    sink, data = made_sink(tmp_path), os.urandom(300_000)
    with monkeypatch.context() as patch, sink._turns[0]:
        patch.setattr(os, "pwritev", lambda *_: pytest.fail("it was written"))
        sink.write(0, 12_345, [memoryview(data)[:1000], memoryview(data)[1000:]])
        sink.put(0, 500_001, memoryview(data))
    sink.close()
    expected = bytes(12_345) + data + bytes(500_001 - 12_345 - len(data)) + data + bytes(NBYTES - 500_001 - len(data))
    assert (tmp_path / "file").read_bytes() == expected


def test_a_turn_that_is_free_is_taken_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "_file_system", lambda _: "tmpfs")
    monkeypatch.setattr(MappedFiles, "put", lambda *_: pytest.fail("it was mapped"))
    sink = made_sink(tmp_path)
    for start in (0, 100_000):
        sink.write(0, start, [memoryview(b"x" * 100_000)])
    sink.close()
    assert (tmp_path / "file").read_bytes()[:200_001] == b"x" * 200_000 + b"\0"


def test_what_the_memory_of_a_file_has_no_room_for_is_left_to_be_written(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    descriptor = os.open(path, os.O_RDWR)
    mapped = MappedFiles()
    assert mapped.put(0, descriptor, NBYTES, 0, [b"x" * 70_000])
    os.ftruncate(descriptor, NBYTES // 2)  # touching what is beyond would be a signal
    assert not mapped.put(0, descriptor, NBYTES, NBYTES - 70_000, [b"x" * 70_000])
    assert not mapped.put(0, descriptor, NBYTES, NBYTES - 1, [b"xx"])
    mapped.close()
    assert not mapped.put(0, descriptor, NBYTES, 0, [b"x" * 70_000])
    os.close(descriptor)


def test_a_full_memory_file_system_is_told_while_another_thread_writes(tmp_path):
    with disk(tmp_path / "disk", "tmpfs", kib=1024) as place:
        sink = made_sink(place, nbytes=8 << 20)
        try:
            with sink._turns[0], pytest.raises(NoSpaceError, match="Free some space"):
                for start in range(0, 8 << 20, NBYTES):
                    sink.write(0, start, [memoryview(bytes(NBYTES))])
        finally:
            sink.close()
