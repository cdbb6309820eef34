"""The sink of local files."""

from __future__ import annotations

import os
import threading
import time

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
                    sink.write(0, start, [memoryview(bytes(NBYTES))])
        finally:
            sink.close()


def test_one_thread_at_a_time_writes_to_a_file(tmp_path, monkeypatch):
    sink, real, inside, most = made_sink(tmp_path, nbytes=8 << 10), os.pwritev, [0], [0]

    def slow(*args):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return real(*args)

    monkeypatch.setattr(os, "pwritev", slow)
    threads = [threading.Thread(target=sink.write, args=(0, at << 10, [memoryview(bytes(1 << 10))])) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert most == [1]
