"""A snapshot shows what the store shows, for one request; small files are fetched once for each content."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.storage import objects, open_store
from ckptkit.storage.connection import Known
from ckptkit.storage.listing import Snapshot, snapshot
from ckptkit.storage.local import LocalStore
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.private_keys import AttemptStore
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

NAMES = ["a", "a-b", "a.owner", "a/b", "a/b/c", "a/b0", "a/bb/c", "b", "b/x", "latest", "z/1", "z/2"]
_counter = itertools.count()


@pytest.fixture(scope="module")
def via() -> Iterator[tuple[Proxy, dict[str, Any]]]:
    with servers.moto() as options, proxy_of(options["endpoint_url"]) as proxy:
        given = {**options, "endpoint_url": proxy.url}
        open_store("s3://snaps", storage_options=given).fs.mkdir("snaps")
        yield proxy, given


@pytest.fixture
def store(via: tuple[Proxy, dict[str, Any]]) -> RemoteStore:
    via[0].rule = lambda number, method, path: "pass"
    return RemoteStore(f"s3://snaps/{next(_counter)}", storage_options=via[1])


def elsewhere(store: RemoteStore) -> RemoteStore:
    """The same place, over a connection of its own, as another process has it."""
    return RemoteStore(store.url, storage_options={**store.storage_options, "requester_pays": False})


@pytest.mark.parametrize("below", ["", "a"])
def test_it_lists_and_finds_what_the_store_does(store: RemoteStore, below: str) -> None:
    for name in NAMES:
        store.write(name, name.encode(), overwrite=True)
    view = snapshot(store, below)
    assert isinstance(view, Snapshot)
    for path in ["", "a", "a/b", "b", "z", "a/b/c", "nothing"]:
        for recursive in (False, True):
            seen = [(i.path, i.kind, i.size) for i in view.list(path, recursive=recursive)]
            assert seen == [(i.path, i.kind, i.size) for i in store.list(path, recursive=recursive)], path
    for path in [*NAMES, "z", "nothing", "a/nothing"]:
        mine, its = view.info(path), store.info(path)
        if path not in ("a", "a/b", "b"):  # both an object and a folder: the object is what is read
            assert (mine and mine.kind) == (its and its.kind), path
    assert all(view.read(name) == name.encode() for name in NAMES)


def test_a_file_is_fetched_once_and_not_at_all_by_its_writer(via: tuple[Proxy, Any], store: RemoteStore) -> None:
    store.write("a", b"1")
    other = elsewhere(store)
    via[0].clear()
    assert snapshot(store).read("a") == b"1" and via[0].kinds() == {"LIST": 1}
    via[0].clear()
    assert [snapshot(other).read("a") for _ in range(3)] == [b"1"] * 3
    assert via[0].kinds() == {"LIST": 3, "GET": 1}


def test_what_is_gone_since_is_not_found(store: RemoteStore) -> None:
    store.write("a", bytes(100))
    view = snapshot(elsewhere(store))
    store.delete(["a"])
    with pytest.raises(FileNotFoundError):
        view.read("a")
    with pytest.raises(FileNotFoundError):
        view.read("b")


def test_what_is_longer_since_is_read_whole(store: RemoteStore) -> None:
    store.write("a", b"short")
    view = snapshot(elsewhere(store))
    store.write("a", b"much longer than it was", overwrite=True)
    assert view.read("a") == b"much longer than it was"


def test_too_many_objects_for_a_few_pages_are_looked_at_one_folder_at_a_time(
    store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", b"1")
    monkeypatch.setattr(objects, "_PAGES", 0)
    assert snapshot(store) is store


def test_a_directory_is_looked_at_itself(tmp_path: Any) -> None:
    store = LocalStore(str(tmp_path))
    assert snapshot(store) is store


def test_contents_that_are_kept_are_bounded() -> None:
    known = Known(most_bytes=1000)
    for i in range(100):
        known.put(str(i), "tag", bytes(100))
    assert sum(known.get(str(i), "tag") is not None for i in range(100)) == 10
    known.put("99", "", b"")
    known.put("large", "tag", bytes(900))
    assert known.get("99", "tag") is None and known.get("large", "tag") is None and known.get("98", "other") is None


# --- attempts


def test_small_files_of_an_attempt_go_side_by_side_and_failures_come_with_settle(
    via: tuple[Proxy, Any], store: RemoteStore
) -> None:
    attempt = AttemptStore.of(store, "step/id")
    for i in range(20):
        attempt.write(f"f{i}", bytes([i]))
    with attempt.child("sub").writer("x") as out:
        out.write(b"1")
    attempt.settle()
    assert len(store.list("step/id", recursive=True)) == 21 and attempt.read("f7") == b"\x07"
    attempt.write("f0", b"another")  # there already: an attempt never writes one file twice
    for _ in range(2):
        with pytest.raises(FileExistsError):
            attempt.settle()
