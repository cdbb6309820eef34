"""`manager.load(state, URL)` resumes from checkpoints that other systems wrote."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, StepLR

from ckptkit import TrainState, convert, reshard
from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.detect import open_source
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import states
from tests.formats import rank_writers
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


def copied(name: str, tmp_path: Path) -> Path:
    """Return a run's directory as the other system left it."""
    return Path(shutil.copytree(ZOO / name, tmp_path / "run", ignore=shutil.ignore_patterns("EXPECTED*")))


def run_of(name: str, *, scheduler: Callable[[Any], Any] | None = None, rng: bool = False) -> TrainState:
    model = zeros(name)
    named = dict(model.named_parameters())
    groups = [{"params": list(named.values())}]
    if scheduler and name.startswith("hf_trainer"):  # a scheduler depends on the Trainer's order of groups
        norms = {fqn for fqn in named if "norm" in fqn}
        groups = [{"params": [p for fqn, p in named.items() if (fqn in norms) is apart]} for apart in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    step = scheduler(optimizer) if scheduler else None
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


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "verl_fsdp2_w2": ConstantLR,
    "lightning_trainer_full": LinearLR,
    "hf_trainer_fsdp2_sharded_w2": partial(LambdaLR, lr_lambda=lambda _: 1.0),
}


@pytest.mark.parametrize("place", ["by its URL", "as the run itself"])
@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_weights_moments_and_settings_are_restored(name, place, tmp_path):
    state = run_of(name, scheduler=SCHEDULERS.get(name))
    if state.scheduler:
        state.scheduler.last_epoch = 99
    url = {"which": str(ZOO / name)} if place == "by its URL" else {}
    report = states.load(tmp_path / "run" if url else copied(name, tmp_path), state, **url)
    check_weights(state.model, name)
    check_optimizer(state.optimizer, state.model, name)
    assert state.optimizer.param_groups[0]["lr"] != 0.5
    assert report.step == WITH_OPTIMIZER[name] and not report.missing and not report.unexpected
    assert ("scheduler" in report.loaded) == (name in SCHEDULERS)
    assert not state.scheduler or state.scheduler.last_epoch in (0, 2, 3)


@pytest.mark.parametrize("wrapper", ["net.", "model."])
def test_a_prefix_that_only_the_model_has_is_added(wrapper, tmp_path):
    name = "lightning_real_mp_w2"
    state = run_of(name)
    inner, state.model = state.model, nn.ModuleDict({wrapper[:-1]: state.model})
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
    states.check_misfit(tmp_path / "run", state, "'bias' and another tensor", which=str(tmp_path / "a.pt"))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def compiled(model: Any) -> dict[str, Any]:
    """Return the state dict of a model with a compiled layer."""
    saved: dict[str, Any] = nn.Sequential(torch.compile(model[0]), model[1]).state_dict()
    assert saved.keys() >= {"0._orig_mod.weight", "1.weight"}
    return saved


def contained_twice(model: Any) -> dict[str, Any]:
    """Return the state dict of a wrapper that contains a layer of the model a second time."""
    wrapper = nn.ModuleDict({"model": model})
    wrapper.add_module("0", model[0])
    return wrapper.state_dict()


SAVED_BY: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "torch.save": lambda saved, path: torch.save({"model": saved}, path),
    "dcp": lambda saved, path: dcp.save({"model": saved}, checkpoint_id=path, no_dist=True),
    "safetensors": lambda saved, path: save_file(saved, path.with_suffix(".safetensors")),
}


@pytest.mark.parametrize(
    ("state_dict", "form"),  # a file of safetensors holds no tensor twice
    [*((compiled, form) for form in SAVED_BY), (contained_twice, "torch.save"), (contained_twice, "dcp")],
)
def test_layers_that_were_compiled_or_that_a_wrapper_contains_twice_are_loaded(tmp_path, state_dict, form):
    model, state = layers(), TrainState(model=layers(), rng=False)
    SAVED_BY[form](state_dict(model), tmp_path / "a")
    (saved,) = tmp_path.iterdir()
    states.load(tmp_path / "run", state, str(saved))
    assert states.bits(state.model) == states.bits(model)


def test_state_that_the_format_lacks_is_reported_and_unchanged(tmp_path):
    state = run_of("accelerate_fsdp2_nodcp_llama_untied_w2", scheduler=LinearLR, rng=True)
    state.scheduler.last_epoch = 99
    state.extra["tokens"] = 5
    report = load(state, "accelerate_fsdp2_nodcp_llama_untied_w2", tmp_path)
    assert (state.scheduler.last_epoch, state.extra["tokens"]) == (99, 5)
    assert set(report.skipped) >= {"scheduler", "extra.tokens"}
    assert any("random number" in note for note in report.notes)


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
    url = str(ZOO / "lightning_trainer_full")
    states.check_misfit(tmp_path / "run", state, r"contains 1 optimizers .* has 2", which=url)


def alike(steps: int, wrap: Callable[[Any], Any] = lambda model: model) -> TrainState:
    model = wrap(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))))
    return states.trained(model, steps=steps, params=[*model.parameters()][1:])  # the first layer is frozen


def write_alike(out: str) -> tuple[Any, Any]:
    theirs = alike(1, fully_shard)
    rank_writers.save_rank(out, model=theirs.model.state_dict(), optim=theirs.optimizer.state_dict())
    moments = rank_writers.moments(theirs.model, theirs.optimizer)
    return rank_writers.whole(theirs.model.state_dict()), moments


def test_numbered_states_of_ranks_are_matched_by_order_although_their_shapes_are_equal(ranks, tmp_path):
    (weights, moments), mine = ranks.run(write_alike, 2, str(tmp_path))[0], alike(0)
    report = load(mine, str(tmp_path), tmp_path)
    assert states.bits(mine.model) == states.bits(weights)
    assert states.bits(rank_writers.moments(mine.model, mine.optimizer)) == states.bits(moments)
    assert any("matched by order" in note for note in report.notes)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_error_names_a_moment_that_one_parameter_lacks(steps, tmp_path):
    theirs, state = states.trained(layers()), states.trained(layers(), steps=steps)
    saved = {"model": theirs.model.state_dict(), "optim": get_optimizer_state_dict(theirs.model, theirs.optimizer)}
    del saved["optim"]["state"]["0.weight"]["exp_avg"]
    dcp.save(saved, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    said = r"1 missing in the checkpoint: 0\.weight\.exp_avg\b"
    states.check_misfit(tmp_path / "run", state, said, which=str(tmp_path / "theirs"))
    report = load(state, str(tmp_path / "theirs"), tmp_path, strict=False)
    assert any("0.weight.exp_avg" in key for key in report.missing)


def test_the_adapter_of_a_trainer_is_restored_with_its_optimizer(tmp_path):
    peft = pytest.importorskip("peft")

    def made(steps: int) -> TrainState:
        torch.manual_seed(0)  # an adapter's checkpoint lacks the base
        net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        config = peft.LoraConfig(r=2, target_modules=["0", "1"], modules_to_save=["2"], use_dora=True)
        model = peft.get_peft_model(net, config)
        return states.trained(model, steps=steps, params=[p for p in model.parameters() if p.requires_grad])

    theirs, mine = made(1), made(0)
    theirs.model.save_pretrained(tmp_path / "checkpoint-1")  # as transformers' Trainer does
    torch.save(theirs.optimizer.state_dict(), tmp_path / "checkpoint-1" / "optimizer.pt")
    report = load(mine, str(tmp_path / "checkpoint-1"), tmp_path, include=["*lora_*", "*modules_to_save*"])
    assert not report.unexpected
    states.check_resumed(mine, theirs)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["2"]}])
@pytest.mark.parametrize("targets", [["0"], ["0", "1"]])
def test_the_base_model_of_an_adapter_is_loaded_under_the_names_without_peft(tmp_path, targets, more):
    peft = pytest.importorskip("peft")

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 2, bias=False))

    base = net()
    save_file(base.state_dict(), tmp_path / "model.safetensors")
    config = peft.LoraConfig(r=2, target_modules=targets, **more)
    adapted = peft.get_peft_model(net(), config)
    adapted.add_adapter("second", config)
    report = states.load(tmp_path / "run", TrainState(model=adapted), str(tmp_path), strict=False)
    assert all("lora_" in name for name in report.missing) and not report.unexpected
    assert torch.equal(adapted.base_model.model[0].base_layer.weight, base[0].weight)
    second = adapted.base_model.model[1]
    assert torch.equal((second.base_layer if "1" in targets else second).bias, base[1].bias)
    third = adapted.base_model.model[2]
    for layer in [third.original_module, *third.modules_to_save.values()] if more else [third]:
        assert torch.equal(layer.weight, base[2].weight)


def test_a_module_that_peft_copied_is_restored_beside_its_original_under_another_prefix(tmp_path):
    peft = pytest.importorskip("peft")

    def net() -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"])
        return peft.inject_adapter_in_model(config, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))

    theirs, mine = net(), net()
    nn.init.ones_(theirs[1].modules_to_save["default"].weight)
    save_file({f"net.{name}": t.clone() for name, t in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    states.load(tmp_path / "run", TrainState(model=mine), str(tmp_path))
    assert states.bits(mine) == states.bits(theirs)


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth"])
def test_a_damaged_file_of_the_trainer_is_an_error(name, tmp_path):
    theirs, state, folder = states.trained(layers()), states.trained(layers(), steps=0), tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(theirs.model.state_dict(), folder / "model.safetensors")
    torch.save(theirs.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 5, "_last_lr": [0.5]}, folder / name)
    (folder / name).write_bytes((folder / name).read_bytes()[:200])
    states.check_misfit(tmp_path / "run", state, name, error=CorruptCheckpointError, which=str(folder))


def averaged(value: float) -> nn.Module:
    model = nn.ModuleDict({"net": nn.Linear(3, 2)})
    nn.init.constant_(model["net"].weight, value)
    return model


def test_training_continues_with_the_weights_that_were_averaged_and_not_with_the_average(tmp_path):
    """In the file of a Lightning run with WeightAveraging, `state_dict` is the average."""
    callback = pytest.importorskip("lightning.pytorch.callbacks").WeightAveraging()
    callback._average_model = torch.optim.swa_utils.AveragedModel(averaged(7.0))
    saved = states.trained(averaged(1.0), torch.optim.SGD, lr=0.1, momentum=0.9)
    content = {
        "state_dict": saved.model.state_dict(),
        "pytorch-lightning_version": "2.6.0",
        "global_step": 1,
        "optimizer_states": [saved.optimizer.state_dict()],
    }
    callback.on_save_checkpoint(None, None, content)
    torch.save(content, tmp_path / "last.ckpt")
    reshard(str(tmp_path / "last.ckpt"), str(tmp_path / "step_00000001"), world_size=1)
    for source in ("last.ckpt", "step_00000001"):
        state = states.optimized(averaged(0.0).net, momentum=0.9)
        report = load(state, str(tmp_path / source), tmp_path, optimizer="skip")
        assert torch.equal(state.model.weight, saved.model.net.weight)
        assert source != "last.ckpt" or any("current_model_state" in note for note in report.notes)


NAMES = {
    "FSDP": (["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"], ["optimizer.bin", "optimizer_1.bin"]),
    "DDP": (["model.safetensors", "model_1.safetensors"], ["optimizer.bin", "optimizer_1.bin"]),
}


def accelerate(folder: Path, kind: str) -> dict[str, TrainState]:
    """Write two models and their optimizers as accelerate numbers them: in the order in which `prepare` got them."""
    jobs = {
        name: states.trained(nn.Linear(3, 2), steps=at, lr=at / 4) for at, name in enumerate(("student", "teacher"), 1)
    }
    folder.mkdir()
    for at, job in enumerate(jobs.values()):
        (save_file if kind == "DDP" else torch.save)(job.model.state_dict(), folder / NAMES[kind][0][at])
        torch.save(job.optimizer.state_dict(), folder / NAMES[kind][1][at])
    return jobs


@pytest.mark.parametrize("kind", NAMES)
def test_several_models_of_accelerate_are_matched_by_order(kind, tmp_path):
    theirs = accelerate(tmp_path / "state", kind)
    for at in range(2):
        torch.save({"last_epoch": 1 + at, "_last_lr": [0.5]}, tmp_path / "state" / f"scheduler{'_1' * at}.bin")
    torch.save({"step": 3}, tmp_path / "state" / "random_states_0.pkl")
    mine = {name: states.trained(nn.Linear(3, 2), steps=0) for name in theirs}
    schedulers = {name: StepLR(job.optimizer, 5) for name, job in mine.items()}
    state = TrainState(
        model={name: job.model for name, job in mine.items()},
        optimizer={name: job.optimizer for name, job in mine.items()},
        scheduler=schedulers,
    )
    report = load(state, str(tmp_path / "state"), tmp_path)
    assert any("matched by order" in note for note in report.notes)
    for at, name in enumerate(theirs, 1):
        states.check_resumed(mine[name], theirs[name])
        assert mine[name].optimizer.param_groups[0]["lr"] == at / 4 and schedulers[name].last_epoch == at


def test_models_of_the_same_class_are_converted_and_resharded_under_their_own_names(tmp_path):
    folder = tmp_path / "state"
    models = [job.model for job in accelerate(folder, "FSDP").values()]
    convert(str(folder), str(tmp_path / "out"), include="*")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["weight"], models[0].weight)
    assert torch.equal(exported["model_1.weight"], models[1].weight)
    report = reshard(str(folder), str(tmp_path / "step_00000001"), world_size=1)
    assert not any("in no group" in note for note in report.notes)
    trees = {name: entry.value for name, entry in open_source(report.dst).catalog.objects.items()}
    assert trees["optimizer_1"]["param_groups"][0]["params"] == ["model_1.weight", "model_1.bias"]
    assert [trees[f"optimizer_{i}"]["param_groups"][0]["lr"] for i in range(2)] == [0.25, 0.5]
