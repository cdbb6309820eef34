"""A sharded run computes the same values as a single process."""

import pytest
import torch
import torch.distributed as dist

from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests.fsdp import models
from tests.ranks import on_ranks

# Sums over ranks have another order than in one process: a few ulps of fp32 in the losses. AdamW divides by the root
# of the second moment, so for a gradient near zero one ulp moves the parameter by more.
LOSS, NORM, WEIGHT = 2e-6, 2e-5, 5e-5


def check(results: list[dict[str, object]], *, loss: float = LOSS, norm: float = NORM, weight: float = WEIGHT) -> None:
    for result in results:
        losses, norms, weights = result["plain"]
        sharded_losses, sharded_norms, sharded_weights = result["sharded"]
        assert sharded_losses == pytest.approx(losses, abs=loss)
        assert sharded_norms == pytest.approx(norms, rel=norm)
        assert sharded_weights.keys() == weights.keys()
        for name in weights:
            assert torch.allclose(sharded_weights[name].float(), weights[name], rtol=0, atol=weight), name


@pytest.mark.parametrize("strategy", models.STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_strategy_equals_a_single_process(ranks, strategy, world_size):
    config = {"sharding_strategy": strategy, **models.STRATEGIES[strategy]}
    if world_size == 1:
        config.pop("shard", None)
    check(ranks.run(models.run, world_size, config, models.untied))


@pytest.mark.parametrize("build", [models.tied, models.frozen, models.lora, models.llama, models.tied_llama])
@pytest.mark.parametrize("config", [
    {}, {"sharding_strategy": "HYBRID_SHARD", "shard": 2}, {"wrap_lm_head": True, "auto_wrap_policy": "BLOCKS"},
], ids=["1d", "hsdp", "heads apart"])  # fmt: skip
def test_models_of_every_kind_equal_a_single_process(ranks, build, config):
    check(ranks.run(models.run, 4, config, build))


def run(options):
    return models.run({}, models.untied, **options)


@pytest.mark.parametrize(("norm_type", "limit"), [(2.0, 0.05), (1.0, 0.05), (float("inf"), 0.005)])
def test_clipping_equals_a_single_process(ranks, norm_type, limit):
    results = ranks.run(run, 2, {"max_norm": limit, "norm_type": norm_type})
    assert results[0]["plain"][1][0] > limit  # clipping takes effect
    check(results)


@pytest.mark.parametrize("config", [
    {"activation_checkpointing": True}, {"forward_prefetch": True}, {"forward_prefetch": 2},
    {"backward_prefetch": "BACKWARD_POST"}, {"backward_prefetch": "NO_PREFETCH"}, {"backward_prefetch": 2},
    {"force_sum_reduction_for_comms": True}, {"keep_last_block": True}, {"reshard_after_forward": False},
    {"reshard_after_forward": 2}, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 300},
    {"auto_wrap_policy": "NO_WRAP"}, {"offload": "params"},
], ids=lambda config: ",".join(f"{key}={value}" for key, value in config.items()))  # fmt: skip
def test_options_for_speed_and_memory_change_no_values(ranks, config):
    check(ranks.run(models.run, 4, config, models.untied))


def _gradients(config):
    strategy = FSDPStrategy(FSDPConfig.from_dict(config))
    model = strategy.prepare_model(models.made(models.untied))
    models.loss_of(model, models.batch(0).chunk(dist.get_world_size())[dist.get_rank()]).backward()
    return {name: models.whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("world_size", "config"), [
    (1, {}), (2, {}), (2, {"sharding_strategy": "NO_SHARD"}), (4, {"sharding_strategy": "HYBRID_SHARD", "shard": 2}),
])  # fmt: skip
@pytest.mark.parametrize("force", [False, True])
@on_ranks("world_size")
def test_gradients_are_divided_by_the_factor_instead_of_the_world_size(world_size, config, force):
    mean, summed, half = (
        _gradients({**config, **factor, "force_sum_reduction_for_comms": force})
        for factor in ({}, {"gradient_divide_factor": 1.0}, {"gradient_divide_factor": 2.0 * world_size})
    )
    for name, gradient in mean.items():  # exact, because the factors are powers of two
        assert gradient.any()
        assert torch.equal(summed[name], gradient * world_size), name
        assert torch.equal(half[name], gradient / 2), name


@on_ranks(1)
def test_a_factor_by_which_torch_would_divide_twice_is_refused():
    model = models.made(models.untied).double()
    with pytest.raises(
        UsageError, match=r"'.*' is reduced in float64, and torch applies the factor twice.*reduce_dtype"
    ):
        FSDPStrategy(FSDPConfig(gradient_divide_factor=2.0)).prepare_model(model)
