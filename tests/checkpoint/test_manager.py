"""The manager as a run uses it: saving, keeping and loading."""

import logging
import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from ckptkit import CheckpointManager, RetentionPolicy, TrainState, open_checkpoint
from ckptkit.checkpoint import manager as manager_module
from ckptkit.errors import CheckpointExistsError, UsageError
from tests.checkpoint import jobs
from tests.checkpoint.saving import leftovers, steps
from tests.checkpoint.states import linear, load, refusal, save, value_of
from tests.patches import failing
from tests.ranks import on_ranks, run_ranks

BEST = RetentionPolicy(max_num=1, keep_best=("loss", "min"))
NEWEST = RetentionPolicy(max_num=1)


def test_ranks_of_torchrun_that_are_not_connected_are_refused(tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"torchrun started 2 ranks.*init_process_group"):
        CheckpointManager(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("tag", "step"), [(None, 1), ("final", 2)])
def test_saving_an_existing_step_or_tag_needs_overwrite(tmp_path, tag, step):
    with CheckpointManager(tmp_path, retention=NEWEST) as manager:
        manager.save(1, linear(1), tag=tag)
        first = manager.list()
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            manager.save(step, linear(2), tag=tag)
        assert manager.list() == first and leftovers(tmp_path) == []
        manager.save(step, linear(3), tag=tag, overwrite=True)
        (second,) = manager.list()
        assert second.step == step and second.save_id != first[0].save_id
    load(tmp_path, loaded := linear(), tag or 1)
    assert value_of(loaded) == 3
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("integer", [np.int64, torch.tensor])
def test_a_step_may_be_an_integer_of_numpy_or_torch(tmp_path, integer):
    with CheckpointManager(tmp_path, on_signal="save") as manager:
        manager.save(integer(5), linear(1))
        handle = manager.save_async(integer(7), linear(2))
        assert (type(handle.step), handle.result().step) == (int, 7)
        with pytest.raises(UsageError, match="expected an int"):
            manager.save(np.float64(9), linear(3))
        manager.delete(integer(5))
        assert manager.load(linear(), integer(7)).step == 7
        assert [record.step for record in manager.list()] == [7]


@on_ranks(2)
def test_a_call_during_a_save_waits_for_it_except_in_on_commit(tmp_path):
    seen: list[int] = []
    with CheckpointManager(tmp_path, on_commit=lambda _: seen.append(manager.list()[-1].step)) as manager:
        for step, newest in ((1, manager.latest), (2, lambda: manager.list()[-1].step)):
            manager.save_async(step, linear(step))
            assert newest() == step
    assert seen == [1, 2]


# --- what is logged


@pytest.mark.parametrize(
    ("saved", "kept", "policy", "denied", "said"),
    [
        (
            (100, 200, 300),
            2,
            {"max_num": 2},
            False,
            "keeping 2/2 · freed step 100 (0 B): older than the 2 newest (max_num)",
        ),
        ((2, 4, 5), 3, {"max_num": 1, "keep_every": 2}, False, "keeping 3 (1 newest, 2 exempt)"),
        ((1, 2, 3), 3, {"max_num": 1}, True, "keeping 3 (1 newest, 0 exempt, 2 could not be deleted)"),
    ],
)
def test_a_save_logs_an_info_line_with_what_is_kept_and_a_debug_line_of_phases(
    tmp_path, caplog, monkeypatch, saved, kept, policy, denied, said
):
    if denied:
        monkeypatch.setattr("ckptkit.checkpoint.run.delete.drop", failing(PermissionError(13, "Permission denied")))
    with CheckpointManager(tmp_path, retention=RetentionPolicy(**policy)) as manager:
        for step in saved:
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger="ckptkit"):
                manager.save(step, linear())
    assert [r.name for r in caplog.records if r.levelno == logging.INFO] == [manager_module.__name__]
    line, phases = [r.getMessage() for r in caplog.records if r.name == manager_module.__name__]
    assert phases.startswith(f"step {saved[-1]}: plan ") and ", commit " in phases
    parts = re.sub(r"\([\d.]+ kB\)", "(0 B)", line).split(" · ", 4)
    assert parts[0] == f"saved step {saved[-1]}" and parts[2].startswith("stall ") and parts[3].endswith("/s")
    assert parts[4] == said
    assert steps(tmp_path) == list(saved[-kept:])


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


@on_ranks(2)
def test_a_closed_manager_refuses_every_call_and_does_not_use_the_training_group(tmp_path):
    state = jobs.make("1d").state()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        report = manager.load(state, optimizer="deferred")
    manager.close()
    assert report is not None and report.deferred is not None
    calls: list[Callable[[], Any]] = [
        manager.latest, manager.list, manager.wait, manager.interrupted, report.deferred.apply,
        lambda: manager.save(2, state), lambda: manager.save_async(2, state), lambda: manager.load(state),
        lambda: manager.delete(1),
    ]  # fmt: skip
    assert ["is closed" in refusal(call) for call in calls] == [True] * 9


@pytest.mark.parametrize("value", [object(), {"x": math.nan}, {1: 2}, threading.Lock()])
def test_client_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path, value):
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(UsageError, match="client_state"):
        manager.save_async(1, linear(), client_state=value)
    assert not list(tmp_path.rglob("*step*"))


# --- another storage


def test_a_custom_storage_receives_all_writes(kind):
    state, fresh, url = linear(1), linear(), f"memory://custom/{kind}"
    state.optimizer = torch.optim.AdamW(state.model.parameters())
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, state)
        (record,) = manager.list()
    assert (open_checkpoint(f"{url}/step_00000001")["model.weight"].numpy() == 1).all()
    there = {path: file.getbuffer().nbytes for path, file in MemoryFileSystem.store.items()}
    assert sum(size for path, size in there.items() if f"/{record.save_id}/" in path) == record.total_bytes
    assert any(path.endswith(f"{kind}/step_00000001/checkpoint.json") for path in there)
    load(url, fresh)
    assert value_of(fresh) == 1


# --- ranks


def die(url: str) -> None:
    manager = CheckpointManager(url, timeout_s=20)
    if dist.get_rank() == 1:
        manager._saver.publish = lambda *_: os._exit(1)
    text = refusal(lambda: manager.save(1, jobs.make("1d").state()))
    Path(url, f"seen-{dist.get_rank()}").write_text(text)


def test_a_rank_that_dies_fails_all_others_in_bounded_time(tmp_path):
    with pytest.raises(AssertionError):
        run_ranks(die, 3, str(tmp_path), timeout=60)
    (text,) = {path.read_text() for path in tmp_path.glob("seen-*")}
    assert "rank 1" in text
    assert not list(tmp_path.glob("step_*"))


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
