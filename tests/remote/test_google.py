"""Runs and conversions on Google Cloud Storage: conditions, killed writers, paged listings, error answers."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
import torch.distributed.tensor  # noqa: F401  once, not in each forked process

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.attempt import RemotePlace
from ckptkit.errors import CheckpointExistsError
from ckptkit.formats.own.record import CommitRecord, find_record, record_path
from ckptkit.offline.convert import convert
from ckptkit.offline.prune import prune
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from ckptkit.storage import ledger, open_store
from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.saving import fork
from tests.offline.copying.test_resume import UNEVEN, went_on
from tests.remote.slow import Late
from tests.remote.test_resume import MANY, command, killed, objects
from tests.remote.test_turns import loads, save
from tests.storage import servers
from tests.storage.google import Sessions
from tests.storage.proxy import Answer, Proxy, Reply, proxy_of

Options = dict[str, Any]
_counter = itertools.count()


@pytest.fixture(scope="module")
def gcs() -> Iterator[Options]:
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
    with servers.fake_gcs() as options:
        open_store("gs://google", storage_options=options).fs.mkdir("google")
        yield dict(options)


@pytest.fixture
def url() -> str:
    return f"gs://google/run{next(_counter)}"


@pytest.fixture
def via(gcs: Options) -> Iterator[tuple[Proxy, Options]]:
    with proxy_of(gcs["endpoint_url"]) as proxy:
        yield proxy, {**gcs, "endpoint_url": proxy.url}


# --- conditions


def test_exactly_one_of_two_writers_commits(gcs: Options, url: str) -> None:
    roots = [open_store(url, storage_options=gcs) for _ in range(2)]
    for step in range(30):
        name, wins, both = f"step_{step:08d}", list[str](), threading.Barrier(2)

        def publish(
            place: RemotePlace, wins: list[str] = wins, step: int = step, both: threading.Barrier = both
        ) -> None:
            record = CommitRecord(
                step=step, save_id=place.save_id, data=place.save_id, state_dict_type="sharded", files={}
            )
            both.wait()
            try:
                place.publish(record.to_json(), overwrite=False)
                wins.append(place.save_id)
            except CheckpointExistsError:
                pass

        threads = [
            threading.Thread(target=publish, args=(RemotePlace(root, name, letter * 16),))
            for root, letter in zip(roots, "ab", strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record = find_record(roots[0], record_path(name))
        assert record is not None and wins == [record.save_id]


def _saves(say: Any, url: str, gcs: Options) -> None:
    try:
        save(url, gcs, 1)
        say(b"saved")
    except Exception as error:
        say(type(error).__name__.encode())


def test_one_of_two_jobs_on_one_prefix_saves_and_the_other_gets_an_error(gcs: Options, url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        said = sorted(words for _, words in pool.map(lambda _: fork(_saves, url, gcs, timeout=120), range(2)))
    assert said[1] == b"saved" and said[0] in (b"LeaseHeldError", b"CheckpointExistsError"), said
    loads(url, gcs, 1)


def test_create_only_puts_send_a_condition(
    via: tuple[Proxy, Options], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 1 << 20)
    proxy, options = via
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
            return (
                412,
                [("Content-Type", "application/json")],
                b'{"error": {"code": 412, "message": "conditionNotMet"}}',
            )
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
    gcs: Options, via: tuple[Proxy, Options], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 1 << 20)
    proxy, options = via
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


@pytest.fixture
def spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WORTH", 500)


@pytest.mark.parametrize("options", [MANY, {"world_size": 3}], ids=["convert", "reshard"])
def test_a_killed_run_continues_with_finished_objects(
    gcs: Options, url: str, spoken_of: None, options: Options
) -> None:
    source = UNEVEN / "ckpt"
    killed(source, url, gcs, 2, **options)
    report = command(str(source), url, gcs, options)
    assert "2 of" in went_on(report.notes)
    command(str(source), f"{url}-whole", gcs, options)
    assert objects(url, gcs) == objects(f"{url}-whole", gcs)
    assert verify(url, storage_options=gcs).ok


def _converts(say: Any, url: str, gcs: Options) -> None:
    try:
        command(str(UNEVEN / "ckpt"), url, gcs, MANY)
        say(b"done")
    except Exception as error:
        say(type(error).__name__.encode())


def test_one_of_two_conversions_to_one_url_finishes_and_the_other_gets_an_error(gcs: Options, url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        said = sorted(words for _, words in pool.map(lambda _: fork(_converts, url, gcs, timeout=120), range(2)))
    assert said == [b"CheckpointExistsError", b"done"]
    assert verify(url, storage_options=gcs).ok


# --- pages and answers


def test_a_run_with_paged_listings_is_seen_completely(gcs: Options, via: tuple[Proxy, Options], url: str) -> None:
    proxy, options = via
    pages: set[str] = set()

    def between(handler: Any, body: bytes) -> Reply:
        handler.path = handler.path.replace("maxResults=1000", "maxResults=3")
        pages.update(re.findall("pageToken=[^&]+", handler.path))
        return handler.forward(body)  # type: ignore[no-any-return]

    proxy.between = between
    for step in (1, 2, 3):
        save(url, options, step, retention=RetentionPolicy(max_num=2))
    loads(url, options, 3)
    assert pages
    prune(url, policy=RetentionPolicy(max_num=1), storage_options=options)
    left = {item.path.split("/")[0] for item in open_store(url, storage_options=gcs).list(recursive=True)}
    assert left == {".ckptkit", "latest", "step_00000003"}


class _Json(Answer):
    @property
    def body(self) -> bytes:
        return b'{"error": {"code": %d, "message": "on purpose"}}' % self.status


def test_each_request_may_be_throttled_once(via: tuple[Proxy, Options], url: str, at_once: None) -> None:
    proxy, options = via
    seen: set[tuple[str, str]] = set()

    def rule(number: int, method: str, path: str) -> str | Answer:
        if (method, path) in seen:
            return "pass"
        seen.add((method, path))
        return _Json((408, 429, 500, 503)[len(seen) % 4], "")

    proxy.rule = rule
    save(url, options, 1)
    save(url, options, 2, retention=RetentionPolicy(max_num=1))
    loads(url, options, 2)
    convert(f"{url}/latest", f"{url}-dcp", to="dcp", storage_options=options)
    reshard(f"{url}/latest", f"{url}-3", world_size=3, storage_options=options)
    proxy.rule = lambda number, method, path: "pass"
    assert verify(f"{url}-dcp", storage_options=options).ok and verify(f"{url}-3", storage_options=options).ok


def test_a_late_answer_to_any_request_is_harmless(via: tuple[Proxy, Options], url: str) -> None:
    proxy, options = via
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
    via: tuple[Proxy, Options], url: str, status: int, kind: type[OSError]
) -> None:
    proxy, options = via
    store = RemoteStore(url, storage_options=options)
    proxy.rule = lambda number, method, path: _Json(status, "") if method == "POST" else "pass"
    with pytest.raises(kind):
        store.write("x", b"1")
    assert sum(method == "POST" for method, _ in proxy.seen) == 1
