"""A store behind a failing network: identical bytes in the end, or one clear error and nothing half-published."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.store import ReadInto
from tests.storage import servers
from tests.storage.proxy import PASS, Answer, Proxy, every_third, first_of_each, proxy_of

Options = dict[str, Any]
PART = 5 << 20  # the smallest part that S3 accepts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)


@pytest.fixture
def store(through: Options, path: str) -> RemoteStore:
    return RemoteStore(f"s3://{path}", storage_options=through)


@pytest.mark.parametrize("fate", ["503", "reset", "lost", "cut", "slow"])
def test_bytes_are_identical_when_every_third_request_fails(
    store: RemoteStore, proxy: Proxy, moto: Options, fate: str
) -> None:
    data = os.urandom(2 * PART + 12345)
    proxy.clear()
    proxy.rule = every_third(fate)
    with store.writer("big") as out:
        out.write(data)
    store.write("small", data[:1000])
    assert store.read("big") == data
    views = [bytearray(5000) for _ in range(4)]
    store.read_many([ReadInto("big", i * 2_500_000, memoryview(v)) for i, v in enumerate(views)])
    assert [bytes(v) for v in views] == [data[i * 2_500_000 :][:5000] for i in range(4)]
    assert store.read("small") == data[:1000]
    assert [item.path for item in store.list(recursive=True)] == ["big", "small"]
    store.delete_tree("big")
    proxy.rule = PASS
    direct = RemoteStore(store.url, storage_options=moto)
    assert [item.path for item in direct.list(recursive=True)] == ["small"]
    assert store.unfinished_uploads() == []


def test_any_request_of_an_upload_may_fail(store: RemoteStore, proxy: Proxy) -> None:
    data = os.urandom(2 * PART + 100)
    for turn in range(1, 6):
        proxy.clear()
        proxy.rule = lambda number, method, path, turn=turn: "lost" if number == turn else "pass"
        with store.writer(f"x{turn}") as out:
            out.write(data)
        proxy.rule = PASS
        assert store.read(f"x{turn}") == data


def test_permanent_failures_are_not_retried(store: RemoteStore, proxy: Proxy) -> None:
    proxy.clear()
    with pytest.raises(FileNotFoundError):
        store.read("nothing")
    assert proxy.count == 1


def test_a_server_that_keeps_failing_is_one_error_in_bounded_time(
    store: RemoteStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    proxy.clear()
    proxy.rule = lambda number, method, path: "503"
    with pytest.raises(StorageError, match="CKPTKIT_STORAGE_TIMEOUT"):
        store.read("x")
    assert 2 <= proxy.count <= 4  # the retries of s3fs and botocore do not multiply ours


def test_a_successful_retry_is_not_a_warning(
    store: RemoteStore, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.rule = first_of_each("503")
    store.write("x", b"1")
    assert store.read("x") == b"1"
    assert [record for record in caplog.records if store.url in record.getMessage()] == []


FINAL = [
    (Answer(403, "AccessDenied"), PermissionError),
    (Answer(400, "ExpiredToken"), PermissionError),
    (Answer(403, "RequestTimeTooSkewed"), PermissionError),
    (Answer(404, "NoSuchBucket"), FileNotFoundError),
    (Answer(400, "AuthorizationHeaderMalformed"), StorageError),
    (Answer(507, "InsufficientStorage"), StorageError),
]


@pytest.mark.parametrize(("answer", "error"), FINAL, ids=[answer.code for answer, _ in FINAL])
def test_an_error_that_a_retry_cannot_fix_is_raised_at_once(
    store: RemoteStore, proxy: Proxy, answer: Answer, error: type[OSError]
) -> None:
    proxy.clear()
    proxy.rule = lambda number, method, path: answer
    calls = (lambda: store.read("x"), lambda: store.list(), lambda: store._put("x", store._full("x"), b"1"))
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert caught.value.errno not in (None, errno.EIO) or answer.status == 507
    assert proxy.count == len(calls)


def is_part(method: str, path: str) -> bool:
    return "partNumber=2" in path


def is_end(method: str, path: str) -> bool:
    return method == "POST" and "uploadId" in path


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
def test_an_error_in_a_200_answer_to_complete_is_a_failure(
    store: RemoteStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    data, said = os.urandom(3 * PART), []

    def rule(number: int, method: str, path: str) -> str | Answer:
        if not is_end(method, path) or len(said) == times:
            return "pass"
        said.append(number)
        return Answer(200, "InternalError")  # S3 sends its 200 before it knows

    proxy.rule = rule
    if times == 1:
        with store.writer("big") as out:
            out.write(data)
        assert store.read("big") == data
    else:
        with pytest.raises(StorageError), store.writer("big") as out:
            out.write(data)
        proxy.rule = PASS
        assert store.list() == [] and store.unfinished_uploads() == []


@pytest.mark.parametrize("lost", [is_part, is_end])
def test_a_lost_upload_leaves_nothing(store: RemoteStore, proxy: Proxy, lost: Callable[[str, str], bool]) -> None:
    proxy.rule = lambda number, method, path: Answer(404, "NoSuchUpload") if lost(method, path) else "pass"
    with pytest.raises(FileNotFoundError), store.writer("big") as out:
        out.write(bytes(3 * PART))
    proxy.rule = PASS
    assert store.list() == [] and store.unfinished_uploads() == []


def test_a_failed_upload_leaves_no_object_and_no_parts(store: RemoteStore) -> None:
    with pytest.raises(RuntimeError), store.writer("big") as out:
        out.write(bytes(3 * PART))
        raise RuntimeError("on purpose")
    assert store.list(recursive=True) == [] and store.unfinished_uploads() == []


def test_unfinished_uploads_are_found_and_aborted(store: RemoteStore) -> None:
    full = store._full("step_1/big")
    store._api.upload(full)
    assert [upload.name for upload in store.unfinished_uploads()] == [full]
    assert store.unfinished_uploads(older_than_s=100 * 365 * 86400) == []  # moto's clock is of 2010
    assert store.unfinished_uploads("step_2") == []
    store.delete_tree("step_1")
    assert store.unfinished_uploads() == []


def test_a_writer_does_not_replace_a_large_object(store: RemoteStore) -> None:
    for content in (b"a", b"b"):
        try:
            with store.writer("big") as out:
                out.write(content * (2 * PART + 5))
        except FileExistsError:
            assert content == b"b"
    assert store.read("big", 0, 1) == b"a"
    assert store.unfinished_uploads() == []


def test_parts_are_sent_in_the_background_in_bounded_number(store: RemoteStore, proxy: Proxy) -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def rule(number: int, method: str, path: str) -> str:
        if "partNumber" in path:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.2)
            with lock:
                now[0] -= 1
        return "pass"

    proxy.rule = rule
    with store.writer("big") as out:
        for _ in range(12):
            out.write(bytes(PART))
    assert 2 <= most[0] <= 8


_FORKS = """
import gc, json, multiprocessing, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
from ckptkit.errors import UsageError
from ckptkit.storage.objects import RemoteStore

options = json.loads(sys.argv[2])
store = RemoteStore(sys.argv[1], storage_options=options)

def child(what):
    if what == "opens its own":
        assert RemoteStore(sys.argv[1], storage_options=options).read("x") == b"1"
    elif what == "uses its parent's":
        try:
            store.read("x")
        except UsageError as error:
            assert "before a fork" in str(error), error
    else:
        del globals()["store"]
        gc.collect()

store.write("x", b"1")
for what in ("touches none", "uses its parent's", "opens its own"):
    worker = multiprocessing.get_context("fork").Process(target=child, args=(what,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    pid = os.fork()
    if not pid:  # ends as any process, with its exit functions and finalizers
        child(what)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.read("x") == b"1"
print("whole")
"""


@pytest.mark.parametrize("protocol", ["s3", "gs"])
def test_a_store_does_not_cross_a_fork_and_a_fork_leaves_its_connections_alone(
    protocol: str, moto: Options, gcs: Options
) -> None:
    server = moto if protocol == "s3" else gcs
    with proxy_of(server["endpoint_url"]) as proxy:
        options = json.dumps({**server, "endpoint_url": proxy.url})
        command = [sys.executable, "-c", _FORKS, f"{protocol}://bucket/faults-forks", options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert (done.stdout, done.stderr) == ("whole\n", "")
        assert proxy.kinds()["GET"] == 5  # three reads of the parent and two of its children: none was repeated


def test_many_threads_share_a_store(moto: Options, path: str) -> None:
    def work(i: int) -> None:
        with contextlib.suppress(KeyError), store.writer(f"f{i}") as out:
            out.write(bytes([i]) * 1000)
            if i % 3 == 0:
                raise KeyError(i)

    store = RemoteStore(f"s3://{path}", storage_options=moto)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))
    assert [item.path for item in store.list()] == sorted(f"f{i}" for i in range(12) if i % 3)


def test_a_silent_server_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "1s")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint_url": url, "key": "k", "secret": "hush-hush", "config_kwargs": {"read_timeout": 1}}
        with pytest.raises(StorageError) as caught:
            open_store("s3://bucket/faults-x", storage_options=options).read("y")
    assert "hush" not in str(caught.value)


def test_missing_conditional_writes_are_detected_and_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with servers.rclone(tmp_path) as options:
        root = open_store("s3://bucket/run", storage_options=options)
        root.write("a", b"1")
        root.child("d").write("b", b"1")
        with pytest.raises(FileExistsError):  # also before that is known
            root.write("a", b"2")
        for store, path in ((root, "a"), (root.child("d"), "b")):
            store.try_conditional(path, b"1")
            assert store.has_conditional_writes is False
        with pytest.raises(FileExistsError):
            root.write("a", b"2")
        assert len([record for record in caplog.records if "conditional" in record.message]) == 1
        assert [item.path for item in root.list(recursive=True)] == ["a", "d/b"]


def test_conditional_writes_are_detected_without_a_warning(
    store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.write("a", b"1")
    store.try_conditional("a", b"1")
    assert store.has_conditional_writes is True
    assert not [record for record in caplog.records if record.name.startswith("ckptkit")]


def test_an_outage_during_detection_does_not_mean_missing_conditional_writes(
    store: RemoteStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    store._connection.conditional.clear()
    store.claim("lease", b"1", looked=False)
    proxy.rule = lambda number, method, path: "503" if method == "PUT" else "pass"
    store.try_conditional("lease", b"1")
    assert store.has_conditional_writes is None
    proxy.rule = PASS
    store.try_conditional("lease", b"1")
    assert store.has_conditional_writes is True


def test_an_interrupted_read_releases_the_callers_memory(
    store: RemoteStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("x", b"1" * 1000)
    asked, go, wait = threading.Event(), threading.Event(), threading.Event.wait
    interrupted: list[bool] = []

    def rule(number: int, method: str, path: str) -> str:
        asked.set()
        return "pass" if wait(go, 60) else "reset"

    def interrupted_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout == 1 and not interrupted:  # waits of one second, so that signals are handled
            interrupted.append(wait(asked, 60))
            raise KeyboardInterrupt
        return wait(event, timeout)

    proxy.rule = rule
    view = bytearray(1000)
    monkeypatch.setattr(threading.Event, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        store.read_into("x", 0, memoryview(view))
    monkeypatch.undo()
    go.set()
    for _ in range(30):  # what would still come has time to
        assert store.read("x") == b"1" * 1000 and view == bytes(1000)


def test_a_tree_with_an_open_upload_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    with servers.rclone(tmp_path) as options:
        store = RemoteStore("s3://bucket/run", storage_options=options)
        store.write("step/id/whole", b"1")
        with _half_an_upload(options, "run/step/id/half"):
            store.delete_tree("step/id")
            assert store.list("step", recursive=True) == []


@contextmanager
def _half_an_upload(options: Options, key: str) -> Iterator[None]:
    """Send half of an object and pause, so that the server has a file open."""
    url = servers.presigned_put(options, "bucket", key)
    with socket.create_connection((str(url.hostname), int(url.port or 0))) as connection:
        head = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 2000000\r\n\r\n"
        connection.sendall(head.encode() + bytes(1_000_000))
        time.sleep(0.3)
        yield


def test_lent_bytes_are_identical_when_every_third_request_fails(store: RemoteStore, proxy: Proxy) -> None:
    data = memoryview(os.urandom(10 * PART + 12345))
    proxy.clear()
    proxy.rule = every_third("reset")
    with store.writer("big") as out:
        out.write(b"head")
        for start in range(0, len(data), 1 << 20):
            out.lend(data, start, min(start + (1 << 20), len(data)), owner=data)
        out.write(b"tail")
    proxy.rule = PASS
    assert store.read("big") == b"head" + data + b"tail"


def test_lent_memory_is_sent_in_larger_requests_than_copied_memory(store: RemoteStore, proxy: Proxy) -> None:
    data = memoryview(bytes(4 * PART))
    proxy.clear()
    with store.writer("lent") as out:
        out.lend(data, 0, len(data), owner=data)
    assert proxy.count == 1
    proxy.clear()
    with store.writer("copied") as out:
        out.write(data)
    assert proxy.kinds()["PUT partNumber"] == 4
