"""Mismatches are found before anything changes, and skipped parts are reported."""

import copy
import functools
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import CheckpointManager, PerRank, TrainState, open_checkpoint
from ckptkit.catalog.entry import Role
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import states
from tests.checkpoint.states import (
    Kept,
    WithExtraState,
    bits,
    check_misfit,
    check_refused,
    check_round_trip,
    load,
    load_all,
    optimized,
    save,
)
from tests.hostile.records import edit_json, reseal
from tests.ranks import on_ranks

schedulers = optim.lr_scheduler


def net(width: int = 8) -> nn.Module:
    return nn.ModuleDict({"base": nn.Linear(4, width), "lora": nn.Linear(4, width, bias=False)})


def trained(model: nn.Module | None = None, optimizer: Any = None) -> TrainState:
    made = states.trained(model or net(), lambda of: optimizer or optim.AdamW(of, lr=0.1), steps=2)
    made.extra["epoch"] = 3
    return made


def made_by(optimizer: Any, scheduler: Any = None, **options: Any) -> TrainState:
    model = net()
    state = trained(model, optimizer(model.parameters(), lr=0.1, **options))
    state.scheduler = scheduler and scheduler(state.optimizer)
    return state


def grouped(*names: str, scheduler: Any = None, **rates: float) -> TrainState:
    """Return a state whose optimizer has a group for each name, of layers or parameters, with its own learning rate."""
    model = net()
    groups = []
    for name in names:
        parameters = [p for key, p in model.named_parameters() if key.startswith(tuple(name.split()))]
        groups.append({"params": parameters, "lr": rates.get(name, 0.1)})
    optimizer = optim.SGD(groups, momentum=0.9)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler(optimizer) if scheduler else None)


def low(lr: float = 0.1, *, steps: bool = True) -> TrainState:
    """Return a bf16 model with fp32 masters."""
    model = net().to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(optim.AdamW(model.parameters(), lr=lr))
    return trained(model, optimizer) if steps else TrainState(model=model, optimizer=optimizer)


def master(state: TrainState, layer: str) -> torch.Tensor:
    found: torch.Tensor = state.optimizer.state[state.model[layer].weight]["master"]
    return found


@pytest.fixture
def run(tmp_path: Path) -> str:
    torch.manual_seed(0)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, trained(), metrics={"loss": 1.0}, client_state={"note": "x"})
    return manager.url


def weights(run: str) -> nn.Module:
    """Return the model of a run."""
    model = net()
    load(run, TrainState(model=model))
    return model


def test_all_differences_are_listed_at_once_and_nothing_changes(run, caplog):
    model = net(width=6)
    model["new"] = nn.Linear(2, 2)
    model["lora"] = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
    del model["base"].bias
    state = optimized(model, optim.AdamW)
    state.extra = {"epoch": 0, "missing_thing": 1}
    for words in (
        "model: 2 missing in the checkpoint: new.weight, new.bias",
        "model: 1 unexpected: base.bias",
        "model: 1 with a different shape: base.weight ([8, 4] in the checkpoint, expected [6, 4])",
        "model: 1 with a different dtype: lora.weight (float32 in the checkpoint, expected bfloat16)",
        "optimizer: 2 missing in the checkpoint: new.weight, new.bias",
        "optimizer: 1 unexpected: base.bias",
        "extra: 1 missing in the checkpoint: extra.missing_thing",
        "Options of CheckpointManager.load: strict=False loads what matches, include=[...]",
    ):
        check_misfit(run, state, re.escape(words))
    model["many"] = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(9)))
    caplog.set_level("INFO", "ckptkit")
    check_misfit(
        run, state, r"11 missing in the checkpoint: new\.weight, new\.bias, (many\.\d\.weight,? ){3}and 6 more"
    )
    assert "many.8.weight" in caplog.text
    check_misfit(run, state, r"(?s)\A(?!.*strict=False).*a different shape.*load: include=\[", strict=False)
    state.optimizer = None
    check_misfit(run, state, r"include=\[\.\.\.\] names what to load(; convert_dtype=True casts)?\.", optimizer="skip")


def shelved(section: str = "", fault: str = "") -> TrainState:
    """Return the state that was saved, or one whose `section` differs from it in one way."""
    model = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["a"].weight.data.fill_(1.0)
    extra: dict[str, Any] = {"shelf": Kept(torch.ones(2)), "note": 1}
    CHANGES.get(f"{section} {fault}", CHANGES.get(fault, lambda model, extra: None))(model, extra)
    if section == "model":
        return TrainState(model=model, extra=extra)
    state = optimized(model, optim.AdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.extra = extra
    return state


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "missing": lambda model, extra: model.update({"new": nn.Linear(2, 2, bias=False)}),
    "unexpected": lambda model, extra: model.pop("b"),
    "shape": lambda model, extra: model.update({"a": nn.Linear(2, 5, bias=False)}),
    "model dtype": lambda model, extra: model["a"].to(torch.float64),
    "optimizer dtype": lambda model, extra: model["a"].to(torch.bfloat16),
    "extra missing": lambda model, extra: extra.update(more=5),
    "extra unexpected": lambda model, extra: extra.pop("note"),
    "extra shape": lambda model, extra: extra.update(shelf=Kept(torch.zeros(7))),
    "extra dtype": lambda model, extra: extra.update(shelf=Kept(torch.zeros(2, dtype=torch.int64))),
}


TABLE = [  # section, difference, result with strict, result without
    ("model", "missing", "refused", "model.new.weight is reported"),
    ("model", "unexpected", "refused", "model.b.weight is reported"),
    ("model", "shape", "refused", "refused"),
    ("model", "dtype", "refused", "refused"),
    ("optimizer", "missing", "refused", "optimizer.new.weight is reported"),
    ("optimizer", "unexpected", "refused", "optimizer.b.weight is reported"),
    ("optimizer", "shape", "refused", "refused"),
    ("optimizer", "dtype", "as saved", "as saved"),  # fp32 moments of a low-precision parameter stay fp32
    ("extra", "missing", "refused", "extra.extra.more is reported"),
    ("extra", "unexpected", "returned", "returned"),
    ("extra", "shape", "as saved", "as saved"),
    ("extra", "dtype", "as saved", "as saved"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("run"), shelved())


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(("section", "fault", "with_strict", "without"), TABLE, ids=lambda value: str(value)[:12])
def test_every_difference_is_refused_or_reported_as_documented(saved, section, fault, with_strict, without, strict):
    expected = with_strict if strict else without
    state = shelved(section, fault)
    which = {"model": "skip"} if section == "optimizer" else {}
    before = bits(state.model)
    if expected == "refused":
        check_misfit(saved, state, section, strict=strict, **which)
        return
    report = load(saved, state, strict=strict, **which)
    if expected.endswith("is reported"):
        assert expected.removesuffix(" is reported") in [*report.missing, *report.unexpected]
    elif expected == "returned":
        assert report.extra == {"note": 1}
    elif section == "optimizer":
        assert all(s["exp_avg"].dtype == torch.float32 for s in state.optimizer.state.values())
        assert bits(state.model) == before and report.skipped["model"] == 'model="skip"'
    else:
        assert bits(state.extra["shelf"].value) == bits(torch.ones(2))


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["in_place", "atomic"])
def test_an_expanded_view_is_refused_before_anything_changes(tmp_path, options):
    def model(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("first", torch.full((3, 4), value))
        module.register_buffer("wide", torch.full((3, 4), value))
        return module

    run = save(tmp_path / "run", TrainState(model=model(1.0)))
    state = TrainState(model=model(2.0))
    state.model.wide = torch.full((1, 4), 2.0).expand(3, 4)
    check_refused(tmp_path / "refused", state, r"model\.wide is an expanded view.*clone")
    check_misfit(run, state, r"model\.wide is an expanded view.*clone", **options)
    load(run, state, exclude=["wide"], **options)
    assert float(state.model.first.sum()) == 12.0


def test_an_optimizer_that_the_checkpoint_lacks_is_an_error_unless_skipped(tmp_path):
    state = trained()
    root = save(tmp_path, TrainState(model=net(), extra={"epoch": 3}))
    check_misfit(root, state, r"optimizer: 1 missing.*the whole optimizer\n.*what matches, optimizer=\"skip\"")
    before = bits(state.optimizer)
    assert "optimizer" in load(root, state, optimizer="skip").skipped
    assert any("whole optimizer" in key for key in load(root, state, strict=False).missing)
    assert bits(state.optimizer) == before and not state.half_loaded


@pytest.mark.parametrize("include", [["lora.*"], lambda fqn: fqn.startswith("lora")], ids=["glob", "predicate"])
def test_adapters_alone_are_loaded_by_glob_or_predicate(run, include):
    model = net()
    base = model["base"].weight.detach().clone()
    report = load(run, TrainState(model=model), include=include)
    assert torch.equal(model["base"].weight, base)
    assert [key for key in report.loaded if key.startswith("model")] == ["model.lora.weight"]
    assert report.skipped["model.base.weight"] == "not included"


def test_dtypes_are_converted_only_when_asked(run):
    model = net().to(torch.bfloat16)
    check_misfit(run, TrainState(model=model), "convert_dtype=True casts")
    report = load(run, TrainState(model=model), convert_dtype=True)
    assert torch.equal(model["base"].weight, weights(run)["base"].weight.to(torch.bfloat16))
    assert any("cast from float32 to bfloat16" in note for note in report.notes)


def test_settings_follow_the_checkpoint_and_new_ones_keep_their_default(tmp_path):
    source, state = trained(), trained()
    source.optimizer.param_groups[0].update(lr=0.5, dropped_by_a_newer_torch=1)
    del source.optimizer.param_groups[0]["amsgrad"]
    report = load(save(tmp_path, source), state)
    group = state.optimizer.param_groups[0]
    assert (group["lr"], group["amsgrad"]) == (0.5, False)
    assert any("kept amsgrad=False" in note for note in report.notes)
    assert any("added dropped_by_a_newer_torch=1 from the checkpoint" in note for note in report.notes)


def test_groups_are_matched_by_the_names_of_their_parameters(tmp_path):
    source = grouped("base", "lora", base=1.0, lora=2.0)
    trained(source.model, source.optimizer)
    state = grouped("lora", "base")
    load(save(tmp_path, source), state)
    assert rates_of(state) == [2.0, 1.0]
    moments = [s.optimizer.state[s.model["base"].weight]["momentum_buffer"] for s in (source, state)]
    assert torch.equal(*moments)


@pytest.mark.parametrize("names", [("lora", "base"), ("base",)], ids=["other order", "fewer"])
def test_a_scheduler_with_values_per_group_is_refused_if_groups_moved(tmp_path, names):
    rates = {"base": 0.1, "lora": 0.2}
    made = functools.partial(grouped, scheduler=lambda of: schedulers.LambdaLR(of, lambda _: 0.5), **rates)
    root, state = save(tmp_path, made("base", "lora")), made(*names)
    check_misfit(root, state, r"scheduler: .* stores base_lrs.* by the positions of the groups")
    load(root, state, strict=False)
    assert state.scheduler.base_lrs == [rates[name] for name in names]
    load(root, made("base", "lora"))


def test_reordered_groups_accept_a_scheduler_with_equal_values(tmp_path):
    made = functools.partial(grouped, scheduler=lambda of: schedulers.StepLR(of, 2))
    assert load(save(tmp_path, made("base", "lora")), made("lora", "base")).skipped == {}


def test_a_group_that_merges_different_learning_rates_is_refused(tmp_path):
    root = save(tmp_path, grouped("base", "lora", base=1.0, lora=2.0))
    check_misfit(root, made_by(optim.SGD, momentum=0.9), "which differ in lr")


@pytest.mark.parametrize(
    ("saved", "live"),
    [(("base lora",), ("base", "lora")), (("base", "lora"), ("base.weight", "base.bias lora"))],
    ids=["a group was split", "a parameter moved"],
)
def test_settings_that_become_equal_because_the_groups_changed_are_noted(tmp_path, saved, live):
    source, state = grouped(*saved), grouped(*live)
    for made, decays in ((source, (0.01, 0.01)), (state, (0.5, 0.0))):
        for group, decay in zip(made.optimizer.param_groups, decays, strict=False):
            group["weight_decay"] = decay
    (note,) = load(save(tmp_path, source), state).notes
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.01, 0.01]
    assert note.startswith("optimizer groups 0, 1 have parameters of one saved group and get its settings: ")
    assert "settings: weight_decay=0.01 replaces 0.5, 0.0. To keep other values, set them in param_groups" in note


@pytest.mark.parametrize("saved", [("base lora",), ("lora", "base")], ids=["split", "in another order"])
def test_settings_that_were_equal_or_remain_different_are_not_noted(tmp_path, saved):
    live = grouped("base", "lora", base=3.0, lora=3.0 if len(saved) == 1 else 0.1)
    assert load(save(tmp_path, grouped(*saved, lora=2.0)), live).notes == []


def test_groups_that_share_a_tensor_but_were_saved_with_different_values_are_refused(tmp_path):
    """torch puts one tensor into all groups if it is passed as the default."""
    state = grouped("base", "lora")
    for group in state.optimizer.param_groups:
        group["lr"] = state.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    said = r"groups 0 and 1 have one tensor as lr here, but 1.0 and 2.0 in the checkpoint"
    check_misfit(save(tmp_path / "unlike", grouped("base", "lora", base=1.0, lora=2.0)), state, said)
    load(save(tmp_path / "alike", grouped("base", "lora", base=2.0, lora=2.0)), state)
    assert rates_of(state) == [2.0, 2.0]


def with_rate(rate: Any) -> TrainState:
    state = made_by(optim.AdamW)
    state.optimizer.param_groups[0]["lr"] = rate
    return state


@pytest.mark.parametrize(
    ("saved", "live", "shown"),
    [
        (0.3, torch.tensor(1), "0.3"),  # this one and the last run by day
        (torch.tensor([0.1]), torch.tensor([0.2, 0.3]), r"tensor\(\[0.1"),
        (1.5, torch.tensor(True), "1.5"),
        (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.25), r"tensor\(0.1000.*float64\)"),
    ],
    ids=["truncated", "repeated", "a bool", "rounded"],
)
def test_a_setting_that_a_live_tensor_cannot_hold_is_refused(tmp_path, saved, live, shown):
    check_misfit(save(tmp_path, with_rate(saved)), with_rate(live), rf"group 0: lr is {shown}.* in the checkpoint, but")
    load(save(tmp_path / "whole", with_rate(2.0)), with_rate(torch.tensor(1)))


@pytest.mark.parametrize(("saved", "notes"), [(torch.tensor(0.5, dtype=torch.float64), 0), (0.5, 0), (0.1, 1)])
def test_a_learning_rate_stays_the_same_tensor_and_the_report_names_one_that_is_rounded(tmp_path, saved, notes):
    state = with_rate(rate := torch.tensor(0.25))
    report = load(save(tmp_path, with_rate(saved)), state)
    found = [note for note in report.notes if "lr=" in note]
    assert found == ["optimizer group 0: lr=0.1 becomes 0.10000000149011612 in a torch.float32 tensor"] * notes
    assert state.optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.as_tensor(saved, dtype=torch.float32))


def test_large_tensors_in_groups_are_restored(tmp_path, kind):
    def made(value: float) -> TrainState:
        state = made_by(optim.AdamW)
        state.optimizer.param_groups[0].update(scales=torch.full((5000,), value), rows=[torch.full((5000,), -value)])
        return state

    check_round_trip(tmp_path, made(2.0), made(1.0), kind)
    if kind == "sharded":
        found = {"optimizer": {"param_groups": [{"scales": torch.zeros(5000), "rows": [torch.zeros(5000)]}]}}
        dcp.load(found, checkpoint_id=tmp_path / "step_00000001", no_dist=True)
        assert found["optimizer"]["param_groups"][0]["scales"].unique().tolist() == [2.0]
        assert found["optimizer"]["param_groups"][0]["rows"][0].unique().tolist() == [-2.0]


def test_empty_state_and_empty_groups_survive(tmp_path):
    source, state = TrainState(model=net(), extra={"epoch": 3}), trained()
    source.optimizer = optim.AdamW(source.model.parameters(), lr=0.1)
    for each in (source, state):
        each.optimizer.param_groups.append({**each.optimizer.param_groups[0], "params": []})
    source.optimizer.param_groups[1]["lr"] = 9.0
    load(save(tmp_path, source), state)
    assert len(state.optimizer.state) == 0  # saved before the first step, so the load removes our state
    assert state.optimizer.param_groups[1]["lr"] == 9.0


def with_empty_groups(*rates: float) -> TrainState:
    state = made_by(optim.SGD, momentum=0.9)
    for rate in rates:
        state.optimizer.add_param_group({"params": [], "lr": rate})
    return state


def rates_of(state: TrainState) -> list[float]:
    return [group["lr"] for group in state.optimizer.param_groups]


@pytest.mark.parametrize(
    ("saved", "live", "said", "after"),
    [
        ((2.0, 3.0), (5.0,), "unexpected: group 2 without parameters: lr=3.0", [2.0, 0.1]),
        ((2.0,), (5.0, 6.0), "missing in the checkpoint: group 0 without parameters", [6.0, 2.0, 0.1]),
    ],
    ids=["fewer", "more"],
)
def test_a_group_without_parameters_is_found_at_another_position_and_listed_if_one_side_lacks_it(
    tmp_path, saved, live, said, after
):
    root, state = save(tmp_path, with_empty_groups(*saved)), with_empty_groups(*live)
    state.optimizer.param_groups.reverse()
    check_misfit(root, state, f"optimizer: 1 {said}")
    report = load(root, state, strict=False)
    assert report.missing + report.unexpected == [f"optimizer.{said.partition(': ')[2]}"]
    assert rates_of(state) == after


def test_masters_of_weights_that_are_not_loaded_stay_unchanged(run):
    state = low()
    before = master(state, "lora").clone()
    load(run, state, include=["base.*"], optimizer="skip", convert_dtype=True)
    assert torch.equal(master(state, "lora"), before)
    assert torch.equal(master(state, "base"), state.model["base"].weight.float())


def test_masters_come_from_fp32_weights_of_a_checkpoint_without_masters(run):
    state = low(steps=False)
    load(run, state, convert_dtype=True)
    assert torch.equal(master(state, "base"), weights(run)["base"].weight)


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["in_place", "atomic"])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_weights_that_need_a_cast_come_from_the_masters(tmp_path, kind, options, with_optimizer):
    source = low(1e-3, steps=False)
    if kind != "sharded":  # SHARDED stores a tied weight under each name, without recording the tie
        source.model["lora"].weight = source.model["base"].weight
        source.optimizer = MasterWeightOptimizer(optim.AdamW(source.model.parameters(), lr=1e-3))
    trained(source.model, source.optimizer)
    root = save(tmp_path, source, state_dict_type=kind)
    masters = {name: source.optimizer.state[p]["master"] for name, p in source.model.named_parameters()}
    for dtype in (torch.float32, torch.float16, torch.float64):
        model = net().to(dtype)
        optimizer: Any = optim.AdamW(model.parameters())
        if dtype is torch.float16:
            optimizer = MasterWeightOptimizer(optimizer)
        state = TrainState(model=model, optimizer=optimizer if with_optimizer else None)
        report = load(root, state, convert_dtype=dtype is not torch.float32, strict=not with_optimizer, **options)
        assert any("fp32 masters" in note for note in report.notes)
        assert torch.equal(model["lora"].weight, masters.get("lora.weight", masters["base.weight"]).to(dtype))
        for name, parameter in model["base"].named_parameters(prefix="base"):
            assert torch.equal(parameter, masters[name].to(dtype))
            if with_optimizer:
                mine, theirs = optimizer.state[parameter], source.optimizer.state[source.model.get_parameter(name)]
                assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
                assert torch.equal(mine.get("master", theirs["master"]), theirs["master"])
        if with_optimizer and dtype is torch.float16:
            assert optimizer.follow_weights() == 0


def test_masters_are_refused_by_a_bf16_optimizer_without_any(tmp_path):
    state = optimized(net().to(torch.bfloat16), optim.AdamW)
    check_misfit(save(tmp_path, low()), state, r"unexpected: master\.base\.weight")


def test_a_deferred_optimizer_of_an_fp32_model_leaves_out_the_masters(tmp_path):
    source, state = low(), optimized(net(), optim.AdamW)
    with CheckpointManager(save(tmp_path, source)) as manager:
        report = manager.load(state, optimizer="deferred")
        assert torch.equal(state.model["base"].weight, master(source, "base"))
        later = report.deferred.apply()
    assert any("3 fp32 masters were skipped" in note for note in later.notes)
    assert "exp_avg" in state.optimizer.state[state.model["base"].weight]


# --- what a model saves besides its tensors


def counted(kept: Any) -> TrainState:
    module = nn.Sequential(WithExtraState(2, 2))
    module[0].kept = kept
    return TrainState(model=module)


def test_large_tensors_of_module_extra_state_are_restored_and_are_no_weights(tmp_path, kind):
    source = counted({"history": torch.randn(600), "table": torch.arange(3)})
    live = counted({"history": torch.zeros(600), "table": torch.zeros(3)})
    check_round_trip(tmp_path, source, live, kind)
    assert set(open_checkpoint(f"{tmp_path}/step_00000001").catalog.by_role(Role.MODEL)) == {"0.weight", "0.bias"}


def test_extra_state_that_one_side_lacks_is_listed_before_anything_changes(tmp_path):
    plain, live = TrainState(model=nn.Sequential(nn.Linear(2, 2))), counted(8)
    root = save(tmp_path / "counted", counted(7))
    check_misfit(root, plain, r"model\.extra_state: 1 unexpected: 0\._extra_state")
    assert load(root, plain, strict=False).unexpected == ["model.extra_state.0._extra_state"]
    root = save(tmp_path / "plain", plain)
    check_misfit(root, live, r"model\.extra_state: 1 missing.*: 0\._extra_state")
    assert load(root, live, strict=False).missing == ["model.extra_state.0._extra_state"]
    assert live.model[0].kept == 8


def test_extra_state_that_torch_saved_is_reported_as_unchanged(tmp_path):
    dcp.save({"model": counted({"n": 7}).model.state_dict()}, checkpoint_id=tmp_path / "torch", no_dist=True)
    live = counted({"n": 8})
    report = load(tmp_path / "run", live, str(tmp_path / "torch"))
    assert live.model[0].kept == {"n": 8}
    assert "are left unchanged" in report.skipped["model.extra_state"]


def test_a_parameter_whose_name_ends_with_extra_state_is_a_parameter(tmp_path, kind):
    def state(lr: float) -> TrainState:
        return optimized(nn.ParameterDict({"my_extra_state": torch.randn(3)}), lr=lr)

    check_round_trip(tmp_path, state(0.1), state(0.2), kind)


def test_a_state_of_an_optimizer_may_have_dots_in_its_name(tmp_path, kind):
    source = trained()
    for number, state in enumerate(source.optimizer.state.values()):
        state["factors.0.left"] = torch.full((2, 3), float(number))
    check_round_trip(tmp_path, source, trained(), kind)


def test_optimizer_state_of_a_parameter_in_no_saved_group_is_listed(tmp_path):
    step = Path(save(tmp_path, trained()), "step_00000001")

    def forget(body: dict[str, Any]) -> None:
        body["objects"]["optimizer"]["param_groups"][0]["params"].remove("lora.weight")

    edit_json(step / "objects.json", forget)
    reseal(step)
    state = trained()
    state.optimizer = optim.AdamW(state.model["base"].parameters(), lr=0.1)
    check_misfit(tmp_path, state, r"3 unexpected: lora\.weight\.(step|exp_avg)")


@pytest.mark.parametrize(
    "rule",
    [{"include": ["nosuch*"]}, {"include": lambda _: False}, {"exclude": "nosuch*"}, {"include": ["weight", "wight"]}],
)
def test_a_filter_that_matches_nothing_is_refused_by_name_or_noted(tmp_path, rule):
    state = TrainState(model=nn.Linear(2, 2))
    run = save(tmp_path, state)
    check_misfit(run, state, r"(include|exclude)='(nosuch\*|<lambda>|wight)' matches no tensor", **rule)
    assert any("matches no tensor" in note for note in load(run, state, strict=False, **rule).notes)


def test_an_error_names_a_saved_model_without_a_live_one(tmp_path):
    root = save(tmp_path, TrainState(model={"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}))
    report = load(root, TrainState(model={"actor": nn.Linear(2, 2)}))
    assert report.skipped == {"model_critic": "not in the training state"}


# --- another class or setting


@pytest.mark.parametrize(
    ("was", "now"), [(optim.AdamW, optim.SGD), (optim.SGD, optim.AdamW), (optim.Adam, optim.AdamW)]
)
@pytest.mark.parametrize("masters", [False, True])
def test_an_optimizer_of_another_class_does_not_fit(tmp_path, was, now, masters):
    root, state = save(tmp_path, made_by(was)), made_by(now)
    if masters:
        state.optimizer = MasterWeightOptimizer(state.optimizer)
    check_misfit(root, state, rf"whole optimizer \(saved from {was.__name__}, here it is {now.__name__}\)")
    before = bits(state.optimizer)
    assert any(was.__name__ in text for text in load(root, state, strict=False).missing)
    assert bits(state.optimizer) == before
    trained(state.model, state.optimizer)


@pytest.mark.parametrize("was", [False, True])
def test_a_changed_optimizer_option_does_not_fit(tmp_path, was):
    root = save(tmp_path, made_by(optim.AdamW, amsgrad=was))
    state = made_by(optim.AdamW, amsgrad=not was)
    check_misfit(root, state, rf"amsgrad={was} of group 0 \(here it is {not was}\)")
    assert any("amsgrad" in text for text in load(root, state, strict=False).unexpected)
    assert state.optimizer.param_groups[0]["amsgrad"] is was
    trained(state.model, state.optimizer)


@pytest.mark.parametrize("saved", [True, False])
def test_the_mode_of_a_schedule_free_optimizer_is_restored(tmp_path, saved):
    def made(mode: bool) -> TrainState:
        state = made_by(optim.SGD)
        state.optimizer.param_groups[0]["train_mode"] = mode
        return state

    state = made(not saved)
    report = load(save(tmp_path, made(saved)), state)
    assert state.optimizer.param_groups[0]["train_mode"] is saved
    assert any(f"restored train_mode={saved}" in note for note in report.notes)


def test_a_scheduler_of_another_class_does_not_fit(tmp_path):
    def joined(second: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda of: schedulers.SequentialLR(of, [schedulers.ConstantLR(of), second(of)], [2])

    made = {
        "StepLR": (step_lr := functools.partial(schedulers.StepLR, step_size=3)),
        "ExponentialLR": (exponential := functools.partial(schedulers.ExponentialLR, gamma=0.5)),
        r"SequentialLR\(ConstantLR, ExponentialLR\)": joined(exponential),
        r"SequentialLR\(ConstantLR, StepLR\)": joined(step_lr),
    }
    for was, make_saved in made.items():
        root = save(tmp_path / was, made_by(optim.SGD, make_saved))
        for now, make_live in made.items():
            state = made_by(optim.SGD, make_live)
            before = bits(state.scheduler)
            if was == now:
                load(root, state)
                continue
            check_misfit(root, state, f"saved from {was}, here it is {now}")
            assert load(root, state, strict=False).missing and bits(state.scheduler) == before


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["in_place", "atomic"])
@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.Adafactor, functools.partial(optim.SGD, momentum=0.9)])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_cast_model_is_trained_further_with_states_of_its_dtype(tmp_path, dtypes, optimizer, options):
    source, state = (trained(model, optimizer(model.parameters())) for model in (net().to(one) for one in dtypes))
    for live in (
        state,
        TrainState(model=state.model, optimizer=optimizer(state.model.parameters()), extra={"epoch": 0}),
    ):
        load(save(tmp_path / str(id(live)), source), live, convert_dtype=True, **options)
        pairs = zip(live.model.parameters(), source.model.parameters(), strict=True)
        for mine, theirs in pairs:
            found, saved = live.optimizer.state[mine], source.optimizer.state[theirs]
            assert found.keys() == saved.keys()
            cast = {name: value if name == "step" else value.to(dtypes[1]) for name, value in saved.items()}
            assert bits(dict(found)) == bits(cast)
        trained(live.model, live.optimizer)


def moments(state: TrainState, dtype: torch.dtype | None = None, layers: Any = ("base", "lora")) -> Any:
    """Return what the optimizer keeps of the parameters of these layers, perhaps cast."""
    kept = [state.optimizer.state[parameter] for layer in layers for parameter in state.model[layer].parameters()]
    return [bits({name: one[name].to(dtype) for name in ("exp_avg", "exp_avg_sq")}) for one in kept]


class Fp32Moments(optim.AdamW):
    """Stands for an optimizer that keeps fp32 moments of bf16 weights, and no masters."""


@pytest.mark.parametrize(
    ("masters", "make", "live", "casts", "dtype"),
    [
        (False, optim.AdamW, "masters", False, torch.float32),
        (True, optim.AdamW, "bf16", True, torch.bfloat16),
        (True, Fp32Moments, "bf16", True, torch.float32),
        (True, optim.AdamW, "fp32", True, torch.float32),  # states of another dtype than their weight are not cast
    ],
    ids=["into masters", "without masters", "without masters, fp32 moments", "into fp32 weights"],
)
def test_moments_of_bf16_weights_have_the_dtype_that_the_live_optimizer_needs(
    tmp_path, masters, make, live, casts, dtype
):
    source, model = net().bfloat16(), net() if live == "fp32" else net().bfloat16()
    wrap: Any = MasterWeightOptimizer if masters else lambda of: of
    source = trained(source, wrap(make(source.parameters(), lr=1e-3)))
    state = optimized(model, make)
    if live == "masters":
        state.optimizer = MasterWeightOptimizer(state.optimizer)
    run = save(tmp_path, source)
    if dtype is torch.bfloat16:
        said = r"with a different dtype: base\.weight\.exp_avg \(float32 (?s:.*)convert_dtype"
        check_misfit(run, state, said, strict=False)
    load(run, state, strict=False, convert_dtype=casts)
    assert moments(state) == moments(source, dtype)
    if make is optim.AdamW:  # torch's step fails with fp32 moments of bf16 weights
        trained(state.model, state.optimizer)


def test_filters_also_select_extra_states(tmp_path):
    def state(count: int) -> TrainState:
        model = nn.ModuleDict({name: WithExtraState(2, 2) for name in ("base", "lora")} | {"up": nn.Linear(2, 2)})
        model["base"].kept = model["lora"].kept = count
        return TrainState(model=model, rng=False)

    root = save(tmp_path, state(7))
    for options, expected in (({"exclude": ["up.*"]}, (7, 7)), ({"include": ["base.*"]}, (7, 1))):
        live = state(1)
        report = load(root, live, **options)
        assert (live.model["base"].kept, live.model["lora"].kept) == expected
        left = [name for name in report.skipped if name.startswith("model.extra_state.")]
        assert left == ["model.extra_state.lora._extra_state"] * (expected != (7, 7))


@on_ranks(2)
def test_small_tensors_in_extra_get_the_placement_of_the_live_ones(tmp_path):
    torch.manual_seed(0)
    plain, sharded = net(), net()
    root = save(tmp_path, TrainState(model=net(), extra={"ema": plain, "list": Kept([torch.arange(5.0)])}))
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.values():
        fully_shard(layer, mesh=mesh)
    kept = Kept([distribute_tensor(torch.zeros(5), mesh, [Shard(0)])])
    load(root, TrainState(model=net(), extra={"ema": sharded, "list": kept}))
    for name, tensor in sharded.state_dict().items():
        assert torch.equal(tensor.full_tensor(), plain.state_dict()[name])
    assert torch.equal(kept.value[0].full_tensor(), torch.arange(5.0))


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_model_in_extra_is_compared_before_anything_changes(tmp_path, per_rank):
    def state(ema: Any) -> TrainState:
        return TrainState(model=net(), extra={"ema": PerRank(ema) if per_rank else ema})

    saved = net()
    root = save(tmp_path, state(saved))
    low, other = net().bfloat16(), net()
    other["new"] = nn.Linear(2, 2)
    check_misfit(root, state(low), r"extra\.ema: 3 with a different dtype")
    check_misfit(root, state(net(16)), r"extra\.ema: 3 with a different shape")
    check_misfit(root, state(other), r"extra\.ema: 2 missing in the checkpoint: new")
    load(root, state(low), convert_dtype=True)
    assert bits(low) == bits(copy.deepcopy(saved).bfloat16())
    assert "extra.ema.new.weight" in load(root, state(other), strict=False).missing
    assert torch.equal(other["base"].weight, saved["base"].weight)


@pytest.mark.parametrize("kind", ["sharded", "full"])
@on_ranks(2, 3)
def test_parameters_in_extra_remain_parameters_on_any_number_of_ranks(tmp_path, kind):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(value: float) -> TrainState:
        spread = nn.Parameter(distribute_tensor(torch.full((6, 4), value), mesh, [Shard(0)]))
        frozen = nn.Parameter(torch.full((600, 2), value).T, requires_grad=False)
        extra = {"scale": nn.Parameter(torch.tensor(value)), "ema": {"spread": spread}, "list": [spread, frozen]}
        return TrainState(model=nn.Linear(2, 2), extra=extra, rng=False)

    torch.manual_seed(0)
    source = made(1.0)
    torch.manual_seed(0)
    live = made(2.0)
    if mesh.size() == 2:
        save(tmp_path, source, state_dict_type=kind)
    load_all(tmp_path, live)
    assert bits(live) == bits(source)
    found = [live.extra["scale"], live.extra["ema"]["spread"], *live.extra["list"]]
    assert all(isinstance(item, nn.Parameter) for item in found)
    assert [item.requires_grad for item in found] == [True, True, True, False]


def test_a_column_major_weight_of_a_model_in_extra_is_restored(tmp_path, kind):
    def made() -> TrainState:
        ema = nn.Linear(30, 20)
        ema.weight = nn.Parameter(torch.randn(30, 20).T)
        return TrainState(extra={"ema": ema}, rng=False)

    check_round_trip(tmp_path, made(), made(), kind)


def test_the_state_of_a_disabled_scaler_does_not_fit_an_enabled_one(tmp_path):
    def state(enabled: bool) -> TrainState:
        return TrainState(model=net(), grad_scaler=torch.amp.GradScaler("cpu", enabled=enabled))

    source, live = state(False), state(True)
    root = save(tmp_path / "disabled", source)
    check_misfit(root, live, "the saved scaler was disabled, this one is enabled")
    assert load(root, live, strict=False).missing
    assert bits(live.model) == bits(source.model)
    root = save(tmp_path / "enabled", state(True))
    assert load(root, state(False)).skipped == {"grad_scaler": "disabled in this job"}


# --- a deferred optimizer


@pytest.fixture
def manager(run: str) -> Iterator[CheckpointManager]:
    with CheckpointManager(run) as made:
        yield made


def test_a_deferred_optimizer_applies_once_to_a_changed_model(manager):
    source, state = trained(), optimized(net(), optim.AdamW)
    manager.load(source)
    handle = manager.load(state, optimizer="deferred").deferred
    assert bits(state.model) == bits(source.model)
    assert len(state.optimizer.state) == 0
    state.optimizer = None
    with pytest.raises(UsageError, match="no optimizer"):
        handle.apply()
    state.model["new"] = nn.Linear(4, 4, bias=False)
    state.optimizer = optim.AdamW(state.model.parameters(), lr=0.1)
    state.model["base"].weight.data.add_(1)  # the model is not loaded again
    moved = bits(state.model)
    with pytest.raises(CheckpointMismatchError, match=r"new\.weight"):
        handle.apply()
    assert handle.pending
    report = handle.apply(strict=False)
    assert report.missing == ["optimizer.new.weight"]
    assert bits(state.model) == moved
    assert moments(state, layers=("base", "lora")) == moments(source)
    assert state.model["new"].weight not in state.optimizer.state
    assert handle.apply() is None
    assert not handle.pending


def test_applying_a_deferred_optimizer_frees_its_memory(manager):
    state = optimized(net(), optim.AdamW)
    handle = manager.load(state, optimizer="deferred").deferred
    handle.apply()
    model = weakref.ref(state.model["base"])
    del state
    gc.collect()
    assert model() is None
