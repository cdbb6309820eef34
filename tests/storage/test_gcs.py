"""Google's answers, and the number of requests, on a real server behind a proxy that counts and fails."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from tests.storage.google import Sessions
from tests.storage.proxy import PASS, Answer, Proxy, first_of_each, proxy_of


@pytest.fixture(scope="module")
def via(gcs: Mapping[str, Any]) -> Iterator[Proxy]:
    with proxy_of(gcs["endpoint_url"]) as proxy:
        yield proxy


@pytest.fixture
def store(gcs: Mapping[str, Any], via: Proxy, at_once: None, path: str) -> Iterator[RemoteStore]:
    yield RemoteStore(f"gs://{path}", storage_options={**gcs, "endpoint_url": via.url})
    via.rule, via.between = PASS, None


def filled(store: RemoteStore, count: int) -> list[str]:
    names = [f"d/{i} \u00fc%+#?.bin" for i in range(count)]
    store._connection.each(lambda name: store.write(name, b"x"), names)
    return names


def test_missing_objects_are_not_deleted(store: RemoteStore) -> None:
    names = filled(store, 20)
    store.write("stays", b"1")
    store.delete([*names[:10], "d", "never/was", *names[10:]])
    assert [item.path for item in store.list(recursive=True)] == ["stays"]


def test_a_tree_without_a_marker_object_is_deleted(store: RemoteStore) -> None:
    filled(store, 3)
    store.delete_tree("d")
    assert store.list(recursive=True) == []


def test_only_failed_deletions_are_repeated(store: RemoteStore, via: Proxy) -> None:
    names = filled(store, 40)
    via.clear()
    via.rule = lambda number, method, path: "503" if number <= 40 and number % 2 else "pass"
    store.delete(names)
    assert store.list() == [] and via.kinds()["DELETE"] == 60


def test_a_denied_deletion_names_the_object(store: RemoteStore, via: Proxy) -> None:
    names = filled(store, 3)
    via.rule = lambda number, method, path: Answer(403, "Forbidden") if "d%2F1%20" in path else "pass"
    with pytest.raises(PermissionError, match=r"d/1 .*was not deleted: "):
        store.delete(names)
    via.rule = PASS
    assert [item.path for item in store.list("d")] == [names[1]]  # the others were


def test_a_lookup_of_a_missing_object_makes_two_requests(store: RemoteStore, via: Proxy) -> None:
    store.write("a/b", b"1")
    via.clear()
    assert store.info("nothing") is None and via.count == 2
    found = store.info("a")
    assert found is not None and found.kind == "directory"
    found = store.info("a/b")
    assert found is not None and (found.kind, found.size) == ("file", 1)


@pytest.mark.parametrize("fate", ["503", "cut", "lost"])
def test_lookups_and_deletions_survive_every_third_request_failing(store: RemoteStore, via: Proxy, fate: str) -> None:
    names = filled(store, 7)
    via.rule = lambda number, method, path: fate if number % 3 == 0 else "pass"
    for _ in range(3):  # whichever is the third
        assert store.info("nothing") is None
        assert len(store.list(recursive=True)) == 7
        assert store.read(names[0]) == b"x"
    store.delete_tree("d")
    assert store.list(recursive=True) == []


def test_an_error_names_a_missing_bucket(gcs: Mapping[str, Any]) -> None:
    store = open_store("gs://no-such-bucket/run", storage_options=gcs)
    for look in (store.list, lambda: store.list(recursive=True), store.list_at_once):
        with pytest.raises(FileNotFoundError, match="the bucket does not exist: no-such-bucket"):
            look()


PART = 1 << 20


@pytest.fixture
def sessions(store: RemoteStore, via: Proxy, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)
    via.between = Sessions()
    return via.between


def put(store: RemoteStore, name: str) -> bytes:
    data = os.urandom(5 * PART + 777)
    with store.writer(name) as out:
        out.write(data)
    return data


@pytest.mark.parametrize("fate", ["503", "reset", "lost", "cut"])
def test_each_request_of_an_upload_may_fail_once(store: RemoteStore, via: Proxy, sessions: Sessions, fate: str) -> None:
    for turn in range(1, 8):
        via.clear()
        via.rule = lambda number, method, path, turn=turn: fate if number == turn else "pass"
        data = put(store, f"x{turn}")
        via.rule = PASS
        assert store.read(f"x{turn}") == data
    # Of each part that failed, none of the request that begins; only the last answer has a body to be cut.
    assert sessions.queries == (1 if fate == "cut" else 6)
    via.rule = lambda number, method, path: fate if number % 3 == 0 else "pass"
    assert put(store, "third") == store.read("third")


@pytest.mark.parametrize("cut", [1, 3])
def test_the_received_bytes_of_an_interrupted_part_are_not_sent_again(
    store: RemoteStore, via: Proxy, sessions: Sessions, cut: int
) -> None:
    sessions.cut = cut
    via.clear()
    data = put(store, "x")
    assert store.read("x") == data and sessions.queries == cut
    assert len(data) < via.sent <= len(data) + cut * PART


def test_an_object_with_duplicated_bytes_is_not_published(
    store: RemoteStore, via: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)
    via.clear()
    via.rule = lambda number, method, path: (
        "lost" if number == 3 else "pass"
    )  # without Sessions, whose question ends an upload
    with pytest.raises(StorageError, match="ended the upload before it was complete"):
        put(store, "x")
    assert store.list() == []


def test_an_object_published_by_a_failed_upload_is_deleted(
    store: RemoteStore, via: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)
    via.clear()
    via.rule = lambda number, method, path: "lost" if number in (3, 4) else "pass"  # the question's answer, too
    with pytest.raises(OSError):
        put(store, "x")
    assert store.list() == []


class Ended(Answer):
    @property
    def body(self) -> bytes:
        return b'{"size": "5"}'


def test_a_server_that_ends_an_upload_early_is_an_error(store: RemoteStore, via: Proxy, sessions: Sessions) -> None:
    via.clear()
    via.rule = lambda number, method, path: Ended(200, "") if method == "PUT" else "lost" if number == 3 else "pass"
    with pytest.raises(StorageError, match="ended the upload before it was complete"):
        put(store, "x")
    assert store.list() == []


@pytest.mark.parametrize("fate", ["lost", "cut"])
def test_after_a_lost_answer_to_the_last_part_the_object_is_looked_up(
    store: RemoteStore, via: Proxy, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)
    via.clear()
    via.rule = lambda number, method, path: fate if number == 7 else "pass"
    assert put(store, "x") == store.read("x")


def test_a_put_whose_answer_was_lost_is_not_a_conflict(store: RemoteStore, via: Proxy) -> None:
    via.rule = first_of_each("lost")
    store.write("record", b"mine")
    with pytest.raises(FileExistsError):
        store.write("record", b"theirs")
    with pytest.raises(FileExistsError):
        store.write("record", b"mine")  # of the same bytes: it is another's all the same
    assert store.read("record") == b"mine"
