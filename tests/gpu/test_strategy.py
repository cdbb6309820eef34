"""FSDPStrategy on one rank: over NCCL on a device, over gloo on the CPU."""

import math

import pytest
import torch
import torch.distributed as dist

from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests.dtensors import local
from tests.fsdp import models
from tests.fsdp.test_numerics import check

# Without masters of parameters on the host, which are refused.
RUNS = [(precision, offload) for precision in ("mixed", "master") for offload in ("none", "optimizer", "params")][:-1]


def moments(optimizer):
    return [local(v) for s in optimizer.state.values() for k, v in sorted(s.items()) if k != "step"]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_checkpoints_communicate_over_gloo(device):
    with FSDPStrategy(FSDPConfig(device=device)):
        assert "gloo" in dist.get_backend_config()
        assert ("nccl" in dist.get_backend_config()) == (device == "cuda")


@pytest.mark.parametrize("config", [
    {}, {"activation_checkpointing": True}, {"offload": "params"},
    *({"mixed_precision": dtype, **more} for more in ({}, {"precision": "master"}) for dtype in ("bf16", "fp16")),
], ids=lambda config: ",".join(f"{k}={v}" for k, v in config.items()) or "plain")  # fmt: skip
def test_a_run_equals_plain_torch(device, config):
    loss = {"bf16": 0.03, "fp16": 0.005}.get(config.get("mixed_precision", ""))
    config = {**config, "device": device}
    with FSDPStrategy(FSDPConfig.from_dict(config)):
        tolerances = {} if loss is None else {"loss": loss, "norm": 0.05, "weight": 0.05}
        check([models.run(config, models.untied, device=device, max_norm=1.0)], **tolerances)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("precision", "offload"), RUNS)
def test_a_saved_and_loaded_run_continues_bit_for_bit(device, precision, dtype, offload, tmp_path):
    scale = {"initial_loss_scale": 2.0**10} if dtype == "fp16" else {}
    config = FSDPConfig(precision=precision, mixed_precision=dtype, offload=offload, device=device, **scale)
    host = "cpu" if offload == "params" else device
    with FSDPStrategy(config, max_norm=1.0) as strategy:
        model = strategy.prepare_model(models.made(models.tied))
        assert {p.device.type for p in model.parameters()} == {host}
        optimizer = strategy.create_optimizer(model)
        assert models.step(strategy, model, optimizer, 0, device=device)
        strategy.maybe_offload_optimizer(optimizer)
        assert {v.device.type for v in moments(optimizer)} == {device if offload == "none" else "cpu"}
        strategy.save_ckpt(model, str(tmp_path), optimizer=optimizer)
        strategy.maybe_load_optimizer(optimizer)
        assert {v.device.type for v in moments(optimizer)} == {host}
        assert models.step(strategy, model, optimizer, 1, device=device)

        resumed = strategy.prepare_model(models.made(models.tied, seed=5))
        other = strategy.create_optimizer(resumed)
        strategy.load_ckpt(resumed, str(tmp_path), optimizer=other)
        assert models.step(strategy, resumed, other, 1, device=device)
        assert same(models.weights(resumed).values(), models.weights(model).values())
        assert same(moments(other), moments(optimizer))


@pytest.mark.parametrize("precision", ["mixed", "master"])
def test_an_overflow_in_fp16_skips_the_step_and_halves_the_configured_scale(device, precision):
    scale = {"initial_loss_scale": 2.0**10, "loss_scale_hysteresis": 1}
    with FSDPStrategy(FSDPConfig(precision=precision, mixed_precision="fp16", device=device, **scale)) as strategy:
        model = strategy.prepare_model(models.made(models.untied))
        optimizer = strategy.create_optimizer(model)
        scaler = strategy.grad_scaler(optimizer)
        assert models.step(strategy, model, optimizer, 0, device=device)
        assert scaler.scale == 2.0**10
        before = [*models.weights(model).values(), *(v.clone() for v in moments(optimizer))]
        assert not models.step(strategy, model, optimizer, 1, math.inf, device=device)
        assert scaler.scale == 2.0**9
        assert same(before, [*models.weights(model).values(), *moments(optimizer)])
        assert models.step(strategy, model, optimizer, 3, device=device)


def test_a_model_moves_to_the_host_and_back(device):
    with FSDPStrategy(FSDPConfig(device=device)) as strategy:
        model = strategy.prepare_model(models.made(models.untied))
        before, given = models.weights(model), [model, None, "text"]
        assert strategy.offload_model(given) is given
        assert {local(p).device.type for p in model.parameters()} == {"cpu"}
        assert strategy.reload_model(model) is model
        assert {local(p).device.type for p in model.parameters()} == {device}
        assert same(before.values(), models.weights(model).values())
