"""What a manager holds until it is closed: the lease of the run, and the pin of the checkpoint it resumed from."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, RetentionPolicy
from ckptkit.checkpoint.load import choose
from ckptkit.checkpoint.run import inventory
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.pins import deleting, pin_while_reading
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LeaseHeldError,
    SaveError,
    StorageError,
    UsageError,
)
from ckptkit.storage import lock as lease_module
from ckptkit.storage import open_store
from ckptkit.storage.local import LocalStore
from ckptkit.storage.lock import open_attempts
from ckptkit.storage.publish import check_writable, open_staging
from tests.checkpoint.saving import steps
from tests.checkpoint.states import flip, linear, load, save_steps, value_of
from tests.patches import before, refuse
from tests.ranks import run_script

SECOND = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import LeaseHeldError
state = TrainState(model=torch.nn.Linear(3, 2), rng=False)
manager = CheckpointManager(sys.argv[1])
print("loaded", manager.load(state).step, flush=True)
try:
    manager.save(7, state)
    print("saved", flush=True)
except LeaseHeldError as error:
    print("refused", error)
"""


def second_job(root: Path) -> str:
    return run_script(SECOND, str(root))[1]


# --- the lease


def test_a_second_job_is_refused_with_the_owner_named_and_may_still_read(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, linear())
        warned, loaded, refused = second_job(tmp_path).splitlines()[:3]
        assert loaded == "loaded 1" and refused.startswith("refused")
        owner = f"{tmp_path} is being written by process {os.getpid()} on"
        assert warned.startswith(owner) and owner in refused
        manager.save(2, linear())
    assert steps(tmp_path) == [1, 2]


def test_a_job_in_a_copy_of_a_running_run_ignores_what_the_original_does(tmp_path):
    run, copy, same = tmp_path / "run", tmp_path / "copy", tmp_path / "same"
    root = open_store(str(run))
    with CheckpointManager(run) as manager:
        manager.save(1, linear())
        with pin_while_reading(root, "step_00000001"), deleting(root, "step_00000001"):
            open_staging(LocalStore(run), "step_00000002", "0" * 16, leased=True)
            subprocess.run(["cp", "-r", run, copy], check=True)
            shutil.copytree(run, same)
        assert second_job(copy) == "loaded 1\nsaved\n"
        save_steps(same, 3, retention=RetentionPolicy(max_num=1))
        assert "refused" in second_job(run)
        run.rename(tmp_path / "moved")
        assert "refused" in second_job(tmp_path / "moved")
    assert (steps(copy), steps(same)) == ([1, 7], [3])
    assert not [*copy.glob(".tmp-*"), *same.glob(".tmp-*")]


def test_a_job_that_ends_without_close_releases_the_lease(tmp_path):
    save_steps(tmp_path, 1)
    subprocess.run([sys.executable, "-c", SECOND, str(tmp_path)], check=True)
    assert open_attempts(open_store(str(tmp_path))).owner is None


def test_managers_of_one_process_share_the_lease_take_turns_and_keep_what_the_other_needs(tmp_path):
    save_steps(tmp_path, 1)
    first, second = (CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) for _ in range(2))
    first.load(linear())
    handles = [first.save_async(2, linear()), second.save_async(3, linear())]
    assert sorted(handle.result().step for handle in handles) == [2, 3]
    assert 1 in steps(tmp_path) and len(steps(tmp_path)) == 2  # and the newest
    first.close()
    assert open_attempts(open_store(str(tmp_path))).owner is not None
    second.save(4, linear())
    second.close()
    assert open_attempts(open_store(str(tmp_path))).owner is None
    assert steps(tmp_path) == [1, 4]  # this job was resumed from the first


def test_a_manager_that_exits_with_an_error_releases_the_lease(tmp_path):
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path) as manager:
        manager.save(1, linear())
        raise ZeroDivisionError
    assert open_attempts(open_store(str(tmp_path))).owner is None


def test_a_save_that_waits_for_its_turn_too_long_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager, CheckpointManager(tmp_path, timeout_s=0.2) as other:
        manager.save(1, linear())
        with manager._hold.lease().turn, pytest.raises(LeaseHeldError, match="another save of this process"):
            other.save(2, linear())
        other.save(2, linear())
    assert steps(tmp_path) == [1, 2]


# --- what the constructor can see


def warnings_of(caplog, root: Path) -> list[str]:
    caplog.clear()
    CheckpointManager(root).close()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_job_is_warned_of_a_directory_that_is_not_writable(as_a_user, caplog):
    root = save_steps(as_a_user / "run", 1)
    assert warnings_of(caplog, root) == []
    for place in (root / ".ckptkit", root):
        place.chmod(0o555)
        (said,) = warnings_of(caplog, root)
        assert said.startswith(f"{root} is not writable")
        with CheckpointManager(root) as manager:
            assert manager.load(linear()).step == 1
            with pytest.raises(StorageError, match=f"{root} is not writable") as caught:
                manager.save(2, linear())
        assert ".part" not in str(caught.value)
        with pytest.raises(PermissionError, match="is not writable"):
            check_writable(LocalStore(place))
        place.chmod(0o755)


def test_a_job_is_warned_of_a_state_directory_that_is_a_link_and_may_still_load(tmp_path, caplog):
    root = save_steps(tmp_path / "run", 1)
    (root / ".ckptkit").rename(tmp_path / "elsewhere")
    (root / ".ckptkit").symlink_to(tmp_path / "elsewhere")
    (said,) = warnings_of(caplog, root)
    assert f"{root}/.ckptkit leads through a symbolic link" in said and "Loads work" in said
    assert load(root, linear()).step == 1


# --- a root that goes away


@pytest.mark.parametrize("beat", [False, True])
@pytest.mark.parametrize("then", ["nothing", "an empty directory", "a link to another directory"])
def test_a_root_that_was_moved_away_is_neither_recreated_nor_written_to(tmp_path, then, beat, monkeypatch):
    monkeypatch.setattr(lease_module, "BEAT_S", 0.02)
    root, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    with CheckpointManager(root) as manager:
        manager.save(1, linear())
        root.rename(tmp_path / "gone")
        if then == "an empty directory":
            root.mkdir()
        elif then == "a link to another directory":
            root.symlink_to(other)
        if beat:
            time.sleep(0.2)
        with pytest.raises(SaveError, match=r"The lease of .* is gone"):
            manager.save(2, linear())
    assert root.exists() == (then != "nothing") and os.listdir(root if root.exists() else other) == []


def test_a_root_that_disappears_during_a_save_is_an_error_and_nothing_is_written_elsewhere(tmp_path, kind, monkeypatch):
    root = tmp_path / "mount" / "run"
    with CheckpointManager(root, state_dict_type=kind) as manager:
        manager.save(1, linear())
        prepared = manager._saver.prepare(linear(2), manager._request(2, None, None, None, False))

        def vanish(*_: Any, **__: Any) -> None:
            root.parent.rename(tmp_path / "elsewhere")
            root.parent.mkdir()

        before(monkeypatch, type(prepared.plan), "write", vanish)
        with pytest.raises((SaveError, OSError)):
            manager._saver.publish(prepared)
    assert os.listdir(tmp_path / "mount") == []
    assert steps(tmp_path / "elsewhere" / "run") == [1]


# --- what was resumed from


def test_prune_keeps_the_checkpoint_that_a_running_job_was_resumed_from(tmp_path):
    root = open_store(str(save_steps(tmp_path, 1, 2, 3)))
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager:
        manager.load(linear(), 2)
        assert rotate(root, RetentionPolicy(max_num=1)).deleted == ("step_00000001",)
        with pytest.raises(UsageError, match="resumed from"):
            manager.delete(2)
        manager.load(linear(), 3)  # the pin moves on
        assert rotate(root, RetentionPolicy(max_num=1)).deleted == ("step_00000002",)
        for step in (4, 5):
            manager.save(step, linear())
        assert steps(tmp_path) == [3, 5]
        with pytest.raises(CheckpointNotFoundError):
            manager.delete(4)
    assert rotate(root, RetentionPolicy(max_num=1)).deleted == ("step_00000003",)  # the job is finished
    assert list((tmp_path / ".ckptkit" / "pins").iterdir()) == []


def test_a_checkpoint_of_another_run_is_pinned_while_it_is_read(tmp_path, monkeypatch):
    root, seen, policy = open_store(str(save_steps(tmp_path / "a", 1, 2))), list[Any](), RetentionPolicy(max_num=1)
    before(monkeypatch, choose, "load_checkpoint", lambda *_, **__: seen.append(rotate(root, policy).deleted))
    load(tmp_path / "b", linear(), f"{tmp_path}/a/step_00000001")
    assert seen == [()]
    assert rotate(root, policy).deleted == ("step_00000001",)


# --- falling back


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose newest checkpoint is damaged."""
    flip(save_steps(tmp_path, 4, 5, 6) / "step_00000006", torch.full((2, 3), 6.0))
    return tmp_path


def test_a_damaged_newest_checkpoint_falls_back_to_the_previous_one_only_on_request(run, caplog):
    live = linear()
    with CheckpointManager(run) as manager, caplog.at_level(logging.WARNING, logger="ckptkit"):
        with pytest.raises(CorruptCheckpointError) as caught:
            manager.load(live)
        advice = ("model.weight", ".distcp", f"ckptkit verify {run}/step_00000006", "_00000005", "fallback='previous'")
        assert [words for words in advice if words not in str(caught.value)] == []
        report = manager.load(live, fallback="previous")
        assert report is not None and report.step == 5 and value_of(live) == 5
        assert "step_00000006 is damaged, falling back" in caplog.text
        assert "step_00000006 is damaged, falling back" in report.notes[0]
        with pytest.raises(CheckpointExistsError):
            manager.save(5, live)
        manager.save(6, live)  # replaces the damaged one
        assert manager.load(live) is not None
        with pytest.raises(CheckpointExistsError):
            manager.save(6, live)


def unreadable(record: Path, patch: pytest.MonkeyPatch) -> None:
    refuse(patch, inventory, "find_record", errno.EIO, when=lambda store, path: path.startswith(record.parent.name))


LOST: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], Any], str]] = {
    "cut short": (lambda record, _: record.write_bytes(record.read_bytes()[:-20]), ""),
    "of another step": (
        lambda record, _: shutil.copy(record.parent.parent / "step_00000005" / record.name, record),
        "record is that of step_00000005",
    ),
    "of a later version": (
        lambda record, _: record.write_bytes(record.read_bytes().replace(b"ckptkit/1", b"ckptkit/9")),
        "",
    ),
    "unreadable": (unreadable, ""),
}


@pytest.mark.parametrize("lost", LOST)
def test_an_unreadable_or_foreign_record_of_the_newest_checkpoint_is_an_error(run, lost, monkeypatch):
    lose, said = LOST[lost]
    lose(run / "step_00000006" / "checkpoint.json", monkeypatch)
    with CheckpointManager(run) as manager:
        with pytest.raises(CorruptCheckpointError, match=rf"(?s)step_00000006.*{said}.*fallback='previous'"):
            manager.load(linear())
        for which, options in (("latest", {"fallback": "previous"}), ("latest~1", {})):
            assert manager.load(linear(), which, **options).step == 5  # type: ignore[union-attr]
        assert manager.latest() == 5


def test_without_an_older_checkpoint_a_fallback_raises_the_first_damage(tmp_path):
    flip(save_steps(tmp_path, 6) / "step_00000006", torch.full((2, 3), 6.0))
    with pytest.raises(CorruptCheckpointError, match="no older checkpoint"):
        load(tmp_path, linear(), fallback="previous")
    with pytest.raises(CorruptCheckpointError, match="no older checkpoint"):
        load(tmp_path, linear())
