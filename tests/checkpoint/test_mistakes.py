"""Wrong calls raise at once: the error shows what was passed and what is expected, and nothing is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import UsageError

BEST = RetentionPolicy(max_num=1, keep_best=("loss", "min"))
Call = Callable[[CheckpointManager, Any], Any]


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def changed(name: str, value: Any) -> TrainState:
    """Return a state that was valid when it was created."""
    state = TrainState(model=linear())
    setattr(state, name, value)
    return state


@pytest.mark.parametrize("call", [
    lambda manager, state: manager.save(1, state),
    lambda manager, state: manager.save_async(1, state),
    lambda manager, state: manager.load(state),
], ids=["save", "save_async", "load"])  # fmt: skip
@pytest.mark.parametrize(("state", "words"), [
    ({"model": linear(), "optimizer": None}, r"type dict, expected TrainState\(model=\.\.\., optimizer=\.\.\.\)"),
    (linear(), r"type Linear, expected TrainState\(model=model, optimizer=optimizer\)"),
    (linear().state_dict(), "type OrderedDict, expected TrainState"),
    (1, "state is 1, expected TrainState.* The step comes first"),
    (changed("model", linear().state_dict()), "Pass the model itself, not its class or its state dict"),
    (changed("optimizer", torch.optim.AdamW), "Pass the optimizer itself, not its class"),
], ids=["dict", "module", "state dict", "swapped", "dict of tensors", "class"])  # fmt: skip
def test_a_state_that_is_not_a_train_state_is_refused(tmp_path: Path, call: Call, state: Any, words: str) -> None:
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(UsageError, match=words):
        call(manager, state)
    assert not (tmp_path / "run").exists()


def test_keep_best_without_metrics_is_refused_at_the_first_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", retention=BEST) as manager:
        with pytest.raises(UsageError, match=r"by 'loss', but this save has no metrics\. Pass metrics=\{'loss'"):
            manager.save(1, TrainState(model=linear()))
        assert manager.latest() is None
        manager.save(1, TrainState(model=linear()), metrics={})  # not evaluated yet
        manager.save(2, TrainState(model=linear()), metrics={"loss": 1.0})
        manager.save(3, TrainState(model=linear()))  # the metrics are known: a job that ends may have none


def test_a_missing_keep_best_metric_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, retention=BEST) as manager, caplog.at_level(logging.WARNING, "ckptkit"):
        for step in (1, 2):
            manager.save(step, TrainState(model=linear()), metrics={"val_loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "keep_best ranks checkpoints by 'loss', but the metrics of step 1 are val_loss"
    ]


def test_a_save_logs_one_line_and_a_load_report_names_what_it_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear()
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(tmp_path) as manager, caplog.at_level(logging.INFO, "ckptkit"):
        manager.save(1, TrainState(model=model, optimizer=optimizer))
        assert len(caplog.records) == 1
        report = manager.load(TrainState(model=model))
        assert report is not None
        assert "1 skipped (optimizer)" in report.line()
        caplog.clear()
        manager.load(TrainState(model=model, optimizer=optimizer), include=["bias"], optimizer="skip")
    lines = [record.getMessage() for record in caplog.records]
    assert "not loaded (not included): model.weight" in lines
