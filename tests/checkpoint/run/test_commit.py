"""One attempt to save: what is published, what is refused, and the same outcome on all ranks."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.run.commit import begin_save
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.pins import pin_forever, pin_while_reading
from ckptkit.errors import CheckpointExistsError, LeaseHeldError, NoSpaceError, RankFailedError, SaveError, UsageError
from ckptkit.formats.own.record import FileRecord, read_record
from ckptkit.storage import open_store
from ckptkit.storage.local import LocalStore
from tests.checkpoint.saving import check, leftovers, save
from tests.hostile.test_names import NAMES
from tests.patches import failing, refuse
from tests.ranks import on_ranks


def test_a_commit_publishes_only_the_files_and_the_record(tmp_path):
    record = save(tmp_path / "run", 7, fields={"metrics": {"loss": 1.5}, "client_state": {"epoch": 2}})
    assert check(tmp_path / "run") == [7]
    again = read_record(open_store(str(tmp_path / "run" / "step_00000007")))
    assert again == record and again.metrics == {"loss": 1.5} and again.client_state == {"epoch": 2}
    assert sorted(os.listdir(tmp_path / "run")) == [".ckptkit", "latest", "step_00000007"]


def test_a_checkpoint_that_a_user_pinned_is_not_overwritten(tmp_path):
    save(tmp_path, 7)
    with pin_while_reading(open_store(str(tmp_path)), "step_00000007"):  # our own pin does not block the save
        save(tmp_path, 7, overwrite=True)
    pin_forever(str(tmp_path / "step_00000007"), "paper")
    with pytest.raises(CheckpointExistsError, match="pinned: paper"):
        save(tmp_path, 7, overwrite=True)


@pytest.mark.parametrize("kind", ["directory", "file", "symlink"])
def test_a_foreign_entry_of_the_same_name_is_left_unchanged(tmp_path, kind):
    place = tmp_path / "step_00000007"
    if kind == "directory":
        place.mkdir()
        (place / "theirs").write_bytes(b"1")
    elif kind == "file":
        place.write_bytes(b"1")
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointExistsError, match="in the way"):
        save(tmp_path, 7, overwrite=True)
    assert place.is_symlink() or place.exists()


def test_the_error_of_a_full_disk_suggests_a_deletion_only_if_there_is_something_to_delete(tmp_path):
    for step in (1, 2, 3):
        with pytest.raises(NoSpaceError) as caught:
            save(tmp_path, 7, planned_bytes=1 << 60)
        assert ("ckptkit prune" in str(caught.value)) == (step == 3)
        save(tmp_path, step)


@pytest.mark.parametrize(("error", "kind", "said"), [
    (OSError(5, "Input/output error"), RankFailedError, r"saving step_00000002 failed on rank 0: OSError"),
    (KeyboardInterrupt(), KeyboardInterrupt, None),
], ids=["error", "Ctrl-C"])  # fmt: skip
def test_a_failed_save_leaves_nothing_and_the_next_save_works(tmp_path, error, kind, said):
    save(tmp_path, 1)
    with pytest.raises(kind, match=said):
        save(tmp_path, 2, before=failing(error))
    assert leftovers(tmp_path) == [] and check(tmp_path) == [1]
    save(tmp_path, 2)
    assert check(tmp_path) == [1, 2]


@pytest.mark.parametrize("damage", ["missing", "truncated", "stray"])
def test_files_that_differ_from_what_ranks_reported_are_not_published(tmp_path, damage):
    def spoil(store: LocalStore) -> None:
        path = Path(store.url) / "shards" / "__0_0.distcp"
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        elif damage == "missing":
            path.unlink()
        else:
            store.write("__5_0.distcp", b"1")

    with pytest.raises((SaveError, RankFailedError)):
        save(tmp_path, 3, before=spoil)
    assert check(tmp_path) == [] and leftovers(tmp_path) == []


def test_a_root_that_disappears_is_an_error_and_is_not_recreated(tmp_path):
    root = tmp_path / "mnt" / "run"

    def unmount(store: Any) -> None:
        shutil.rmtree(tmp_path / "mnt")

    with pytest.raises(SaveError, match="mount lost, or the directory removed"):
        save(root, 3, before=unmount)
    assert not (root / "step_00000003").exists()


def test_a_job_that_lost_its_lease_does_not_publish(tmp_path):
    root = open_store(str(tmp_path))

    def taken(store: Any) -> None:
        state = json.loads((tmp_path / ".ckptkit" / "lease-00000001.json").read_text())
        other = {**state, "nonce": "f" * 16, "host": "other-host"}
        (tmp_path / ".ckptkit" / "lease-00000002.json").write_text(json.dumps(other))

    with pytest.raises(LeaseHeldError, match="other-host"):
        save(root, 2, before=taken)
    assert check(tmp_path) == []


def test_one_of_two_concurrent_saves_to_one_root_is_refused(tmp_path):
    with pytest.raises(LeaseHeldError, match="another manager"):
        save(tmp_path, 1, before=lambda store: save(tmp_path, 2) and None)
    save(tmp_path, 2)
    assert check(tmp_path) == [2]


def test_a_failed_sync_of_the_root_undoes_the_commit(tmp_path, monkeypatch):
    def committed(store: LocalStore, path: str = "") -> bool:
        return (tmp_path / "step_00000003").exists() and store.url == str(tmp_path) and not path

    refuse(monkeypatch, LocalStore, "sync_directory", errno.EIO, when=committed)
    with pytest.raises(RankFailedError, match="Input/output error"):
        save(tmp_path, 3)
    monkeypatch.undo()
    assert check(tmp_path) == [] and leftovers(tmp_path) == []


def test_latest_names_the_newest_checkpoint_unless_it_is_a_foreign_file(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 4, tag="final")
    assert (tmp_path / "latest").read_text() == "final\n"
    save(tmp_path, 5)
    assert (tmp_path / "latest").read_text() == "step_00000005\n"
    (tmp_path / "latest").write_text("global_step100")  # of another program
    save(tmp_path, 6)
    assert (tmp_path / "latest").read_text() == "global_step100"


@pytest.mark.parametrize("tag", NAMES, ids=ascii)
def test_a_hostile_tag_is_refused_and_nothing_is_written(tmp_path, tag):
    root = tmp_path / "run"
    with pytest.raises((UsageError, RankFailedError)) as caught:
        save(root, 7, tag=tag)
    assert "is refused" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 10**18, True, 1.5, "7", None])
def test_an_invalid_step_is_refused(tmp_path, step):
    with pytest.raises(UsageError, match="expected an int"):
        save(tmp_path / "run", step)
    assert list(tmp_path.iterdir()) == []


def test_the_next_save_removes_leftovers_of_dead_saves(tmp_path):
    (tmp_path / ".tmp-step_00000001-0123456789abcdef").mkdir()
    (tmp_path / ".trash-step_00000001-0123456789abcdef" / "sub").mkdir(parents=True)
    (tmp_path / ".latest.0123456789ab.part").write_bytes(b"step")
    save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == [".ckptkit", "latest", "step_00000003"]


# --- several ranks


@pytest.mark.parametrize(
    ("what", "text"),
    [("step", r"disagree.*: rank 0 has \(1, .*, rank 1 has \(2, "), ("tag", "disagree"), ("root", "not shared by all")],
)
@on_ranks(3)
def test_ranks_that_disagree_on_what_to_save_all_fail(tmp_path, what, text):
    coordinator = Coordinator(timeout_s=20)
    other = coordinator.rank == 1
    root = tmp_path / "other" if what == "root" and other else tmp_path / "run"
    step = 2 if what == "step" and other else 1
    tag = "x" if what == "tag" and other else None
    with pytest.raises((UsageError, RankFailedError), match=text):
        begin_save(open_store(str(root)), step, tag=tag, coordinator=coordinator)
    coordinator.all_gather(None)  # all ranks have removed their files
    assert [p for p in tmp_path.rglob("*") if p.name.startswith((".tmp", "step"))] == []


@on_ranks(2)
def test_a_file_that_two_ranks_claim_fails_the_save(tmp_path):
    coordinator = Coordinator(timeout_s=20)
    attempt = begin_save(open_store(str(tmp_path)), 1, coordinator=coordinator)
    if coordinator.is_main:
        attempt.store.write("__0_0.distcp", b"1")
    coordinator.all_gather(None)
    with pytest.raises(SaveError, match=r"both wrote __0_0\.distcp"):
        files = {"__0_0.distcp": FileRecord(1, "0" * 16)}
        attempt.commit(files, {"state_dict_type": "sharded"}, payload=None, complete=lambda _: {})
    coordinator.all_gather(None)  # rank 0 has removed its files
    assert leftovers(tmp_path) == []
