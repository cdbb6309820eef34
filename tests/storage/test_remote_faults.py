"""A store behind a failing network: identical bytes in the end, or one clear error and nothing half-published."""

import errno
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.store import ReadInto
from tests.storage import servers
from tests.storage.proxy import PASS, Answer, always, every_third, first, nth, only, proxy_of

pytestmark = pytest.mark.usefixtures("small_parts")
PART = 5 << 20


@pytest.mark.parametrize("fate", ["503", "reset", "lost", "cut", "slow"])
def test_bytes_are_identical_when_every_third_request_fails(store, proxy, s3, fate):
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
    assert [item.path for item in RemoteStore(store.url, storage_options=s3).list(recursive=True)] == ["small"]
    assert store.unfinished_uploads() == []


def test_any_request_of_an_upload_may_fail(store, proxy):
    data = os.urandom(2 * PART + 100)
    for turn in range(1, 6):
        proxy.clear()
        proxy.rule = nth("lost", turn)
        with store.writer(f"x{turn}") as out:
            out.write(data)
        proxy.rule = PASS
        assert store.read(f"x{turn}") == data


def test_a_server_that_keeps_failing_is_one_error_in_bounded_time(store, proxy, impatient):
    proxy.clear()
    proxy.rule = always("503")
    with pytest.raises(StorageError, match="CKPTKIT_STORAGE_TIMEOUT"):
        store.read("x")
    assert 2 <= proxy.count <= 4  # the retries of s3fs and botocore do not multiply ours


_counter = itertools.count(50 << 20)
REFUSALS: list[tuple[Answer, type[OSError], str]] = [
    (Answer(301, "PermanentRedirect"), OSError, "AWS_DEFAULT_REGION="),  # botocore follows redirects in a loop
    (Answer(301, "PermanentRedirect", (("x-amz-bucket-region", "eu-west-1"),)), OSError, "REGION=eu-west-1"),
    (Answer(400, "AuthorizationHeaderMalformed"), StorageError, "another region"),
    (Answer(400, "ExpiredToken"), PermissionError, "token has expired"),
    (Answer(400, "KMS.DisabledException"), OSError, r"KMS\.DisabledException.*key that encrypts"),
    (Answer(403, text=b""), PermissionError, r"Forbidden \(HTTP 403\).*{} is not allowed here"),
    (Answer(403, "AccessDenied"), PermissionError, "{} is not allowed here"),
    (Answer(403, "RequestTimeTooSkewed"), PermissionError, "clock of this machine"),
    (Answer(403, "InvalidAccessKeyId"), PermissionError, "that the store accepts with AWS_ACCESS_KEY_ID"),
    (Answer(403, "SignatureDoesNotMatch"), PermissionError, "that the store accepts with AWS_ACCESS_KEY_ID"),
    (Answer(403, "QuotaExceeded"), OSError, "QuotaExceeded.*a quota is used up"),
    (Answer(404, "NoSuchBucket"), FileNotFoundError, "NoSuchBucket"),
    (Answer(405, "MethodNotAllowed"), OSError, r"\(HTTP 405\).*is the endpoint the right one"),
    (Answer(507, text=b""), StorageError, r"\(HTTP 507\).*a quota is used up"),
    (Answer(507, "InsufficientStorage"), StorageError, "a quota is used up"),
]


# botocore drops the connections of a redirect that it follows in circles
@pytest.mark.filterwarnings("ignore:Exception ignored in.*Connection.__del__:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("answer", "error", "said"), REFUSALS, ids=[f"{i}-{r[0].code}" for i, r in enumerate(REFUSALS)]
)
def test_an_error_that_a_retry_cannot_fix_is_raised_at_once_and_says_what_to_do(
    options, url, proxy, answer, error, said
):
    # After a redirect, a connection of its own, because clients remember the new address.
    new = {"default_block_size": next(_counter)} if answer.status in (301, 400) else {}
    store = RemoteStore(url, storage_options={**options, **new})
    proxy.clear()
    proxy.rule = always(answer)
    calls = {
        ("ListObjectsV2", url): store.list,
        ("GetObject", f"{url}/x"): lambda: store.read("x"),
        ("PutObject", f"{url}/y"): lambda: store._put("y", store._full("y"), b"1"),
    }
    for (operation, place), call in calls.items():
        with pytest.raises(error, match=said.format(operation)) as caught:
            call()
        text = str(caught.value)
        assert place in text and not any(word in text for word in ("None", "recursion", options["secret"]))
        assert caught.value.errno not in (None, errno.EIO) or error is OSError or answer.status == 507
    assert proxy.count == len(calls) or answer.status == 301
    del caught
    gc.collect()


def is_end(method: str, path: str) -> bool:
    """Return whether a request completes an upload."""
    return method == "POST" and "uploadId" in path


def test_an_error_in_a_200_answer_to_complete_is_tried_again(store, proxy):
    data = os.urandom(3 * PART)
    proxy.rule = first(Answer(200, "InternalError"), is_end)  # S3 sends its 200 before it knows
    with store.writer("big") as out:
        out.write(data)
    assert store.read("big") == data


@pytest.mark.parametrize(("answer", "is_it", "said"), [
    (Answer(200, "InternalError"), is_end, None),
    (Answer(400, "InvalidPart"), is_end, "InvalidPart.* try again"),
    (Answer(404, "NoSuchUpload"), lambda method, path: "partNumber=2" in path, "NoSuchUpload.* try again"),
], ids=["always an error", "a lost part", "a lost upload"])  # fmt: skip
def test_an_upload_that_fails_is_an_error_and_leaves_nothing(store, proxy, impatient, answer, is_it, said):
    proxy.rule = only(answer, is_it)
    with pytest.raises(OSError, match=said), store.writer("big") as out:
        out.write(bytes(3 * PART))
    proxy.rule = PASS
    assert store.list() == [] and store.unfinished_uploads() == []


def test_unfinished_uploads_are_found_and_aborted(store):
    full = store._full("step_1/big")
    store._api.upload(full)
    assert [upload.name for upload in store.unfinished_uploads()] == [full]
    assert store.unfinished_uploads(older_than_s=100 * 365 * 86400) == []  # moto's clock is of 2010
    assert store.unfinished_uploads("step_2") == []
    store.delete_tree("step_1")
    assert store.unfinished_uploads() == []


def test_a_writer_does_not_replace_a_large_object(store):
    for content, error in ((b"a", nullcontext()), (b"b", pytest.raises(FileExistsError))):
        with error, store.writer("big") as out:
            out.write(content * (2 * PART + 5))
    assert store.read("big", 0, 1) == b"a"
    assert store.unfinished_uploads() == []


def test_parts_are_sent_in_the_background_in_bounded_number(store, proxy):
    now, counts = set[int](), list[int]()

    def rule(number: int, method: str, path: str) -> str:
        if "partNumber" in path:
            now.add(number)
            counts.append(len(now))
            time.sleep(0.2)
            now.remove(number)
        return "pass"

    proxy.rule = rule
    with store.writer("big") as out:
        for _ in range(12):
            out.write(bytes(PART))
    assert 2 <= max(counts) <= 8


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
def test_a_store_does_not_cross_a_fork_and_a_fork_leaves_its_connections_alone(protocol, s3, gcs):
    server = s3 if protocol == "s3" else gcs
    with proxy_of(server["endpoint_url"]) as proxy:
        options = json.dumps({**server, "endpoint_url": proxy.url})
        command = [sys.executable, "-c", _FORKS, f"{protocol}://bucket/faults-forks", options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert (done.stdout, done.stderr) == ("whole\n", "")
        assert proxy.kinds()["GET"] == 5  # three reads of the parent and two of its children: none was repeated


@pytest.mark.parametrize("how", ["answers nothing", "reads nothing"])
def test_a_silent_server_ends_in_an_error(impatient, how):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint_url": url, "key": "k", "secret": "hush-hush", "config_kwargs": {"read_timeout": 0.5}}
        store = RemoteStore("s3://bucket/faults-x", storage_options=options)
        with pytest.raises(StorageError, match=None if how == "answers nothing" else "made no progress") as caught:
            store.read("y") if how == "answers nothing" else store._put("y", "bucket/y", bytes(32 << 20))
    assert "hush" not in str(caught.value)


def test_missing_conditional_writes_are_detected_and_warned_about_once(tmp_path, caplog):
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


def test_an_outage_during_detection_does_not_mean_missing_conditional_writes(store, proxy, impatient):
    store._connection.conditional.clear()
    store.with_free_names().write("lease", b"1")
    proxy.rule = only("503", lambda method, path: method == "PUT")
    store.try_conditional("lease", b"1")
    assert store.has_conditional_writes is None
    proxy.rule = PASS
    store.try_conditional("lease", b"1")
    assert store.has_conditional_writes is True


@pytest.mark.parametrize("when", ["before it begins", "while it runs"])
def test_an_interrupted_read_releases_the_callers_memory(store, proxy, monkeypatch, when):
    store.write("x", b"1" * 1000)
    asked, go, free, wait = threading.Event(), threading.Event(), threading.Event(), threading.Event.wait
    interrupted: list[bool] = []

    def rule(number: int, method: str, path: str) -> str:
        asked.set()
        return "pass" if wait(go, 60) else "reset"

    def interrupted_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout == 1 and not interrupted:  # waits of one second, so that signals are handled
            interrupted.append(when == "before it begins" or wait(asked, 60))
            raise KeyboardInterrupt
        if interrupted:
            free.set()
        return wait(event, timeout)

    if when == "before it begins":
        store.fs.loop.call_soon_threadsafe(wait, free)  # the loop is busy

    proxy.rule = rule
    view = bytearray(1000)
    monkeypatch.setattr(threading.Event, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        store.read_into("x", 0, memoryview(view))
    monkeypatch.undo()
    assert asked.is_set() == (when == "while it runs")
    go.set()
    for _ in range(30):  # what would still come has time to
        assert store.read("x") == b"1" * 1000 and view == bytes(1000)
