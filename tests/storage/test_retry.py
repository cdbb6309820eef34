"""How long an unreachable store is retried, what is logged meanwhile, and what ends it early."""

import os
import signal
import threading
import time

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import retry
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.pool import WorkerPool, result_of
from ckptkit.storage.retry import patient
from tests.storage.proxy import PASS, Proxy, always, nth

LONG_S = 1000.0  # longer than a test may take


def tries(proxy: Proxy, store: RemoteStore) -> int:
    """Count the requests of a read that fails."""
    proxy.clear()
    with pytest.raises(StorageError):
        store.read("x")
    return proxy.count


def test_after_a_failure_an_operation_tries_twice_and_the_next_one_is_patient_again(store, proxy, monkeypatch):
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "2s")
    store.write("x", b"1")
    proxy.rule = always("503")
    with patient():
        assert tries(proxy, store) > 2
        assert tries(proxy, store) == 2  # cleanup after a failure
        with WorkerPool(1) as pool:  # in other threads, too
            assert pool.submit(tries, proxy, store).result() == 2
    with patient():
        assert tries(proxy, store) > 2
        proxy.rule = PASS
        assert store.read("x") == b"1"
        proxy.rule = nth("503", 1, 2, 3)
        proxy.clear()
        assert store.read("x") == b"1" and proxy.count == 4  # the store had answered in between


def test_the_log_of_a_retry_names_the_server_and_the_deadline(store, proxy, caplog, monkeypatch):
    monkeypatch.setattr(retry, "_QUIET_S", 0.0)
    proxy.rule = nth("503", 1, 2)
    store.list()
    (said,) = [record.getMessage() for record in caplog.records if record.name == retry.__name__]
    assert said.startswith(f"{store.url} (at {proxy.url}) does not answer (")
    assert "retrying, next try in 0.1 s, giving up in 1" in said and "SlowDown" in said


@pytest.mark.parametrize("what", ["upload", "reads"])
def test_ctrl_c_does_not_wait_for_threads_that_retry(store, proxy, monkeypatch, what):
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", f"{LONG_S:g}s")
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 5 << 20)
    monkeypatch.setattr(retry, "WAIT_MAX_S", LONG_S)

    def rule(number: int, method: str, path: str) -> str:
        if number == 5:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return "pass" if "uploads" in path else "503"

    proxy.rule = rule
    with pytest.raises(KeyboardInterrupt):
        if what == "upload":
            with store.writer("big") as out:
                out.write(bytes(20 << 20))
        else:
            store._connection.each(store.read, ["a", "b", "c"])


def test_the_environment_sets_all_timeouts(monkeypatch):
    assert retry.timeout_s() == 120 and retry.timeout_s(retry.BACKGROUND_S) == 600
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "7s")
    assert retry.timeout_s() == retry.timeout_s(retry.BACKGROUND_S) == 7


def test_ctrl_c_ends_a_wait_even_if_another_thread_receives_the_signal():
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
