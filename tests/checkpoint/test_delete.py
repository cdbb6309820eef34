"""Rotation deletes what it decided, in an order that a kill can't spoil, and never what is not ours."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.cleaning import clean_leftovers
from ckptkit.checkpoint.delete import BackgroundRotation, delete_checkpoint, plan_rotation, rotate
from ckptkit.checkpoint.inventory import list_checkpoints
from ckptkit.checkpoint.pins import pin_forever, pin_while_reading, unpin
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.errors import CheckpointNotFoundError, RankFailedError, UsageError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import open_store
from tests.checkpoint.saving import check, leftovers, save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    return tmp_path


def turn(root: Path, protected: dict[str, str] | None = None, **policy: Any) -> list[int]:
    rotate(open_store(str(root)), RetentionPolicy(**policy), protected=protected)
    return check(root)


def test_rotation_leaves_what_the_policy_keeps_and_no_trash(run: Path) -> None:
    assert turn(run, max_num=2) == [3, 4] and leftovers(run) == []


def test_the_report_names_what_went_and_the_bytes(run: Path) -> None:
    done = rotate(open_store(str(run)), RetentionPolicy(max_num=3))
    assert done.deleted == ("step_00000001",) and done.freed_bytes == done.decisions[0].nbytes > 3000


def test_a_plan_deletes_nothing(run: Path) -> None:
    root = open_store(str(run))
    plan = plan_rotation(list_checkpoints(root), root, RetentionPolicy(max_num=1))
    assert [d.keep for d in plan] == [False, False, False, True] and check(run) == [1, 2, 3, 4]


def test_each_deletion_is_logged_with_its_reason(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ckptkit"):
        turn(run, max_num=3)
    assert [r.message for r in caplog.records if "deleted" in r.message] == [
        f"deleted {run}/step_00000001 (3.0 kB): not among the 3 newest (max_num)"
    ]


def test_foreign_things_survive_ten_saves(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_5_best")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events").write_bytes(b"1")
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "step_00000099").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(b"1")
    (tmp_path / "step_00000050").symlink_to(tmp_path / "outside")
    foreign = {"step_5_best", "tensorboard", "global_step7", "step_00000099", "outside", "step_00000050"}
    before = {str(p): p.stat().st_mtime_ns for name in foreign for p in (tmp_path / name).rglob("*")}
    for step in range(2, 12):
        save(tmp_path, step)
        turn(tmp_path, max_num=1)
    assert set(os.listdir(tmp_path)) == foreign | {"step_00000011", ".ckptkit", "latest"}
    assert {str(p): p.stat().st_mtime_ns for name in foreign for p in (tmp_path / name).rglob("*")} == before


def test_a_symlink_inside_is_removed_and_its_target_kept(run: Path, tmp_path: Path) -> None:
    (run / "target").mkdir()
    (run / "target" / "x").write_bytes(b"1")
    (run / "step_00000001" / "link").symlink_to(run / "target")
    (run / "step_00000001" / "dangling").symlink_to(run / "nowhere")
    rotate(open_store(str(run)), RetentionPolicy(max_num=1))
    assert (run / "target" / "x").exists() and not (run / "step_00000001").exists()


def test_incomplete_higher_steps_neither_count_nor_go(run: Path) -> None:
    for step in (200, 300):
        (run / f"step_{step:08d}").mkdir()
    assert turn(run, max_num=2) == [3, 4] and (run / "step_00000300").is_dir()


def test_the_one_resumed_from_stays(run: Path) -> None:
    assert turn(run, {"step_00000001": "resumed from"}, max_num=1) == [1, 4]


def test_a_failing_save_with_max_num_1_loses_nothing(tmp_path: Path) -> None:
    def fail(store: Any) -> None:
        raise OSError(28, "No space left on device")

    save(tmp_path, 1)
    turn(tmp_path, max_num=1)
    with pytest.raises(RankFailedError):
        save(tmp_path, 2, before=fail)
    assert turn(tmp_path, max_num=1) == [1]


def test_stale_steps_of_before_a_rollback_go_first(tmp_path: Path) -> None:
    for step in (100, 200, 300, 150):
        save(tmp_path, step)
    assert turn(tmp_path, max_num=2) == [100, 150]


def test_pinned_ones_stay_until_they_are_unpinned(run: Path) -> None:
    pin_forever(str(run / "step_00000001"), "the paper")
    assert turn(run, max_num=1) == [1, 4]
    assert unpin(str(run / "step_00000001")) and not unpin(str(run / "step_00000001"))
    assert turn(run, max_num=1) == [4]


def test_what_is_being_read_stays_and_goes_at_the_next_turn(run: Path) -> None:
    with pin_while_reading(open_store(str(run)), "step_00000001", why="convert"):
        assert turn(run, max_num=1) == [1, 4]
    assert turn(run, max_num=1) == [4]


def test_a_pin_that_comes_after_the_plan_still_holds(run: Path) -> None:
    with pin_while_reading(open_store(str(run)), "step_00000001"):
        assert delete_checkpoint(open_store(str(run)), "step_00000001", reason="test") is False
    assert check(run) == [1, 2, 3, 4]


def test_a_failure_to_delete_is_reported_and_not_raised(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: LocalStore, path: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalStore, "delete_tree", fail)
    done = rotate(open_store(str(run)), RetentionPolicy(max_num=3))
    assert list(done.failed or {}) == ["step_00000001"] and "Input/output error" in caplog.text
    monkeypatch.undo()
    assert check(run) == [2, 3, 4]  # it is no longer listed, though its files are still there
    assert len(clean_leftovers(open_store(str(run)))) == 1 and leftovers(run) == []


@pytest.mark.parametrize("name", ["step_00000009", "tensorboard", "../x", "", ".ckptkit", "copy"])
def test_only_a_committed_checkpoint_can_be_deleted(run: Path, name: str) -> None:
    (run / "tensorboard").mkdir()
    shutil.copytree(run / "step_00000001", run / "copy")
    with pytest.raises((CheckpointNotFoundError, ValueError)):
        delete_checkpoint(open_store(str(run)), name, reason="test")
    assert (run / "tensorboard").is_dir() and (run / "copy").is_dir()


def test_a_background_rotation_does_the_same(run: Path) -> None:
    rotation = BackgroundRotation(open_store(str(run)), RetentionPolicy(max_num=1))
    for _ in range(5):
        rotation.submit()
    assert rotation.wait(20) and check(run) == [4]
    assert rotation.close(20)
    with pytest.raises(UsageError):
        rotation.submit()


def test_a_background_rotation_outlives_a_failure(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = BackgroundRotation(open_store(str(run)), RetentionPolicy(max_num=1))
    monkeypatch.setattr(LocalStore, "list", lambda self, path="", recursive=False: 1 / 0)
    rotation.submit()
    assert rotation.wait(20)
    monkeypatch.undo()
    rotation.submit()
    assert rotation.close(20) and check(run) == [4]


def test_what_a_living_writer_stages_is_not_cleaned(run: Path) -> None:
    save(run, 9, before=lambda store: clean_leftovers(open_store(str(run))) == [] or 1 / 0)
    assert check(run)[-1] == 9


def test_a_dry_cleaning_only_says_what_it_would_remove(run: Path) -> None:
    (run / ".trash-step_00000007-0123456789abcdef").mkdir()
    root = open_store(str(run))
    assert clean_leftovers(root, dry_run=True) == [".trash-step_00000007-0123456789abcdef"]
    assert leftovers(run) != [] and clean_leftovers(root) and leftovers(run) == []
