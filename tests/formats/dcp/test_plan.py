"""What a rank plans to write: names, keys that only some ranks have, and memory that matches its placement."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.plan import plan_sharded
from ckptkit.storage.local import LocalStore
from tests.checkpoint.states import module_of
from tests.ranks import on_ranks


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


@on_ranks(2)
def test_a_key_that_appears_on_one_rank_is_saved_by_the_next_save(tmp_path):
    """Only rank 1 has changed, but no rank may hang."""
    rank, own, new = dist.get_rank(), 2, {}
    with CheckpointManager(tmp_path) as manager:
        for step in range(4):
            if rank == 1 and step:
                own = 3
                new = {f"new{n}": torch.full((4,), float(step)) for n in range(40 if step == 2 else 0)}
            made = {"all": torch.arange(10.0) + step, f"own{rank}": torch.full((own,), float(step)), **new}
            manager.save(step, TrainState(model=module_of(made)))
            found = module_of({name: torch.zeros_like(value) for name, value in made.items()})
            manager.load(TrainState(model=found), step)
            assert all(torch.equal(found.state_dict()[name], value) for name, value in made.items())


@on_ranks(4)
def test_names_are_sent_by_only_one_rank(tmp_path):
    def gathered(value):
        found = [None] * 4
        dist.all_gather_object(found, value)
        return found

    plan = plan_sharded(
        {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(500)}, rank=dist.get_rank(), world_size=4
    )
    part = plan.settle(gathered(plan.signature), gathered).write(LocalStore(tmp_path), sync=False)
    first, *others = gathered(len(pickle.dumps(part)))
    assert max(others) < first / 2


@pytest.mark.parametrize("staged", [[], [torch.zeros(3)]])
def test_staged_copies_of_other_tensors_are_refused(tmp_path, staged):
    with pytest.raises(SaveError, match="staged"):
        plan_sharded({"w": torch.ones(1000)}).write(LocalStore(tmp_path), tensors=staged)
