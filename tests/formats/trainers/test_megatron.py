"""Additional metadata that megatron-core writes into a DCP."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from ckptkit.catalog.entry import Role
from ckptkit.formats.detect import open_source

WEIGHT = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture
def saved(tmp_path):
    """A torch_dist checkpoint whose `.metadata` has the plans of all ranks, as megatron-core writes it."""
    state = {
        WEIGHT: torch.randn(3, 4, 5),
        f"optimizer.state.exp_avg.{WEIGHT}": torch.randn(3, 4, 5),
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_3": "amax",
    }
    folder = tmp_path / "iter_0000010"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = None
    metadata.all_local_plans = [create_default_local_save_plan(state, is_coordinator=True)]
    metadata.mcore_data = {WEIGHT: {"nd_reformulated_orig_global_shape": (3, 4, 5)}}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def test_plans_in_megatrons_metadata_are_accepted(saved):
    assert b"SavePlan" in (saved / ".metadata").read_bytes()
    catalog = open_source(str(saved)).catalog
    assert catalog.info.format == "megatron" and catalog.info.step == 10
    assert list(catalog.by_role(Role.MODEL)) == [WEIGHT]
    assert catalog.tensors[f"optimizer.state.exp_avg.{WEIGHT}"].fqn == WEIGHT
    assert list(catalog.objects) == ["decoder.layers.mlp.linear_fc1._extra_state/shard_0_3"]


def test_buckets_of_the_distributed_optimizer_are_not_weights(tmp_path):
    """`dp_reshardable`, the default of --use-distributed-optimizer. A chain of optimizers adds a prefix."""
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    buckets = [f"{bucket}.exp_avg", f"{bucket}.param", f"chained_1.{bucket}.exp_avg_sq"]
    dcp.save({WEIGHT: torch.randn(3, 4), **{name: torch.randn(12) for name in buckets}}, checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    catalog = open_source(str(tmp_path)).catalog
    assert list(catalog.by_role(Role.MODEL)) == [WEIGHT]
    assert {(entry.fqn, entry.state) for entry in catalog.by_role(Role.OPTIMIZER).values()} == {("", "")}
    assert any("--dist-ckpt-optim-fully-reshardable" in note for note in catalog.info.notes)
