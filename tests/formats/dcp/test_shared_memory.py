"""`dcp.load` into models that tie weights which are separate in the checkpoint."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import DCPLoadPlanner, DCPWriter
from ckptkit.errors import CheckpointMismatchError
from tests.formats.dcp_states import failure, load, save
from tests.ranks import on_ranks

Tensors = dict[str, torch.Tensor]
WRITERS = pytest.mark.parametrize("writer", [DCPWriter, dcp.FileSystemWriter])
PLANNERS = pytest.mark.parametrize("planner", [DCPLoadPlanner, dcp.DefaultLoadPlanner])
MESSAGE = r"share memory.*different values(?s:.*)embed and head"


def apart(*, equal: bool = False) -> Tensors:
    embed = torch.arange(24.0).reshape(6, 4)
    return {"embed": embed, "head": embed.clone() if equal else embed + (embed > 20), "other": torch.ones(2)}


def tied(first: int = 0) -> Tensors:
    """Return a state whose `head` shares memory with `embed` from this row on."""
    rows = torch.zeros(6 + first, 4)
    return {"embed": rows[:6], "head": rows[first:], "other": torch.zeros(2)}


@WRITERS
@PLANNERS
@pytest.mark.parametrize("first", [0, 4])
def test_different_weights_for_tensors_that_share_memory_are_refused(tmp_path, writer, planner, first):
    save(writer(tmp_path), apart())
    state = tied(first)
    error = failure(load, tmp_path, state, planner())
    assert isinstance(error, CheckpointMismatchError) and re.search(MESSAGE, str(error))
    assert not any(tensor.any() for tensor in state.values())


@WRITERS
@PLANNERS
def test_equal_weights_load_into_tensors_that_share_memory(tmp_path, writer, planner):
    save(writer(tmp_path), apart(equal=True))
    assert torch.equal(load(tmp_path, tied(), planner())["head"], apart()["embed"])
    del (half := tied())["head"]  # the workaround that the error names
    load(tmp_path, half, planner())


@WRITERS
@PLANNERS
@on_ranks(2)
def test_every_rank_refuses_a_difference_in_one_ranks_shard(tmp_path, writer, planner):
    if torch.distributed.get_rank() == 0:
        save(writer(tmp_path), apart(), no_dist=True)
    torch.distributed.barrier()
    one = distribute_tensor(torch.zeros(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    state: Tensors = {"embed": one, "head": one, "other": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=MESSAGE) as caught:
        load(tmp_path, state, planner())
    assert not one.to_local().any() and not state["other"].any() and sorted(caught.value.failures) == [0, 1]
