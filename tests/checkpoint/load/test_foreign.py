"""`manager.load(state, URL)` resumes from checkpoints that other systems wrote."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit import TrainState, convert, reshard
from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.load.foreign import adopt
from ckptkit.checkpoint.state.rng import restore_rng
from ckptkit.checkpoint.state.values import decode
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError
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


def test_two_saved_weights_are_not_loaded_into_one(tmp_path):
    saved = nn.Linear(3, 2).state_dict()
    torch.save({"model": {**{f"net.{name}": t for name, t in saved.items()}, "bias": torch.ones(2)}}, tmp_path / "a.pt")
    state = TrainState(model=nn.Linear(3, 2), rng=False)
    with states.unchanged(state), pytest.raises(CheckpointMismatchError, match="'bias' and another tensor"):
        states.load(tmp_path / "run", state, str(tmp_path / "a.pt"))


@pytest.mark.parametrize("form", ["torch.save", "dcp"])
def test_a_submodule_that_the_wrapper_contains_twice_is_loaded(tmp_path, form):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    wrapper = nn.ModuleDict({"model": model})
    wrapper.add_module("0", model[0])
    saved = {"model": wrapper.state_dict()}
    assert saved["model"].keys() >= {"model.0.weight", "0.weight"}
    if form == "dcp":
        dcp.save(saved, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        torch.save(saved, tmp_path / "a")
    state = TrainState(model=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), rng=False)
    states.load(tmp_path / "run", state, str(tmp_path / "a"))
    assert all(torch.equal(value, state.model.state_dict()[fqn]) for fqn, value in model.state_dict().items())


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
def test_optimizer_states_that_are_plain_numbers_are_restored(kind, tmp_path):
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


@pytest.mark.parametrize("groups", [1, 2])
def test_factored_states_of_numbered_parameters_are_matched_by_order(groups, tmp_path):
    def made(seed: int, groups: int = 1) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 5))
        params = [*model.parameters()]
        return model, torch.optim.Adafactor([{"params": params[i::groups]} for i in range(groups)])

    model, optimizer = made(0)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    (tmp_path / "theirs").mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "theirs" / "ckpt.pt")
    new, resumed = made(1, groups)
    load(TrainState(model=new, optimizer=resumed), str(tmp_path / "theirs"), tmp_path)
    for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
        assert optimizer.state[mine].keys() == resumed.state[theirs].keys()
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, resumed.state[theirs][name])


def test_numbered_states_of_ranks_are_matched_by_order_although_their_shapes_are_equal(tmp_path):
    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        return model, torch.optim.AdamW([*model.parameters()][1:])  # the first layer is frozen

    model, optimizer = made(0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for rank in range(2):
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=rank)

        def part(tensor: torch.Tensor, rank: int = rank, mesh: DeviceMesh = mesh) -> torch.Tensor:
            if tensor.ndim == 0:
                return tensor
            rows = tensor.detach()[2 * rank : 2 * rank + 2].clone()
            return DTensor.from_local(
                rows, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )

        state = optimizer.state_dict()
        state["state"] = {i: {k: part(v) for k, v in values.items()} for i, values in state["state"].items()}
        torch.save({k: part(v) for k, v in model.state_dict().items()}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        torch.save(state, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    new, resumed = made(1)
    report = load(TrainState(model=new, optimizer=resumed), str(tmp_path), tmp_path)
    for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state.get(mine, {}).items():
            assert torch.equal(value, resumed.state[theirs][name])
    assert any("matched by order" in note for note in report.notes)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_error_names_a_moment_that_one_parameter_lacks(steps, tmp_path):
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


def test_the_adapter_of_a_trainer_is_restored_with_its_optimizer(tmp_path):
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


def test_the_base_model_of_an_adapter_is_loaded_under_the_names_without_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

    base = net()
    save_file(base.state_dict(), tmp_path / "model.safetensors")
    adapted = peft.get_peft_model(net(), peft.LoraConfig(r=2, target_modules=["0"]))
    report = states.load(tmp_path / "run", TrainState(model=adapted), str(tmp_path), strict=False)
    assert all("lora_" in name for name in report.missing) and not report.unexpected
    assert torch.equal(adapted.base_model.model[0].base_layer.weight, base[0].weight)
    assert torch.equal(adapted.base_model.model[1].bias, base[1].bias)


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth"])
def test_a_damaged_file_of_the_trainer_is_an_error(name, tmp_path):
    model, optimizer = stepped(1)
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 5, "_last_lr": [0.5]}, folder / name)
    (folder / name).write_bytes((folder / name).read_bytes()[:200])
    fresh, again = stepped(0)
    state = TrainState(model=fresh, optimizer=again)
    with states.unchanged(state), pytest.raises(CorruptCheckpointError, match=name):
        load(state, str(folder), tmp_path)


class Averaged(nn.Module):
    """A network and, as Lightning's WeightAveraging keeps it, its moving average."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        nn.init.constant_(self.net.weight, value)


def averaged_run(path: Path, saved: Averaged, average: Averaged) -> None:
    """Write the file of a Lightning run with WeightAveraging. Its `state_dict` is the average."""
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    callback = callbacks.WeightAveraging()
    callback._average_model = torch.optim.swa_utils.AveragedModel(average)
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    saved.net(torch.ones(3)).sum().backward()
    optimizer.step()
    content = {
        "state_dict": saved.state_dict(),
        "pytorch-lightning_version": "2.6.0",
        "global_step": 1,
        "optimizer_states": [optimizer.state_dict()],
    }
    callback.on_save_checkpoint(None, None, content)
    torch.save(content, path)


def test_training_continues_with_the_weights_that_were_averaged_and_not_with_the_average(tmp_path):
    trained, average = Averaged(1.0), Averaged(7.0)
    averaged_run(tmp_path / "last.ckpt", trained, average)
    reshard(str(tmp_path / "last.ckpt"), str(tmp_path / "step_00000001"), world_size=1)
    for source in ("last.ckpt", "step_00000001"):
        live = Averaged(0.0).net
        state = TrainState(model=live, optimizer=torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9))
        report = states.load(tmp_path / "run", state, str(tmp_path / source), optimizer="skip")
        assert torch.equal(live.weight, trained.net.weight)
        assert source != "last.ckpt" or any("current_model_state" in note for note in report.notes)


def test_a_note_names_the_tensors_that_are_neither_weights_nor_optimizer_state(tmp_path):
    model = nn.Linear(2, 2)
    callbacks = {"best": {"score": torch.zeros(1 << 19), "path": "x"}}  # too large to be returned as an extra
    torch.save({"state_dict": model.state_dict(), "global_step": 3, "callbacks": callbacks}, tmp_path / "a.ckpt")
    report = states.load(tmp_path / "run", TrainState(model=nn.Linear(2, 2)), str(tmp_path / "a.ckpt"))
    assert any(
        note.startswith("not restored: 1 tensor, neither") and "callbacks.best.score" in note for note in report.notes
    )


@pytest.mark.parametrize("key", ["opt", "adam"])
def test_an_optimizer_is_recognized_under_any_key(key, tmp_path):
    saved, live = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.25)
    saved(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"gen": saved.state_dict(), key: optimizer.state_dict(), "step": 3}, tmp_path / "a.pt")
    state = TrainState(model=live, optimizer=torch.optim.AdamW(live.parameters()))
    assert states.load(tmp_path / "run", state, str(tmp_path / "a.pt")).step == 3
    assert torch.equal(live.weight, saved.weight)
    assert torch.equal(state.optimizer.state[live.weight]["exp_avg"], optimizer.state[saved.weight]["exp_avg"])
    assert state.optimizer.param_groups[0]["lr"] == 0.25


NAMES = {
    "FSDP": (["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"], ["optimizer.bin", "optimizer_1.bin"]),
    "DDP": (["model.safetensors", "model_1.safetensors"], ["optimizer.bin", "optimizer_1.bin"]),
}


@pytest.mark.parametrize("kind", NAMES)
def test_several_models_of_accelerate_are_matched_by_order(kind, tmp_path):
    """Accelerate numbers models, optimizers and schedulers in the order in which `prepare` got them."""

    def job(lr: float) -> TrainState:
        models = {name: nn.Linear(3, 2) for name in ("student", "teacher")}
        optimizers = {
            name: torch.optim.AdamW(m.parameters(), lr * (i + 1)) for i, (name, m) in enumerate(models.items())
        }
        schedulers = {name: torch.optim.lr_scheduler.StepLR(o, 5) for name, o in optimizers.items()}
        return TrainState(model=models, optimizer=optimizers, scheduler=schedulers)

    saved, live, folder = job(0.25), job(0.5), tmp_path / "state"
    folder.mkdir()
    for name, model in saved.model.items():
        for _ in range(1 + (name == "teacher")):
            model(torch.ones(3)).sum().backward()
            saved.optimizer[name].step()
            saved.scheduler[name].step()
    for at, name in enumerate(saved.model):
        weights = saved.model[name].state_dict()
        write = save_file if kind == "DDP" else torch.save
        write(weights, folder / NAMES[kind][0][at])
        torch.save(saved.optimizer[name].state_dict(), folder / NAMES[kind][1][at])
        torch.save(saved.scheduler[name].state_dict(), folder / f"scheduler{'_1' * at}.bin")
    torch.save({"step": 3}, folder / "random_states_0.pkl")
    report = states.load(tmp_path / "run", live, str(folder))
    assert any("matched by order" in note for note in report.notes)
    for name, model in saved.model.items():
        assert torch.equal(live.model[name].weight, model.weight)
        ours, theirs = live.optimizer[name], saved.optimizer[name]
        assert torch.equal(ours.state[live.model[name].weight]["exp_avg"], theirs.state[model.weight]["exp_avg"])
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        assert live.scheduler[name].last_epoch == saved.scheduler[name].last_epoch


def test_models_of_the_same_class_are_converted_and_resharded_under_their_own_names(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    for at, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25 * (at + 1))
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), folder / NAMES["FSDP"][0][at])
        torch.save(optimizer.state_dict(), folder / NAMES["FSDP"][1][at])
    convert(str(folder), str(tmp_path / "out"), include="*")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["weight"], models[0].weight)
    assert torch.equal(exported["model_1.weight"], models[1].weight)
    report = reshard(str(folder), str(tmp_path / "step_00000001"), world_size=1)
    assert not any("in no group" in note for note in report.notes)
    trees = {name: entry.value for name, entry in open_source(report.dst).catalog.objects.items()}
    assert trees["optimizer_1"]["param_groups"][0]["params"] == ["model_1.weight", "model_1.bias"]
    assert [trees[f"optimizer_{i}"]["param_groups"][0]["lr"] for i in range(2)] == [0.25, 0.5]


@pytest.mark.parametrize("keys", [("sched", "scale"), ("lr_scheduler", "MixedPrecision")])
def test_a_scheduler_and_a_grad_scaler_are_recognized_under_any_key(keys, tmp_path):
    def job(lr: float, scale: float) -> TrainState:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, grad_scaler=scaler)

    saved, live = job(0.25, 8.0), job(0.5, 2.0)
    saved.optimizer.step()
    saved.scheduler.step()
    parts = {"model": saved.model, "optimizer": saved.optimizer, keys[0]: saved.scheduler, keys[1]: saved.grad_scaler}
    torch.save({**{key: part.state_dict() for key, part in parts.items()}, "step": 1}, tmp_path / "a.pt")
    report = states.load(tmp_path / "run", live, str(tmp_path / "a.pt"))
    assert not report.skipped
    assert live.scheduler.last_epoch == 1
    assert live.grad_scaler.get_scale() == 8.0
    assert not {*keys} & report.extra.keys()
