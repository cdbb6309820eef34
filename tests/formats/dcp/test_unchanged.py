"""A plan that is taken over from the save before describes the state as it is now, whatever was done to its tensors."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptkit.errors import SaveError
from ckptkit.formats.dcp import unchanged
from ckptkit.formats.dcp.plan import ShardedPlan, plan_sharded
from ckptkit.formats.dcp.unchanged import Flattened, flat_values

State = dict[str, Any]


def state() -> State:
    model = {
        "w": torch.nn.Parameter(torch.randn(4, 4)),
        "b": torch.randn(3),
        "z": torch.randn(3, dtype=torch.complex64),
    }
    return {"model": model, "optimizer": {"param_groups": [{"lr": 0.1, "params": ["w"]}], "step": torch.tensor(1.0)}}


def swap(s: State) -> None:
    s["model"]["w"].data = torch.randn(4, 4)


def bits(s: State) -> None:
    s["model"]["b"].data = s["model"]["b"].data.view(torch.int32)


def turn(s: State) -> None:
    s["model"]["w"].data.t_()
    s["model"]["w"].detach().t_()


def shrink(s: State) -> None:
    s["model"]["b"].resize_(2)


def elsewhere(s: State) -> None:
    s["model"]["b"].set_(torch.randn(3).untyped_storage(), 0, (3,))


def another(s: State) -> None:
    s["model"]["b"] = torch.randn(3)


def wider(s: State) -> None:
    s["model"]["b"] = torch.randn(3).double()


def sparse(s: State) -> None:
    s["model"]["b"] = torch.eye(3).to_sparse()


def an_object(s: State) -> None:
    s["model"]["b"] = [1, 2]


def a_setting(s: State) -> None:
    s["optimizer"]["param_groups"][0]["lr"] = 0.2


def order(s: State) -> None:
    s["model"]["w"] = s["model"].pop("w")


def more(s: State) -> None:
    s["model"]["c"] = torch.randn(2)


def values(s: State) -> None:
    with torch.no_grad():
        s["model"]["w"].add_(1)


def conjugate(s: State) -> None:
    s["model"]["z"].data = s["model"]["z"].data.conj()


CHANGES = [
    swap,
    conjugate,
    bits,
    turn,
    shrink,
    elsewhere,
    another,
    wider,
    sparse,
    an_object,
    a_setting,
    order,
    more,
    values,
]


def described(plan: ShardedPlan) -> Any:
    names: list[Any] = [(plan.keys[item.key], item.offsets, item.sizes) for item in plan.slices]
    memory = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in plan.tensors]
    names.append([t.is_conj() for t in plan.tensors])
    return names, memory, plan.objects, plan.records, plan.nbytes, plan.digest, plan.table


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_changed_the_plan_is_the_one_that_a_first_save_would_make(change: Callable[[State], None]) -> None:
    made = state()
    first = plan_sharded(made)
    change(made)
    assert described(plan_sharded(made, previous=first)) == described(plan_sharded(made))


@pytest.mark.parametrize("change", [values, swap, another, a_setting])
def test_of_the_same_structure_a_plan_is_taken_over(change: Callable[[State], None]) -> None:
    made = state()
    plan = plan_sharded(made)
    change(made)
    assert plan_sharded(made, previous=plan).reused


def test_tensors_that_move_at_each_save_are_looked_at_anew_and_not_kept() -> None:
    made: State = {f"t{i}": torch.full((3,), float(i)) for i in range(60)}
    plan = plan_sharded(made)
    for moving in (("t3", "t7"), ("t3", "t7"), ("t7", "t9"), tuple(made), ("t1",)):
        gone = [weakref.ref(made[name]) for name in moving]
        made.update({name: torch.randn(3) for name in moving})
        plan = plan_sharded(made, previous=plan)
        assert plan.reused
        assert described(plan) == described(plan_sharded(made))
        assert [ref() for ref in gone] == [None] * len(gone)


def test_how_names_are_nested_is_part_of_what_ranks_agree_on() -> None:
    nested = [{"a": {"b": torch.ones(2)}}, {"a.b": torch.ones(2)}, {"a": {"b": torch.ones(3)}}, {"a": {"b": 1}}]
    assert len({plan_sharded(one).digest for one in nested}) == len(nested)
    assert plan_sharded(nested[0]).digest == plan_sharded({"a": {"b": torch.zeros(2)}}).digest


def test_memory_that_does_not_fit_its_placement_is_refused_on_the_spot(ranks: Any) -> None:
    dtypes = "w: it says that it is torch.float32, this rank holds torch.float16."
    shapes = "w: this rank holds [3, 2], its placement says [4, 2]."
    assert ranks.run(misfits, 1)[0] == [shapes, "meta", dtypes, dtypes]


def misfits() -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    found = []
    for local in (torch.ones(3, 2), torch.ones(4, 2, device="meta")):
        made = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        made._local_tensor = local
        try:
            plan_sharded({"w": made})
        except SaveError as error:
            found.append("meta" if "meta device" in str(error) else str(error))
    made = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    plan = plan_sharded({"w": made})
    made._local_tensor.data = torch.ones(4, 2).half()
    for previous in (None, plan):
        with pytest.raises(SaveError) as caught:
            plan_sharded({"w": made}, previous=previous)
        found.append(str(caught.value))
    return found


def dtensors() -> list[Any]:
    mesh = init_device_mesh("cpu", (1,))
    made = distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)])
    plan = plan_sharded({"w": made})
    found = [plan.places.moved({"w": made})]
    before = made._local_tensor
    made._local_tensor = torch.randn(4, 2)
    found.append(plan.places.moved({"w": made}))
    again = plan_sharded({"w": made}, previous=plan)
    found.append(again.tensors[0].data_ptr() == made._local_tensor.data_ptr() and again.reused)
    made._local_tensor, spec = before, made._spec
    made._spec = DTensor.from_local(before, mesh, [Replicate()])._spec
    found.append(plan_sharded({"w": made}, previous=plan).reused)
    made._spec, made._local_tensor = spec, torch.randn(3, 2)
    try:
        plan_sharded({"w": made}, previous=plan)
    except SaveError:
        found.append("refused")
    return found


def test_a_dtensor_that_got_other_memory_or_placements_is_looked_at_anew(ranks: Any) -> None:
    assert ranks.run(dtensors, 1)[0] == [[], [0], True, False, "refused"]


def exchanged(made: DTensor) -> None:
    made._local_tensor.data = torch.randn(4, 2)


def otherwise(made: DTensor) -> None:
    made._local_tensor.data = torch.randn(2, 4).t()


def set_elsewhere(made: DTensor) -> None:
    made._local_tensor.set_(torch.randn(20).untyped_storage(), 3, (4, 2))


def replaced(made: DTensor) -> None:
    made._local_tensor = torch.randn(4, 2)


def same_spec(made: DTensor) -> None:
    made._spec = copy.copy(made._spec)


def below_a_dtensor() -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    wrong = []
    for change in (exchanged, otherwise, set_elsewhere, replaced, same_spec):
        for copied in (False, True):
            made = {name: distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]) for name in "vw"}
            plan = plan_sharded(made)
            change(made["w"])
            again = plan_sharded(made, previous=plan, copied=copied)
            same = all(torch.equal(t, made[name]._local_tensor) for name, t in zip("vw", again.tensors, strict=True))
            if not (same and again.reused and described(again) == described(plan_sharded(made))):
                wrong.append(f"{change.__name__} {copied}")
            again.places.confirm()
    return wrong


def test_memory_that_was_exchanged_below_a_dtensor_is_what_the_plan_has(ranks: Any) -> None:
    assert ranks.run(below_a_dtensor, 1)[0] == []


def cut_in_place() -> list[Any]:
    mesh = init_device_mesh("cpu", (1,))
    made = {name: distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]) for name in "vw"}
    made["w"]._spec = copy.copy(made["w"]._spec)  # torch's own caches have the other
    places = plan_sharded(made).places
    made["w"]._spec.placements = (Shard(1),)
    found: list[Any] = [places.moved(made), plan_sharded(made, previous=plan_sharded(made)).reused]
    try:
        places.confirm()
    except SaveError as error:
        found.append(str(error).split(":")[0])
    return found


def test_placements_that_were_changed_in_place_are_noticed_at_once_or_before_a_copy_is_used(ranks: Any) -> None:
    assert ranks.run(cut_in_place, 1)[0] == [[1], True, "w"]


def off_the_host() -> list[Any]:
    mesh = init_device_mesh("cpu", (1,))
    made = {name: distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]) for name in "vw"}
    plan = plan_sharded(made)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(unchanged, "_is_cpu", lambda tensor: tensor is not made["w"]._local_tensor)
        return [plan.places.moved(made, copied=copied) for copied in (False, True)]


def test_a_dtensor_whose_memory_went_to_a_device_is_looked_at_anew(ranks: Any) -> None:
    assert ranks.run(off_the_host, 1)[0] == [[1], [1]]


def two_of_one_memory() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(1024, 1024)
    made = {
        "cut": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "whole": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
    }
    for each in made.values():
        each._local_tensor = local
    plan = plan_sharded(made, rank=dist.get_rank(), world_size=2)
    local.data = torch.ones(1024, 1024)
    again = plan_sharded(made, rank=dist.get_rank(), world_size=2, previous=plan, copied=True)
    return [bool(tensor.eq(1).all()) for tensor in again.tensors]


def test_memory_of_two_dtensors_is_looked_at_for_each(ranks: Any) -> None:
    assert ranks.run(two_of_one_memory, 2) == [[True] * 2] * 2


def views() -> list[bool]:
    """Of a large replica each of two ranks writes a part: a view, which its memory leaves behind."""
    mesh = init_device_mesh("cpu", (2,))
    made = {"w": distribute_tensor(torch.zeros(1024, 1024), mesh, [Replicate()], src_data_rank=None)}
    plan = plan_sharded(made, rank=dist.get_rank(), world_size=2)
    made["w"]._local_tensor.data = torch.ones(1024, 1024)
    again = plan_sharded(made, rank=dist.get_rank(), world_size=2, previous=plan, copied=True)
    return [plan.tensors[0].shape == (512, 1024), again.reused, bool(again.tensors[0].eq(1).all())]


def test_memory_that_was_exchanged_below_views_of_it_is_what_the_plan_has(ranks: Any) -> None:
    assert ranks.run(views, 2) == [[True] * 3] * 2


@pytest.mark.parametrize(
    "nested",
    [
        {"a": {"b": 1, 2: [1, 2]}, "c": [{"d": torch.ones(1)}, 3], "e": [[torch.ones(1)], [4]], "f": [[1], 2], "g": ()},
        {"a": [], "b": {}, "c": [[{}]], "d": (torch.ones(1), 2), 3: None},
    ],
)
def test_names_are_those_that_torch_gives(nested: State) -> None:
    flat, paths = flatten_state_dict(nested)
    found = Flattened.of(nested)
    assert found is not None
    assert list(found.values) == list(flat)
    assert all(value is found.values[name] for name, value in flat.items())
    assert found.paths == list(paths.values())


def test_two_values_of_one_name_are_left_to_torch() -> None:
    assert flat_values({"a": {"b": 1}, "a.b": 2}) is None
