"""The commit record: round trips, and refusals of damaged, hostile and newer records."""

import contextlib
import dataclasses
import json
import math
import pickle
import random
from typing import Any

import pytest
import xxhash

from ckptkit.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsupportedFormatError,
    UsageError,
)
from ckptkit.formats.own import record as layout
from ckptkit.formats.own.record import CommitRecord, FileRecord, find_record, step_name, step_of_name
from ckptkit.storage import open_store
from tests.hostile.test_names import NAMES

FULL = CommitRecord(
    step=1200, tag="final", save_id="0123456789abcdef", sequence=7, data="0123456789abcdef", created=1_700_000_000.25,
    state_dict_type="sharded", world_size=4, mesh={"shape": [2, 2], "names": ["replicate", "shard"]},
    files={"manifest.safetensors": FileRecord(5, "0" * 16), "a/b.distcp": FileRecord(7, "f" * 16)},
    manifest="manifest.safetensors", metrics={"loss": 1.5, "worst": math.inf}, objective=("loss", "min"),
    client_state={"epoch": 3, "name": "é", "list": [1, None, True, 0.1]}, writer={"host": "h", "pid": 1},
    versions={"torch": "2.13.0"}, extra={"x": 1},
)  # fmt: skip


def body_of(record: CommitRecord) -> dict[str, Any]:
    return json.loads(record.to_json())


def sealed(body: dict[str, Any]) -> bytes:
    """Return a record with a valid digest for any fields, as an attacker would write it."""
    body = {name: value for name, value in body.items() if name != "self"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**body, "self": f"xxh3_64:{xxhash.xxh3_64_hexdigest(canonical.encode())}"}).encode()


def read(data: bytes) -> CommitRecord:
    return CommitRecord.from_json(data, file="run/step/checkpoint.json")


def test_a_record_round_trips():
    assert read(FULL.to_json()) == FULL == pickle.loads(pickle.dumps(FULL))
    assert dataclasses.replace(FULL, files={}).total_bytes == 12
    assert FULL.total_bytes == 12 and FULL.name == "final"


def test_a_metric_that_is_not_a_number_survives():
    again = read(dataclasses.replace(FULL, metrics={"loss": math.nan, "low": -math.inf}).to_json())
    assert math.isnan(again.metrics["loss"]) and again.metrics["low"] == -math.inf


@pytest.mark.parametrize("name", sorted(body_of(FULL)))
def test_an_error_names_a_missing_field(name):
    body = body_of(FULL)
    del body[name]
    with pytest.raises(CorruptCheckpointError, match=name):
        read(sealed(body) if name != "self" else json.dumps(body).encode())


@pytest.mark.parametrize("name", sorted(set(body_of(FULL)) - {"client_state", "self"}))
@pytest.mark.parametrize("value", [[1], {"a": {}}, -1, 1.5, "\0", True, {"a": 1e999}, "x" * 10_000])
def test_a_field_of_a_wrong_type_is_refused(name, value):
    if (name, value) in [("extra", {"a": {}}), ("writer", {"a": {}})]:
        return
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError, UnsafePathError)):
        read(sealed({**body_of(FULL), name: value}))


OUTSIDE = ["../x", "/etc/passwd", "a/../../x", "", "a//b", "a\\b", "a\0b", ".", "a/./b", "x" * 5000, "a\nb"]
NO_BYTES = {"nbytes": 0, "xxh3_64": "0" * 16}


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"format": "ckptkit/2"}, UnsupportedFormatError, "upgrade"),
    *(({"files": {**body_of(FULL)["files"], path: NO_BYTES}}, UnsafePathError, "checkpoint.json") for path in OUTSIDE),
    *((place, UnsafePathError, "checkpoint.json")  # outside of the run
      for place in ({"tag": "../x"}, {"tag": "step_00000009"}, {"data": "f" * 16}, {"tag": ".git"})),
    ({"total_bytes": 10**12}, CorruptCheckpointError, "add up"),
    ({"manifest": "other"}, IncompleteCheckpointError, "manifest"),
])  # fmt: skip
def test_a_field_with_a_wrong_value_is_refused(changes, error, said):
    with pytest.raises(error, match=said):
        read(sealed({**body_of(FULL), **changes}))


def test_every_flipped_bit_is_found_or_changes_nothing():
    chance = random.Random(1)
    for _ in range(2000):
        spoilt = bytearray(FULL.to_json())
        spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(CorruptCheckpointError):
            assert read(bytes(spoilt)) == FULL


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[]", b"null", FULL.to_json()[:-9], FULL.to_json()[:99]])
def test_json_other_than_a_record_is_refused(data):
    with pytest.raises(CorruptCheckpointError):
        read(data)


@pytest.mark.parametrize("fields", [
    {"client_state": {1, 2}}, {"client_state": {"x": math.nan}}, {"metrics": {"loss": "low"}},
    {"client_state": {"a": [{1: 2}]}},
])  # fmt: skip
def test_a_record_that_cannot_be_written_is_a_usage_error(fields):
    with pytest.raises(UsageError, match=r"JSON|expected a number"):
        dataclasses.replace(FULL, **fields).to_json()


def test_a_step_has_exactly_one_valid_name():
    names = {7: "step_00000007", 10**9: "step_1000000000"}
    assert {step_of_name(name): step_name(step) for step, name in names.items()} == names
    for name in ("step_7", "step_0000000007", "step_00000007x", "Step_00000007", "step_-0000007", "7", *NAMES):
        assert step_of_name(name) is None


def test_a_record_that_is_a_link_or_too_large_is_not_read(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    assert find_record(store) is None
    (tmp_path / "real").write_bytes(FULL.to_json())
    (tmp_path / "checkpoint.json").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafePathError, match="symlink"):
        find_record(store)
    monkeypatch.setattr(layout, "MAX_RECORD_BYTES", 10)
    with pytest.raises(CorruptCheckpointError, match="larger"):
        find_record(store, "real")
