"""The manager as a run uses it: saving, keeping and loading."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from ckptkit import CheckpointManager, RetentionPolicy, TrainState
from ckptkit.checkpoint import manager as manager_module
from ckptkit.checkpoint.mapping import open_checkpoint
from ckptkit.errors import CheckpointExistsError, CheckpointNotFoundError, UsageError
from tests.checkpoint import jobs
from tests.checkpoint.saving import leftovers, steps
from tests.checkpoint.states import failing, linear, load, on_all, refusal, save, unchanged, value_of
from tests.ranks import on_ranks, run_ranks

BEST = RetentionPolicy(max_num=1, keep_best=("loss", "min"))
NEWEST = RetentionPolicy(max_num=1)


def test_an_empty_run_has_nothing_to_load(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.load(linear()) is None
        assert manager.latest() is None
        assert manager.list() == []


def test_ranks_of_torchrun_that_are_not_connected_are_refused(tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"torchrun started 2 ranks.*init_process_group"):
        CheckpointManager(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("which", "value"), [("latest", 3), ("latest~1", 2), (1, 1), ("best", 2), ("final", 3)])
def test_a_checkpoint_can_be_named_by_step_tag_latest_and_best(tmp_path, which, value):
    with CheckpointManager(tmp_path, retention=RetentionPolicy(keep_best=("loss", "min", 1))) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
            manager.save(step, linear(step), metrics={"loss": loss}, tag="final" if step == 3 else None)
    report = load(tmp_path, loaded := linear(), which)
    assert value_of(loaded) == loaded.step == report.step == value


@pytest.mark.parametrize(("tag", "step"), [(None, 1), ("final", 2)])
def test_saving_an_existing_step_or_tag_needs_overwrite(tmp_path, tag, step):
    with CheckpointManager(tmp_path, retention=NEWEST) as manager:
        manager.save(1, linear(1), tag=tag)
        with pytest.raises(CheckpointExistsError):
            manager.save(step, linear(2), tag=tag)
        manager.save(step, linear(3), tag=tag, overwrite=True)
        assert [record.step for record in manager.list()] == [step]
    load(tmp_path, loaded := linear(), tag or 1)
    assert value_of(loaded) == 3
    assert leftovers(tmp_path) == []


# --- what is logged


def test_a_save_logs_an_info_line_and_a_debug_line_of_phases(tmp_path, caplog):
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=2)) as manager:
        for step in (100, 200, 300):
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger=manager_module.__name__):
                manager.save(step, linear())
    line, phases = [r.getMessage() for r in caplog.records if r.name == manager_module.__name__]
    assert phases.startswith("step 300: plan ") and ", commit " in phases
    parts = line.split(" · ")
    assert parts[0] == "saved step 300"
    assert parts[2].startswith("stall ")
    assert parts[3].endswith("/s")
    assert parts[4].startswith("keeping 2/2, freed step 100 (")
    assert steps(tmp_path) == [200, 300]


@pytest.mark.parametrize(("error", "has_traceback"), [(KeyError("x"), True), (OSError("the disk is gone"), False)])
def test_a_rotation_that_fails_does_not_fail_the_save_and_a_bug_is_logged_with_its_place(
    tmp_path, caplog, monkeypatch, error, has_traceback
):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(manager_module, "rotate", fails)
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager:
        manager.save(1, linear())
    (said,) = [r for r in caplog.records if "rotation failed" in r.getMessage()]
    assert str(error) in said.getMessage() and bool(said.exc_info) is has_traceback
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("saved", "policy", "denied", "said"),
    [
        ((2, 4, 5), {"keep_every": 2}, False, "keeping 3 (1 newest, 2 exempt)"),
        ((1, 2, 3), {}, True, "keeping 3 (1 newest, 0 exempt, 2 could not be deleted)"),
    ],
)
def test_the_log_line_counts_newest_exempt_and_undeletable_checkpoints(
    tmp_path, caplog, monkeypatch, saved, policy, denied, said
):
    if denied:
        monkeypatch.setattr("ckptkit.checkpoint.run.delete.drop", failing(PermissionError(13, "Permission denied")))
    caplog.set_level(logging.INFO, logger=manager_module.__name__)
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1, **policy)) as manager:
        for step in saved:
            manager.save(step, linear())
    assert said in caplog.text
    assert steps(tmp_path) == list(saved)


def test_a_save_and_a_load_log_a_line_with_what_was_skipped(tmp_path, caplog):
    state = linear()
    state.optimizer = torch.optim.AdamW(state.model.parameters())
    with CheckpointManager(tmp_path) as manager, caplog.at_level(logging.INFO, "ckptkit"):
        manager.save(1, state)
        assert len(caplog.records) == 1
        report = manager.load(TrainState(model=state.model))
        assert report is not None and str(report).endswith("1 skipped: optimizer (not in the training state)")
        caplog.clear()
        manager.load(state, include=["bias"], optimizer="skip")
    (message,) = caplog.messages
    assert message.endswith(' · 2 skipped: model.weight (not included); optimizer (optimizer="skip")')


# --- what is kept


def test_the_checkpoint_that_a_run_was_resumed_from_is_never_deleted(tmp_path):
    save(tmp_path, linear())
    with CheckpointManager(tmp_path, retention=NEWEST) as manager:
        manager.load(linear())
        for step in (2, 3):
            manager.save(step, linear())
        assert steps(tmp_path) == [1, 3]
        with pytest.raises(UsageError, match="resumed from"):
            manager.delete(1)
        manager.save(4, linear())
        with pytest.raises(CheckpointNotFoundError):
            manager.delete(3)


def test_keep_best_without_metrics_is_refused_at_the_first_save(tmp_path):
    with CheckpointManager(tmp_path / "run", retention=BEST) as manager:
        with pytest.raises(UsageError, match=r"by 'loss', but this save has no metrics\. Pass metrics=\{'loss'"):
            manager.save(1, linear())
        assert manager.latest() is None
        manager.save(1, linear(), metrics={})  # not evaluated yet
        manager.save(2, linear(), metrics={"loss": 1.0})
        manager.save(3, linear())  # the metrics are known: a job that ends may have none


def test_a_missing_keep_best_metric_is_warned_about_once(tmp_path, caplog):
    with CheckpointManager(tmp_path, retention=BEST) as manager, caplog.at_level(logging.WARNING, "ckptkit"):
        for step in (1, 2):
            manager.save(step, linear(), metrics={"val_loss": 1.0})
    assert caplog.messages == ["keep_best ranks checkpoints by 'loss', but step 1 has only the metrics: val_loss"]


# --- wrong calls raise at once, and nothing is written


CALLS: dict[str, Callable[[CheckpointManager, Any], Any]] = {
    "save": lambda manager, state: manager.save(1, state),
    "save_async": lambda manager, state: manager.save_async(1, state),
    "load": lambda manager, state: manager.load(state),
    "latest": lambda manager, state: manager.latest(),
    "list": lambda manager, state: manager.list(),
    "wait": lambda manager, state: manager.wait(),
    "delete": lambda manager, state: manager.delete(1),
    "interrupted": lambda manager, state: manager.interrupted(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_manager_refuses_every_call(tmp_path, call):
    manager = CheckpointManager(save(tmp_path / "run", linear()))
    manager.close()
    manager.close()
    with pytest.raises(UsageError, match="is closed"):
        CALLS[call](manager, linear())


@pytest.mark.parametrize("value", [object(), {"x": math.nan}, {1: 2}, threading.Lock()])
def test_client_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path, value):
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(UsageError, match="client_state"):
        manager.save_async(1, linear(), client_state=value)
    assert not list(tmp_path.rglob("*step*"))


# --- checkpoints of others


class Shelf(MemoryFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """An in-memory file system."""

    protocol = "shelf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


@pytest.fixture
def shelf() -> Iterator[dict[str, Any]]:
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    yield Shelf.store
    Shelf.store.clear()


def test_a_custom_storage_receives_all_writes(shelf, kind):
    state, fresh = linear(1), linear()
    state.optimizer = torch.optim.AdamW(state.model.parameters())
    with CheckpointManager("shelf://runs/a", state_dict_type=kind) as manager:
        manager.save(1, state)
        (record,) = manager.list()
    assert (open_checkpoint("shelf://runs/a/step_00000001")["model.weight"].numpy() == 1).all()
    there = {path: file.getbuffer().nbytes for path, file in shelf.items()}
    assert sum(size for path, size in there.items() if f"/{record.save_id}/" in path) == record.total_bytes
    assert any(path.endswith("step_00000001/checkpoint.json") for path in there)
    load("shelf://runs/a", fresh)
    assert value_of(fresh) == 1


# --- ranks


def signalled(url: str, number: int) -> list[bool]:
    seen = []
    before = signal.getsignal(number)
    with CheckpointManager(url, on_signal=(number,)) as manager:
        manager.save_async(1, jobs.make("1d").state())  # agreeing on signals works during a save
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), number)
            seen.append(manager.interrupted())
    assert signal.getsignal(number) == before
    return seen


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGRTMIN + 3], ids=["named", "unnamed"])
def test_a_signal_on_one_rank_is_seen_by_all_at_the_same_step(tmp_path, number):
    assert run_ranks(signalled, 2, str(tmp_path), number) == [[False, True, True]] * 2


@pytest.mark.parametrize(("what", "rank"), [("extra.bad", "rank 1"), ("client_state", "")])
@on_ranks(3)
def test_a_state_that_one_rank_cannot_save_fails_on_all_before_any_write(tmp_path, what, rank):
    alone = dist.get_rank() == 1
    extra = {"bad": object() if alone and what == "extra.bad" else 1}
    client_state = threading.Lock() if not alone and what == "client_state" else None
    with CheckpointManager(tmp_path / "run") as manager:
        text = on_all(refusal(lambda: manager.save(1, TrainState(extra=extra), client_state=client_state)))
    assert what in text and rank in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("half_loaded", [False, True])
@on_ranks(2)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(tmp_path, half_loaded):
    if half_loaded:  # left by another object of this process
        TrainState(model=(_kept := torch.nn.Linear(1, 1))).half_loaded = "file:///elsewhere"
    save(tmp_path, jobs.make("1d").state())
    state = jobs.make("1d", start=5).state()
    if dist.get_rank() == 1:
        state = TrainState(model=state.model, extra={"only here": 1})
    with unchanged(state):
        assert "rank [1]" in on_all(refusal(lambda: load(tmp_path, state)))


def die(url: str) -> None:
    manager = CheckpointManager(url, timeout_s=20)
    original = manager._saver.publish

    def publish(*args: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(1)
        return original(*args)

    manager._saver.publish = publish
    text = refusal(lambda: manager.save(1, jobs.make("1d").state()))
    Path(url, f"seen-{dist.get_rank()}").write_text(text)


def test_a_rank_that_dies_fails_all_others_in_bounded_time(tmp_path):
    with pytest.raises(AssertionError):
        run_ranks(die, 3, str(tmp_path), timeout=60)
    (text,) = {path.read_text() for path in tmp_path.glob("seen-*")}
    assert "rank 1" in text
    assert not list(tmp_path.glob("step_*"))


@on_ranks(2)
def test_a_closed_manager_does_not_use_the_training_group(tmp_path):
    job = jobs.make("1d")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, job.state())
        report = manager.load(job.state(), optimizer="deferred")
    assert report is not None and report.deferred is not None
    for call in (manager.latest, manager.list, manager.wait, report.deferred.apply):
        assert "is closed" in refusal(call)


def over_a_file_of_others(root: str, kind: str) -> str:
    with CheckpointManager(root, state_dict_type=kind, timeout_s=20) as manager:
        return refusal(lambda: manager.save(1, linear(), overwrite=True))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sharded", "__1_3.distcp"), ("full", "model-00001-of-00001.safetensors"), ("local", "local_00001.safetensors")],
)
def test_a_save_that_would_replace_a_foreign_file_is_refused(tmp_path, ranks, kind, name):
    step = tmp_path / "step_00000001"
    save(tmp_path, linear(), state_dict_type="local" if kind == "sharded" else "sharded")
    (step / name).write_bytes(b"mine")
    before = os.stat(tmp_path).st_mtime_ns
    (text,) = set(ranks.run(over_a_file_of_others, 2, str(tmp_path), kind))
    assert text.startswith("CheckpointExistsError") and name in text and "Move that file away" in text
    assert os.stat(tmp_path).st_mtime_ns == before  # not even a directory was created
    assert (step / name).read_bytes() == b"mine"
    (step / name).rename(step / "theirs.bin")
    assert ranks.run(over_a_file_of_others, 2, str(tmp_path), kind) == ["", ""]
    assert (step / "theirs.bin").read_bytes() == b"mine"
