"""A reader's pin protects what it reads; a dead reader's pin expires; a user's pin stays."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.run import pins
from ckptkit.checkpoint.run.delete import delete_checkpoint
from ckptkit.checkpoint.run.pins import deleting, list_pins, pin_forever, pin_while_reading, split_checkpoint_url
from ckptkit.errors import CheckpointNotFoundError, UsageError
from ckptkit.storage import Store, open_store
from ckptkit.storage.owner import this_process
from tests.checkpoint.saving import fork, save
from tests.patches import failing

DEAD = {"host": "h", "pid": 1, "started": "never", "machine": this_process().machine}


@pytest.fixture
def root(tmp_path: Path) -> Store:
    """The store of a run with one checkpoint."""
    save(tmp_path, 1)
    return open_store(str(tmp_path))


def test_a_pin_protects_the_checkpoint_while_it_is_read(root):
    with pin_while_reading(root, "step_00000001", why="convert"):
        (pin,) = list_pins(root)
        assert pin.name == "step_00000001" and f"process {os.getpid()}" in pin.reason and "convert" in pin.reason
    assert list_pins(root) == []


def test_pinning_a_deleted_checkpoint_is_an_error_and_leaves_no_pin(root):
    with pytest.raises(CheckpointNotFoundError, match="List again"), pin_while_reading(root, "step_00000002"):
        pass
    assert list_pins(root) == []


def _read_and_die(say: Any, root: str) -> None:
    with pin_while_reading(open_store(root), "step_00000001"):
        say(b"reading")
        os.kill(os.getpid(), 9)


def test_the_pin_of_a_dead_reader_has_no_effect(root):
    assert fork(_read_and_die, root.url) == (-9, b"reading")
    assert list_pins(root) == []


@pytest.mark.parametrize(("age_s", "holds"), [(10.0, True), (pins.TTL_S + 10, False)])
def test_the_pin_of_a_reader_on_another_machine_counts_until_it_expires(tmp_path, age_s, holds):
    path = tmp_path / ".ckptkit" / "pins" / "read-1.json"
    path.parent.mkdir(parents=True)
    owner = {"host": "far", "pid": 1, "started": "1", "machine": "m/n/o"}
    path.write_text(json.dumps({"name": "step_00000001", "why": "load", "owner": owner}))
    os.utime(path, (time.time() - age_s,) * 2)
    assert bool(list_pins(open_store(str(tmp_path)))) is holds


def test_a_deletion_removes_day_old_pins_of_killed_readers(tmp_path, root):
    folder = tmp_path / ".ckptkit" / "pins"
    folder.mkdir(exist_ok=True)
    for name, days in (("read-old", 2), ("read-new", 0), ("keep-step_00000001", 2)):
        body = {"name": "step_00000001", "why": "x"} | ({"owner": DEAD} if name.startswith("read") else {})
        (folder / f"{name}.json").write_text(json.dumps(body))
        os.utime(folder / f"{name}.json", (time.time() - 86400 * days,) * 2)
    assert len(list_pins(root)) == 1
    assert len(list(folder.iterdir())) == 3  # looking changes nothing
    with deleting(root, "step_00000001"):
        assert sorted(path.stem for path in folder.iterdir()) == ["keep-step_00000001", "read-new"]


def test_a_reader_waits_for_a_running_deletion(root):
    ended, deletion = threading.Event(), contextlib.ExitStack()
    assert deletion.enter_context(deleting(root, "step_00000001")) == []
    threading.Timer(0.1, lambda: (ended.set(), deletion.close())).start()
    with pin_while_reading(root, "step_00000001"):
        assert ended.is_set()


def test_a_killed_deletion_does_not_delay_readers(tmp_path, root):
    path = tmp_path / ".ckptkit" / "deleting" / "step_00000001.json"
    path.parent.mkdir()
    path.write_text(json.dumps(DEAD))
    start = time.monotonic()
    with pin_while_reading(root, "step_00000001"):
        assert time.monotonic() - start < 5


def test_a_read_only_root_is_read_without_a_pin(tmp_path, root, monkeypatch, caplog):
    part = f"{tmp_path}/.ckptkit/pins/.read-1.json.2.part"
    monkeypatch.setattr(type(root), "write", failing(PermissionError(13, "Permission denied", part)))
    with pin_while_reading(root, "step_00000001"):
        pass
    why = "(Permission denied): another job's rotation may delete it before the read ends"
    what = f"step_00000001 is read without a pin {why}"
    assert caplog.messages == [f"{tmp_path}: {what}"]


def test_a_pin_that_cannot_be_removed_is_logged(root, monkeypatch, caplog):
    with pin_while_reading(root, "step_00000001"):
        monkeypatch.setattr(type(root), "delete", failing(5))
    what = "the pin of step_00000001 could not be removed, so rotation keeps it until this process ends"
    assert caplog.messages == [f"{root.url}: {what}: [Errno 5] Input/output error"]


def test_only_a_committed_checkpoint_can_be_pinned(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        pin_forever(str(tmp_path / "step_00000001"), "x")
    assert not (tmp_path / ".ckptkit").exists()


def test_a_damaged_pin_of_a_user_still_counts(tmp_path, root):
    pin_forever(str(tmp_path / "step_00000001"), "paper")
    (tmp_path / ".ckptkit" / "pins" / "keep-step_00000001.json").write_bytes(b"")
    assert [p.name for p in list_pins(root)] == ["step_00000001"]
    assert not delete_checkpoint(root, "step_00000001", reason="x")


def test_pinning_again_changes_the_reason_only_if_one_is_given(tmp_path, root):
    for why, wanted in (("", "by hand"), ("first", "first"), ("second", "second"), ("", "second")):
        assert pin_forever(str(tmp_path / "step_00000001") + "/", why).why == wanted
        assert [p.why for p in list_pins(root)] == [wanted]


@pytest.mark.parametrize(
    ("url", "root", "name"),
    [("/a/b", "/a", "b"), ("/a/b/", "/a", "b"), ("/b", "/", "b"), ("s3://bucket/run/x", "s3://bucket/run", "x")],
)
def test_a_checkpoint_url_is_split_into_run_and_name(url, root, name):
    store, found = split_checkpoint_url(url)
    assert (store.url, found) == (root, name)
    for other in ("", "/", "s3://bucket", "s3://bucket/.."):
        with pytest.raises(UsageError):
            split_checkpoint_url(other)
