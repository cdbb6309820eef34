"""What is listed as a checkpoint, what is skipped and why, and the names of checkpoints."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from ckptkit.checkpoint.run import commit
from ckptkit.checkpoint.run.delete import delete_checkpoint
from ckptkit.checkpoint.run.inventory import Inventory, list_checkpoints, resolve
from ckptkit.errors import CheckpointNotFoundError, UsageError
from ckptkit.storage import open_store
from ckptkit.storage.owner import this_process
from tests.checkpoint.saving import check, save


def ls(root: Path) -> Inventory:
    return list_checkpoints(open_store(str(root)))


def names(root: Path) -> list[str]:
    return [item.name for item in ls(root).committed]


@pytest.mark.parametrize(
    "tag", ["x.owner", "x.part", "final.json", "_", "0.1", "global_step100", "x" * 128, "best-1.0", "1"]
)
def test_every_allowed_tag_can_be_listed_and_deleted(tmp_path, tag):
    save(tmp_path, 1, tag=tag)
    save(tmp_path, 2)
    assert names(tmp_path) == [tag, "step_00000002"]
    assert delete_checkpoint(open_store(str(tmp_path)), tag, reason="test")
    assert names(tmp_path) == ["step_00000002"]


@pytest.mark.parametrize("skew", [-365 * 86400.0, 0.0, 365 * 86400.0])
def test_neither_clocks_nor_mtimes_nor_the_spelling_change_the_order(tmp_path, skew, monkeypatch):
    save(tmp_path, 9)
    real, chance = commit.time.time, random.Random(3)
    monkeypatch.setattr(commit.time, "time", lambda: real() + skew)
    for step in (10, 100_000_000, 1_000_000_000):
        save(tmp_path, step)
    monkeypatch.undo()
    save(tmp_path, 1_000_000_001)
    for path in tmp_path.rglob("*"):
        os.utime(path, (chance.uniform(0, 2e9),) * 2)
    assert check(tmp_path) == [9, 10, 100_000_000, 1_000_000_000, 1_000_000_001]


@pytest.mark.parametrize("damage", ["missing", "empty", "zeros", "half", "flip", "link", "directory"])
def test_a_checkpoint_without_a_sound_record_is_skipped_with_the_reason(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    record = tmp_path / "step_00000002" / "checkpoint.json"
    data = record.read_bytes()
    record.rename(tmp_path / "elsewhere")
    if damage == "link":
        record.symlink_to(tmp_path / "elsewhere")
    elif damage == "directory":
        record.mkdir()
    elif damage != "missing":
        flipped = data.replace(b'"world_size": 1', b'"world_size": 3')
        record.write_bytes({"empty": b"", "zeros": bytes(len(data)), "half": data[:100], "flip": flipped}[damage])
    found = ls(tmp_path)
    assert [i.step for i in found.committed] == [1] and [s.path for s in found.skipped] == ["step_00000002"]
    assert "checkpoint.json" in found.skipped[0].reason


def test_foreign_folders_files_and_links_are_only_listed_as_foreign(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_5_best")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "step_00000007").symlink_to(tmp_path / "step_00000001")
    found = ls(tmp_path)
    assert [i.name for i in found.committed] == ["step_00000001"]
    assert found.foreign == ("notes.txt", "tensorboard")
    assert [s.path for s in found.skipped] == ["step_5_best", "step_00000007"]
    assert "copied or renamed" in found.skipped[0].reason and "symlink" in found.skipped[1].reason


def test_a_running_save_is_listed_with_its_writer_and_not_as_a_checkpoint(tmp_path):
    seen: list[Inventory] = []
    save(tmp_path, 4, before=lambda store: seen.append(ls(tmp_path)))
    assert [(a.name, a.owner.pid if a.owner else 0) for a in seen[0].in_progress] == [("step_00000004", os.getpid())]
    assert seen[0].committed == () and ls(tmp_path).in_progress == ()


def test_a_save_whose_writer_died_is_abandoned(tmp_path):
    owner = {"nonce": "0" * 16, "host": "h", "pid": 1, "started": "never", "machine": this_process().machine}
    (tmp_path / ".tmp-step_00000004-0000000000000000").mkdir()
    (tmp_path / ".tmp-step_00000004-0000000000000000.owner").write_text(json.dumps(owner))
    found = ls(tmp_path)
    assert [a.name for a in found.abandoned] == ["step_00000004"] and found.foreign == ()


def test_checkpoints_of_a_rolled_back_branch_are_listed_as_older(tmp_path):
    for step in (10, 20, 30, 15, 18):
        save(tmp_path, step)
    assert [(i.step, i.superseded) for i in ls(tmp_path).committed] == [
        (20, True), (30, True), (10, False), (15, False), (18, False),
    ]  # fmt: skip


# --- names


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        save(tmp_path, step, fields={"metrics": {"loss": loss, "acc": loss}, "objective": ("loss", "min")})
    save(tmp_path, 30, tag="final")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("latest", "final"), ("latest~0", "final"), ("latest~1", "step_00000030"), ("latest~3", "step_00000010"),
        ("best", "step_00000020"), ("best:loss", "step_00000020"), ("best:acc:max", "step_00000010"),
        ("best:loss:max", "step_00000010"), ("10", "step_00000010"), ("00030", "step_00000030"), ("final", "final"),
        ("step_00000020", "step_00000020"),
    ],
)  # fmt: skip
def test_a_name_resolves_to_one_checkpoint(run, name, expected):
    assert resolve(open_store(str(run)), name).name == expected


@pytest.mark.parametrize("name", ["latest~4", "99", "nope", "../step_00000010", "", "step_10", "latest~x", "٣"])
def test_an_unknown_name_is_an_error_that_lists_the_checkpoints(run, name):
    with pytest.raises(CheckpointNotFoundError, match="It has step_00000010"):
        resolve(open_store(str(run)), name)


def test_an_error_about_an_empty_run_says_what_was_skipped_and_why(tmp_path):
    (tmp_path / "step_00000002").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"no committed checkpoint\. Skipped: step_00000002: it has no"):
        resolve(open_store(str(tmp_path)))


def test_best_without_a_recorded_metric_is_an_error(tmp_path):
    save(tmp_path, 1, fields={"metrics": {"loss": 1.0}})
    with pytest.raises(UsageError, match=r"best:METRIC:min.* Existing metrics: loss\."):
        resolve(open_store(str(tmp_path)), "best")
    assert resolve(open_store(str(tmp_path)), "best", best=("loss", "min")).step == 1
