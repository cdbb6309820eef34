"""Plain tensors that differ between ranks: none is lost, and none is mixed."""

import itertools
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.lr_scheduler import StepLR

from ckptkit import CheckpointManager, TrainState, convert, open_checkpoint, reshard
from ckptkit.checkpoint.save.replicas import _summary, own_copies
from ckptkit.checkpoint.save.saver import Saver
from ckptkit.errors import CkptkitError, CorruptCheckpointError, RankFailedError
from ckptkit.formats.own.reader import open_catalog
from ckptkit.storage import open_store
from tests.checkpoint import states
from tests.patches import failing, refuse
from tests.ranks import logged, on_ranks

LARGE = 600_000  # elements: replicas of over 1 MiB are written in pieces, by several ranks


def made(value: float | None = None) -> TrainState:
    """Return the state of a sharded layer with running statistics and a plain parameter that is not synchronized.

    With a value, every plain tensor holds this value plus the rank.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": fully_shard(nn.Linear(6, 5)), "norm": nn.BatchNorm1d(5)})
    model.loose = nn.Parameter(torch.ones(LARGE))
    model.register_buffer("same", torch.arange(4.0))
    optimizer = torch.optim.SGD([model.loose], lr=0.0, momentum=0.9)
    state = TrainState(model=model, optimizer=optimizer, layout={"loose": "per_rank"})
    if value is not None:
        fill(state, value + dist.get_rank())
    return state


def plain(state: TrainState) -> list[torch.Tensor]:
    """Return the plain tensors of `made`."""
    loose = state.model.loose.detach()
    momentum = state.optimizer.state[state.model.loose].setdefault("momentum_buffer", torch.zeros(LARGE))
    return [state.model.norm.running_mean, loose, momentum]


def fill(state: TrainState, value: float) -> None:
    for tensor in plain(state):
        tensor.fill_(value)


def held(state: TrainState) -> list[float]:
    """Return the distinct values of the plain tensors."""
    found: list[float] = torch.cat(plain(state)).unique().tolist()
    return found


def save(url: Path, kind: str = "sharded", background: bool = False) -> list[str]:
    state = made(1.0)
    with logged() as lines, CheckpointManager(url, state_dict_type=kind) as manager:
        for step in (1, 2):
            if background:
                manager.save_async(step, state)
                fill(state, 50.0)
                manager.wait()
            else:
                manager.save(step, state)
            fill(state, 10.0 * step + 1.0 + dist.get_rank())
    return lines


@on_ranks(2)
def test_a_logging_handler_that_raises_fails_the_save_on_all_ranks(tmp_path):
    handler = logging.Handler(logging.WARNING)
    handler.emit = failing(OSError("the log is full"))  # type: ignore[method-assign]
    state = made(1.0)
    with CheckpointManager(tmp_path, timeout_s=20) as manager:
        logging.getLogger("ckptkit").addHandler(handler)
        with pytest.raises(RankFailedError, match=r"comparing the parameters.*the log is full"):
            manager.save(1, state)
        logging.getLogger("ckptkit").removeHandler(handler)
        manager.save(1, state)


def load(url: Path, which: int) -> tuple[list[float], list[str], list[str]]:
    state = made()
    with logged() as lines:
        report = states.load(url, state, which)
    assert torch.equal(state.model.same, torch.arange(4.0))
    return held(state), report.notes, lines


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_each_rank_gets_its_own_copy_back_and_one_warning_names_the_tensors(tmp_path, kind, background):
    said = save(tmp_path, kind, background)
    names = "model.loose, model.norm.running_mean, optimizer.state.loose.momentum_buffer"
    assert [f"Unsharded tensors differ between ranks ({names}):" in line for line in said] == [True] * (
        dist.get_rank() == 0
    )
    assert [load(tmp_path, step)[0] for step in (1, 2)] == [[1.0 + dist.get_rank()], [11.0 + dist.get_rank()]]


@pytest.mark.parametrize(("kind", "size"), [("sharded", 3), ("full", 1)])
def test_a_load_on_a_different_number_of_ranks_gives_one_copy_and_a_note(ranks, tmp_path, kind, size):
    ranks.run(save, 2, tmp_path, kind)
    for rank, (found, notes, lines) in enumerate(ranks.run(load, size, tmp_path, 1)):
        assert found == [1.0]
        assert any("model.norm.running_mean" in note and "all get one rank's values" in note for note in notes)
        assert len(lines) == (rank == 0)


def test_an_export_says_that_it_has_one_copy(ranks, tmp_path, kind):
    ranks.run(save, 2, str(tmp_path / "run"), kind)
    for notes in (
        convert(str(tmp_path / "run"), str(tmp_path / "export")).notes,
        reshard(str(tmp_path / "run"), str(tmp_path / "other"), world_size=3).notes,
    ):
        (note,) = [note for note in notes if "differ between ranks" in note]
        assert note.startswith("the values of model.loose, model.norm.running_mean differ")
        assert "get one rank's values" in note


@on_ranks(2)
def test_tensors_are_stored_once_until_they_begin_to_differ(tmp_path):
    state = made()
    fill(state, 3.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        assert [name for name in open_checkpoint(str(tmp_path)) if name.startswith("per_rank")] == []
        fill(state, 4.0 + dist.get_rank())
        manager.save(2, state)
        fill(state, 0.0)
        manager.load(state)
    assert held(state) == [4.0 + dist.get_rank()]


@pytest.mark.parametrize("kind", ["sharded", "full"])
@on_ranks(3)
def test_ranks_with_different_stages_keep_their_own_values(tmp_path, kind):
    """Rank 0 has its own stage, ranks 1 and 2 the next one, each rank with its own statistics."""
    rank = dist.get_rank()
    model = nn.BatchNorm1d(3)
    state = TrainState(model={f"stage{min(rank, 1)}": model}, rng=False)
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        for step in (1, 2):
            model.running_mean.fill_(10.0 * step + rank)
            manager.save(step, state)
        for step in (1, 2):
            manager.load(state, step, strict=False)
            assert model.running_mean.tolist() == [10.0 * step + rank] * 3


@on_ranks(2)
def test_a_group_whose_parameters_are_all_on_another_stage_gets_its_settings(tmp_path):
    def made(rates: tuple[float, float]) -> TrainState:
        model = nn.ModuleDict({f"stage{dist.get_rank()}": nn.Linear(2, 2, bias=dist.get_rank() == 0)})
        groups = [[p for p in model.parameters() if (p.dim() == 1) is is_bias] for is_bias in (False, True)]
        optimizer = torch.optim.SGD([{"params": g, "lr": lr} for g, lr in zip(groups, rates, strict=True)])
        return TrainState(model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 5), rng=False)

    live = made((8.0, 9.0))
    states.load_all(states.save(tmp_path, made((1.0, 2.0))), live)
    assert [group["lr"] for group in live.optimizer.param_groups] == [1.0, 2.0]


@on_ranks(2)
def test_state_that_two_stages_have_under_one_name_is_never_lost_silently(tmp_path, kind):
    """Each rank gets back its own state that belongs to no parameter. For extra state, a warning names the part."""

    def made(value: int) -> TrainState:
        torch.manual_seed(0)
        told = states.WithExtraState(2, 2)
        told.kept = value
        state = states.optimized(nn.ModuleDict({f"stage{dist.get_rank()}": nn.Linear(2, 2), "told": told}))
        state.optimizer.state["all"] = {"number": value, "tensor": torch.full((3,), float(value))}
        return state

    source, live = made(dist.get_rank()), made(9)
    with logged() as lines:
        states.load(states.save(tmp_path, source, state_dict_type=kind), live)
    assert states.bits(live.optimizer.state["all"]) == states.bits(source.optimizer.state["all"])
    about = [line for line in lines if "differ" in line]
    if dist.get_rank() == 0:
        parts = [line.removeprefix("The values of ").partition(" differ")[0] for line in about]
        assert parts == ["optimizer.shared", "model.extra_state: told._extra_state"]


@pytest.mark.parametrize("differs", [True, False])
@on_ranks(2)
def test_values_of_a_parameter_of_two_stages_are_refused_if_they_differ(tmp_path, kind, differs):
    model = nn.ModuleDict({f"stage{dist.get_rank()}": nn.Linear(2, 2), "tied": nn.Linear(2, 2, bias=False)})
    nn.init.ones_(model["tied"].weight)
    state = states.optimized(model)
    state.optimizer.state[model["tied"].weight] = {"steps": 3 + dist.get_rank() * differs}
    said = states.refusal(lambda: states.save(tmp_path, state, state_dict_type=kind))
    assert ("the optimizer states of tied.weight differ between pipeline stages" in said) == differs
    dist.barrier()
    assert bool(list(tmp_path.glob("step*"))) != differs


@on_ranks(2)
def test_each_rank_gets_its_part_of_a_model_in_extra_back(tmp_path, kind):
    """Ranks have different layers (a pipeline), and different values under one name (experts)."""

    def made(seed: int) -> TrainState:
        torch.manual_seed(seed)
        rank = dist.get_rank()
        layers = {f"stage{rank}": nn.Linear(20, 20), "expert": nn.Linear(3, 2), "alike": nn.BatchNorm1d(2)}
        return TrainState(model=nn.Linear(1, 1), extra={"ema": nn.ModuleDict(layers)}, rng=False)

    source, live = made(dist.get_rank()), made(5)
    source.model = live.model
    states.check_round_trip(tmp_path, source, live, kind)
    states.check_round_trip(tmp_path / "again", source, made(7), kind, atomic=True)


@pytest.mark.parametrize("value", [5, [5], {"a": 5}])
def test_an_extra_value_may_be_named_extra_state(tmp_path, value):
    live = TrainState(extra={"extra_state": None}, rng=False)
    states.check_round_trip(tmp_path, TrainState(extra={"extra_state": value}, rng=False), live, "sharded")


@pytest.mark.parametrize("sharded", [True, False])
@on_ranks(2)
def test_parameters_that_differ_are_refused_by_name(tmp_path, kind, sharded):
    state = made(1.0)
    state.layout = {}
    if not sharded:
        state.model.linear = nn.Identity()
    said = r"(?s)\A(?!.*norm).*plain \(unsharded\) parameters differ between ranks: model\.loose\."
    states.check_refused(tmp_path, state, said, error=CkptkitError, state_dict_type=kind)


def with_momentum(mesh: DeviceMesh) -> tuple[TrainState, torch.Tensor, torch.Tensor]:
    """Return the state of a layer under fully_shard and its optimizer; the weight, of ones, and its momentum."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    state = states.optimized(fully_shard(model, mesh=mesh), momentum=0.9)
    state.optimizer.state[model.weight]["momentum_buffer"] = momentum = torch.zeros_like(model.weight)
    return state, model.weight, momentum


def dtensor(mesh: DeviceMesh, *placements: Placement, numel: int = 4) -> DTensor:
    return DTensor.from_local(torch.ones(numel), mesh, placements, run_check=False)


@pytest.mark.parametrize("where", ["model.weight", "optimizer.state.weight.momentum_buffer", "extra.average"])
@on_ranks(2)
def test_replicas_of_a_dtensor_that_differ_are_refused_by_name(tmp_path, kind, where):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp"))
    state, weight, momentum = with_momentum(mesh)
    state.extra["average"] = average = dtensor(mesh, Replicate(), Shard(0))
    tensors = {"model.weight": weight, "extra.average": average}
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, state)
        with torch.no_grad():
            tensors.get(where, momentum).to_local().view(-1)[-1] += dist.get_rank()
        with pytest.raises(CkptkitError, match=rf"{where} differ between ranks that have replicas"):
            manager.save(2, state)
        assert [path.name for path in tmp_path.glob("step*")] == ["step_00000001"]
        if where.startswith("extra"):
            return
        state.layout = {"weight": "any_replica"}
        manager.save(2, state)
        manager.load(state)
    loaded = [weight, state.optimizer.state[weight]["momentum_buffer"]]
    states.on_all([tensor.to_local().tolist() for tensor in loaded])  # of one replica


@on_ranks(4)
def test_a_tensor_is_compared_on_all_ranks_that_have_it(tmp_path):
    """Every rank has the norm and the table; each pair has its own part of the weight, and its own stage."""
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    norm, weight = dtensor(mesh, Replicate(), Replicate()), dtensor(mesh, Replicate(), Shard(0))
    plain = {"table": torch.ones(LARGE), f"stage{rank % 2}": torch.full((LARGE,), float(rank % 2))}
    model = nn.Module()
    for name, tensor in {"norm": norm, "weight": weight, **plain}.items():
        model.register_parameter(name, nn.Parameter(tensor))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=model))
        for name in ("norm", "table"):
            value = model.get_parameter(name).detach()
            (value.to_local() if name == "norm" else value).add_(rank % 2)
            with pytest.raises(CkptkitError, match=rf"differ.*model\.{name}|model\.{name} differ"):
                manager.save(2, TrainState(model=model))
            value.fill_(1.0)
        weight.to_local().add_(rank % 2)  # the ranks of a pair agree
        manager.save(2, TrainState(model=model))


@pytest.mark.parametrize("where", ["weight", "moment"])
@on_ranks(4)
def test_dtensors_of_several_meshes_that_differ_are_refused(tmp_path, kind, where):
    """Two meshes of two ranks each have all tensors, without a dimension of the mesh for the two copies."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))["fsdp"]
    state, weight, momentum = with_momentum(mesh)
    changed = {"weight": weight, "moment": momentum}[where].detach().to_local()
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, state)
        changed[-1, -1] = rank // 2
        with pytest.raises(CkptkitError, match=r"differ between ranks that have replicas(?s:.*)TrainState\(layout="):
            manager.save(2, state)
        changed[-1, -1] = 5
        manager.save(3, state)
    changed[-1, -1] = rank // 2
    with CheckpointManager(tmp_path / "new", state_dict_type=kind) as manager, pytest.raises(CkptkitError):
        manager.save(1, state)
    assert sorted(path.name for path in tmp_path.rglob("step*")) == ["step_00000001", "step_00000003"]


@on_ranks(4)
def test_a_rank_that_fails_while_meshes_are_compared_fails_all(tmp_path, monkeypatch):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))["fsdp"]
    state = TrainState(extra={"average": dtensor(mesh, Replicate())}, rng=False)
    calls, error = itertools.count(1), MemoryError("no memory for fingerprints")
    refuse(monkeypatch, Saver, "_fingerprints", error, when=lambda *_: next(calls) == 2 and rank == 3)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(RankFailedError, match="rank 3: MemoryError: no memory for fingerprints"):
            manager.save(1, state)
        manager.save(1, state)


def nearly_equal(index: int) -> TrainState:
    """Return a state with a large replica that differs in one element."""
    average = dtensor(init_device_mesh("cpu", (2,)), Replicate(), numel=LARGE)
    average.to_local()[index] += dist.get_rank()
    return TrainState(extra={"average": average}, rng=False)


@pytest.mark.parametrize("index", [0, LARGE // 2, LARGE - 1])
@on_ranks(2)
def test_sixteen_saves_compare_each_element_of_a_large_replica(tmp_path, index):
    state = nearly_equal(index)
    with CheckpointManager(tmp_path) as manager:
        said = [states.refusal(lambda step=step: manager.save(step, state)) for step in range(16)]
    assert ["extra.average differ" in text for text in said if text] == [True]


@on_ranks(2)
def test_a_new_manager_compares_other_blocks_of_a_large_replica(tmp_path):
    state = nearly_equal(LARGE // 2)
    said = (states.refusal(lambda step=step: states.save(tmp_path, state, step)) for step in range(0, 60_000, 1000))
    assert any("extra.average differ" in text for text in said)


@on_ranks(2)
def test_equal_replicas_are_saved_after_a_save_with_unequal_steps(tmp_path):
    average = dtensor(init_device_mesh("cpu", (2,)), Replicate(), numel=LARGE)
    average.to_local()[:] = torch.arange(LARGE)
    state = TrainState(extra={"average": average}, rng=False)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CkptkitError, match="what to save"):
            manager.save(10 + dist.get_rank(), state)
        manager.save(12, state)


@on_ranks(2)
def test_differing_extra_values_are_saved_from_rank_0_with_a_warning(tmp_path, kind):
    rank = dist.get_rank()
    extra = {"average": {"w": torch.full((LARGE,), float(rank))}, "loss": float(rank)}
    state = TrainState(extra=extra, rng=False)
    with logged() as lines:
        states.load(states.save(tmp_path, state, state_dict_type=kind), state)
    assert state.extra["average"]["w"].unique().tolist() == [state.extra["loss"]] == [0.0]
    for said in (r"extra\.average\.w differ between ranks.*PerRank", r"extra\.loss differs between ranks"):
        assert rank > 0 or any(re.search(said, line) for line in lines)


@on_ranks(2)
def test_plain_torch_loads_the_copy_of_the_lowest_rank(tmp_path):
    states.save(tmp_path, made(1.0))
    target = {"model": made().model.state_dict()}
    dcp.load(target, checkpoint_id=f"{tmp_path}/step_00000001")
    assert target["model"]["norm.running_mean"].unique().tolist() == [1.0]


@on_ranks(2)
def test_a_damaged_table_of_copies_is_refused(tmp_path):
    states.save(tmp_path, made())
    catalog = open_catalog(open_store(str(tmp_path / "step_00000001")))
    for tree in ([], {"model.loose": {"$ref": "nowhere"}}):
        with pytest.raises(CorruptCheckpointError, match="not a table of existing tensors"):
            own_copies(catalog, {"per_rank.0": {}, "per_rank.1": tree}, rank=1, world_size=2)


@pytest.mark.parametrize("index", [0, 3000, 4999, 12_345, 19_999])
def test_the_summary_of_a_device_tensor_changes_with_every_element(index):
    row = torch.arange(20_003, dtype=torch.int32).to(torch.uint8)[3:]
    changed = row.clone()
    changed[index] += 1
    assert not torch.equal(_summary(row), _summary(changed))
    assert torch.equal(_summary(row), _summary(row.clone()))
    assert _summary(row).numel() < row.numel()
