"""Runs and conversions on Google Cloud Storage: conditions, killed writers, paged listings, error answers."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
import torch.distributed.tensor  # noqa: F401  once, not in each forked process

from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.saving import fork
from tests.remote.runs import MANY, TWO, on
from tests.storage.google import Sessions
from tests.storage.proxy import Answer, Late, Reply, only

pytestmark = on("gcs")


@pytest.fixture
def parts_of_a_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 1 << 20)


# --- conditions


def _ends(say: Any, call: Callable[[], object]) -> None:
    try:
        call()
        say(b"done")
    except Exception as error:
        say(type(error).__name__.encode())


def two_processes(call: Callable[[], object]) -> list[bytes]:
    """Call a function in two processes at once; return how each ended."""
    with ThreadPoolExecutor(2) as pool:
        return sorted(said for _, said in pool.map(lambda _: fork(_ends, call, timeout=120), range(2)))


def test_one_of_two_jobs_on_one_prefix_saves_and_the_other_gets_an_error(near):
    first, second = two_processes(lambda: near.save(1))
    assert first in (b"LeaseHeldError", b"CheckpointExistsError") and second == b"done"
    near.loads(1)


def test_one_of_two_conversions_to_one_url_finishes_and_the_other_gets_an_error(near):
    assert two_processes(lambda: near.make(**MANY)) == [b"CheckpointExistsError", b"done"]
    assert near.verify().ok


def test_create_only_puts_send_a_condition(proxy, far, parts_of_a_mib):
    far.save(1)
    with far.store.writer("large") as out:
        out.write(bytes(3 << 20))
    posts = [path for method, path in proxy.seen if method == "POST" and "/upload/storage/" in path]
    begun = [path for path in posts if "upload_id" not in path]
    bare = [path for path in begun if "ifGenerationMatch=0" not in path]
    assert any("uploadType=resumable" in path for path in begun)
    assert len(begun) - len(bare) >= 4  # lease, record, files, the large one
    # What may be replaced: `latest`, and the lease when the attempt has ended and when it is given back.
    assert len(bare) <= 3, bare


class _Conditions(Sessions):
    """Also checks the condition of an upload session when it ends, as Google does."""

    def __call__(self, handler: Any, body: bytes) -> Reply | None:
        if "uploadType=resumable" in handler.path and "ifGenerationMatch=0" in handler.path:
            self.taken = lambda: _has(handler)
        total = (handler.headers.get("Content-Range") or "*").rpartition("/")[2]
        if "upload_id" in handler.path and total != "*" and self.taken():
            return 412, [("Content-Type", "application/json")], b'{"error": {"code": 412, "message": "not met"}}'
        return super().__call__(handler, body)


def _has(handler: Any) -> bool:
    name = re.findall(r"[?&]name=([^&]+)", handler.path)[0].replace("/", "%2F")
    host, port = handler.target
    try:
        urllib.request.urlopen(f"http://{host}:{port}/storage/v1/b/bucket/o/{name}").close()
    except urllib.error.HTTPError:
        return False
    return True


def test_a_large_object_written_by_another_process_is_not_replaced(near, proxy, far, parts_of_a_mib):
    proxy.between = _Conditions()
    store = far.store
    with store.writer("free") as out:
        out.write(bytes(5 << 20))
    assert len(store.read("free")) == 5 << 20
    with pytest.raises(FileExistsError), store.writer("large") as out:
        out.write(bytes(5 << 20))
        near.store.write("large", b"another's")
    assert store.read("large") == b"another's"


# --- pages and answers


def test_a_run_with_paged_listings_is_seen_completely(near, proxy, far):
    pages: set[str] = set()

    def between(handler: Any, body: bytes) -> Reply:
        handler.path = handler.path.replace("maxResults=1000", "maxResults=3")
        pages.update(re.findall("pageToken=[^&]+", handler.path))
        return handler.forward(body)

    proxy.between = between
    far.save(1, 2, 3, retention=TWO)
    far.loads(3)
    assert pages
    far.prune()
    assert near.top() == {".ckptkit", "latest", "step_00000003"}


def test_a_late_answer_to_any_request_is_harmless(proxy, far):
    timeout = aiohttp.ClientTimeout(sock_read=0.5)
    store = RemoteStore(far.url, storage_options={**far.options, "requests_timeout": timeout})
    proxy.between = late = Late()
    store.write("record", b"mine")
    with pytest.raises(FileExistsError):
        store.write("record", b"theirs")
    assert store.read("record") == b"mine"
    store.delete(["record"])
    assert store.list() == []
    assert {"POST", "GET", "DELETE"} <= set(late.kinds)


@pytest.mark.parametrize(("status", "kind"), [(412, FileExistsError), (404, FileNotFoundError), (403, PermissionError)])
def test_permanent_errors_are_not_retried(proxy, far, status, kind):
    proxy.rule = only(Answer(status, text=b'{"error": {"code": %d}}' % status), lambda method, path: method == "POST")
    with pytest.raises(kind):
        far.store.write("x", b"1")
    assert sum(method == "POST" for method, _ in proxy.seen) == 1
