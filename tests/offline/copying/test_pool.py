"""Copying threads: none is running after `run` has returned or raised."""

import os
import signal
import time

import pytest

from ckptkit.offline.copying.pool import Pool, Worker


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_waits_for_running_jobs_and_begins_no_further_one(workers):
    pool = Pool(workers)
    begun: list[int] = []
    ended: list[int] = []

    def job(item: int, _worker: Worker) -> None:
        begun.append(item)
        os.kill(os.getpid(), signal.SIGINT)
        assert pool.stopped.wait(60)
        time.sleep(0.2)  # still writing
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        pool.run(job, [0, 1] if workers == 1 else [0])
    assert begun == ended == [0]


def test_the_first_failure_is_raised_and_stops_the_rest():
    begun: list[int] = []

    def bad(item: int, _worker: Worker) -> None:
        begun.append(item)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        Pool(1).run(bad, [0, 1])
    assert begun == [0]
