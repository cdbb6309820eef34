"""Optimizer states of unusual types come back with their types, or are refused by name."""

import collections
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from ckptkit import TrainState
from tests.checkpoint.states import KINDS, bits, check_refused, load_all, optimized, save
from tests.ranks import on_ranks


def square() -> torch.Tensor:
    return torch.arange(400.0).reshape(20, 20)


def with_attributes(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def described(value: Any) -> Any:
    """Return the types and the values of everything in a state."""
    if isinstance(value, torch.Tensor):
        attributes = {name: described(item) for name, item in vars(value).items() if not name.startswith("_")}
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
    "OrderedDict": lambda: OrderedDict(c=1, b=square(), a=2),
    "nested defaultdicts": lambda: {"a": defaultdict(dict, {1: defaultdict(None, x=square())})},
    "Parameter": lambda: {"a": nn.Parameter(square()), "b": nn.Parameter(torch.ones(()), requires_grad=False)},
    "column-major Parameter": lambda: {"a": nn.Parameter(square().T)},
    "leaf": lambda: {"a": square().requires_grad_(), "b": torch.ones(3, requires_grad=True)},
    "nested leaf": lambda: {"a": [square().requires_grad_(), nn.Parameter(square())]},
    "attributes": lambda: {"a": with_attributes(square(), layer=3, axes=("x", None))},
    "attributes of all kinds": lambda: {
        "a": with_attributes(nn.Parameter(square()), tag="x"),
        "b": [with_attributes(torch.ones(3).requires_grad_(), tag="y")],
    },
}


def holding(state: Any) -> TrainState:
    made = optimized(nn.Linear(20, 20))
    if state is not None:
        made.optimizer.state[made.model.weight] = state
    return made


@pytest.mark.parametrize("live", [True, False], ids=["live", "fresh"])
@pytest.mark.parametrize("name", KEPT)
def test_a_state_comes_back_with_its_types(tmp_path, name, live, kind):
    source = holding(KEPT[name]())
    again = holding(KEPT[name]() if live else None)
    load_all(save(tmp_path, source, state_dict_type=kind), again)
    found, expected = (described(state.optimizer.state[state.model.weight]) for state in (again, source))
    assert found == expected


def test_a_live_state_that_requires_gradients_is_replaced_by_one_that_does_not(tmp_path):
    source, live = holding({"a": square()}), holding({"a": square().requires_grad_()})
    load_all(save(tmp_path, source), live)
    assert not live.optimizer.state[live.model.weight]["a"].requires_grad


class Named(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(("state", "said"), [
    (Named(a=1), "the state of weight is a Named; only a dict, an Ordered"),
    (collections.Counter(a=1), "the state of weight is a Counter; only"),
    (collections.UserDict(a=1), "the state of weight is a UserDict; only"),
    ([1], "the state of weight is a list; only"),
    ({"a": collections.deque([1])}, r"optimizer\.values\.weight\.a: a value of type collections.deque cannot be saved"),
    (defaultdict(lambda: 1), r"the state of weight: a defaultdict with the factory <function"),
    ({"a": defaultdict(Named)}, r"optimizer\.values\.weight\.a: a defaultdict with the factory <class"),
    ({"a": with_attributes(square(), other=[square()])}, "'other' contains tensors or replaces one of torch's"),
    ({"a": with_attributes(square(), mean=3)}, "'mean' contains tensors or replaces one of torch's"),
    ({"a": with_attributes(square(), owner=Named)}, "optimizer.state.weight.a.owner: a value of type"),
])  # fmt: skip
def test_a_state_that_would_lose_its_type_is_refused_by_name(tmp_path, state, said):
    check_refused(tmp_path, holding(state), said)


# --- sharded parameters


def like(parameter: Any, local: Any = None) -> Any:
    """Return a DTensor that is placed like a parameter, with random values or with this local part."""
    local = torch.randn(parameter.to_local().shape) if local is None else local
    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **whole)


def one(parameter: Any) -> Any:
    return DTensor.from_local(torch.tensor(2.5), parameter.device_mesh, [Replicate()], run_check=False)


def same_on(rank: int, optimizer: Any, weight: Any) -> None:
    first = like(weight)
    shared = like(weight, first.to_local()) if dist.get_rank() == rank % dist.get_world_size() else like(weight)
    optimizer.state[weight].update(a=first, b=shared)


def on_the_last_rank(optimizer: Any, weight: Any) -> None:
    """States that the first rank does not have."""
    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.state[weight].update(plain=torch.ones(3), columns=torch.randn(5, 7).T, count=3)
    optimizer.param_groups[0]["d"] = float(dist.get_rank())


SHARDED: dict[str, Callable[[Any, Any], Any]] = {
    "on the last rank": on_the_last_rank,
    "of no parameter": lambda optimizer, weight: optimizer.state.update(
        all={"moments": [like(weight), one(weight)], "count": 1}, one=like(weight)
    ),
    "in groups": lambda optimizer, weight: optimizer.param_groups[0].update(
        scale=one(weight), moments=[torch.ones(3), like(weight)]
    ),
    "of each rank, without other states": lambda optimizer, weight: (
        optimizer.state.update(all={"seen": torch.full((300,), float(dist.get_rank()))}),
        optimizer.param_groups[0].update(d=float(dist.get_rank())),
    ),
    "attributes": lambda optimizer, weight: optimizer.state[weight].update(
        a=with_attributes(like(weight), tag="x"), b=[with_attributes(like(weight), tag="y")]
    ),
    "Parameters": lambda optimizer, weight: optimizer.state[weight].update(
        a=nn.Parameter(like(weight)), b=like(weight).requires_grad_(), c=[like(weight).requires_grad_()]
    ),
    "one tensor on the first rank": functools.partial(same_on, 0),
    "one tensor on the last rank": functools.partial(same_on, -1),
}


def sharded(name: str, seed: int) -> TrainState:
    torch.manual_seed(seed)
    state = optimized(fully_shard(nn.Linear(20, 20)))
    torch.manual_seed(10 * seed + dist.get_rank())
    if name:
        SHARDED[name](state.optimizer, state.model.weight)
    return state


def in_order(state: TrainState) -> Any:
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    groups = [sorted((key, described(value)) for key, value in g.items() if key != "params")
              for g in state.optimizer.param_groups]  # fmt: skip
    return {str(names.get(key, key)): described(value) for key, value in state.optimizer.state.items()}, groups


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SHARDED)
@on_ranks("size")
def test_a_state_beside_sharded_parameters_comes_back_with_its_types(tmp_path, name, size):
    """Tests each type of checkpoint, with and without such states in the live optimizer."""
    for kind in KINDS:
        source = sharded(name, 1)
        save(tmp_path / kind, source, state_dict_type=kind)
        for start in (name, ""):
            live = sharded(start, 2)
            load_all(tmp_path / kind, live)
            assert in_order(live) == in_order(source), (kind, start)


@on_ranks(2)
def test_a_partial_sum_is_refused_by_name(tmp_path, kind):
    state = sharded("", 1)
    weight = state.model.weight
    state.optimizer.state[weight]["sum"] = DTensor.from_local(torch.ones(4), weight.device_mesh, [Partial()])
    check_refused(tmp_path, state, r"optimizer\.state\.weight\.sum", state_dict_type=kind)


@on_ranks(2)
def test_states_of_pipeline_stages_come_back_with_their_types(tmp_path, kind):
    def made(name: str) -> TrainState:
        state = optimized(nn.ModuleDict({f"stage{dist.get_rank()}": nn.Linear(20, 20), "tied": nn.Linear(2, 2)}))
        for parameter in state.model.parameters() if name else ():
            if parameter.shape == (20, 20):
                state.optimizer.state[parameter] = KEPT[name]()
        return state

    torch.manual_seed(0)
    for name in KEPT:
        source, live = made(name), made("")
        load_all(save(tmp_path / name, source, state_dict_type=kind), live)
        assert in_order(live) == in_order(source), name
