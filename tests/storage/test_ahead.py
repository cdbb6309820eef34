"""Files that are fetched before anybody knows that they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import IncompleteCheckpointError
from ckptkit.storage import open_store
from ckptkit.storage.ahead import ReadAhead, fetch_ahead
from ckptkit.storage.store import ReadInto


def fetched(folder: Path, **files: bytes) -> ReadAhead:
    """Return a view that has these files below "x"; on disk they are gone."""
    store = open_store(str(folder))
    for name, data in files.items():
        store.write(f"x/{name}", data)
    items = store.list("x")
    view = fetch_ahead(store, [items[:1], items[1:]])
    view.read_many([ReadInto(item.path, 0, memoryview(bytearray(item.size))) for item in items])  # wait for them
    store.delete([item.path for item in items])
    return view


def test_what_was_fetched_is_served_from_memory(tmp_path: Path) -> None:
    view, out = fetched(tmp_path, a=b"0123456789", b=b"abc"), bytearray(4)
    assert view.read("x/a", 2, 5) == b"234" and view.read("x/b") == b"abc" and view.read("x/b", 0, 9) == b"abc"
    view.child("x").read_into("a", 3, memoryview(out))
    assert out == b"3456" and view.child("x").url == f"{view.url}/x"


def test_all_else_is_asked_of_the_store(tmp_path: Path) -> None:
    view = fetched(tmp_path, a=b"0123456789")
    view.write("x/c", b"other")
    assert view.child("x").read("c") == b"other" and view.info("x/a") is None
    with pytest.raises(FileNotFoundError):
        view.read("x/d")


def test_what_can_not_be_fetched_is_the_reader_s_error_alone(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("a", b"1")
    items = store.list()
    store.delete(["a"])
    view = fetch_ahead(store, [items])
    with pytest.raises(FileNotFoundError):
        view.read("a")


def test_a_range_past_the_end_is_an_incomplete_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("a", b"123")
    view = fetch_ahead(store, [store.list()])
    with pytest.raises(IncompleteCheckpointError, match="a"):
        view.read_into("a", 1, memoryview(bytearray(3)))
