"""Tensor parallelism under FSDP2."""

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel

from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from ckptkit.fsdp.tensor_parallel import tensor_parallel_plan
from tests.fsdp import models
from tests.fsdp.test_numerics import check
from tests.ranks import on_ranks


def _run(build, plan=None, max_norm=0.0):
    return models.run({"tp": 2}, build, tp_plan=plan, max_norm=max_norm)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_transformers_plan_equals_a_single_process(ranks, world_size):
    results = ranks.run(_run, world_size, models.llama, None, 0.1)
    check(results)
    both, one = ("shard", "tp"), ("shard",)
    expected = {"model.layers.0.mlp.up_proj.weight": both, "lm_head.weight": both, "model.norm.weight": one}
    assert expected.items() <= results[0]["meshes"].items()


def test_a_tied_head_is_not_sharded_by_tp_and_stays_tied(ranks):
    results = ranks.run(_run, 2, models.tied_llama)
    check(results)
    assert results[0]["meshes"]["model.embed_tokens.weight"] == ("shard",)


PLAN = {"layers.*.up": ColwiseParallel(), "layers.*.down": "rowwise"}


def test_a_custom_plan_equals_a_single_process(ranks):
    check(ranks.run(_run, 4, models.untied, PLAN))


@on_ranks(2)
def test_impossible_plans_are_refused_by_name():
    strategy = FSDPStrategy(FSDPConfig(tp=2))
    for plan, message in (
        (None, "has no tensor-parallel plan"),
        ({"layers.*.sideways": "colwise"}, r"'layers\.\*\.sideways', which matches no module"),
        ({"layers.*.up": "packed_colwise"}, r"'layers\.\*\.up' the style 'packed_colwise'"),
        ({"lm_head": "colwise"}, r"'lm_head' splits dimension 0 of its weight \[19, 12\] over tp=2"),
        ({"embed": "embedding_rowwise"}, r"'embed' splits dimension 0"),
    ):
        with pytest.raises(UsageError, match=message):
            strategy.prepare_model(models.untied(), tp_plan=plan)


def test_the_plan_of_a_transformers_model_starts_at_its_root():
    plan = tensor_parallel_plan(models.llama())
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert plan["lm_head"] == "colwise_gather_output"
