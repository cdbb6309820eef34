"""Rotation deletes in an order that a kill cannot break, and never deletes foreign files."""

import contextlib
import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import RetentionPolicy, TrainState, list_run
from ckptkit.checkpoint.run import attempt, commit, delete, unnamed
from ckptkit.checkpoint.run.commit import clean_leftovers
from ckptkit.checkpoint.run.delete import delete_checkpoint, rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.run.pins import pin_forever, unpin
from ckptkit.errors import CheckpointExistsError, CheckpointNotFoundError, RankFailedError
from ckptkit.formats.own.record import find_record
from ckptkit.formats.replaceable import may_be_saved
from ckptkit.offline.prune import prune
from ckptkit.storage import open_store, publish
from ckptkit.storage.local import LocalStore
from tests.checkpoint import states
from tests.checkpoint.full_disk import disk
from tests.checkpoint.saving import check, fork, killed_at, leftovers, save
from tests.patches import after, before, die, failing


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    return tmp_path


def turn(root: Path, **policy: Any) -> list[int]:
    rotate(open_store(str(root)), RetentionPolicy(**policy))
    return check(root)


def test_rotation_follows_the_policy_and_logs_each_deletion_with_its_reason(run, caplog):
    with caplog.at_level(logging.INFO, logger="ckptkit"):
        done = rotate(open_store(str(run)), RetentionPolicy(max_num=3))
    assert done.deleted == ("step_00000001",) and check(run) == [2, 3, 4] and leftovers(run) == []
    assert [r.message for r in caplog.records if "deleted" in r.message] == [
        f"deleted {run}/step_00000001 (3.0 kB): older than the 3 newest (max_num)"
    ]


def test_foreign_files_survive_ten_saves(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_5_best")
    for name in ("tensorboard", "global_step7", "step_00000099", "outside"):
        (tmp_path / name).mkdir()
    for name in ("tensorboard/events", "outside/x"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "step_00000050").symlink_to(tmp_path / "outside")
    foreign = {"step_5_best", "tensorboard", "global_step7", "step_00000099", "outside", "step_00000050"}
    before = {p: p.stat().st_mtime_ns for name in foreign for p in (tmp_path / name).rglob("*")}
    for step in range(2, 12):
        save(tmp_path, step)
        turn(tmp_path, max_num=1)
    assert set(os.listdir(tmp_path)) == foreign | {"step_00000011", ".ckptkit", "latest"}
    assert {p: p.stat().st_mtime_ns for name in foreign for p in (tmp_path / name).rglob("*")} == before


# --- foreign files in a checkpoint's directory


def theirs(step: Path, *, odd: bool = False) -> dict[str, bytes]:
    """Put foreign files into a checkpoint's directory, with `odd` also under odd names; return their contents."""
    files = {"eval/results.json": b"{}", "eval/deep/plot.png": b"png", "notes.txt": b"mine"}
    files |= {"odd\\name\n/deep/x": b"mine", "odd\x7f.txt": b"mine"} if odd else {}
    for name, data in files.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_bytes(data)
    return files


def held(step: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(step)): p.read_bytes() for p in step.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if name != ".ckptkit-deleted.json"}


@pytest.fixture(params=["swap", "no swap"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The operations that the file system supports."""
    if request.param == "no swap":
        monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    return str(request.param)


def test_a_deletion_does_not_touch_foreign_files(run, way):
    step = run / "step_00000001"
    foreign = {"empty", "link", "dangling", *(name.split("/")[0] for name in theirs(step, odd=True))}
    for folder in (step / "empty", run / "target"):
        folder.mkdir()
    (run / "target" / "x").write_bytes(b"1")
    (step / "link").symlink_to(run / "target")
    (step / "dangling").symlink_to(run / "nowhere")
    before = {p: p.lstat().st_ino for p in step.rglob("*") if p.relative_to(step).parts[0] in foreign}
    inside = os.open(step / "eval", os.O_RDONLY)
    assert delete_checkpoint(open_store(str(run)), "step_00000001", reason="test")
    os.close(os.open("late.json", os.O_WRONLY | os.O_CREAT, dir_fd=inside))  # an evaluation that is still running
    os.close(inside)
    assert (step / "eval" / "late.json").exists()
    (step / "eval" / "late.json").unlink()
    assert {path: path.lstat().st_ino for path in before} == before and (run / "target" / "x").exists()
    assert {path.name for path in step.iterdir()} == foreign | {".ckptkit-deleted.json"}
    assert check(run) == [2, 3, 4] and leftovers(run) == []


def test_a_checkpoint_with_foreign_files_can_be_deleted_on_a_full_disk(tmp_path):
    with disk(tmp_path / "disk", "ext4", 4 << 10) as place:
        for step in (1, 2):
            save(place, step, nbytes=300_000)
        files = theirs(place / "step_00000001")
        with open(place / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        done = rotate(open_store(str(place)), RetentionPolicy(max_num=1))
        assert not done.failed and check(place) == [2] and held(place / "step_00000001") == files
        assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize > 250_000


def test_a_save_that_replaces_a_step_during_its_deletion_keeps_its_files(tmp_path, monkeypatch):
    save(tmp_path, 1)
    files = theirs(tmp_path / "step_00000001")
    saved: list[Any] = []
    before(monkeypatch, delete, "give_up", lambda *_: (monkeypatch.undo(), saved.append(save(tmp_path, 1, nbytes=500))))
    delete_checkpoint(open_store(str(tmp_path)), "step_00000001", reason="test")
    assert find_record(open_store(str(tmp_path / "step_00000001"))) == saved[0]
    assert files.items() <= held(tmp_path / "step_00000001").items()
    assert list_checkpoints(open_store(str(tmp_path))).committed and leftovers(tmp_path) == []


def test_ls_and_prune_dry_run_name_the_files_that_stay(run, caplog):
    files = theirs(run / "step_00000001")
    planned = prune(str(run), policy=RetentionPolicy(max_num=2), dry_run=True)
    assert sorted(planned.kept_files) == sorted(f"step_00000001/{name}" for name in files)
    done = prune(str(run), policy=RetentionPolicy(max_num=2))
    assert sorted(done.kept_files) == sorted(planned.kept_files) and not done.failed
    assert "eval/results.json" in caplog.text and "does not name" in caplog.text
    row = next(row for row in list_run(str(run)).to_json()["checkpoints"] if row["name"] == "step_00000001")
    assert row["state"] == "skipped" and sorted(row["kept_files"]) == sorted(files)
    assert "was deleted" in row["why"] and "eval/results.json" in row["why"]
    prune(str(run), policy=RetentionPolicy(max_num=1))  # the foreign files stay
    assert held(run / "step_00000001") == files and held(run / "step_00000002") == {}


@pytest.mark.parametrize("by", ["rotate", "prune", "delete", "overwrite"])
def test_a_file_that_appears_during_the_deletion_of_its_directory_survives(run, way, by, monkeypatch):
    step, root = run / "step_00000001", open_store(str(run))

    def late(found: Any, store: Any, path: str, record: Any) -> None:
        if path == step.name and not (step / "eval").exists():
            theirs(step)

    for module in (unnamed, delete):
        after(monkeypatch, module, "unnamed_files", late)
    removals: dict[str, Any] = {
        "overwrite": lambda: save(root, 1, overwrite=True),
        "delete": lambda: delete_checkpoint(root, step.name, reason="test"),
        "prune": lambda: prune(str(run), policy=RetentionPolicy(max_num=3)),
        "rotate": lambda: rotate(root, RetentionPolicy(max_num=3)),
    }
    removals[by]()
    monkeypatch.undo()
    assert {"notes.txt", "eval/results.json", "eval/deep/plot.png"} <= held(step).keys()
    assert list_checkpoints(root).find(step.name) is None or by == "overwrite"
    save(root, 1, overwrite=True)  # the name is free
    assert (step / "notes.txt").exists() and leftovers(run) == []


def _delete_1(root: str) -> None:
    delete_checkpoint(open_store(root), "step_00000001", reason="test")


def _overwrite_1(root: str) -> None:
    save(root, 1, overwrite=True)


def _write_there(run: Path) -> None:
    with publish.stage(str(run / "step_00000001"), replaceable=lambda *_: None, overwrite=True) as store:
        store.write("x", b"copied")


def _fail_to_clean_up(run: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "give_up", failing(PermissionError(errno.EACCES, "Permission denied")))
        clean_leftovers(open_store(str(run)))


AT_THE_END = [(delete, "give_up"), (attempt, "give_up")]  # only the foreign files are left, in a hidden directory
KILLS: dict[str, tuple[Callable[[str], Any], list[tuple[Any, str]]]] = {  # a removal, and the calls at which it dies
    "deletion": (_delete_1, AT_THE_END),
    "overwrite": (_overwrite_1, AT_THE_END),
    "overwrite that moves": (_overwrite_1, [(LocalStore, "move")]),
}
THEN: dict[str, Callable[[Path], Any]] = {
    "saved again": lambda run: save(run, 1, overwrite=True),
    "written to": _write_there,
    "not cleaned up at once": _fail_to_clean_up,
}


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_removal_loses_no_foreign_file_whatever_happens_next(run, kill, then):
    step, files = run / "step_00000001", theirs(run / "step_00000001")
    remove, places = KILLS[kill]
    fork(lambda say: ([setattr(*place, die) for place in places], remove(str(run))))
    assert leftovers(run) != []
    THEN[then](run)
    clean_leftovers(open_store(str(run)))
    assert files.items() <= held(step).items() and leftovers(run) == []
    assert then != "written to" or held(step)["x"] == b"copied"


def test_two_processes_that_finish_one_deletion_lose_no_foreign_file(run, monkeypatch):
    step, root = run / "step_00000001", open_store(str(run))
    files = theirs(step)

    def late(store: LocalStore, path: str, kept: Any) -> None:  # another process has just done the next step
        (run / path / "checkpoint.json").rename(run / path / ".ckptkit-deleted.json")

    before(monkeypatch, unnamed, "_delete_own", late)
    with pytest.raises(FileNotFoundError):
        delete_checkpoint(root, step.name, reason="test")
    monkeypatch.undo()
    clean_leftovers(root)
    assert held(step) == files and leftovers(run) == []


def test_an_overwrite_on_nfs_is_saved_even_if_the_old_checkpoint_cannot_be_removed(run, monkeypatch, caplog):
    rename, files = LocalStore.rename, theirs(run / "step_00000001")
    monkeypatch.setattr(publish, "_exchange", lambda first, second: False)

    def taken(store: LocalStore, source: str, target: str) -> None:
        if "@" in source:  # a prune has put the foreign files back
            monkeypatch.setattr(LocalStore, "rename", rename)
            clean_leftovers(store)
        rename(store, source, target)

    monkeypatch.setattr(LocalStore, "rename", taken)
    record = save(run, 1, overwrite=True)
    assert "step_00000001@" in caplog.text and list_checkpoints(open_store(str(run))).latest.record == record
    save(run, 5)
    assert find_record(open_store(str(run / "step_00000001"))) == record and leftovers(run) == []
    assert files.items() <= held(run / "step_00000001").items()


def _killed_between_the_renames(root: str, before_both: bool) -> None:
    publish._exchange = lambda first, second: False
    before(pytest.MonkeyPatch(), LocalStore, "rename", lambda store, source, target: "@" in source and die())
    if before_both:
        attempt.take_name = die
    save(root, 1, overwrite=True, nbytes=500)


@pytest.mark.parametrize("then", ["save", "prune"])
@pytest.mark.parametrize("before_both", [True, False])
def test_an_overwrite_on_nfs_that_was_killed_after_its_commit_is_finished(run, before_both, then):
    code, _ = fork(lambda say: _killed_between_the_renames(str(run), before_both))
    assert code == -signal.SIGKILL
    found = list_checkpoints(open_store(str(run)))
    assert sorted(item.name for item in found.committed) == [f"step_0000000{step}" for step in (1, 2, 3, 4)]
    assert [item.reason[:15] for item in found.skipped] == ["it was replaced"] * before_both
    if then == "save":
        save(run, 5)
    else:
        plan, done = (prune(str(run), policy=RetentionPolicy(max_num=9), dry_run=dry).cleaned for dry in (True, False))
        assert len(plan) == len(done) and any(".trash-step_00000001" in path for path in done)
        assert ("step_00000001" in plan) is before_both
    assert sorted(check(run))[:4] == [1, 2, 3, 4] and leftovers(run) == []
    assert (run / "step_00000001" / "shards" / "__0_0.distcp").stat().st_size == 500


def test_a_foreign_directory_that_appears_during_an_overwrite_is_left_unchanged(run):
    step = run / "step_00000009"
    with pytest.raises(CheckpointExistsError, match="appeared during the save"):
        save(run, 9, overwrite=True, before=lambda _: theirs(step))
    assert held(step).keys() == theirs(step).keys() and check(run) == [1, 2, 3, 4] and leftovers(run) == []


def test_foreign_files_that_cannot_be_moved_back_stay_and_do_not_block_saves(run, tmp_path_factory, caplog):
    trash = run / ".trash-step_00000001-0123456789abcdef"
    shutil.copytree(run / "step_00000001", trash)
    theirs(trash)
    (run / "step_00000001" / "eval").symlink_to(tmp_path_factory.mktemp("outside"))
    for step in (5, 6):
        save(run, step)
    (said,) = [record.message for record in caplog.records if "could not be removed" in record.message]
    assert trash.name in said and "eval leads through a symbolic link" in said
    assert (trash / "eval" / "results.json").exists() and list_checkpoints(open_store(str(run))).latest.step == 6
    (run / "step_00000001" / "eval").unlink()
    save(run, 7)
    assert (run / "step_00000001" / "eval" / "results.json").exists() and leftovers(run) == []


def test_foreign_files_in_a_dead_staging_directory_stay_and_are_logged_once(run, caplog):
    def fail(store: LocalStore) -> None:
        store.write("notes.txt", b"mine")
        store.write("shards/.__5_0.distcp.0123456789ab.part", b"half written")
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RankFailedError):
        save(run, 5, before=fail)
    for step in (6, 7):
        save(run, step)
    (name,) = leftovers(run)
    assert [path.name for path in (run / name).iterdir()] == ["notes.txt"]
    assert sum(name in record.message and "notes.txt" in record.message for record in caplog.records) == 1
    found = list_checkpoints(open_store(str(run)))
    assert found.foreign == (name,) and found.abandoned == found.in_progress == ()


@pytest.mark.parametrize("tag", [None, "best-so-far"])
def test_a_deleted_step_with_foreign_files_can_be_saved_again(tmp_path, way, tag):
    save(tmp_path, 1, tag=tag)
    place = tmp_path / (tag or "step_00000001")
    files = theirs(place, odd=True)
    delete_checkpoint(open_store(str(tmp_path)), place.name, reason="test")
    assert held(place) == files and list_checkpoints(open_store(str(tmp_path))).committed == ()
    record = save(tmp_path, 1, tag=tag)
    assert find_record(open_store(str(place))) == record and leftovers(tmp_path) == []
    assert files.items() <= held(place).items()
    save(tmp_path, 1, tag=tag, overwrite=True, nbytes=500)
    assert files.items() <= held(place).items()
    delete_checkpoint(open_store(str(tmp_path)), place.name, reason="test")
    assert held(place) == files and leftovers(tmp_path) == []


def test_a_kill_at_any_operation_of_a_deletion_loses_no_foreign_file(tmp_path, way, no_grace):
    for nth in range(3 if way == "swap" else 6, 1000, 7):
        root = tmp_path / str(nth)
        for step in (1, 2):
            save(root, step)
        files = theirs(root / "step_00000001")
        killed = killed_at(nth, _delete_1, str(root))
        store = open_store(str(root))
        clean_leftovers(store, leased=True)
        found = [item.name for item in list_checkpoints(store).committed]
        assert found in (["step_00000002"], ["step_00000001", "step_00000002"]), nth
        if "step_00000001" in found:
            delete_checkpoint(store, "step_00000001", reason="test")
        assert held(root / "step_00000001") == files and leftovers(root) == [], nth
        save(root, 3)
        if not killed:
            break
    assert nth >= 20


def test_pinned_checkpoints_stay_until_they_are_unpinned(run):
    pin_forever(str(run / "step_00000001"), "the paper")
    assert turn(run, max_num=1) == [1, 4]
    assert unpin(str(run / "step_00000001")) and not unpin(str(run / "step_00000001"))
    assert turn(run, max_num=1) == [4]


def test_a_checkpoint_that_another_rotation_deletes_meanwhile_is_not_a_failure(run, monkeypatch):
    plan = delete.plan_rotation

    def meanwhile(*args: Any, **options: Any) -> Any:
        found = plan(*args, **options)
        monkeypatch.undo()
        assert turn(run, max_num=2) == [3, 4]
        return found

    monkeypatch.setattr(delete, "plan_rotation", meanwhile)
    done = rotate(open_store(str(run)), RetentionPolicy(max_num=1))
    assert done.deleted == ("step_00000003",) and not done.failed and done.left == {"step_00000004"}


def test_a_failure_to_delete_is_reported_and_not_raised(run, monkeypatch, caplog):
    monkeypatch.setattr(LocalStore, "delete_tree", failing(OSError(errno.EIO, "Input/output error")))
    done = rotate(open_store(str(run)), RetentionPolicy(max_num=3))
    assert list(done.failed or {}) == ["step_00000001"] and "Input/output error" in caplog.text
    monkeypatch.undo()
    assert check(run) == [2, 3, 4]  # it is no longer listed, though its files still exist
    assert len(clean_leftovers(open_store(str(run)))) == 1 and leftovers(run) == []


@pytest.mark.parametrize("name", ["step_00000009", "tensorboard", "../x", "", ".ckptkit", "copy"])
def test_only_a_committed_checkpoint_can_be_deleted(run, name):
    (run / "tensorboard").mkdir()
    shutil.copytree(run / "step_00000001", run / "copy")
    with pytest.raises((CheckpointNotFoundError, ValueError)):
        delete_checkpoint(open_store(str(run)), name, reason="test")
    assert (run / "tensorboard").is_dir() and (run / "copy").is_dir()


def test_the_staging_directory_of_a_running_save_is_not_removed(run):
    save(run, 9, before=lambda store: clean_leftovers(open_store(str(run))) == [] or 1 / 0)
    assert check(run)[-1] == 9


# --- names of files that a save writes


@pytest.mark.parametrize("models", [1, 2])
def test_every_file_that_a_save_writes_is_recognized(tmp_path, kind, models):
    side = tmp_path / "side"
    (side / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "LICENSE", "additional_chat_templates/tool.jinja"):
        (side / name).write_text("{}")
    parts = {name: nn.Linear(9, 3) for name in ("actor", "critic")[:models]}
    state = states.trained(parts["actor"]) if models == 1 else TrainState(model=parts)
    state.extra["x"] = torch.ones(3)
    states.save(tmp_path / "run", state, state_dict_type=kind, side_files=side, max_shard_size="100B")
    step = tmp_path / "run" / "step_00000001"
    files = [str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()]
    assert len(files) > 5 and [path for path in files if not may_be_saved(path)] == []


@pytest.mark.parametrize("name", ["notes.txt", "eval/results.json", "state.safetensors", "plots/loss.png", "run.sh"])
def test_files_that_no_save_writes_are_not_recognized(name):
    assert not may_be_saved(name)


def test_a_checkpoint_that_replaced_the_one_to_delete_at_the_last_moment_stays(tmp_path, monkeypatch):
    save(tmp_path, 1)
    after(monkeypatch, delete, "unnamed_files", lambda *_: (monkeypatch.undo(), save(tmp_path, 1, overwrite=True)))
    with pytest.raises(CheckpointExistsError, match="was replaced by another process"):
        delete_checkpoint(open_store(str(tmp_path)), "step_00000001", reason="a test")
    assert check(tmp_path) == [1]
