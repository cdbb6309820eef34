"""Malformed objects whose digests match: one named error, and nothing changes."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.rng import capture_rng, restore_rng
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, LoadError
from tests.hostile.records import reseal


class Counting(torch.nn.Linear):
    """A module with extra state of its own."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def made(start: int) -> TrainState:
    torch.manual_seed(start)
    random.seed(start)
    np.random.seed(start)
    model = torch.nn.Sequential(Counting(3, 4), torch.nn.Linear(4, 1))
    lr = torch.tensor(0.1)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": lr}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, extra={"note": {"a": 1}}, step=start)


def all_of(state: TrainState) -> Any:
    tensors = [tensor.detach().clone() for tensor in state.model.state_dict(keep_vars=True).values()
               if isinstance(tensor, torch.Tensor)]  # fmt: skip
    rng = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())
    optimizer = copy.deepcopy(state.optimizer.state_dict())
    return tensors, optimizer, state.scheduler.state_dict(), copy.deepcopy(state.extra), state.step, rng


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    with CheckpointManager(root) as manager:
        manager.save(1, made(1))
    return root


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        at: Any = objects
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(objects: dict[str, Any]) -> None:
        at: Any = objects
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


GROUP = ("optimizer", "param_groups", 0)
ODD = {"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAAAAAAAAA="}}
CHANGES = {
    "the optimizer is a list": (put("optimizer", value=[]), "optimizer"),
    "no groups": (drop("optimizer", "param_groups"), "param_groups"),
    "groups are a mapping": (put("optimizer", "param_groups", value={}), "param_groups"),
    "a group is a number": (put(*GROUP, value=3), "param_groups"),
    "a group has no names": (drop(*GROUP, "params"), "params"),
    "names are numbers": (put(*GROUP, "params", value=[0, 1]), "params"),
    "no values": (drop("optimizer", "values"), "values"),
    "values of a parameter are a list": (put("optimizer", "values", value={"0.weight": []}), "values"),
    "shared is null": (put("optimizer", "shared", value=None), "shared"),
    "a value has an unknown tag": (put("optimizer", "values", value={"0.weight": {"x": {"$what": 1}}}), "what"),
    "a value lies in no tensor": (put("optimizer", "values", value={"0.weight": {"x": {"$ref": "no"}}}), "no"),
    "lr is a text": (put(*GROUP, "lr", value="high"), "lr"),
    "lr is null": (put(*GROUP, "lr", value=None), "lr"),
    "lr is two numbers": (put(*GROUP, "lr", value=ODD), "lr"),
    "a tensor's lr is a text": (put("optimizer", "param_groups", 1, "lr", value="high"), "lr"),
    "a tensor's lr is a huge number": (put("optimizer", "param_groups", 1, "lr", value=2**1100), "lr"),
    "betas are one number": (put(*GROUP, "betas", value=0.9), "betas"),
    "betas are three": (put(*GROUP, "betas", value=[0.9, 0.9, 0.9]), "betas"),
    "eps is an impossible number": (put(*GROUP, "eps", value={"$float": 10**400}), "float"),
    "no random state of python": (drop("rng.0", "python"), "python"),
    "random words are a number": (put("rng.0", "python", "words", value=7), "python"),
    "too few random words": (put("rng.0", "python", "words", value=ODD), "python"),
    "another version of random state": (put("rng.0", "python", "version", value=9), "python"),
    "gauss is a text": (put("rng.0", "python", "gauss", value="x"), "python"),
    "torch's state is null": (put("rng.0", "torch", value=None), "torch"),
    "torch's state is short": (put("rng.0", "torch", value=ODD), "torch"),
    "numpy's state is a list": (put("rng.0", "numpy", value=[]), "numpy"),
    "numpy's position is beyond the end": (put("rng.0", "numpy", "position", value=10**6), "numpy"),
    "numpy's generator is another": (put("rng.0", "numpy", "name", value="PCG64"), "numpy"),
    "random state is a text": (put("rng.0", value="x"), "rng"),
    "the scheduler is a list": (put("scheduler", value=[1]), "scheduler"),
    "extra state is a number": (put("model.extra_state", value=5), "model.extra_state"),
    "extra state of no module": (put("model.extra_state", value={"gone._extra_state": 1}), "gone"),
    "a size of texts": (put("extra.note", value={"$size": ["x"]}), "extra.note"),
    "an empty tensor of negative size": (
        put("extra.note", value={"$tensor": {"dtype": "float32", "shape": [-1, 0], "data": ""}}),
        "extra.note",
    ),
    "bytes that torch never saved": (put("extra.note", value={"$torch_save": "gAKKCmz8nEb5IGqoUBku"}), "extra.note"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_object_is_a_named_error_and_changes_nothing(sound: Path, tmp_path: Path, name: str) -> None:
    change, named = CHANGES[name]
    root = Path(shutil.copytree(sound, tmp_path / "run", ignore=shutil.ignore_patterns(".ckptkit")))
    step = root / "step_00000001"
    body = json.loads((step / "objects.json").read_text())
    change(body["objects"])
    (step / "objects.json").write_text(json.dumps(body))
    reseal(step)
    state = made(5)
    before = all_of(state)
    expected = (CorruptCheckpointError, CheckpointMismatchError, LoadError)
    with CheckpointManager(root) as manager, pytest.raises(expected) as caught:
        manager.load(state)
    assert named in str(caught.value)
    assert same(all_of(state), before)


def test_the_unmodified_checkpoint_loads(sound: Path) -> None:
    """A control: the others fail only because of their changes."""
    with CheckpointManager(sound) as manager:
        state = made(5)
        assert manager.load(state) is not None
    assert same(all_of(state)[:2], all_of(made(1))[:2])


def test_random_state_is_set_as_a_whole_or_not_at_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    state = capture_rng()
    drawn = (random.random(), torch.rand(2).tolist())
    broken = {**state, "torch": torch.zeros(3)}
    before = random.getstate()
    with pytest.raises(CorruptCheckpointError, match="torch's generator"):
        restore_rng(broken)
    assert random.getstate() == before
    assert restore_rng(state) == []
    assert (random.random(), torch.rand(2).tolist()) == drawn
