"""`manager.load(state, URL)` resumes from checkpoints that a training script wrote with `dcp.save` or `torch.save`."""

from __future__ import annotations

import datetime
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ckptkit import TrainState
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp import fill
from ckptkit.offline.reshard import reshard
from tests.checkpoint import states


def load(state: TrainState, url: str, tmp_path: Any, **options: Any) -> Any:
    return states.load(tmp_path / "run", state, url, **options)


def save(saved: Any, form: str, tmp_path: Any) -> Any:
    """Save with dcp.save or torch.save, and return the path."""
    path = tmp_path / "theirs"
    if form == "dcp":
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    else:
        torch.save(saved, path)
    return path


def resharded(source: Any, tmp_path: Any, step: int = 1) -> Any:
    made = tmp_path / f"step_{step:08}"
    reshard(str(source), str(made), world_size=1)
    return made


class WithExtraState(nn.Linear):
    """Has extra state that contains a tensor."""

    def get_extra_state(self) -> Any:
        return {"amax": torch.ones(2), "calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("another program's extra state must not be restored")


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {**model.state_dict(), **get_optimizer_state_dict(model, optimizer, options=options)}


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("saved_as", [_whole, _flattened])
def test_an_optimizer_with_numbers_or_beside_the_weights_is_restored_from_dcp(saved_as, flatten, tmp_path):
    """dcp.save with what `Optimizer.state_dict` returns, or with the weights and a flattened optimizer in one dict."""
    model = WithExtraState(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(saved_as(model, optimizer), checkpoint_id=tmp_path / "theirs", planner=planner, no_dist=True)
    fresh = WithExtraState(3, 4)
    state = TrainState(model=fresh, optimizer=torch.optim.AdamW(fresh.parameters(), lr=0.5))
    load(state, str(tmp_path / "theirs"), tmp_path)
    assert state.optimizer.param_groups[0]["lr"] == 0.125
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(state.optimizer.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])
        assert torch.equal(state.optimizer.state[mine]["step"], torch.tensor(1.0))


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("form", ["dcp", "torch", "resharded"])
def test_settings_that_are_tensors_are_restored(form, flatten, tmp_path):
    """torch.compile and CUDA graphs need a learning rate that is a tensor. The second group has none."""

    def trained(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        groups = [{"params": model[0].parameters(), "lr": torch.tensor(lr)}, {"params": model[1].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=lr / 2, betas=(torch.tensor(lr), torch.tensor(0.5)), foreach=False)
        optimizer.param_groups[1]["betas"] = (lr, 0.5)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0.25)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    source = save(saved, form, tmp_path)
    if form == "resharded":
        source = resharded(source, tmp_path)
    model, optimizer = trained(0.75)
    load(TrainState(model=model, optimizer=optimizer), str(source), tmp_path)
    first, second = optimizer.param_groups
    assert torch.equal(first["lr"], torch.tensor(0.25)) and second["lr"] == 0.125
    assert [float(beta) for group in (first, second) for beta in group["betas"]] == [0.25, 0.5] * 2


@pytest.mark.parametrize("form", ["dcp", "torch", "resharded"])
@pytest.mark.parametrize("key", ["lr_scheduler", "scheduler", "scheduler_state_dict", "lr_schedulers"])
def test_schedulers_of_schedulers_and_loss_scales_are_restored(key, form, tmp_path):
    def made(steps: int, scale: float) -> TrainState:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        warmup, decay = LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 10)
        scheduler = SequentialLR(optimizer, [warmup, decay], milestones=[2])
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, grad_scaler=scaler)

    theirs, mine = made(5, 1024.0), made(0, 8.0)
    their = theirs.scheduler.state_dict()
    saved = {"model": theirs.model.state_dict(), key: [their] if key == "lr_schedulers" else their, "epoch": 5}
    saved |= {"optimizer": theirs.optimizer.state_dict(), "scaler": theirs.grad_scaler.state_dict()}
    source = save(saved, form, tmp_path)
    if form == "resharded":
        source = resharded(source, tmp_path)
    report = load(mine, str(source), tmp_path, optimizer="skip")
    assert mine.scheduler.state_dict() == their and mine.grad_scaler.get_scale() == 1024.0
    assert not {"scheduler", "grad_scaler"} & report.skipped.keys()


def test_a_reshard_keeps_apart_the_groups_whose_learning_rates_are_different_tensors(tmp_path):
    def made(*rates: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        groups = [{"params": [p], "lr": torch.tensor(lr)} for p, lr in zip(model.parameters(), rates, strict=True)]
        return model, torch.optim.AdamW(groups, foreach=False)

    model, optimizer = made(0.25, 0.5)
    source = resharded(save(_flattened(model, optimizer), "torch", tmp_path), tmp_path)
    fresh, other = made(1.0, 1.0)
    load(TrainState(model=fresh, optimizer=other), str(source), tmp_path)
    assert [float(group["lr"]) for group in other.param_groups] == [0.25, 0.5]


def test_a_reshard_names_the_numbered_parameters_as_the_optimizer_did(tmp_path):
    """Without the names, equal shapes would not prove which of the layers is frozen."""

    def made(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return model, torch.optim.AdamW([*model.named_parameters()][2:], lr=lr)

    model, optimizer = made(0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    if "param_names" not in optimizer.state_dict()["param_groups"][0]:
        pytest.skip("this version of torch saves no names")
    source = resharded(save(_whole(model, optimizer), "torch", tmp_path), tmp_path)
    fresh, other = made(0.5)
    load(TrainState(model=fresh, optimizer=other), str(source), tmp_path)
    assert other.param_groups[0]["lr"] == 0.25
    assert torch.equal(other.state[fresh[1].weight]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"])


def test_numbered_parameters_with_saved_names_are_matched_by_name(tmp_path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        return model, torch.optim.AdamW([*model.named_parameters()])

    model, optimizer = made()
    if "param_names" not in optimizer.state_dict()["param_groups"][0]:
        pytest.skip("this version of torch saves no names")
    model(torch.arange(3.0)).square().sum().backward()
    optimizer.step()
    fresh, _ = made()
    other = torch.optim.AdamW([*fresh.named_parameters()][::-1])
    source = save(_whole(model, optimizer), "torch", tmp_path)
    report = load(TrainState(model=fresh, optimizer=other), str(source), tmp_path)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert not any("by order" in note for note in report.notes)


def test_saved_names_decide_even_if_only_some_parameters_are_still_trained(tmp_path):
    def made(*trained: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        return model, torch.optim.AdamW([(n, p) for n, p in model.named_parameters() if n[0] in trained])

    model, optimizer = made("a", "b")
    if "param_names" not in optimizer.state_dict()["param_groups"][0]:
        pytest.skip("this version of torch saves no names")
    sum(scale * model[name].weight.sum() for name, scale in (("a", 1.0), ("b", 5.0))).backward()
    optimizer.step()
    source = save(_whole(model, optimizer), "torch", tmp_path)
    fresh, other = made("b", "c")
    with pytest.raises(CheckpointMismatchError, match=r"optimizer: 1 missing in the checkpoint: c\.weight"):
        load(TrainState(model=fresh, optimizer=other), str(source), tmp_path)
    load(TrainState(model=fresh, optimizer=other), str(source), tmp_path, strict=False)
    found, wanted = (one.state[net["b"].weight]["exp_avg"] for one, net in ((other, fresh), (optimizer, model)))
    assert torch.equal(found, wanted)


def test_saved_names_that_only_a_part_of_the_model_has_do_not_decide(tmp_path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False)))
        return model, torch.optim.AdamW([{"params": [*part.named_parameters()]} for part in model])

    model, optimizer = made()  # the names "weight" and "0.weight" stand for "0.weight" and "1.0.weight"
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    fresh, other = made()
    load(TrainState(model=fresh, optimizer=other), str(save(_whole(model, optimizer), "torch", tmp_path)), tmp_path)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


class Counters:
    """Saves a nested dict of numbers."""

    def __init__(self, value: int) -> None:
        self.value: Any = {"seen": {"a.b": value, "tokens": torch.tensor(value)}, "best": [value]}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("form", ["dcp", "torch", "resharded"])
def test_a_stateful_extra_gets_the_state_as_it_was_nested(form, tmp_path):
    source = save({"model": nn.Linear(3, 2).state_dict(), "counters": Counters(7).state_dict()}, form, tmp_path)
    source = resharded(source, tmp_path) if form == "resharded" else source
    mine = Counters(0)
    load(TrainState(model=nn.Linear(3, 2), extra={"counters": mine}), str(source), tmp_path)
    assert states.bits(mine.value) == states.bits(Counters(7).value)


def _two(lr: float) -> TrainState:
    models = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("gen", "dis")})
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=lr) for name in models}
    for index, name in enumerate(models):
        models[name](torch.full((1, 4), float(index + 1))).sum().backward()
        optimizers[name].step()
    return TrainState(model=models, optimizer=optimizers)


@pytest.mark.parametrize("form", ["dcp", "torch"])
@pytest.mark.parametrize("key", ["optimizer_{}", "{}_optim", "opt_{}", "optimizers", "optimizers/0"])
def test_several_optimizers_are_matched_by_their_names_or_positions(key, form, tmp_path):
    theirs, mine = _two(0.25), _two(0.5)
    states_of = {name: optimizer.state_dict() for name, optimizer in theirs.optimizer.items()}
    saved: dict[str, Any] = {key.format(name): value for name, value in states_of.items()}
    if key.startswith("optimizers"):
        saved = {"optimizers": states_of if key == "optimizers" else list(states_of.values())}
    saved["model"] = theirs.model.state_dict()
    source = save(saved, form, tmp_path)
    load(mine, str(source), tmp_path)
    for name, optimizer in mine.optimizer.items():
        got, wanted = optimizer.state_dict(), states_of[name]
        assert states.bits(got) == states.bits(wanted), name


def test_numbered_optimizers_with_unknown_names_are_refused(tmp_path):
    theirs = _two(0.25)
    muon, adamw = (optimizer.state_dict() for optimizer in theirs.optimizer.values())
    torch.save({"model": theirs.model.state_dict(), "optimizers": {"muon": muon, "adamw": adamw}}, tmp_path / "theirs")
    with pytest.raises(CheckpointMismatchError, match=r"adamw, optimizers\.muon, and numbers their parameters"):
        load(_two(0.5), str(tmp_path / "theirs"), tmp_path)


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_the_settings_of_an_optimizer_below_the_key_state_are_restored(form, tmp_path):
    """Composer saves {"state": {"model": ..., "optimizers": {"AdamW": ...}}}."""
    theirs, mine = _two(0.25), _two(0.5)
    theirs.optimizer, mine.optimizer = (state.optimizer["gen"] for state in (theirs, mine))
    their = get_optimizer_state_dict(theirs.model, theirs.optimizer)
    saved = {"state": {"model": theirs.model.state_dict(), "optimizers": {"AdamW": their}}}
    source = save(saved, form, tmp_path)
    load(mine, str(source), tmp_path)
    assert states.bits(mine.optimizer.state_dict()) == states.bits(theirs.optimizer.state_dict())


@pytest.mark.parametrize("form", ["torch", "resharded"])
def test_objects_of_any_name_are_restored_or_become_extra(form, tmp_path):
    """fairseq keeps its counters in `extra_state`, nnU-Net keeps metrics of numpy."""
    scheduler = {"last_epoch": 3, "_last_lr": [0.5]}
    saved = {
        "model": nn.Linear(3, 2).state_dict(),
        "extra_state": {"epoch": 4},
        "scheduler_a": scheduler,
        "scheduler": scheduler,
        "metrics": {"loss": [np.float32(0.5)]},
        "counts": np.arange(3),
        "pair": (torch.ones(2), 3),
        "rng_state": torch.zeros(3),
        "buffers": {0: torch.ones(2), 1: torch.zeros(1)},
    }
    source = save(saved, "torch", tmp_path)
    source = resharded(source, tmp_path) if form == "resharded" else source
    report = load(TrainState(model=nn.Linear(3, 2)), str(source), tmp_path)
    found = {name: report.extra[name] for name in saved if name != "model"}
    counts = found.pop("counts")
    assert type(counts) is np.ndarray and counts.tolist() == [0, 1, 2]
    assert states.bits(found) == states.bits({name: saved[name] for name in found})


@pytest.mark.parametrize("form", ["torch", "resharded"])
def test_only_the_smallest_part_that_cannot_be_loaded_without_running_code_is_left_out(form, tmp_path):
    """Composer keeps times in `state`. A list is left out as a whole, because its items keep their positions."""
    wall = datetime.timedelta(seconds=3)
    rest = {"seed": 17, "timestamp": {"batch": 4}, "runs": [{"name": "a"}]}
    saved = {
        "model": nn.Linear(3, 2).state_dict(),
        "state": {
            "seed": 17,
            "timestamp": {"batch": 4, "wall": wall},
            "runs": [{"name": "a", "wall": wall}],
            "walls": [1.0, wall],
            "callbacks": {"timer": {"wall": wall}},
        },
    }
    source, said = save(saved, "torch", tmp_path), []
    if form == "resharded":
        made = tmp_path / "step_00000001"
        said = [name for name, _ in reshard(str(source), str(made), world_size=1).plan.leftovers]
        source = made
    state = TrainState(model=nn.Linear(3, 2))
    report = load(state, str(source), tmp_path)
    assert report.extra["state"] == rest
    said = said or _not_restored(report)
    lost = ("timestamp.wall", "runs.0.wall", "walls", "callbacks")
    assert said == [f"state.{name}" for name in lost]


def _not_restored(report):
    return [note.split(": ")[1] for note in report.notes if note.startswith("not restored: ")]


def test_a_stateful_extra_is_not_given_a_part_of_its_state(tmp_path, caplog):
    saved = {"model": nn.Linear(3, 2).state_dict(), "clock": {"count": 4, "wall": datetime.timedelta(seconds=3)}}
    clock = Counters(0)
    state = TrainState(model=nn.Linear(3, 2), extra={"clock": clock})
    report = load(state, str(save(saved, "torch", tmp_path)), tmp_path)
    assert clock.value == Counters(0).value
    assert _not_restored(report) == ["clock"]
    assert [r.levelname for r in caplog.records if "not restored: clock" in r.getMessage()] == ["WARNING"]


def test_a_stateful_extra_is_not_given_the_parts_that_could_be_read(tmp_path):
    """dcp.save stores each value of a dict by itself."""
    saved = {"model": nn.Linear(3, 2).state_dict(), "clock": {"count": 4, "kept": states.Kept(1)}}
    clock = Counters(0)
    report = load(
        TrainState(model=nn.Linear(3, 2), extra={"clock": clock}), str(save(saved, "dcp", tmp_path)), tmp_path
    )
    assert clock.value == Counters(0).value
    assert _not_restored(report) == ["clock", "clock.kept"]


def test_settings_below_the_key_of_a_scheduler_are_not_given_to_a_scheduler(tmp_path):
    mine = _with_schedulers({})
    mine.scheduler = mine.scheduler["gen"]
    saved = {"model": mine.model.state_dict(), "scheduler": {"name": "cosine", "warmup": 5}}
    with states.unchanged(TrainState(model=nn.Linear(1, 1), scheduler=mine.scheduler)):
        report = load(mine, str(save(saved, "torch", tmp_path)), tmp_path, optimizer="skip")
    assert report.extra["scheduler"] == saved["scheduler"]
    assert any(note.startswith("not restored: scheduler") for note in report.notes)


def test_a_scheduler_with_a_value_that_cannot_be_loaded_is_skipped_and_named(tmp_path):
    wall = datetime.timedelta(seconds=3)
    theirs, mine = _with_schedulers({"gen": 5}), _with_schedulers({})
    theirs.scheduler, mine.scheduler = theirs.scheduler["gen"], mine.scheduler["gen"]
    saved = {"model": theirs.model.state_dict(), "scheduler": {**theirs.scheduler.state_dict(), "wall": wall}}
    report = load(mine, str(save(saved, "torch", tmp_path)), tmp_path, optimizer="skip")
    assert mine.scheduler.last_epoch == 0 and report.extra["scheduler"]["last_epoch"] == 5
    assert any(note.startswith("not restored: scheduler") for note in report.notes)


def test_a_scheduler_does_not_get_the_state_of_another_that_could_not_be_read(tmp_path):
    theirs, mine = _with_schedulers({"gen": 5, "dis": 7}), _with_schedulers({})
    saved = {name: one.state_dict() for name, one in theirs.scheduler.items()}
    saved["gen"]["unreadable"] = Counters(1)
    source = save({"model": theirs.model.state_dict(), "lr_scheduler": saved}, "dcp", tmp_path)
    report = load(mine, str(source), tmp_path, optimizer="skip")
    assert [mine.scheduler[name].last_epoch for name in ("gen", "dis")] == [0, 7]
    assert any(note.startswith("not restored: lr_scheduler.gen, because") for note in report.notes)
    mine = _with_schedulers({})
    mine.scheduler = mine.scheduler["gen"]
    load(mine, str(source), tmp_path, optimizer="skip")
    assert mine.scheduler.last_epoch == 0


def test_of_two_similar_names_an_extra_gets_the_value_of_its_own(tmp_path):
    model = nn.Linear(1, 1)
    source = save({"model": model.state_dict(), "lr.best": 1.0, "lr_best": 2.0}, "torch", tmp_path)
    state = TrainState(model=model, extra={"lr_best": 0.0})
    load(state, str(source), tmp_path)
    assert state.extra["lr_best"] == 2.0


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_a_module_in_extra_is_compared_as_strictly_as_the_model(form, tmp_path):
    model, average = nn.Linear(3, 2), nn.Linear(3, 2)
    saved = {"model": model.state_dict(), "ema": {f"module.{k}": v for k, v in average.state_dict().items()}}
    source = save(saved, form, tmp_path)
    state = TrainState(model=nn.Linear(3, 2), extra={"ema": nn.Linear(3, 2)})
    with states.unchanged(state), pytest.raises(CheckpointMismatchError, match=r"missing.*weight"):
        load(state, str(source), tmp_path)
    outer = nn.Module()
    outer.module = nn.Linear(3, 2)
    load(TrainState(model=nn.Linear(3, 2), extra={"ema": outer}), str(source), tmp_path)
    assert torch.equal(outer.module.weight, average.weight)


def test_large_tensors_that_are_no_weights_are_named_by_a_reshard(tmp_path):
    saved = {"model": nn.Linear(3, 2).state_dict(), "ema": {"weight": torch.ones(1 << 19)}}
    result = reshard(str(save(saved, "torch", tmp_path)), str(tmp_path / "step_00000001"), world_size=1)
    assert any(
        note.startswith("ema: neither weights nor optimizer state; a job does not load") for note in result.notes
    )


@pytest.mark.parametrize("form", ["dcp", "torch", "resharded"])
def test_a_scheduler_and_a_step_below_another_key_are_restored(form, tmp_path):
    """As in dcp.save({"app": AppState()}), and in Composer's files."""

    def made(steps: int) -> TrainState:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return TrainState(model=model, optimizer=optimizer, scheduler=scheduler)

    theirs, mine = made(3), made(0)
    app = {"model": theirs.model.state_dict(), "optim": get_optimizer_state_dict(theirs.model, theirs.optimizer)}
    app |= {"schedulers": {"StepLR": theirs.scheduler.state_dict()}, "step": 3}
    source = save({"app": app}, form, tmp_path)
    source = resharded(source, tmp_path, 3) if form == "resharded" else source
    report = load(mine, str(source), tmp_path, optimizer="skip")
    assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
    assert "scheduler" not in report.skipped and report.step == 3


@pytest.mark.parametrize("form", ["dcp", "torch"])
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_the_random_states_of_a_script_are_restored(kind, form, tmp_path):
    """Composer saves a list with one dict for each rank."""

    def drawn() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states_of = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    wanted = drawn()
    saved = {"rng_state": states_of} if kind == "dict" else {"rng": [states_of]}
    source = save({"model": nn.Linear(3, 2).state_dict(), **saved}, form, tmp_path)
    report = load(TrainState(model=nn.Linear(3, 2)), str(source), tmp_path)
    assert drawn() == wanted and "rng" in report.loaded and not report.extra.keys() & saved.keys()


def test_the_random_state_of_a_gpu_is_restored_or_named(tmp_path):
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_rng_state() if has_gpu else torch.zeros(16, dtype=torch.uint8)
    saved = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": gpu}
    source = save({"model": nn.Linear(3, 2).state_dict(), "rng": [saved]}, "torch", tmp_path)
    if has_gpu:
        torch.cuda.manual_seed(7)
    report = load(TrainState(model=nn.Linear(3, 2)), str(source), tmp_path)
    if has_gpu:
        assert torch.equal(torch.cuda.get_rng_state(), gpu)
    else:
        assert [note for note in report.notes if "not restored: the random state of cuda" in note]


RANDOM: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor": ({"torch_rng": torch.zeros(16, dtype=torch.uint8)}, "torch_rng"),
    "Megatron's": ({"rng_state": [{"torch_rng_state": torch.zeros(16)}]}, "rng_state"),
    "below another key": ({"meta": {"rng": {"np": [1, 2]}}}, "meta.rng"),
    "a list that is incomplete": ({"rng": [{"python": None}]}, "rng"),
    "a seed": ({"rng": 7, "random_state": 7, "random_crop": {"size": 3}, "extra_state": {"epoch": 4}}, ""),
}


@pytest.mark.parametrize("case", RANDOM)
def test_a_random_state_of_an_unknown_form_is_named(case, tmp_path):
    saved, name = RANDOM[case]
    source = save({"model": nn.Linear(3, 2).state_dict(), **saved}, "torch", tmp_path)
    report = load(TrainState(model=nn.Linear(3, 2)), str(source), tmp_path)
    said = [note for note in report.notes if "random" in note]
    unknown = f"not restored: random numbers, because the form of {name} is unknown"
    assert said == [unknown if name else "the checkpoint has no random number state"]


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_objects_with_tensors_are_restored_with_the_step_and_larger_ones_are_named(form, tmp_path):
    def trained(lr: float, steps: int) -> TrainState:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
        return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, extra={"seen": None})

    theirs, mine = trained(0.5, 3), trained(0.75, 1)
    saved = {
        "model": theirs.model.state_dict(),
        "optimizer": get_optimizer_state_dict(theirs.model, theirs.optimizer),
        "lr_scheduler": theirs.scheduler.state_dict(),
        "seen": {"mean": torch.ones(2), "count": {"a": 7}},
        "ema": {"weight": torch.ones(1 << 19), "decay": 0.5},
        "step": torch.tensor(3) if form == "dcp" else 3,
    }
    source = save(saved, form, tmp_path)
    report = load(mine, str(source), tmp_path)
    assert report.step == mine.step == 3
    assert states.bits(mine.scheduler.state_dict()) == states.bits(theirs.scheduler.state_dict())
    assert torch.equal(mine.extra["seen"]["mean"], torch.ones(2)) and mine.extra["seen"]["count"] == {"a": 7}
    assert "not restored: 1 tensor, neither weights nor optimizer state: ema.weight." in report.notes


class Nested(torch.optim.Optimizer):
    """Keeps a list and a dict of tensors for each parameter, like SOAP."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("step", torch.tensor(0.0)).add_(1)
            state.setdefault("GG", [torch.eye(n) for n in parameter.shape])[0].add_(len(self.state))
            state.setdefault("more", {"rank": 3, "basis": [None, torch.ones(2)], "of": {"a": torch.ones(1)}})


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_optimizer_states_that_are_lists_or_dicts_of_tensors_are_restored(form, numbered, tmp_path):
    model = nn.Linear(3, 2)
    optimizer = Nested(model.parameters())
    optimizer.step()
    their = optimizer.state_dict() if numbered else get_optimizer_state_dict(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": their}
    source = save(saved, form, tmp_path)
    fresh = nn.Linear(3, 2)
    resumed = Nested(fresh.parameters())
    load(TrainState(model=fresh, optimizer=resumed), str(source), tmp_path)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert states.bits(resumed.state[mine]) == states.bits(optimizer.state[theirs])


def load_sharded(url: str, run: str) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = TrainState(model=model, optimizer=Nested(model.parameters()))
    try:
        states.load(run, state, url)
    except CheckpointMismatchError as error:
        return str(error)
    return ""


def test_states_that_are_lists_of_tensors_are_refused_for_sharded_parameters(ranks, tmp_path):
    model = nn.Linear(4, 4)
    optimizer = Nested(model.parameters())
    optimizer.step()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "torch", tmp_path)
    for answer in ranks.run(load_sharded, 2, str(tmp_path / "theirs"), str(tmp_path / "run")):
        assert "the optimizer's state 'GG' of weight is a list or dict of tensors" in answer


class Counting(torch.optim.Optimizer):
    """Counts the steps of each parameter, and has tensors for none of them or only for the first."""

    def __init__(self, params: Any, momentum: bool) -> None:
        super().__init__(params, {"momentum": momentum})

    def step(self, closure: Any = None) -> None:
        first, *_ = parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        if self.param_groups[0]["momentum"]:
            self.state[first]["momentum"] = torch.ones_like(first)


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_optimizer_states_without_tensors_are_restored(form, momentum, tmp_path):
    theirs, mine = ((model, Counting(model.parameters(), momentum)) for model in (nn.Linear(3, 2), nn.Linear(3, 2)))
    mine[1].step()
    theirs[1].step()
    theirs[1].step()
    source = save(_whole(*theirs), form, tmp_path)
    load(TrainState(model=mine[0], optimizer=mine[1]), str(source), tmp_path)
    assert states.bits(mine[1].state_dict()) == states.bits(theirs[1].state_dict())


def _with_schedulers(steps: dict[str, int]) -> TrainState:
    state = _two(0.5)
    state.scheduler = {name: LinearLR(optimizer, total_iters=9) for name, optimizer in state.optimizer.items()}
    for name, count in steps.items():
        for _ in range(count):
            state.optimizer[name].step()
            state.scheduler[name].step()
    return state


@pytest.mark.parametrize("live", [["gen", "dis"], ["dis", "gen"]])
@pytest.mark.parametrize("key", ["{}_sched", "scheduler_{}", "{}"])
@pytest.mark.parametrize("form", ["torch", "resharded"])
def test_several_schedulers_are_matched_by_their_names(form, key, live, tmp_path):
    theirs, mine = _with_schedulers({"dis": 2, "gen": 5}), _with_schedulers({})
    mine.scheduler = {name: mine.scheduler[name] for name in live}
    saved = {key.format(name): theirs.scheduler[name].state_dict() for name in ("dis", "gen")}
    source = save({"model": theirs.model.state_dict(), **saved}, "torch", tmp_path)
    source = resharded(source, tmp_path) if form == "resharded" else source
    load(mine, str(source), tmp_path, optimizer="skip")
    assert {name: scheduler.last_epoch for name, scheduler in mine.scheduler.items()} == {"dis": 2, "gen": 5}


def test_numbered_schedulers_are_matched_in_the_order_of_their_numbers(tmp_path):
    def made() -> TrainState:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return TrainState(model=model, scheduler={f"s{i}": LinearLR(optimizer) for i in range(11)})

    theirs, mine = made(), made()
    saved: dict[str, Any] = {"model": theirs.model.state_dict()}
    for number in ("", *sorted(f"_{i}" for i in range(1, 11))):  # in the order of a listing
        saved[f"scheduler{number}"] = {"last_epoch": int(number[1:] or 0), "_last_lr": [0.5]}
    load(mine, str(save(saved, "torch", tmp_path)), tmp_path)
    assert [scheduler.last_epoch for scheduler in mine.scheduler.values()] == list(range(11))


def test_several_schedulers_of_unknown_names_are_left_and_named(tmp_path):
    theirs, mine = _with_schedulers({"dis": 2, "gen": 5}), _with_schedulers({})
    saved = {"muon": theirs.scheduler["gen"].state_dict(), "adamw": theirs.scheduler["dis"].state_dict()}
    source = save({"model": theirs.model.state_dict(), **saved}, "torch", tmp_path)
    report = load(mine, str(source), tmp_path, optimizer="skip")
    assert all(scheduler.last_epoch == 0 for scheduler in mine.scheduler.values())
    assert "not restored: muon, adamw, because their names are not those of gen, dis." in report.notes


def test_an_optimizer_whose_key_contains_two_live_names_is_matched_by_order(tmp_path):
    theirs, mine = _two(0.25), _two(0.5)
    mine.optimizer = dict(zip(("optimizer", "gen"), mine.optimizer.values(), strict=True))
    first, second = (optimizer.state_dict() for optimizer in theirs.optimizer.values())
    saved = {"model": theirs.model.state_dict(), "gen": {"optimizer": first}, "optim2": second}
    load(mine, str(save(saved, "torch", tmp_path)), tmp_path)
    assert states.bits(mine.optimizer["optimizer"].state_dict()) == states.bits(first)


def test_files_of_other_steps_beside_a_file_of_weights_are_not_read(tmp_path):
    """Accelerate also writes model_1.bin and optimizer_1.bin, but beside random_states_0.pkl."""
    models = {step: nn.Linear(3, 2) for step in (1, 2)}
    for step, model in models.items():
        torch.save(model.state_dict(), tmp_path / f"model_{step}.bin")
    optimizer = torch.optim.AdamW(models[2].parameters())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer_2.bin")
    fresh = nn.Linear(3, 2)
    state = TrainState(model=fresh, optimizer=torch.optim.AdamW(fresh.parameters()))
    with pytest.raises(CheckpointMismatchError, match="the whole optimizer"):
        load(state, str(tmp_path / "model_1.bin"), tmp_path)
    load(state, str(tmp_path / "model_1.bin"), tmp_path, optimizer="skip")
    assert torch.equal(fresh.weight, models[1].weight)


@pytest.mark.parametrize("ending", ["safetensors", "bin", "pt"])
def test_an_optimizer_beside_weights_of_several_steps_belongs_to_the_latest(ending, tmp_path):
    states_of = {}
    for step in (1, 2):
        model = nn.Linear(3, 2)
        path = tmp_path / f"step_{step}.{ending}"
        save_file(model.state_dict(), path) if ending == "safetensors" else torch.save(model.state_dict(), path)
        states_of[step] = torch.optim.AdamW(model.parameters(), lr=step / 8).state_dict()
    torch.save(states_of[2], tmp_path / "optimizer.pt")
    torch.save(Counters(1), tmp_path / "training_args.bin")
    (tmp_path / "train.bin").write_bytes(b"\x01" * 100)
    model = nn.Linear(3, 2)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointMismatchError, match="the whole optimizer"):
        load(state, str(tmp_path / f"step_1.{ending}"), tmp_path)
    load(state, str(tmp_path / f"step_2.{ending}"), tmp_path)
    assert state.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("sharded", [False, True])
def test_values_in_rank_files_that_no_rank_or_only_rank_0_gets_are_named(sharded, tmp_path):
    source = tmp_path / "theirs"
    source.mkdir()
    for rank in range(2):
        own = {"exp_avg": torch.full((2, 2), float(rank * sharded))}  # an optimizer that differs is a shard
        optimizer = {"state": {0: own}, "param_groups": [{"params": [0]}]}
        saved = {"model": {"weight": torch.ones(2, 2)}, "optimizer": optimizer, "seen": 100 + rank}
        torch.save(saved, source / f"rank_{rank}.pt")
    model = nn.Linear(2, 2, bias=False)
    report = load(TrainState(model=model, extra={"seen": 0}), str(source), tmp_path, optimizer="skip")
    what = "seen of rank_*.pt" if sharded else "other ranks' values of seen"
    assert any(note.startswith(f"not restored: {what}") for note in report.notes)


def test_all_objects_with_tensors_are_read_at_once(tmp_path, monkeypatch):
    """Each read is one request or more of an object store."""
    calls, read_whole = [], fill.read_whole

    def counted(catalog: Any, store: Any, names: Any) -> Any:
        calls.append(names)
        return read_whole(catalog, store, names)

    monkeypatch.setattr(fill, "read_whole", counted)
    model = nn.Linear(3, 2)
    source = save({"model": model.state_dict(), "a": torch.ones(2), "b": {"c": torch.ones(2)}}, "torch", tmp_path)
    state = TrainState(model=model, extra={"a": None, "b": None})
    load(state, str(source), tmp_path)
    assert calls == [["a", "b.c"]]
    assert torch.equal(state.extra["b"]["c"], torch.ones(2))


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_random_states_and_schedulers_that_nothing_takes_are_in_the_report(form, tmp_path):
    model = nn.Linear(3, 2)
    saved = {"model": model.state_dict(), "rng_state": torch.ones(2), "scheduler": {"last_epoch": 3, "_last_lr": [0.5]}}
    report = load(TrainState(model=model), str(save(saved, form, tmp_path)), tmp_path)
    assert torch.equal(report.extra["rng_state"], torch.ones(2)) and report.extra["scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_a_parameter_may_have_the_name_of_an_optimizers_part(form, tmp_path):
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.master, model.state = (nn.Parameter(torch.randn(2)) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters())
        (model.master * model.state).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), mine = made(), made()
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(TrainState(model=mine[0], optimizer=mine[1]), str(save(saved, form, tmp_path)), tmp_path)
    assert states.bits(mine[1].state_dict()) == states.bits(optimizer.state_dict())


def test_a_compiled_models_checkpoint_is_resharded_under_the_models_own_names(tmp_path):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    compiled = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    source = save({"model": compiled, "optimizer": optimizer.state_dict(), "step": 3}, "torch", tmp_path)
    fresh = nn.Linear(3, 4)
    state = TrainState(model=fresh, optimizer=torch.optim.AdamW(fresh.parameters()))
    load(state, str(resharded(source, tmp_path, 3)), tmp_path)
    assert torch.equal(fresh.weight, model.weight) and state.optimizer.param_groups[0]["lr"] == 0.125
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(state.optimizer.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
