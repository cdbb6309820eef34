"""Megatron's `torch` checkpoints, with a directory per model-parallel rank."""

import argparse

import pytest
import torch

from ckptkit.catalog.entry import Role
from ckptkit.errors import IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.detect import open_source
from tests.formats.damages import lay


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
