"""`dcp.load` into models that tie weights which are separate in the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.planners import DCPLoadPlanner
from ckptkit.formats.dcp.torch_api import DCPReader, DCPWriter
from tests.ranks import on_ranks

Tensors = dict[str, torch.Tensor]
MESSAGE = r"share memory.*different values(?s:.*)embed and head"


def apart(*, equal: bool = False) -> Tensors:
    embed = torch.arange(24.0).reshape(6, 4)
    return {"embed": embed, "head": embed.clone() if equal else embed + (embed > 20), "other": torch.ones(2)}


def tied() -> Tensors:
    one = torch.zeros(6, 4)
    return {"embed": one, "head": one, "other": torch.zeros(2)}


def viewed() -> Tensors:
    rows = torch.zeros(10, 4)
    return {"embed": rows[:6], "head": rows[4:], "other": torch.zeros(2)}


def save(url: Path, state: Tensors, ours: bool) -> None:
    dcp.save(state, storage_writer=DCPWriter(url) if ours else dcp.FileSystemWriter(url), no_dist=True)


def load(url: Path | str, state: Tensors, planned: bool, **options: Any) -> None:
    planner = DCPLoadPlanner() if planned else None
    dcp.load(state, storage_reader=DCPReader(url), planner=planner, **options)


@pytest.mark.parametrize("ours", [True, False], ids=["DCPWriter", "torch"])
@pytest.mark.parametrize("planned", [True, False], ids=["DCPLoadPlanner", "default"])
@pytest.mark.parametrize("make", [tied, viewed])
def test_different_weights_for_tensors_that_share_memory_are_refused(tmp_path, ours, planned, make):
    save(tmp_path / "ckpt", apart(), ours)
    state = make()
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "ckpt", state, planned, no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointMismatchError) and re.search(MESSAGE, str(error))
    assert not any(tensor.any() for tensor in state.values())


@pytest.mark.parametrize("ours", [True, False], ids=["DCPWriter", "torch"])
@pytest.mark.parametrize("planned", [True, False], ids=["DCPLoadPlanner", "default"])
def test_equal_weights_load_into_tensors_that_share_memory(tmp_path, ours, planned):
    save(tmp_path / "ckpt", apart(equal=True), ours)
    state = tied()
    load(tmp_path / "ckpt", state, planned, no_dist=True)
    assert torch.equal(state["head"], apart()["embed"])
    del (half := tied())["head"]  # the workaround that the error names
    load(tmp_path / "ckpt", half, planned, no_dist=True)


@pytest.mark.parametrize("ours", [True, False], ids=["DCPWriter", "torch"])
@pytest.mark.parametrize("planned", [True, False], ids=["DCPLoadPlanner", "default"])
@on_ranks(2)
def test_every_rank_refuses_a_difference_in_one_ranks_shard(tmp_path, ours, planned):
    if torch.distributed.get_rank() == 0:
        save(tmp_path / "ckpt", apart(), ours)
    torch.distributed.barrier()
    one = distribute_tensor(torch.zeros(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    state: Tensors = {"embed": one, "head": one, "other": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=MESSAGE) as caught:
        load(tmp_path / "ckpt", state, planned)
    assert not one.to_local().any() and not state["other"].any() and sorted(caught.value.failures) == [0, 1]
