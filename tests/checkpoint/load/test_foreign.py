"""`manager.load(state, URL)` resumes from checkpoints that other systems wrote."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckptkit import TrainState
from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.load.foreign import adopt
from ckptkit.checkpoint.state.rng import restore_rng
from ckptkit.checkpoint.state.values import decode
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.detect import open_source
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import states
from tests.formats.readback import tensor_bytes

ZOO = Path(__file__).parents[2] / "zoo"
WITH_OPTIMIZER = {
    "accelerate_fsdp2_nodcp_llama_untied_w2": None,
    "accelerate_fsdp2_sharded_llama_tied_w2": None,
    "hf_trainer_fsdp2_sharded_w2": 2,
    "lightning_real_mp_w2": 2,
    "lightning_trainer_fsdp_w2": 3,
    "lightning_trainer_full": 3,
    "lightrft_naive_optim_w2": 6,
    "fsdp1_dcp_sharded_nomesh_w2": None,  # what Oumi writes
    "dcp_appstate_w2": None,
    "dcp_torchtitan_like_w2": 2,
    "verl_fsdp1_nomesh_w2": 4,
    "verl_fsdp2_w2": 4,
}


def opened(name: str) -> Any:
    return open_source(str(ZOO / name))


def trained(name: str) -> set[str]:
    return {e.fqn for e in opened(name).catalog.tensors.values() if e.role in (Role.OPTIMIZER, Role.MASTER) and e.fqn}


def zeros(name: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model of a checkpoint with zeros in all tensors."""
    values = load_file(ZOO / name / "EXPECTED.safetensors")
    return states.module_of({fqn: torch.zeros_like(value) for fqn, value in values.items()}, trained(name), dtype)


def run_of(name: str, *, scheduler: bool = False, rng: bool = False) -> TrainState:
    model = zeros(name)
    named = dict(model.named_parameters())
    groups = [{"params": list(named.values())}]
    if scheduler and name.startswith("hf_trainer"):  # a scheduler depends on the Trainer's order of groups
        norms = {fqn for fqn in named if "norm" in fqn}
        groups = [{"params": [p for fqn, p in named.items() if (fqn in norms) is apart]} for apart in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    step = torch.optim.lr_scheduler.LinearLR(optimizer) if scheduler else None
    return TrainState(model=model, optimizer=optimizer, scheduler=step, rng=rng)


def load(state: TrainState, name: str, tmp_path: Path, **options: Any) -> Any:
    """Load a checkpoint of the zoo, or of another directory; return the report."""
    return states.load(tmp_path / "run", state, str(ZOO / name), **options)


def check_weights(model: nn.Module, name: str, expected: str = "EXPECTED.safetensors") -> None:
    live = model.state_dict()
    for fqn, value in load_file(ZOO / name / expected).items():
        assert torch.equal(live[fqn], value), fqn


def check_optimizer(optimizer: Any, model: nn.Module, name: str) -> None:
    source = opened(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    count = 0
    for entry in source.catalog.tensors.values():
        if entry.role is Role.OPTIMIZER and entry.fqn and entry.state:
            value = optimizer.state[parameters[entry.fqn]][entry.state]
            raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == tensor_bytes(source.store, entry), entry.name
            count += 1
    assert count >= len(list(model.parameters())) > 0


@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_weights_moments_and_settings_are_restored(name, tmp_path):
    state = run_of(name)
    report = load(state, name, tmp_path)
    check_weights(state.model, name)
    check_optimizer(state.optimizer, state.model, name)
    assert state.optimizer.param_groups[0]["lr"] != 0.5
    assert report.step == WITH_OPTIMIZER[name]
    assert not report.missing
    assert not report.unexpected


@pytest.mark.parametrize("wrapper", ["net.", "model."])
def test_a_prefix_that_only_the_model_has_is_added(wrapper, tmp_path):
    name = "lightning_real_mp_w2"
    state = run_of(name)
    outer = nn.Module()
    outer.add_module(wrapper[:-1], state.model)
    inner, state.model = state.model, outer
    report = load(state, name, tmp_path)
    check_weights(inner, name)
    check_optimizer(state.optimizer, inner, name)
    assert any(repr(wrapper) in note for note in report.notes)


def test_a_prefix_that_only_the_checkpoint_has_is_removed(tmp_path):
    name = "verl_fsdp2_w2"
    expected = load_file(ZOO / name / "EXPECTED.safetensors")
    inner = {fqn.removeprefix("model."): value for fqn, value in expected.items() if fqn.startswith("model.")}
    model = states.module_of({fqn: torch.zeros_like(value) for fqn, value in inner.items()})
    load(TrainState(model=model, rng=False), name, tmp_path, strict=False)
    assert all(torch.equal(value, inner[fqn]) for fqn, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["verl_fsdp2_w2", "lightning_trainer_full", "hf_trainer_fsdp2_sharded_w2"])
def test_recognized_schedulers_are_restored(name, tmp_path):
    state = run_of(name, scheduler=True)
    state.scheduler.last_epoch = 99
    report = load(state, name, tmp_path)
    assert "scheduler" in report.loaded
    assert state.scheduler.last_epoch in (0, 2, 3)


def test_state_that_the_format_lacks_is_reported_and_unchanged(tmp_path):
    state = run_of("accelerate_fsdp2_nodcp_llama_untied_w2", scheduler=True, rng=True)
    state.scheduler.last_epoch = 99
    state.extra["tokens"] = 5
    report = load(state, "accelerate_fsdp2_nodcp_llama_untied_w2", tmp_path)
    assert state.scheduler.last_epoch == 99
    assert state.extra["tokens"] == 5
    assert set(report.skipped) >= {"scheduler", "extra.tokens"}
    assert any("random number" in note for note in report.notes)


def test_random_state_of_verl_is_restored(tmp_path):
    state = run_of("verl_fsdp2_w2", rng=True)
    values = torch.load(
        ZOO / "verl_fsdp2_w2/global_step_4/actor/extra_state_world_size_2_rank_0.pt", weights_only=False
    )["rng"]
    random.setstate(values["random"])
    np.random.set_state(values["numpy"])
    torch.set_rng_state(torch.as_tensor(values["cpu"]))
    wanted = (random.random(), np.random.rand(), torch.rand(1).item())
    load(state, "verl_fsdp2_w2", tmp_path, rng_on_resize="keep")
    assert random.random() != wanted[0]  # two ranks saved, one loads
    source = opened("verl_fsdp2_w2")
    adopted = adopt(source.catalog, source.store, state)
    restore_rng(decode(adopted.objects["rng.0"], adopted.tensors.__getitem__))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == wanted


def test_lightrft_masters_load_into_an_optimizer_with_masters(tmp_path):
    name = "lightrft_mp_optim_w2"
    model = zeros(name)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=0.5))
    load(TrainState(model=model, optimizer=optimizer, rng=False), name, tmp_path)
    check_weights(model, name)
    masters = load_file(ZOO / name / "EXPECTED_fp32_master.safetensors")
    parameters = dict(model.named_parameters())
    assert all(torch.equal(optimizer.state[parameters[fqn]]["master"], masters[fqn]) for fqn in parameters)


@pytest.mark.parametrize("name", ["deepspeed_zero2_bf16_w2", "deepspeed_zero3_bf16_tied_w2"])
def test_deepspeed_masters_load_into_the_weights_of_an_fp32_model(name, tmp_path):
    model = zeros(name, torch.float32)
    if "tied" in name:
        model.lm_head.weight = model.get_parameter("model.embed_tokens.weight")
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest}], lr=0.5)
    report = load(TrainState(model=model, optimizer=optimizer, rng=False), name, tmp_path, convert_dtype=True)
    check_optimizer(optimizer, model, name)
    masters = {e.fqn: e for e in opened(name).catalog.tensors.values() if e.role is Role.MASTER}
    for fqn, parameter in model.named_parameters():
        stored = fqn if fqn in masters else "model.embed_tokens.weight"  # tied: stored under either name
        raw = tensor_bytes(opened(name).store, masters[stored])
        assert parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes() == raw
    assert any("fp32 masters" in note for note in report.notes)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_different_number_of_optimizers_is_refused(tmp_path):
    state = run_of("lightning_trainer_full")
    parameters = list(state.model.parameters())
    state.optimizer = {"a": torch.optim.AdamW(parameters[:2]), "b": torch.optim.AdamW(parameters[2:])}
    with pytest.raises(CheckpointMismatchError, match=r"contains 1 optimizers .* has 2"):
        load(state, "lightning_trainer_full", tmp_path)
    assert not any(parameter.any() for parameter in parameters)


def test_weights_without_optimizer_state_load_only_with_optimizer_skip(tmp_path):
    name = "hf_ref_llama_untied"
    expected = load_file(ZOO / name / "model.safetensors")
    model = states.module_of({fqn: torch.zeros_like(value) for fqn, value in expected.items()})
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), rng=False)
    with pytest.raises(CheckpointMismatchError, match='optimizer="skip"'):
        load(state, name, tmp_path)
    load(state, name, tmp_path, optimizer="skip")
    check_weights(model, name, "model.safetensors")


def stepped(steps: int, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    """Return a small model and its optimizer after some steps."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_settings_of_numbered_parameters_are_matched_by_order(tmp_path):
    model, optimizer = stepped(1, lr=0.125)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "old.pt")
    fresh, again = stepped(0, lr=0.5)
    report = load(TrainState(model=fresh, optimizer=again, rng=False), str(tmp_path / "old.pt"), tmp_path)
    assert again.param_groups[0]["lr"] == 0.125
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(again.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])
    assert report.extra["epoch"] == 3


class Counting(torch.optim.Optimizer):
    """Keeps a number for each parameter, like transformers' Adafactor and the optimizers of bitsandbytes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("moment", torch.ones_like(parameter))
                state["step"], state["RMS"] = state.get("step", 0) + 1, 0.25


@pytest.mark.parametrize("kind", [Counting, torch.optim.AdamW])
def test_optimizer_states_that_are_plain_numbers_are_restored(kind: Any, tmp_path: Path) -> None:
    model, optimizer = stepped(5, kind)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = int(state["step"])  # as torch kept it before 1.12
    (tmp_path / "theirs").mkdir()
    torch.save(model.state_dict(), tmp_path / "theirs" / "pytorch_model.bin")
    torch.save(saved, tmp_path / "theirs" / "optimizer.bin")
    new, resumed = stepped(0, kind)
    load(TrainState(model=new, optimizer=resumed), str(tmp_path / "theirs"), tmp_path)
    for parameter in new.parameters():
        state = resumed.state[parameter]
        assert state["step"] == 5 and isinstance(state["step"], int if kind is Counting else torch.Tensor)
        assert kind is not Counting or state["RMS"] == 0.25


@pytest.mark.parametrize("steps", [0, 1])
def test_an_error_names_a_moment_that_one_parameter_lacks(steps: int, tmp_path: Path) -> None:
    model, optimizer = stepped(2)
    saved = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    del saved["optim"]["state"]["0.weight"]["exp_avg"]
    dcp.save(saved, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    model, optimizer = stepped(steps)
    state = TrainState(model=model, optimizer=optimizer)
    missing = pytest.raises(CheckpointMismatchError, match=r"1 missing in the checkpoint: 0\.weight\.exp_avg\b")
    with states.unchanged(state), missing:
        load(state, str(tmp_path / "theirs"), tmp_path)
    report = load(state, str(tmp_path / "theirs"), tmp_path, strict=False)
    assert any("0.weight.exp_avg" in key for key in report.missing)


def test_the_adapter_of_a_trainer_is_restored_with_its_optimizer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        config = peft.LoraConfig(r=2, target_modules=["0", "1"], modules_to_save=["2"], use_dora=True)
        model = peft.get_peft_model(net, config)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    model, optimizer = made(0)
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "checkpoint-1")  # as transformers' Trainer does
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-1" / "optimizer.pt")
    other, its_optimizer = made(1)
    report = states.load(
        tmp_path / "run", TrainState(model=other, optimizer=its_optimizer), str(tmp_path / "checkpoint-1"),
        include=["*lora_*", "*modules_to_save*"],
    )  # fmt: skip
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    trained = {fqn: (mine, theirs) for (fqn, mine), theirs in pairs if mine.requires_grad}
    assert len(trained) == 8 and not report.unexpected
    for fqn, (mine, theirs) in trained.items():
        assert torch.equal(mine, theirs), fqn
        assert torch.equal(optimizer.state[mine]["exp_avg"], its_optimizer.state[theirs]["exp_avg"]), fqn
