"""Saved with one strategy and state-dict type, loaded with another: the values are equal."""

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ckptkit import TrainState
from ckptkit.fsdp import FSDPStrategy
from tests.checkpoint import states
from tests.checkpoint.jobs import numbers
from tests.fsdp import models
from tests.ranks import on_ranks

TYPES = ("FULL", "SHARDED", "LOCAL")
LOADS = [  # what saves, and what loads: a sharding strategy and a state-dict type each
    *((("FULL_SHARD", source), [("FULL_SHARD", target) for target in TYPES]) for source in TYPES),
    (("FULL_SHARD", "SHARDED"), [("HYBRID_SHARD", "SHARDED")]),
    (("SHARD_GRAD_OP", "SHARDED"), [("HYBRID_SHARD_ZERO2", "SHARDED")]),
    (("HYBRID_SHARD", "SHARDED"), [("NO_SHARD", "SHARDED")]),
    (("HYBRID_SHARD_ZERO2", "SHARDED"), [("FULL_SHARD", "SHARDED")]),
    (("NO_SHARD", "SHARDED"), [("SHARD_GRAD_OP", "SHARDED")]),
]


@pytest.mark.parametrize(("source", "targets"), LOADS)
@on_ranks(4)
def test_runs_of_every_strategy_and_state_dict_type_load_each_other(tmp_path, source, targets):
    def prepared(how: tuple[str, str], seed: int) -> Any:
        config = {"sharding_strategy": how[0], "state_dict_type": how[1], **models.STRATEGIES[how[0]]}
        return models.prepared(config, models.tied, seed=seed, lr=1e-2)

    facade, model, optimizer = prepared(source, 1)
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, tmp_path, optimizer=optimizer)
    for target in targets:
        facade, again, other = prepared(target, 2)
        facade.load_ckpt(again, tmp_path, other)
        assert states.different(numbers(again, other), numbers(model, optimizer)) == []


PLAIN = {"fp32": {}, "bf16": {"mixed_precision": "bf16"}, "hybrid": {"sharding_strategy": "HYBRID_SHARD", "shard": 1}}


@pytest.mark.parametrize("config", PLAIN)
@on_ranks(2)
def test_plain_torch_restores_a_model_and_an_optimizer_with_named_parameters(tmp_path, config):
    facade, model, optimizer = models.prepared(PLAIN[config], models.tied, seed=1, lr=1e-2, weight_decay=0.1)
    models.train_sharded(model, facade, optimizer, range(2))
    facade.save_ckpt(model, tmp_path, optimizer=optimizer, step=1)

    _, again, other = models.prepared(PLAIN[config], models.tied, seed=2, lr=1e-3, weight_decay=0.2)
    model_state, optimizer_state = get_state_dict(again, other)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "step_00000001")
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert states.different(numbers(again, other), numbers(model, optimizer)) == []
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(1e-2, 0.1), (1e-2, 0.0)]
    assert "embed.weight" in other.param_groups[0]["param_names"]


@on_ranks(4)
def test_each_rank_reads_its_own_part_of_a_full_checkpoint(tmp_path):
    model = models.made(lambda: nn.Linear(64, 4096, bias=False))
    states.save(tmp_path, TrainState(model=model, rng=False), state_dict_type="full")
    FSDPStrategy().prepare_model(model)
    report = states.load(tmp_path, TrainState(model=model, rng=False), verify=False)
    held = next(model.parameters()).to_local().nbytes
    assert held <= report.nbytes <= held * 1.1
