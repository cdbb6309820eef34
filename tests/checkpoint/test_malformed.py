"""Malformed objects whose digests match: one named error, and nothing changes."""

import functools
import operator
import random
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import TrainState
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, LoadError
from tests.checkpoint.states import WithExtraState, check_misfit, save
from tests.hostile.records import edit_json, reseal


def made(start: int) -> TrainState:
    torch.manual_seed(start)
    random.seed(start)
    np.random.seed(start)
    model = torch.nn.Sequential(WithExtraState(3, 4), torch.nn.Linear(4, 1))
    model[0].kept = {"calls": 3}
    lr = torch.tensor(0.1)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "lr": lr}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, extra={"note": {"a": 1}}, step=start)


def rng() -> Any:
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("sound"), made(1))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda objects: operator.setitem(functools.reduce(operator.getitem, path[:-1], objects), path[-1], value)


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    return lambda objects: operator.delitem(functools.reduce(operator.getitem, path[:-1], objects), path[-1])


def state_of(tree: Any) -> Any:
    return {"0.weight": {"exp_avg": tree}}


def with_attribute(name: str) -> Any:
    return {"$attributes": [{name: 1}, {"$ref": "x"}]}


GROUP = ("optimizer", "param_groups", 0)
CONTAINERS = ("optimizer", "containers")
ODD = {"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAAAAAAAAA="}}
NEGATIVE = {"$tensor": {"dtype": "float32", "shape": [-1, 0], "data": ""}}
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
    "the kind of a state is a list": (put("optimizer", "kinds", value=state_of([1])), "kinds"),
    "kinds of a parameter are a number": (put("optimizer", "kinds", value={"0.weight": 1}), "kinds"),
    "the kind of a state is a tuple": (put("optimizer", "kinds", value=state_of({"$tuple": []})), "kinds"),
    "an attribute is one of torch's": (put("optimizer", "kinds", value=state_of(with_attribute("data"))), "attributes"),
    "an attribute is private": (put("optimizer", "kinds", value=state_of(with_attribute("__class__"))), "attributes"),
    "a factory is a function": (put(*CONTAINERS, value={"0.weight": {"$defaultdict": ["eval", []]}}), "eval"),
    "a container is not empty": (put(*CONTAINERS, value={"0.weight": {"a": 1}}), "containers"),
    "a container is a number": (put(*CONTAINERS, value={"0.weight": 3}), "containers"),
    "a view is a name": (put("optimizer", "views", value=[["0.weight"]]), "views"),
    "a view has no state": (put("optimizer", "views", value=[[["0.weight"]]]), "views"),
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
    "an empty tensor of negative size": (put("extra.note", value=NEGATIVE), "extra.note"),
    "bytes that torch never saved": (put("extra.note", value={"$torch_save": "gAKKCmz8nEb5IGqoUBku"}), "extra.note"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_object_is_a_named_error_and_changes_nothing(sound, tmp_path, name):
    change, named = CHANGES[name]
    shutil.copytree(f"{sound}/step_00000001", tmp_path / "step_00000001")
    edit_json(tmp_path / "step_00000001/objects.json", lambda body: change(body["objects"]))
    reseal(tmp_path / "step_00000001")
    state = made(5)
    before = rng()
    check_misfit(tmp_path, state, named, error=(CorruptCheckpointError, CheckpointMismatchError, LoadError))
    assert (rng(), state.step) == (before, 5)
