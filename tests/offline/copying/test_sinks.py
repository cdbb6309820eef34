"""The sink of local files."""

import threading

import pytest

from ckptkit.errors import NoSpaceError
from ckptkit.offline.copying.plan import OutputFile
from ckptkit.offline.copying.sinks import LocalSink
from ckptkit.storage.local import LocalStore
from tests.checkpoint.full_disk import disk

NBYTES = 1 << 20


def made_sink(folder, nbytes: int = NBYTES) -> LocalSink:
    sink = LocalSink(LocalStore(str(folder)), [OutputFile("file", nbytes)])
    sink.begin(0)
    return sink


def test_a_full_file_system_is_an_error_that_says_to_free_space(tmp_path):
    with disk(tmp_path / "disk", "tmpfs", kib=1024) as place:
        sink = made_sink(place, nbytes=8 << 20)
        try:
            with pytest.raises(NoSpaceError, match="Free some space"):
                for start in range(0, 8 << 20, NBYTES):
                    sink.write(0, [(start, bytes(NBYTES))])
        finally:
            sink.close()


def test_threads_that_write_short_pieces_side_by_side_keep_each_others_bytes(tmp_path):
    """Pieces with gaps are written as one block, and the gaps contain other threads' pieces."""
    sink = made_sink(tmp_path, nbytes=64 << 10)
    expected = bytes(i // 16 % 251 for i in range(64 << 10))

    def write(thread: int) -> None:
        for block in range(0, 64 << 10, 4 << 10):
            starts = range(block + 16 * thread, block + (4 << 10), 64)
            sink.write(0, [(start, expected[start : start + 16]) for start in reversed(starts)])

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert (tmp_path / "file").read_bytes() == expected
