"""A manager of some of the ranks, whose meshes name ranks by their numbers in the whole job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from tests.ranks import on_ranks


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@on_ranks(3)
def test_the_last_two_of_three_ranks_save_and_load_what_they_shard(tmp_path: Path, kind: str) -> None:
    group = dist.new_group([1, 2])
    if (rank := dist.get_rank()) == 0:
        dist.barrier()  # the other ranks connect through this rank's store
        return
    mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor([1, 2]), mesh_dim_names=("shard",))
    mine = torch.arange(24.0).reshape(4, 6).chunk(2)[rank - 1]
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(DTensor.from_local(mine.clone(), mesh, [Shard(0)], run_check=False))
    with CheckpointManager(tmp_path, state_dict_type=kind, process_group=group, timeout_s=30) as manager:
        manager.save(1, TrainState(model=model, rng=False))
        model.w._local_tensor.zero_()
        manager.load(TrainState(model=model, rng=False))
    dist.barrier()
    assert torch.equal(model.w._local_tensor, mine)
