"""Versioned buckets, unusable tags, foreign objects: what a run sees, and what it does not touch."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import CheckpointExistsError, CkptkitError, CorruptCheckpointError
from ckptkit.offline.convert import convert
from ckptkit.offline.prune import prune
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from ckptkit.storage import ledger, open_store
from tests.offline.copying.test_resume import went_on
from tests.offline.test_reading import while_copying
from tests.remote.runs import (
    MANY,
    UNEVEN,
    Options,
    command,
    is_whole,
    loads,
    names,
    objects,
    save,
    state_of,
    steps,
    top_names,
)
from tests.remote.test_resume import killed
from tests.storage.proxy import Proxy, Reply

_counter = itertools.count()


@pytest.fixture
def url(versioned: str) -> str:
    return f"s3://{versioned}/run{next(_counter)}"


def kept(root: Any) -> list[tuple[str, bool]]:
    """Return each version below, and whether it is a delete marker."""
    bucket, _, key = root._full("", root_allowed=True).partition("/")
    page = root.fs.call_s3("list_object_versions", Bucket=bucket, Prefix=f"{key}/")
    markers = [(item["Key"], True) for item in page.get("DeleteMarkers", ())]
    return markers + [(item["Key"], False) for item in page.get("Versions", ())]


# --- versions


def test_a_run_in_a_versioned_bucket_sees_only_current_objects(s3: Options, url: str) -> None:
    root = open_store(url, storage_options=s3)
    for step in (1, 2, 3):
        save(url, s3, step, retention=RetentionPolicy(max_num=2))
    loads(url, s3, 3)
    assert steps(url, s3) == [2, 3]
    assert not any("step_00000001" in name for name in names(url, s3))
    assert any(marker and "step_00000001" in name for name, marker in kept(root))  # it had been there
    prune(url, policy=RetentionPolicy(max_num=1), storage_options=s3)
    assert top_names(url, s3) == {".ckptkit", "latest", "step_00000003"}
    loads(url, s3, 3)


def test_a_deleted_name_is_free_and_an_existing_one_is_not(s3: Options, url: str) -> None:
    save(url, s3, 1)
    save(url, s3, 2)
    prune(url, policy=RetentionPolicy(max_num=1), storage_options=s3)
    save(url, s3, 1)  # its keys have markers
    with pytest.raises(CheckpointExistsError):
        save(url, s3, 2)
    assert set(steps(url, s3)) == {1, 2}
    assert verify(f"{url}/step_00000001", storage_options=s3).ok


def test_a_versioned_bucket_returns_the_newer_of_an_overwritten_checkpoint(s3: Options, url: str) -> None:
    save(url, s3, 1)
    with CheckpointManager(url, storage_options=s3) as manager:
        manager.save(1, state_of(1), overwrite=True)
    loads(url, s3, 1)
    root = open_store(url, storage_options=s3)
    (only,) = list_checkpoints(root).committed
    assert {name.split("/")[1] for name in names(url, s3) if name.startswith("step_") and name.count("/") > 1} == {
        only.record.data
    }


def test_conversions_and_their_second_runs_work_in_a_versioned_bucket(
    s3: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "WORTH", 500)
    killed(UNEVEN, url, s3, 2, **MANY)
    assert "2 of" in went_on(command(UNEVEN, url, s3, MANY).notes)
    is_whole(UNEVEN, url, s3)
    command(UNEVEN, f"{url}-3", s3, {"world_size": 3})
    reshard(f"{url}-3", f"{url}-2", world_size=2, storage_options=s3)
    convert(f"{url}-3", f"{url}-2", to="dcp", storage_options=s3, overwrite=True)
    assert verify(f"{url}-2", storage_options=s3).ok


def test_folder_markers_of_consoles_are_ignored(s3: Options, url: str) -> None:
    root = open_store(url, storage_options=s3)
    bucket, _, key = root._full("", root_allowed=True).partition("/")
    for folder in ("", "step_00000009/", "step_00000009/abc/", ".ckptkit/"):
        root.fs.call_s3("put_object", Bucket=bucket, Key=f"{key}/{folder}", Body=b"")
    found = root.info("step_00000009")
    assert found is not None and found.kind == "directory"
    save(url, s3, 1)
    loads(url, s3, 1)
    assert steps(url, s3) == [1]
    save(url, s3, 9)
    loads(url, s3, 9)


# --- objects of others


def test_no_command_touches_foreign_objects(s3: Options, url: str) -> None:
    root = open_store(url, storage_options=s3)
    theirs = {
        "step_00000001/notes.txt": b"1",
        "step_00000001/0123456789abcdef/note.bin": b"2",
        "step_x/checkpoint.json": b"{}",
        "export/model.safetensors": b"3",
        "LATEST": b"4",
        "a b/ü%+#?.bin": b"5",
    }
    for name, data in theirs.items():
        root.write(name, data)
    for step in (2, 3, 4):
        save(url, s3, step, retention=RetentionPolicy(max_num=1))
    prune(url, policy=RetentionPolicy(max_num=1), storage_options=s3)
    with pytest.raises(CheckpointExistsError):
        convert(f"{url}/latest", f"{url}/export", to="dcp", storage_options=s3)
    loads(url, s3, 4)
    assert {name: objects(url, s3).get(name) for name in theirs} == theirs


@pytest.mark.parametrize(
    "key",
    [
        "a\\b/c",
        "a\x01b/c",
        "../a/b",
        "./a/b",
        "/step_00000002/checkpoint.json",
        "step_00000001/a\\b",
        "a//b",
        "step_00000001/0123456789abcdef//a",
        ".ckptkit//lease-00000009.json",
    ],
)
def test_foreign_keys_that_are_invalid_paths_are_ignored(s3: Options, url: str, key: str) -> None:
    root = open_store(url, storage_options=s3)
    bucket, _, folder = root._full("", root_allowed=True).partition("/")
    root.fs.call_s3("put_object", Bucket=bucket, Key=f"{folder}/{key}", Body=b"{}")
    for step in (1, 2, 3):
        save(url, s3, step, retention=RetentionPolicy(max_num=1))
    prune(url, policy=RetentionPolicy(max_num=1), storage_options=s3)
    assert steps(url, s3) == [3]
    assert not any(name.startswith(("step_00000001", "step_00000002")) for name in names(url, s3))
    loads(url, s3, 3)
    root.fs.call_s3("head_object", Bucket=bucket, Key=f"{folder}/{key}")


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


def test_a_run_works_without_usable_tags(tags: None, options: Options, s3: Options, url: str) -> None:
    for step in (1, 2, 3):
        save(url, options, step, retention=RetentionPolicy(max_num=2))
    loads(url, options, 3)
    convert(f"{url}/latest", f"{url}-dcp", to="dcp", storage_options=options)
    assert verify(f"{url}-dcp", storage_options=s3).ok
    assert steps(url, s3) == [2, 3]


def test_an_upload_with_changed_tags_is_complete_or_an_error(
    tags: None, options: Options, s3: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 5 << 20)
    store, data = open_store(url, storage_options=options), bytes(range(256)) * (60 << 10)
    try:
        with store.writer("big") as out:
            out.write(data)
    except (OSError, CkptkitError):
        assert not names(url, s3)
        assert open_store(url, storage_options=s3).unfinished_uploads() == []
    else:
        assert open_store(url, storage_options=s3).read("big") == data


def test_a_killed_conversion_without_usable_tags_starts_again(
    tags: None, options: Options, s3: Options, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "WORTH", 500)
    killed(UNEVEN, url, s3, 2, **MANY)
    command(UNEVEN, url, options, MANY)
    assert verify(url, storage_options=s3).ok


# --- a source that changes


@pytest.fixture
def foreign(s3: Options, url: str) -> str:
    command(UNEVEN, f"{url}-hf", s3, {})
    return f"{url}-hf"


def write_again(url: str, s3: Options, more: bytes = b"") -> None:
    store = open_store(url, storage_options=s3)
    data = store.read("model.safetensors")
    store.write("model.safetensors", data[:-1] + bytes([data[-1] ^ 1]) + more, overwrite=True)


def test_a_source_replaced_while_it_is_read_publishes_nothing(
    s3: Options, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_copying(monkeypatch, lambda: write_again(foreign, s3))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors was changed or replaced while it was read"):
        convert(foreign, f"{foreign}-dcp", to="dcp", storage_options=s3)
    assert not names(f"{foreign}-dcp", s3)


def test_a_gateway_with_random_tags_in_listings_is_tolerated(
    proxy: Proxy, options: Options, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = itertools.count()

    def between(handler: Any, body: bytes) -> Reply:
        status, headers, data = handler.forward(body)
        return status, headers, re.sub(b"<ETag>.*?</ETag>", lambda _: b"<ETag>%032x</ETag>" % next(turn), data)

    proxy.between = between
    convert(foreign, f"{foreign}-dcp", to="dcp", storage_options=options)
    while_copying(monkeypatch, lambda: write_again(foreign, options, b"more"))
    with pytest.raises(CorruptCheckpointError, match="was changed or replaced"):
        convert(foreign, f"{foreign}-again", to="dcp", storage_options=options)
