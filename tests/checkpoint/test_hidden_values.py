"""A save refuses, by name and before it writes, what a load could not restore."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptkit import TrainState, convert, reshard, verify
from ckptkit.errors import UnsupportedFormatError
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.integrations.torchtitan import _joined
from tests.checkpoint.hidden import HIDDEN as ALL
from tests.checkpoint.hidden import Opaque, Scaled, Tagged, scaled
from tests.checkpoint.states import bits, check_misfit, check_refused, check_round_trip, load, load_all, optimized, save
from tests.lazy import LazyModule
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about prototype and deprecated tensors
MADE_OF_PARTS = ("wrapper", "wrapper parameter")  # they have __tensor_flatten__
HIDDEN = {name: case for name, case in ALL.items() if name not in MADE_OF_PARTS}


def net(odd: Any) -> nn.Module:
    model = nn.ModuleDict({"w": nn.Linear(3, 3)})
    (model.register_parameter if isinstance(odd, nn.Parameter) else model.register_buffer)("odd", odd)
    return model


def in_model(value: Any) -> TrainState:
    return TrainState(model=net(value), rng=False)


def in_optimizer(value: Any) -> TrainState:
    state = optimized(nn.Linear(4, 4))
    state.optimizer.state[state.model.weight]["exp_avg"] = value
    return state


def in_extra(value: Any) -> TrainState:
    return TrainState(model=nn.Linear(4, 4), extra={"ema": {"deep": [value]}}, rng=False)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_model_with_a_tensor_that_hides_its_values_is_not_saved(tmp_path, name, kind):
    make, said = HIDDEN[name]
    check_refused(tmp_path, in_model(make()), rf"(?s)model\.odd .*{said}", state_dict_type=kind)


@pytest.mark.parametrize("place", [in_optimizer, in_extra])
@pytest.mark.parametrize("name", sorted(HIDDEN.keys() - {"sparse", "csr", "quantized"}))
def test_optimizer_states_and_values_that_hide_their_values_are_refused(tmp_path, name, place):
    make, said = HIDDEN[name]
    where = "exp_avg" if place is in_optimizer else r"extra\.ema\.deep"
    check_refused(tmp_path, place(make()), rf"(?s){where}.*{said}")


def test_an_error_names_every_tensor_that_hides_its_values(tmp_path):
    state = TrainState(model={"a": net(scaled(Opaque)), "b": net(torch.eye(3).to_sparse())}, rng=False)
    state.model["a"].register_buffer("other", scaled(Opaque))
    check_refused(tmp_path, state, r"model_a\.odd(?s:.*)model_a\.other")


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("name", MADE_OF_PARTS)
def test_subclasses_with_tensor_flatten_load_in_place(tmp_path, kind, name, atomic):
    source, live = in_model(ALL[name][0]()), in_model(ALL[name][0]())
    odd = live.model.odd
    source.model.odd.scale.fill_(0.25)
    check_round_trip(tmp_path, source, live, kind, atomic=atomic)
    assert live.model.odd is odd and type(odd) is type(source.model.odd)


@pytest.mark.parametrize("strict", [True, False])
def test_a_different_class_or_setting_is_refused_and_both_are_shown(tmp_path, strict):
    class Other(Scaled):
        pass

    save(tmp_path, in_model(scaled()))
    save(tmp_path, in_model(torch.ones(4, 4)), 2)
    for step, here, said in (
        (1, scaled(Other), r"odd is .*Other .* here, but Scaled .* in the checkpoint"),
        (1, torch.ones(4, 4), r"odd is a plain tensor here, but Scaled .* in the checkpoint"),
        (2, scaled(), r"odd is Scaled .* here, but a plain tensor in the checkpoint"),
    ):
        check_misfit(tmp_path, in_model(here), said, which=step, strict=strict)


def test_include_selects_all_parts_of_a_subclass(tmp_path):
    state, live = in_model(scaled()), in_model(scaled())
    before = bits(live.model["w"])
    load(save(tmp_path, state), live, include=["odd"])
    assert bits(live.model.odd) == bits(state.model.odd)
    assert bits(live.model["w"]) == before


def test_a_name_that_equals_the_key_of_a_part_is_refused(tmp_path):
    state = in_model(scaled())
    state.model.register_buffer("odd::scale", torch.ones(2))
    check_refused(tmp_path, state, r"model\.odd .*odd::scale")


@on_ranks(2)
def test_ranks_with_different_classes_under_one_name_are_refused(tmp_path, kind):
    state = in_model(scaled() if dist.get_rank() == 1 else torch.ones(4, 4))
    said = r"model\.odd: it is a plain tensor here, but Scaled.*on rank 1"
    check_refused(tmp_path, state, said, state_dict_type=kind)


def test_an_export_of_tensors_stored_in_parts_is_refused(tmp_path, kind):
    save(tmp_path / "run", in_model(scaled()), state_dict_type=kind)
    for target in ("hf", "dcp", "torch"):
        with pytest.raises(UnsupportedFormatError, match=r"model\.odd is a \S*Scaled, which is stored in parts"):
            convert(str(tmp_path / "run"), str(tmp_path / "out"), to=target)
    assert not (tmp_path / "out").exists()
    for number, name in enumerate(("odd", "model.odd")):
        convert(str(tmp_path / "run"), str(tmp_path / f"{number}"), exclude=[name])


def test_a_full_checkpoint_of_weights_in_parts_has_no_config_json(tmp_path):
    class Config:
        def to_json_string(self) -> str:
            return "{}"

    for name, value in (("parts", scaled()), ("whole", torch.ones(4, 4))):
        state = in_model(value)
        state.model.config = Config()
        save(tmp_path / name, state, state_dict_type="full")
    found = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("config.json")}
    assert found == {"whole"}


def test_a_subclass_without_hidden_values_loads_into_the_live_tensor(tmp_path, kind):
    value, live = torch.randn(4, 4).as_subclass(Tagged), torch.zeros(4, 4).as_subclass(Tagged)
    value.note, live.note = "kept", "its own"
    state = in_model(live)
    load(save(tmp_path, in_model(value), state_dict_type=kind), state)
    assert state.model.odd is live and live.note == "its own"
    assert torch.equal(live, value)


def test_a_subclass_as_a_value_is_refused(tmp_path):
    check_refused(tmp_path, in_extra(torch.ones(3).as_subclass(Tagged)), r"extra\.ema.*plain torch\.Tensor")


@pytest.mark.parametrize("kind", ["full", "local"])
def test_a_dtype_that_safetensors_lacks_is_refused_before_anything_is_written(tmp_path, kind):
    state, said = in_model(torch.zeros(3, dtype=torch.complex32)), r"model\.odd.*complex32.*SHARDED"
    check_refused(tmp_path / "run", state, said, error=UnsupportedFormatError, state_dict_type=kind)
    assert not (tmp_path / "run").exists()


def test_a_load_into_a_tensor_that_hides_its_values_is_refused_by_name(tmp_path):
    root = save(tmp_path, in_model(torch.ones(4, 4)))
    check_misfit(root, in_model(scaled(Opaque)), r"odd here is a .*Opaque", strict=False)


ODD_STATES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda optimizer, weight: optimizer.state.update({7: {"a": 1}}), "it has state for 7, which is in none"),
    (
        lambda optimizer, weight: optimizer.state[weight].update({0: torch.ones(4)}),
        "the state of weight has the key 0, which is not a string",
    ),
    (lambda optimizer, weight: optimizer.state[weight].update({("a", 1): 3}), r"of weight has the key \('a', 1\)"),
    (lambda optimizer, weight: optimizer.param_groups[0].update({5: 1}), "group 0 has the key 5, which is not a strin"),
    (
        lambda optimizer, weight: optimizer.state[weight].update(
            exp_avg=Scaled(torch.ones(2, 4).char(), torch.ones(()))
        ),
        r"weight.exp_avg has the shape \[2, 4\], but its parameter has \[4, 4\]",
    ),
]


@pytest.mark.parametrize(("change", "said"), ODD_STATES)
def test_states_that_no_load_could_give_an_optimizer_are_refused(tmp_path, change, said):
    state = in_optimizer(torch.ones(4, 4))
    change(state.optimizer, state.model.weight)
    check_refused(tmp_path, state, said)


@pytest.mark.parametrize("per_rank", [False, True])
@on_ranks(2)
def test_plain_quantized_parameters_that_differ_are_refused_unless_declared(tmp_path, per_rank):
    torch.manual_seed(0)
    made = Scaled(torch.full((4, 4), dist.get_rank(), dtype=torch.int8), torch.tensor(0.5))
    state = in_model(nn.Parameter(made, requires_grad=False))
    if per_rank:
        state.layout = {"odd": "per_rank"}
        other = in_model(nn.Parameter(scaled(), requires_grad=False))
        other.layout = state.layout
        load(save(tmp_path, state), other)
        assert bits(other.model) == bits(state.model)
    else:
        check_refused(tmp_path, state, r"parameters differ between ranks: model\.odd::values")


@on_ranks(2)
def test_a_sharded_parameters_state_that_is_a_list_is_refused_by_name(tmp_path):
    state = optimized(fully_shard(nn.Linear(4, 4)))
    state.optimizer.state[state.model.weight] = [torch.ones(2)]
    check_refused(tmp_path, state, "the state of weight is a list")


accelerate = LazyModule("accelerate")
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda optimizer: optimizer,
    "in masters": MasterWeightOptimizer,
    "in one": lambda optimizer: _joined([optimizer]),  # as the optimizers of several stages in torchtitan
    "in both": lambda optimizer: _joined([MasterWeightOptimizer(optimizer)]),
    "in Accelerate's": lambda optimizer: accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer),
}
OURS = list(WRAPPERS)[:-1]
wrapped = pytest.mark.parametrize("wrap", OURS)


def wrapped_state(wrap: str, make: Any, **settings: Any) -> tuple[TrainState, Any]:
    """Return the state of a model in bf16 with this kind of optimizer, and the optimizer inside the wrapper."""
    model = nn.Linear(2, 2).bfloat16()
    inner = make(model.parameters(), **settings)
    return TrainState(model=model, optimizer=WRAPPERS[wrap](inner), rng=False), inner


def values_in(state: TrainState) -> Any:
    """Return the values of an optimizer's states and groups, by name."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    states = {names.get(key, key): bits(value) for key, value in state.optimizer.state.items()}
    return states, [{k: bits(v) for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]


Hook = Callable[[Any, dict[str, Any]], Any]


def with_states(change: Callable[[Any], Any]) -> Hook:
    """Return a hook that replaces the states of each parameter."""
    return lambda _, given: given.update(state={key: change(state) for key, state in given["state"].items()})


HOOKS: dict[str, tuple[Hook, str]] = {
    "other moments": (
        with_states(lambda state: {name: value.bfloat16() for name, value in state.items()}),
        "returns values that differ from the optimizer's: 'exp_avg' of weight. Only",
    ),
    "another rate": (
        lambda _, given: given["param_groups"][0].update(lr=9.0),
        "returns values that differ from the optimizer's: 'lr' of group 0. Only",
    ),
    "another setting": (lambda _, given: given["param_groups"][0].update(more=1), "has 'more', but only 'state'"),
    "another state": (lambda _, given: given["state"].update(more=1), "has 'more', but only 'state'"),
    "another key": (lambda _, given: given.update(more=1), "has 'more', but only 'state'"),
}


@pytest.mark.parametrize(
    ("name", "wrap", "outside"),
    [
        *((name, "alone", False) for name in HOOKS),
        *((name, wrap, False) for name in ("another rate", "another key") for wrap in OURS[1:]),
        ("another rate", "in masters", True),
    ],
)
def test_what_a_hook_changes_in_an_optimizers_state_dict_is_refused(tmp_path, name, wrap, outside):
    """`outside`: it is a hook of the wrapper, not of the optimizer inside."""
    (hook, said), (state, inner) = HOOKS[name], wrapped_state(wrap, torch.optim.SGD, lr=0.1)
    if wrap == "alone":
        inner.state[state.model.weight]["exp_avg"] = torch.ones(2, 2)
    (state.optimizer if outside else inner).register_state_dict_post_hook(hook)
    check_refused(tmp_path, state, said if outside else f"the state_dict of SGD {said}")


@pytest.mark.parametrize("wrap", WRAPPERS)  # the first and the last run by day
def test_hooks_around_saves_and_loads_are_called(tmp_path, wrap):
    """An optimizer may unpack its state before `state_dict`, and pack it after `load_state_dict`."""
    packed: list[float] = []

    def unpack(optimizer: Any) -> None:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {"packed": torch.ones(1, 1) * 3}

    def pack(optimizer: Any) -> None:
        packed.append(optimizer.state[optimizer.param_groups[0]["params"][0]]["packed"].item())

    (source, inner), (live, other) = (wrapped_state(wrap, torch.optim.SGD, lr=0.1) for _ in range(2))
    inner.register_state_dict_pre_hook(unpack)
    other.register_load_state_dict_pre_hook(lambda *_: None)
    other.register_load_state_dict_post_hook(pack)
    report = load(save(tmp_path, source), live)
    assert packed == [3.0]
    assert any("load_state_dict pre-hooks change nothing" in note for note in report.notes)


class Deriving(torch.optim.SGD):
    """Has a value that only its `load_state_dict` derives from the groups, a base with the same groups, and a state
    that only its `state_dict` updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=torch.tensor(0.1))
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.doubled, self.fresh = 0.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["fresh"] = torch.full((2,), self.fresh)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups, self.doubled = self.param_groups, 2 * float(self.param_groups[0]["lr"])


@wrapped
def test_overridden_methods_are_called_and_change_no_restored_value(tmp_path, wrap):
    (source, _), (live, inner) = (wrapped_state(wrap, Deriving) for _ in range(2))
    source.optimizer.param_groups[0]["lr"].fill_(0.25)
    source.optimizer.state.setdefault(source.model.weight, {}).update(exp_avg=torch.full((2, 2), 0.1), steps=3)
    source.optimizer.state["all"] = {"count": torch.tensor(7)}
    inner.fresh = 2.0
    rate, called = inner.param_groups[0]["lr"], list[Any]()
    inner.register_load_state_dict_post_hook(called.append)
    load_all(save(tmp_path, source), live)
    assert values_in(live) == values_in(source)
    assert inner.doubled == 0.5
    assert live.optimizer.state[live.model.weight]["exp_avg"].dtype is torch.float32  # torch's method casts it
    assert live.optimizer.param_groups[0]["lr"] is rate
    assert inner.base.param_groups is inner.param_groups
    assert called == [inner]


AS_NUMBERS = {"step": 3, "nested": (torch.full((300,), torch.nan), {"count": torch.tensor(2.0)})}
HARMLESS: dict[str, Hook] = {
    "a copy": lambda _, given: copy.deepcopy(given),
    "lists": lambda _, given: {**given, "param_groups": [
        {**group, "betas": list(group["betas"])} for group in given["param_groups"]]},
    "numbers": with_states(lambda state: {**state, **AS_NUMBERS}),
    "tensors": lambda _, given: given["param_groups"][0].update(lr=torch.tensor(0.1)),
    "row-major": with_states(lambda state: {"exp_avg": state["exp_avg"].contiguous()}),
    "nothing": lambda _, given: {},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_hook_that_omits_states_or_returns_equal_values_in_another_form_is_accepted(tmp_path, name, tied):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if tied:
        model[1].weight = model[0].weight
    parameters = [*model[0].parameters(), *model[1].parameters()]  # with a tied weight twice
    state = TrainState(model=model, optimizer=torch.optim.AdamW(parameters, lr=0.1))
    nested = [torch.full((300,), torch.nan), {"count": 2}]
    for parameter in state.model.parameters():
        moment = torch.arange(16.0).reshape(4, 4).T
        state.optimizer.state[parameter].update(step=torch.tensor(3.0), exp_avg=moment, nested=nested)
    state.optimizer.register_state_dict_post_hook(HARMLESS[name])
    save(tmp_path, state)


def test_state_that_belongs_to_no_parameter_is_refused_if_several_optimizers_are_joined(tmp_path):
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    optimizers[1].state["all"] = {"count": 7}
    state = TrainState(model=model, optimizer=_joined(optimizers))
    check_refused(
        tmp_path / "several", state, "SGD, one of several optimizers that are saved as one, has the state 'all'"
    )
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    whole.state["all"] = {"count": 7}
    save(tmp_path / "one", TrainState(model=model, optimizer=whole))
    del optimizers[1].state["all"]
    check_misfit(tmp_path / "one", state, "all belongs to no parameter, and several optimizers")


@pytest.mark.parametrize("given", [None, [1], {"state": None}, {"param_groups": None}, {"param_groups": [1]}])
def test_a_state_dict_that_is_no_dict_like_torchs_is_refused_by_name(tmp_path, given):
    state = in_optimizer(torch.ones(4, 4))
    state.optimizer.__class__ = type("Odd", (torch.optim.SGD,), {"state_dict": lambda _: given})
    check_refused(tmp_path, state, "optimizer: the state_dict of Odd is .*, expected a dict with a dict 'state'")


@pytest.mark.parametrize("name", ["another rate", "another setting"])
def test_what_a_hook_changes_in_the_state_dict_of_flashoptim_is_refused(tmp_path, name):
    flashoptim = pytest.importorskip("flashoptim", reason="it needs a newer numpy than the lowest")
    settings = {"quantize": False, "fused": False, "master_weight_bits": None}
    state = optimized(nn.Linear(4, 4), flashoptim.FlashAdamW, **settings)
    state.model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    save(tmp_path / "without", state)
    state.optimizer.register_state_dict_post_hook(HOOKS[name][0])
    check_refused(tmp_path, state, f"the state_dict of FlashAdamW {HOOKS[name][1][:20]}")


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_tensor_of_one_element_is_saved_whatever_its_stride_is(tmp_path, kind, size):
    """torch cannot view such tensors as bytes: columns of a single row, and of none."""

    def made(value: float) -> TrainState:
        columns = [torch.full((rows, 256), value)[:, 0] for rows in (0, 1, 1, 1)]
        model = net(columns[1])
        model.register_buffer("none", columns[0])
        state = optimized(model)
        state.optimizer.state[model["w"].bias]["column"] = columns[2]
        state.extra["column"] = columns[3]
        return state

    torch.manual_seed(0)
    source, live = made(1.0), made(2.0)
    load(save(tmp_path, source, state_dict_type=kind), live)
    assert live.model.odd.tolist() == live.extra["column"].tolist() == [1.0]
    assert live.optimizer.state[live.model["w"].bias]["column"].tolist() == [1.0]


def test_states_that_an_early_version_stored_as_objects_are_named_everywhere(tmp_path):
    """They are moments of torchao's AdamW8bit, which no load can restore, and which reshard refuses."""
    early = shutil.copytree(Path(__file__).with_name("states_as_objects"), tmp_path / "run")
    url, lost = str(early / "step_00000001"), ["weight.exp_avg", "weight.exp_avg_sq"]
    state = optimized(nn.Linear(64, 64, bias=False), torch.optim.AdamW)
    check_misfit(early, state, r"unexpected: weight\.exp_avg \(was stored.*weight\.exp_avg_sq")
    found = load(early, state, strict=False).unexpected
    assert [name.partition(" ")[0] for name in found] == [f"optimizer.{name}" for name in lost]
    report = verify(url)
    assert report.ok and list(report.uninterpreted) == [f"optimizer.state.{name}" for name in lost]
    with pytest.raises(UnsupportedFormatError, match=r"optimizer\.state\.weight\.exp_avg was stored"):
        reshard(url, str(tmp_path / "out"), world_size=2)
    assert not (tmp_path / "out").exists()


class Packed(nn.Module):
    """Its state dict has a tensor that its load_state_dict rejects."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_state_dict_post_hook(self.pack)

    @staticmethod
    def pack(module: Packed, state: dict[str, Any], prefix: str, meta: Mapping[str, Any]) -> None:
        state[prefix + "scale"] = module.w.detach().abs().max().reshape(1) * 2


class Taking(Packed):
    """Accepts in load_state_dict what its hook adds."""

    scale = 0.0

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state:
            self.scale = state.pop(prefix + "scale").item()
        super()._load_from_state_dict(state, prefix, *rest)


def test_state_dict_hook_output_that_no_load_accepts_is_refused(tmp_path, kind):
    versioned = nn.Linear(2, 2)
    versioned.register_state_dict_post_hook(lambda _, state, prefix, meta: state.update({f"{prefix}version": 3}))
    for model, name in ((Packed(), "scale"), (nn.Sequential(versioned), "0.version")):
        said = rf"model: a state_dict hook adds {name}, which a load could not"
        check_refused(tmp_path / "run", TrainState(model=model, rng=False), said, state_dict_type=kind)
    assert not (tmp_path / "run").exists()
    source, live = Taking(), Taking()
    source.w.data.fill_(3.0)
    save(tmp_path, TrainState(model=source, rng=False), state_dict_type=kind)
    load_all(tmp_path, TrainState(model=live, rng=False))
    assert torch.equal(live.w, source.w) and live.scale == 6


@pytest.mark.parametrize("stages", [2, nn.Sequential(nn.Linear(2, 2))], ids=["number", "modules"])
def test_an_attribute_called_stages_does_not_make_a_model_a_pipeline(tmp_path, stages):
    model = Packed()
    model.stages = stages
    said = "model: a state_dict hook adds scale"
    check_refused(tmp_path / "run", TrainState(model=model, rng=False), said, state_dict_type="sharded")


def test_a_load_names_keys_that_the_modules_own_load_rejects(tmp_path):
    root = save(tmp_path, TrainState(model=Taking(), rng=False))
    check_misfit(root, TrainState(model=Packed(), rng=False), r"scale .*does not accept it")
