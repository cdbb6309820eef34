"""Megatron: additional metadata in a DCP, and `torch` checkpoints with a directory per model-parallel rank."""

import argparse
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.detect import open_source
from tests.formats.damages import lay

WEIGHT = "decoder.layers.mlp.linear_fc1.weight"


BACKEND = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})


def test_plans_in_megatrons_metadata_are_accepted(tmp_path):
    """megatron-core writes the plans of all ranks into `.metadata`."""
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
    (folder / ".metadata").write_bytes(plans := pickle.dumps(metadata))
    (folder / "metadata.json").write_text(BACKEND)
    catalog = open_source(str(folder)).catalog
    assert b"SavePlan" in plans and catalog.info.format == "megatron" and catalog.info.step == 10
    assert list(catalog.by_role(Role.MODEL)) == [WEIGHT]
    assert catalog.tensors[f"optimizer.state.exp_avg.{WEIGHT}"].fqn == WEIGHT
    assert list(catalog.objects) == ["decoder.layers.mlp.linear_fc1._extra_state/shard_0_3"]


def test_a_damaged_metadata_json_of_megatron_is_an_error(tmp_path):
    dcp.save({WEIGHT: torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(BACKEND[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"metadata\.json is damaged"):
        open_source(str(tmp_path))


def test_buckets_of_the_distributed_optimizer_are_not_weights(tmp_path):
    """`dp_reshardable`, the default of --use-distributed-optimizer. A chain of optimizers adds a prefix."""
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    buckets = [f"{bucket}.exp_avg", f"{bucket}.param", f"chained_1.{bucket}.exp_avg_sq"]
    dcp.save({WEIGHT: torch.randn(3, 4), **{name: torch.randn(12) for name in buckets}}, checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text(BACKEND)
    catalog = open_source(str(tmp_path)).catalog
    assert list(catalog.by_role(Role.MODEL)) == [WEIGHT]
    assert {(entry.fqn, entry.state) for entry in catalog.by_role(Role.OPTIMIZER).values()} == {("", "")}
    assert any("--dist-ckpt-optim-fully-reshardable" in note for note in catalog.info.notes)


# --- `torch` checkpoints


def _rank(name, **sizes):
    """Return the files of a rank that is in a model of these parallel sizes."""
    saved = {"args": argparse.Namespace(**sizes), "checkpoint_version": 3.0, "iteration": 7}
    saved["model"] = {"embedding.weight": torch.ones(3)}
    folder = f"iter_0000007/{name}"
    return {f"{folder}/model_optim_rng.pt": saved, f"{folder}/distrib_optim.pt": {0: {"param": torch.ones(3)}}}


def test_the_files_of_a_single_rank_are_read(tmp_path):
    lay(tmp_path, _rank("mp_rank_00", tensor_model_parallel_size=1))
    for url in (tmp_path, tmp_path / "iter_0000007" / "mp_rank_00"):
        catalog = open_source(str(url)).catalog
        assert [entry.fqn for entry in catalog.by_role(Role.MODEL).values()] == ["embedding.weight"]
        assert catalog.info.step == 7 and catalog.info.notes == ("not read: distrib_optim.pt.",)


@pytest.mark.parametrize(
    ("name", "size"),
    [("mp_rank_{:02d}", "tensor"), ("mp_rank_00_{:03d}", "pipeline"), ("mp_rank_00_000_{:03d}", "expert")],
)
def test_parts_of_several_ranks_are_refused_together_and_alone(tmp_path, name, size):
    for rank in range(2):
        lay(tmp_path, _rank(name.format(rank), **{f"{size}_model_parallel_size": 2}))
    with pytest.raises(UnsupportedFormatError, match=r"mp_rank_\w+ and 1 more: the model is split"):
        open_source(str(tmp_path))
    part = tmp_path / "iter_0000007" / name.format(1)
    for url in (part, part / "model_optim_rng.pt"):
        with pytest.raises(IncompleteCheckpointError, match=f"{size}_model_parallel_size is 2"):
            open_source(str(url))
