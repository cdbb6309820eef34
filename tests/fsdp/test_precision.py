"""Dtypes of storage, compute and reduction."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy, shard
from ckptkit.fsdp.precision import mixed_precision_policy, offload_policy, set_storage_dtype, storage_dtype
from tests.fsdp import models
from tests.ranks import on_ranks


@pytest.mark.parametrize(("config", "training", "param", "reduce", "storage"), [
    ({}, True, None, torch.float32, None),
    ({"mixed_precision": "bf16"}, True, torch.bfloat16, torch.float32, torch.float32),
    ({"mixed_precision": "fp16", "reduce_dtype": None}, True, torch.float16, None, torch.float32),
    ({"mixed_precision": "bf16", "precision": "master"}, True, torch.bfloat16, torch.float32, torch.bfloat16),
    ({"mixed_precision": "bf16"}, False, None, None, torch.float32),
])  # fmt: skip
def test_parameter_dtypes_follow_the_precision_setting(config, training, param, reduce, storage):
    config = FSDPConfig.from_dict(config)
    policy = mixed_precision_policy(config, is_training=training)
    assert (policy.param_dtype, policy.reduce_dtype) == (param, reduce)
    assert storage_dtype(config) == storage


def test_host_memory_is_pinned_only_for_a_device():
    assert type(offload_policy(FSDPConfig(), "cuda")) is OffloadPolicy
    for device, pinned in (("cpu", False), ("cuda", True)):
        policy = offload_policy(FSDPConfig(offload="params"), device)
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory is pinned


def test_frozen_parameters_and_buffers_keep_their_dtype():
    model = models.frozen()
    model.register_buffer("frequencies", torch.ones(3))
    set_storage_dtype(model.parameters(), torch.bfloat16)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.requires_grad else torch.float32)
    assert model.frequencies.dtype == torch.float32


@on_ranks(2)
def test_dtypes_that_cannot_share_a_unit_are_refused_with_the_reason():
    model = models.untied()
    model.layers[1].up.to(torch.bfloat16)
    words = r"'layers\.1' has trainable parameters of float32.*bfloat16 \(such as 'layers\.1\.up"
    with pytest.raises(UsageError, match=words):
        shard(model, FSDPConfig(auto_wrap_policy="BLOCKS"))
    model = models.lora()
    for layer in model.layers:
        layer.up.base.to(torch.bfloat16)
    with pytest.raises(UsageError, match=r"'layers\.\d' has parameters of .*mixed_precision='bf16'"):
        shard(model, FSDPConfig(auto_wrap_policy="BLOCKS"))
    strategy = FSDPStrategy(FSDPConfig(auto_wrap_policy="BLOCKS", mixed_precision="bf16"))
    strategy.prepare_model(model)
    models.train_sharded(model, strategy, strategy.create_optimizer(model))
    assert model.layers[0].up.base.weight.dtype == torch.bfloat16


@on_ranks(2)
def test_blocks_compute_in_bf16_and_the_model_returns_fp32():
    model = shard(models.untied(), FSDPConfig(mixed_precision="bf16", output_dtype="fp32"))
    inner = []
    model.layers[0].register_forward_hook(lambda module, args, out: inner.append(out.dtype))
    assert (model(models.batch(0)).dtype, inner[0]) == (torch.float32, torch.bfloat16)


class Doubled(nn.Module):
    """fp64 blocks under an fp32 root."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False, dtype=torch.float64) for _ in range(2))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.out(x.to(self.out.weight.dtype))


@pytest.mark.parametrize("config", [{}, {"sharding_strategy": "NO_SHARD"}], ids=["sharded", "replicated"])
@on_ranks(2)
def test_a_model_in_fp64_trains_in_fp64(config):
    generator = torch.Generator().manual_seed(4)
    batch = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64) / 3
    make, options = partial(torch.optim.SGD, lr=0.3), {"max_norm": 0.01, "train_batch_size": 4}
    config = {"auto_wrap_policy": "BLOCKS", **config}
    strategy, model, optimizer = models.prepared(config, lambda: Doubled().double(), factory=make, **options)
    plain = models.made(Doubled).double()
    other = make(plain.parameters())
    for step in batch:
        for sample in step.chunk(2)[dist.get_rank()]:
            strategy.backward(model(sample[None]).square().mean(), model, optimizer)
            stepped = strategy.optimizer_step(optimizer, model)
        assert stepped
        assert strategy.last_grad_norm.dtype == torch.float64
        (sum(plain(sample[None]).square().mean() for sample in step) / 4).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        other.step()
        other.zero_grad()
    assert models.difference(model, plain) < 1e-14


@pytest.mark.parametrize(("config", "expected"), [
    ({}, [torch.float64, torch.float64, torch.float32]), ({"reduce_dtype": "bf16"}, [torch.bfloat16] * 3),
], ids=["own", "requested"])  # fmt: skip
@on_ranks(2)
def test_each_unit_reduces_in_its_own_dtype_or_in_the_requested_one(config, expected):
    model = FSDPStrategy(FSDPConfig(auto_wrap_policy="BLOCKS", **config)).prepare_model(Doubled())
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    policies = [module._get_fsdp_state()._mp_policy for module in (*model.layers, model)]
    assert [policy.reduce_dtype for policy in policies] == expected


@pytest.mark.parametrize(("casts", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
@on_ranks(2)
def test_inputs_are_cast_unless_cast_forward_inputs_is_false(casts, dtype):
    class Told(nn.Linear):
        def forward(self, x):
            self.seen = x.dtype
            return super().forward(x.to(self.weight.dtype))

    model = FSDPStrategy(FSDPConfig(mixed_precision="bf16", cast_forward_inputs=casts)).prepare_model(Told(4, 4))
    model(torch.ones(2, 4))
    assert model.seen == dtype


@pytest.mark.parametrize(("reduce", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("precision", ["mixed", "master"])
@on_ranks(2)
def test_the_optimizer_gets_gradients_as_they_were_reduced(precision, reduce, dtype):
    """Two passes are compared with the fp32 mean of what two processes compute in bf16."""
    strategy = FSDPStrategy(FSDPConfig(mixed_precision="bf16", precision=precision, reduce_dtype=reduce))
    plain = models.made(models.untied).to(torch.bfloat16)
    model = models.made(models.untied)
    model.load_state_dict(plain.state_dict())  # the same weights in both precisions
    strategy.prepare_model(model)
    expected = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in plain.named_parameters()}
    for step in (0, 1):
        mine = models.batch(step).chunk(2)[dist.get_rank()]
        plain.zero_grad()
        for one in (model, plain):
            models.loss_of(one, mine).backward()
        for name, parameter in plain.named_parameters():
            gradient = parameter.grad.float()
            dist.all_reduce(gradient, dist.ReduceOp.AVG)
            expected[name] += gradient
    found = {name: models.whole(parameter.grad) for name, parameter in model.named_parameters()}
    kept = torch.float32 if precision == "mixed" else dtype
    assert {gradient.dtype for gradient in found.values()} == {kept}
    assert all(torch.equal(found[name], expected[name]) for name in found) == (reduce == "fp32")
    if precision == "master":  # the optimizer does not change what it was given
        optimizer = strategy.create_optimizer(model, lr=0.1)
        masters = {name: optimizer.state[p]["master"].clone() for name, p in model.named_parameters()}
        optimizer.step_masters()
        assert all(not torch.equal(optimizer.state[p]["master"], masters[n]) for n, p in model.named_parameters())
        assert all(torch.equal(models.whole(p.grad), found[name]) for name, p in model.named_parameters())
