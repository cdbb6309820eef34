"""The contract that torchtitan's trainer has with its checkpointer, kept by ours."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.integrations.torchtitan import TorchtitanCheckpointer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from torchtitan_checkpointer import Schedulers, TrainState, main, train

from tests.checkpoint.test_foreign import check_optimizer, check_weights, run_of

ZOO = Path(__file__).parents[1] / "zoo"


def of(state, folder, **config):
    return TorchtitanCheckpointer(
        None, [state.model], [state.optimizer], Schedulers(state.optimizer), {"train_state": TrainState()}, config,
        url=str(folder),
    )  # fmt: skip


def small():
    model = torch.nn.Linear(2, 2)
    return type("Small", (), {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_the_calls_are_those_of_torchtitan():
    calls = {name: list(inspect.signature(getattr(TorchtitanCheckpointer, name)).parameters)[1:] for name in
             ("save", "load", "maybe_wait_for_staging", "close")}  # fmt: skip
    assert calls == {"save": ["curr_step", "last_step"], "load": ["step"], "maybe_wait_for_staging": [], "close": []}
    made = list(inspect.signature(TorchtitanCheckpointer).parameters)
    assert made[:9] == [
        "dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "checkpoint_config", "sd_adapter",
        "base_folder", "ft_manager",
    ]  # fmt: skip


def test_a_resumed_run_is_bit_equal():
    assert main() == 0


def test_it_saves_at_the_interval_and_at_the_last_step_and_keeps_the_latest(tmp_path):
    train(str(tmp_path), 8)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000006", "step_00000008"]


def test_load_tells_whether_there_was_a_checkpoint(tmp_path):
    checkpointer = of(small(), tmp_path, interval=1)
    assert checkpointer.load() is False
    checkpointer.save(1)
    assert checkpointer.load() is True
    assert checkpointer.load(step=1) is True
    assert checkpointer.load(step=2) is False
    checkpointer.close()


def test_a_checkpointer_that_is_off_does_nothing(tmp_path):
    checkpointer = of(small(), tmp_path / "none", enable=False)
    checkpointer.save(1, last_step=True)
    assert checkpointer.load() is False
    checkpointer.close()
    assert not (tmp_path / "none").exists()


def test_torchtitans_own_checkpoint_is_adopted_with_its_optimizer(tmp_path):
    name = "dcp_torchtitan_like_w2"
    state = run_of(name)
    old = str(ZOO / name / "step-2")
    checkpointer = of(state, tmp_path, initial_load_path=old, initial_load_model_only=False)
    assert checkpointer.load() is True
    checkpointer.close()
    check_weights(state.model, name)
    check_optimizer(state.optimizer, state.model, name)


def test_pipeline_stages_are_refused(tmp_path):
    parts = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    with pytest.raises(UsageError, match="pipeline stages"):
        TorchtitanCheckpointer(None, parts, [], None, {}, {}, url=str(tmp_path))
