"""LOCAL: the shards of each rank, saved without communication."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ckptkit import TrainState, verify
from ckptkit.checkpoint.save.local import LocalTensors
from ckptkit.checkpoint.state.capture import capture
from ckptkit.cli.main import cli
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.own import local as local_shards
from ckptkit.formats.own.reader import open_catalog
from ckptkit.storage.local import LocalStore
from tests.checkpoint import jobs, states
from tests.ranks import on_ranks


class Collectives(TorchDispatchMode):
    """Counts every collective and every message that goes through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["1d", "hsdp"])
@on_ranks(4)
def test_writing_local_tensors_needs_no_communication(tmp_path, layout):
    job = jobs.make(layout)
    job.train(1)
    with Collectives() as counted:
        captured = capture(job.state(), rank=dist.get_rank())
        plan = LocalTensors.of(captured, dist.get_rank(), dist.get_world_size())
        plan = plan.settle([plan.signature] * dist.get_world_size(), lambda _: pytest.fail("talked"))
        plan.write(LocalStore(str(tmp_path)), None, sync=False)
    assert counted.seen == []
    with counted:  # checks the counter itself
        dist.barrier()
    assert counted.seen != []


def save(url: Path, layout: str = "1d") -> Any:
    job = jobs.make(layout)
    jobs.seed(1, 0)
    job.train(1)
    states.save(url, job.state(), state_dict_type="local")
    return {k: v.to_local().detach().numpy() for k, v in job.model.state_dict().items() if hasattr(v, "to_local")}


def test_a_rank_file_holds_the_ranks_shards_and_their_positions(ranks, tmp_path):
    held = ranks.run(save, 2, tmp_path)
    for rank, tensors in enumerate(held):
        path = tmp_path / "step_00000001" / f"local_{rank:05d}.safetensors"
        with safe_open(path, "np") as opened:
            for fqn, local in tensors.items():
                assert (opened.get_tensor(f"model.{fqn}") == local).all()
            body = json.loads(opened.metadata()["ckptkit.local"])
        assert (body["rank"], body["world_size"]) == (rank, 2)
        assert body["meshes"] == [{"shape": [2], "names": ["shard"], "ranks": [0, 1]}]
        assert body["tensors"]["model.up.weight"] == ["model.up.weight", [14, 6], [7 * rank, 0], [0, ["S(0)"]]]


def opened(run: Path) -> Any:
    return local_shards.open_catalog(LocalStore(str(run / "step_00000001")))


def test_replicas_are_written_once(ranks, tmp_path):
    ranks.run(save, 4, tmp_path, "hsdp")
    catalog = opened(tmp_path)
    for entry in catalog.tensors.values():
        boxes = [s.box for s in entry.slices if s.box.numel]
        assert len(boxes) == len(set(boxes))
        entry.check_coverage()
    holders = {s.rank for entry in catalog.tensors.values() for s in entry.slices if s.box.numel}
    assert holders == {0, 1, 2, 3}


@pytest.mark.parametrize("layout", ["1d", "hsdp", "tp"])
def test_the_rank_files_alone_give_the_catalog_of_the_manifest(ranks, tmp_path, layout):
    ranks.run(save, 4, tmp_path, layout)
    own, recorded = opened(tmp_path), open_catalog(LocalStore(str(tmp_path / "step_00000001")))
    assert set(own.tensors) == set(recorded.tensors)
    for name, entry in own.tensors.items():
        other = recorded.tensors[name]
        assert (entry.dtype, entry.shape, entry.role, entry.fqn) == (other.dtype, other.shape, other.role, other.fqn)
        places = {(s.box, s.path, s.start, s.nbytes) for s in entry.slices}
        assert places >= {(s.box, s.path, s.start, s.nbytes) for s in other.slices}
        assert {s.box for s in entry.slices} == {s.box for s in other.slices}  # without the replicas


FIRST, SECOND = "local_00000.safetensors", "local_00001.safetensors"


def test_an_error_names_a_missing_rank_file(ranks, tmp_path):
    ranks.run(save, 2, tmp_path)
    (tmp_path / "step_00000001" / SECOND).unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"those of ranks 1\."):
        opened(tmp_path)


def test_rank_files_that_were_swapped_are_refused(ranks, tmp_path):
    ranks.run(save, 2, tmp_path)
    step = tmp_path / "step_00000001"
    (step / SECOND).rename(step / "x")
    (step / FIRST).rename(step / SECOND)
    (step / "x").rename(step / FIRST)
    with pytest.raises(CorruptCheckpointError, match="another rank"):
        opened(tmp_path)


def _save_sharded(url: Path) -> None:
    states.save(url, TrainState(model=fully_shard(torch.nn.Linear(4, 4))), state_dict_type="LOCAL")


def _load_whole(url: Path) -> str:
    return states.refusal(lambda: states.load(url, TrainState(model=torch.nn.Linear(4, 4))))


@pytest.mark.parametrize("size", [1, 2])
def test_the_command_that_a_refused_load_names_makes_a_checkpoint_that_loads(ranks, tmp_path, size):
    ranks.run(_save_sharded, 2, tmp_path / "run")
    command = shlex.split(ranks.run(_load_whole, size, tmp_path / "run")[0].splitlines()[-1])
    assert command[:2] == ["ckptkit", "reshard"]
    command[command.index("DST")] = str(tmp_path / "made/step_00000001")
    assert CliRunner().invoke(cli, command[1:]).exit_code == 0
    assert ranks.run(_load_whole, size, tmp_path / "made") == [""] * size


@on_ranks(2)
def test_the_manifest_lists_the_lowest_ranks_copy_of_plain_tensors_that_all_ranks_write(tmp_path):
    rank = dist.get_rank()
    model = torch.nn.Module()
    model.register_buffer("same", torch.arange(1 << 15))
    model.register_buffer("number", torch.tensor(2.0))
    model.register_buffer(f"own{rank}", torch.ones(3))  # as plain tensors differ, each rank writes all of its own
    states.save(tmp_path, TrainState(model=model, rng=False), state_dict_type="local")
    if rank == 0:
        step = tmp_path / "step_00000001"
        tensors = open_catalog(LocalStore(str(step))).tensors
        paths = {name: [s.path for s in entry.slices] for name, entry in tensors.items()}
        assert paths == {"model.same": [FIRST], "model.number": [FIRST], "model.own0": [FIRST], "model.own1": [SECOND]}
        assert verify(str(step)).ok
