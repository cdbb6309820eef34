"""A real Lightning Fabric on one and two CPU ranks, with the strategy by its registered name."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from importlib.util import find_spec

import pytest
import torch

from ckptkit import open_checkpoint
from ckptkit.errors import CheckpointMismatchError, UsageError
from tests.checkpoint.states import bits
from tests.fsdp import models

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not find_spec("lightning"), reason="no lightning")]


def _fabric(strategy="fsdp2", **options):
    """Return a Fabric in a process that torchrun has started."""
    warnings.filterwarnings("ignore")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    import ckptkit.integrations.lightning  # noqa: F401  registers the names

    ranks = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=[TorchElasticEnvironment()], **options)
    fabric.launch()
    return fabric


def _made(fabric, seed):
    with fabric.init_module(empty_init=seed is None):
        model = models.made(models.untied, seed or 0)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "step": 0,
    }


def _trained(fabric, state, steps):
    """Accumulate over two passes without communication, clip, step."""
    for step in range(state["step"], steps):
        for index in range(2):
            with fabric.no_backward_sync(state["model"], enabled=index == 0):
                fabric.backward(models.loss_of(state["model"], models.batch(2 * step + index)))
        fabric.clip_gradients(state["model"], state["optimizer"], max_norm=0.1)
        state["optimizer"].step()
        state["schedule"].step()
        state["optimizer"].zero_grad()
        state["step"] = step + 1
    weights = {name: models.whole(value) for name, value in state["model"].state_dict().items()}
    return weights, [group["lr"] for group in state["optimizer"].param_groups]


def _saved(folder, strategy):
    from torch.distributed.tensor import DTensor

    fabric = _fabric(strategy)
    state = _made(fabric, 1)
    assert all(isinstance(parameter, DTensor) for parameter in state["model"].parameters())
    group = state["model"].layers[0]._get_fsdp_state()._fsdp_param_group
    assert group.offload_policy.__class__.__name__ == ("CPUOffloadPolicy" if "offload" in strategy else "OffloadPolicy")
    _trained(fabric, state, 2)
    fabric.save(f"{folder}/step-2", {**state, "note": "mine"})
    fabric.save(f"{folder}/head", {"model": state["model"]}, filter={"model": lambda name, value: "head" in name})
    with pytest.raises(UsageError, match="only the tensors of modules"):
        fabric.save(f"{folder}/none", state, filter={"optimizer": lambda name, value: True})
    return _trained(fabric, state, 4)


def _resumed(folder, strategy, seed):
    fabric = _fabric(strategy)
    state = _made(fabric, seed)
    left = fabric.load(f"{folder}/step-2", state)
    assert (left, state["step"]) == ({"note": "mine"}, 2)
    with pytest.raises(CheckpointMismatchError, match="missing"):
        fabric.load(f"{folder}/head", {"model": state["model"]})
    fabric.load(f"{folder}/head", {"model": state["model"]}, strict=False)
    return _trained(fabric, state, 4)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_full", "fsdp2_cpu_offload"])
def test_a_fabric_run_resumes_bit_equal_with_the_registered_strategy(framework_ranks, tmp_path, strategy):
    saved = framework_ranks.run(_saved, 2, str(tmp_path), strategy, timeout=240)
    for seed in (2, None):  # None: on the meta device
        for (weights, rates), (expected, other_rates) in zip(
            framework_ranks.run(_resumed, 2, str(tmp_path), strategy, seed, timeout=240), saved, strict=True
        ):
            assert rates == other_rates
            assert all(torch.equal(weights[name], value) for name, value in expected.items())


def _strategy(**options):
    from ckptkit.integrations.lightning import FSDP2FabricStrategy

    return FSDP2FabricStrategy(**options)


def _interrupted(folder):
    before = signal.getsignal(signal.SIGTERM)
    fabric = _fabric(_strategy(on_signal="save"))
    state = _made(fabric, 3)
    for step in range(1, 5):
        _trained(fabric, state, step)
        if step == 2 and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if fabric.strategy.interrupted():
            fabric.save(f"{folder}/stopped", state)
            break
    fabric.strategy.teardown()
    return step, signal.getsignal(signal.SIGTERM) == before


def test_a_signal_on_one_rank_stops_the_loops_of_all_at_the_same_step(framework_ranks, tmp_path):
    assert framework_ranks.run(_interrupted, 2, str(tmp_path), timeout=240) == [(2, True)] * 2
    assert open_checkpoint(tmp_path / "stopped")["step"] == 2
    with pytest.raises(UsageError, match="on_signal is 'SIGTERM'"):
        _strategy(on_signal="SIGTERM")


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_full", "fsdp2_cpu_offload"])
def test_a_fabric_run_resumes_on_another_number_of_ranks(framework_ranks, tmp_path, strategy):
    expected, expected_rates = framework_ranks.run(_saved, 2, str(tmp_path), strategy, timeout=240)[0]
    weights, rates = framework_ranks.run(_resumed, 1, str(tmp_path), strategy, 2, timeout=240)[0]
    assert rates == expected_rates
    # Sums are taken in another order.
    assert all(torch.allclose(weights[name], value, rtol=0, atol=5e-5) for name, value in expected.items())


def _refused(folder):
    fabric = _fabric(precision="bf16-mixed")
    model = models.untied()
    with pytest.raises(UsageError, match=r"create the optimizer from model\.parameters"):
        fabric.setup(model, torch.optim.SGD(model.parameters()))
    model = fabric.setup(model)
    out = model(models.batch(0))
    for state in (None, {}, {"step": 1}):
        with pytest.raises(UsageError, match="pass the module to fill"):
            fabric.load(folder, state)
    return model.layers[0].up.weight.dtype, model.layers[0]._get_fsdp_state()._mp_policy.param_dtype, out.dtype


def test_fabric_sets_the_precision_and_untrainable_settings_are_refused(framework_ranks, tmp_path):
    assert framework_ranks.run(_refused, 2, str(tmp_path), timeout=240)[0][:2] == (torch.float32, torch.bfloat16)


def _theirs(folder):
    """Write a checkpoint with Fabric's own strategy."""
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    fabric = _fabric(ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1))
    state = _made(fabric, 1)
    state.pop("schedule")
    optimizer = state["optimizer"]
    fabric.backward(models.loss_of(state["model"], models.batch(0)))
    optimizer.step()
    fabric.save(f"{folder}/theirs", {**state, "step": 7})
    return {name: models.whole(value) for name, value in state["model"].state_dict().items()}


def _adopted(folder):
    fabric = _fabric()
    state = _made(fabric, 2)
    state.pop("schedule")
    assert fabric.load(f"{folder}/theirs", state) is not None
    moments = [values["step"].item() for values in state["optimizer"].state.values()]
    weights = {name: models.whole(value) for name, value in state["model"].state_dict().items()}
    return weights, state["step"], set(moments)


def test_a_checkpoint_of_fabrics_own_strategy_is_loaded(framework_ranks, tmp_path):
    expected = framework_ranks.run(_theirs, 2, str(tmp_path), timeout=240)[0]
    for weights, step, moments in framework_ranks.run(_adopted, 2, str(tmp_path), timeout=240):
        assert (step, moments) == (7, {1.0})
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def _two(fabric, seed):
    state = {}
    for offset, key in enumerate(("generator", "critic")):
        state[key] = fabric.setup(models.made(models.untied, seed + offset))
        made = torch.optim.SGD(state[key].parameters(), lr=0.1, momentum=0.9)
        state[f"{key}_optimizer"] = fabric.setup_optimizers(made)
    return state


def _all(state):
    weights = {key: {name: models.whole(value) for name, value in state[key].state_dict().items()} for key in MODELS}
    moments = {
        key: [models.whole(s["momentum_buffer"]) for s in state[f"{key}_optimizer"].state.values()] for key in MODELS
    }
    return bits((weights, moments))


MODELS = ("generator", "critic")


def _saved_two(folder):
    fabric = _fabric()
    state = _two(fabric, 1)
    for key in MODELS:
        fabric.backward(models.loss_of(state[key], models.batch(0)))
        state[f"{key}_optimizer"].step()
    fabric.save(f"{folder}/both", {**state, "step": 3})
    return _all(state)


def _loaded_one_by_one(folder):
    fabric = _fabric()
    state = _two(fabric, 5)
    for key in MODELS:
        chosen = {name: value for name, value in state.items() if name.startswith(key)}
        assert fabric.load(f"{folder}/both", chosen) == {"step": 3}
    loaded = _all(state)
    alone = _two(fabric, 7)
    fabric.load(f"{folder}/both", {"critic": alone["critic"]})
    same = [
        torch.equal(models.whole(a), models.whole(b))
        for a, b in zip(alone["critic"].parameters(), state["critic"].parameters(), strict=True)
    ]
    assert all(same) and not alone["critic_optimizer"].state
    return loaded


def test_one_of_several_modules_loads_with_its_optimizer(framework_ranks, tmp_path):
    saved = framework_ranks.run(_saved_two, 2, str(tmp_path), timeout=240)[0]
    for ranks in (2, 1):
        assert framework_ranks.run(_loaded_one_by_one, ranks, str(tmp_path), timeout=240) == [saved] * ranks


def _with_data(seed):
    from torchdata.stateful_dataloader import StatefulDataLoader

    fabric = _fabric()
    state = _made(fabric, seed)
    del state["schedule"]
    loader = StatefulDataLoader(list(range(10)), batch_size=1)
    return fabric, {**state, "data": fabric.setup_dataloaders(loader, use_distributed_sampler=False)}, loader


def _data_saved(folder):
    fabric, state, loader = _with_data(1)
    batches = iter(loader)
    for _ in range(2 + fabric.global_rank):
        next(batches)
    fabric.save(f"{folder}/data", state)


def _data_loaded(folder):
    fabric, state, loader = _with_data(2)
    records = []
    logger = logging.getLogger("ckptkit.integrations.lightning_state")
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        fabric.load(f"{folder}/data", state)
        fabric.load(f"{folder}/data", {"model": state["model"], "other": 7}, strict=False)
    finally:
        logger.removeHandler(handler)
    return next(batch.item() for batch in loader), [record.getMessage() for record in records]


def test_what_a_load_leaves_unchanged_is_warned_about(framework_ranks, tmp_path):
    framework_ranks.run(_data_saved, 2, str(tmp_path), timeout=240)
    (first, said), (second, none) = framework_ranks.run(_data_loaded, 2, str(tmp_path), timeout=240)
    assert (first, second, none) == (2, 3, [])
    assert len(said) == 1 and "1 missing (extra.extra.other)" in said[0]
    ((position, said),) = framework_ranks.run(_data_loaded, 1, str(tmp_path), timeout=240)
    assert position == 0 and len(said) == 2 and "1 skipped: dataloader_data (saved at world size 2" in said[0]
