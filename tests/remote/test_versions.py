"""Versioned buckets, unusable tags, foreign objects: what a run sees, and what it does not touch."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.errors import CorruptCheckpointError
from ckptkit.storage import ledger
from tests.offline.test_reading import while_copying
from tests.remote.runs import ONE, TWO, Place, on
from tests.storage.proxy import Proxy, Reply

pytestmark = on("versioned")


# --- versions


def put_raw(place: Place, key: str, body: bytes = b"") -> Callable[[], object]:
    """Put an object with any key; return a call that fails if it is gone."""
    fs, (bucket, _, folder) = place.store.fs, place.url.removeprefix("s3://").partition("/")
    fs.call_s3("put_object", Bucket=bucket, Key=f"{folder}/{key}", Body=body)
    return lambda: fs.call_s3("head_object", Bucket=bucket, Key=f"{folder}/{key}")


def test_folder_markers_of_consoles_are_ignored(near):
    for folder in ("", "step_00000009/", "step_00000009/abc/", ".ckptkit/"):
        put_raw(near, folder)
    found = near.store.info("step_00000009")
    assert found is not None and found.kind == "directory"
    near.save(1)
    near.loads(1)
    assert near.steps() == [1]
    near.save(9)
    near.loads(9)


# --- objects of others


INVALID = [
    "a\\b/c", "a\x01b/c", "../a/b", "./a/b", "/step_00000002/checkpoint.json", "step_00000001/a\\b", "a//b",
    "step_00000001/0123456789abcdef//a", ".ckptkit//lease-00000009.json",
]  # fmt: skip


@pytest.mark.parametrize("key", INVALID)
def test_foreign_keys_that_are_invalid_paths_are_ignored(near, key):
    is_there = put_raw(near, key, b"{}")
    near.save(1, 2, 3, retention=ONE)
    near.prune()
    assert near.steps() == [3]
    assert not any(name.startswith(("step_00000001", "step_00000002")) for name in near.names())
    near.loads(3)
    is_there()


# --- tags


@pytest.fixture(params=["another each time", "weak", "another in each listing"])
def tags(request: pytest.FixtureRequest, proxy: Proxy) -> None:
    """Go through a gateway that returns weak tags in headers, as if it compressed, or a new tag each time."""
    turn = itertools.count()

    def changed(tag: str) -> str:
        return f'W/{tag[:-1]}-gzip"' if request.param == "weak" else f'"{next(turn):032x}-x"'

    def between(handler: Any, body: bytes) -> Reply:
        status, headers, data = handler.forward(body)
        if "listing" in request.param:
            data = re.sub(b"<ETag>.*?</ETag>", lambda _: b"<ETag>%032x</ETag>" % next(turn), data)
            return status, headers, data
        return status, [(k, changed(v) if k.lower() == "etag" else v) for k, v in headers], data

    proxy.between = between


def test_a_run_works_without_usable_tags(tags, far, near):
    far.save(1, 2, 3, retention=TWO)
    far.loads(3)
    (far / "latest").convert(far.beside("dcp"), to="dcp")
    assert near.beside("dcp").verify().ok
    assert near.steps() == [2, 3]


@pytest.mark.parametrize("tags", ["another in each listing"], indirect=True)
def test_a_source_that_changes_is_noticed_without_usable_tags(tags, far, near, monkeypatch):
    monkeypatch.setattr(ledger, "WORTH", 500)
    near.make()
    data = far.store.read("model.safetensors")
    while_copying(monkeypatch, lambda: far.store.write("model.safetensors", data + b"more", overwrite=True))
    with pytest.raises(CorruptCheckpointError, match="was changed or replaced"):
        far.convert(far.beside("again"), to="dcp")
