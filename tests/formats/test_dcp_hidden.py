"""`DCPWriter` and tensors with hidden values: exact, or refused by name, with any planner."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptkit import DCPReader, DCPSavePlanner, DCPWriter
from ckptkit.errors import SaveError
from tests.checkpoint.hidden import HIDDEN, Scaled, Tagged, scaled

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about prototype and deprecated tensors
PLANNERS = [dcp.DefaultSavePlanner, DCPSavePlanner]
# torch's own planner reads attributes that these lack, and fails before our writer sees them.
REFUSED_BY_TORCH = ("nested", "jagged", "lazy", "masked", "bits")


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", sorted(HIDDEN.keys() - {"sparse", "csr", "quantized"}))
def test_state_that_no_load_can_restore_is_refused_by_name(tmp_path, name, planner):
    state = {"w": torch.ones(3), "odd": HIDDEN[name][0]()}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=DCPWriter(tmp_path), planner=planner(), no_dist=True)
    if planner is DCPSavePlanner or name not in REFUSED_BY_TORCH:
        error = caught.value.failures[0][0]
        assert isinstance(error, SaveError) and str(error).startswith("odd: ")
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_wrapper_of_an_allowed_class_round_trips(tmp_path, planner):
    value, live = scaled(), scaled()
    with torch.serialization.safe_globals([Scaled]):
        dcp.save({"odd": value}, storage_writer=DCPWriter(tmp_path), planner=planner(), no_dist=True)
        state = {"odd": live}
        dcp.load(state, storage_reader=DCPReader(tmp_path), no_dist=True)
    assert state["odd"] is live and torch.equal(live.values, value.values)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_subclass_that_is_just_a_tensor_is_saved_as_its_memory(tmp_path, planner):
    value = torch.randn(4, 4).as_subclass(Tagged)
    dcp.save({"odd": value}, storage_writer=DCPWriter(tmp_path), planner=planner(), no_dist=True)
    for reader in (DCPReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        state = {"odd": torch.zeros(4, 4)}
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state["odd"], value.as_subclass(torch.Tensor))


def test_a_wrapper_that_torch_saved_is_refused_by_its_name(tmp_path):
    dcp.save({"w": torch.ones(3), "odd": scaled()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(3), "odd": scaled()}
    with pytest.raises(CheckpointException, match=r"'odd'.*hidden\.Scaled.*FileSystemReader"):
        dcp.load(state, storage_reader=DCPReader(tmp_path), no_dist=True)
    assert state["w"].sum() == 0
