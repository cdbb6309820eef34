"""Runs and conversions on Google Cloud Storage: conditions, killed writers, paged listings, error answers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
import torch.distributed.tensor  # noqa: F401  once, not in each forked process

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.offline.convert import convert
from ckptkit.offline.prune import prune
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from ckptkit.storage import ledger, open_store
from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.saving import fork
from tests.offline.copying.test_resume import went_on
from tests.remote.runs import MANY, UNEVEN, Options, command, is_whole, loads, save, top_names
from tests.remote.slow import Late
from tests.remote.test_resume import killed
from tests.storage.google import Sessions
from tests.storage.proxy import PASS, Answer, Proxy, Reply, first_of_each, proxy_of

_counter = itertools.count()


@pytest.fixture
def url() -> str:
    return f"gs://google/run{next(_counter)}"


@pytest.fixture
def proxy(gcs: Options) -> Iterator[Proxy]:
    with proxy_of(gcs["endpoint_url"]) as made:
        yield made


@pytest.fixture
def options(gcs: Options, proxy: Proxy) -> Options:
    return {**gcs, "endpoint_url": proxy.url}


# --- conditions


def _ends(say: Any, call: Callable[..., object], *args: Any) -> None:
    try:
        call(*args)
        say(b"done")
    except Exception as error:
        say(type(error).__name__.encode())


def two_processes(call: Callable[..., object], *args: Any) -> list[bytes]:
    """Call a function in two processes at once; return how each ended."""
    with ThreadPoolExecutor(2) as pool:
        return sorted(said for _, said in pool.map(lambda _: fork(_ends, call, *args, timeout=120), range(2)))


def test_one_of_two_jobs_on_one_prefix_saves_and_the_other_gets_an_error(gcs: Options, url: str) -> None:
    first, second = two_processes(save, url, gcs, 1)
    assert first in (b"LeaseHeldError", b"CheckpointExistsError") and second == b"done"
    loads(url, gcs, 1)


def test_create_only_puts_send_a_condition(
    proxy: Proxy, options: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 1 << 20)
    save(url, options, 1)
    store = open_store(url, storage_options=options)
    with store.writer("large") as out:
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
    import urllib.error
    import urllib.request

    name = re.findall(r"[?&]name=([^&]+)", handler.path)[0]
    host, port = handler.target
    try:
        urllib.request.urlopen(f"http://{host}:{port}/storage/v1/b/google/o/{name.replace('/', '%2F')}").close()
    except urllib.error.HTTPError:
        return False
    return True


def test_a_large_object_written_by_another_process_is_not_replaced(
    gcs: Options, proxy: Proxy, options: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 1 << 20)
    proxy.between = _Conditions()
    store, other = open_store(url, storage_options=options), open_store(url, storage_options=gcs)
    with store.writer("free") as out:
        out.write(bytes(5 << 20))
    assert len(store.read("free")) == 5 << 20
    with pytest.raises(FileExistsError), store.writer("large") as out:
        out.write(bytes(5 << 20))
        other.write("large", b"another's")
    assert store.read("large") == b"another's"


# --- conversions


@pytest.mark.parametrize("how", [MANY, {"world_size": 3}], ids=["convert", "reshard"])
def test_a_killed_run_continues_with_finished_objects(
    gcs: Options, url: str, monkeypatch: pytest.MonkeyPatch, how: Options
) -> None:
    monkeypatch.setattr(ledger, "WORTH", 500)
    killed(UNEVEN, url, gcs, 2, **how)
    assert "2 of" in went_on(command(UNEVEN, url, gcs, how).notes)
    is_whole(UNEVEN, url, gcs, how)
    assert verify(url, storage_options=gcs).ok


def test_one_of_two_conversions_to_one_url_finishes_and_the_other_gets_an_error(gcs: Options, url: str) -> None:
    assert two_processes(command, UNEVEN, url, gcs, MANY) == [b"CheckpointExistsError", b"done"]
    assert verify(url, storage_options=gcs).ok


# --- pages and answers


def test_a_run_with_paged_listings_is_seen_completely(gcs: Options, proxy: Proxy, options: Options, url: str) -> None:
    pages: set[str] = set()

    def between(handler: Any, body: bytes) -> Reply:
        handler.path = handler.path.replace("maxResults=1000", "maxResults=3")
        pages.update(re.findall("pageToken=[^&]+", handler.path))
        return handler.forward(body)

    proxy.between = between
    for step in (1, 2, 3):
        save(url, options, step, retention=RetentionPolicy(max_num=2))
    loads(url, options, 3)
    assert pages
    prune(url, policy=RetentionPolicy(max_num=1), storage_options=options)
    assert top_names(url, gcs) == {".ckptkit", "latest", "step_00000003"}


class _Json(Answer):
    @property
    def body(self) -> bytes:
        return b'{"error": {"code": %d, "message": "on purpose"}}' % self.status


def test_each_request_may_be_throttled_once(proxy: Proxy, options: Options, url: str, at_once: None) -> None:
    proxy.rule = first_of_each(*(_Json(status, "") for status in (408, 429, 500, 503)))
    save(url, options, 1)
    save(url, options, 2, retention=RetentionPolicy(max_num=1))
    loads(url, options, 2)
    convert(f"{url}/latest", f"{url}-dcp", to="dcp", storage_options=options)
    reshard(f"{url}/latest", f"{url}-3", world_size=3, storage_options=options)
    proxy.rule = PASS
    assert verify(f"{url}-dcp", storage_options=options).ok and verify(f"{url}-3", storage_options=options).ok


def test_a_late_answer_to_any_request_is_harmless(proxy: Proxy, options: Options, url: str) -> None:
    store = RemoteStore(url, storage_options={**options, "requests_timeout": aiohttp.ClientTimeout(sock_read=0.5)})
    proxy.between = late = Late()
    store.write("record", b"mine")
    with pytest.raises(FileExistsError):
        store.write("record", b"theirs")
    assert store.read("record") == b"mine"
    store.delete(["record"])
    assert store.list() == []
    assert {"POST", "GET", "DELETE"} <= set(late.kinds)


@pytest.mark.parametrize(("status", "kind"), [(412, FileExistsError), (404, FileNotFoundError), (403, PermissionError)])
def test_permanent_errors_are_not_retried(
    proxy: Proxy, options: Options, url: str, status: int, kind: type[OSError]
) -> None:
    store = RemoteStore(url, storage_options=options)
    proxy.rule = lambda number, method, path: _Json(status, "") if method == "POST" else "pass"
    with pytest.raises(kind):
        store.write("x", b"1")
    assert sum(method == "POST" for method, _ in proxy.seen) == 1
