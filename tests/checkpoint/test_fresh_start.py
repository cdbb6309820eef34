"""A new run starts only in an empty root: anything that may be a lost run is an error."""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CheckpointManager, open_checkpoint
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    RankFailedError,
    StorageError,
    UsageError,
)
from ckptkit.storage import Store, open_store
from ckptkit.storage.local import LocalStore
from tests.checkpoint.saving import fork, save
from tests.checkpoint.states import linear, save_steps
from tests.patches import refuse


def load(root: str | Path, fallback: Any = "error", save: int | None = None, **options: Any) -> int | None:
    """Load with a manager of its own; return the step, and save one if asked."""
    with CheckpointManager(root, **options) as manager:
        report = manager.load(linear(), fallback=fallback)
        assert (report is None) == (manager.latest() is None)
        if save is not None:
            manager.save(save, linear())
        return None if report is None else report.step


def without_record(step: Path) -> None:
    (step / "checkpoint.json").unlink()


def damaged_record(step: Path) -> None:
    (step / "checkpoint.json").write_bytes((step / "checkpoint.json").read_bytes()[:100])


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def linked(step: Path) -> None:
    step.rename(step.parent.parent / "elsewhere")
    step.symlink_to(step.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("tag", "harm"),
    [
        (None, without_record), (None, empty), (None, lambda step: step.rename(step.parent / "step_1")), (None, linked),
        ("last", without_record), ("last", damaged_record),
    ],
)  # fmt: skip
def test_a_run_without_a_committed_step_is_an_error_unless_start_fresh_allows_it(tmp_path, tag, harm):
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, linear(), tag=tag)
    harm(root / (tag or "step_00000001"))
    for ask in (lambda manager: manager.load(linear()), lambda manager: manager.latest()):
        with CheckpointManager(root) as manager, pytest.raises(IncompleteCheckpointError) as raised:
            ask(manager)
        assert (tag or "step_") in str(raised.value)
        assert "start_fresh='if_none_committed'" in str(raised.value)
    assert load(root, start_fresh="if_none_committed") is None


@pytest.mark.parametrize(("resumed", "step", "warned"), [
    (None, 5, True), (None, 40, False), (10, 11, False),
], ids=["starts over", "goes on", "rolled back on purpose"])  # fmt: skip
def test_a_job_that_saves_below_the_latest_step_without_a_load_is_warned_once(tmp_path, caplog, resumed, step, warned):
    root = save_steps(tmp_path, 10, 20, 30)
    with CheckpointManager(root) as manager:
        if resumed is not None:
            manager.load(linear(), resumed)
        manager.save(step, linear())
        manager.save(step + 1, linear())
    said = [text for text in caplog.messages if "did not load step_00000030" in text]
    assert len(said) == warned and all(f"continues from step {step}" in text for text in said)


def test_a_save_after_a_fresh_start_moves_a_half_copy_aside(tmp_path, caplog):
    root = save_steps(tmp_path, 1)
    without_record(root / "step_00000001")
    before = {path.name: path.read_bytes() for path in (root / "step_00000001").iterdir()}
    assert load(root, start_fresh="if_none_committed", save=1) is None
    assert load(root) == 1
    (aside,) = root.glob("step_00000001.aside-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert str(aside.name) in caplog.text and "unchanged" not in caplog.text
    assert open_checkpoint(str(root)).url == str(root / "step_00000001")  # commands do not treat the other as newer


def test_loading_an_older_checkpoint_names_a_half_copied_one(tmp_path, caplog):
    root = save_steps(tmp_path, 1, 2)
    without_record(root / "step_00000002")
    assert load(root) == 1
    assert any("step_00000002" in text and "no checkpoint.json" in text for text in caplog.messages)
    with CheckpointManager(root) as manager, pytest.raises(CheckpointExistsError, match="in the way"):
        manager.save(2, linear())
    assert load(root, save=2) == 1
    assert load(root) == 2


@pytest.fixture(params=["disk", "s3"])  # S3 only at night
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    """A URL and its storage options."""
    if request.param == "disk":
        return str(tmp_path / "run"), None
    return f"s3://bucket/{request.node.originalname}", request.getfixturevalue("s3")


def test_after_a_fallback_the_damaged_step_can_be_saved_again(place):
    url, options = place
    save_steps(url, 1, 2, storage_options=options)
    open_store(url, storage_options=options).write("step_00000002/checkpoint.json", b"{", overwrite=True)
    with pytest.raises(CorruptCheckpointError):
        load(url, storage_options=options)
    assert load(url, "previous", save=2, storage_options=options) == 1
    assert load(url, storage_options=options) == 2


def test_an_unreadable_newest_checkpoint_is_not_called_damaged(tmp_path, monkeypatch):
    root, record = save_steps(tmp_path, 1, 2), "step_00000002/checkpoint.json"
    refuse(monkeypatch, LocalStore, "read", errno.EACCES, when=lambda store, path, *_: path == record)
    for fallback in ("error", "previous"):
        with pytest.raises(StorageError, match=r"checkpoint.json cannot be read: .*Permission denied"):
            load(root, fallback)


def test_leftovers_of_a_killed_first_save_are_no_error(place, caplog):
    def die(store: Store) -> None:
        store.settle()  # waits for pending writes
        os.kill(os.getpid(), 9)

    caplog.set_level(logging.INFO)
    url, options = place
    if options is None:
        Path(url).mkdir()
    fork(lambda say: save(open_store(url, storage_options=options), 1, before=die))
    assert any("__0_0.distcp" in item.path for item in open_store(url, storage_options=options).list(recursive=True))
    assert load(url, storage_options=options) is None
    assert "left by an uncommitted save" in caplog.text
    save_steps(url, 1, storage_options=options)
    assert load(url, storage_options=options) == 1


def test_a_root_that_is_a_file_or_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for root in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "link"):
        with pytest.raises(UsageError, match=r"file|link"):
            load(root)


def test_a_new_run_beside_similar_names_logs_a_suggestion(tmp_path, caplog):
    save_steps(tmp_path / "all" / "first_run", 1)
    save_steps(tmp_path / "all" / "second_run", 1)
    assert load(tmp_path / "all" / "first_rum") is None
    assert "Did you mean" in caplog.text and "first_run" in caplog.text
    caplog.clear()
    assert load(tmp_path / "all") is None
    assert "first_run" in caplog.text and "second_run" in caplog.text


def test_start_fresh_never_raises_in_an_empty_run(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="never"):
        load(tmp_path / "run", start_fresh="never")
    assert load(save_steps(tmp_path / "run", 1), start_fresh="never") == 1


@pytest.mark.parametrize("but", ["checkpoint.json", ".ckptkit"])
def test_a_copy_without_its_records_is_an_error_on_an_object_store(s3, but):
    source, target = f"s3://bucket/from{len(but)}", f"s3://bucket/to{len(but)}"
    save_steps(source, 1, storage_options=s3)
    old, store = (open_store(url, storage_options=s3) for url in (source, target))
    for item in old.list(recursive=True):
        if but not in item.path:
            store.write(item.path, old.read(item.path))
    if but == ".ckptkit":
        store.delete(["step_00000001/checkpoint.json"])
    with pytest.raises(IncompleteCheckpointError, match="step_00000001"):
        load(target, storage_options=s3)
    assert load(target, storage_options=s3, start_fresh="if_none_committed") is None


def test_a_bucket_that_does_not_exist_is_an_error_and_an_empty_prefix_a_new_run(s3):
    assert load("s3://bucket/nothing", storage_options=s3) is None
    with pytest.raises(RankFailedError, match="bucket does not exist"):
        load("s3://nobucket/run", storage_options=s3)
