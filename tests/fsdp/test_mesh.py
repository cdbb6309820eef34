"""Mesh sizes, and the meshes created from them."""

import socket

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, ParallelPlan, auto_shard_size, make_mesh
from ckptkit.fsdp.mesh import configured, plan_for
from tests.ranks import on_ranks


@given(*[st.integers(1, 4)] * 4, st.sampled_from(["replicate", "shard", None]))
def test_an_auto_size_is_the_world_size_divided_by_the_others(replicate, shard, cp, tp, open_size):
    world_size = replicate * shard * cp * tp
    sizes = {"replicate": replicate, "shard": shard, "cp": cp, "tp": tp}
    if open_size:
        sizes[open_size] = "auto"
    plan = ParallelPlan.resolve(world_size, **sizes)
    assert plan == ParallelPlan(replicate, shard, cp, tp)
    assert plan.world_size == world_size


@pytest.mark.parametrize(("world_size", "sizes", "numbers"), [
    (8, {"replicate": 3, "shard": 2}, ["replicate=3", "shard=2", "8", "6"]),
    (6, {"replicate": 4, "shard": "auto", "tp": 2}, ["replicate=4", "tp=2", "6", "8"]),
    (2, {"shard": 4}, ["shard=4", "2", "4"]),
    (4, {"replicate": "auto", "shard": "auto"}, ["replicate and shard are both 'auto'"]),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_all_numbers(world_size, sizes, numbers):
    with pytest.raises(UsageError) as caught:
        ParallelPlan.resolve(world_size, **sizes)
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize(("config", "dims"), [
    ({}, {"shard": 8}),
    ({"sharding_strategy": "NO_SHARD"}, {"replicate": 8, "shard": 1}),
    ({"sharding_strategy": "HYBRID_SHARD"}, {"replicate": 2, "shard": 4}),
    ({"sharding_strategy": "HYBRID_SHARD", "shard": 2}, {"replicate": 4, "shard": 2}),
    ({"sharding_strategy": "HYBRID_SHARD", "replicate": 2}, {"replicate": 2, "shard": 4}),
    ({"tp": 2}, {"shard": 4, "tp": 2}),
    ({"cp": 2}, {"shard": 8}),
    ({"cp": 2, "tp": 2}, {"shard": 4, "tp": 2}),
    ({"sharding_strategy": "HYBRID_SHARD", "shard": 2, "tp": 2}, {"replicate": 2, "shard": 2, "tp": 2}),
], ids=str)  # fmt: skip
def test_sharding_strategies_become_mesh_dimensions(config, dims, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    plan = plan_for(FSDPConfig(**config), 8)
    assert plan.dims == dims
    assert list(plan.dims) == list(dims)


def hybrid(hosts: list[str]) -> dict[str, int] | str:
    """Return the mesh dimensions on ranks that a launcher started which does not set LOCAL_WORLD_SIZE."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE")
        patch.setattr(socket, "gethostname", lambda: hosts[dist.get_rank()])
        try:
            return plan_for(FSDPConfig(sharding_strategy="HYBRID_SHARD"), 4).dims
        except UsageError as error:
            return str(error)


def test_hybrid_strategies_shard_inside_a_node_under_any_launcher(ranks):
    for hosts, dims in ((["a", "a", "b", "b"], {"replicate": 2, "shard": 2}), (["a"] * 4, {"shard": 4})):
        assert ranks.run(hybrid, 4, hosts) == [dims] * 4
    for hosts in (["a", "b", "a", "b"], ["a", "a", "a", "b"]):
        assert all("the ranks are on a, " in text for text in ranks.run(hybrid, 4, hosts))


def test_a_node_that_tp_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UsageError, match=r"a node has 3 ranks.*tp=2"):
        plan_for(FSDPConfig(sharding_strategy="HYBRID_SHARD", tp=2), 6)


@pytest.mark.parametrize(("numel", "training", "size"), [
    (9e9, False, 1), (10e9, False, 8), (79e9, False, 8), (80e9, False, -1), (1, True, -1), (1e12, True, -1),
])  # fmt: skip
def test_auto_shard_size_follows_the_number_of_parameters(numel, training, size):
    assert auto_shard_size(int(numel), training) == size


@pytest.mark.parametrize(("data_ranks", "shard"), [(4, "auto"), (8, "auto"), (12, "auto"), (16, 8)])
def test_if_the_auto_shard_size_does_not_divide_the_ranks_all_ranks_share_one_copy(data_ranks, shard):
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(20 * 10**9, device="meta"))
    options = {"data_ranks": data_ranks, "is_training": False, "shard_size": "auto", "reshard_after_forward": None}
    assert configured(FSDPConfig(), model, **options).shard == shard


@pytest.mark.parametrize(("plan", "dims", "groups"), [
    # the mesh of the data, and groups of adjacent ranks
    (ParallelPlan(shard=2, tp=2), {"shard": 2}, {"tp": [[0, 1], [2, 3]], "data": [[0, 2], [1, 3]]}),
    (ParallelPlan(replicate=2, shard=2), {"replicate": 2, "shard": 2}, {}),
    (ParallelPlan(shard=2, cp=2), {"shard": 4}, {"cp": [[0, 1], [2, 3]], "data": [[0, 1, 2, 3]]}),
], ids=["tp", "hsdp", "cp"])  # fmt: skip
@on_ranks(4)
def test_plans_become_meshes_with_adjacent_tp_and_cp_ranks(plan, dims, groups):
    mesh = make_mesh(plan, "cpu")
    assert dict(zip(mesh.data.mesh_dim_names, mesh.data.mesh.shape, strict=True)) == dims
    if plan.tp > 1:
        assert (tuple(mesh.root.mesh.shape), mesh.root.mesh_dim_names) == ((2, 2), ("shard", "tp"))
    for name, expected in groups.items():
        (own,) = [group for group in expected if dist.get_rank() in group]
        assert getattr(mesh, name).mesh.flatten().tolist() == own


@on_ranks(2)
def test_a_plan_for_another_world_is_refused_before_any_communication():
    with pytest.raises(UsageError, match="world size of 2"):
        make_mesh(ParallelPlan(shard=4), "cpu")
