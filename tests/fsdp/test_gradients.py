"""One norm over gradients of all kinds."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ckptkit.errors import NonFiniteGradientError, UsageError
from ckptkit.fsdp import FSDPStrategy, MasterWeightOptimizer, clip_grad_norm, grad_norm
from ckptkit.fsdp.gradients import inspect_gradients
from tests.dtensors import local
from tests.fsdp import models
from tests.ranks import on_ranks

SHAPES = [(7, 3), (5,), (2, 2), (1, 6), (8, 4), (3,)]


def whole_gradients():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) * 10 for shape in SHAPES]


def parameters():
    """Return one parameter of each kind: 1-D, replicated and strided shards, plain, frozen, without a gradient."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    places = [
        (flat, [Shard(0)]),
        None,
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(1), Replicate()]),
        (flat, [Replicate()]),
    ]
    made = []
    for whole, place in zip(whole_gradients(), places, strict=True):
        gradient = distribute_tensor(whole, *place) if place else whole.clone()
        made.append(nn.Parameter(torch.zeros_like(gradient)))
        made[-1].grad = gradient
    made.append(nn.Parameter(torch.ones(3), requires_grad=False))
    made.append(nn.Parameter(distribute_tensor(torch.ones(9), flat, [Shard(0)])))  # no gradient
    return made


def expected_norm(p):
    return torch.cat([g.flatten() for g in whole_gradients()]).double().norm(p).item()


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@on_ranks(4)
def test_the_norm_of_any_mix_of_shards_equals_that_of_a_single_process(p):
    assert grad_norm(parameters(), p).item() == pytest.approx(expected_norm(p), rel=1e-6)


def whole(parameters):
    return [models.whole(parameter.grad) for parameter in parameters if parameter.grad is not None]


@on_ranks(4)
def test_clipping_scales_all_gradients_to_one_joint_norm():
    made = parameters()
    assert clip_grad_norm(made, 2.5).item() == pytest.approx(expected_norm(2), rel=1e-6)
    assert grad_norm(made).item() == pytest.approx(2.5, rel=1e-5)
    factor = 2.5 / (expected_norm(2) + 1e-6)
    for gradient, before in zip(whole(made), whole_gradients(), strict=True):
        assert torch.allclose(gradient, before * factor, rtol=1e-5)


@pytest.mark.parametrize("max_norm", [0, 0.0, None, 1e6])
@on_ranks(4)
def test_without_clipping_the_norm_is_returned_and_gradients_are_unchanged(max_norm):
    made = parameters()
    assert clip_grad_norm(made, max_norm).item() == pytest.approx(expected_norm(2), rel=1e-6)
    assert all(map(torch.equal, whole(made), whole_gradients()))


@on_ranks(2)
def test_partial_gradients_are_summed_first():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.full((4,), 1.0 + dist.get_rank()), mesh, [Partial()])
    assert grad_norm([parameter]).item() == pytest.approx(6.0)


@on_ranks(2)
def test_a_rank_without_gradients_takes_part_in_the_norm():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        parameter.grad = distribute_tensor(torch.tensor([3.0, 4.0, 0, 0]), mesh, [Shard(0)], src_data_rank=None)
    assert grad_norm([parameter]).item() == pytest.approx(5.0)


def test_low_precision_gradients_give_a_full_precision_norm():
    parameters = [nn.Parameter(torch.zeros(1001, dtype=torch.bfloat16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((1001,), 0.1, dtype=torch.bfloat16)
    one = float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert grad_norm(parameters).item() == pytest.approx(one * math.sqrt(3003), rel=1e-6)


def test_clipping_works_without_a_process_group_and_without_gradients():
    assert grad_norm([nn.Parameter(torch.ones(2))]).item() == 0.0
    assert grad_norm([], math.inf).item() == 0.0
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm(parameter, 1.0).item() == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0)


SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(("values", "call", "message"), [
    ([-1, math.nan, "1.0", True], lambda value: clip_grad_norm([], value), "max_norm"),
    ([-1, math.nan], lambda value: FSDPStrategy(max_norm=value), "max_norm"),
    ([-1, math.nan], lambda value: MasterWeightOptimizer(SGD, max_norm=value), "max_norm"),
    ([0, -math.inf, 0.5, math.nan, "max"], lambda value: grad_norm([], value), "1 <= p <= inf"),
    ([0, math.nan], lambda value: MasterWeightOptimizer(SGD, norm_type=value), "1 <= p <= inf"),
], ids=["clip_grad_norm", "strategy", "optimizer", "grad_norm", "norm of optimizer"])  # fmt: skip
def test_an_invalid_limit_or_norm_is_refused(values, call, message):
    for value in values:
        with pytest.raises(UsageError, match=message):
            call(value)


def test_clipping_raises_on_request_and_leaves_the_gradients():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.inf, 2.0])
    assert clip_grad_norm(parameter, 0.0).item() == math.inf
    with pytest.raises(NonFiniteGradientError, match="gradients is inf; not finite: parameter 0"):
        clip_grad_norm(parameter, 1.0, error_if_nonfinite=True)
    assert parameter.grad[1] == 2.0
    with pytest.raises(UsageError, match="error_if_nonfinite is 1, expected True or False"):
        clip_grad_norm(parameter, 1.0, error_if_nonfinite=1)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@on_ranks(4)
def test_a_bad_element_on_any_rank_stops_all_ranks(p):
    made = parameters()
    for index, rank in itertools.product(range(len(SHAPES)), range(4)):
        gradient = made[index].grad
        mine = local(gradient).view(-1)
        has_elements = torch.tensor(mine.numel() > 0)
        dist.broadcast(has_elements, rank)
        for value in (math.nan, math.inf, -math.inf):
            kept = mine[:1].clone()
            if dist.get_rank() == rank:
                mine[:1] = value  # an empty shard does not change
            report = inspect_gradients(made, norm_type=p)
            mine[:1] = kept
            assert report.finite is not bool(has_elements), (index, rank, value)
            if index in (0, 3) and has_elements:  # sharded over all ranks: one norm
                assert str(report.norm.item()) == str(abs(value))
