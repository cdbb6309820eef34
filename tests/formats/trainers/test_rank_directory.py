"""Reads a directory with one torch.save file per rank from an unknown system."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit.catalog.entry import Role
from ckptkit.errors import IncompleteCheckpointError
from ckptkit.formats.detect import open_source


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


def test_pieces_of_a_state_are_not_taken_for_the_state_of_a_parameter_with_their_shape(tmp_path):
    """Only "b" is trained, and each rank has a half of its moment."""
    model = {"a": torch.ones(6), "b": torch.ones(12)}
    for rank in range(2):
        states = {"state": {0: {"exp_avg": torch.full((6,), float(rank))}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": model, "optimizer": states}, tmp_path / f"rank{rank}.pt")
    (entry,) = open_source(str(tmp_path)).catalog.by_role(Role.OPTIMIZER).values()
    assert (entry.fqn, entry.shape, len(entry.slices)) == ("b", (12,), 2)


def test_the_states_of_replicas_that_differ_a_little_are_those_of_rank_0(tmp_path):
    model = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    for rank in range(2):
        moments = {i: {"exp_avg": w + rank * 1e-6} for i, w in enumerate(model.values())}
        states = {"state": moments, "param_groups": [{"params": [0, 1]}]}
        torch.save({"model": model, "optimizer": states}, tmp_path / f"rank{rank}.pt")
    catalog = open_source(str(tmp_path)).catalog
    assert {entry.fqn for entry in catalog.by_role(Role.OPTIMIZER).values()} == {"a", "b"}
    assert all("differs between rank 0 and rank 1; rank 0's is used" in note for note in catalog.info.notes)
