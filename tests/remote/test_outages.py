"""A server restarts while a job saves: this save and the next wait for it; Ctrl-C does not."""

from __future__ import annotations

import threading

import pytest

from ckptkit import CheckpointManager
from ckptkit.errors import CkptkitError
from ckptkit.storage import retry
from tests.remote.runs import Options, loads, state_of
from tests.storage.proxy import PASS, Proxy

LONG_S = 1000.0  # longer than a test may take


def down(proxy: Proxy, seconds: float) -> threading.Timer:
    """Refuse all requests for a while."""

    proxy.rule = lambda number, method, path: "503"
    timer = threading.Timer(seconds, setattr, (proxy, "rule", PASS))
    timer.start()
    return timer


def test_a_background_save_waits_longer_for_a_restart_than_other_calls(
    proxy: Proxy, options: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(retry, "_LEAST", 1)
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state_of(1))
        timer = down(proxy, 2.0)
        with pytest.raises(CkptkitError):
            manager.save(2, state_of(2))
        manager.save_async(3, state_of(3)).result()
        timer.join()
    loads(url, options, 3)


def test_a_failed_save_does_not_shorten_the_retries_of_the_next_one(
    proxy: Proxy, options: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state_of(1))
        proxy.rule = lambda number, method, path: "503"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
            with pytest.raises(CkptkitError):
                manager.save(2, state_of(2))
        timer = down(proxy, 2.0)
        manager.save(3, state_of(3))
        timer.join()
    loads(url, options, 3)


def test_ctrl_c_ends_a_job_whose_save_waits_for_an_unreachable_store(
    proxy: Proxy, options: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "BACKGROUND_S", LONG_S)
    monkeypatch.setattr(retry, "WAIT_MAX_S", LONG_S)
    monkeypatch.setattr("ckptkit.checkpoint.manager.BACKGROUND_S", LONG_S)
    with pytest.raises(KeyboardInterrupt), CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state_of(1))
        proxy.clear()
        proxy.rule = lambda number, method, path: "503"
        manager.save_async(2, state_of(2))
        while proxy.count < 5:
            threading.Event().wait(0.05)
        raise KeyboardInterrupt
    proxy.rule = PASS
    loads(url, options, 1)
