"""Mismatches are found before anything changes, and skipped parts are reported."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn

from ckptkit import open_checkpoint
from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.load.plan import of_another_class
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointMismatchError, CkptkitError, IntegrityError, LoadError, SaveError, UsageError
from ckptkit.fsdp.master_weights import MasterWeightOptimizer
from tests.hostile.records import reseal


def net(width: int = 8) -> nn.Module:
    return nn.ModuleDict({"base": nn.Linear(4, width), "lora": nn.Linear(4, width, bias=False)})


def trained(model: nn.Module, optimizer: Any = None) -> TrainState:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(3, 4, dtype=model["base"].weight.dtype)
        (model["base"](x) + model["lora"](x)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainState(model=model, optimizer=optimizer, extra={"epoch": 3})


def bits(state: TrainState) -> Any:
    """Return a copy of all tensors and settings of a state."""
    optimizer = state.optimizer
    return copy.deepcopy((dict(state.model.state_dict()), optimizer.state_dict() if optimizer else None, state.extra))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture
def run(tmp_path: Path) -> str:
    torch.manual_seed(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, trained(net()), metrics={"loss": 1.0}, client_state={"note": "x"})
    return str(tmp_path)


def load(run: str, state: TrainState, which: str = "latest", **options: Any) -> Any:
    with CheckpointManager(run) as manager:
        return manager.load(state, which, **options)


def saved_as(tmp_path: Path, state: TrainState, **options: Any) -> str:
    with CheckpointManager(tmp_path / "other", **options) as manager:
        manager.save(1, state)
    return str(tmp_path / "other")


def test_a_matching_state_is_restored_completely(run: str) -> None:
    state = trained(net())
    report = load(run, state)
    assert (report.step, state.step, state.extra["epoch"]) == (5, 5, 3)
    assert report.metrics == {"loss": 1.0}
    assert report.client_state == {"note": "x"}
    assert not (report.missing or report.unexpected or report.skipped)


def test_all_differences_are_listed_at_once_and_nothing_changes(run: str) -> None:
    model = net(width=6)
    model["new"] = nn.Linear(2, 2)
    model["lora"] = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
    del model["base"].bias
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer, extra={"epoch": 0, "missing_thing": 1})
    before = bits(state)
    with pytest.raises(CheckpointMismatchError) as caught:
        load(run, state)
    text = str(caught.value)
    for words in (
        "model: 2 missing in the checkpoint: new.weight, new.bias",
        "model: 1 unexpected: base.bias",
        "model: 1 with another shape: base.weight ([8, 4] in the checkpoint, expected [6, 4])",
        "model: 1 with another dtype: lora.weight (float32 in the checkpoint, expected bfloat16)",
        "optimizer: 2 missing in the checkpoint: new.weight, new.bias",
        "optimizer: 1 unexpected: base.bias",
        "extra: 1 missing in the checkpoint: extra.missing_thing",
    ):
        assert words in text, (words, text)
    assert same(before, bits(state))


def test_without_strict_matching_tensors_load_and_the_rest_is_reported(run: str) -> None:
    model = net()
    model["new"] = nn.Linear(2, 2)
    del model["base"].bias
    state = TrainState(model=model, extra={"epoch": 0})
    report = load(run, state, strict=False)
    assert report.missing == ["model.new.weight", "model.new.bias"]
    assert report.unexpected == ["model.base.bias"]
    assert "model.lora.weight" in report.loaded


def test_a_wrong_shape_is_an_error_even_without_strict(run: str) -> None:
    with pytest.raises(CheckpointMismatchError, match="another shape"):
        load(run, TrainState(model=net(width=9)), strict=False)


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["in_place", "atomic"])
def test_an_expanded_view_is_refused_before_anything_changes(tmp_path: Path, options: dict[str, Any]) -> None:
    def model(value: float) -> nn.Module:
        module = nn.Module()
        module.register_buffer("first", torch.full((3, 4), value))
        module.register_buffer("wide", torch.full((3, 4), value))
        return module

    run = saved_as(tmp_path, TrainState(model=model(1.0)))
    state = TrainState(model=model(2.0))
    state.model.wide = torch.full((1, 4), 2.0).expand(3, 4)  # type: ignore[union-attr]
    with pytest.raises(SaveError, match=r"model\.wide is an expanded view.*clone"):
        saved_as(tmp_path / "refused", state)
    assert not (tmp_path / "refused" / "other" / "step_00000001").exists()
    before = bits(state)
    with pytest.raises(CheckpointMismatchError, match=r"model\.wide is an expanded view.*clone"):
        load(run, state, **options)
    assert same(bits(state), before)
    assert not state.half_loaded
    load(run, state, exclude=["wide"], **options)
    assert float(state.model.first.sum()) == 12.0  # type: ignore[union-attr, operator]


def test_a_model_alone_loads_and_the_rest_is_reported_as_skipped(run: str) -> None:
    report = load(run, TrainState(model=net()))
    assert report.skipped["optimizer"] == "not in the training state"
    assert report.extra == {"epoch": 3}


def test_an_optimizer_that_the_checkpoint_lacks_is_an_error_unless_skipped(tmp_path: Path) -> None:
    other = saved_as(tmp_path, TrainState(model=net()))
    state = trained(net())
    state.extra.clear()
    before = bits(state)
    with pytest.raises(CheckpointMismatchError, match="optimizer: 1 missing"):
        load(other, state)
    assert same(before, bits(state))
    report = load(other, state, optimizer="skip")
    assert "optimizer" in report.skipped
    assert same(before[1], bits(state)[1])


def test_adapters_alone_are_loaded_by_glob_or_predicate(run: str) -> None:
    for include in (["lora.*"], lambda fqn: fqn.startswith("lora")):
        model = net()
        base = model["base"].weight.detach().clone()
        report = load(run, TrainState(model=model), include=include)
        assert torch.equal(model["base"].weight, base)
        assert [key for key in report.loaded if key.startswith("model")] == ["model.lora.weight"]
        assert report.skipped["model.base.weight"] == "not included"


def test_dtypes_are_converted_only_when_asked(run: str) -> None:
    model = net().to(torch.bfloat16)
    with pytest.raises(CheckpointMismatchError, match="convert_dtype=True casts"):
        load(run, TrainState(model=model))
    report = load(run, TrainState(model=model), convert_dtype=True)
    exact = net()
    load(run, TrainState(model=exact))
    assert torch.equal(model["base"].weight, exact["base"].weight.to(torch.bfloat16))
    assert any("cast from float32 to bfloat16" in note for note in report.notes)


def test_extra_values_without_a_receiver_are_returned(run: str) -> None:
    state = trained(net())
    state.extra.clear()
    assert load(run, state).extra == {"epoch": 3}


def test_an_unknown_option_is_a_usage_error(run: str) -> None:
    with pytest.raises(UsageError, match="no option 'stict'"):
        load(run, trained(net()), stict=False)


def damage(run: str, change: Callable[[bytearray], None]) -> None:
    """Change the data of the checkpoint, but not its record."""
    (path,) = Path(run, "step_00000005").glob("*.distcp")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_damage_found_while_reading_leaves_model_and_optimizer_untouched(run: str) -> None:
    state = trained(net())
    before = bits(state)
    needle = load_bytes(run, "optimizer.state.lora.weight.exp_avg_sq")
    damage(run, lambda data: data.__setitem__(data.index(needle) + 3, data[data.index(needle) + 3] ^ 1))
    with pytest.raises(IntegrityError, match=r"exp_avg_sq"):
        load(run, state, atomic=True)
    assert same(before, bits(state))
    assert state.step == 0


def load_bytes(run: str, key: str) -> bytes:
    from ckptkit.checkpoint.load.mapping import open_checkpoint

    return bytes(open_checkpoint(run)[key].numpy().tobytes())


def test_a_user_object_that_refuses_its_state_leaves_the_tensors_untouched(tmp_path: Path) -> None:
    class Picky:
        def __init__(self, refuse: bool) -> None:
            self.refuse = refuse

        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.refuse:
                raise ValueError("not this one")

    source = trained(net())
    source.extra = {"picky": Picky(False)}
    other = saved_as(tmp_path, source)
    state = trained(net())
    state.extra = {"picky": Picky(True)}
    before = bits(state)[:2]
    with pytest.raises((CkptkitError, ValueError), match="not this one"):
        load(other, state, atomic=True)
    assert same(before, bits(state)[:2])


def test_settings_follow_the_checkpoint_and_new_ones_keep_their_default(tmp_path: Path) -> None:
    source = trained(net())
    source.optimizer.param_groups[0].update(lr=0.5, dropped_by_a_newer_torch=1)
    del source.optimizer.param_groups[0]["amsgrad"]
    other = saved_as(tmp_path, source)
    state = trained(net())
    report = load(other, state)
    group = state.optimizer.param_groups[0]
    assert group["lr"] == 0.5
    assert group["amsgrad"] is False
    assert any("kept amsgrad=False" in note for note in report.notes)
    assert any("added dropped_by_a_newer_torch=1 from the checkpoint" in note for note in report.notes)


def test_groups_are_matched_by_the_names_of_their_parameters(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": model["base"].parameters(), "lr": 1.0},
                                 {"params": model["lora"].parameters(), "lr": 2.0}], lr=0.1, momentum=0.9)  # fmt: skip
    other = saved_as(tmp_path, trained(model, optimizer))
    again = net()
    swapped = torch.optim.SGD([{"params": again["lora"].parameters()}, {"params": again["base"].parameters()}], lr=0.1,
                              momentum=0.9)  # fmt: skip
    load(other, TrainState(model=again, optimizer=swapped, extra={"epoch": 0}))
    assert [group["lr"] for group in swapped.param_groups] == [2.0, 1.0]
    moment = optimizer.state[model["base"].weight]["momentum_buffer"]
    assert torch.equal(swapped.state[again["base"].weight]["momentum_buffer"], moment)


@pytest.mark.parametrize("names", [("lora", "base"), ("base",)], ids=["other order", "fewer"])
def test_a_scheduler_with_values_per_group_is_refused_if_groups_moved(tmp_path: Path, names: tuple[str, ...]) -> None:
    rates = {"base": 0.1, "lora": 0.2}

    def made(*names: str) -> TrainState:
        model = net()
        groups = [{"params": list(model[name].parameters()), "lr": rates[name]} for name in names]
        optimizer = torch.optim.SGD(groups)
        return TrainState(
            model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        )

    root = saved_as(tmp_path, made("base", "lora"))
    state = made(*names)
    with pytest.raises(
        CheckpointMismatchError, match=r"scheduler: .* it stores base_lrs.* by the positions of the groups"
    ):
        load(root, state)
    load(root, state, strict=False)
    assert state.scheduler.base_lrs == [rates[name] for name in names]
    load(root, made("base", "lora"))


def test_reordered_groups_accept_a_scheduler_with_equal_values(tmp_path: Path) -> None:
    def made(*names: str) -> TrainState:
        model = net()
        optimizer = torch.optim.SGD([{"params": list(model[name].parameters())} for name in names], lr=0.1)
        return TrainState(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))

    root = saved_as(tmp_path, made("base", "lora"))
    assert load(root, made("lora", "base")).skipped == {}


def test_a_group_that_merges_different_learning_rates_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD([{"params": model["base"].parameters(), "lr": 1.0},
                                 {"params": model["lora"].parameters(), "lr": 2.0}], lr=0.1)  # fmt: skip
    other = saved_as(tmp_path, trained(model, optimizer))
    state = trained(net(), None)
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatchError, match="which differ in lr"):
        load(other, state)


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    def with_tensor(lr: float) -> TrainState:
        model = net()
        return trained(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr)))

    other = saved_as(tmp_path, with_tensor(0.5))
    state = with_tensor(0.25)
    rate = state.optimizer.param_groups[0]["lr"]
    load(other, state)
    assert state.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_empty_state_and_empty_groups_survive(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [], "lr": 9.0})
    other = saved_as(tmp_path, TrainState(model=model, optimizer=optimizer))
    state = trained(net())
    state.extra.clear()
    state.optimizer.param_groups.append({**state.optimizer.param_groups[0], "params": []})
    load(other, state)
    assert len(state.optimizer.state) == 0  # saved before the first step, so the load removes our state
    assert state.optimizer.param_groups[1]["lr"] == 9.0


def test_state_that_low_precision_parameters_keep_in_fp32_stays_fp32(tmp_path: Path) -> None:
    def state_of() -> TrainState:
        model = net().to(torch.bfloat16)
        return trained(model, MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1)))

    source = state_of()
    other = saved_as(tmp_path, source)
    state = state_of()
    load(other, state)
    mine, theirs = (s.optimizer.state[s.model["base"].weight] for s in (state, source))
    assert set(mine) == {"master", "step", "exp_avg", "exp_avg_sq"}
    for name in mine:
        assert mine[name].dtype == torch.float32
        assert torch.equal(mine[name], theirs[name])
    assert torch.equal(state.model["base"].weight, mine["master"].to(torch.bfloat16))


def test_masters_follow_weights_that_are_loaded_without_an_optimizer(run: str) -> None:
    model = net().to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters()))
    state = TrainState(model=model, optimizer=optimizer)
    load(run, state, optimizer="skip", convert_dtype=True)
    master = optimizer.state[model["base"].weight]["master"]
    assert torch.equal(master, model["base"].weight.float())


def test_masters_of_weights_that_are_not_loaded_stay_unchanged(run: str) -> None:
    model = net().to(torch.bfloat16)
    state = trained(model, MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1)))
    before = state.optimizer.state[model["lora"].weight]["master"].clone()
    load(run, state, include=["base.*"], optimizer="skip", convert_dtype=True)
    assert torch.equal(state.optimizer.state[model["lora"].weight]["master"], before)
    assert torch.equal(state.optimizer.state[model["base"].weight]["master"], model["base"].weight.float())


def test_masters_come_from_fp32_weights_of_a_checkpoint_without_masters(run: str) -> None:
    model = net().to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters()))
    load(run, TrainState(model=model, optimizer=optimizer), convert_dtype=True)
    exact = net()
    load(run, TrainState(model=exact))
    assert torch.equal(optimizer.state[model["base"].weight]["master"], exact["base"].weight)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["in_place", "atomic"])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_weights_that_need_a_cast_come_from_the_masters(
    tmp_path: Path, kind: str, options: dict[str, Any], with_optimizer: bool
) -> None:
    low = net().to(torch.bfloat16)
    if kind != "sharded":  # SHARDED stores a tied weight under each name, without recording the tie
        low["lora"].weight = low["base"].weight
    source = trained(low, MasterWeightOptimizer(torch.optim.AdamW(low.parameters(), lr=1e-3)))
    root = saved_as(tmp_path, source, state_dict_type=kind)
    masters = {name: source.optimizer.state[p]["master"] for name, p in low.named_parameters()}
    for dtype in (torch.float32, torch.float16, torch.float64):
        model = net().to(dtype)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        if dtype is torch.float16:
            optimizer = MasterWeightOptimizer(optimizer)
        state = TrainState(model=model, optimizer=optimizer if with_optimizer else None)
        report = load(root, state, convert_dtype=dtype is not torch.float32, strict=not with_optimizer, **options)
        assert any("fp32 masters" in note for note in report.notes)
        assert torch.equal(model["lora"].weight, masters.get("lora.weight", masters["base.weight"]).to(dtype))
        for name, parameter in model["base"].named_parameters(prefix="base"):
            assert torch.equal(parameter, masters[name].to(dtype))
            if with_optimizer:
                mine, theirs = optimizer.state[parameter], source.optimizer.state[low.get_parameter(name)]
                assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
                assert torch.equal(mine.get("master", theirs["master"]), theirs["master"])
        if with_optimizer and dtype is torch.float16:
            assert optimizer.follow_weights() == 0


def test_a_checkpoint_with_masters_resumes_in_fp32_from_the_masters(tmp_path: Path) -> None:
    low = net().to(torch.bfloat16)
    source = trained(low, MasterWeightOptimizer(torch.optim.AdamW(low.parameters(), lr=1e-3)))
    root = saved_as(tmp_path, source)
    model = net()
    load(root, TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), extra={"epoch": 0}))
    assert torch.equal(model["base"].weight, source.optimizer.state[low["base"].weight]["master"])
    with pytest.raises(CheckpointMismatchError, match=r"unexpected: master\.base\.weight"):
        plain = net().to(torch.bfloat16)
        load(root, TrainState(model=plain, optimizer=torch.optim.AdamW(plain.parameters())))


def test_a_deferred_optimizer_of_an_fp32_model_leaves_out_the_masters(tmp_path: Path) -> None:
    low = net().to(torch.bfloat16)
    source = trained(low, MasterWeightOptimizer(torch.optim.AdamW(low.parameters(), lr=1e-3)))
    root = saved_as(tmp_path, source)
    model = net()
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager(root) as manager:
        report = manager.load(state, optimizer="deferred")
        assert torch.equal(model["base"].weight, source.optimizer.state[low["base"].weight]["master"])
        later = report.deferred.apply()
    assert any("3 fp32 masters were skipped" in note for note in later.notes)
    assert "exp_avg" in state.optimizer.state[model["base"].weight]


def test_a_tied_weight_that_is_stored_once_loads_into_a_tied_and_an_untied_model(tmp_path: Path) -> None:
    def tied(tie: bool) -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        if tie:
            model["head"].weight = model["embed"].weight
        return model

    source = tied(True)
    for kind in ("full", "local", "sharded"):
        root = saved_as(tmp_path / kind, TrainState(model=source), state_dict_type=kind)
        for tie in (True, False):
            model = tied(tie)
            report = load(root, TrainState(model=model))
            assert torch.equal(model["head"].weight, source["embed"].weight)
            assert torch.equal(model["embed"].weight, source["embed"].weight)
            assert not report.missing


def test_extra_state_of_modules_is_restored(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        scale = 0

        def get_extra_state(self) -> Any:
            return {"scale": self.scale}

        def set_extra_state(self, state: Any) -> None:
            self.scale = state["scale"]

    source = nn.Sequential(Scaled(2, 2))
    source[0].scale = 7
    root = saved_as(tmp_path, TrainState(model=source))
    model = nn.Sequential(Scaled(2, 2))
    load(root, TrainState(model=torch.compile(model)))
    assert model[0].scale == 7


class Counted(nn.Linear):
    """A layer with a value besides its tensors."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def counted(kept: Any) -> nn.Module:
    module = nn.Sequential(Counted(2, 2))
    module[0].kept = kept
    return module


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_large_tensors_of_module_extra_state_are_restored_and_are_no_weights(tmp_path: Path, kind: str) -> None:
    kept = {"history": torch.randn(600), "table": torch.arange(3)}
    root = saved_as(tmp_path, TrainState(model=counted(kept)), state_dict_type=kind)
    model = counted({"history": torch.zeros(600), "table": torch.zeros(3)})
    load(root, TrainState(model=model))
    assert same(model[0].kept, kept)
    weights = open_checkpoint(f"{root}/step_00000001").catalog.by_role(Role.MODEL)
    assert set(weights) == {"0.weight", "0.bias"}


def test_extra_state_that_one_side_lacks_is_listed_before_anything_changes(tmp_path: Path) -> None:
    root = saved_as(tmp_path, TrainState(model=counted(7)))
    plain = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatchError, match=r"model\.extra_state: 1 unexpected: 0\._extra_state"):
        load(root, TrainState(model=plain))
    assert load(root, TrainState(model=plain), strict=False).unexpected == ["model.extra_state.0._extra_state"]
    root = saved_as(tmp_path / "plain", TrainState(model=plain))
    model = counted(8)
    with pytest.raises(CheckpointMismatchError, match=r"model\.extra_state: 1 missing.*: 0\._extra_state"):
        load(root, TrainState(model=model))
    assert load(root, TrainState(model=model), strict=False).missing == ["model.extra_state.0._extra_state"]
    assert model[0].kept == 8


def test_extra_state_that_torch_saved_is_reported_as_unchanged(tmp_path: Path) -> None:
    dcp.save({"model": counted({"n": 7}).state_dict()}, checkpoint_id=tmp_path / "torch", no_dist=True)
    model = counted({"n": 8})
    report = load(str(tmp_path / "run"), TrainState(model=model), which=str(tmp_path / "torch"))
    assert model[0].kept == {"n": 8}
    assert "are left unchanged" in report.skipped["model.extra_state"]


def test_torch_loads_a_model_with_extra_state_without_ckptkit(tmp_path: Path) -> None:
    source, target = counted(7), counted(8)
    step = saved_as(tmp_path, TrainState(model=source)) + "/step_00000001"
    state = {name: value for name, value in target.state_dict().items() if not name.endswith("_extra_state")}
    dcp.load({"model": state}, checkpoint_id=step, no_dist=True)
    assert torch.equal(target[0].weight, source[0].weight)


def test_values_added_by_a_models_state_dict_are_restored_by_its_load_state_dict(tmp_path: Path) -> None:
    class Own(nn.Linear):
        calls = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().state_dict(*args, **kwargs), "calls": self.calls}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            self.calls = state["calls"]
            return super().load_state_dict({k: v for k, v in state.items() if k != "calls"}, strict, assign)

    source = Own(2, 2)
    source.calls = 7
    root = saved_as(tmp_path, TrainState(model=source))
    model = Own(2, 2)
    load(root, TrainState(model=model))
    assert model.calls == 7
    assert torch.equal(model.weight, source.weight)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_parameter_whose_name_ends_with_extra_state_is_a_parameter(tmp_path: Path, kind: str) -> None:
    def model() -> nn.Module:
        module = nn.Module()
        module.my_extra_state = nn.Parameter(torch.randn(3))
        return module

    source = model()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    root = saved_as(tmp_path, TrainState(model=source, optimizer=optimizer), state_dict_type=kind)
    target = model()
    load(root, TrainState(model=target, optimizer=torch.optim.SGD(target.parameters(), lr=0.2)))
    assert torch.equal(target.my_extra_state, source.my_extra_state)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_state_of_an_optimizer_may_have_dots_in_its_name(tmp_path: Path, kind: str) -> None:
    source, target = trained(net()), TrainState(model=net())
    for number, state in enumerate(source.optimizer.state.values()):
        state["factors.0.left"] = torch.full((2, 3), float(number))
    root = saved_as(tmp_path, source, state_dict_type=kind)
    target = trained(net())
    load(root, target)
    assert same(bits(target), bits(source))


def test_optimizer_state_of_a_parameter_in_no_saved_group_is_listed(tmp_path: Path) -> None:
    step = Path(saved_as(tmp_path, trained(net()))) / "step_00000001"
    body = json.loads((step / "objects.json").read_text())
    body["objects"]["optimizer"]["param_groups"][0]["params"].remove("lora.weight")
    (step / "objects.json").write_text(json.dumps(body))
    reseal(step)
    model = net()
    optimizer = torch.optim.AdamW(model["base"].parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatchError, match=r"3 unexpected: lora\.weight\.(step|exp_avg)"):
        load(str(step.parent), TrainState(model=model, optimizer=optimizer, extra={"epoch": 0}))


def test_a_run_without_a_checkpoint_loads_nothing(tmp_path: Path) -> None:
    assert load(str(tmp_path / "new"), TrainState(model=net())) is None


def test_damaged_objects_are_found_by_their_digest(run: str) -> None:
    path = Path(run, "step_00000005", "objects.json")
    body = json.loads(path.read_text())
    body["objects"]["extra.epoch"] = 4
    path.write_text(json.dumps(body, separators=(",", ":")))
    assert xxhash.xxh3_64_hexdigest(path.read_bytes())
    with pytest.raises((IntegrityError, LoadError)):
        load(run, trained(net()))


def test_an_optimizer_can_be_loaded_without_the_model(run: str) -> None:
    state = trained(net())
    state.extra.clear()
    weights = copy.deepcopy(dict(state.model.state_dict()))
    report = load(run, state, model="skip")
    assert same(weights, dict(state.model.state_dict()))
    assert report.skipped["model"] == 'model="skip"'
    exact = trained(net())
    load(run, exact)
    assert same(state.optimizer.state_dict(), exact.optimizer.state_dict())


@pytest.mark.parametrize("convert", [False, True])
def test_weights_can_be_read_in_place(run: str, convert: bool) -> None:
    model, exact = net(), net()
    if convert:
        model = model.to(torch.float64)
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    report = load(run, TrainState(model=model), convert_dtype=convert)
    load(run, TrainState(model=exact))
    assert same({k: v.float() for k, v in model.state_dict().items()}, dict(exact.state_dict()))
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places
    assert "model.base.weight" in report.loaded


def test_mismatches_are_found_before_anything_is_read_in_place(run: str) -> None:
    model = net()
    model["new"] = nn.Linear(2, 2)
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(CheckpointMismatchError):
        load(run, TrainState(model=model))
    assert same(before, dict(model.state_dict()))


@pytest.mark.parametrize(
    "rule",
    [
        {"include": ["nosuch*"]},
        {"include": lambda fqn: False},
        {"exclude": "nosuch*"},
        {"include": ["weight", "wight"]},
    ],
)
def test_a_filter_that_matches_nothing_is_refused_by_name_or_noted(tmp_path: Path, rule: dict[str, Any]) -> None:
    run = saved_as(tmp_path, TrainState(model=nn.Linear(2, 2)))
    state = TrainState(model=nn.Linear(2, 2))
    with pytest.raises(
        CheckpointMismatchError, match=r"(include|exclude)='(nosuch\*|<lambda>|wight)' matches no tensor"
    ):
        load(run, state, **rule)
    report = load(run, state, strict=False, **rule)
    assert any("matches no tensor" in note for note in report.notes)


def test_an_error_names_a_saved_model_without_a_live_one(tmp_path: Path) -> None:
    root = saved_as(tmp_path, TrainState(model={"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}))
    report = load(root, TrainState(model={"actor": nn.Linear(2, 2)}))
    assert report.skipped == {"model_critic": "not in the training state"}


def test_without_strict_an_optimizer_that_was_not_saved_stays_as_it_is(tmp_path: Path) -> None:
    state = trained(net())
    root = saved_as(tmp_path, TrainState(model=state.model))
    before = bits(state)[1]
    with pytest.raises(CheckpointMismatchError, match="the whole optimizer"):
        load(root, state)
    report = load(root, state, strict=False)
    assert any("whole optimizer" in key for key in report.missing)
    assert same(before, bits(state)[1]) and not state.half_loaded


def made_by(optimizer: Any, scheduler: Any = None, **options: Any) -> TrainState:
    model = net()
    chosen = optimizer(model.parameters(), lr=0.1, **options)
    state = trained(model, chosen)
    state.scheduler = scheduler(chosen) if scheduler else None
    return state


OTHERS = [  # saved, live
    (torch.optim.AdamW, torch.optim.SGD),
    (torch.optim.SGD, torch.optim.AdamW),
    (torch.optim.Adam, torch.optim.AdamW),
]


@pytest.mark.parametrize(("was", "now"), OTHERS)
@pytest.mark.parametrize("masters", [False, True])
def test_an_optimizer_of_another_class_does_not_fit(tmp_path: Path, was: Any, now: Any, masters: bool) -> None:
    root, state = saved_as(tmp_path, made_by(was)), made_by(now)
    if masters:
        state.optimizer = MasterWeightOptimizer(state.optimizer)
    before = bits(state)
    with pytest.raises(
        CheckpointMismatchError, match=rf"whole optimizer \(saved from a {was.__name__}, here it is a {now.__name__}\)"
    ):
        load(root, state)
    assert same(bits(state), before)
    report = load(root, state, strict=False)
    assert any(was.__name__ in text for text in report.missing)
    assert same(bits(state)[1], before[1])
    trained(state.model, state.optimizer)


def test_an_optimizer_of_the_same_class_loads_with_and_without_masters(tmp_path: Path) -> None:
    state = made_by(torch.optim.AdamW)
    report = load(saved_as(tmp_path, made_by(torch.optim.AdamW)), state)
    assert not report.missing
    state.optimizer = MasterWeightOptimizer(torch.optim.AdamW(state.model.parameters()))
    assert not load(str(tmp_path / "other"), state).missing


@pytest.mark.parametrize("was", [False, True])
def test_a_changed_optimizer_option_does_not_fit(tmp_path: Path, was: bool) -> None:
    root = saved_as(tmp_path, made_by(torch.optim.AdamW, amsgrad=was))
    state = made_by(torch.optim.AdamW, amsgrad=not was)
    before = bits(state)
    with pytest.raises(CheckpointMismatchError, match=rf"amsgrad={was} of group 0 \(here it is {not was}\)"):
        load(root, state)
    assert same(bits(state), before)
    report = load(root, state, strict=False)
    assert any("amsgrad" in text for text in report.unexpected)
    assert state.optimizer.param_groups[0]["amsgrad"] is was
    trained(state.model, state.optimizer)


def test_a_scheduler_of_another_class_does_not_fit(tmp_path: Path) -> None:
    lr = torch.optim.lr_scheduler

    def joined(second: Any) -> Any:
        return lambda optimizer: lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), second(optimizer)], [2])

    made = {
        "StepLR": lambda optimizer: lr.StepLR(optimizer, 3),
        "ExponentialLR": lambda optimizer: lr.ExponentialLR(optimizer, 0.5),
        r"SequentialLR\(ConstantLR, ExponentialLR\)": joined(lambda optimizer: lr.ExponentialLR(optimizer, 0.5)),
        r"SequentialLR\(ConstantLR, StepLR\)": joined(lambda optimizer: lr.StepLR(optimizer, 3)),
    }
    for was, make_saved in made.items():
        root = saved_as(tmp_path / was, made_by(torch.optim.SGD, make_saved))
        for now, make_live in made.items():
            state = made_by(torch.optim.SGD, make_live)
            before = copy.deepcopy(state.scheduler.state_dict())
            if was == now:
                load(root, state)
                continue
            with pytest.raises(CheckpointMismatchError, match=f"saved from a {was}, here it is a {now}"):
                load(root, state)
            report = load(root, state, strict=False)
            assert report.missing and repr(state.scheduler.state_dict()) == repr(before)


def test_classes_that_a_checkpoint_does_not_record_are_not_compared() -> None:
    optimizer = torch.optim.SGD(net().parameters())
    for objects in ({}, {"classes": None}, {"classes": {}}, {"classes": {"optimizer": "SGD"}}):
        assert of_another_class("optimizer", optimizer, objects) == ""


def test_a_model_in_extra_is_compared_before_anything_changes(tmp_path: Path) -> None:
    def state(ema: Any) -> TrainState:
        return TrainState(model=net(), extra={"ema": ema})

    saved = net()
    root = saved_as(tmp_path, state(saved))
    low, wide, other = net().bfloat16(), net(16), net()
    other["new"] = nn.Linear(2, 2)
    for ema, said in (
        (low, r"extra\.ema: 3 with another dtype"),
        (wide, r"extra\.ema: 3 with another shape"),
        (other, r"extra\.ema: 2 missing in the checkpoint: new"),
    ):
        live = state(ema)
        before = copy.deepcopy((ema.state_dict(), live.model.state_dict()))
        with pytest.raises(CheckpointMismatchError, match=said):
            load(root, live)
        assert same((ema.state_dict(), live.model.state_dict()), before) and not live.half_loaded
    load(root, state(low), convert_dtype=True)
    assert torch.equal(low["base"].weight, saved["base"].weight.bfloat16())
    assert "extra.ema.new.weight" in load(root, state(other), strict=False).missing
    assert torch.equal(other["base"].weight, saved["base"].weight)


def test_the_state_of_a_disabled_scaler_does_not_fit_an_enabled_one(tmp_path: Path) -> None:
    def state(enabled: bool) -> TrainState:
        return TrainState(model=net(), grad_scaler=torch.amp.GradScaler("cpu", enabled=enabled))

    root = saved_as(tmp_path, state(False))
    live = state(True)
    before = copy.deepcopy(live.model.state_dict())
    with pytest.raises(CheckpointMismatchError, match="the saved scaler was disabled, this one is enabled"):
        load(root, live)
    assert same(live.model.state_dict(), before) and not live.half_loaded
    assert load(root, live, strict=False).missing
    assert not same(live.model.state_dict(), before)
    root = saved_as(tmp_path / "enabled", state(True))
    assert load(root, state(False)).skipped == {"grad_scaler": "disabled in this job"}
