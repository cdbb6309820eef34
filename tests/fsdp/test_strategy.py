"""FSDPStrategy: its methods, alone and in combination."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CkptkitError,
    IncompleteCheckpointError,
    NonFiniteGradientError,
    SaveError,
    UsageError,
)
from ckptkit.fsdp import DynamicGradScaler, FSDPConfig, FSDPStrategy, MasterWeightOptimizer, param_groups
from ckptkit.fsdp.setup import accumulation_steps
from ckptkit.fsdp.strategy import ModelOptimPair
from tests.fsdp import models
from tests.ranks import run_ranks, run_script

ALONE = """
import sys
import torch
from ckptkit.fsdp import FSDPStrategy
from tests.fsdp import models
strategy = FSDPStrategy()
model = strategy.prepare_model(models.made(models.untied))
plain = models.made(models.untied)
optimizer = strategy.create_optimizer(model)
other = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
for step in range(2):
    loss, expected = models.loss_of(model, models.batch(step)), models.loss_of(plain, models.batch(step))
    assert torch.equal(loss, expected)
    strategy.backward(loss, model, optimizer)
    expected.backward()
    assert strategy.optimizer_step(optimizer, model)
    other.step()
    other.zero_grad()
strategy.save_ckpt(model, sys.argv[1], optimizer=optimizer)
fresh = strategy.prepare_model(models.made(models.untied, seed=4))
path, client = strategy.load_ckpt(fresh, sys.argv[1])
assert path.endswith("step_00000002"), path
weights = models.weights(fresh)
assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
strategy.close()
assert not torch.distributed.is_initialized()
"""


def test_works_without_arguments_and_without_a_process_group(tmp_path):
    code, said = run_script(ALONE, str(tmp_path))
    assert code == 0, said


@pytest.mark.parametrize(
    ("train", "micro", "ranks", "steps"), [(None, 3, 7, 1), (8, 1, 2, 4), (8, 4, 2, 1), (12, 2, 1, 6)]
)
def test_batch_sizes_give_the_accumulation_count(train, micro, ranks, steps):
    assert accumulation_steps(train, micro=micro, world_size=ranks) == steps


def test_batch_sizes_that_do_not_divide_are_refused_with_all_numbers():
    with pytest.raises(UsageError, match=r"train_batch_size 6 .* micro_train_batch_size 4 x 2 .* = 8"):
        accumulation_steps(6, micro=4, world_size=2)


def _uneven():
    with pytest.raises(UsageError, match="train_batch_size 6"):
        FSDPStrategy(micro_train_batch_size=4, train_batch_size=6).setup_distributed()


def test_uneven_batches_are_refused_at_setup(ranks):
    ranks.run(_uneven, 2)


def _returned_unchanged():
    strategy = FSDPStrategy()
    assert strategy.prepare_model(None) is None
    assert strategy.prepare_model("text") == "text"
    model = strategy.prepare_model(models.untied())
    assert strategy.prepare_model(model) is model
    actor = nn.Module()
    actor.base_model = model
    assert strategy.prepare_model(actor) is actor
    assert not isinstance(actor, FSDPModule)


def test_prepared_models_and_other_objects_are_returned_unchanged(ranks):
    ranks.run(_returned_unchanged, 2)


def _shard_sizes():
    strategy = FSDPStrategy()
    found = []
    for size in (None, -1, 1, 2, 4, "auto"):
        model = strategy.prepare_model(models.untied(), is_training=size != "auto", shard_size=size)
        parameter = next(model.parameters())
        found.append((tuple(parameter.device_mesh.shape), [str(p) for p in parameter.placements]))
    with pytest.raises(UsageError, match=r"shard_size is 3.*the 4 data-parallel ranks"):
        strategy.prepare_model(models.untied(), shard_size=3)
    return found


def test_shard_sizes_become_meshes(ranks):
    whole, hybrid = ["S(0)"], ["R", "S(0)"]
    assert ranks.run(_shard_sizes, 4)[0] == [
        ((4,), whole),
        ((4,), whole),
        ((4, 1), hybrid),
        ((2, 2), hybrid),
        ((4,), whole),
        ((4, 1), hybrid),  # a small inference model is not sharded
    ]


def _inference():
    strategy = FSDPStrategy(FSDPConfig(mixed_precision="bf16"))
    model = strategy.prepare_model(models.made(models.untied).half(), is_training=False)
    return {p.dtype for p in model.parameters()}


def test_inference_keeps_the_stored_dtype(ranks):
    assert ranks.run(_inference, 2) == [{torch.float16}] * 2


def _two_models():
    """Two optimizers of one strategy: each clips its own model."""
    strategy = FSDPStrategy(max_norm=1e-3)
    pairs: list[ModelOptimPair] = []
    for seed in (0, 1):
        model = strategy.prepare_model(models.made(models.untied, seed))
        pairs.append((model, strategy.create_optimizer(model, factory=lambda g: torch.optim.SGD(g, lr=1.0))))
    moved = []
    for model, optimizer in pairs:
        before = models.weights(model)
        strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
        strategy.optimizer_step(optimizer, model, name="actor")
        after = models.weights(model)
        moved.append(torch.cat([(after[n] - before[n]).flatten() for n in before]).norm().item())
    return moved


def test_every_optimizer_clips_its_own_model_to_one_joint_norm(ranks):
    assert ranks.run(_two_models, 2)[0] == pytest.approx([1e-3, 1e-3], rel=1e-3)


def _traffic(every):
    """Count the reduce-scatters of four backward passes."""
    strategy = FSDPStrategy(FSDPConfig(auto_wrap_policy="NO_WRAP"), train_batch_size=8, sync_every_micro_batch=every)
    model = strategy.prepare_model(models.untied())
    optimizer = strategy.create_optimizer(model)
    counts = []
    for index in range(4):
        strategy.backward(models.loss_of(model, models.batch(index)), model, optimizer)
        counts.append(all(p.grad is not None for p in model.parameters()))
        assert strategy.optimizer_step(optimizer, model) == (index == 3)
    return counts


def test_gradients_are_reduced_only_in_the_last_backward(ranks):
    assert ranks.run(_traffic, 2, False)[0] == [False, False, False, True]
    assert ranks.run(_traffic, 2, True)[0] == [True] * 4


def _swapped(folder):
    strategy = FSDPStrategy(train_batch_size=4)
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    loss = models.loss_of(model, models.batch(0))
    state = strategy.maybe_offload_optimizer
    calls = [
        (r"backward\(loss, model, optimizer\): model must be a module, found AdamW; optimizer must be an optimizer, "
         r"found FSDPTinyLM\. Are model and optimizer swapped\?", lambda: strategy.backward(loss, optimizer, model)),
        ("loss must be a tensor, found FSDPTinyLM", lambda: strategy.backward(model, loss, optimizer)),
        ("loss must be a tensor", lambda: strategy.backward(loss.item(), model, optimizer)),
        (r"optimizer_step\(.*swapped", lambda: strategy.optimizer_step(model, optimizer)),
        ("scheduler must be a scheduler, found 'actor'", lambda: strategy.optimizer_step(optimizer, model, "actor")),
        ("scheduler must be a scheduler, found AdamW", lambda: strategy.optimizer_step(optimizer, model, optimizer)),
        ("name must be a name", lambda: strategy.optimizer_step(optimizer, model, None, scheduler)),
        ("swapped", lambda: strategy.save_ckpt(folder, model)),
        ("save_dir must be a path or URL, found AdamW", lambda: strategy.save_ckpt(model, optimizer)),
        ("tag must be a name or None, found 7. To name a step, pass", lambda: strategy.save_ckpt(model, folder, 7)),
        ("step must be a whole number", lambda: strategy.save_ckpt(model, folder, step="7")),
        ("optimizer must be an optimizer", lambda: strategy.save_ckpt(model, folder, optimizer=scheduler)),
        ("swapped", lambda: strategy.load_ckpt(folder, model)),
        ("optimizer must be an optimizer, found LambdaLR", lambda: strategy.load_ckpt(model, folder, scheduler)),
        ("swapped", lambda: strategy.save_model(model, folder, None)),
        ("model must be a module", lambda: strategy.save_model(optimizer, None, folder)),
        ("swapped", lambda: strategy.load_hf(folder, model)),
        ("optimizer must be", lambda: state(model)),
        ("optimizer must be", lambda: strategy.maybe_load_optimizer(model)),
        ("found an optimizer", lambda: strategy.offload_model(optimizer)),
        ("found an optimizer", lambda: strategy.reload_model([model, optimizer])),
        ("optimizer must be", lambda: strategy.grad_scaler(model)),
        ("model must be", lambda: strategy.create_optimizer(list(model.parameters()))),
        ("model must be", lambda: strategy.reset_parameters(optimizer)),
        ("is_training must be True or False", lambda: strategy.prepare_model(models.untied(), optimizer)),
    ]  # fmt: skip
    before = models.weights(model)
    for message, call in calls:
        with pytest.raises(UsageError, match=message):
            call()
    after = models.weights(model)
    assert os.listdir(folder) == []
    return all(torch.equal(before[name], after[name]) for name in before)


def test_swapped_arguments_are_refused_by_name(ranks, tmp_path):
    assert ranks.run(_swapped, 2, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"tp": 2}}, "from_dict"),
        ({"config": 42}, "pass seed="),
        ({"micro_train_batch_size": 2.0}, "micro_train_batch_size is 2.0"),
        ({"micro_train_batch_size": 0}, "micro_train_batch_size is 0"),
        ({"train_batch_size": True}, "train_batch_size is True"),
        ({"train_batch_size": "8"}, "train_batch_size is '8'"),
        ({"norm_type": 0.5}, "norm type p is 0.5"),
        ({"norm_type": "two"}, "norm type p is 'two'"),
        ({"error_if_nonfinite": "no"}, "error_if_nonfinite is 'no'"),
        ({"error_if_nonfinite": True, "config": FSDPConfig(mixed_precision="fp16")}, "conflicts with"),
    ],
)
def test_impossible_options_are_refused_at_once(options, message):
    with pytest.raises(UsageError, match=message):
        FSDPStrategy(**options)


def _anothers_optimizer():
    strategy = FSDPStrategy()
    actor, critic = (strategy.prepare_model(models.made(models.untied)) for _ in range(2))
    optimizer = strategy.create_optimizer(actor)
    strategy.backward(models.loss_of(actor, models.batch(0)), actor, optimizer)
    assert strategy.optimizer_step(optimizer, actor)
    with pytest.raises(UsageError, match=r"has no parameter of FSDPTinyLM.*another model's"):
        strategy.optimizer_step(optimizer, critic)


def test_the_optimizer_of_another_model_is_refused(ranks):
    ranks.run(_anothers_optimizer, 2)


def _replaced_parameters(precision, names):
    strategy = FSDPStrategy(config=FSDPConfig(precision=precision, mixed_precision="bf16"))
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    for _ in range(2):
        strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
        assert strategy.optimizer_step(optimizer, model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value for name, value in state.items() if not names or any(part in name for part in names)}
    model.load_state_dict(state, strict=False)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    assert strategy.optimizer_step(optimizer, model)
    model.load_state_dict(state, strict=False, assign=True)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    with pytest.raises(UsageError, match=f"{len(state)} parameters of .* were replaced .*{next(iter(state))}"):
        strategy.optimizer_step(optimizer, model)


@pytest.mark.parametrize("names", [(), ("head",)], ids=["all", "one"])
@pytest.mark.parametrize("precision", ["master", "mixed"])
def test_parameters_that_were_replaced_between_two_steps_are_refused_by_name(ranks, precision, names):
    ranks.run(_replaced_parameters, 2, precision, names)


def _several_optimizers():
    """Actor and critic step in turn, the critic twice as often; then the critic is replaced."""
    strategy = FSDPStrategy()
    actor, critic = (strategy.prepare_model(models.made(models.untied)) for _ in range(2))
    first = strategy.create_optimizer(actor)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    found = []

    def step(model, optimizer):
        strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
        assert strategy.optimizer_step(optimizer, model)
        found.append(strategy.global_step)

    for _ in range(2):
        step(actor, first)
        step(critic, second)
        step(critic, second)
    step(critic, strategy.create_optimizer(critic))  # a new optimizer works
    strategy.global_step = 100
    step(actor, first)
    step(critic, second)
    return found


def test_the_global_step_counts_steps_not_optimizers(ranks):
    assert ranks.run(_several_optimizers, 2)[0] == [1, 1, 2, 2, 3, 4, 5, 101, 101]


def _two_optimizers_of_one_model():
    """The head has its own optimizer: both step in the same accumulation window."""
    strategy = FSDPStrategy(train_batch_size=8, micro_train_batch_size=2)
    model = strategy.prepare_model(models.made(models.untied))
    head = {id(parameter) for parameter in model.lm_head.parameters()}
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if (id(p) in head) == own], lr=0.1) for own in (True, False)
    ]
    found = []
    for index in range(4):
        strategy.backward(models.loss_of(model, models.batch(index)), model, optimizers[0])
        for optimizer in optimizers:
            found.append((strategy.optimizer_step(optimizer, model), strategy.last_outcome))
    return found, strategy.global_step


def test_optimizers_of_one_model_step_in_the_same_window(ranks):
    waits, steps = [(False, "accumulating")] * 2, [(True, "stepped")] * 2
    assert ranks.run(_two_optimizers_of_one_model, 2)[0] == ([*waits, *steps, *waits, *steps], 2)


def _step_called_at_the_end_only():
    strategy = FSDPStrategy(train_batch_size=8)
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    for index in range(4):
        strategy.backward(models.loss_of(model, models.batch(index)), model, optimizer)
    return strategy.optimizer_step(optimizer, model)


def test_one_step_after_the_last_backward_of_a_window_is_enough(ranks):
    assert ranks.run(_step_called_at_the_end_only, 2) == [True, True]


def _partial_window(config, every):
    """Two of four backward passes, closed early, and one process on the same samples."""
    strategy = FSDPStrategy(
        FSDPConfig.from_dict(config), max_norm=1.0, train_batch_size=8, sync_every_micro_batch=every
    )
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model, factory=lambda groups: torch.optim.SGD(groups, lr=0.5))
    if (scaler := strategy.grad_scaler(optimizer)) is not None:
        scaler.load_state_dict({"scale": 64.0})
    found = []
    for window in range(2):
        for index in range(2):
            strategy.backward(
                models.loss_of(model, models.batch(2 * window + index)), model, optimizer, last=index == 1
            )
            strategy.optimizer_step(optimizer, model)
            found.append(strategy.last_outcome)
    plain = models.made(models.untied)
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    for window in range(2):
        loss = sum(models.loss_of(plain, models.batch(2 * window + index)) for index in range(2)) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step()
        other.zero_grad()
    weights, expected = models.weights(model), models.weights(plain)
    return found, max((weights[name].float() - expected[name]).abs().max().item() for name in weights)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    ("config", "tolerance"),
    [({}, 1e-6), ({"mixed_precision": "fp16"}, 5e-3), ({"mixed_precision": "bf16", "precision": "master"}, 3e-2)],
    ids=["fp32", "fp16", "master"],
)
def test_the_last_accumulation_window_may_be_shorter(ranks, config, tolerance, every):
    outcomes, difference = ranks.run(_partial_window, 2, config, every)[0]
    assert outcomes == ["accumulating", "stepped"] * 2
    assert difference < tolerance


def _open_window(folder):
    strategy = FSDPStrategy(train_batch_size=4)
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    strategy.save_ckpt(model, folder, step=1)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    with pytest.raises(UsageError, match=r"1 backward passes have not been used.*last=True"):
        strategy.load_ckpt(model, folder)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer, last=True)
    assert strategy.optimizer_step(optimizer, model)
    strategy.load_ckpt(model, folder)


def test_a_load_drops_the_gradients_of_an_open_window(ranks, tmp_path):
    ranks.run(_open_window, 2, str(tmp_path))


def _without_sync(config, held):
    """Two passes, then a step: the first pass in no_sync(), or both as an accumulation window."""
    size = {} if held else {"train_batch_size": 4, "micro_train_batch_size": 1}
    strategy = FSDPStrategy(FSDPConfig.from_dict(config), max_norm=0.05, **size)
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    found = []
    for index in range(4):
        inside = held and index % 2 == 0
        with strategy.no_sync(model) if inside else contextlib.nullcontext():
            loss = models.loss_of(model, models.batch(index)[dist.get_rank() :])
            if inside:
                with pytest.raises(UsageError, match="already active"), strategy.no_sync(model):
                    pass
                with pytest.raises(UsageError, match=r"last=True\) was called in no_sync"):
                    strategy.backward(loss, model, optimizer, last=True)
            strategy.backward(loss, model, optimizer)
            if index % 2 == 0:
                assert all(parameter.grad is None for parameter in model.layers.parameters())  # nothing was reduced
            found.append((strategy.optimizer_step(optimizer, model), strategy.last_outcome))
    return found, models.weights(model), strategy.last_grad_norm


@pytest.mark.parametrize(
    "config",
    [{}, {"sharding_strategy": "NO_SHARD"}, {"mixed_precision": "bf16", "precision": "master"}],
    ids=["sharded", "replicated", "master"],
)
def test_no_sync_accumulates_like_a_window(ranks, config):
    held, window = (ranks.run(_without_sync, 2, config, held) for held in (True, False))
    for (told, weights, norm), (expected, others, other_norm) in zip(held, window, strict=True):
        assert told == expected == [(False, "accumulating"), (True, "stepped")] * 2
        assert torch.equal(norm, other_norm)
        assert all(torch.equal(weights[name], others[name]) for name in others)  # halving before or after a sum


def _split_sequences():
    """Two ranks share samples and split them along the sequence: each gets half of the tokens, from both ends."""
    from torch.distributed.tensor.experimental import context_parallel

    strategy = FSDPStrategy(FSDPConfig(cp=2))
    strategy.setup_distributed()
    mesh = strategy.context_parallel_mesh
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model, factory=lambda groups: torch.optim.SGD(groups, lr=0.5))
    tokens = models.batch(strategy.data_parallel_rank)[:, :5]
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # shifted before the split
    with context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[1, 1], no_restore_buffers={inputs, labels}):
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        strategy.backward(loss, model, optimizer)
    assert strategy.optimizer_step(optimizer, model)
    plain = models.made(models.untied)
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    batches = [models.batch(index) for index in range(strategy.data_parallel_size)]
    (sum(models.loss_of(plain, batch[:, :5]) for batch in batches) / len(batches)).backward()
    other.step()
    weights, expected = models.weights(model), models.weights(plain)
    difference = max((weights[name] - value).abs().max().item() for name, value in expected.items())
    return mesh.size(), strategy.data_parallel_rank, inputs.shape[1], difference


@pytest.mark.parametrize("world_size", [2, 4])
def test_context_parallel_training_equals_training_on_whole_sequences(ranks, world_size):
    results = ranks.run(_split_sequences, world_size)
    assert [result[:3] for result in results] == [(2, rank // 2, 2) for rank in range(world_size)]
    assert max(result[3] for result in results) < 1e-6
    assert ranks.run(_no_split, 1) == [None]


def _no_split():
    return FSDPStrategy().context_parallel_mesh


def _not_scaled():
    strategy = FSDPStrategy(FSDPConfig(mixed_precision="fp16"))
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    models.loss_of(model, models.batch(0)).backward()
    with pytest.raises(UsageError, match=r"by the loss scale 65536.*strategy\.backward"):
        strategy.optimizer_step(optimizer, model)


def test_a_loss_that_was_not_scaled_is_refused(ranks):
    ranks.run(_not_scaled, 2)


def _scaler_of(precision):
    config = FSDPConfig(mixed_precision="fp16", precision=precision, initial_loss_scale=128.0, loss_scale_hysteresis=1)
    strategy = FSDPStrategy(config)
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    scales = [strategy.grad_scaler(optimizer).scale]
    for factor in (1.0, math.inf, 1.0):
        strategy.backward(models.loss_of(model, models.batch(0)) * factor, model, optimizer)
        strategy.optimizer_step(optimizer, model)
        scales.append(strategy.grad_scaler(optimizer).scale)
    return scales


@pytest.mark.parametrize("precision", ["mixed", "master"])
def test_the_loss_scale_starts_and_backs_off_as_configured(ranks, precision):
    assert ranks.run(_scaler_of, 2, precision)[0] == [128.0, 128.0, 64.0, 64.0]


def _own_masters():
    """A MasterWeightOptimizer created by the user, with a scaler: its scale and the strategy's limit are used."""
    strategy = FSDPStrategy(FSDPConfig(mixed_precision="fp16", precision="master"), max_norm=1e-3)
    model = strategy.prepare_model(models.made(models.untied))
    scaler = DynamicGradScaler(256.0, dtype=torch.float16)
    base = torch.optim.SGD(param_groups(model), lr=1.0)
    optimizer = MasterWeightOptimizer(base, grad_scaler=scaler)
    assert strategy.grad_scaler(optimizer) is scaler
    before = [optimizer.state[p]["master"].full_tensor().clone() for p in model.parameters()]
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    assert strategy.optimizer_step(optimizer, model)
    after = [optimizer.state[p]["master"].full_tensor() for p in model.parameters()]
    return torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]).norm().item()


def test_an_optimizer_with_its_own_scaler_is_scaled_and_clipped(ranks):
    assert ranks.run(_own_masters, 2)[0] == pytest.approx(1e-3, rel=1e-2)


def _scheduled():
    strategy = FSDPStrategy(train_batch_size=4)
    model = strategy.prepare_model(models.untied())
    optimizer = strategy.create_optimizer(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    for index in range(6):
        strategy.backward(models.loss_of(model, models.batch(index)), model, optimizer)
        strategy.optimizer_step(optimizer, model, scheduler)
    return scheduler.last_epoch, optimizer.param_groups[0]["lr"], strategy.global_step


def test_the_scheduler_advances_with_the_steps(ranks):
    assert ranks.run(_scheduled, 2)[0] == (3, 0.25, 3)


def _nothing_to_train():
    strategy = FSDPStrategy()
    model = strategy.prepare_model(models.untied().requires_grad_(False))
    with pytest.raises(UsageError, match="no trainable parameter"):
        strategy.create_optimizer(model)


def test_an_optimizer_without_parameters_is_refused(ranks):
    ranks.run(_nothing_to_train, 2)


def _made_too_early():
    strategy = FSDPStrategy()
    model = models.untied()
    optimizer = torch.optim.AdamW(model.parameters())
    strategy.prepare_model(model)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    with pytest.raises(UsageError, match=r"no parameter of FSDPTinyLM.*created before prepare_model"):
        strategy.optimizer_step(optimizer, model)


def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_refused(ranks):
    ranks.run(_made_too_early, 2)


def _offloaded(folder, precision):
    config = FSDPConfig(offload="optimizer", precision=precision, mixed_precision="bf16")
    runs = []
    for offload in (False, True):
        strategy = FSDPStrategy(config)
        model = strategy.prepare_model(models.made(models.untied))
        optimizer = strategy.create_optimizer(model)
        assert strategy.maybe_offload_optimizer(optimizer) is optimizer  # nothing in it yet
        models.train_sharded(model, strategy, optimizer, range(2))
        if offload:
            assert strategy.maybe_offload_optimizer(optimizer) is optimizer
            assert all(v.device.type == "cpu" for s in optimizer.state.values() for v in s.values())
            strategy.save_ckpt(model, folder, optimizer=optimizer)
            assert strategy.maybe_load_optimizer(optimizer) is optimizer
        models.train_sharded(model, strategy, optimizer, range(2, 4))
        runs.append(models.weights(model))
    resumed = strategy.prepare_model(models.made(models.untied, seed=3))
    other = strategy.create_optimizer(resumed)
    strategy.load_ckpt(resumed, folder, optimizer=other)
    models.train_sharded(resumed, strategy, other, range(2, 4))
    runs.append(models.weights(resumed))
    return runs


@pytest.mark.parametrize("precision", ["mixed", "master"])
def test_an_offloaded_run_saves_and_resumes_like_one_on_the_device(ranks, tmp_path, precision):
    never, offloaded, resumed = ranks.run(_offloaded, 2, str(tmp_path), precision)[0]
    for name in never:
        assert torch.equal(never[name], offloaded[name]), name
        assert torch.equal(never[name], resumed[name]), name


def _model_offload():
    strategy = FSDPStrategy()
    model = strategy.prepare_model(models.made(models.untied))
    before = models.weights(model)
    given = [model, None, "text"]
    assert strategy.offload_model(given) is given
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())
    assert strategy.reload_model(model) is model
    after = models.weights(model)
    models.loss_of(model, models.batch(0)).backward()
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_can_be_offloaded_and_reloaded(ranks):
    assert ranks.run(_model_offload, 2) == [True, True]


CONFIGS = {
    "mixed": {"mixed_precision": "bf16"},
    "master": {"mixed_precision": "bf16", "precision": "master"},
    "master-fp16": {"mixed_precision": "fp16", "precision": "master"},
    "hsdp": {"sharding_strategy": "HYBRID_SHARD", "shard": 2},
    "full": {"state_dict_type": "FULL"},
    "local": {"state_dict_type": "LOCAL"},
}


def session(config, build):
    strategy = FSDPStrategy(FSDPConfig.from_dict(config), max_norm=1.0)
    model = strategy.prepare_model(models.made(build, seed=8))
    optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)
    if (scaler := strategy.grad_scaler(optimizer)) is not None:
        scaler.load_state_dict({"scale": 128.0})  # the default overflows in the first step
    return strategy, model, optimizer, scheduler


def train(parts, steps):
    """Train with the whole batch on every rank, so that the number of ranks does not change any sum."""
    strategy, model, optimizer, scheduler = parts
    losses = []
    for index in steps:
        loss = models.loss_of(model, models.batch(index))
        strategy.backward(loss, model, optimizer)
        assert strategy.optimizer_step(optimizer, model, scheduler)
        losses.append(loss.item())
    return losses


def _save(folder, config, build):
    parts = session(config, build)
    strategy, model, optimizer, scheduler = parts
    train(parts, range(2))
    report = strategy.save_ckpt(
        model, folder, "global_step2", client_state={"epoch": 1}, optimizer=optimizer, scheduler=scheduler
    )
    return report.step, train(parts, range(2, 4)), models.weights(model)


def _resume(folder, config, build):
    parts = session(config, build)
    strategy, model, optimizer, scheduler = parts
    path, client = strategy.load_ckpt(model, folder, optimizer=optimizer, scheduler=scheduler)
    assert path.endswith("global_step2")
    assert client == {"epoch": 1}
    assert strategy.global_step == 2
    assert scheduler.last_epoch == 2
    return train(parts, range(2, 4)), models.weights(model)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("build", [models.untied, models.tied, models.lora])
def test_a_resumed_run_continues_bit_for_bit(ranks, tmp_path, kind, build):
    config = CONFIGS[kind]
    size = 4 if kind == "hsdp" else 2
    step, losses, weights = ranks.run(_save, size, str(tmp_path), config, build)[0]
    assert step == 2
    resumed, found = ranks.run(_resume, size, str(tmp_path), config, build)[0]
    assert resumed == losses
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", ["mixed", "master", "hsdp"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_resumes_on_another_number_of_ranks(ranks, tmp_path, kind, size):
    _, losses, weights = ranks.run(_save, 4, str(tmp_path), CONFIGS[kind], models.tied)[0]
    config = {key: value for key, value in CONFIGS[kind].items() if key != "sharding_strategy" and key != "shard"}
    resumed, found = ranks.run(_resume, size, str(tmp_path), config, models.tied)[0]
    # three ranks divide by a factor that rounds; powers of two do not
    assert resumed == pytest.approx(losses, abs=2e-3 if size == 3 else 1e-6)
    for name in weights:
        assert torch.allclose(found[name].float(), weights[name].float(), atol=2e-2 if size == 3 else 1e-6), name


def _flags(folder):
    parts = session({}, models.untied)
    strategy, model, optimizer, scheduler = parts
    assert strategy.load_ckpt(model, folder, optimizer=optimizer) == (None, {})
    train(parts, range(2))
    strategy.save_ckpt(model, folder)  # without its optimizer
    with pytest.raises(CkptkitError, match="optimizer"):
        strategy.load_ckpt(model, folder, optimizer=optimizer)
    strategy.load_ckpt(model, folder, optimizer=optimizer, load_optimizer_states=False)
    with pytest.raises(CkptkitError, match="scheduler"):
        strategy.load_ckpt(model, folder, scheduler=scheduler)
    strategy.load_ckpt(model, folder, scheduler=scheduler, load_lr_scheduler_states=False)
    model.lm_head = nn.Linear(2, 2)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointMismatchError, match="extra"):
        strategy.load_ckpt(model, folder)


def test_requested_state_must_exist_unless_its_flag_is_off(ranks, tmp_path):
    ranks.run(_flags, 2, str(tmp_path))


def _half_copied(folder):
    parts = session({}, models.untied)
    strategy, model, optimizer, _ = parts
    train(parts, range(1))
    strategy.save_ckpt(model, folder, optimizer=optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, f"step_{strategy.global_step:08d}", "checkpoint.json").unlink()
    dist.barrier()
    with pytest.raises(IncompleteCheckpointError, match=r"FSDPStrategy\.load_ckpt"):
        strategy.load_ckpt(model, folder, optimizer=optimizer)
    assert strategy.load_ckpt(model, folder, optimizer=optimizer, start_fresh="if_none_committed") == (None, {})


def test_an_incomplete_copy_is_an_error_unless_start_fresh_allows_it(ranks, tmp_path):
    ranks.run(_half_copied, 2, str(tmp_path))


def _weights_alone(folder):
    parts = session(CONFIGS["master"], models.untied)
    strategy, model, optimizer, _ = parts
    train(parts, range(2))
    strategy.save_ckpt(model, folder, optimizer=optimizer)
    strategy, model, optimizer, _ = session(CONFIGS["master"], models.untied)
    strategy.load_ckpt(model, folder, optimizer=optimizer, load_optimizer_states=False)
    return all(torch.equal(s["master"].to_local(), p.to_local().float()) for p, s in optimizer.state.items())


def test_masters_follow_weights_loaded_without_the_optimizer(ranks, tmp_path):
    assert ranks.run(_weights_alone, 2, str(tmp_path)) == [True, True]


def _rotated(folder):
    strategy, model, _, _ = session({}, models.untied)
    for step in (1, 2, 3, 10):
        strategy.save_ckpt(model, folder, f"global_step{step}", max_num=2)
    strategy.save_ckpt(model, folder, "global_step10", max_num=2)  # again
    return sorted(name for name in os.listdir(folder) if name.startswith("global"))


def test_rotation_counts_committed_checkpoints_by_step(ranks, tmp_path):
    (tmp_path / "tensorboard").mkdir()
    assert ranks.run(_rotated, 2, str(tmp_path))[0] == ["global_step10", "global_step3"]
    assert (tmp_path / "tensorboard").exists()


def _meta_resume(folder):
    parts = session({}, models.untied)
    strategy, source, optimizer, _ = parts
    train(parts, range(1))
    strategy.save_ckpt(source, folder, optimizer=optimizer)
    with strategy.init_model_context(meta_init=True):
        model = models.untied()
    strategy.prepare_model(model)
    with pytest.raises(SaveError, match="never given values"):
        strategy.save_ckpt(model, folder)
    with pytest.raises(SaveError, match="never given values"):
        strategy.save_model(model, None, folder + "/hf")
    strategy.load_ckpt(model, folder)
    strategy.save_ckpt(model, folder, step=9)
    weights, expected = models.weights(model), models.weights(source)
    return all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_meta_model_is_loaded_before_it_is_saved(ranks, tmp_path):
    assert ranks.run(_meta_resume, 2, str(tmp_path)) == [True, True]


def _export(folder, build, config, shard_size):
    strategy = FSDPStrategy(FSDPConfig.from_dict(config))
    model = strategy.prepare_model(models.made(build))
    tokens = models.batch(0)
    with torch.no_grad():
        logits = model(tokens).logits
    strategy.save_model(model, None, folder, max_shard_size=shard_size)
    with pytest.raises(CheckpointExistsError):
        strategy.save_model(model, None, folder)
    return logits, models.weights(model)


def qwen_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("build", [models.llama, models.tied_llama, qwen_moe])
@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_an_export_loads_with_from_pretrained_and_equal_logits(ranks, tmp_path, build, shard_size):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "hf"
    results = ranks.run(_export, 2, str(folder), build, {}, shard_size)
    logits, weights = results[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == build().__class__.__name__
    found = model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    with torch.no_grad():
        assert torch.allclose(model(models.batch(0)).logits, logits, atol=1e-5)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "4KB") == (folder / "model.safetensors.index.json").exists()
    names = [name for path in files for name in load_file(path)]
    assert ("lm_head.weight" in names) != (build is models.tied_llama)
    assert not any(name.endswith("gate_up_proj") for name in names)  # one tensor per expert, as on the hub


def _export_cast(folder):
    strategy = FSDPStrategy()
    model = strategy.prepare_model(models.made(models.llama))

    class Tokenizer:
        def save_pretrained(self, path):
            with open(os.path.join(path, "tokenizer.json"), "w") as file:
                file.write("{}")

    strategy.save_model(model, Tokenizer(), folder, dtype="bf16")
    return models.weights(model)


def test_an_export_is_cast_on_request_and_includes_the_tokenizer(ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    weights = ranks.run(_export_cast, 2, str(tmp_path / "hf"))[0]
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(value, weights[name].bfloat16()) for name, value in model.state_dict().items())


def _failing_export(folder):
    from ckptkit.fsdp import hf_save

    strategy = FSDPStrategy()
    model = strategy.prepare_model(models.made(models.llama))
    written = []

    def fail(value):
        written.append(1)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return original(value)

    original, hf_save._bytes = hf_save._bytes, fail
    with pytest.raises((SaveError, OSError), match="No space left"):
        strategy.save_model(model, None, folder)
    hf_save._bytes = original
    dist.barrier()  # rank 0 removes its files before it fails, and the others do not wait for that
    return os.listdir(os.path.dirname(folder))


def test_an_export_that_fails_fails_on_all_ranks_and_leaves_nothing(tmp_path):
    assert run_ranks(_failing_export, 2, str(tmp_path / "hf")) == [[], []]


def _seeds(config):
    """Return the first numbers of each generator after setup, and whether `prepare_model` has drawn none."""
    strategy = FSDPStrategy(FSDPConfig.from_dict(config), seed=7)
    strategy.setup_distributed()
    state = torch.get_rng_state()
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"} if strategy.config.tp > 1 else None
    model = models.untied()
    torch.set_rng_state(state)
    strategy.prepare_model(model, tp_plan=plan)
    first = torch.nn.functional.dropout(torch.ones(64)), random.random(), np.random.rand()
    torch.manual_seed(7 + strategy.data_parallel_rank)
    return [str(value) for value in first], torch.equal(first[0], torch.nn.functional.dropout(torch.ones(64)))


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({}, [[0], [1], [2], [3]]),
        ({"sharding_strategy": "HYBRID_SHARD", "shard": 2}, [[0], [1], [2], [3]]),
        ({"tp": 2}, [[0, 1], [2, 3]]),
        ({"cp": 2}, [[0, 1], [2, 3]]),
        ({"tp": 2, "cp": 2}, [[0, 1, 2, 3]]),
    ],
    ids=["1d", "hsdp", "tp", "cp", "tp-cp"],
)
def test_dropout_differs_only_between_data_parallel_ranks(ranks, config, groups):
    found = ranks.run(_seeds, 4, config)
    assert all(as_promised for _, as_promised in found)
    for kind in range(3):
        drawn = [values[kind] for values, _ in found]
        assert len(set(drawn)) == len(groups)
        assert all(len({drawn[rank] for rank in group}) == 1 for group in groups)


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None])
def test_an_invalid_seed_is_refused(seed):
    from ckptkit.fsdp.setup import set_seed

    with pytest.raises(UsageError, match="seed is"):
        set_seed(seed)


def _samples(config):
    strategy = FSDPStrategy(FSDPConfig.from_dict(config))
    sampler = torch.utils.data.DistributedSampler(
        range(12), strategy.data_parallel_size, strategy.data_parallel_rank, shuffle=True
    )
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=strategy.data_parallel_mesh.get_group())
    return strategy.data_parallel_rank, strategy.data_parallel_size, list(sampler), total.item()


@pytest.mark.parametrize(
    ("config", "expected", "totals"),
    [
        ({}, [0, 1, 2, 3], [6, 6, 6, 6]),
        ({"sharding_strategy": "HYBRID_SHARD", "shard": 2}, [0, 1, 2, 3], [6, 6, 6, 6]),
        ({"tp": 2}, [0, 0, 1, 1], [2, 4, 2, 4]),
        ({"cp": 2}, [0, 0, 1, 1], [2, 4, 2, 4]),
        ({"cp": 2, "tp": 2}, [0, 0, 0, 0], [0, 1, 2, 3]),
    ],
    ids=["1d", "hsdp", "tp", "cp", "tp-cp"],
)
def test_a_sampler_gives_tp_and_cp_ranks_the_same_samples(ranks, config, expected, totals):
    found = ranks.run(_samples, 4, config)
    size = max(expected) + 1
    assert [(rank, count) for rank, count, _, _ in found] == [(rank, size) for rank in expected]
    assert [total for *_, total in found] == totals
    parts = {}
    for rank, _, part, _ in found:
        assert parts.setdefault(rank, part) == part
    assert sorted(sample for part in parts.values() for sample in part) == list(range(12))


def _odd_ranks():
    with pytest.raises(UsageError, match=r"tp x cp = 2 .* world size 3"):
        FSDPStrategy(FSDPConfig(tp=2)).setup_distributed()


def test_ranks_that_are_not_a_multiple_of_tp_are_refused_at_setup(ranks):
    ranks.run(_odd_ranks, 3)


def _with_dropout(folder, config, steps, resumes):
    """Return losses, weights and the next random numbers; saved after two steps."""
    strategy = FSDPStrategy(FSDPConfig.from_dict(config), seed=11 if not resumes else 12)
    strategy.setup_distributed()
    torch_state = torch.get_rng_state()
    model = models.made(models.untied)
    torch.set_rng_state(torch_state)
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"} if strategy.config.tp > 1 else None
    for layer in model.layers:
        layer.register_forward_hook(lambda module, given, out: torch.nn.functional.dropout(out, 0.3))
    strategy.prepare_model(model, tp_plan=plan)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    if resumes:
        strategy.load_ckpt(model, folder, optimizer=optimizer)
    losses = []
    for step in steps:
        tokens = models.part(models.batch(step), strategy.data_parallel_size, strategy.data_parallel_rank)
        loss = models.loss_of(model, tokens)
        strategy.backward(loss, model, optimizer)
        assert strategy.optimizer_step(optimizer, model)
        losses.append(loss.item())
        if not resumes and step == 1:
            strategy.save_ckpt(model, folder, optimizer=optimizer)
    return losses, {n: models.whole(p) for n, p in model.named_parameters()}, torch.rand(2).tolist()


@pytest.mark.parametrize("config", [{}, {"tp": 2}], ids=["1d", "tp"])
def test_dropout_continues_bit_for_bit_after_a_resume(ranks, tmp_path, config):
    whole = ranks.run(_with_dropout, 4, str(tmp_path), config, range(4), False)
    resumed = ranks.run(_with_dropout, 4, str(tmp_path), config, range(2, 4), True)
    for one, other in zip(whole, resumed, strict=True):
        assert one[0][2:] == other[0]
        assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
        assert one[2] == other[2]


@pytest.mark.parametrize(
    ("saved", "size", "config", "groups"),
    [
        ({"tp": 2}, 2, {"tp": 2}, [[0, 1]]),
        ({}, 4, {"tp": 2}, [[0, 1], [2, 3]]),
        ({"tp": 2}, 4, {}, [[0], [1], [2], [3]]),
    ],
    ids=["fewer-ranks", "tp-now", "tp-before"],
)
def test_tensor_parallel_ranks_draw_the_same_numbers_on_any_layout(ranks, tmp_path, saved, size, config, groups):
    ranks.run(_with_dropout, 4, str(tmp_path), saved, range(2), False)
    found = ranks.run(_with_dropout, size, str(tmp_path), config, [], True)
    drawn = [tuple(values) for *_, values in found]
    assert len(set(drawn)) == len(groups)
    assert all(len({drawn[rank] for rank in group}) == 1 for group in groups)


def _nan_norm():
    strategy = FSDPStrategy()
    model = strategy.prepare_model(models.untied())
    optimizer = strategy.create_optimizer(model)
    before = models.weights(model)
    strategy.backward(models.loss_of(model, models.batch(0)) * math.nan, model, optimizer)
    assert strategy.last_outcome is None
    assert strategy.optimizer_step(optimizer, model) is False
    assert strategy.last_outcome == "skipped"
    assert strategy.global_step == 0
    after = models.weights(model)
    assert not any(isinstance(value, DTensor) for value in after.values())
    return dist.get_rank(), all(torch.equal(before[name], after[name]) for name in before)


def test_a_nan_gradient_skips_the_step(ranks):
    assert ranks.run(_nan_norm, 2) == [(0, True), (1, True)]


def _refuses_nonfinite(precision):
    """One element of one gradient is NaN in rank 1's shard."""
    config = FSDPConfig(mixed_precision="bf16", precision=precision)
    strategy = FSDPStrategy(config, error_if_nonfinite=True)
    model = strategy.prepare_model(models.made(models.untied))
    optimizer = strategy.create_optimizer(model)
    before = models.weights(model)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    gradient = model.layers[1].up.weight.grad.to_local()
    value = gradient[0, 0].item()
    if dist.get_rank() == 1:
        gradient[0, 0] = math.nan
    here = "not finite: layers.1.up.weight" if dist.get_rank() == 1 else "those of another rank are not"
    with pytest.raises(
        NonFiniteGradientError, match=f"rank {dist.get_rank()}: the norm of the gradients is nan.*{here}"
    ):
        strategy.optimizer_step(optimizer, model)
    same = [torch.equal(value, before[name]) for name, value in models.weights(model).items()]
    gradient[0, 0] = value  # the gradients were kept: the step can still be taken
    return all(same), strategy.optimizer_step(optimizer, model), strategy.global_step


@pytest.mark.parametrize("precision", ["mixed", "master"])
def test_a_nan_gradient_is_an_error_on_request(ranks, precision):
    assert ranks.run(_refuses_nonfinite, 2, precision) == [(True, True, 1)] * 2


def test_only_an_optimizer_with_masters_is_an_mp_optimizer():
    base = torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    assert not FSDPStrategy().is_mp_optimizer(base)
    assert FSDPStrategy().is_mp_optimizer(MasterWeightOptimizer(base))


def _not_strict(folder):
    strategy, model, _, _ = session({}, models.untied)
    strategy.save_ckpt(model, folder, step=1)
    saved = models.weights(model)
    strategy = FSDPStrategy()
    plain = models.made(models.untied, seed=5)
    plain.more = nn.Linear(3, 3)
    del plain.norm.bias
    plain.norm.bias = None
    other = strategy.prepare_model(plain)
    with pytest.raises(CheckpointMismatchError, match="more"):
        strategy.load_ckpt(other, folder)
    strategy.load_ckpt(other, folder, load_module_strict=False)
    report = strategy.last_load
    assert report.missing == ["model.more.weight", "model.more.bias"]
    assert report.unexpected == ["model.norm.bias"]
    found = models.weights(other)
    return all(torch.equal(found[name], saved[name]) for name in saved if name != "norm.bias")


def test_without_strict_matching_weights_are_loaded(ranks, tmp_path):
    assert ranks.run(_not_strict, 2, str(tmp_path)) == [True, True]


# LightRFT's methods and the order of their arguments (strategy_base.py, fsdpv2.py).
VERBS = {
    "init_model_context": ["meta_init"],
    "prepare_model": ["model", "is_training", "shard_size", "reshard_after_forward"],
    "create_optimizer": ["model"],
    "backward": ["loss", "model", "optimizer"],
    "optimizer_step": ["optimizer", "model", "scheduler", "name"],
    "maybe_offload_optimizer": ["optimizer"],
    "maybe_load_optimizer": ["optimizer"],
    "offload_model": ["models", "empty_cache"],
    "reload_model": ["models"],
    "unwrap_model": ["model"],
    "is_mp_optimizer": ["optimizer"],
    "save_ckpt": [
        "model", "save_dir", "tag", "max_num", "max_mem", "client_state", "save_latest", "optimizer", "scheduler"
    ],
    "load_ckpt": [
        "model", "load_dir", "optimizer", "scheduler", "load_module_strict", "load_optimizer_states",
        "load_lr_scheduler_states",
    ],
    "save_model": ["model", "tokenizer", "output_dir"],
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_methods_take_their_arguments_in_the_order_of_lightrft(verb):
    parameters = inspect.signature(getattr(FSDPStrategy, verb)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    assert positional == VERBS[verb]
    defaults = {p.name: p.default for p in parameters}
    if verb == "save_ckpt":
        assert (defaults["tag"], defaults["max_num"], defaults["max_mem"], defaults["save_latest"]) == (
            None, 3, 1000, True
        )  # fmt: skip
