"""Failures of `dcp.save` and `dcp.load` with our writer and reader: no incomplete checkpoint is left."""

import os
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptkit import DCPLoadPlanner, DCPReader, DCPSavePlanner, DCPWriter
from ckptkit.errors import CheckpointNotFoundError, LeaseHeldError, NoSpaceError, SaveError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.lock import HeldDirectory
from tests.checkpoint.states import save_steps
from tests.formats.dcp_states import assert_loads, failure, load, save, state
from tests.ranks import RankError, on_ranks, run_ranks

PLANNERS = pytest.mark.parametrize("kind", [DefaultSavePlanner, DCPSavePlanner])


@PLANNERS
@on_ranks(2)
def test_the_second_of_two_concurrent_writers_is_refused_and_the_first_loads(tmp_path, kind):
    """Rank 1 saves while rank 0, which belongs to another job, has planned and not yet written."""

    class Waiting(DefaultSavePlanner):
        def finish_plan(self, plan: Any) -> Any:
            dist.barrier()
            dist.barrier()
            return super().finish_plan(plan)

    mine = {"w": torch.full((50, 50), float(dist.get_rank()))}
    if dist.get_rank() == 0:
        save(tmp_path, mine, Waiting(), no_dist=True)
        assert not load(FileSystemReader(tmp_path), {"w": torch.ones(50, 50)}, no_dist=True)["w"].any()
    else:
        dist.barrier()
        error = failure(save, tmp_path, mine, kind(), no_dist=True)
        dist.barrier()
        assert isinstance(error, LeaseHeldError)


def test_a_process_can_hold_a_directory_twice_and_releases_it_with_the_last(tmp_path):
    holders = [HeldDirectory(str(tmp_path / "c")) for _ in range(2)]
    for holder, seen in zip(holders, ("LeaseHeldError", "free"), strict=True):
        holder.release()
        assert run_ranks(held, 1, str(tmp_path / "c")) == [seen]


def held(path: str) -> str:
    try:
        HeldDirectory(path)
    except LeaseHeldError as error:
        return type(error).__name__
    return "free"


def dying(url: str, kind: type[DefaultSavePlanner], step: str) -> None:
    """Save on two ranks, of which the second dies in a step."""
    if dist.get_rank() == 1:
        setattr(DCPWriter, step, lambda *_: os._exit(7))
    save(url, state("shard0@2"), kind())


@PLANNERS
@pytest.mark.parametrize("step", ["prepare_local_plan", "write_data"])
def test_a_dead_rank_fails_the_others_and_leaves_no_checkpoint(tmp_path, kind, step):
    with pytest.raises(RankError, match=r"(?s)rank 0\nTraceback.*rank 1\nthe rank died"):
        run_ranks(dying, 2, str(tmp_path / "c"), kind, step)
    assert not list(tmp_path.glob("c/*metadata*")) + list(tmp_path.glob("c/manifest*"))
    assert isinstance(failure(load, tmp_path / "c", {"w": torch.ones(1)}), Exception)


def full(url: str, kind: type[DefaultSavePlanner]) -> list[Any]:
    """Save without enough space, then save a smaller state to the same URL in the same process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    first = failure(save, url, {"w": torch.randn(400, 400)}, kind())
    left = [name for name in os.listdir(url) if "metadata" in name or "manifest" in name]
    second = failure(save, url, {"w": torch.arange(3.0)}, kind())
    return [type(first), left, second, load(url, {"w": torch.zeros(3)})["w"].tolist()]


@PLANNERS
def test_a_full_disk_leaves_no_checkpoint_and_frees_the_space(tmp_path, kind):
    assert run_ranks(full, 2, str(tmp_path / "c"), kind) == [[NoSpaceError, [], None, [0.0, 1.0, 2.0]]] * 2


@PLANNERS
def test_metadata_is_written_after_the_manifest(tmp_path, monkeypatch, kind):
    def full(store: Any, path: str, *_: Any, **__: Any) -> None:
        raise NoSpaceError(28, f"{path}: no space left")

    monkeypatch.setattr(LocalStore, "write", full)
    error = failure(save, tmp_path, {"w": torch.ones(10)}, kind())
    assert isinstance(error, NoSpaceError) and "manifest" in str(error)
    assert not list(tmp_path.glob("*metadata"))


@pytest.mark.parametrize("ours", [0, 1])
@on_ranks(2)
def test_ranks_may_load_with_different_planners_but_not_save(tmp_path, ours):
    made, mine = state("shard0@2"), dist.get_rank() == ours
    error = failure(save, tmp_path / "mixed", made, DCPSavePlanner() if mine else None)
    assert isinstance(error, SaveError) and str(error).startswith("Some ranks plan with DCPSavePlanner")
    assert "all ranks must use the same planner" in str(error) and not (tmp_path / "mixed" / ".metadata").exists()
    save(tmp_path / "c", made, DCPSavePlanner())
    assert_loads(tmp_path / "c", made, DCPLoadPlanner() if mine else None)


def test_the_error_for_a_directory_names_it_or_the_newest_checkpoint_of_a_run(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        _ = DCPReader(tmp_path).catalog
    save_steps(tmp_path, 1, 2)
    with pytest.raises(
        CheckpointNotFoundError, match=r"It may be a run: name a checkpoint in it, such as step_00000002\.$"
    ):
        _ = DCPReader(tmp_path).catalog
