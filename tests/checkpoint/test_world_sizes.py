"""Saved and loaded on different numbers of ranks: weights, moments and masters are bitwise equal."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import PerRank, TrainState
from ckptkit.errors import CheckpointMismatchError, CkptkitError
from tests.checkpoint import jobs, odd

# (world size, layout). Uneven at 3 and 4: 14, 6, 2 and 1 rows, with empty shards. Also replicas and 2-D meshes.
PLACES = [(1, "plain"), (1, "1d"), (2, "1d"), (3, "1d"), (4, "1d"), (4, "hsdp"), (2, "tp"), (4, "tp")]
# Every configuration saves and loads at least once, and neighbours differ in both.
PAIRS = [(a, PLACES[(i + step) % len(PLACES)]) for step in (1, 3) for i, a in enumerate(PLACES)]


def save(url: str, kind: str, layout: str, precision: str) -> Any:
    job = jobs.make(layout, precision)
    # The same data on all ranks, so that tensor-parallel ranks and replicas agree.
    jobs.seed(5, 0)
    job.data.rank = 0
    job.train(2)
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(2, job.state())
    return jobs.everything(job)


def load(url: str, layout: str, precision: str) -> Any:
    job = jobs.make(layout, precision, start=7)
    with CheckpointManager(url) as manager:
        report = manager.load(job.state(), per_rank_on_resize="keep")
    assert report is not None
    assert not report.missing
    assert not report.unexpected
    return jobs.everything(job)


def check(ranks: Any, url: Path, kind: str, source: Any, target: Any, precision: str = "fp32") -> None:
    saved = ranks.run(save, source[0], str(url), kind, source[1], precision)[0]
    for loaded in ranks.run(load, target[0], str(url), target[1], precision):
        different = [key for key in saved if saved[key] != loaded.get(key)]
        assert not different
        assert set(saved) == set(loaded)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_sharded_checkpoint_loads_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, source: Any, target: Any
) -> None:
    check(ranks, tmp_path, "sharded", source, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [((4, "tp"), (3, "1d")), ((3, "1d"), (4, "hsdp")), ((1, "plain"), (4, "tp")), ((4, "hsdp"), (1, "plain"))],
)
def test_a_full_checkpoint_loads_on_any_number_of_ranks(ranks: Any, tmp_path: Path, source: Any, target: Any) -> None:
    check(ranks, tmp_path, "full", source, target)


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_masters_load_on_any_number_of_ranks(ranks: Any, tmp_path: Path, kind: str) -> None:
    check(ranks, tmp_path, kind, (3, "1d"), (4, "hsdp"), "master")


def load_refused(url: str, layout: str) -> str:
    job = jobs.make(layout, start=7)
    before = jobs.everything(job)
    with CheckpointManager(url) as manager, pytest.raises(CheckpointMismatchError) as caught:
        manager.load(job.state())
    assert jobs.everything(job) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "target", "command"),
    [
        ((2, "1d"), (3, "1d"), "--world-size 3 --type local"),
        ((4, "1d"), (4, "hsdp"), "--world-size 4 --mesh replicate=2,shard=2 --type local"),
    ],
)
def test_a_local_checkpoint_of_other_ranks_names_the_command_that_reshards_it(
    ranks: Any, tmp_path: Path, source: Any, target: Any, command: str
) -> None:
    ranks.run(save, source[0], str(tmp_path), "local", source[1], "fp32")
    (text,) = set(ranks.run(load_refused, target[0], str(tmp_path), target[1]))
    assert f"ckptkit reshard {tmp_path}/step_00000002 DST {command}" in text


def load_without_ckptkit(url: str, layout: str) -> Any:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    job = jobs.make(layout, start=7)
    job.train(1)  # so that torch's own template has a state for each parameter except the unused one
    job.model.unused.grad = None
    state = {
        "model": get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer),
    }
    dcp.load(state, checkpoint_id=url)
    set_model_state_dict(job.model, state["model"])
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    set_optimizer_state_dict(job.model, job.optimizer, state["optimizer"], options=StateDictOptions(strict=False))
    return jobs.everything(job)


@pytest.mark.parametrize("target", [(1, "1d"), (3, "1d"), (4, "tp")])
def test_plain_torch_loads_model_and_optimizer(ranks: Any, tmp_path: Path, target: Any) -> None:
    saved = ranks.run(save, 2, str(tmp_path), "sharded", "1d", "fp32")[0]
    for loaded in ranks.run(load_without_ckptkit, target[0], f"{tmp_path}/step_00000002", target[1]):
        skip = ("groups", "scheduler")
        assert not [key for key in saved if key not in skip and saved[key] != loaded.get(key)]


# --- per-rank state


class Sampler:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def save_own(url: str, differing: bool) -> Any:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    state = TrainState(dataloader=Sampler(10 + rank * differing), extra={"mine": PerRank(rank if differing else 0)})
    with CheckpointManager(url) as manager:
        manager.save(1, state)
    return torch.rand(3).tolist()


def load_own(url: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(77)
    state = TrainState(dataloader=Sampler(0), extra={"mine": PerRank(None)})
    try:
        with CheckpointManager(url) as manager:
            report = manager.load(state, **options)
    except CkptkitError as error:
        return type(error).__name__, str(error)
    assert report is not None
    return state.dataloader.position, state.extra["mine"].value, torch.rand(3).tolist(), report.skipped, report.notes


def test_each_rank_gets_its_own_state_back(ranks: Any, tmp_path: Path) -> None:
    drawn = ranks.run(save_own, 3, str(tmp_path), True)
    found = ranks.run(load_own, 3, str(tmp_path), {})
    assert [item[:3] for item in found] == [(10 + rank, rank, drawn[rank]) for rank in range(3)]


def test_differing_dataloader_state_is_refused_on_another_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_own, 3, str(tmp_path), True)
    for kind, text in ranks.run(load_own, 2, str(tmp_path), {}):
        assert kind == "CheckpointMismatchError"
        assert "dataloader has one state per rank, saved at world size 3; the world size is now 2" in text


def test_per_rank_state_equal_on_all_ranks_loads_on_any_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_own, 3, str(tmp_path), False)
    found = ranks.run(load_own, 2, str(tmp_path), {})
    assert [item[:2] for item in found] == [(10, 0), (10, 0)]
    for item in found:
        assert any("dataloader: all 3 ranks saved the same state" in note and "repeated" in note for note in item[4])
    (same, *_) = ranks.run(load_own, 3, str(tmp_path), {})
    assert not any("dataloader" in note for note in same[4])


def test_a_per_rank_function_is_also_called_for_equal_states(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_own, 3, str(tmp_path), False)
    found = ranks.run(load_own, 2, str(tmp_path), {"per_rank_on_resize": spread})
    assert [item[:2] for item in found] == [(3000, [0, 0, 0]), (3001, [0, 0, 0])]


def spread(states: Any, rank: int, world_size: int) -> Any:
    return {"position": sum(s["position"] for s in states) * 100 + rank} if isinstance(states[0], dict) else states


def test_a_per_rank_function_may_merge_the_states_of_several_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_own, 3, str(tmp_path), True)
    found = ranks.run(load_own, 2, str(tmp_path), {"per_rank_on_resize": spread})
    assert [item[:2] for item in found] == [(3300, [0, 1, 2]), (3301, [0, 1, 2])]


def test_ranks_are_reseeded_from_the_saved_state_if_their_number_changes(ranks: Any, tmp_path: Path) -> None:
    drawn = ranks.run(save_own, 3, str(tmp_path), True)
    options = {"per_rank_on_resize": "keep"}
    first, again = (ranks.run(load_own, 2, str(tmp_path), options) for _ in range(2))
    numbers = [tuple(item[2]) for item in first]
    assert numbers == [tuple(item[2]) for item in again]
    assert len({*numbers, *map(tuple, drawn)}) == 5
    assert "dataloader" in first[0][3]
    assert any("reseeded" in note for note in first[0][4])


@pytest.mark.parametrize(("policy", "refused"), [("keep", False), ("error", True)])
def test_rng_on_resize_keeps_or_refuses_random_state(ranks: Any, tmp_path: Path, policy: str, refused: bool) -> None:
    ranks.run(save_own, 3, str(tmp_path), True)
    for item in ranks.run(load_own, 2, str(tmp_path), {"per_rank_on_resize": "keep", "rng_on_resize": policy}):
        if refused:
            assert "rng: 1 incompatible" in item[1]
        else:
            torch.manual_seed(77)
            assert item[2] == torch.rand(3).tolist()
            assert "rng" in item[3]


def save_differing(url: str) -> list[str]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckptkit").addHandler(handler)
    with CheckpointManager(url) as manager:
        manager.save(1, TrainState(extra={"loss": float(dist.get_rank())}))
    logging.getLogger("ckptkit").removeHandler(handler)
    return seen


def test_a_warning_names_extra_state_that_differs_between_ranks(ranks: Any, tmp_path: Path) -> None:
    seen = ranks.run(save_differing, 2, str(tmp_path))[0]
    assert any("extra.loss differs between ranks" in line for line in seen)


def average_of(job: jobs.Job, factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() * factor for name, tensor in job.model.state_dict().items()}


def save_average(url: str, kind: str) -> dict[str, Any]:
    job = jobs.make("1d")
    average = average_of(job, 0.5)
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, TrainState(model=job.model, extra={"average": average}))
    return {name: jobs.whole(tensor) for name, tensor in average.items()}


def load_average(url: str) -> tuple[dict[str, Any], list[str]]:
    job = jobs.make("1d", start=3)
    state = TrainState(model=job.model, extra={"average": average_of(job, 2.0)})
    with CheckpointManager(url) as manager:
        manager.load(state, rng_on_resize="keep")
    back = state.extra["average"]
    alike = [name for name, live in job.model.state_dict().items() if type(live) is not type(back[name])]
    return {name: jobs.whole(tensor) for name, tensor in back.items()}, alike


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_an_averaged_copy_of_sharded_weights_is_restored_sharded(ranks: Any, tmp_path: Path, kind: str) -> None:
    saved = ranks.run(save_average, 2, str(tmp_path), kind)[0]
    assert ranks.run(load_average, 3, str(tmp_path)) == [(saved, [])] * 3


# --- a weight with fewer rows than tensor-parallel ranks


def narrow(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Linear(1, 7))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return model, optimizer


def local_numbers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return [t.to_local() for t in [*model.parameters(), *moments] if isinstance(t, DTensor)]


def narrow_round_trip(url: str, kind: str) -> tuple[int, bool]:
    saved, state = narrow(0)
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, TrainState(model=saved, optimizer=state))
    loaded, other = narrow(1)
    with CheckpointManager(url) as manager:
        manager.load(TrainState(model=loaded, optimizer=other))
    pairs = list(zip(local_numbers(saved, state), local_numbers(loaded, other), strict=True))
    return sum(not a.numel() for a, _ in pairs), all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_weight_with_fewer_rows_than_tp_ranks_is_restored(ranks: Any, tmp_path: Path, kind: str) -> None:
    found = ranks.run(narrow_round_trip, 4, str(tmp_path), kind)
    assert all(same for _, same in found)
    assert any(empty for empty, _ in found)


# --- the model of tests/checkpoint/odd.py


def save_odd(url: str, kind: str, layout: str, optimizers: str) -> tuple[dict[str, Any], list[float]]:
    model, made = odd.made(layout, optimizers, 0)
    odd.train(model, made, range(1))
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(2, TrainState(model=model, optimizer=made))
    return odd.numbers(model, made), odd.train(model, made, range(2, 3))


def load_odd(url: str, layout: str, optimizers: str) -> tuple[dict[str, Any], list[float]]:
    model, made = odd.made(layout, optimizers, 5)
    odd.train(model, made, range(9, 10))
    with CheckpointManager(url) as manager:
        report = manager.load(TrainState(model=model, optimizer=made))
    assert report is not None
    assert not (report.missing or report.unexpected)
    return odd.numbers(model, made), odd.train(model, made, range(2, 3))


@pytest.mark.parametrize(
    ("kind", "source", "target", "optimizers"),
    [
        ("sharded", (4, "hsdp-tp"), (3, "1d"), "master"),
        ("sharded", (1, "plain"), (4, "hsdp-tp"), "master"),
        ("sharded", (3, "1d"), (4, "hsdp"), "muon"),  # with tensor parallelism a step of torch's Muon takes seconds
        ("full", (4, "tp"), (4, "replicated"), "master"),
        ("full", (3, "1d"), (4, "hsdp"), "muon"),
        ("local", (4, "hsdp"), (4, "hsdp"), "muon"),
        ("local", (4, "hsdp-tp"), (4, "hsdp-tp"), "master"),
    ],
)
def test_an_odd_sized_model_loads_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, kind: str, source: Any, target: Any, optimizers: str
) -> None:
    saved, losses = ranks.run(save_odd, source[0], str(tmp_path), kind, source[1], optimizers, timeout=300)[0]
    for loaded, resumed in ranks.run(load_odd, target[0], str(tmp_path), target[1], optimizers, timeout=300):
        assert [key for key in saved if saved[key] != loaded.get(key)] == []
        assert set(saved) == set(loaded)
        assert resumed == losses or source != target  # another mesh sums in another order


class Factored(torch.optim.Optimizer):
    """Keeps a moment for each row and one for each column, placed like the parameter in the dimension they share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                for name, dim in (("row", 1), ("column", 0)):
                    moment = gradient.square().sum(dim, keepdim=True)
                    if isinstance(moment, DTensor):
                        whole = [Replicate() if p.is_partial() else p for p in moment.placements]
                        moment = moment.redistribute(placements=whole)
                    state[name] = moment + state.get(name, 0.0)
                parameter.add_(gradient / (state["row"] * state["column"] + 1.0), alpha=-group["lr"])


def factored(seed: int) -> tuple[torch.nn.Module, Factored]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 5, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, Factored(model.parameters())


def factored_steps(model: torch.nn.Module, optimizer: Factored, steps: range) -> None:
    for index in steps:
        model(torch.full((2, 6), float(index))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run_factored(url: str, kind: str) -> dict[str, Any]:
    model, optimizer = factored(0)
    factored_steps(model, optimizer, range(2))
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(2, TrainState(model=model, optimizer=optimizer))
    found = {name: jobs.whole(value) for name, value in optimizer.state[model.weight].items()}
    factored_steps(model, optimizer, range(2, 4))
    return {**found, "after": jobs.whole(model.weight)}


def resume_factored(url: str) -> dict[str, Any]:
    model, optimizer = factored(3)
    with CheckpointManager(url) as manager:
        manager.load(TrainState(model=model, optimizer=optimizer))
    found = {name: jobs.whole(value) for name, value in optimizer.state[model.weight].items()}
    factored_steps(model, optimizer, range(2, 4))
    return {**found, "after": jobs.whole(model.weight)}


@pytest.mark.parametrize(("kind", "size"), [("sharded", 2), ("full", 2), ("local", 2), ("sharded", 3)])
def test_optimizer_states_of_another_shape_are_restored_sharded(
    ranks: Any, tmp_path: Path, kind: str, size: int
) -> None:
    saved = ranks.run(run_factored, 2, str(tmp_path), kind)[0]
    for found in ranks.run(resume_factored, size, str(tmp_path)):
        assert found["row"] == saved["row"]
        assert found["column"] == saved["column"]
        assert size != 2 or found["after"] == saved["after"]
