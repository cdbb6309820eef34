"""What a capture of the training state contains, and that capturing changes nothing."""

from __future__ import annotations

import enum
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import StateDictType as TorchStateDictType

from ckptkit import CheckpointManager, StateDictType, TrainState, open_checkpoint
from ckptkit.checkpoint.state.capture import capture
from ckptkit.errors import SaveError, UsageError
from tests.checkpoint import states


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    out = []
    for i in range(steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


@pytest.mark.parametrize(("spelling", "wanted"), [
    ("full", StateDictType.FULL),
    ("FULL_STATE_DICT", StateDictType.FULL),
    ("StateDictType.SHARDED_STATE_DICT", StateDictType.SHARDED),
    ("Sharded", StateDictType.SHARDED),
    (TorchStateDictType.LOCAL_STATE_DICT, StateDictType.LOCAL),
    (StateDictType.LOCAL, StateDictType.LOCAL),
])  # fmt: skip
def test_every_spelling_of_a_state_dict_type_is_accepted(spelling, wanted):
    assert StateDictType.parse(spelling) is wanted


def test_sharded_is_the_default_everywhere():
    from ckptkit.fsdp import FSDPConfig

    default = inspect.signature(CheckpointManager).parameters["state_dict_type"].default
    assert StateDictType.parse(default) is StateDictType.SHARDED
    assert StateDictType.parse(FSDPConfig().state_dict_type) is StateDictType.SHARDED


def test_only_parameters_and_persistent_buffers_are_captured():
    model = net()
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    captured = capture(TrainState(model=model))
    assert set(captured.models["model"]) == set(model.state_dict())
    assert "scratch" not in captured.models["model"]


def test_names_have_no_prefixes_of_wrappers():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # a submodule with the name that DDP uses

    model = nn.ModuleDict({"a": checkpoint_wrapper(Block()), "b": torch.compile(Block())})
    names = set(capture(TrainState(model=torch.compile(model))).models["model"])
    assert names == {f"{block}.module.{leaf}" for block in "ab" for leaf in ("weight", "bias")}


def test_optimizer_keys_are_the_same_with_and_without_wrappers():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 8)), torch.compile(nn.Linear(8, 2), backend="eager"))
    optimizer = torch.optim.AdamW(model.parameters())
    losses(model, optimizer, 1)
    keys = set(capture(TrainState(model=model, optimizer=optimizer)).optimizers["optimizer"].tensors)
    fqns = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert keys == {(fqn, name) for fqn in fqns for name in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_capturing_before_the_first_step_changes_no_losses_and_draws_no_random_number(kind):
    def run(take: bool) -> list[float]:
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        if take:
            captured = capture(TrainState(model=model, optimizer=optimizer))
            assert captured.optimizers["optimizer"].tensors == {} and len(optimizer.state) == 0
        return [*losses(model, optimizer, 4), torch.rand(()).item()]

    assert run(True) == run(False)


def test_an_error_names_an_optimizer_parameter_that_no_model_has():
    model = net()
    stranger = nn.Parameter(torch.ones(3, 5))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(UsageError, match=r"group 0 parameter 6 of shape \[3, 5\]"):
        capture(TrainState(model=model, optimizer=optimizer))


def test_optimizer_state_without_tensor_or_parameter_is_captured():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] = {"count": 3, "big": torch.zeros(8, 4)}
    optimizer.state["global"] = {"seen": (1, 2)}
    taken = capture(TrainState(model=model, optimizer=optimizer)).optimizers["optimizer"]
    assert taken.tree["values"] == {"0.weight": {"count": 3}}
    assert taken.tree["shared"] == {"global": {"seen": {"$tuple": [1, 2]}}}
    assert set(taken.tensors) == {("0.weight", "big")}


def test_several_models_and_optimizers_are_distinguished_by_name():
    actor, critic = net(), net()
    state = TrainState(
        model={"actor": actor, "critic": critic},
        optimizer={"actor": torch.optim.SGD(actor.parameters(), lr=1, momentum=0.9), "both": torch.optim.SGD([
            critic[0].weight, actor[0].weight], lr=2)},
    )  # fmt: skip
    losses(actor, state.optimizer["actor"], 1)
    captured = capture(state)
    keys = dict(captured.tensors(aliases=True))
    assert "model_actor.0.weight" in keys
    assert "model_critic.0.weight" in keys
    assert "optimizer_actor.state.actor.0.weight.momentum_buffer" in keys
    assert captured.objects["optimizer_both"]["param_groups"][0]["params"] == ["critic.0.weight", "actor.0.weight"]


def test_names_that_would_break_keys_are_refused():
    with pytest.raises(UsageError, match="letters"):
        capture(TrainState(model={"a.b": net()}))


class _Kind(enum.Enum):
    A = 1


def test_extra_state_that_would_run_code_is_refused_with_its_path():
    with pytest.raises(SaveError, match=r"extra\.sampler\.mode"):
        capture(TrainState(extra={"sampler": {"mode": _Kind.A}}))


class Computing(torch.nn.Module):
    """Saves one weight doubled and another under an old name, and reverts both on load. Omits a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module, state, prefix, meta):
        state[prefix + "a.weight"] = state[prefix + "a.weight"] * 2
        state[prefix + "old_b"] = state.pop(prefix + "b.weight")

    @staticmethod
    def _load(module, state, prefix, *rest):
        state[prefix + "a.weight"] = state[prefix + "a.weight"] / 2
        state[prefix + "b.weight"] = state.pop(prefix + "old_b")

    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if "frozen" not in name}


def test_modules_with_state_dict_hooks_are_restored_by_their_own_load_state_dict(tmp_path):
    module = Computing()
    optimizer = torch.optim.AdamW([module.a.weight, module.b.weight])
    (module.a.weight.sum() + module.b.weight.sum()).backward()
    optimizer.step()
    fresh = Computing()
    kept = fresh.frozen.weight.clone()
    restored = torch.optim.AdamW([fresh.a.weight, fresh.b.weight])
    states.save(tmp_path, TrainState(model=module, optimizer=optimizer))
    states.load(tmp_path, TrainState(model=fresh, optimizer=restored))
    names = [key for key in open_checkpoint(str(tmp_path)) if key.startswith("model.")]
    assert sorted(names) == ["model.a.weight", "model.old_b"]
    assert torch.equal(fresh.a.weight, module.a.weight)
    assert torch.equal(fresh.b.weight, module.b.weight)
    assert torch.equal(fresh.frozen.weight, kept)
    assert torch.equal(restored.state[fresh.a.weight]["exp_avg"], optimizer.state[module.a.weight]["exp_avg"])


def within(module):
    """Wrap the layers and not the model: activation checkpointing and compilation."""
    return torch.nn.Sequential(checkpoint_wrapper(torch.compile(module[0])), checkpoint_wrapper(module[1]), module[2])


WRAPPERS = {
    "nothing": lambda module: module,
    "compile": torch.compile,
    "compile of DataParallel": lambda module: torch.compile(torch.nn.DataParallel(module)),
    "DataParallel": torch.nn.DataParallel,
    "checkpointing": checkpoint_wrapper,
    "layers": within,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_of_a_wrapped_model_loads_into_any_other_wrapper(tmp_path, wrapper, kind):
    def state(wrap, filled):
        made = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for parameter in made.parameters() if filled else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
        return TrainState(model=wrap(made), optimizer=optimizer, rng=False), made

    def values(state, module):
        moments = [state.optimizer.state[p]["momentum_buffer"] for p in module.parameters()]
        return [*module.state_dict().values(), *moments]

    saved, source = state(WRAPPERS[wrapper], True)
    states.save(tmp_path, saved, state_dict_type=kind)
    for wrap in WRAPPERS.values():
        live, target = state(wrap, False)
        states.load(tmp_path, live)
        assert all(map(torch.equal, values(live, target), values(saved, source)))
