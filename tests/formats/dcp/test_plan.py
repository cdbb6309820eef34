"""What a rank plans to write: names, and memory that matches its placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.errors import SaveError
from ckptkit.formats.dcp.plan import plan_sharded
from tests.ranks import on_ranks

State = dict[str, Any]


def test_ranks_agree_on_how_names_are_nested():
    nested = [{"a": {"b": torch.ones(2)}}, {"a.b": torch.ones(2)}, {"a": {"b": torch.ones(3)}}, {"a": {"b": 1}}]
    assert len({plan_sharded(one).digest for one in nested}) == len(nested)
    assert plan_sharded(nested[0]).digest == plan_sharded({"a": {"b": torch.zeros(2)}}).digest


@on_ranks(1)
def test_memory_that_does_not_fit_its_placement_is_refused_when_planning():
    mesh = init_device_mesh("cpu", (1,))
    for local, said in (
        (torch.ones(3, 2), r"w: this rank should hold \[4, 2\], found \[3, 2\]."),
        (torch.ones(4, 2, device="meta"), "meta device"),
        (torch.ones(4, 2).half(), "w: it is declared torch.float32, but its local part is torch.float16."),
    ):
        made = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        made._local_tensor = local
        with pytest.raises(SaveError, match=said):
            plan_sharded({"w": made})
