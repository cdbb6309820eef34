"""Optimizer states that are views of one memory are restored as such, or the report names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from ckptkit import TrainState, reshard
from tests.checkpoint.states import bits, load, load_all, optimized, save
from tests.ranks import on_ranks

SAID = "shared memory when they were saved, but no longer do"
Fill = Callable[[torch.optim.Optimizer, nn.Linear], None]


def made(fill: Fill | None, factor: float = 1.0) -> TrainState:
    """Return a state whose optimizer has the states that `fill` adds, all multiplied by `factor`."""
    state = optimized(nn.Linear(20, 20))
    state.model.register_buffer("mean", torch.zeros(400))
    if fill is not None:
        fill(state.optimizer, state.model)
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors(state.optimizer)}
        for storage in memory.values():
            torch.empty(0).set_(storage).mul_(factor)
    return state


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors in states, their lists and dicts, and groups."""
    tree = [list(optimizer.state.values()), [{**group, "params": None} for group in optimizer.param_groups]]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def places(state: TrainState) -> list[Any]:
    """Return the number of each tensor's memory, and its place in there."""
    numbers: dict[int, int] = {}
    return [
        (numbers.setdefault(t.untyped_storage().data_ptr(), len(numbers)), t.storage_offset(), t.stride())
        for t in tensors(state.optimizer)
    ]


def buffer(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def overlapping(optimizer: Any, model: nn.Linear) -> None:
    shared = buffer(600)
    optimizer.state[model.weight].update(a=shared[:400].view(20, 20), b=shared[200:].view(20, 20))


def one_flat(optimizer: Any, model: nn.Linear) -> None:
    flat = buffer(420)
    optimizer.state[model.weight]["moment"] = flat[:400].view(20, 20)
    optimizer.state[model.bias]["moment"] = flat[400:]


def equal(optimizer: Any, model: nn.Linear) -> None:
    shared = buffer(400).view(20, 20)
    optimizer.state[model.weight].update(a=shared, b=shared.view(20, 20), c=shared)
    optimizer.state[model.bias]["c"] = shared


def in_a_list(optimizer: Any, model: nn.Linear) -> None:
    shared = buffer(400).view(20, 20)
    optimizer.state[model.weight].update(a=shared, b=[shared, shared[:2]])


def of_no_parameter(optimizer: Any, model: nn.Linear) -> None:
    flat = buffer(420)
    optimizer.state["all"] = {"flat": flat}
    optimizer.state[model.weight]["moment"] = flat[:400].view(20, 20)


def in_a_group(optimizer: Any, model: nn.Linear) -> None:
    flat = buffer(400)
    optimizer.param_groups[0]["flat"] = flat
    optimizer.state[model.weight]["moment"] = flat.view(20, 20)


def of_the_weight(optimizer: Any, model: nn.Linear) -> None:
    optimizer.state[model.weight]["slow"] = model.weight.detach()


def of_a_buffer(optimizer: Any, model: nn.Linear) -> None:
    model.mean = buffer(400)
    optimizer.state[model.weight]["mean"] = model.mean


def of_other_shapes(optimizer: Any, model: nn.Linear) -> None:
    shared = buffer(600)
    optimizer.state[model.weight].update(a=shared[:500:2], b=shared[1:500:2], c=shared[500:501], d=shared[300:320])
    optimizer.state[model.weight]["e"] = shared[400:].view(20, 10).T


def apart(optimizer: Any, model: nn.Linear) -> None:
    """States with the names of the others, each in its own memory and with its own values."""
    for number, name in enumerate(("a", "b", "c", "moment", "slow")):
        optimizer.state[model.weight][name] = torch.full((20, 20), float(number))
    optimizer.state[model.bias]["moment"] = torch.full((20,), 5.0)
    optimizer.param_groups[0]["flat"] = torch.full((400,), 6.0)


FILLED = (overlapping, one_flat, in_a_group, of_the_weight, of_a_buffer, of_other_shapes)


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["", "atomic"])
@pytest.mark.parametrize(("fill", "there"), [*((fill, fill) for fill in FILLED), (equal, equal), (equal, None)])
def test_states_that_share_memory_share_it_after_a_load_and_are_filled_in_place(tmp_path, fill, there, kind, options):
    source, live = made(fill, 3), made(there)
    before = [tensor.data_ptr() for tensor in tensors(live.optimizer)]
    report = load_all(save(tmp_path, source, state_dict_type=kind), live, **options)
    assert bits(live) == bits(source)
    assert places(live) == places(source)
    assert SAID not in str(report.notes)
    if fill is equal:  # states that are one tensor are one again
        of_weight, of_bias = (live.optimizer.state[parameter] for parameter in live.model.parameters())
        assert of_weight["a"] is of_weight["c"] is of_bias["c"]
    else:
        assert [tensor.data_ptr() for tensor in tensors(live.optimizer)] == before


@pytest.mark.parametrize(("fill", "there", "names"), [
    (overlapping, None, "weight.a, weight.b"),
    (one_flat, None, "weight.moment, bias.moment"),
    (in_a_list, None, "weight.a, weight.b.0, weight.b.1"),
    (in_a_list, in_a_list, "weight.a, weight.b.0, weight.b.1"),  # states in lists and dicts are not filled in place
    (of_no_parameter, None, "weight.moment, shared.all.flat"),
    (of_no_parameter, of_no_parameter, "weight.moment, shared.all.flat"),
    (in_a_group, None, "weight.moment, param_groups.0.flat"),
    (of_the_weight, None, "weight, weight.slow"),
    (of_a_buffer, None, "weight.mean, mean"),
])  # fmt: skip
def test_states_that_shared_memory_and_do_not_after_the_load_are_reported(tmp_path, fill, there, names, caplog):
    source, live = made(fill, 3), made(there)
    report = load_all(save(tmp_path, source), live)
    assert bits(live) == bits(source)
    assert next(note for note in report.notes if SAID in note).startswith(f"optimizer: {names} {SAID}")
    assert f"optimizer: {names} {SAID}" in caplog.text


@pytest.mark.parametrize("options", [{}, {"atomic": True}], ids=["", "atomic"])
@pytest.mark.parametrize("fill", [overlapping, one_flat, equal, of_the_weight, in_a_group])
def test_states_that_overlap_here_but_not_in_the_checkpoint_get_their_own_memory(tmp_path, fill, options):
    source, live = made(apart), made(fill)
    wanted = bits(source)
    load_all(save(tmp_path, source), live, **options)
    assert bits(live) == wanted
    for tensor in (found := tensors(live.optimizer)):
        others = [live.model, [other for other in found if other is not tensor]]
        before = bits(others)
        tensor.add_(1)
        assert bits(others) == before


def test_a_state_that_is_a_weight_does_not_change_it_if_the_weight_is_not_loaded(tmp_path):
    source, live = made(of_the_weight), made(of_the_weight)
    weight = live.model.weight.detach().clone()
    load(save(tmp_path, source), live, model="skip")
    assert torch.equal(live.model.weight, weight)
    assert torch.equal(live.optimizer.state[live.model.weight]["slow"], source.model.weight)


def test_reshard_keeps_the_names_of_states_that_shared_memory(tmp_path):
    save(tmp_path / "run", made(overlapping))
    reshard(str(tmp_path / "run/step_00000001"), str(tmp_path / "resharded"), world_size=2)
    live = made(None)
    report = load_all(tmp_path / "run", live, str(tmp_path / "resharded"))
    assert f"weight.a, weight.b {SAID}" in str(report.notes)


def flat_shards(seed: int) -> tuple[TrainState, torch.Tensor]:
    """Return a state whose plain shards of moments are views of one buffer, and the buffer."""
    torch.manual_seed(seed)
    state = optimized(fully_shard(nn.Linear(20, 20)))
    sizes = [parameter.to_local().numel() for parameter in state.model.parameters()]
    flat = torch.randn(sum(sizes))
    for parameter, part in zip(state.model.parameters(), flat.split(sizes), strict=True):
        state.optimizer.state[parameter]["moment"] = part.view(parameter.to_local().shape)
    return state, flat


@on_ranks(2)
def test_shards_that_are_views_of_one_buffer_are_filled_in_place(tmp_path, kind):
    (source, wanted), (live, flat) = flat_shards(1), flat_shards(2)
    report = load_all(save(tmp_path, source, state_dict_type=kind), live)
    assert torch.equal(flat, wanted)
    assert SAID not in str(report.notes)
