"""Files that are fetched before anybody knows that they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from ckptkit.errors import IncompleteCheckpointError
from ckptkit.storage.ahead import ReadAhead, fetch_ahead
from ckptkit.storage.remote import RemoteStore
from ckptkit.storage.store import ReadInto
from tests.storage import servers

_counter = count()


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, object]]:
    with servers.moto() as options:
        RemoteStore("s3://ahead", storage_options=options).fs.mkdir("ahead")
        yield dict(options)


@pytest.fixture
def store(server: dict[str, object]) -> RemoteStore:
    return RemoteStore(f"s3://ahead/{next(_counter)}", storage_options=server)


def fetched(store: RemoteStore, **files: bytes) -> ReadAhead:
    """Return a view that has these files below "x"; in the store they are gone."""
    for name, data in files.items():
        store.write(f"x/{name}", data)
    items = store.list("x")
    view = fetch_ahead(store, [items[:1], items[1:]])
    view.read_many([ReadInto(item.path, 0, memoryview(bytearray(item.size))) for item in items])  # wait for them
    store.delete([item.path for item in items])
    return view


def test_what_was_fetched_is_served_from_memory(store: RemoteStore) -> None:
    view, out = fetched(store, a=b"0123456789", b=b"abc"), bytearray(4)
    assert view.read("x/a", 2, 5) == b"234" and view.read("x/b") == b"abc" and view.read("x/b", 0, 9) == b"abc"
    child = view.child("x")
    child.read_into("a", 3, memoryview(out))
    assert out == b"3456" and child.url == f"{view.url}/x"


def test_where_nothing_was_fetched_the_store_itself_is_the_child(store: RemoteStore) -> None:
    assert isinstance(fetched(store, a=b"1").child("y"), RemoteStore)


def test_all_else_is_asked_of_the_store(store: RemoteStore) -> None:
    view = fetched(store, a=b"0123456789")
    view.write("x/c", b"other")
    assert view.child("x").read("c") == b"other" and view.info("x/a") is None
    with pytest.raises(FileNotFoundError):
        view.read("x/d")


def test_what_can_not_be_fetched_is_asked_of_the_store_again(store: RemoteStore) -> None:
    store.write("a", b"1")
    items = store.list()
    store.delete(["a"])
    view = fetch_ahead(store, [items])
    with pytest.raises(FileNotFoundError):
        view.read("a")
    store.write("a", b"2")
    assert view.read("a") == b"2"


def test_a_range_past_the_end_is_an_incomplete_file(store: RemoteStore) -> None:
    store.write("a", b"123")
    view = fetch_ahead(store, [store.list()])
    with pytest.raises(IncompleteCheckpointError, match="a"):
        view.read_into("a", 1, memoryview(bytearray(3)))


def test_small_files_that_a_listing_showed_are_fetched_at_once_and_once(store: RemoteStore) -> None:
    from ckptkit.storage.snapshot import Snapshot, snapshot
    from tests.storage.proxy import proxy_of

    names = [f"{number}.json" for number in range(20)]
    for name in names:
        store.write(name, name.encode())
    options = store.storage_options
    with proxy_of(str(options["endpoint_url"])) as proxy:
        view = snapshot(RemoteStore(store.url, storage_options={**options, "endpoint_url": proxy.url}))
        assert isinstance(view, Snapshot)
        view.fetch(names)
        assert proxy.kinds() == {"LIST": 1, "GET": 20}
        assert [view.read(name) for name in names] == [name.encode() for name in names]
        assert proxy.kinds() == {"LIST": 1, "GET": 20}
