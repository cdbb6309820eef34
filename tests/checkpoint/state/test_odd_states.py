"""Optimizer states of unusual types come back with their types, or are refused by name."""

from __future__ import annotations

import collections
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import TrainState
from ckptkit.errors import SaveError
from tests.checkpoint.states import KINDS, bits, load_all, save


def square() -> torch.Tensor:
    return torch.arange(400.0).reshape(20, 20)


def with_attributes(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def described(value: Any) -> Any:
    """Return the types and the values of everything in a state."""
    if isinstance(value, torch.Tensor):
        attributes = {name: described(item) for name, item in vars(value).items()}
        return type(value), value.requires_grad, attributes, bits(value.detach())
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return type(value), factory, [(key, described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(item) for item in value]
    return type(value), value


KEPT: dict[str, Callable[[], dict[str, Any]]] = {
    "defaultdict": lambda: defaultdict(list, a=square(), b=[1]),
    "empty defaultdict": lambda: defaultdict(int),
    "OrderedDict": lambda: OrderedDict(b=square(), a=2),
    "nested defaultdicts": lambda: {"a": defaultdict(dict, {1: defaultdict(None, x=square())})},
    "Parameter": lambda: {"a": nn.Parameter(square()), "b": nn.Parameter(torch.ones(()), requires_grad=False)},
    "column-major Parameter": lambda: {"a": nn.Parameter(square().T)},
    "leaf": lambda: {"a": square().requires_grad_(), "b": torch.ones(3, requires_grad=True)},
    "nested leaf": lambda: {"a": [square().requires_grad_(), nn.Parameter(square())]},
    "attributes": lambda: {"a": with_attributes(square(), layer=3, names=("x", None))},
    "attributes of all kinds": lambda: {
        "a": with_attributes(nn.Parameter(square()), tag="x"),
        "b": [with_attributes(torch.ones(3).requires_grad_(), tag="y")],
    },
}


def holding(state: Any) -> TrainState:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state is not None:
        optimizer.state[model.weight] = state
    return TrainState(model=model, optimizer=optimizer, rng=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live", [True, False], ids=["live", "fresh"])
@pytest.mark.parametrize("name", KEPT)
def test_a_state_comes_back_with_its_types(tmp_path: Path, name: str, live: bool, kind: str) -> None:
    source = holding(KEPT[name]())
    again = holding(KEPT[name]() if live else None)
    load_all(save(tmp_path, source, state_dict_type=kind), again)
    assert described(again.optimizer.state[again.model.weight]) == described(
        source.optimizer.state[source.model.weight]
    )


def test_a_live_state_that_requires_gradients_is_replaced_by_one_that_does_not(tmp_path: Path) -> None:
    source, live = holding({"a": square()}), holding({"a": square().requires_grad_()})
    load_all(save(tmp_path, source), live)
    assert not live.optimizer.state[live.model.weight]["a"].requires_grad


class Named(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (Named(a=1), "the state of weight is a Named; only dicts can be saved, and of their subclasses Ordered"),
        (collections.Counter(a=1), "the state of weight is a Counter; only"),
        (collections.UserDict(a=1), "the state of weight is a UserDict; only"),
        ([1], "the state of weight is a list; only"),
        (defaultdict(lambda: 1), r"the state of weight: a defaultdict with the factory <function"),
        ({"a": defaultdict(Named)}, r"optimizer\.values\.weight\.a: a defaultdict with the factory <class"),
        ({"a": with_attributes(square(), other=[square()])}, "'other' contains tensors or replaces one of torch's"),
        ({"a": with_attributes(square(), mean=3)}, "'mean' contains tensors or replaces one of torch's"),
        ({"a": with_attributes(square(), owner=Named)}, "optimizer.state.weight.a.owner: a value of type"),
    ],
)
def test_a_state_that_would_lose_its_type_is_refused_by_name(tmp_path: Path, state: Any, said: str) -> None:
    with pytest.raises(SaveError, match=said):
        save(tmp_path, holding(state))
    assert not list(tmp_path.rglob("step_*"))
