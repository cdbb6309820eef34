"""A put passes few of our functions before the request: docs/internals/ways.md lists them."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ckptkit
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.private_keys import AttemptStore

PACKAGE = str(Path(ckptkit.__file__).parent)
MOST = 8


def ours(frame: FrameType | None) -> list[str]:
    """Return our functions on a stack, outermost first."""
    return [item.name for item in traceback.extract_stack(frame) if item.filename.startswith(PACKAGE)]


def hops(store: RemoteStore, put: Callable[[], None]) -> list[str]:
    """Return our functions between a caller and the request that `put` makes."""
    found: list[list[str]] = []
    inner, make = store._api._call, store.fs._call_s3

    def call(method: str, **kwargs: Any) -> Any:
        asking.append(ours(sys._getframe(1)))
        return inner(method, **kwargs)

    async def request(method: str, *args: Any, **kwargs: Any) -> Any:
        return await make(method, *args, **kwargs)

    def begun(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "put_object":
            found.append([*asking[-1], "_call", *ours(sys._getframe(1)), "patiently"])
        return request(method, *args, **kwargs)

    asking: list[list[str]] = []
    store._api._call = call
    store.fs._call_s3 = begun
    try:
        put()
    finally:
        del store._api._call
        store.fs._call_s3 = make
    assert len(found) == 1
    return found[0]


def written(store: RemoteStore) -> None:
    with store.writer("streamed") as out:
        out.write(b"abc")
    if isinstance(store, AttemptStore):
        store.settle()


@pytest.mark.parametrize("how", ["write", "writer", "writer of an attempt"])
def test_a_put_passes_at_most_eight_of_our_functions(store, how):
    store.write("before", b"")
    store.try_conditional("before", b"")
    store = AttemptStore(store.child("attempt")) if how.endswith("attempt") else store
    names = hops(store, lambda: store.write("whole", b"abc") if how == "write" else written(store))
    assert len(names) <= MOST, names
    if how == "write":
        page = (Path(PACKAGE).parent / "docs/internals/ways.md").read_text(encoding="utf-8")
        section = page.partition("## A put to an object store")[2].partition("\n## ")[0]
        assert [name.lstrip("_") for name in names] == re.findall(
            r"^[0-9]+\. `(?:\w+\.)*_?(\w+)`", section, re.MULTILINE
        )
