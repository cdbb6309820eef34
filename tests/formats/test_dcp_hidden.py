"""`DCPWriter` and tensors with hidden values: exact, or refused by name, with any planner."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptkit import DCPSavePlanner
from ckptkit.errors import SaveError
from tests.checkpoint.hidden import HIDDEN, Scaled, Tagged, scaled
from tests.formats.dcp_states import failure, load, save

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about prototype and deprecated tensors
PLANNERS = pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DCPSavePlanner])
# torch's own planner reads attributes that these lack, and fails before our writer sees them.
REFUSED_BY_TORCH = ("nested", "jagged", "lazy", "masked", "bits")


@PLANNERS
@pytest.mark.parametrize("name", sorted(HIDDEN.keys() - {"sparse", "csr", "quantized"}))
def test_state_that_no_load_can_restore_is_refused_by_name(tmp_path, name, planner):
    error = failure(save, tmp_path, {"w": torch.ones(3), "odd": HIDDEN[name][0]()}, planner())
    assert error is not None and not list(tmp_path.glob("*"))
    if planner is DCPSavePlanner or name not in REFUSED_BY_TORCH:
        assert isinstance(error, SaveError) and str(error).startswith("odd: ")


@PLANNERS
def test_a_wrapper_of_an_allowed_class_round_trips(tmp_path, planner):
    value, live = scaled(), scaled()
    with torch.serialization.safe_globals([Scaled]):
        save(tmp_path, {"odd": value}, planner())
        assert load(tmp_path, {"odd": live})["odd"] is live
    assert torch.equal(live.values, value.values)


@PLANNERS
def test_a_subclass_that_is_just_a_tensor_is_saved_as_its_memory(tmp_path, planner):
    value = torch.randn(4, 4).as_subclass(Tagged)
    save(tmp_path, {"odd": value}, planner())
    for reader in (tmp_path, dcp.FileSystemReader(tmp_path)):
        assert torch.equal(load(reader, {"odd": torch.zeros(4, 4)})["odd"], value.as_subclass(torch.Tensor))


def test_a_wrapper_that_torch_saved_is_refused_by_its_name(tmp_path):
    save(dcp.FileSystemWriter(tmp_path), {"w": torch.ones(3), "odd": scaled()})
    state = {"w": torch.zeros(3), "odd": scaled()}
    with pytest.raises(CheckpointException, match=r"'odd'.*hidden\.Scaled.*FileSystemReader"):
        load(tmp_path, state)
    assert state["w"].sum() == 0
