"""FSDPStrategy: its methods, alone and in combination."""

import contextlib
import errno
import functools
import inspect
import itertools
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

from ckptkit import CheckpointManager, TrainState
from ckptkit.checkpoint.save.stream import SafetensorsStream
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CkptkitError,
    IncompleteCheckpointError,
    NonFiniteGradientError,
    SaveError,
    UsageError,
)
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from ckptkit.fsdp.accumulation import accumulation_steps
from ckptkit.fsdp.strategy import ModelOptimPair
from tests.fsdp import models
from tests.patches import refuse
from tests.ranks import on_ranks

SGD = functools.partial(torch.optim.SGD, lr=0.5)


@pytest.mark.parametrize(
    ("train", "micro", "ranks", "steps"), [(None, 3, 7, 1), (8, 1, 2, 4), (8, 4, 2, 1), (12, 2, 1, 6)]
)
def test_batch_sizes_give_the_accumulation_count(train, micro, ranks, steps):
    assert accumulation_steps(train, micro=micro, world_size=ranks) == steps


@on_ranks(2)
def test_uneven_batches_and_ranks_are_refused_at_setup():
    with pytest.raises(UsageError, match=r"train_batch_size 6 .* micro_train_batch_size 4 x 2 .* = 8"):
        FSDPStrategy(micro_train_batch_size=4, train_batch_size=6).setup_distributed()
    with pytest.raises(UsageError, match=r"tp x cp = 3 .* world size 2"):
        FSDPStrategy(FSDPConfig(tp=3)).setup_distributed()


@on_ranks(2)
def test_prepared_models_and_other_objects_are_returned_unchanged():
    strategy = FSDPStrategy()
    assert strategy.prepare_model(None) is None
    assert strategy.prepare_model("text") == "text"
    model = strategy.prepare_model(models.untied())
    assert strategy.prepare_model(model) is model
    actor = nn.Module()
    actor.base_model = model
    assert strategy.prepare_model(actor) is actor
    assert not isinstance(actor, FSDPModule)


@on_ranks(4)
def test_shard_sizes_become_meshes():
    strategy = FSDPStrategy()
    for size, mesh in ((None, (4,)), (-1, (4,)), (1, (4, 1)), (2, (2, 2)), (4, (4,)), ("auto", (4, 1))):
        model = strategy.prepare_model(models.untied(), is_training=size != "auto", shard_size=size)
        parameter = next(model.parameters())
        assert parameter.device_mesh.shape == mesh  # "auto": a small inference model is not sharded
        assert [str(p) for p in parameter.placements] == ["R", "S(0)"][-len(mesh) :]
    with pytest.raises(UsageError, match=r"shard_size is 3.*the 4 data-parallel ranks"):
        strategy.prepare_model(models.untied(), shard_size=3)


@on_ranks(2)
def test_inference_keeps_the_stored_dtype():
    strategy = FSDPStrategy(FSDPConfig(mixed_precision="bf16"))
    model = strategy.prepare_model(models.made(models.untied).half(), is_training=False)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@on_ranks(2)
def test_every_optimizer_clips_its_own_model_to_one_joint_norm():
    strategy = FSDPStrategy(max_norm=1e-3)
    actor, critic = (strategy.prepare_model(models.made(models.untied, seed)) for seed in (0, 1))
    pairs: list[ModelOptimPair] = [(model, strategy.create_optimizer(model, factory=SGD)) for model in (actor, critic)]
    for model, optimizer in pairs:
        before = models.weights(model)
        strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
        strategy.optimizer_step(optimizer, model, name="actor")
        moved = [(value - before[name]).flatten() for name, value in models.weights(model).items()]
        assert torch.cat(moved).norm().item() == pytest.approx(0.5e-3, rel=1e-3)


@on_ranks(2)
def test_swapped_arguments_are_refused_by_name(tmp_path):
    strategy, model, optimizer = models.prepared(train_batch_size=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    loss = models.loss_of(model, models.batch(0))
    state = strategy.maybe_offload_optimizer
    calls = [
        (r"backward\(loss, model, optimizer\): model is of type AdamW, expected a module. optimizer is of type "
         "FSDPTinyLM, expected an optimizer", lambda: strategy.backward(loss, optimizer, model)),
        ("loss is of type FSDPTinyLM, expected a tensor", lambda: strategy.backward(model, loss, optimizer)),
        (r"optimizer_step\(.*optimizer is .* model is ", lambda: strategy.optimizer_step(model, optimizer)),
        ("scheduler is 'actor', expected a scheduler", lambda: strategy.optimizer_step(optimizer, model, "actor")),
        ("name is of type LambdaLR", lambda: strategy.optimizer_step(optimizer, model, None, scheduler)),
        ("model is .* save_dir is ", lambda: strategy.save_ckpt(tmp_path, model)),
        ("tag is 7, expected a name or None. To name a step, pass", lambda: strategy.save_ckpt(model, tmp_path, 7)),
        ("step is '7', expected a whole number", lambda: strategy.save_ckpt(model, tmp_path, step="7")),
        ("model is .* load_dir is ", lambda: strategy.load_ckpt(tmp_path, model)),
        ("tokenizer is .* output_dir is None", lambda: strategy.save_model(model, tmp_path, None)),
        ("model is .* url is ", lambda: strategy.load_hf(tmp_path, model)),
        ("optimizer is ", lambda: state(model)),
        ("optimizer is ", lambda: strategy.maybe_load_optimizer(model)),
        ("found an optimizer", lambda: strategy.offload_model(optimizer)),
        ("found an optimizer", lambda: strategy.reload_model([model, optimizer])),
        ("optimizer is ", lambda: strategy.grad_scaler(model)),
        ("model is ", lambda: strategy.create_optimizer(list(model.parameters()))),
        ("model is ", lambda: strategy.reset_parameters(optimizer)),
        ("is_training is of type AdamW", lambda: strategy.prepare_model(models.untied(), optimizer)),
    ]  # fmt: skip
    before = models.weights(model)
    for message, call in calls:
        with pytest.raises(UsageError, match=message):
            call()
    assert os.listdir(tmp_path) == []
    models.assert_equal(models.weights(model), before)


@on_ranks(2)
def test_an_optimizer_without_a_parameter_of_the_sharded_model_is_refused():
    strategy, actor, optimizer = models.prepared()
    critic = models.untied()
    early = torch.optim.AdamW(critic.parameters())
    strategy.prepare_model(critic)
    assert models.step(strategy, actor, optimizer)
    with pytest.raises(UsageError, match=r"has no parameter of FSDPTinyLM.*another model's"):
        strategy.optimizer_step(optimizer, critic)
    with pytest.raises(UsageError, match=r"no parameter of FSDPTinyLM.*created before prepare_model"):
        models.step(strategy, critic, early)
    with pytest.raises(UsageError, match="no trainable parameter"):
        strategy.create_optimizer(strategy.prepare_model(models.untied().requires_grad_(False)))


@pytest.mark.parametrize("names", [(), ("head",)], ids=["all", "one"])
@pytest.mark.parametrize("precision", ["master", "mixed"])
@on_ranks(2)
def test_parameters_that_were_replaced_between_two_steps_are_refused_by_name(precision, names):
    strategy, model, optimizer = models.prepared({"precision": precision, "mixed_precision": "bf16"})
    for _ in range(2):
        assert models.step(strategy, model, optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value for name, value in state.items() if not names or any(part in name for part in names)}
    model.load_state_dict(state, strict=False)
    assert models.step(strategy, model, optimizer)
    model.load_state_dict(state, strict=False, assign=True)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    with pytest.raises(UsageError, match=f"{len(state)} parameters of .* were replaced .*{next(iter(state))}"):
        strategy.optimizer_step(optimizer, model)


@on_ranks(2)
def test_the_global_step_counts_steps_not_optimizers():
    strategy, actor, first = models.prepared()
    critic = strategy.prepare_model(models.made(models.untied))
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    found = []

    def step(model, optimizer):
        assert models.step(strategy, model, optimizer)
        found.append(strategy.global_step)

    for _ in range(2):
        step(actor, first)
        step(critic, second)
        step(critic, second)
    step(critic, strategy.create_optimizer(critic))  # a new optimizer works
    strategy.global_step = 100
    step(actor, first)
    step(critic, second)
    assert found == [1, 1, 2, 2, 3, 4, 5, 101, 101]


@on_ranks(2)
def test_optimizers_of_one_model_step_in_the_same_window():
    strategy = FSDPStrategy(train_batch_size=8, micro_train_batch_size=2)
    model = strategy.prepare_model(models.made(models.untied))
    head = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    rest = torch.optim.SGD([p for name, p in model.named_parameters() if "lm_head" not in name], lr=0.1)
    for index in range(4):
        strategy.backward(models.loss_of(model, models.batch(index)), model, head)
        for optimizer in (head, rest):
            assert strategy.optimizer_step(optimizer, model) == (index % 2 == 1)
            assert strategy.last_outcome == ("stepped" if index % 2 else "accumulating")
    assert strategy.global_step == 2


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(("config", "tolerance"), [
    ({}, 1e-6),
    ({"mixed_precision": "fp16", "initial_loss_scale": 64.0}, 5e-3),
    ({"mixed_precision": "bf16", "precision": "master"}, 3e-2),
], ids=["fp32", "fp16", "master"])  # fmt: skip
@on_ranks(2)
def test_the_last_accumulation_window_may_be_shorter(config, tolerance, every):
    strategy, model, optimizer = models.prepared(
        config, factory=SGD, max_norm=1.0, train_batch_size=8, sync_every_micro_batch=every
    )
    plain = models.made(models.untied)
    other = SGD(plain.parameters())
    for window in range(2):
        losses = []
        for index in range(2):
            tokens = models.batch(2 * window + index)
            strategy.backward(models.loss_of(model, tokens), model, optimizer, last=index == 1)
            assert all(parameter.grad is not None for parameter in model.parameters()) == (every or index == 1)
            strategy.optimizer_step(optimizer, model)
            assert strategy.last_outcome == ("stepped" if index else "accumulating")
            losses.append(models.loss_of(plain, tokens) / 2)
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step()
        other.zero_grad()
    assert models.difference(model, plain) < tolerance


@on_ranks(2)
def test_a_load_drops_the_gradients_of_an_open_window(tmp_path):
    strategy, model, optimizer = models.prepared(train_batch_size=4)
    strategy.save_ckpt(model, tmp_path, step=1)
    models.step(strategy, model, optimizer)
    with pytest.raises(UsageError, match=r"1 backward passes have not been used.*last=True"):
        strategy.load_ckpt(model, tmp_path)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer, last=True)
    assert strategy.optimizer_step(optimizer, model)
    strategy.load_ckpt(model, tmp_path)


def _without_sync(config, held):
    """Two passes, then a step: the first pass in no_sync(), or both as an accumulation window."""
    size = {} if held else {"train_batch_size": 4, "micro_train_batch_size": 1}
    strategy, model, optimizer = models.prepared(config, max_norm=0.05, **size)
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


@pytest.mark.parametrize("config", [
    {}, {"sharding_strategy": "NO_SHARD"}, {"mixed_precision": "bf16", "precision": "master"},
], ids=["sharded", "replicated", "master"])  # fmt: skip
@on_ranks(2)
def test_no_sync_accumulates_like_a_window(config):
    (told, weights, norm), (expected, others, other_norm) = (_without_sync(config, held) for held in (True, False))
    assert told == expected == [(False, "accumulating"), (True, "stepped")] * 2
    assert torch.equal(norm, other_norm)
    models.assert_equal(weights, others)  # halving before or after a sum


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks("world_size")
def test_context_parallel_training_equals_training_on_whole_sequences(world_size):
    from torch.distributed.tensor.experimental import context_parallel

    strategy, model, optimizer = models.prepared({"cp": 2}, factory=SGD)
    mesh = strategy.context_parallel_mesh
    tokens = models.batch(strategy.data_parallel_rank)[:, :5]
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # shifted before the split
    with context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[1, 1], no_restore_buffers={inputs, labels}):
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        strategy.backward(loss, model, optimizer)
    assert strategy.optimizer_step(optimizer, model)
    plain = models.made(models.untied)
    other = SGD(plain.parameters())
    batches = [models.batch(index) for index in range(strategy.data_parallel_size)]
    (sum(models.loss_of(plain, batch[:, :5]) for batch in batches) / len(batches)).backward()
    other.step()
    assert (mesh.size(), strategy.data_parallel_rank, inputs.shape[1]) == (2, dist.get_rank() // 2, 2)
    assert models.difference(model, plain) < 1e-6


@on_ranks(2)
def test_a_loss_that_was_not_scaled_is_refused():
    strategy, model, optimizer = models.prepared({"mixed_precision": "fp16"})
    models.loss_of(model, models.batch(0)).backward()
    with pytest.raises(UsageError, match=r"by the loss scale 65536.*strategy\.backward"):
        strategy.optimizer_step(optimizer, model)


@pytest.mark.parametrize("every", [True, False], ids=["after each backward", "after the last of a window"])
@on_ranks(2)
def test_the_scheduler_advances_with_the_steps(every):
    strategy, model, optimizer = models.prepared(train_batch_size=4, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    for index in range(6):
        strategy.backward(models.loss_of(model, models.batch(index)), model, optimizer)
        if every or index % 2:
            assert strategy.optimizer_step(optimizer, model, scheduler) == (index % 2 == 1)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], strategy.global_step) == (3, 0.25, 3)


CONFIGS = {
    "mixed": {"mixed_precision": "bf16"},
    "master": {"mixed_precision": "bf16", "precision": "master"},
    "master-fp16": {"mixed_precision": "fp16", "precision": "master", "initial_loss_scale": 128.0},
    "hsdp": {"sharding_strategy": "HYBRID_SHARD", "shard": 2},
    "tp": {"tp": 2},
    "full": {"state_dict_type": "FULL"},
    "local": {"state_dict_type": "LOCAL"},
}
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def dropout():
    model = models.untied()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, given, out: nn.functional.dropout(out, 0.3))
    return model


def session(config=None, build=models.untied):
    plan, options = (PLAN if "tp" in (config or {}) else None), {"max_norm": 1.0, "lr": 1e-2, "weight_decay": 0.1}
    strategy, model, optimizer = models.prepared(config, build, seed=8, tp_plan=plan, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)
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
    parts = strategy, model, optimizer, scheduler = session(config, build)
    torch.manual_seed(strategy.data_parallel_rank)
    train(parts, range(2))
    saved = {"client_state": {"epoch": 1}, "optimizer": optimizer, "scheduler": scheduler}
    report = strategy.save_ckpt(model, folder, "global_step2", **saved)
    assert report.step == 2
    return train(parts, range(2, 4)), models.weights(model), torch.rand(2).tolist()


def _resume(folder, config, build):
    parts = strategy, model, optimizer, scheduler = session(config, build)
    path, client = strategy.load_ckpt(model, folder, optimizer=optimizer, scheduler=scheduler)
    assert path.endswith("global_step2") and client == {"epoch": 1}
    assert strategy.global_step == scheduler.last_epoch == 2
    return train(parts, range(2, 4)), models.weights(model), torch.rand(2).tolist()


@pytest.mark.parametrize(("build", "kind"), [
    *itertools.product((dropout, models.tied), CONFIGS), *((models.lora, kind) for kind in CONFIGS if kind != "tp")
])  # fmt: skip
def test_a_resumed_run_continues_bit_for_bit(ranks, tmp_path, kind, build):
    saved, resumed = (ranks.run(run, 4, tmp_path, CONFIGS[kind], build) for run in (_save, _resume))
    for (losses, weights, drawn), (later, found, drawn_later) in zip(saved, resumed, strict=True):
        assert later == losses
        models.assert_equal(found, weights)
        assert drawn_later == drawn


@on_ranks(2)
def test_requested_state_must_exist_unless_its_flag_is_off(tmp_path):
    parts = strategy, model, optimizer, scheduler = session()
    assert strategy.load_ckpt(model, tmp_path, optimizer=optimizer) == (None, {})
    train(parts, range(2))
    strategy.save_ckpt(model, tmp_path)  # without its optimizer
    with pytest.raises(CkptkitError, match="optimizer"):
        strategy.load_ckpt(model, tmp_path, optimizer=optimizer)
    strategy.load_ckpt(model, tmp_path, optimizer=optimizer, load_optimizer_states=False)
    with pytest.raises(CkptkitError, match="scheduler"):
        strategy.load_ckpt(model, tmp_path, scheduler=scheduler)
    strategy.load_ckpt(model, tmp_path, scheduler=scheduler, load_lr_scheduler_states=False)
    other = models.untied()
    other.more = nn.Linear(3, 3)
    strategy.prepare_model(other)
    with pytest.raises(CheckpointMismatchError, match=r"(?s)more.*strict=False is load_module_strict=False\.$"):
        strategy.load_ckpt(other, tmp_path)
    strategy.load_ckpt(other, tmp_path, load_module_strict=False)
    assert strategy.last_load.missing == ["model.more.weight", "model.more.bias"]


@on_ranks(2)
def test_an_incomplete_copy_is_an_error_unless_start_fresh_allows_it(tmp_path):
    parts = strategy, model, optimizer, _ = session()
    train(parts, range(1))
    strategy.save_ckpt(model, tmp_path, optimizer=optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(tmp_path, f"step_{strategy.global_step:08d}", "checkpoint.json").unlink()
    dist.barrier()
    with pytest.raises(IncompleteCheckpointError, match=r"FSDPStrategy\.load_ckpt"):
        strategy.load_ckpt(model, tmp_path, optimizer=optimizer)
    assert strategy.load_ckpt(model, tmp_path, optimizer=optimizer, start_fresh="if_none_committed") == (None, {})


@on_ranks(2)
def test_rotation_counts_committed_checkpoints_by_step(tmp_path):
    """It also keeps the checkpoint that the job resumed from."""

    def kept():
        dist.barrier()  # rank 0 deletes after the save
        return sorted(int(path.name[11:]) for path in tmp_path.glob("global_step*"))

    (tmp_path / "tensorboard").mkdir(exist_ok=True)
    strategy, model, _, _ = session()
    for step in (1, 2, 3, 10, 10):
        strategy.save_ckpt(model, tmp_path, f"global_step{step}", max_num=2)
    assert kept() == [3, 10] and (tmp_path / "tensorboard").exists()
    strategy.load_ckpt(model, tmp_path, which=3)
    for step in (11, 12):
        strategy.save_ckpt(model, tmp_path, f"global_step{step}", max_num=1)
    assert kept() == [3, 12]


@on_ranks(2)
def test_a_meta_model_is_loaded_before_it_is_saved(tmp_path):
    parts = strategy, source, optimizer, _ = session()
    train(parts, range(1))
    strategy.save_ckpt(source, tmp_path, optimizer=optimizer)
    with strategy.init_model_context(meta_init=True):
        model = models.untied()
    strategy.prepare_model(model)
    with pytest.raises(SaveError, match="never given values"):
        strategy.save_ckpt(model, tmp_path)
    with CheckpointManager(str(tmp_path / "run")) as manager:
        with pytest.raises(SaveError, match=r"embed\.weight was built on the meta device and never given values"):
            manager.save(1, TrainState(model=model))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                nn.init.ones_(parameter) if number % 2 else parameter.data.zero_()  # as people initialize, too
        manager.save(1, TrainState(model=model))
    strategy.load_ckpt(model, tmp_path)
    strategy.save_ckpt(model, tmp_path, step=9)
    models.assert_equal(models.weights(model), models.weights(source))


@pytest.mark.parametrize("build", [models.llama, models.tied_llama, models.qwen_moe])
@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
@on_ranks(2)
def test_an_export_loads_with_from_pretrained_and_equal_logits(tmp_path, build, shard_size):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "hf"
    strategy, model, _ = models.prepared(build=build)
    strategy.save_model(model, None, folder, max_shard_size=shard_size)
    with pytest.raises(CheckpointExistsError):
        strategy.save_model(model, None, folder)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert type(exported).__name__ == build().__class__.__name__
    models.assert_equal(exported.state_dict(), models.weights(model))
    with torch.no_grad():
        assert torch.allclose(exported(models.batch(0)).logits, model(models.batch(0)).logits, atol=1e-5)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "4KB") == (folder / "model.safetensors.index.json").exists()
    names = [name for path in files for name in load_file(path)]
    assert ("lm_head.weight" in names) != (build is models.tied_llama)
    assert not any(name.endswith("gate_up_proj") for name in names)  # one tensor per expert, as on the hub


class Tokenizer:
    def save_pretrained(self, path):
        Path(path, "tokenizer.json").write_text("{}")


@on_ranks(2)
def test_an_export_is_cast_on_request_and_includes_the_tokenizer(tmp_path):
    from transformers import AutoModelForCausalLM

    strategy, model, _ = models.prepared(build=models.llama)
    strategy.save_model(model, Tokenizer(), tmp_path / "hf", dtype="bf16")
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    models.assert_equal(exported, {name: value.bfloat16() for name, value in models.weights(model).items()})


@on_ranks(2)
def test_an_export_that_fails_fails_on_all_ranks_and_leaves_nothing(tmp_path, monkeypatch):
    fatal = "model.layers.1.mlp.up_proj.weight"
    refuse(monkeypatch, SafetensorsStream, "write", errno.ENOSPC, when=lambda stream, name, values: name == fatal)
    strategy, model, _ = models.prepared(build=models.llama)
    with pytest.raises((SaveError, OSError), match="No space left"):
        strategy.save_model(model, None, tmp_path / "hf")
    dist.barrier()  # rank 0 removes its files before it fails, and the others do not wait for that
    assert list(tmp_path.iterdir()) == []


def equal_ranks(values):
    """Return the groups of ranks that have equal values."""
    return [list(ranks) for _, ranks in itertools.groupby(range(len(values)), key=lambda rank: values[rank])]


LAYOUTS = {  # ranks of the data, the same for ranks that share samples
    "1d": ({}, [0, 1, 2, 3]),
    "hsdp": ({"sharding_strategy": "HYBRID_SHARD", "shard": 2}, [0, 1, 2, 3]),
    "tp": ({"tp": 2}, [0, 0, 1, 1]),
    "cp": ({"cp": 2}, [0, 0, 1, 1]),
    "tp-cp": ({"tp": 2, "cp": 2}, [0, 0, 0, 0]),
}


def _draws(config):
    """Return the first numbers of each generator after setup, and the samples; `prepare_model` must draw none."""
    model, strategy = models.made(models.untied), FSDPStrategy(FSDPConfig.from_dict(config), seed=7)
    strategy.setup_distributed()
    strategy.prepare_model(model, tp_plan=PLAN if "tp" in config else None)
    first = torch.nn.functional.dropout(torch.ones(64)), random.random(), np.random.rand()
    rank, size = strategy.data_parallel_rank, strategy.data_parallel_size
    torch.manual_seed(7 + rank)
    assert torch.equal(first[0], torch.nn.functional.dropout(torch.ones(64)))
    samples = list(torch.utils.data.DistributedSampler(range(12), size, rank, shuffle=True))
    group = dist.get_process_group_ranks(strategy.data_parallel_mesh.get_group())
    assert len(set(group)) == size and dist.get_rank() in group
    assert (strategy.context_parallel_mesh is None) == ("cp" not in config)
    return [str(value) for value in first], rank, size, samples, sorted(group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_and_samples_differ_only_between_data_parallel_ranks(ranks, layout):
    config, expected = LAYOUTS[layout]
    drawn, numbers, sizes, samples, groups = zip(*ranks.run(_draws, 4, config), strict=True)
    for kind in range(3):
        assert equal_ranks([values[kind] for values in drawn]) == equal_ranks(expected)
    assert list(numbers) == expected and set(sizes) == {max(expected) + 1}
    for group in groups:
        assert [expected[rank] for rank in group] == list(range(max(expected) + 1))
    assert equal_ranks(samples) == equal_ranks(expected)
    assert sorted(sample for part in set(map(tuple, samples)) for sample in part) == list(range(12))


def _drawn_after_a_load(folder, config):
    strategy, model, optimizer, _ = session(config, dropout)
    strategy.load_ckpt(model, folder, optimizer=optimizer)
    return torch.rand(2).tolist()


@pytest.mark.parametrize(("saved", "size", "config", "groups"), [
    ({"tp": 2}, 2, {"tp": 2}, [[0, 1]]),
    ({}, 4, {"tp": 2}, [[0, 1], [2, 3]]),
    ({"tp": 2}, 4, {}, [[0], [1], [2], [3]]),
], ids=["fewer-ranks", "tp-now", "tp-before"])  # fmt: skip
def test_tensor_parallel_ranks_draw_the_same_numbers_on_any_layout(ranks, tmp_path, saved, size, config, groups):
    ranks.run(_save, 4, tmp_path, saved, dropout)
    assert equal_ranks(ranks.run(_drawn_after_a_load, size, tmp_path, config)) == groups


@pytest.mark.parametrize("precision", ["mixed", "master"])
@on_ranks(2)
def test_a_nan_gradient_is_an_error_on_request(precision):
    config = {"mixed_precision": "bf16", "precision": precision}
    strategy, model, optimizer = models.prepared(config, error_if_nonfinite=True)
    before = models.weights(model)
    strategy.backward(models.loss_of(model, models.batch(0)), model, optimizer)
    gradient = model.layers[1].up.weight.grad.to_local()
    value = gradient[0, 0].item()
    if dist.get_rank() == 1:
        gradient[0, 0] = math.nan
    here = "not finite: layers.1.up.weight" if dist.get_rank() == 1 else "those of another rank are not"
    words = f"rank {dist.get_rank()}: the norm of the gradients is nan.*{here}"
    with pytest.raises(NonFiniteGradientError, match=words):
        strategy.optimizer_step(optimizer, model)
    models.assert_equal(models.weights(model), before)
    gradient[0, 0] = value  # the gradients were kept: the step can still be taken
    assert strategy.optimizer_step(optimizer, model)
    assert strategy.global_step == 1


# LightRFT's methods and the order of their arguments (strategy_base.py, fsdpv2.py).
VERBS = {
    "init_model_context": "meta_init",
    "prepare_model": "model is_training shard_size reshard_after_forward",
    "create_optimizer": "model",
    "backward": "loss model optimizer",
    "optimizer_step": "optimizer model scheduler name",
    "maybe_offload_optimizer": "optimizer",
    "maybe_load_optimizer": "optimizer",
    "offload_model": "models empty_cache",
    "reload_model": "models",
    "unwrap_model": "model",
    "is_mp_optimizer": "optimizer",
    "save_ckpt": "model save_dir tag max_num max_mem client_state save_latest optimizer scheduler",
    "load_ckpt": "model load_dir optimizer scheduler load_module_strict load_optimizer_states load_lr_scheduler_states",
    "save_model": "model tokenizer output_dir",
}


@pytest.mark.parametrize("verb", VERBS)
def test_methods_take_their_arguments_in_the_order_of_lightrft(verb):
    parameters = inspect.signature(getattr(FSDPStrategy, verb)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    assert positional == VERBS[verb].split()
    defaults = {p.name: p.default for p in parameters}
    if verb == "save_ckpt":
        given = [defaults[name] for name in ("tag", "max_num", "max_mem", "save_latest")]
        assert given == [None, 3, 1000, True]
