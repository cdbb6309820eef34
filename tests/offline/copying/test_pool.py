"""Threads that copy: none is at work once `run` is over, however it ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ckptkit.offline.copying.pool import Pool, Worker


def test_an_interrupt_waits_for_the_jobs_that_run() -> None:
    pool = Pool(2, 16)
    ended: list[int] = []

    def job(_worker: Worker) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert pool.stopped.wait(60)
        time.sleep(0.2)  # still writing
        ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        pool.run([job])
    assert ended == [1]


def test_after_an_interrupt_no_further_job_begins() -> None:
    pool = Pool(1, 16)
    begun: list[int] = []

    def first(_worker: Worker) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert pool.stopped.wait(60)

    with pytest.raises(KeyboardInterrupt):
        pool.run([first, lambda _worker: begun.append(1)])
    assert begun == []


def test_the_first_failure_is_raised_and_stops_the_rest() -> None:
    begun: list[int] = []

    def bad(_worker: Worker) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        Pool(1, 16).run([bad, lambda _worker: begun.append(1)])
    assert begun == []


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_every_job_is_done_with_more_threads_than_jobs_and_fewer(workers: int) -> None:
    done: list[int] = []
    Pool(workers, 16).run([lambda _worker: done.append(1)] * 5)
    assert len(done) == 5
    Pool(workers, 16).run([])
