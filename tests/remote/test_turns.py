"""Each request of each operation fails once; servers restart, lack features of S3, and send wrong bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from moto.core import DEFAULT_ACCOUNT_ID as ACCOUNT
from moto.s3.models import s3_backends

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.errors import CkptkitError, CorruptCheckpointError, RankFailedError, StorageError
from ckptkit.offline.convert import convert
from ckptkit.offline.prune import prune
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from ckptkit.storage import open_store, retry
from tests.remote.runs import Options, full, loads, names, run_cli, save, state_of, steps, top_names
from tests.storage import servers
from tests.storage.proxy import PASS, Answer, Changed, Proxy, every_third, first_of_each, proxy_of


def test_each_request_of_each_operation_may_fail_once(
    proxy: Proxy, options: Options, s3: Options, url: str, at_once: None
) -> None:
    run = f"{url}/run"
    operations: dict[str, Callable[[], object]] = {
        "save": lambda: [save(run, options, step) for step in (1, 2)],
        "load": lambda: loads(run, options, 2),
        "ls": lambda: run_cli("ls", run, options=options),
        "convert": lambda: convert(run, f"{url}/dcp", to="dcp", world_size=2, storage_options=options),
        "reshard": lambda: reshard(run, f"{url}/three", world_size=3, verify=True, storage_options=options),
        "verify": lambda: verify(f"{run}/latest", storage_options=options),
        "rotate": lambda: save(run, options, 3, retention=RetentionPolicy(max_num=2)),
        "prune": lambda: prune(run, policy=RetentionPolicy(max_num=1), storage_options=options),
    }
    for name, operation in operations.items():
        proxy.clear()
        proxy.rule = first_of_each("503", "reset", "lost", "cut")
        operation()
        assert proxy.count >= 2, name
    proxy.rule = PASS
    loads(run, s3, 3)
    root = open_store(run, storage_options=s3)
    assert steps(run, s3) == [3] and top_names(run, s3) == {".ckptkit", "latest", "step_00000003"}
    assert verify(f"{url}/three", storage_options=s3).ok
    assert verify(f"{url}/dcp", storage_options=s3).ok
    assert root.unfinished_uploads() == []


def test_a_run_among_thousands_survives_every_third_request_failing(
    proxy: Proxy, options: Options, s3: Options, url: str, at_once: None
) -> None:
    for i in range(2001):  # three pages: of each three requests in a row one fails
        s3_backends[ACCOUNT]["aws"].put_object("remote", f"{url.partition('remote/')[2]}/others/{i}", b"x")
    proxy.rule = every_third("503")
    save(url, options, 1)
    loads(url, options, 1)
    assert len(open_store(url, storage_options=options).list("others")) == 2001


def test_a_save_survives_a_server_restart(tmp_path: Path) -> None:
    port = servers.free_port()
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        near = dict(first.enter_context(servers.rclone(tmp_path, port=port)))
        proxy = stack.enter_context(proxy_of(near["endpoint_url"]))
        options = {**near, "endpoint_url": proxy.url}
        save("s3://bucket/run", options, 1)
        restarted = []

        def rule(number: int, method: str, path: str) -> str:
            if method != "PUT" or ".distcp" not in path or restarted:
                return "pass"
            restarted.append(path)
            first.close()
            stack.enter_context(servers.rclone(tmp_path, port=port))
            return "reset"

        proxy.rule = rule
        save("s3://bucket/run", options, 2)
        assert restarted
        loads("s3://bucket/run", near, 2)


def test_a_server_that_refuses_conditions_is_used_without_them(
    proxy: Proxy, options: Options, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 5 << 20)
    proxy.rule = lambda number, method, path: (
        Answer(501, "NotImplemented") if "if-none-match" in proxy.headers[number - 1] else "pass"
    )
    options = {**options, "default_fill_cache": False}  # a connection of its own: what servers can is remembered
    with caplog.at_level(logging.WARNING):
        save(url, options, 1)
        loads(url, options, 1)
        store = open_store(url, storage_options=options)
        with store.writer("large") as out:
            out.write(bytes(12 << 20))
    proxy.rule = PASS
    assert any("conditional writes" in record.message for record in caplog.records)
    with pytest.raises(FileExistsError):
        store.write("large", b"1")


def test_a_large_object_may_be_the_first_that_a_server_without_conditions_gets(
    proxy: Proxy, options: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 5 << 20)
    proxy.rule = lambda number, method, path: (
        Answer(501, "NotImplemented") if "if-none-match" in proxy.headers[number - 1] else "pass"
    )
    store = open_store(url, storage_options={**options, "default_cache_type": "none"})  # a connection of its own
    with store.writer("large") as out:
        out.write(bytes(12 << 20))
    assert store.read("large") == bytes(12 << 20) and store.has_conditional_writes is False


def test_an_outage_does_not_trigger_the_fallback_to_an_older_checkpoint(
    proxy: Proxy, options: Options, s3: Options, url: str, at_once: None
) -> None:
    for step in (1, 2):
        save(url, s3, step)
    options = {**options, "default_fill_cache": False}  # of a connection that has not read it yet
    proxy.rule = lambda number, method, path: "503" if path.endswith("/step_00000002/checkpoint.json") else "pass"
    with CheckpointManager(url, storage_options=options) as manager, pytest.raises(StorageError):
        manager.load(state_of(99), fallback="previous")
    proxy.rule = PASS
    loads(url, options, 2)


def test_every_reader_finds_wrong_bytes_and_short_answers(
    proxy: Proxy, options: Options, s3: Options, url: str
) -> None:
    save(f"{url}/run", s3, 1)

    def flipped(data: bytes) -> bytes:
        return bytes(byte ^ 1 for byte in data) if len(data) > 100 else data

    lies: list[Callable[[bytes], bytes]] = []

    def rule(number: int, method: str, path: str) -> str | Changed:
        return Changed(lies[-1]) if method == "GET" and path.endswith("__0_0.distcp") else "pass"

    proxy.rule = rule
    for lie in (lambda data: data[:-5], flipped):
        lies.append(lie)
        for how in ({}, {"atomic": True}):
            state = state_of(99)
            before = full(state)
            with (
                CheckpointManager(f"{url}/run", storage_options=options) as manager,
                pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"),
            ):
                manager.load(state, **how)
            if how:  # the default reads into the live state, and says that it is half loaded
                assert all(torch.equal(value, before[name]) for name, value in full(state).items())
            else:
                assert state.half_loaded
        assert not verify(f"{url}/run/latest", storage_options=options).ok
    with pytest.raises(CorruptCheckpointError):
        convert(f"{url}/run", f"{url}/dcp", to="dcp", storage_options=options)
    with pytest.raises(CorruptCheckpointError):
        reshard(f"{url}/run", f"{url}/two", world_size=2, storage_options=options)
    proxy.rule = PASS
    assert {item.path for item in open_store(url, storage_options=s3).list()} == {"run"}


def test_a_missing_bucket_is_not_an_empty_run(s3: Options) -> None:
    url = "s3://there-is-no-such-bucket/run"
    with CheckpointManager(url, storage_options=s3) as manager:
        with pytest.raises(RankFailedError, match="bucket does not exist"):
            manager.load(state_of(1))
        with pytest.raises(RankFailedError, match="bucket does not exist"):
            manager.save(1, state_of(1))
    code, text = run_cli("ls", url, options=s3)
    assert code == 1 and "bucket does not exist" in text


@pytest.mark.parametrize("below", ["a b/\u00fc+%20#x?&=y/run", "k=v/run,1;'(2)!*@$", "trailing/"])
def test_any_valid_key_works(s3: Options, url: str, below: str) -> None:
    here = f"{url}/{below}"
    save(here, s3, 1)
    loads(here, s3, 1)
    reshard(here, f"{url}/o\u00fc #1/two", world_size=2, storage_options=s3)
    assert verify(f"{url}/o\u00fc #1/two", storage_options=s3).ok


def test_a_run_at_the_root_of_a_bucket_leaves_a_thousand_others_alone(s3: Options) -> None:
    root = open_store("s3://whole-bucket", storage_options=s3)
    root.fs.makedirs("whole-bucket", exist_ok=True)
    theirs = {f"step-{i}/f" if i % 2 else f"loose{i}" for i in range(1001)}
    for name in theirs:
        s3_backends[ACCOUNT]["aws"].put_object("whole-bucket", name, b"x")
    for step in (1, 2, 3):
        save("s3://whole-bucket", s3, step, retention=RetentionPolicy(max_num=2))
    loads("s3://whole-bucket/", s3, 3)
    prune("s3://whole-bucket", policy=RetentionPolicy(max_num=1), storage_options=s3)
    left = names("s3://whole-bucket", s3)
    assert theirs < left
    assert {path.split("/")[0] for path in left - theirs} == {".ckptkit", "latest", "step_00000003"}


# --- a server that restarts while a job saves

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
