"""A manager of some of the ranks, whose meshes name ranks by their numbers in the whole job."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import SaveError
from tests.ranks import on_ranks, run_ranks


def sharded(mine: torch.Tensor, mesh: DeviceMesh) -> torch.nn.Module:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(DTensor.from_local(mine.clone(), mesh, [Shard(0)], run_check=False))
    return model


def of_the_last_two(url: str, kind: str) -> bool:
    group = dist.new_group([1, 2])
    right = True
    if (rank := dist.get_rank()) > 0:
        mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor([1, 2]), mesh_dim_names=("shard",))
        mine = torch.arange(24.0).reshape(4, 6).chunk(2)[rank - 1]
        model = sharded(mine, mesh)
        for step in range(3):  # one manager after another, each with groups of its own
            with CheckpointManager(url, state_dict_type=kind, process_group=group, timeout_s=30) as manager:
                manager.save(step, TrainState(model=model, rng=False))
                model.w._local_tensor.zero_()
                manager.load(TrainState(model=model, rng=False))
        right = torch.equal(model.w._local_tensor, mine)
    dist.barrier()  # the ranks of the manager connect through rank 0's store
    return right


def test_the_last_two_of_three_ranks_save_and_load_what_they_shard_again_and_again(tmp_path, kind):
    assert run_ranks(of_the_last_two, 3, str(tmp_path), kind) == [True] * 3


@on_ranks(2)
def test_a_rank_that_holds_half_of_a_tensor_does_not_save_alone(tmp_path, kind):
    rank = dist.get_rank()
    mine = [dist.new_group([each]) for each in range(2)][rank]
    model = sharded(torch.ones(2, 6), init_device_mesh("cpu", (2,)))
    with CheckpointManager(tmp_path / str(rank), state_dict_type=kind, process_group=mine) as manager:
        with pytest.raises(SaveError) as caught:
            manager.save(1, TrainState(model=model, rng=False))
        assert manager.latest() is None
    assert all(text in str(caught.value) for text in ("model.w", "12 of 24 elements", "mesh save (process_group=)?"))


@on_ranks(4)
def test_the_ranks_of_one_replica_save_and_load_the_whole_model(tmp_path, kind):
    rank = dist.get_rank()
    group = [dist.new_group(each) for each in ([0, 1], [2, 3])][rank // 2]
    mesh, rows = init_device_mesh("cpu", (2, 2)), torch.arange(24.0).reshape(4, 6).chunk(2)[rank % 2]
    parts = [DTensor.from_local(rows + i, mesh, [Replicate(), Shard(0)], run_check=False) for i in range(4)]
    state = TrainState(model=torch.nn.ParameterList(parts), rng=False)
    with CheckpointManager(tmp_path / str(rank // 2), state_dict_type=kind, process_group=group) as manager:
        manager.save(1, state)
        for parameter in state.model:
            parameter._local_tensor.zero_()
        manager.load(state)
    assert all(torch.equal(p._local_tensor, rows + i) for i, p in enumerate(state.model))
