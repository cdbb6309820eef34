"""Saved with one strategy and state-dict type, loaded with another: the values are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

from ckptkit import CheckpointManager, TrainState, reshard
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests.checkpoint import states
from tests.checkpoint.jobs import numbers
from tests.fsdp import models
from tests.ranks import on_ranks


def prepared(strategy: str, kind: str, seed: int) -> Any:
    config = {"sharding_strategy": strategy, "state_dict_type": kind, **models.STRATEGIES[strategy]}
    return models.prepared(config, models.tied, seed=seed, lr=1e-2)


def save(folder: Path, strategy: str, kind: str) -> dict[str, Any]:
    facade, model, optimizer = prepared(strategy, kind, 1)
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, folder, optimizer=optimizer)
    return numbers(model, optimizer)


def check_load(folder: Path, strategy: str, kind: str, saved: dict[str, Any]) -> None:
    facade, model, optimizer = prepared(strategy, kind, 2)
    facade.load_ckpt(model, folder, optimizer)
    assert states.different(numbers(model, optimizer), saved) == []


@pytest.mark.parametrize(("source", "target"), [
    ("FULL_SHARD", "HYBRID_SHARD"),
    ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
    ("HYBRID_SHARD", "NO_SHARD"),
    ("HYBRID_SHARD_ZERO2", "FULL_SHARD"),
    ("NO_SHARD", "SHARD_GRAD_OP"),
])  # fmt: skip
def test_any_strategy_loads_what_another_saved(ranks, tmp_path, source, target):
    saved = ranks.run(save, 4, tmp_path, source, "SHARDED")[0]
    ranks.run(check_load, 4, tmp_path, target, "SHARDED", saved)


PLAIN = {"fp32": {}, "bf16": {"mixed_precision": "bf16"}, "hybrid": {"sharding_strategy": "HYBRID_SHARD", "shard": 1}}


def save_for_torch(folder: Path, config: str) -> dict[str, Any]:
    facade, model, optimizer = models.prepared(PLAIN[config], models.tied, seed=1, lr=1e-2, weight_decay=0.1)
    assert len(optimizer.param_groups) > 1
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, folder, optimizer=optimizer, step=1)
    return numbers(model, optimizer)


def load_with_torch(folder: Path, config: str, saved: dict[str, Any]) -> None:
    _, model, optimizer = models.prepared(PLAIN[config], models.tied, seed=2, lr=1e-3, weight_decay=0.2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "step_00000001")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert states.different(numbers(model, optimizer), saved) == []
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    assert "embed.weight" in optimizer.param_groups[0]["param_names"]


@pytest.mark.parametrize("config", PLAIN)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_plain_torch_restores_a_model_and_an_optimizer_with_named_parameters(ranks, tmp_path, config, saved, loaded):
    numbers_saved = ranks.run(save_for_torch, saved, tmp_path, config)[0]
    ranks.run(load_with_torch, loaded, tmp_path, config, numbers_saved)


@pytest.mark.parametrize("source", ["FULL", "SHARDED", "LOCAL"])
def test_runs_of_every_state_dict_type_load_each_other(ranks, tmp_path, source):
    saved = ranks.run(save, 4, tmp_path, "FULL_SHARD", source)[0]
    for target in ("FULL", "SHARDED", "LOCAL"):
        ranks.run(check_load, 4, tmp_path, "FULL_SHARD", target, saved)


def options_prepared(kind: str, seed: int, columns: bool, precision: str) -> Any:
    """Return weights sharded by columns; a trained norm and a frozen layer whole on every rank."""
    config = FSDPConfig(
        state_dict_type=kind,
        mixed_precision="bf16" if precision == "master" else None,
        precision=precision,
        ignored_params=("layers.0.norm.weight", "layers.1.down.*"),
    )
    facade = FSDPStrategy(config)
    model = models.made(models.untied, seed)
    model.layers[1].down.requires_grad_(False)
    if precision == "master":
        model.layers[0].norm.to(torch.bfloat16)  # ignored parameters are not cast
        model.layers[1].down.to(torch.bfloat16)
    shared = model.layers[0].norm.weight
    shared.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad, dist.ReduceOp.AVG))
    facade.prepare_model(model, shard_placement_fn=lambda p: Shard(1) if columns and p.ndim == 2 else None)
    assert model.layers[0].norm.weight is shared
    assert {p.placements[0] for p in model.parameters() if p.ndim == 2 and isinstance(p, DTensor)} == {
        Shard(1 if columns else 0)
    }
    return facade, model, facade.create_optimizer(model, lr=1e-2)


def save_options(folder: str, *how: Any) -> Any:
    facade, model, optimizer = options_prepared(how[0], 1, *how[1:])
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, folder, optimizer=optimizer)
    saved = numbers(model, optimizer)
    return saved, models.train_sharded(model, facade, optimizer, range(2, 4)), numbers(model, optimizer)


def load_options(folder: str, which: str, *how: Any) -> Any:
    facade, model, optimizer = options_prepared("SHARDED", 2, *how)
    facade.load_ckpt(model, folder, optimizer, which=which)
    loaded = numbers(model, optimizer)
    return loaded, models.train_sharded(model, facade, optimizer, range(2, 4)), numbers(model, optimizer)


@pytest.mark.parametrize("precision", ["mixed", "master"])
@pytest.mark.parametrize("kind", ["SHARDED", "FULL", "LOCAL"])
def test_runs_with_ignored_parameters_and_column_shards_resume_on_any_number_of_ranks(ranks, tmp_path, kind, precision):
    folder = tmp_path / "run"
    first = ranks.run(save_options, 2, str(folder), kind, True, precision)
    saved = first[0][0]
    assert "layers.0.norm.weight.exp_avg" in saved
    for found, (loaded, losses, after) in zip(
        first, ranks.run(load_options, 2, str(folder), "latest", True, precision), strict=True
    ):  # the same ranks and shards continue bit for bit
        assert states.different(loaded, saved) == []
        assert losses == found[1]
        assert states.different(after, found[2]) == []
    which = "latest"
    if kind == "LOCAL":
        which = str(tmp_path / "resharded")
        reshard(str(folder / "step_00000002"), which, world_size=3)
    for size, columns in ((2, False), (3, True)):
        for loaded, _, _ in ranks.run(load_options, size, str(folder), which, columns, precision):
            assert set(states.different(loaded, saved)) <= {"groups"}, (size, columns)  # a group for each layout


def load_large(folder: str) -> tuple[int, int]:
    facade = FSDPStrategy()
    model = facade.prepare_model(nn.Linear(64, 4096, bias=False))
    report = states.load(folder, TrainState(model=model, rng=False), verify=False)
    return report.nbytes, next(model.parameters()).to_local().nbytes


def test_each_rank_reads_its_own_part_of_a_full_checkpoint(ranks, tmp_path):
    states.save(tmp_path, TrainState(model=nn.Linear(64, 4096, bias=False), rng=False), state_dict_type="full")
    for read, held in ranks.run(load_large, 4, str(tmp_path)):
        assert held <= read <= held * 1.1


@on_ranks(2)
def test_a_deferred_optimizer_takes_the_same_first_step_as_an_uninterrupted_run(tmp_path):
    facade, model, optimizer = models.prepared(build=models.lora, seed=1, lr=1e-2)
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, tmp_path, optimizer=optimizer)
    expected = models.train_sharded(model, facade, optimizer, range(2, 4))

    state = TrainState(model=facade.prepare_model(models.made(models.lora, 7)), rng=False)
    with CheckpointManager(tmp_path) as manager:
        handle = manager.load(state, optimizer="deferred").deferred
        assert handle is not None
        assert handle.pending
        state.optimizer = facade.create_optimizer(state.model, lr=0.5)
        handle.apply()
    assert not handle.pending
    assert all(isinstance(s["exp_avg"], DTensor) for s in state.optimizer.state.values())
    assert models.train_sharded(state.model, facade, state.optimizer, range(2, 4)) == expected
