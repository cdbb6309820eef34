"""Versioned buckets, unusable tags, foreign objects: what a run sees, and what it does not touch."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.errors import CheckpointExistsError, CorruptCheckpointError
from ckptkit.storage import ledger
from tests.offline.test_reading import while_copying
from tests.remote.runs import ONE, TWO, Place, on
from tests.storage.proxy import Proxy, Reply

pytestmark = on("versioned")


# --- versions


def test_a_run_in_a_versioned_bucket_sees_only_current_objects(near):
    near.save(1, 2, 3, retention=TWO)
    near.loads(3)
    assert near.steps() == [2, 3]
    assert not any("step_00000001" in name for name in near.names())
    bucket, _, key = near.url.removeprefix("s3://").partition("/")
    page = near.store.fs.call_s3("list_object_versions", Bucket=bucket, Prefix=f"{key}/")
    assert any("step_00000001" in marker["Key"] for marker in page["DeleteMarkers"])  # it had been there
    near.prune()
    assert near.top() == {".ckptkit", "latest", "step_00000003"}
    near.loads(3)


def test_a_deleted_name_is_free_and_an_existing_one_is_not(near):
    near.save(1, 2)
    near.prune()
    near.save(1)  # its keys have markers
    with pytest.raises(CheckpointExistsError):
        near.save(2)
    assert set(near.steps()) == {1, 2}
    assert (near / "step_00000001").verify().ok


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


@pytest.fixture(params=["another each time", "weak"])
def tags(request: pytest.FixtureRequest, proxy: Proxy) -> None:
    """Through a gateway that changes tags in headers but not in listings, as one that compresses may."""
    turn = itertools.count()

    def changed(tag: str) -> str:
        return f'W/{tag[:-1]}-gzip"' if request.param == "weak" else f'"{next(turn):032x}-x"'

    def between(handler: Any, body: bytes) -> Reply:
        status, headers, data = handler.forward(body)
        return status, [(k, changed(v) if k.lower() == "etag" else v) for k, v in headers], data

    proxy.between = between


def test_a_run_works_without_usable_tags(tags, far, near):
    far.save(1, 2, 3, retention=TWO)
    far.loads(3)
    (far / "latest").convert(far.beside("dcp"), to="dcp")
    assert near.beside("dcp").verify().ok
    assert near.steps() == [2, 3]


# --- a source that changes


def test_a_gateway_with_random_tags_in_listings_is_tolerated(proxy, far, near, monkeypatch):
    monkeypatch.setattr(ledger, "WORTH", 500)
    near.make()
    turn = itertools.count()

    def between(handler: Any, body: bytes) -> Reply:
        status, headers, data = handler.forward(body)
        return status, headers, re.sub(b"<ETag>.*?</ETag>", lambda _: b"<ETag>%032x</ETag>" % next(turn), data)

    proxy.between = between
    far.convert(far.beside("dcp"), to="dcp")
    data = far.store.read("model.safetensors")
    while_copying(monkeypatch, lambda: far.store.write("model.safetensors", data + b"more", overwrite=True))
    with pytest.raises(CorruptCheckpointError, match="was changed or replaced"):
        far.convert(far.beside("again"), to="dcp")
