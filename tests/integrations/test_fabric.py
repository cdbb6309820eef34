"""A real Lightning Fabric on one and two CPU ranks, with the strategy by its registered name."""

import os
import signal
import warnings
from importlib.util import find_spec

import pytest
import torch

from ckptkit import open_checkpoint
from ckptkit.errors import CheckpointMismatchError, UsageError
from tests.checkpoint.jobs import numbers
from tests.checkpoint.states import bits
from tests.fsdp import models
from tests.ranks import logged, on_ranks

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
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}


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
    return models.weights(state["model"]), [group["lr"] for group in state["optimizer"].param_groups]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_full", "fsdp2_cpu_offload"])
@on_ranks(2)
def test_a_fabric_run_resumes_bit_equal_with_the_registered_strategy(tmp_path, strategy):
    fabric = _fabric(strategy)
    state = _made(fabric, 1)
    group = state["model"].layers[0]._get_fsdp_state()._fsdp_param_group
    assert group.offload_policy.__class__.__name__ == ("CPUOffloadPolicy" if "offload" in strategy else "OffloadPolicy")
    _trained(fabric, state, 2)
    fabric.save(f"{tmp_path}/step-2", {**state, "note": "mine"})
    expected = bits(_trained(fabric, state, 4))
    for seed, path in ((2, "/step-2"), (None, "")):  # None: on the meta device; "": the newest checkpoint of the run
        fabric = _fabric(strategy)
        state = _made(fabric, seed)
        assert (fabric.load(f"{tmp_path}{path}", state), state["step"]) == ({"note": "mine"}, 2)
        assert bits(_trained(fabric, state, 4)) == expected


@on_ranks(2)
def test_a_filter_saves_a_part_of_a_module_which_only_a_load_that_is_not_strict_accepts(tmp_path):
    fabric = _fabric()
    first, second = (_made(fabric, seed) for seed in (1, 2))
    fabric.save(f"{tmp_path}/head", {"model": first["model"]}, filter={"model": lambda name, value: "head" in name})
    with pytest.raises(UsageError, match="only the tensors of modules"):
        fabric.save(f"{tmp_path}/none", first, filter={"optimizer": lambda name, value: True})
    with pytest.raises(CheckpointMismatchError, match="missing"):
        fabric.load(f"{tmp_path}/head", {"model": second["model"]})
    fabric.load(f"{tmp_path}/head", {"model": second["model"]}, strict=False)
    live = second["model"], first["model"], models.made(models.untied, 2)
    found, saved, own = (models.weights(model) for model in live)
    assert bits(found) == bits({name: (saved if "head" in name else own)[name] for name in found})


@on_ranks(2)
def test_a_signal_on_one_rank_stops_the_loops_of_all_at_the_same_step(tmp_path):
    from ckptkit.integrations.lightning import FSDP2FabricStrategy

    before = signal.getsignal(signal.SIGTERM)
    fabric = _fabric(FSDP2FabricStrategy(on_signal="save"))
    state = _made(fabric, 3)
    for step in range(1, 5):
        _trained(fabric, state, step)
        if step == 2 and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if fabric.strategy.interrupted():
            fabric.save(f"{tmp_path}/stopped", state)
            break
    fabric.strategy.teardown()
    assert step == open_checkpoint(tmp_path / "stopped")["step"] == 2
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(UsageError, match="on_signal is 'SIGTERM'"):
        FSDP2FabricStrategy(on_signal="SIGTERM")


@on_ranks(2)
def test_fabric_sets_the_precision_and_untrainable_settings_are_refused(tmp_path):
    fabric = _fabric(precision="bf16-mixed")
    model = models.untied()
    with pytest.raises(UsageError, match=r"create the optimizer from model\.parameters"):
        fabric.setup(model, torch.optim.SGD(model.parameters()))
    model = fabric.setup(model)
    model(models.batch(0))
    for state in (None, {}, {"step": 1}):
        with pytest.raises(UsageError, match="pass the module to fill"):
            fabric.load(tmp_path, state)
    assert model.layers[0].up.weight.dtype is torch.float32
    assert model.layers[0]._get_fsdp_state()._mp_policy.param_dtype is torch.bfloat16


@on_ranks(2)
def test_a_checkpoint_of_fabrics_own_strategy_is_loaded(tmp_path):
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def parallelize(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    fabric = _fabric(ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1))
    theirs = _made(fabric, 1)
    theirs.pop("schedule")
    fabric.backward(models.loss_of(theirs["model"], models.batch(0)))
    theirs["optimizer"].step()
    fabric.save(f"{tmp_path}/theirs", {**theirs, "step": 7})
    fabric = _fabric()
    state = _made(fabric, 2)
    state.pop("schedule")
    assert fabric.load(f"{tmp_path}/theirs", state) is not None
    assert (state["step"], {values["step"].item() for values in state["optimizer"].state.values()}) == (7, {1.0})
    assert bits(models.weights(state["model"])) == bits(models.weights(theirs["model"]))


MODELS = ("generator", "critic")


def _two(fabric, seed):
    state = {}
    for offset, key in enumerate(MODELS):
        state[key] = fabric.setup(models.made(models.untied, seed + offset))
        made = torch.optim.SGD(state[key].parameters(), lr=0.1, momentum=0.9)
        state[f"{key}_optimizer"] = fabric.setup_optimizers(made)
    return state


@on_ranks(2, 1)
def test_one_of_several_modules_loads_with_its_optimizer(tmp_path):
    def both_of(state):
        return {key: numbers(state[key], state[f"{key}_optimizer"]) for key in MODELS}

    fabric = _fabric()
    if torch.distributed.get_world_size() == 2:
        state = _two(fabric, 1)
        for key in MODELS:
            fabric.backward(models.loss_of(state[key], models.batch(0)))
            state[f"{key}_optimizer"].step()
        fabric.save(f"{tmp_path}/both", {**state, "step": 3})
        torch.save(both_of(state), tmp_path / f"both-{os.environ['RANK']}.pt")
    state, alone = _two(fabric, 5), _two(fabric, 7)
    for key in MODELS:
        chosen = {name: value for name, value in state.items() if name.startswith(key)}
        assert fabric.load(f"{tmp_path}/both", chosen) == {"step": 3}
    assert both_of(state) == torch.load(tmp_path / "both-0.pt", weights_only=False)
    fabric.load(f"{tmp_path}/both", {"critic": alone["critic"]})
    models.assert_equal(models.weights(alone["critic"]), models.weights(state["critic"]))
    assert not alone["critic_optimizer"].state


def _with_data(seed):
    from torchdata.stateful_dataloader import StatefulDataLoader

    fabric = _fabric()
    state = _made(fabric, seed)
    del state["schedule"]
    loader = StatefulDataLoader(list(range(10)), batch_size=1)
    return fabric, {**state, "data": fabric.setup_dataloaders(loader, use_distributed_sampler=False)}, loader


@on_ranks(2, 1)
def test_what_a_load_leaves_unchanged_is_warned_about(tmp_path):
    ranks = torch.distributed.get_world_size()
    if ranks == 2:
        fabric, state, loader = _with_data(1)
        batches = iter(loader)
        for _ in range(2 + fabric.global_rank):
            next(batches)
        fabric.save(f"{tmp_path}/data", state)
    fabric, state, loader = _with_data(2)
    with logged(name="ckptkit.integrations.lightning_state") as said:
        fabric.load(f"{tmp_path}/data", state)
        fabric.load(f"{tmp_path}/data", {"model": state["model"], "other": 7}, strict=False)
    expected = [] if fabric.global_rank else ["1 missing (extra.extra.other)"]
    if ranks == 1:
        expected.insert(0, "1 skipped: dataloader_data (saved at world size 2")
    assert len(said) == len(expected) and all(text in line for text, line in zip(expected, said, strict=True)), said
    assert next(batch.item() for batch in loader) == (2 + fabric.global_rank if ranks == 2 else 0)
