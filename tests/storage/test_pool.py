"""Waiting for the threads of a pool."""

import signal
import threading
import time

import pytest

from ckptkit.storage.pool import WorkerPool, result_of


def test_ctrl_c_ends_a_wait_also_if_another_thread_receives_the_signal():
    ended = threading.Event()

    def interrupt() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.wait(60)

    with WorkerPool(1) as pool:
        future = pool.submit(interrupt)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            result_of(future)
        ended.set()
    assert time.monotonic() - started < 50
