"""Low-precision parameters with fp32 masters, for any base optimizer."""

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit import TrainState
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.fsdp import DynamicGradScaler, FSDPConfig, FSDPStrategy, MasterWeightOptimizer, param_groups
from tests.checkpoint import states
from tests.dtensors import local
from tests.fsdp import models
from tests.patches import failing
from tests.ranks import logged, on_ranks

MASTER = {"precision": "master", "mixed_precision": "bf16"}


class OwnSGD(torch.optim.SGD):
    """A subclass gets DTensors, because its code is unknown."""


BASES = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "AdamW-foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "AdamW-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
    "own": lambda groups: OwnSGD(groups, lr=1e-1, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def low(seed=0):
    return models.made(models.untied, seed).to(torch.bfloat16)


def adam(wrapper=MasterWeightOptimizer):
    """Return a bf16 model and its AdamW after a step, with masters unless there is another wrapper."""
    model = low()
    optimizer = wrapper(torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-2))
    step(model, optimizer, 0)
    return model, optimizer


def masters_match(optimizer):
    """Return whether every low-precision parameter is its master, rounded, bit for bit."""
    masters = [(parameter, state["master"]) for parameter, state in optimizer.state.items() if "master" in state]
    for parameter, master in masters:
        assert master.dtype == torch.float32
        assert isinstance(master, DTensor) == isinstance(parameter, DTensor)
    return all(torch.equal(local(m).to(p.dtype), local(p.detach())) for p, m in masters)


def step(model, optimizer, index):
    models.loss_of(model, models.batch(index)).backward()
    stepped = optimizer.step()
    optimizer.zero_grad()
    return stepped


def of_every_kind():
    """Return a bf16 model with an fp32 norm, a frozen parameter and an unused one."""
    model = low()
    model.norm.float()
    model.norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.norm.register_forward_hook(lambda module, args, out: out.bfloat16())
    model.embed.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    return model


@pytest.mark.parametrize("base", BASES)
def test_a_step_equals_the_base_optimizers_step_on_fp32_copies(base):
    model, shadow = of_every_kind(), of_every_kind()
    optimizer = MasterWeightOptimizer(BASES[base](list(model.parameters())))
    copies = [parameter.detach().clone().float() for parameter in shadow.parameters()]
    plain = BASES[base](copies)
    for index in range(4):
        assert step(model, optimizer, index) is True
        models.loss_of(shadow, models.batch(index)).backward()
        for master, parameter in zip(copies, shadow.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        plain.step()
        for master, parameter in zip(copies, shadow.parameters(), strict=True):
            parameter.data.copy_(master)
        assert masters_match(optimizer)
    assert "master" not in optimizer.state[model.norm.weight]
    for (name, parameter), expected in zip(model.named_parameters(), copies, strict=True):
        assert torch.equal(optimizer.state[parameter].get("master", parameter), expected), name


def trained(base, config=None, build=models.untied):
    strategy, model, optimizer = models.prepared(MASTER | (config or {}), build, max_norm=1.0, factory=BASES[base])
    assert masters_match(optimizer)
    for index in range(3):
        models.train_sharded(model, strategy, optimizer, [index])
        assert masters_match(optimizer)
    return model, optimizer


def whole_masters(base, config):
    _, optimizer = trained(base, config, models.tied)
    assert [FSDPStrategy().is_mp_optimizer(found) for found in (optimizer, optimizer.base)] == [True, False]
    for parameter, state in optimizer.state.items():
        assert state["master"].device_mesh == parameter.device_mesh
        for key, value in state.items():
            if value.ndim:
                assert value.dtype == torch.float32, key
                assert value.placements == parameter.placements, key
                assert value.shape == parameter.shape, key
    return [state["master"].full_tensor() for state in optimizer.state.values()]


@pytest.mark.parametrize("base", ["AdamW", "AdamW-fused", "momentum", "own", "Adagrad"])
@pytest.mark.parametrize("config", [{}, {"sharding_strategy": "HYBRID_SHARD", "shard": 2}], ids=["1d", "hsdp"])
def test_masters_are_sharded_like_their_parameter_and_round_to_it(ranks, base, config):
    first, *_, last = ranks.run(whole_masters, 4, base, config)
    assert all(map(torch.equal, first, last))


@on_ranks(2)
def test_local_tensors_and_dtensors_take_the_same_step():
    """Momentum SGD steps on local tensors, its subclass on DTensors."""
    (_, first), (_, second) = trained("momentum"), trained("own")
    for state, other in zip(first.state.values(), second.state.values(), strict=True):
        assert state.keys() == {"master", "momentum_buffer"}
        models.assert_equal({key: local(t) for key, t in state.items()}, {key: local(t) for key, t in other.items()})


@pytest.mark.parametrize("precision", ["mixed", "master"])
@on_ranks(1)
def test_a_step_of_the_strategy_runs_hooks_and_follows_schedulers(precision):
    strategy, model, optimizer = models.prepared(MASTER | {"precision": precision})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch == 0 else 0.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    found = [models.weights(model)]
    for index in range(2):
        strategy.backward(models.loss_of(model, models.batch(index)), model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns if it sees no step before scheduler.step()
            assert strategy.optimizer_step(optimizer, model, scheduler)
        found.append(models.weights(model))
    assert calls == [1, 1]
    assert not torch.equal(found[0]["embed.weight"], found[1]["embed.weight"])
    models.assert_equal(found[2], found[1])  # the second step had the learning rate 0


def test_an_added_group_has_masters_and_steps():
    model, head = low(), nn.Linear(models.WIDTH, models.VOCAB, bias=False).to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step(model, optimizer, 0)
    model.lm_head = head
    optimizer.add_param_group({"params": head.parameters(), "lr": 1e-1})
    before = head.weight.detach().clone()
    step(model, optimizer, 1)
    assert "master" in optimizer.state[head.weight]
    assert masters_match(optimizer)
    assert not torch.equal(before, head.weight)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_accepts_set_to_none(set_to_none):
    model, optimizer = adam()
    models.loss_of(model, models.batch(0)).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert (parameter.grad is None) if set_to_none else (parameter.grad.abs().sum() == 0)


@pytest.mark.parametrize("by_closure", [False, True])
def test_backward_starts_from_a_given_gradient_even_in_a_closure(by_closure):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([weight], lr=1.0))

    def backward():
        optimizer.backward_by_grad(weight * 2, torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))

    if not by_closure:
        backward()
    assert optimizer.step(backward if by_closure else None) is True
    assert weight.tolist() == [-1.0, -3.0, -5.0]


@pytest.mark.parametrize(("build", "tolerance"), [
    (low, 1e-3), (of_every_kind, 1e-2),  # if some gradients are fp32, those of bf16 are scaled in place
])  # fmt: skip
def test_clipping_uses_one_joint_norm_of_unscaled_gradients(build, tolerance):
    def masters():
        trained = [parameter for parameter in clipped.parameters() if parameter.requires_grad]
        return torch.cat([bound.state[p].get("master", p).detach().flatten() for p in trained])

    model, clipped = build(), build()
    scaler = DynamicGradScaler(2.0**10, growth_interval=1)
    free = MasterWeightOptimizer(torch.optim.SGD(param_groups(model), lr=1.0))
    bound = MasterWeightOptimizer(torch.optim.SGD(param_groups(clipped), lr=1.0), grad_scaler=scaler, max_norm=0.1)
    start = masters()
    step(model, free, 0)
    bound.backward(models.loss_of(clipped, models.batch(0)))
    bound.step()
    assert bound.last_grad_norm.item() == pytest.approx(free.last_grad_norm.item(), rel=1e-2)
    assert (masters() - start).norm().item() == pytest.approx(0.1, rel=tolerance)
    assert scaler.scale == 2.0**11


@pytest.mark.parametrize("base", ["AdamW", "SGD", "momentum"])
def test_a_loaded_optimizer_state_continues_bit_for_bit(base):
    model = low()
    optimizer = MasterWeightOptimizer(BASES[base](param_groups(model, weight_decay=0.1)))
    for index in range(3):
        step(model, optimizer, index)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    other = low(seed=9)
    resumed = MasterWeightOptimizer(BASES[base](param_groups(other, weight_decay=0.1)))
    if base == "AdamW":
        step(other, resumed, 7)
    resumed.load_state_dict(state_dict=saved)
    for parameter, state in resumed.state.items():
        for key, value in state.items():
            assert not isinstance(value, torch.Tensor) or value.dtype == torch.float32, (key, parameter.shape)
    assert masters_match(resumed)  # the parameters follow the masters
    other.load_state_dict(weights)
    for index in range(3, 6):
        step(model, optimizer, index)
        step(other, resumed, index)
    states.check_resumed(TrainState(model=other, optimizer=resumed), TrainState(model=model, optimizer=optimizer))


def test_an_optimizer_state_that_does_not_fit_is_refused_and_changes_nothing():
    (_, optimizer), (_, plain) = adam(), adam(lambda base: base)
    before = copy.deepcopy(optimizer.state_dict())
    wrong_shape, fewer = copy.deepcopy(before), copy.deepcopy(before)
    wrong_shape["state"][0]["master"] = torch.zeros(2, 2)
    fewer["param_groups"][0]["params"].pop()
    for state, message in (
        ({}, "'state' and 'param_groups'"),
        ({"state": {}, "param_groups": []}, "0 parameter groups, the optimizer has 2"),
        (fewer, "Group 0 of the optimizer state has"),
        (wrong_shape, r"master of 'embed\.weight' has shape \[2, 2\], expected \[19, 12\]"),
        (plain.state_dict(), r"'embed\.weight' has no master"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            optimizer.load_state_dict(state)
    assert states.bits(optimizer.state_dict()) == states.bits(before)


def test_moments_of_a_used_base_optimizer_are_kept():
    model, base = adam(lambda base: base)
    optimizer = MasterWeightOptimizer(base)
    state = optimizer.state[model.embed.weight]
    assert state["exp_avg"].dtype == torch.float32
    assert state["step"].item() == 1
    step(model, optimizer, 1)
    assert state["step"].item() == 2


def test_a_cleared_state_starts_again_from_the_parameters():
    model, optimizer = adam()
    optimizer.state.clear()
    step(model, optimizer, 1)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert masters_match(optimizer)


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_weights_loaded_after_the_optimizer_was_created_are_kept(tmp_path, size):
    """No load leaves old masters behind, for a checkpoint or for a step at learning rate 0."""
    strategy = FSDPStrategy(FSDPConfig.from_dict(MASTER), max_norm=1.0)
    source, its_optimizer = trained("momentum")
    strategy.save_ckpt(source, tmp_path, step=1, optimizer=its_optimizer)
    loads = [
        lambda model, _: model.load_state_dict(source.state_dict()),
        lambda model, _: [p.data.copy_(q.data) for p, q in zip(model.parameters(), source.parameters(), strict=True)],
        lambda model, _: dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "step_00000001"),
        lambda model, _: states.load(tmp_path, TrainState(model=model)),
        lambda model, _: states.load(tmp_path, TrainState(model=model), atomic=True),
        lambda model, _: strategy.load_ckpt(model, tmp_path),
        lambda model, optimizer: strategy.load_ckpt(model, tmp_path, optimizer, load_optimizer_states=False),
        lambda model, _: strategy.load_hf(model, tmp_path / "export"),
    ]
    whole = {name: tensor.contiguous() for name, tensor in models.weights(source).items()}
    if dist.get_rank() == 0:
        (tmp_path / "export").mkdir()
        save_file(whole, tmp_path / "export" / "model.safetensors")
    dist.barrier()
    for number, load in enumerate(loads):
        model = strategy.prepare_model(models.made(models.untied, 7))
        optimizer = strategy.create_optimizer(model, lr=1e-2)
        models.train_sharded(model, strategy, optimizer, range(2))
        load(model, optimizer)
        optimizer.state_dict()
        assert masters_match(optimizer), number
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        models.train_sharded(model, strategy, optimizer, range(1))
        models.assert_equal(models.weights(model), whole)


def test_only_masters_of_changed_elements_are_replaced(caplog):
    model, optimizer = adam()
    before = optimizer.state[model.embed.weight]["master"].clone()
    with torch.no_grad():
        model.embed.weight[3].zero_()
        model.lm_head.weight.add_(0)
    with caplog.at_level("INFO"):
        assert optimizer.follow_weights() == 1
        assert optimizer.follow_weights() == 0
    assert "'embed.weight'" in caplog.text
    before[3] = 0
    assert torch.equal(optimizer.state[model.embed.weight]["master"], before)


def test_masters_are_restored_after_a_failed_step():
    model, optimizer = adam()
    handle = optimizer.base.register_step_pre_hook(failing(RuntimeError("out of memory")))
    models.loss_of(model, models.batch(1)).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    handle.remove()
    assert masters_match(optimizer)
    assert optimizer.step() is True


def test_unsuitable_base_optimizers_are_refused():
    parameters = list(low().parameters())
    with pytest.raises(UsageError, match="LBFGS"):
        MasterWeightOptimizer(torch.optim.LBFGS(parameters))
    inner = MasterWeightOptimizer(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(UsageError, match="MasterWeightOptimizer"):
        MasterWeightOptimizer(inner)


@pytest.mark.parametrize("precision", ["master", "mixed"])
@pytest.mark.parametrize(("dtype", "backoff"), [("bf16", 1.0), ("fp16", 0.5)])
@on_ranks(2)
def test_overflow_on_one_rank_skips_the_step_on_all(precision, dtype, backoff):
    config = {"precision": precision, "mixed_precision": dtype, "auto_wrap_policy": "BLOCKS"}
    strategy, model, optimizer = models.prepared(config, max_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    scaler = strategy.grad_scaler(optimizer)
    assert (scaler is not None) == (dtype == "fp16")

    def one(index, poisoned):
        loss = models.loss_of(model, models.batch(index).chunk(2)[dist.get_rank()])
        if poisoned and dist.get_rank() == 1:
            loss = loss * math.inf
        strategy.backward(loss, model, optimizer)
        return strategy.optimizer_step(optimizer, model, scheduler)

    def snapshot():
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [local(value).detach().clone() for value in [*model.parameters(), *states]]

    assert one(0, False)
    before, scale, epoch = snapshot(), scaler.scale if scaler else 1.0, scheduler.last_epoch
    stepped = strategy.global_step
    with logged() as lines:
        assert [one(1, True), one(2, True)] == [False, False]
    assert not any("tensor" in line for line in lines) and (not lines or "this step was skipped" in lines[0])
    assert (strategy.last_outcome, strategy.global_step) == ("skipped", stepped)
    assert all(map(torch.equal, before, snapshot()))
    assert not math.isfinite(strategy.last_grad_norm.item())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert scheduler.last_epoch == epoch
    assert (scaler.scale if scaler else 1.0) / scale == backoff
    assert one(3, False)
    assert scheduler.last_epoch == epoch + 1
    assert all(torch.isfinite(models.whole(parameter)).all() for parameter in model.parameters())


class Odd(torch.optim.SGD):
    """Has state of every kind: that of no parameter, replaced, deleted, and beside `state` and `param_groups`."""

    beside = 0
    checked = 0

    @torch.no_grad()
    def step(self, closure=None):
        shared = self.state.setdefault("shared", {"count": 0})
        shared["count"] += 1
        self.beside += shared["count"]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for key in [key for key in state if key != "sum"]:
                    del state[key]
                total = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                self.state[parameter] = {"sum": total, f"step{shared['count']}": shared["count"]}
                parameter.sub_(total, alpha=0.1 / self.beside)

    def state_dict(self):
        return {**super().state_dict(), "beside": self.beside}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "beside"})
        self.beside = state_dict["beside"]
        self.checked += 1


def of_odd(seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 3).bfloat16()
    return model, MasterWeightOptimizer(Odd(model.parameters(), lr=0.1))


def step_with_ones(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_base_keeps_state_that_it_replaces_deletes_or_shares():
    (model, _), (plain, _) = of_odd(0), of_odd(0)
    base, alone = Odd(model.parameters(), lr=0.1), Odd(plain.float().parameters(), lr=0.1)
    base.state["number"] = 7
    optimizer = MasterWeightOptimizer(base)
    for _ in range(3):
        step_with_ones(model, optimizer)
        step_with_ones(plain, alone)
    assert optimizer.state["shared"] == alone.state["shared"] == {"count": 3}
    assert optimizer.state["number"] == 7
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        state = dict(optimizer.state[parameter])
        assert torch.equal(state.pop("master"), other)
        assert torch.equal(state.pop("sum"), alone.state[other]["sum"])
        assert state == {"step3": 3}


def test_state_dict_includes_what_the_base_adds_in_its_own_state_dict():
    (model, optimizer), (again, other) = of_odd(0), of_odd(1)
    for _ in range(3):
        step_with_ones(model, optimizer)
    step_with_ones(again, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (other.base.beside, other.base.checked) == (6, 1)
    step_with_ones(model, optimizer)
    step_with_ones(again, other)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_a_state_that_the_base_names_master_is_refused():
    model, optimizer = of_odd(0)
    optimizer.base.step = lambda: [
        optimizer.base.state[p].update(master=1) for p in optimizer.base.param_groups[0]["params"]
    ]
    with pytest.raises(UsageError, match="Odd has a state named 'master'"):
        step_with_ones(model, optimizer)
