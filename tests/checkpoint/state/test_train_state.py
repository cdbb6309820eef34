"""What a capture of the training state contains, and that capturing changes nothing."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import StateDictType as TorchStateDictType

from ckptkit import CheckpointManager, StateDictType, TrainState, open_checkpoint
from ckptkit.checkpoint.state.capture import capture
from ckptkit.errors import UsageError
from tests.checkpoint import states


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


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


def test_names_have_no_prefixes_of_wrappers_and_include_no_buffer_that_is_not_persistent():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)  # a submodule with the name that DDP uses
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    model = nn.ModuleDict({"a": checkpoint_wrapper(Block()), "b": torch.compile(Block())})
    names = set(capture(TrainState(model=torch.compile(model))).models["model"])
    assert names == {f"{block}.module.{leaf}" for block in "ab" for leaf in ("weight", "bias")}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_capturing_before_the_first_step_changes_no_state_and_draws_no_random_number(kind):
    state, random = states.optimized(net(), kind), torch.get_rng_state()
    with states.unchanged(state):
        assert capture(state).optimizers["optimizer"].tensors == {}
    assert torch.equal(torch.get_rng_state(), random) and len(state.optimizer.state) == 0


def test_an_error_names_an_optimizer_parameter_that_no_model_has():
    model = net()
    stranger = nn.Parameter(torch.ones(3, 5))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(UsageError, match=r"group 0 parameter 6 of shape \[3, 5\]"):
        capture(TrainState(model=model, optimizer=optimizer))


def test_several_models_and_optimizers_are_distinguished_by_name(tmp_path):
    def made(rate):
        models = {"actor": net(), "critic": net()}
        both = [models["critic"][0].weight, models["actor"][0].weight]
        actor = states.trained(models["actor"], torch.optim.SGD, lr=rate, momentum=0.9).optimizer
        optimizers = {"actor": actor, "both": torch.optim.SGD(both, lr=2 * rate)}
        return TrainState(model=models, optimizer=optimizers, rng=False)

    states.check_round_trip(tmp_path, made(0.1), made(0.2), "sharded")
    opened = open_checkpoint(str(tmp_path))
    names = {"model_actor.0.weight", "model_critic.0.weight", "optimizer_actor.state.actor.0.weight.momentum_buffer"}
    assert names <= set(opened)
    assert opened["optimizer_both"]["param_groups"][0]["params"] == ["critic.0.weight", "actor.0.weight"]


def test_names_that_would_break_keys_are_refused():
    with pytest.raises(UsageError, match="letters"):
        capture(TrainState(model={"a.b": net()}))


class Computing(nn.Module):
    """Saves one weight doubled, another under an old name, and numbers. Omits a frozen weight."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.a, self.b, self.frozen = (states.WithExtraState(2, 2, bias=False) for _ in range(3))
        self.a.kept = calls
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
        kept = {name: value for name, value in super().state_dict().items() if "frozen" not in name}
        return {**kept, "calls": self.calls}

    def load_state_dict(self, state, *args, **kwargs):
        self.calls = state["calls"]
        return super().load_state_dict({k: v for k, v in state.items() if k != "calls"}, *args, **kwargs)


def test_modules_with_state_dict_hooks_are_restored_by_their_own_load_state_dict(tmp_path):
    def made(calls, steps):
        module = Computing(calls)
        return states.trained(module, steps=steps, params=[module.a.weight, module.b.weight])

    source, live = made(7, 1), made(0, 0)
    kept = live.model.frozen.weight.clone()
    states.check_round_trip(tmp_path, source, live, "sharded")
    names = {key for key in open_checkpoint(str(tmp_path)) if key.startswith("model.")}
    assert names == {"model.a.weight", "model.old_b", "model.extra_state"}
    assert torch.equal(live.model.frozen.weight, kept)


def within(module):
    """Wrap the layers and not the model: activation checkpointing and compilation."""
    return nn.Sequential(checkpoint_wrapper(torch.compile(module[0])), checkpoint_wrapper(module[1]), module[2])


WRAPPERS = {
    "nothing": lambda module: module,
    "compile": torch.compile,
    "compile of DataParallel": lambda module: torch.compile(nn.DataParallel(module)),
    "DataParallel": nn.DataParallel,
    "checkpointing": checkpoint_wrapper,
    "layers": within,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_of_a_wrapped_model_loads_into_any_other_wrapper(tmp_path, wrapper, kind):
    def wrapped(wrap, filled):
        state = states.optimized(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
        for parameter in state.model.parameters() if filled else ():
            state.optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
        return TrainState(model=wrap(state.model), optimizer=state.optimizer, rng=False), state

    saved, source = wrapped(WRAPPERS[wrapper], True)
    states.save(tmp_path, saved, state_dict_type=kind)
    for wrap in WRAPPERS.values():
        live, target = wrapped(wrap, False)
        states.load(tmp_path, live)
        assert states.bits(target) == states.bits(source)
