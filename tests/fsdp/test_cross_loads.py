"""Saved under one strategy and state-dict type, loaded under another: the numbers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state import TrainState
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests.fsdp import models

STRATEGIES = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {},
    "HYBRID_SHARD": {"shard": 2},
    "HYBRID_SHARD_ZERO2": {"shard": 2},
    "NO_SHARD": {},
}


def prepared(strategy: str, kind: str, seed: int) -> Any:
    config = FSDPConfig(sharding_strategy=strategy, state_dict_type=kind, **STRATEGIES[strategy])
    facade = FSDPStrategy(config)
    model = facade.prepare_model(models.made(models.tied, seed))
    return facade, model, facade.create_optimizer(model, lr=1e-2)


def numbers(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    states = {
        f"{names[id(p)]}.{key}": models.whole(value)
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {**models.weights(model), **states}


def save(folder: str, strategy: str, kind: str) -> dict[str, torch.Tensor]:
    facade, model, optimizer = prepared(strategy, kind, 1)
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, folder, optimizer=optimizer)
    return numbers(model, optimizer)


def load(folder: str, strategy: str, kind: str) -> dict[str, torch.Tensor]:
    facade, model, optimizer = prepared(strategy, kind, 2)
    facade.load_ckpt(model, folder, optimizer)
    return numbers(model, optimizer)


def check(ranks: Any, folder: Path, source: tuple[str, str], *targets: tuple[str, str]) -> None:
    saved = ranks.run(save, 4, str(folder), *source)[0]
    for target in targets:
        for loaded in ranks.run(load, 4, str(folder), *target):
            assert loaded.keys() == saved.keys(), target
            assert all(torch.equal(loaded[name], saved[name]) for name in saved), target


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("FULL_SHARD", "HYBRID_SHARD"),
        ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
        ("HYBRID_SHARD", "NO_SHARD"),
        ("HYBRID_SHARD_ZERO2", "FULL_SHARD"),
        ("NO_SHARD", "SHARD_GRAD_OP"),
    ],
)
def test_what_one_strategy_saved_another_loads(ranks: Any, tmp_path: Path, source: str, target: str) -> None:
    check(ranks, tmp_path, (source, "SHARDED"), (target, "SHARDED"))


@pytest.mark.parametrize("source", ["FULL", "SHARDED", "LOCAL"])
def test_what_one_state_dict_type_saved_a_run_of_any_loads(ranks: Any, tmp_path: Path, source: str) -> None:
    targets = [("FULL_SHARD", target) for target in ("FULL", "SHARDED", "LOCAL")]
    check(ranks, tmp_path, ("FULL_SHARD", source), *targets)


def save_large(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 4096, bias=False)
    with CheckpointManager(folder, state_dict_type="full") as manager:
        manager.save(1, TrainState(model=model, rng=False))


def load_large(folder: str) -> tuple[int, int]:
    facade = FSDPStrategy()
    model = facade.prepare_model(nn.Linear(64, 4096, bias=False))
    with CheckpointManager(folder) as manager:
        report = manager.load(TrainState(model=model, rng=False), verify=False)
    return report.nbytes, next(model.parameters()).to_local().nbytes


def test_each_rank_reads_its_own_part_of_a_full_checkpoint(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_large, 1, str(tmp_path))
    for read, held in ranks.run(load_large, 4, str(tmp_path)):
        assert held <= read <= held * 1.1


def lora_steps(facade: FSDPStrategy, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for index in steps:
        loss = models.loss_of(model, models.batch(index))
        facade.backward(loss, model, optimizer)
        assert facade.optimizer_step(optimizer, model)
        losses.append(loss.item())
    return losses


def adapters_trained_on(folder: str) -> tuple[list[float], list[float], bool, bool]:
    """A run of adapters; then the same one resumed, its adapters being made only after the model was loaded."""
    facade = FSDPStrategy()
    model = facade.prepare_model(models.made(models.lora, 1))
    optimizer = facade.create_optimizer(model, lr=1e-2)
    lora_steps(facade, model, optimizer, range(2))
    facade.save_ckpt(model, folder, optimizer=optimizer)
    expected = lora_steps(facade, model, optimizer, range(2, 4))

    state = TrainState(model=facade.prepare_model(models.made(models.lora, 7)), rng=False)
    with CheckpointManager(folder) as manager:
        handle = manager.load(state, optimizer="deferred").deferred
        assert handle is not None
        was_pending = handle.pending
        state.optimizer = facade.create_optimizer(state.model, lr=0.5)
        handle.apply()
    assert all(isinstance(s["exp_avg"], DTensor) for s in state.optimizer.state.values())
    found = lora_steps(facade, state.model, state.optimizer, range(2, 4))
    return expected, found, was_pending, handle.pending


def test_a_deferred_optimizer_makes_the_first_step_that_of_the_run_that_never_stopped(
    ranks: Any, tmp_path: Path
) -> None:
    for expected, found, before, after in ranks.run(adapters_trained_on, 2, str(tmp_path)):
        assert found == expected
        assert (before, after) == (True, False)
