"""Reads a directory with one torch.save file per rank from an unknown system."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit.catalog.entry import Role
from ckptkit.errors import IncompleteCheckpointError
from ckptkit.formats.detect import open_source


def test_models_and_optimizers_are_found_under_any_usual_key_with_the_rest(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {"policy": model.state_dict(), "optimizer_state": optimizer.state_dict(), "net": {}, "iter": 3, "seen": 7}
    for rank in range(2):
        torch.save(saved, tmp_path / f"rank_{rank}.pt")
    catalog = open_source(str(tmp_path)).catalog
    assert catalog.info.format == "rank-files" and catalog.info.step == 3
    assert catalog.by_role(Role.MODEL).keys() == {"weight", "bias"} and len(catalog.by_role(Role.OPTIMIZER)) == 6
    assert catalog.objects["seen"].value == 7


@pytest.mark.parametrize("apart", [False, True])
def test_of_several_steps_the_latest_is_read_with_its_optimizer(tmp_path, apart):
    for step in (100, 300, 200):
        state = {"state": {0: {"exp_avg": torch.full((3,), float(step))}}, "param_groups": [{"params": [0]}]}
        model = {"w": torch.full((3,), float(step))}
        for rank in range(2):
            torch.save(model if apart else {"model": model}, tmp_path / f"model_step_{step}_rank_{rank}.pt")
            if apart and step != 200:
                torch.save(state, tmp_path / f"optim_step_{step}_rank_{rank}.pt")
    source = open_source(str(tmp_path))
    assert source.catalog.info.step == 300
    tensors = source.catalog.tensors
    assert {path for entry in tensors.values() for path in entry.slices.paths} == {
        f"{kind}_step_300_rank_0.pt" for kind in (("model", "optim") if apart else ("model",))
    }
    assert bool(source.catalog.by_role(Role.OPTIMIZER)) == apart


def test_ckpt_files_that_differ_only_in_the_rank_are_not_steps(tmp_path):
    for rank in range(2):
        torch.save({"model": {"w": torch.ones(3)}, "step": 100}, tmp_path / f"step_100_rank_{rank}.ckpt")
    source = open_source(str(tmp_path))
    assert source.catalog.info.format == "rank-files"
    assert source.catalog.tensors["model.w"].slices.paths == ["step_100_rank_0.ckpt"]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_latest_step_without_the_file_of_a_rank_is_refused(tmp_path, missing):
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    for step in (100, 200):
        for rank in range(2):
            part = DTensor.from_local(
                torch.ones(2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
            )
            torch.save({"model": {"w": part}}, tmp_path / f"step_{step}_rank_{rank}.pt")
    (tmp_path / f"step_200_rank_{missing}.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="step_200_rank_"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("ending", ["pt", "ckpt"])
@pytest.mark.parametrize(
    "names",
    [
        ["epoch_0_checkpoint_0", "epoch_0_checkpoint_500", "epoch_1_checkpoint_1000"],
        ["step_100_rank_0", "step_100_rank_1", "step_200"],
    ],
    ids=["numbers are steps", "ranks saved an older step"],
)
def test_the_file_of_the_latest_step_is_read_if_it_is_not_a_rank_file(names, ending, tmp_path):
    for name in names:
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / f"{name}.{ending}")
    assert open_source(str(tmp_path)).catalog.info.files.keys() == {f"{names[-1]}.{ending}"}


def test_a_file_whose_name_differs_from_others_in_a_number_other_than_the_step_is_no_rank_file(tmp_path):
    for name in ("model1_shard_0", "model2_shard_0", "model2_shard_1"):
        torch.save({"w": torch.ones(3)}, tmp_path / f"{name}.pt")
    assert open_source(str(tmp_path)).catalog.info.files.keys() == {"model2_shard_0.pt", "model2_shard_1.pt"}
