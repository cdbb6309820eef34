"""How long a storage that does not answer is waited for: by whom, what is said meanwhile, and what ends it early."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store, retry
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.retry import Patience, call_with_retries, patient
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

LONG_S = 1000.0  # longer than a test may take: whoever waits for all of it is red


@pytest.fixture(scope="module")
def via() -> Iterator[tuple[Proxy, dict[str, Any]]]:
    with servers.moto() as options, proxy_of(options["endpoint_url"]) as proxy:
        open_store("s3://bucket", storage_options=options).fs.mkdir("retry")
        yield proxy, {**options, "endpoint_url": proxy.url}


@pytest.fixture
def proxy(via: tuple[Proxy, dict[str, Any]]) -> Iterator[Proxy]:
    via[0].clear()
    yield via[0]
    via[0].rule = lambda number, method, path: "pass"


@pytest.fixture
def store(via: tuple[Proxy, dict[str, Any]], proxy: Proxy) -> RemoteStore:
    return RemoteStore("s3://retry/run", storage_options=via[1])


def tries(proxy: Proxy, store: RemoteStore) -> int:
    """Count the requests of a read that fails."""
    proxy.clear()
    with pytest.raises(StorageError):
        store.read("x")
    return proxy.count


def test_what_follows_a_failure_is_tried_twice_in_the_same_operation_and_with_patience_in_the_next(
    store: RemoteStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "2s")
    store.write("x", b"1")
    proxy.rule = lambda number, method, path: "503"
    with patient():
        assert tries(proxy, store) > 2
        assert tries(proxy, store) == 2  # what cleans up after a failure
        with WorkerPool(1) as pool:  # in other threads, too
            assert pool.submit(tries, proxy, store).result() == 2
    with patient():
        assert tries(proxy, store) > 2
        proxy.rule = lambda number, method, path: "pass"
        assert store.read("x") == b"1"
        proxy.rule = lambda number, method, path: "503" if number < 4 else "pass"
        proxy.clear()
        assert store.read("x") == b"1" and proxy.count == 4  # it had answered meanwhile


def test_while_a_storage_is_waited_for_the_log_names_it_and_says_until_when(
    store: RemoteStore, proxy: Proxy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_QUIET_S", 0.0)
    proxy.rule = lambda number, method, path: "503" if number < 3 else "pass"
    store.list()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"s3://retry/run (at {proxy.url}) does not answer (")
    assert "retrying, next try in 0.1 s, giving up in 1" in said and "SlowDown" in said


def test_a_wait_ends_when_somebody_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "WAIT_S", LONG_S)
    monkeypatch.setattr(retry, "WAIT_MAX_S", LONG_S)
    patience, failed = Patience(2 * LONG_S), threading.Event()

    def fail() -> None:
        failed.set()
        raise ConnectionRefusedError("nobody there")

    def hurry() -> None:
        failed.wait()
        patience.hurry()

    thread = threading.Thread(target=hurry)
    thread.start()
    with pytest.raises(ConnectionRefusedError), patience.entered():
        call_with_retries(fail)
    thread.join()


def test_a_wait_is_cut_short_by_a_hurry_that_came_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, slept = Patience(LONG_S), []
    wait = patience.wait_before(1, 0.0, ConnectionRefusedError("nobody there"))
    patience.hurry()
    monkeypatch.setattr("time.sleep", slept.append)
    patience.sleep(wait or LONG_S)
    assert slept and slept[0] < 1


@pytest.mark.parametrize("what", ["upload", "reads"])
def test_ctrl_c_does_not_wait_for_threads_that_wait_for_a_storage_out_of_reach(
    store: RemoteStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", f"{LONG_S:g}s")
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 5 << 20)
    monkeypatch.setattr(retry, "WAIT_MAX_S", LONG_S)
    waiting = threading.Event()

    def rule(number: int, method: str, path: str) -> str:
        if "uploads" in path:
            return "pass"
        if number > 4:
            waiting.set()
        return "503"

    def interrupt() -> None:
        waiting.wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    proxy.rule = rule
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        if what == "upload":
            with store.writer("big") as out:
                out.write(bytes(20 << 20))
        else:
            store._connection.each(store.read, ["a", "b", "c"])
    thread.join()


def test_the_environment_says_how_long_also_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    assert retry.timeout_s() == 120 and retry.timeout_s(retry.BACKGROUND_S) == 600
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "7s")
    assert retry.timeout_s() == retry.timeout_s(retry.BACKGROUND_S) == 7
