"""A save refuses, by name and before it writes, what a load of the same state could not give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import CheckpointMismatchError, CkptkitError, SaveError
from tests.checkpoint.hidden import HIDDEN, Scaled, Tagged, scaled

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, that some of its tensors are new or go away
TYPES = ("sharded", "full", "local")


class Net(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)
        if isinstance(value, nn.Parameter):
            self.odd = value
        else:
            self.register_buffer("odd", value)


def in_model(value: Any) -> TrainState:
    return TrainState(model=Net(value), rng=False)


def in_optimizer(value: Any) -> TrainState:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["exp_avg"] = value
    return TrainState(model=model, optimizer=optimizer, rng=False)


def in_extra(value: Any) -> TrainState:
    return TrainState(model=nn.Linear(4, 4), extra={"ema": {"deep": [value]}}, rng=False)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_model_with_a_tensor_that_hides_its_values_is_not_saved(tmp_path: Path, name: str, kind: str) -> None:
    make, said = HIDDEN[name]
    with (
        CheckpointManager(tmp_path / "run", state_dict_type=kind) as manager,
        pytest.raises(SaveError, match=rf"(?s)model\.odd .*{said}"),
    ):
        manager.save(1, in_model(make()))
    assert not list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_nor_in_the_background(tmp_path: Path, mode: str) -> None:
    with (
        CheckpointManager(tmp_path / "run", async_mode=mode) as manager,
        pytest.raises(SaveError, match=r"model\.odd .*Scaled"),
    ):
        manager.save_async(1, in_model(scaled())).result()
    assert not list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize("place", [in_optimizer, in_extra])
@pytest.mark.parametrize("name", sorted(HIDDEN.keys() - {"sparse", "csr", "quantized"}))
def test_nor_a_state_of_an_optimizer_nor_a_value(tmp_path: Path, name: str, place: Any) -> None:
    make, said = HIDDEN[name]
    where = "exp_avg" if place is in_optimizer else r"extra\.ema\.deep"
    with CheckpointManager(tmp_path) as manager, pytest.raises(SaveError, match=rf"(?s){where}.*{said}"):
        manager.save(1, place(make()))


def test_each_of_several_is_named(tmp_path: Path) -> None:
    state = TrainState(model={"a": Net(scaled()), "b": Net(torch.eye(3).to_sparse())}, rng=False)
    state.model["a"].register_buffer("other", scaled())  # type: ignore[index]
    with CheckpointManager(tmp_path) as manager, pytest.raises(SaveError, match=r"model_a\.odd(?s:.*)model_a\.other"):
        manager.save(1, state)


@pytest.mark.parametrize("kind", TYPES)
def test_a_subclass_that_is_just_a_tensor_comes_back_into_the_live_one(tmp_path: Path, kind: str) -> None:
    value = torch.randn(4, 4).as_subclass(Tagged)
    value.note = "kept"
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, in_model(value))
        live = torch.zeros(4, 4).as_subclass(Tagged)
        live.note = "its own"
        state = in_model(live)
        manager.load(state)
    assert state.model.odd is live and live.note == "its own"  # type: ignore[union-attr]
    assert torch.equal(live, value)


def test_a_subclass_as_a_value_is_refused_for_its_class_would_be_lost(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(SaveError, match=r"extra\.ema.*plain torch\.Tensor"):
        manager.save(1, in_extra(torch.ones(3).as_subclass(Tagged)))


@pytest.mark.parametrize("kind", ["full", "local"])
def test_a_dtype_that_safetensors_lacks_is_refused_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CkptkitError, match=r"model\.odd.*complex32.*SHARDED"):
            manager.save(1, in_model(torch.zeros(3, dtype=torch.complex32)))
        assert sorted(tmp_path.rglob("*")) == before


def test_a_load_into_a_tensor_that_hides_its_values_is_refused_by_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, in_model(torch.ones(4, 4)))
        state = in_model(scaled())
        with pytest.raises(CheckpointMismatchError, match=r"odd here is a .*Scaled"):
            manager.load(state, strict=False)


def test_state_that_is_of_no_parameter_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    state = in_optimizer(torch.ones(4, 4))
    state.optimizer.state[7] = {"a": 1}
    with CheckpointManager(tmp_path) as manager, pytest.raises(SaveError, match="it has state for 7, which is in none"):
        manager.save(1, state)


class Offloaded(torch.optim.SGD):
    """Keeps state of its own beside what every optimizer has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "offloaded": [torch.ones(3)]}


def test_an_optimizer_that_saves_more_than_states_and_groups_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model=model, optimizer=Offloaded(model.parameters(), lr=0.1))
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(SaveError, match="Offloaded has 'offloaded' in addition"),
    ):
        manager.save(1, state)


def one_rank_refuses(url: str, kind: str) -> tuple[str, str]:
    rank = dist.get_rank()
    state = in_model(scaled() if rank == 1 else torch.ones(4, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = in_model(nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]), requires_grad=False))
    sharded.model.odd._local_tensor = Scaled(torch.ones(2, 4, dtype=torch.int8), torch.tensor(0.5))  # type: ignore
    found = []
    with CheckpointManager(url, state_dict_type=kind) as manager:
        for item in (state, sharded):
            try:
                manager.save(1, item)
            except CkptkitError as error:
                found.append(str(error))
    return found[0], found[1]


@pytest.mark.parametrize("kind", TYPES)
def test_what_one_rank_refuses_no_rank_saves(ranks: Any, tmp_path: Path, kind: str) -> None:
    for alone, sharded in ranks.run(one_rank_refuses, 2, str(tmp_path), kind):
        assert "rank 1" in alone and "model.odd is a tests.checkpoint.hidden.Scaled" in alone
        assert "model.odd is sharded, and its local part is a tests.checkpoint.hidden.Scaled" in sharded
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize("kind", TYPES)
def test_a_table_beside_a_parameter_of_as_many_dimensions_comes_back(tmp_path: Path, kind: str) -> None:
    """8-bit optimizers keep a table of 256 values beside each parameter, a flat one too."""

    def made(table: torch.Tensor | None) -> TrainState:
        model = nn.Module()
        model.flat = nn.Parameter(torch.ones(4096))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if table is not None:
            optimizer.state[model.flat].update(qmap1=table, absmax1=torch.ones(16), step=1)
        return TrainState(model=model, optimizer=optimizer, rng=False)

    table, state = torch.randn(256), made(None)
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, made(table))
        manager.load(state)
    found = state.optimizer.state[state.model.flat]  # type: ignore[union-attr]
    assert torch.equal(found["qmap1"], table) and found["absmax1"].shape == (16,) and found["step"] == 1
