"""A snapshot shows what the store shows, for one request; small files are downloaded once per content."""

import pytest

from ckptkit.storage import objects
from ckptkit.storage.connection import Known
from ckptkit.storage.listing import Snapshot, snapshot
from ckptkit.storage.local import LocalStore
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.private_keys import AttemptStore

NAMES = ["a", "a-b", "a.owner", "a/b", "a/b/c", "a/b0", "a/bb/c", "b", "b/x", "latest", "z/1", "z/2"]


def elsewhere(store: RemoteStore) -> RemoteStore:
    """Return the same store over another connection, as in another process."""
    return RemoteStore(store.url, storage_options={**store.storage_options, "requester_pays": False})


@pytest.mark.parametrize("below", ["", "a"])
def test_a_snapshot_lists_and_finds_the_same_files_as_the_store(store, below):
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


def test_a_file_is_downloaded_once_and_never_by_its_writer(proxy, store):
    store.write("a", b"1")
    other = elsewhere(store)
    proxy.clear()
    assert snapshot(store).read("a") == b"1" and proxy.kinds() == {"LIST": 1}
    proxy.clear()
    assert [snapshot(other).read("a") for _ in range(3)] == [b"1"] * 3
    assert proxy.kinds() == {"LIST": 3, "GET": 1}


def test_a_file_deleted_since_the_listing_is_not_found(store):
    store.write("a", bytes(100))
    view = snapshot(elsewhere(store))
    store.delete(["a"])
    for path in ("a", "b"):
        with pytest.raises(FileNotFoundError):
            view.read(path)


@pytest.mark.parametrize("fetched", [False, True])
def test_a_file_that_grew_since_the_listing_is_read_completely(store, fetched):
    store.write("a", b"short")
    view = snapshot(elsewhere(store))
    store.write("a", b"much longer than it was", overwrite=True)
    view.fetch(["a"] if fetched else [])
    assert view.read("a") == b"much longer than it was"


def test_the_snapshot_of_a_directory_or_of_many_pages_is_the_store_itself(store, tmp_path, monkeypatch):
    store.write("a", b"1")
    monkeypatch.setattr(objects, "_PAGES", 0)
    for place in (store, LocalStore(str(tmp_path))):
        assert snapshot(place) is place


def test_the_cache_of_contents_is_bounded():
    known = Known(most_bytes=1000)
    for i in range(100):
        known.put(str(i), "tag", bytes(100))
    assert sum(known.get(str(i), "tag") is not None for i in range(100)) == 10
    known.put("99", "", b"")
    known.put("large", "tag", bytes(900))
    assert known.get("99", "tag") is None and known.get("large", "tag") is None and known.get("98", "other") is None


# --- attempts


def test_small_files_of_an_attempt_are_sent_in_parallel_and_settle_raises_failures(store):
    attempt = AttemptStore(store.child("step/id"))
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
