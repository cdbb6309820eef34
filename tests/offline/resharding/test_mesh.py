"""Which rank holds what: the rule of FSDP2 and DTensor, compared with torch."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit.checkpoint.state.local_part import layout_of
from ckptkit.errors import UsageError
from ckptkit.formats.pickles.tensors import PlacementRecord
from ckptkit.formats.trainers.shards import local_parts, mesh_coordinate
from ckptkit.offline.resharding.mesh import Cut, TargetMesh, TPPlan, cut_of_placements
from tests.ranks import on_ranks

SIZES = st.integers(1, 4)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), SIZES, SIZES, SIZES, st.sampled_from([None, 0, 1]),
       st.sampled_from([None, 0, 1]), st.integers(0, 7))  # fmt: skip
def test_boxes_cover_every_element_once_and_belong_to_the_right_ranks(
    shape, replicate, shard, tp, fsdp_dim, tp_dim, turn
):
    mesh, cut = TargetMesh(replicate, shard, tp), Cut(fsdp_dim, tp_dim)
    boxes = mesh.boxes(shape, cut, turn=turn)
    covered = np.zeros(shape, int)
    for rank, offsets, sizes in zip(boxes.ranks, boxes.offsets, boxes.sizes, strict=True):
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        covered[box] += 1
        assert math.prod(sizes) or not math.prod(shape)
        if math.prod(shape):
            assert (tuple(offsets), tuple(sizes)) == _held(mesh, cut, shape, int(rank))
    assert (covered == 1).all()


def _held(mesh: TargetMesh, cut: Cut, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shard of a rank by its placements, as trainers/shards.py computes it for tensors that torch saved."""
    coordinate = mesh_coordinate(rank, (mesh.replicate, mesh.shard, mesh.tp))
    assert coordinate is not None
    replica, shard, tp = coordinate
    # FSDP shards what tensor parallelism left: equal to plain shards, tensor parallelism first.
    placements = [PlacementRecord("replicate"), _shard(cut.tp), _shard(cut.fsdp)]
    (part,) = local_parts(shape, (mesh.replicate, mesh.tp, mesh.shard), (replica, tp, shard), placements)
    return part.box.offsets, part.box.sizes


def _shard(dim: int | None) -> PlacementRecord:
    return PlacementRecord("replicate") if dim is None else PlacementRecord("shard", dim)


SHAPES = {"hsdp": [(8, 6), (7, 6), (2, 4), (1, 4)], "row": [(8, 6), (7, 6), (1, 4)], "col": [(8, 6), (2, 4), (6, 4)]}


@pytest.mark.parametrize(("style", "shape"), [(style, shape) for style, shapes in SHAPES.items() for shape in shapes])
@on_ranks(4)
def test_boxes_and_placements_equal_those_of_fsdp2(shape, style):
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    outer = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    outer.load_state_dict({"0.weight": whole})
    if style == "hsdp":
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(outer, both["tp"], {"0": ColwiseParallel() if style == "col" else RowwiseParallel()})
        device_mesh = both["shard"]
    weight, rank = fully_shard(outer, mesh=device_mesh)[0].weight, dist.get_rank()
    mesh = TargetMesh(2, 2, 1) if style == "hsdp" else TargetMesh(1, 2, 2)
    cut = {"hsdp": Cut(0), "col": Cut(0, 0), "row": Cut(0, 1)}[style]
    placement, layout = mesh.placement(cut), layout_of(weight)
    assert placement is not None
    assert (list(layout.mesh_shape), layout.texts()) == (mesh.describe(placement[0])["shape"], placement[1])
    boxes, local = mesh.boxes(shape, cut), weight.to_local()
    stores = rank % 2 if style == "hsdp" else rank  # the first replica stores for both
    mine = np.flatnonzero(boxes.ranks == stores)
    assert bool(len(mine)) == bool(local.numel())
    for row in mine[:1]:
        box = tuple(slice(o, o + n) for o, n in zip(boxes.offsets[row], boxes.sizes[row], strict=True))
        assert torch.equal(whole[box], local)


@pytest.mark.parametrize(("text", "sizes"), [
    (None, (1, 8, 1)), ("tp=2", (1, 4, 2)), ("replicate=2,shard=2,tp=2", (2, 2, 2)),
    ("dp_replicate=2,dp_shard=4", (2, 4, 1)), ({"tp": 4}, (1, 2, 4)),
])  # fmt: skip
def test_ranks_not_named_in_a_mesh_become_shards(text, sizes):
    mesh = TargetMesh.parse(text, world_size=8)
    assert (mesh.replicate, mesh.shard, mesh.tp) == sizes
    named = TargetMesh.parse("replicate=1,fsdp=4", world_size=4)  # a named dimension of size one exists
    assert named.describe() == {"shape": [1, 4], "names": ["replicate", "fsdp"], "ranks": [0, 1, 2, 3]}
    assert named.placement(Cut(0)) == (("replicate", "shard"), ("R", "S(0)"))


@pytest.mark.parametrize("text", ["shard=3", "pp=2", "tp=0", "tp=x", "tp=2,tp=2", "tp=3", "tp=-1", "shard"])
def test_a_mesh_that_does_not_fit_is_refused(text):
    with pytest.raises(UsageError):
        TargetMesh.parse(text, world_size=8)


@pytest.mark.parametrize(("names", "texts", "cut"), [
    (("replicate", "shard"), ("R", "S(0)"), Cut(0)), (("shard", "tp"), ("SS(0,2)", "S(0)"), Cut(0, 0)),
    (("shard", "tp"), ("S(0)", "R"), Cut(0, None, ("tp",))), (("dim0", "dim1"), ("S(0)", "S(1)"), Cut(0, 1)),
    (("dim0",), ("S(1)",), Cut(1)), (("tp",), ("S(0)",), Cut(None, 0)),
])  # fmt: skip
def test_placements_determine_the_sharded_dimensions(names, texts, cut):
    assert cut_of_placements(names, texts) == cut


def test_the_tp_plan_of_a_model_family_splits_outputs_and_inputs():
    names = [f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "norm")]
    plan = TPPlan.of_config({"model_type": "llama"}, names)
    assert plan is not None
    assert [plan.dim(name, (4, 4)) for name in names] == [0, 1, 1, None]
    assert TPPlan.of_config({"model_type": "bert"}, names) is None
    assert TPPlan.of_config({"model_type": "llama"}, ["wq"]) is None


def test_an_invalid_tp_plan_is_refused(tmp_path):
    for text in ("[]", "{}", '{"a": "0"}', '{"a": -1}', "{"):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(UsageError):
            TPPlan.of(str(tmp_path / "plan.json"))
    with pytest.raises(UsageError, match="dimension 1"):
        TPPlan.of({"*": 1}).dim("bias", (4,))
