"""What Google means by its answers, and few requests: on a real server, behind a proxy that counts and fails."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import stamina

from ckptkit.storage import open_store
from ckptkit.storage.gcs_batch import batch_answers
from ckptkit.storage.remote import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Answer, Changed, Proxy, proxy_of

_counter = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Mapping[str, Any]]:
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
    with servers.fake_gcs() as options:
        open_store("gs://bucket", storage_options=options).fs.mkdir("bucket")
        yield options


@pytest.fixture(scope="module")
def via(server: Mapping[str, Any]) -> Iterator[Proxy]:
    with proxy_of(server["endpoint_url"]) as proxy:
        yield proxy


@pytest.fixture
def store(server: Mapping[str, Any], via: Proxy) -> Iterator[RemoteStore]:
    stamina.set_testing(True, attempts=8)  # without waits
    yield RemoteStore(f"gs://bucket/run{next(_counter)}", storage_options={**server, "endpoint_url": via.url})
    via.rule = lambda number, method, path: "pass"
    stamina.set_testing(False)


def filled(store: RemoteStore, count: int) -> list[str]:
    names = [f"d/{i} \u00fc%+#?.bin" for i in range(count)]
    store._connection.each(lambda name: store.write(name, b"x"), names)
    return names


def test_deletions_go_in_batches_and_what_is_gone_already_is_no_failure(store: RemoteStore, via: Proxy) -> None:
    names = filled(store, 120)
    store.write("stays", b"1")
    via.clear()
    store.delete([*names[:60], "d", "never/was", *names[60:]])
    assert via.count == 2
    assert [item.path for item in store.list(recursive=True)] == ["stays"]


def test_a_tree_goes_though_no_object_has_its_name(store: RemoteStore) -> None:
    filled(store, 3)
    store.delete_tree("d")
    assert store.list(recursive=True) == []


def test_a_deletion_of_a_batch_that_fails_is_tried_again(store: RemoteStore, via: Proxy) -> None:
    names = filled(store, 3)
    failed: list[str] = []

    def rule(number: int, method: str, path: str) -> str | Changed:
        if "/batch/" not in path or failed:
            return "pass"
        failed.append(path)
        return Changed(lambda data: data.replace(b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Backend Error", 1))

    via.rule = rule
    store.delete(names)
    assert failed and store.list() == []


def test_a_deletion_of_a_batch_that_is_denied_is_an_error_that_names_the_object(store: RemoteStore, via: Proxy) -> None:
    names = filled(store, 3)
    via.rule = lambda number, method, path: (
        Changed(lambda data: data.replace(b"HTTP/1.1 200 OK", b"HTTP/1.1 403 Forbidden", 1))
        if "/batch/" in path
        else "pass"
    )
    with pytest.raises(PermissionError, match=r"d/0 .*was not deleted: 403"):
        store.delete(names)


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_batches_is_asked_one_by_one(store: RemoteStore, via: Proxy, status: int) -> None:
    names = filled(store, 3)
    via.rule = lambda number, method, path: Answer(status, "NoBatches") if "/batch/" in path else "pass"
    store.delete(names)
    assert store.list(recursive=True) == []


def test_an_answer_as_google_words_it_is_understood() -> None:
    said = (
        b"--batch_x\r\nContent-Type: application/http\r\nContent-ID: <response-ckptkit+1>\r\n\r\n"
        b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\n\r\n{}\r\n"
        b"--batch_x\r\nContent-Type: application/http\r\nContent-ID: <response-ckptkit+0>\r\n\r\n"
        b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n\r\n--batch_x--\r\n"
    )
    assert batch_answers("multipart/mixed; boundary=batch_x", said) == {0: (204, ""), 1: (404, "{}")}
    assert batch_answers("text/html", b"<html>") == {}


def test_what_is_not_there_is_looked_for_by_two_requests(store: RemoteStore, via: Proxy) -> None:
    store.write("a/b", b"1")
    via.clear()
    assert store.info("nothing") is None and via.count == 2
    found = store.info("a")
    assert found is not None and found.kind == "directory"
    found = store.info("a/b")
    assert found is not None and (found.kind, found.size) == ("file", 1)


@pytest.mark.parametrize("fate", ["503", "cut", "lost"])
def test_each_third_request_may_fail_for_ever(store: RemoteStore, via: Proxy, fate: str) -> None:
    names = filled(store, 7)
    via.rule = lambda number, method, path: fate if number % 3 == 0 else "pass"
    for _ in range(3):  # whichever is the third
        assert store.info("nothing") is None
        assert len(store.list(recursive=True)) == 7
        assert store.read(names[0]) == b"x"
    store.delete_tree("d")
    assert store.list(recursive=True) == []


def test_a_bucket_that_is_not_there_is_said(server: Mapping[str, Any]) -> None:
    store = open_store("gs://no-such-bucket/run", storage_options=server)
    for look in (store.list, lambda: store.list(recursive=True), store.list_at_once):  # type: ignore[attr-defined]
        with pytest.raises(FileNotFoundError, match="the bucket does not exist: no-such-bucket"):
            look()
