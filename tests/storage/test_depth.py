"""A put passes few of our functions before the request: docs/internals/ways.md lists them."""

from __future__ import annotations

import re
import sys
import traceback
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


@pytest.fixture
def puts(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Our functions between a caller and the request, for each put."""
    found: list[list[str]] = []
    asking: list[list[str]] = []
    call, request = store._api._call, store.fs._call_s3

    def asked(method: str, **kwargs: Any) -> Any:
        asking.append(ours(sys._getframe(1)))
        return call(method, **kwargs)

    def begun(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "put_object":
            found.append([*asking[-1], "_call", *ours(sys._getframe(1)), "patiently"])
        return request(method, *args, **kwargs)

    monkeypatch.setattr(store._api, "_call", asked)
    monkeypatch.setattr(store.fs, "_call_s3", begun)
    return found


@pytest.mark.parametrize("how", ["write", "writer", "writer of an attempt"])
def test_a_put_passes_at_most_eight_of_our_functions(store, puts, how):
    store.write("before", b"")
    store.try_conditional("before", b"")
    store = AttemptStore(store.child("attempt")) if how.endswith("attempt") else store
    puts.clear()
    if how == "write":
        store.write("whole", b"abc")
    else:
        with store.writer("streamed") as out:
            out.write(b"abc")
    if isinstance(store, AttemptStore):
        store.settle()
    (names,) = puts
    assert len(names) <= MOST, names
    if how == "write":
        page = (Path(PACKAGE).parent / "docs/internals/ways.md").read_text(encoding="utf-8")
        section = page.partition("## A put to an object store")[2].partition("\n## ")[0]
        listed = re.findall(r"^[0-9]+\. `(?:\w+\.)*_?(\w+)`", section, re.MULTILINE)
        assert [name.lstrip("_") for name in names] == listed
