"""Saved and loaded on different numbers of ranks: weights, moments and masters are bitwise equal."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit import CheckpointManager, PerRank, TrainState
from ckptkit.errors import CheckpointMismatchError
from tests.checkpoint import jobs, states
from tests.checkpoint.states import different
from tests.ranks import logged, on_ranks

# (world size, layout). Uneven at 3 and 4: 14, 6, 2 and 1 rows, with empty shards. Also replicas and 2-D meshes.
PLACES = [(1, "plain"), (1, "1d"), (2, "1d"), (3, "1d"), (4, "1d"), (4, "hsdp"), (2, "tp"), (4, "tp")]
CASES = [  # each place saves and loads SHARDED checkpoints twice
    *(("sharded", a, PLACES[(i + step) % len(PLACES)], "fp32") for step in (1, 3) for i, a in enumerate(PLACES)),
    ("full", (4, "tp"), (3, "1d"), "fp32"),
    ("full", (3, "1d"), (4, "hsdp"), "fp32"),
    ("full", (1, "plain"), (4, "tp"), "fp32"),
    ("full", (4, "hsdp"), (1, "plain"), "fp32"),
    ("sharded", (4, "hsdp-tp"), (3, "1d"), "master"),
    ("sharded", (1, "1d"), (4, "hsdp-tp"), "master"),
    ("full", (4, "one-replica-tp"), (4, "replicated"), "master"),
    ("local", (4, "hsdp-tp"), (4, "hsdp-tp"), "master"),
]


class Odd(jobs.Net):
    """A net that also has tied and 3-D parameters, adapters of rank 1, odd names, and buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(6, 2, bias=False)
        self.second.weight = self.head.weight
        self.lora_A, self.lora_B = nn.Linear(6, 1, bias=False), nn.Linear(1, 6, bias=False)
        self.three = nn.Parameter(torch.randn(3, 1, 2))
        self.named = nn.ParameterDict({"a-b": nn.Parameter(torch.randn(2, 3)), "é": nn.Parameter(torch.randn(9))})
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        more = self.three.sum() + sum(p.sum() for p in self.named.values())
        return super().forward(x + self.lora_B(self.lora_A(x))) + self.second(x) * more


def save(url: str, kind: str, layout: str, precision: str = "fp32") -> Any:
    job = jobs.make(layout, precision, net=Odd)
    # The same data on all ranks, so that tensor-parallel ranks and replicas agree.
    jobs.seed(5, 0)
    job.data.rank = 0
    job.train(2)
    states.save(url, job.state(), 2, state_dict_type=kind)
    return jobs.everything(job)


def load(url: str, layout: str, precision: str) -> Any:
    job = jobs.make(layout, precision, start=7, net=Odd)
    report = states.load(url, job.state(), per_rank_on_resize="keep")
    assert not (report.missing or report.unexpected)
    return jobs.everything(job)


@pytest.mark.parametrize(("kind", "source", "target", "precision"), CASES)
def test_a_checkpoint_loads_on_any_number_of_ranks(ranks, tmp_path, kind, source, target, precision):
    saved = ranks.run(save, source[0], str(tmp_path), kind, source[1], precision)[0]
    for loaded in ranks.run(load, target[0], str(tmp_path), target[1], precision):
        assert different(loaded, saved) == []


@on_ranks(4)
def test_a_local_checkpoint_of_another_mesh_names_the_command_that_reshards_it(tmp_path):
    save(str(tmp_path), "local", "1d")
    command = f"reshard {tmp_path}/step_00000002 DST --world-size 4 --mesh replicate=2,shard=2 --type local"
    states.check_misfit(tmp_path, jobs.make("hsdp", start=7, net=Odd).state(), re.escape(command))


# --- per-rank state


def save_own(url: str, differing: bool) -> Any:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    mine = PerRank(rank if differing else 0)
    states.save(url, TrainState(dataloader=states.Kept(10 + rank * differing), extra={"mine": mine}))
    return torch.rand(3).tolist()


def load_own(url: str, options: dict[str, Any]) -> Any:
    """Return the position, the value, the next random numbers, and what the report says; or the refusal."""
    torch.manual_seed(77)
    state = TrainState(dataloader=states.Kept(0), extra={"mine": PerRank(None)})
    try:
        report = states.load(url, state, **options)
    except CheckpointMismatchError as error:
        return str(error)
    return state.dataloader.value, state.extra["mine"].value, torch.rand(3).tolist(), report.skipped, report.notes


def spread(given: Any, rank: int, world_size: int) -> Any:
    return {"value": sum(s["value"] for s in given) * 100 + rank} if isinstance(given[0], dict) else given


def test_each_rank_gets_its_own_state_back_and_a_different_number_of_ranks_is_refused(ranks, tmp_path):
    drawn = ranks.run(save_own, 3, str(tmp_path), True)
    found = ranks.run(load_own, 3, str(tmp_path), {})
    assert [item[:3] for item in found] == [(10 + rank, rank, drawn[rank]) for rank in range(3)]
    for text in ranks.run(load_own, 2, str(tmp_path), {}):
        assert "dataloader has one state per rank, saved at world size 3; the world size is now 2" in text


def test_per_rank_state_equal_on_all_ranks_loads_on_any_number_of_ranks(ranks, tmp_path):
    ranks.run(save_own, 3, str(tmp_path), False)
    for position, value, _, _, notes in ranks.run(load_own, 2, str(tmp_path), {}):
        assert (position, value) == (10, 0)
        assert any("dataloader: all 3 ranks saved the same state" in note and "repeated" in note for note in notes)
    for *_, notes in ranks.run(load_own, 3, str(tmp_path), {}):
        assert not any("dataloader" in note for note in notes)
    state = TrainState(dataloader=states.Kept(0), extra={"mine": PerRank(None)})
    state.extra["missing"] = states.Kept(0)
    with logged() as lines:
        with pytest.raises(CheckpointMismatchError, match="missing"):
            states.load(str(tmp_path), state)
        assert not lines  # a load that fails does not say that ranks continue from it
        states.load(str(tmp_path), state, strict=False)
    assert any("repeated" in line for line in lines)


def test_a_per_rank_function_may_merge_the_states_of_several_ranks(ranks, tmp_path):
    for differing, expected in (
        (True, [(3300, [0, 1, 2]), (3301, [0, 1, 2])]),
        (False, [(3000, [0, 0, 0]), (3001, [0, 0, 0])]),  # equal states are merged too
    ):
        ranks.run(save_own, 3, str(tmp_path / str(differing)), differing)
        found = ranks.run(load_own, 2, str(tmp_path / str(differing)), {"per_rank_on_resize": spread})
        assert [item[:2] for item in found] == expected


class Shards:
    """A dataloader that reads one shard of the data, and finds its own state among those of all ranks."""

    def __init__(self, shard: int, of: int, position: int = 0) -> None:
        self.shard, self.of, self.position = shard, of, position

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "position": torch.tensor(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])

    def merge_ranks(self, saved: Any, rank: int, world_size: int) -> Any:
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        found = {state["shard"]: state for state in saved}
        if len(found) != self.of:
            raise CheckpointMismatchError(f"the data had {len(found)} shards, now it has {self.of}")
        return found[self.shard]


def shards_state(shards: list[int], trains: bool) -> TrainState:
    shard, of = shards[dist.get_rank() if dist.is_initialized() else 0], len(set(shards))
    state = states.linear(float(trains))
    state.dataloader = Shards(shard, of, (10 + shard) * trains)
    state.extra["mine"] = PerRank(Shards(shard, of, (20 + shard) * trains))
    return state


def save_shards(url: str, shards: list[int], storage_options: Any = None) -> None:
    states.save(url, shards_state(shards, True), storage_options=storage_options)


def load_shards(url: str, shards: list[int], resize: Any) -> Any:
    state = shards_state(shards, False)
    states.load(url, state, per_rank_on_resize=resize)
    return state.dataloader.position, state.extra["mine"].value.position


@pytest.mark.parametrize("resize", ["error", "keep", spread])
def test_an_object_finds_its_own_state_among_all_ranks(ranks, tmp_path, resize):
    ranks.run(save_shards, 4, str(tmp_path), [0, 0, 1, 1])
    assert ranks.run(load_shards, 4, str(tmp_path), [0, 1, 0, 1], resize) == [(10, 20), (11, 21)] * 2
    assert ranks.run(load_shards, 2, str(tmp_path), [1, 0], resize) == [(11, 21), (10, 20)]


def refuse_shards(url: str, shards: list[int], storage_options: dict[str, Any]) -> str:
    state = shards_state(shards, False)
    with states.unchanged(state), CheckpointManager(url, storage_options=storage_options) as manager:
        return states.refusal(lambda: manager.load(state))


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_an_object_that_refuses_ranks_states_changes_nothing(ranks, tmp_path, where, request):
    expected = "CheckpointMismatchError: the data had 2 shards, now it has 1"
    options = {} if where == "disk" else request.getfixturevalue("s3")
    url = str(tmp_path) if where == "disk" else "s3://bucket/shards"
    ranks.run(save_shards, 2, url, [0, 1], options)
    assert set(ranks.run(refuse_shards, 2, url, [0, 0], options)) == {expected}
    assert refuse_shards(url, [0], options) == expected  # a single rank reads all objects of a store at once


class Merging(nn.Linear):
    """A layer that gets another state on rank 1 than it has saved."""

    change = ""

    def merge_ranks(self, saved: Any, rank: int, world_size: int) -> Any:
        state = saved[rank]
        changed = {"part": {"weight": state["weight"]}, "more": {**state, "more": state["bias"]}}
        changed["cast"] = {name: value.double() for name, value in state.items()}
        return changed.get(self.change, state) if rank else state


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("part", "1 missing in the checkpoint: bias"),
        ("more", "1 unexpected: more (rank 1)"),
        ("cast", "2 with a different dtype"),
    ],
)
@on_ranks(2)
def test_a_merged_state_that_does_not_fit_changes_nothing(tmp_path, change, said):
    def made(value: float) -> TrainState:
        state = states.linear(value)
        state.extra["ema"] = PerRank(Merging(3, 2))
        return state

    root, live = states.save(tmp_path, made(1.0)), made(2.0)
    live.extra["ema"].value.change = change
    with states.unchanged(live):
        assert f"extra.ema: {said}" in states.refusal(lambda: states.load(root, live))


def test_if_the_number_of_ranks_changes_their_random_numbers_are_reseeded_kept_or_refused(ranks, tmp_path):
    drawn = ranks.run(save_own, 3, str(tmp_path), True)
    first, again, kept, refused = (
        ranks.run(load_own, 2, str(tmp_path), {"per_rank_on_resize": "keep", **more})
        for more in ({}, {}, {"rng_on_resize": "keep"}, {"rng_on_resize": "error"})
    )
    numbers = [tuple(item[2]) for item in first]
    assert numbers == [tuple(item[2]) for item in again]
    assert len({*numbers, *map(tuple, drawn)}) == 5
    assert "dataloader" in first[0][3]
    assert any("reseeded" in note for note in first[0][4])
    torch.manual_seed(77)
    unchanged = torch.rand(3).tolist()
    assert all(item[2] == unchanged and "rng" in item[3] for item in kept)
    assert all("rng: 1 incompatible" in text for text in refused)


def narrow(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 7))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    state = states.optimized(model, torch.optim.AdamW, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    state.optimizer.step()
    return state


@on_ranks(4)
def test_a_weight_with_fewer_rows_than_tp_ranks_is_restored(tmp_path, kind):
    source = narrow(0)
    states.check_round_trip(tmp_path, source, narrow(1), kind)
    parts = [parameter.to_local().numel() for parameter in source.model.parameters()]
    assert 0 in parts or dist.get_rank() % 2 == 0  # the second rank of each tensor-parallel pair has no row
