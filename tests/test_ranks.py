"""The pool of ranks gives each task the state of a fresh process."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import on_ranks


def _sum_of_doubled(groups_before: int) -> float:
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    doubled = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]) * 2
    return float(doubled.full_tensor().sum())


def test_a_mesh_is_not_confused_with_an_equal_one_of_the_previous_task(ranks):
    for groups_before in (5, 0):
        assert ranks.run(_sum_of_doubled, 4, groups_before) == [32.0] * 4


@pytest.mark.parametrize("turn", ["patched", "undone"])
@on_ranks(1)
def test_what_a_test_patches_on_a_rank_is_undone(turn, monkeypatch):
    assert not hasattr(math, "patched")
    monkeypatch.setattr(math, "patched", turn, raising=False)
