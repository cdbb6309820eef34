"""A put passes few of our functions before the request: docs/internals/ways.md lists them."""

import re
import sys
import traceback
from pathlib import Path
from types import FrameType

import ckptkit
from tests.patches import before

PACKAGE = str(Path(ckptkit.__file__).parent)


def ours(frame: FrameType | None) -> list[str]:
    """Return our functions on a stack, outermost first."""
    return [item.name for item in traceback.extract_stack(frame) if item.filename.startswith(PACKAGE)]


def test_a_put_calls_the_functions_that_the_page_lists(store, monkeypatch):
    asking: list[list[str]] = []
    begun: list[list[str]] = []

    store.write("before", b"")
    store.try_conditional("before", b"")
    before(monkeypatch, store._api, "_call", lambda *_, **__: asking.append(ours(sys._getframe(2))))
    # The second is called in the thread of the event loop.
    before(monkeypatch, store.fs, "_call_s3", lambda *_, **__: begun.append(ours(sys._getframe(2))))
    store.write("x", b"abc")
    page = (Path(PACKAGE).parent / "docs/internals/ways.md").read_text(encoding="utf-8")
    section = page.partition("## A put to an object store")[2].partition("\n## ")[0]
    listed = re.findall(r"^[0-9]+\. `(?:\w+\.)*_?(\w+)`", section, re.MULTILINE)
    (outer,), (inner,) = asking, begun
    assert [name.lstrip("_") for name in [*outer, "_call", *inner, "patiently"]] == listed
    assert len(listed) <= 8
