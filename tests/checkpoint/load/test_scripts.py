"""`manager.load(state, URL)` resumes from checkpoints that a training script wrote with `dcp.save` or `torch.save`."""

import copy
import datetime
import itertools
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from ckptkit import TrainState, reshard
from ckptkit.errors import CheckpointMismatchError
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import states

DCP_OR_TORCH = pytest.mark.parametrize("form", ["dcp", "torch"])
LINEAR, TO_ONE = LinearLR, partial(LambdaLR, lr_lambda=lambda _: 1.0)
TORCH_OR_RESHARDED = pytest.mark.parametrize("form", ["torch", "resharded"])
EACH_FORM = pytest.mark.parametrize("form", ["dcp", "torch", "resharded"])


def load(state: TrainState, url: str, tmp_path: Any, **options: Any) -> Any:
    return states.load(tmp_path / "run", state, url, **options)


def save(saved: Any, form: str, tmp_path: Any) -> str:
    """Save with dcp.save or torch.save, or reshard what torch.save wrote; return the URL."""
    path = tmp_path / "theirs"
    if form == "dcp":
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    else:
        torch.save(saved, path)
    if form != "resharded":
        return str(path)
    reshard(str(path), f"{tmp_path}/step_00000003", world_size=1)
    return f"{tmp_path}/step_00000003"


def resume(state: TrainState, saved: Any, form: str, tmp_path: Any, **options: Any) -> Any:
    """Save what a script saves, and load it; return the report."""
    return load(state, save(saved, form, tmp_path), tmp_path, **options)


def plain(**parts: Any) -> TrainState:
    """Return the state of a small model, and of other parts."""
    return TrainState(model=nn.Linear(3, 2), **parts)


def script(**parts: Any) -> dict[str, Any]:
    """Return what a script saves: the weights of the model of `plain`, and other parts."""
    return {"model": nn.Linear(3, 2).state_dict(), **parts}


def _whole(state: TrainState) -> dict[str, Any]:
    return {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}


def _named(state: TrainState, *, flatten: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    optimizer = get_optimizer_state_dict(state.model, state.optimizer, options=options)
    return {"model": state.model.state_dict(), "optimizer": optimizer}


def _flattened(state: TrainState) -> dict[str, Any]:
    saved = _named(state, flatten=True)
    return {**saved["model"], **saved["optimizer"]}


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("saved_as", [_whole, _flattened])
def test_an_optimizer_is_restored_from_dcp_if_numbered_or_flattened_next_to_the_weights(saved_as, flatten, tmp_path):
    """dcp.save with what `Optimizer.state_dict` returns, or with the weights and a flattened optimizer in one dict."""
    theirs = states.trained(states.WithExtraState(3, 4), lr=0.125)
    theirs.model.kept = {"amax": torch.ones(2), "calls": 3}
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(saved_as(theirs), checkpoint_id=tmp_path / "theirs", planner=planner, no_dist=True)
    mine = states.trained(states.WithExtraState(3, 4), steps=0, lr=0.5)
    load(mine, str(tmp_path / "theirs"), tmp_path)
    assert mine.optimizer.param_groups[0]["lr"] == 0.125 and mine.model.kept is None
    states.check_resumed(mine, theirs)


@pytest.mark.parametrize("flatten", [False, True])
@EACH_FORM
def test_settings_that_are_tensors_are_restored(form, flatten, tmp_path):
    """torch.compile and CUDA graphs need a learning rate that is a tensor. The last group has none."""

    def trained(lr: float) -> TrainState:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
        rates: list[Any] = [{"lr": torch.tensor(lr)}, {"lr": torch.tensor(2 * lr)}, {}]
        groups = [{"params": part.parameters(), **rate} for part, rate in zip(model, rates, strict=True)]
        betas = (torch.tensor(lr), torch.tensor(0.5))
        state = states.trained(model, params=groups, lr=lr / 2, betas=betas, foreach=False)
        state.optimizer.param_groups[2]["betas"] = (lr, 0.5)
        return state

    mine, theirs = trained(0.75), trained(0.25)
    resume(mine, _named(theirs, flatten=flatten), form, tmp_path)
    found, wanted = ([(g["lr"], *g["betas"]) for g in state.optimizer.param_groups] for state in (mine, theirs))
    assert states.bits(found) == states.bits(wanted)


def scheduled(steps: int, scale: float | None = None, make: Any = torch.optim.AdamW) -> TrainState:
    """Return a state with a scheduler of schedulers that made some steps, and perhaps with a loss scale."""
    state = states.trained(nn.Linear(3, 2), make, lr=0.5)
    warmup, decay = LinearLR(state.optimizer, total_iters=2), CosineAnnealingLR(state.optimizer, 10)
    state.scheduler = SequentialLR(state.optimizer, [warmup, decay], milestones=[2])
    state.grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
    for _ in range(steps):
        state.optimizer.step()
        state.scheduler.step()
    return state


KEYS = [
    ("gen", "opt", "lr_scheduler", "scaler"), ("model", "optimizer", "scheduler", "MixedPrecision"),
    ("gen", "adam", "scheduler_state_dict", "scaler"), ("net", "optim", "lr_schedulers", "scaler"),
    ("model", "optimizer", "sched", "scale"),
]  # fmt: skip


# In a DCP, the key of an optimizer starts with "optim".
FORMS = [(" ".join(keys), form) for keys in KEYS for form in ("dcp", "torch", "resharded")[keys[0] == "gen" :]]


@pytest.mark.parametrize(("keys", "form"), FORMS)
def test_the_parts_of_a_job_are_recognized_under_any_key(keys, form, tmp_path):
    names = keys.split()
    make = torch.optim.SGD if "optimizer" in names else torch.optim.AdamW  # SGD has an empty state
    theirs, mine = scheduled(5, 1024.0, make), scheduled(0, 8.0, make)
    their = theirs.scheduler.state_dict()
    parts = [*_whole(theirs).values(), [their] if "lr_schedulers" in names else their, theirs.grad_scaler.state_dict()]
    report = resume(mine, {**dict(zip(names, parts, strict=True)), "epoch": 5}, form, tmp_path)
    states.check_resumed(mine, theirs)
    assert mine.scheduler.state_dict() == their and mine.grad_scaler.get_scale() == 1024.0
    assert report.extra["epoch"] == 5 and not report.skipped and not {*names} & report.extra.keys()


@EACH_FORM
@pytest.mark.parametrize("kind", ["AppState", "Composer", "AppState, flattened", "Composer, flattened"])
def test_the_parts_of_a_job_below_another_key_are_restored(kind, form, tmp_path):
    is_app, flatten = "AppState" in kind, "flattened" in kind
    make: Any = torch.optim.SGD if is_app else torch.optim.AdamW  # SGD has an empty state
    theirs, mine = scheduled(3, make=make), scheduled(0, make=make)
    model, optimizer = _named(theirs, flatten=flatten).values()
    parts = {"model": model, "schedulers": {"SequentialLR": theirs.scheduler.state_dict()}, "step": 3}
    parts |= {"opt" if flatten else "optim": optimizer} if is_app else {"optimizers": {"AdamW": optimizer}}
    report = resume(mine, {"app" if is_app else "state": parts}, form, tmp_path)
    states.check_resumed(mine, theirs)
    assert states.bits(mine.optimizer.state_dict()) == states.bits(theirs.optimizer.state_dict())
    assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
    assert "scheduler" not in report.skipped and report.step == 3


# --- optimizers with names and numbers


NAMES_ARE_SAVED = pytest.mark.skipif(
    "param_names" not in torch.optim.SGD([("a", torch.ones(1))], lr=0.1).state_dict()["param_groups"][0],
    reason="this version of torch saves no names",
)


@NAMES_ARE_SAVED
@TORCH_OR_RESHARDED
def test_numbered_parameters_with_saved_names_are_matched_by_name(form, tmp_path):
    """Equal shapes would prove neither which of the layers is frozen nor the order of the others."""

    def made(steps: int, order: int) -> TrainState:
        model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
        return states.trained(model, params=[*model.named_parameters()][1:][::order], steps=steps, lr=0.5 - steps / 4)

    theirs, mine = made(1, 1), made(0, -1)
    report = resume(mine, _whole(theirs), form, tmp_path)
    states.check_resumed(mine, theirs)
    assert mine.optimizer.param_groups[0]["lr"] == 0.25
    assert not any("by order" in note for note in report.notes)


@NAMES_ARE_SAVED
def test_saved_names_decide_even_if_only_some_parameters_are_still_trained(tmp_path):
    def made(*trained: str) -> TrainState:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        return states.trained(model, params=[(n, p) for n, p in model.named_parameters() if n[0] in trained])

    theirs, mine = made("a", "b"), made("b", "c")
    source = save(_whole(theirs), "torch", tmp_path)
    states.check_misfit(tmp_path / "run", mine, r"optimizer: 1 missing in the checkpoint: c\.weight", which=source)
    load(mine, source, tmp_path, strict=False)
    found, wanted = (state.optimizer.state[state.model["b"].weight]["exp_avg"] for state in (mine, theirs))
    assert torch.equal(found, wanted)


def test_saved_names_that_lack_the_prefixes_of_submodules_are_not_used_for_matching(tmp_path):
    def made() -> TrainState:  # the names "weight" and "0.weight" stand for "0.weight" and "1.0.weight"
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False)))
        return states.trained(model, params=[{"params": [*part.named_parameters()]} for part in model])

    theirs, mine = made(), made()
    resume(mine, _whole(theirs), "torch", tmp_path)
    states.check_resumed(mine, theirs)


# --- extras, and what cannot be restored


@EACH_FORM
def test_a_stateful_extra_gets_the_state_as_it_was_nested(form, tmp_path):
    mine, theirs = (
        states.Kept({"seen": {"a.b": value, "tokens": torch.tensor(value)}, "best": [value]}) for value in (0, 7)
    )
    resume(plain(extra={"counters": mine}), script(counters=theirs.state_dict()), form, tmp_path)
    assert states.bits(mine) == states.bits(theirs)


def _two(lr: float) -> TrainState:
    models = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("gen", "dis")})
    optimizers = {name: states.trained(models[name], lr=lr).optimizer for name in models}
    return TrainState(model=models, optimizer=optimizers)


@DCP_OR_TORCH
@pytest.mark.parametrize("key", ["optimizer_{}", "{}_optim", "opt_{}", "optimizers", "optimizers/0"])
def test_several_optimizers_are_matched_by_their_names_or_positions(key, form, tmp_path):
    theirs, mine = _two(0.25), _two(0.5)
    states_of = {name: optimizer.state_dict() for name, optimizer in theirs.optimizer.items()}
    saved: dict[str, Any] = {key.format(name): value for name, value in states_of.items()}
    if key.startswith("optimizers"):
        saved = {"optimizers": states_of if key == "optimizers" else list(states_of.values())}
    resume(mine, {**saved, "model": theirs.model.state_dict()}, form, tmp_path)
    for name, optimizer in mine.optimizer.items():
        assert states.bits(optimizer.state_dict()) == states.bits(states_of[name]), name


def test_numbered_optimizers_with_unknown_names_are_refused(tmp_path):
    theirs = _two(0.25)
    muon, adamw = (optimizer.state_dict() for optimizer in theirs.optimizer.values())
    saved = {"model": theirs.model.state_dict(), "optimizers": {"muon": muon, "adamw": adamw}}
    with pytest.raises(CheckpointMismatchError, match=r"adamw, optimizers\.muon, and numbers their parameters"):
        resume(_two(0.5), saved, "torch", tmp_path)


@TORCH_OR_RESHARDED
def test_objects_of_any_name_are_restored_or_become_extra(form, tmp_path):
    """fairseq keeps its counters in `extra_state`, nnU-Net keeps metrics of numpy."""
    scheduler = {"last_epoch": 3, "_last_lr": [0.5]}
    saved = {
        "extra_state": {"epoch": 4},
        "scheduler_a": scheduler,
        "scheduler": scheduler,
        "metrics": {"loss": [np.float32(0.5)]},
        "counts": np.arange(3),
        "pair": (torch.ones(2), 3),
        "rng_state": torch.zeros(3),
        "buffers": {0: torch.ones(2), 1: torch.zeros(1)},
    }
    report = resume(plain(), script(**saved), form, tmp_path)
    found = {name: report.extra[name] for name in saved}
    counts = found.pop("counts")
    assert type(counts) is np.ndarray and counts.tolist() == [0, 1, 2]
    assert states.bits(found) == states.bits({name: saved[name] for name in found})


def _not_restored(report):
    return [note.split(": ")[1] for note in report.notes if note.startswith("not restored: ")]


@TORCH_OR_RESHARDED
def test_only_the_smallest_part_that_cannot_be_loaded_without_running_code_is_left_out(form, tmp_path):
    """Composer keeps times in `state`. A list is left out as a whole, because its items keep their positions."""
    wall, state = datetime.timedelta(seconds=3), states.optimized(nn.Linear(3, 2), lr=0.25)
    saved = {
        "seed": 17,
        "timestamp": {"batch": 4, "wall": wall},
        "runs": [{"name": "a", "wall": wall}],
        "walls": [1.0, wall],
        "callbacks": {"timer": {"wall": wall}},
    }
    optimizer = state.optimizer.state_dict()
    optimizer["param_groups"][0] |= {"lr": 0.5, "warmup": wall}
    source, left_out = save(script(state=saved, optimizer=optimizer), "torch", tmp_path), []
    if form == "resharded":
        left_out = [name for name, _ in reshard(source, f"{tmp_path}/resharded", world_size=1).plan.leftovers]
        source = f"{tmp_path}/resharded"
    report = load(state, source, tmp_path)
    assert report.extra["state"] == {"seed": 17, "timestamp": {"batch": 4}, "runs": [{"name": "a"}]}
    assert state.optimizer.param_groups[0]["lr"] == 0.5
    names = [f"state.{name}" for name in ("timestamp.wall", "runs.0.wall", "walls", "callbacks")]
    assert sorted(left_out or _not_restored(report)) == sorted([*names, "optimizer.param_groups.0.warmup"])


@pytest.mark.parametrize(
    ("form", "unreadable", "said"),
    [("torch", datetime.timedelta(seconds=3), ["clock"]), ("dcp", states.Kept(1), ["clock", "clock.unreadable"])],
    ids=["torch", "dcp"],  # dcp.save stores each value of a dict by itself
)
def test_a_stateful_extra_is_not_given_a_part_of_its_state(form, unreadable, said, tmp_path, caplog):
    clock = states.Kept(0)
    saved = script(clock={"count": 4, "unreadable": unreadable})
    report = resume(plain(extra={"clock": clock}), saved, form, tmp_path)
    assert clock.value == 0
    assert _not_restored(report) == said
    assert "WARNING" in [r.levelname for r in caplog.records if "not restored: clock" in r.getMessage()]


@pytest.mark.parametrize("what", ["settings", "a value that cannot be loaded"])
def test_a_scheduler_is_not_given_settings_or_a_part_of_its_state(what, tmp_path):
    mine, state = scheduled(0), {"name": "cosine", "warmup": 5}
    if what != "settings":
        state = {**scheduled(5).scheduler.state_dict(), "wall": datetime.timedelta(seconds=3)}
    with states.unchanged(plain(scheduler=mine.scheduler)):
        report = resume(mine, script(scheduler=state), "torch", tmp_path, optimizer="skip")
    assert report.extra["scheduler"] == {key: value for key, value in state.items() if key != "wall"}
    assert any(note.startswith("not restored: scheduler") for note in report.notes)


@pytest.mark.parametrize(
    ("was", "now"),
    [([LINEAR], [TO_ONE]), ([TO_ONE], [LINEAR]), ([LINEAR] * 2, [TO_ONE]), ([LINEAR] * 2, [LINEAR, TO_ONE])],
)
@TORCH_OR_RESHARDED
def test_a_scheduler_is_not_given_the_state_of_another_class(form, was, now, tmp_path):
    theirs, mine = (states.trained(nn.Linear(3, 2)) for _ in range(2))
    for state, kinds in ((theirs, was), (mine, now)):
        made = [kind(state.optimizer) for kind in kinds]
        state.scheduler = made[0] if len(made) == 1 else SequentialLR(state.optimizer, made, [2])
    saved = {**_whole(theirs), "scheduler": theirs.scheduler.state_dict()}
    with states.unchanged(plain(scheduler=mine.scheduler)):
        if form == "torch":
            notes = resume(mine, saved, form, tmp_path).notes
            assert any(note.startswith("not restored: scheduler, because") for note in notes)
        else:
            with pytest.raises(CheckpointMismatchError, match=r"nothing was loaded(?s:.*)saved state lacks"):
                resume(mine, saved, form, tmp_path)


@TORCH_OR_RESHARDED
def test_a_gradient_scaler_is_not_given_a_part_of_its_state(form, tmp_path):
    mine = plain(grad_scaler=torch.amp.GradScaler("cpu"))
    saved = script(scaler={"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5})
    with states.unchanged(plain(grad_scaler=mine.grad_scaler)):
        report = resume(mine, saved, form, tmp_path, strict=False)
    assert "lacks _growth_tracker, growth_interval" in " ".join(report.notes + report.missing)


@TORCH_OR_RESHARDED
def test_a_note_names_what_a_saved_scheduler_lacks(form, tmp_path):
    mine, saved = plain(), script(scheduler={"last_epoch": 4, "_last_lr": [0.5]})
    mine.scheduler = LINEAR(torch.optim.SGD(mine.model.parameters()))
    notes = resume(mine, saved, form, tmp_path).notes
    assert mine.scheduler.last_epoch == 4 and any("lacks base_lrs, end_factor" in note for note in notes)


def test_a_scheduler_does_not_get_the_state_of_another_that_could_not_be_read(tmp_path):
    theirs, mine = _with_schedulers({"gen": 5, "dis": 7}), _with_schedulers({})
    saved = {name: one.state_dict() for name, one in theirs.scheduler.items()}
    saved["gen"]["unreadable"] = states.Kept(1)
    source = save({"model": theirs.model.state_dict(), "lr_scheduler": saved}, "dcp", tmp_path)
    report = load(mine, source, tmp_path, optimizer="skip")
    assert [mine.scheduler[name].last_epoch for name in ("gen", "dis")] == [0, 7]
    assert any(note.startswith("not restored: lr_scheduler.gen, because") for note in report.notes)
    mine = _with_schedulers({})
    mine.scheduler = mine.scheduler["gen"]
    load(mine, source, tmp_path, optimizer="skip")
    assert mine.scheduler.last_epoch == 0


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kinds", [1, -1])
@EACH_FORM
def test_the_state_of_another_class_of_optimizer_is_refused(form, kinds, steps, tmp_path):
    was, now = (torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9))[::kinds]
    theirs, mine = states.trained(nn.Linear(3, 2), was), states.trained(nn.Linear(3, 2), now, steps=steps)
    with states.unchanged(mine), pytest.raises(CheckpointMismatchError, match=r"whole optimizer \(saved with \w+"):
        resume(mine, _whole(theirs), form, tmp_path)


@DCP_OR_TORCH
def test_an_error_names_the_models_of_which_one_can_be_loaded(form, tmp_path):
    theirs = {name: nn.Sequential(nn.Linear(3, 2)) for name in ("actor", "critic")}
    mine = nn.Sequential(nn.Linear(3, 2))
    source = save({name: model.state_dict() for name, model in theirs.items()}, form, tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"models actor, critic\..* TrainState\(model={'actor': model}\)"):
        load(TrainState(model=mine), source, tmp_path)
    load(TrainState(model={"critic": mine}), source, tmp_path)
    assert states.bits(mine.state_dict()) == states.bits(theirs["critic"].state_dict())


@DCP_OR_TORCH
def test_a_module_in_extra_is_compared_as_strictly_as_the_model(form, tmp_path):
    average = nn.Linear(3, 2)
    source = save(script(ema={f"module.{k}": v for k, v in average.state_dict().items()}), form, tmp_path)
    state = plain(extra={"ema": nn.Linear(3, 2)})
    states.check_misfit(tmp_path / "run", state, r"missing.*weight", which=source)
    outer = nn.ModuleDict({"module": nn.Linear(3, 2)})
    load(plain(extra={"ema": outer}), source, tmp_path)
    assert torch.equal(outer["module"].weight, average.weight)


def test_large_tensors_that_are_no_weights_are_named_by_a_reshard(tmp_path):
    saved = save(script(ema={"weight": torch.ones(1 << 19)}), "torch", tmp_path)
    result = reshard(saved, f"{tmp_path}/resharded", world_size=1)
    assert any(
        note.startswith("ema: neither weights nor optimizer state; a job does not load") for note in result.notes
    )


# --- random numbers


@DCP_OR_TORCH
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_the_random_states_of_a_script_are_restored(kind, form, tmp_path):
    """Composer saves a list with one dict for each rank."""

    def drawn() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states_of = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    wanted = drawn()
    saved = {"rng_state": states_of} if kind == "dict" else {"rng": [states_of]}
    report = resume(plain(), script(**saved), form, tmp_path)
    assert drawn() == wanted and "rng" in report.loaded and not report.extra.keys() & saved.keys()


def test_the_random_state_of_a_gpu_is_restored_or_named(tmp_path):
    has_gpu = torch.cuda.is_available()
    gpu = torch.cuda.get_rng_state() if has_gpu else torch.zeros(16, dtype=torch.uint8)
    saved = script(rng=[{"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": gpu}])
    if has_gpu:
        torch.cuda.manual_seed(7)
    report = resume(plain(), saved, "torch", tmp_path)
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
    report = resume(plain(), script(**saved), "torch", tmp_path)
    said = [note for note in report.notes if "random" in note]
    unknown = f"not restored: random numbers, because the form of {name} is unknown"
    assert said == [unknown if name else "the checkpoint has no random number state"]


@DCP_OR_TORCH
def test_objects_with_tensors_are_restored_with_the_step_and_larger_ones_are_named(form, tmp_path):
    def made(steps: int) -> TrainState:
        state = scheduled(steps, make=lambda params, lr: torch.optim.AdamW(params, torch.tensor(lr)))
        state.extra["seen"] = None
        return state

    theirs, mine = made(3), made(1)
    saved = {
        **_named(theirs),
        "lr_scheduler": theirs.scheduler.state_dict(),
        "seen": {"mean": torch.ones(2), "count": {"a": 7}},
        "ema": {"weight": torch.ones(1 << 19), "decay": 0.5},
        "step": torch.tensor(3) if form == "dcp" else 3,
    }
    report = resume(mine, saved, form, tmp_path)
    assert report.step == mine.step == 3
    assert states.bits(mine.scheduler.state_dict()) == states.bits(theirs.scheduler.state_dict())
    assert torch.equal(mine.extra["seen"]["mean"], torch.ones(2)) and mine.extra["seen"]["count"] == {"a": 7}
    assert "not restored: 1 tensor (neither weights nor optimizer state): ema.weight." in report.notes


# --- optimizers that keep more than one tensor for each parameter


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


class Counting(torch.optim.Optimizer):
    """Keeps numbers for each parameter, like transformers' Adafactor, and tensors for the first `tensors` of them."""

    def __init__(self, params: Any, tensors: int) -> None:
        super().__init__(params, {"tensors": tensors})

    def step(self, closure: Any = None) -> None:
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            state = self.state[parameter]
            state["step"], state["RMS"] = state.get("step", 0) + 1, 0.25
            if at < self.param_groups[0]["tensors"]:
                state["moment"] = torch.randn_like(parameter)


def masters(params: Any) -> MasterWeightOptimizer:
    return MasterWeightOptimizer(torch.optim.AdamW(params))


PARTS = nn.ParameterDict({name: torch.randn(2) for name in ("master", "state")})
OPTIMIZERS: dict[str, tuple[nn.Module, Any, int]] = {  # a model, the class, and the number of steps before the load
    "lists and dicts of tensors": (nn.Linear(3, 2), Nested, 0),
    "numbers and a tensor": (nn.Linear(3, 2), partial(Counting, tensors=2), 0),
    "a tensor of one parameter": (nn.Linear(3, 2), partial(Counting, tensors=1), 1),
    "no tensors": (nn.Linear(3, 2), partial(Counting, tensors=0), 1),
    "fp32 masters": (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16(), masters, 0),
    "of parameters that are called like its parts": (PARTS, torch.optim.AdamW, 0),
}


@pytest.mark.parametrize("saved_as", [_whole, _named])
@pytest.mark.parametrize(
    ("form", "kind"), [*itertools.product(("dcp", "torch"), OPTIMIZERS), ("resharded", "fp32 masters")]
)
def test_optimizer_states_of_any_form_are_restored(form, kind, saved_as, tmp_path):
    model, make, before = OPTIMIZERS[kind]
    theirs, mine = (states.trained(copy.deepcopy(model), make, steps=steps) for steps in (2, before))
    with torch.no_grad():
        for parameter in mine.model.parameters():
            parameter.zero_()
    resume(mine, saved_as(theirs), form, tmp_path)
    states.check_resumed(mine, theirs)


@pytest.mark.parametrize("groups", [1, 2])
def test_factored_states_of_numbered_parameters_are_matched_by_order(groups, tmp_path):
    def made(steps: int, groups: int) -> TrainState:
        params = [*(model := nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).parameters()]
        split = [{"params": params[i::groups]} for i in range(groups)]
        return states.trained(model, torch.optim.Adafactor, steps=steps, params=split)

    theirs, mine = made(1, 1), made(0, groups)
    resume(mine, _whole(theirs), "torch", tmp_path)
    states.check_resumed(mine, theirs)


def test_steps_that_torch_kept_as_numbers_are_restored_as_tensors(tmp_path):
    theirs, mine = (states.trained(nn.Linear(3, 2), steps=steps) for steps in (5, 0))
    saved = _whole(theirs)
    kept = saved["optimizer"]["state"]
    saved["optimizer"]["state"] = {at: {**kept[at], "step": int(kept[at]["step"])} for at in kept}  # before torch 1.12
    resume(mine, saved, "torch", tmp_path)
    states.check_resumed(mine, theirs)


def load_sharded(url: str, run: str) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = TrainState(model=model, optimizer=Nested(model.parameters()))
    return states.refusal(lambda: states.load(run, state, url))


def test_states_that_are_lists_of_tensors_are_refused_for_sharded_parameters(ranks, tmp_path):
    source = save(_whole(states.trained(nn.Linear(4, 4), Nested)), "torch", tmp_path)
    for answer in ranks.run(load_sharded, 2, source, f"{tmp_path}/run"):
        assert "the optimizer's state 'GG' of weight is a list or dict of tensors" in answer


# --- several schedulers and optimizers


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
@TORCH_OR_RESHARDED
def test_several_schedulers_are_matched_by_their_names(form, key, live, tmp_path):
    theirs, mine = _with_schedulers({"dis": 2, "gen": 5}), _with_schedulers({})
    mine.scheduler = {name: mine.scheduler[name] for name in live}
    saved = {key.format(name): theirs.scheduler[name].state_dict() for name in ("dis", "gen")}
    resume(mine, {"model": theirs.model.state_dict(), **saved}, form, tmp_path, optimizer="skip")
    assert {name: scheduler.last_epoch for name, scheduler in mine.scheduler.items()} == {"dis": 2, "gen": 5}


def test_numbered_schedulers_are_matched_in_the_order_of_their_numbers(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    mine, saved = plain(scheduler={f"s{i}": LinearLR(optimizer) for i in range(11)}), script()
    for number in ("", *sorted(f"_{i}" for i in range(1, 11))):  # in the order of a listing
        saved[f"scheduler{number}"] = {"last_epoch": int(number[1:] or 0), "_last_lr": [0.5]}
    resume(mine, saved, "torch", tmp_path)
    assert [scheduler.last_epoch for scheduler in mine.scheduler.values()] == list(range(11))


def test_several_schedulers_of_unknown_names_are_left_and_named(tmp_path):
    theirs, mine = _with_schedulers({"dis": 2, "gen": 5}), _with_schedulers({})
    saved = {"muon": theirs.scheduler["gen"].state_dict(), "adamw": theirs.scheduler["dis"].state_dict()}
    report = resume(mine, {"model": theirs.model.state_dict(), **saved}, "torch", tmp_path, optimizer="skip")
    assert all(scheduler.last_epoch == 0 for scheduler in mine.scheduler.values())
    assert "not restored: muon, adamw, because their names do not match gen, dis." in report.notes


def test_an_optimizer_whose_key_contains_two_live_names_is_matched_by_order(tmp_path):
    theirs, mine = _two(0.25), _two(0.5)
    mine.optimizer = dict(zip(("optimizer", "gen"), mine.optimizer.values(), strict=True))
    first, second = (optimizer.state_dict() for optimizer in theirs.optimizer.values())
    saved = {"model": theirs.model.state_dict(), "gen": {"optimizer": first}, "optim2": second}
    resume(mine, saved, "torch", tmp_path)
    assert states.bits(mine.optimizer["optimizer"].state_dict()) == states.bits(first)


@pytest.mark.parametrize("sharded", [False, True])
def test_values_in_rank_files_that_no_rank_or_only_rank_0_gets_are_named(sharded, tmp_path):
    source = tmp_path / "theirs"
    source.mkdir()
    for rank in range(2):
        own = {"exp_avg": torch.full((2, 2), float(rank * sharded))}  # an optimizer that differs is a shard
        optimizer = {"state": {0: own}, "param_groups": [{"params": [0]}]}
        saved = {"model": {"weight": torch.ones(2, 2)}, "optimizer": optimizer, "seen": 100 + rank}
        torch.save(saved, source / f"rank_{rank}.pt")
    state = TrainState(model=nn.Linear(2, 2, bias=False), extra={"seen": 0})
    report = load(state, str(source), tmp_path, optimizer="skip")
    what = "seen of rank_*.pt" if sharded else "other ranks' values of seen"
    assert any(note.startswith(f"not restored: {what}") for note in report.notes)


def test_a_compiled_models_checkpoint_is_resharded_under_the_models_own_names(tmp_path):
    theirs, mine = states.trained(nn.Linear(3, 4), lr=0.125), states.trained(nn.Linear(3, 4), steps=0)
    compiled = {f"_orig_mod.{name}": value for name, value in theirs.model.state_dict().items()}
    resume(mine, {**_whole(theirs), "model": compiled, "step": 3}, "resharded", tmp_path)
    assert mine.optimizer.param_groups[0]["lr"] == 0.125
    states.check_resumed(mine, theirs)
