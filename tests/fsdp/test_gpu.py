"""What only a device shows: run where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests.fsdp import models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def strategy(request):
    config = FSDPConfig(mixed_precision="bf16", offload="optimizer", **getattr(request, "param", {}))
    with FSDPStrategy(config, max_norm=1.0) as made:
        yield made


def one_step(strategy, model, optimizer, index):
    loss = models.loss_of(model, models.batch(index).cuda())
    strategy.backward(loss, model, optimizer)
    assert strategy.optimizer_step(optimizer, model)


def device_tensors(optimizer):
    return [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]


@pytest.mark.parametrize("strategy", [{}, {"precision": "master"}], indirect=True)
def test_a_run_on_a_device_offloads_saves_and_goes_on(strategy, tmp_path):
    model = strategy.prepare_model(models.made(models.tied))
    assert all(p.device.type == "cuda" for p in model.parameters())
    assert "gloo" in dist.get_backend_config()  # checkpoints don't go through the device
    optimizer = strategy.create_optimizer(model)
    one_step(strategy, model, optimizer, 0)
    strategy.maybe_offload_optimizer(optimizer)
    assert all(t.to_local().device.type == "cpu" for t in device_tensors(optimizer))
    strategy.save_ckpt(model, str(tmp_path), optimizer=optimizer)
    strategy.maybe_load_optimizer(optimizer)
    assert all(t.to_local().device.type == "cuda" for t in device_tensors(optimizer))
    one_step(strategy, model, optimizer, 1)
    resumed = strategy.prepare_model(models.made(models.tied, seed=5))
    other = strategy.create_optimizer(resumed)
    strategy.load_ckpt(resumed, str(tmp_path), optimizer=other)
    one_step(strategy, resumed, other, 1)
    weights, expected = models.weights(resumed), models.weights(model)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_model_leaves_the_device_and_comes_back(strategy):
    model = strategy.prepare_model(models.made(models.untied))
    before = models.weights(model)
    strategy.offload_model(model)
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())
    strategy.reload_model(model)
    assert all(p.to_local().device.type == "cuda" for p in model.parameters())
    after = models.weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
