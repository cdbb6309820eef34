"""`DCPSavePlanner` and `DCPLoadPlanner` in `dcp.save` and `dcp.load`: with our writer and reader, and with torch's."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import DCPLoadPlanner, DCPReader, DCPSavePlanner, DCPWriter
from ckptkit.errors import CheckpointExistsError, CheckpointMismatchError
from tests.formats.dcp.test_torch_api import failure, one
from tests.formats.dcp_states import differences, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def with_torchs_storage(url: str) -> list[str]:
    made, target = state("hsdp@4"), state("hsdp@4", zeros=True)
    dcp.save(made, storage_writer=dcp.FileSystemWriter(url, sync_files=False), planner=DCPSavePlanner())
    dcp.load(target, storage_reader=dcp.FileSystemReader(url), planner=DCPLoadPlanner())
    return differences(target, made)


def test_with_torchs_writer_and_reader_the_planners_behave_as_torchs(ranks, tmp_path):
    assert ranks.run(with_torchs_storage, 4, str(tmp_path)) == [[]] * 4


def in_a_group(url: str) -> list[str]:
    group = dist.new_group([1, 2])
    found: list[str] = []
    if dist.get_rank():
        made = {"w": torch.arange(600_000.0), "small": torch.arange(3), "o": {"lr": 0.5}}
        dcp.save(made, storage_writer=DCPWriter(url, sync=False), planner=DCPSavePlanner(), process_group=group)
        target = {"w": torch.zeros(600_000), "small": torch.zeros(3, dtype=torch.int64), "o": {"lr": 0.0}}
        dcp.load(target, storage_reader=DCPReader(url), planner=DCPLoadPlanner(), process_group=group)
        found = differences(target, made)
        dist.destroy_process_group(group)
    return found


def test_a_subgroup_saves_complete_replicas(ranks, tmp_path):
    assert ranks.run(in_a_group, 3, str(tmp_path)) == [[], [], []]


def changes(url: str) -> list[str]:
    """Save with one planner; keys, shapes, dtypes and placements change on one rank or on all."""
    rank, planner, failures = dist.get_rank(), DCPSavePlanner(), []
    mesh = init_device_mesh("cpu", (2,))
    for i in range(7):
        made: dict[str, Any] = {"all": torch.arange(10.0) + i, f"own.{rank}": torch.full((2,), float(i)), "o": [i]}
        made["d"] = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, (Shard(int(i > 4)),), src_data_rank=None)
        if rank == 1 and i in (2, 3):
            made["new"] = torch.full((4,), float(i))
        if i >= 4:
            made["all"] = made["all"].bfloat16()
        if rank == 1 and i >= 5:
            made["own.1"] = torch.full((3,), float(i))
        dcp.save(made, storage_writer=DCPWriter(f"{url}/{i}", sync=False), planner=planner)
        target = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in made.items()}
        dcp.load(target, storage_reader=DCPReader(f"{url}/{i}"), planner=DCPLoadPlanner())
        failures += [f"{i}: {text}" for text in differences(target, made)]
    return failures


def test_changes_between_saves_are_saved(ranks, tmp_path):
    assert ranks.run(changes, 2, str(tmp_path)) == [[], []]


def after_a_failure(url: str) -> list[str]:
    """The first save is refused; the second, with the same planner, must not count as a later save."""
    rank, planner = dist.get_rank(), DCPSavePlanner()
    made = {"all": torch.arange(10.0), f"own.{rank}": torch.ones(2)}
    if rank == 0:
        DCPWriter(url, sync=False)._store().write(".metadata", b"a checkpoint")
    dist.barrier()
    found = []
    try:
        dcp.save(made, storage_writer=DCPWriter(url, sync=False), planner=planner)
    except dcp.api.CheckpointException as error:
        found = [type(cause[0]).__name__ for cause in error.failures.values()]
    dcp.save(made, storage_writer=DCPWriter(f"{url}/again", sync=False), planner=planner)
    target = {name: torch.zeros_like(value) for name, value in made.items()}
    dcp.load(target, storage_reader=DCPReader(f"{url}/again"), planner=DCPLoadPlanner())
    return found + differences(target, made)


def test_a_save_after_a_failed_save_is_complete(ranks, tmp_path):
    assert ranks.run(after_a_failure, 2, str(tmp_path)) == [[CheckpointExistsError.__name__]] * 2


def metadata_of_a_save(url: str) -> bool:
    made = state("shard0@2")
    ours = dcp.save(made, storage_writer=DCPWriter(f"{url}/a", sync=False), planner=DCPSavePlanner())
    torchs = dcp.save(made, storage_writer=dcp.FileSystemWriter(f"{url}/b", sync_files=False))
    same = dict(ours.planner_data) == dict(torchs.planner_data)
    for name, found in torchs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        same &= type(mine) is type(found)
        if isinstance(found, TensorStorageMetadata):
            same &= (mine.size, mine.properties.dtype) == (found.size, found.properties.dtype)
    return same and len(ours.state_dict_metadata) == len(torchs.state_dict_metadata)


def test_every_rank_gets_the_metadata_of_what_was_saved(ranks, tmp_path):
    assert ranks.run(metadata_of_a_save, 2, str(tmp_path)) == [True, True]


def test_all_mismatches_are_listed_and_nothing_is_changed(tmp_path):
    one(tmp_path, planned=True)
    target = {"w": torch.zeros(50_000), "small": torch.zeros(6), "more": torch.zeros(1), "o": {"lr": 0.0}}
    cause = failure(tmp_path, target, planned=True)
    assert isinstance(cause, CheckpointMismatchError)
    assert "small: " in str(cause)
    assert "more: not in the checkpoint" in str(cause)
    assert not target["w"].any()


def test_a_partial_load_leaves_missing_keys_unchanged(tmp_path):
    made = one(tmp_path, planned=True)
    target = {"w": torch.zeros(50_000), "more": torch.ones(1), "o": {"lr": 0.0, "new": 7}}
    planner = DCPLoadPlanner(allow_partial_load=True)
    dcp.load(target, storage_reader=DCPReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(target["w"], made["w"])
    assert target["more"].item() == 1
    assert target["o"] == {"lr": 0.5, "new": 7}


def into_meta(url: str) -> list[str]:
    made, mesh = state("shard0@2"), init_device_mesh("cpu", (2,))
    dcp.save(made, storage_writer=DCPWriter(url, sync=False), planner=DCPSavePlanner())
    target = state("shard0@2", zeros=True)
    target["model"]["large"] = torch.empty(700, 1100, device="meta")
    target["model"]["d0.s1"] = distribute_tensor(
        torch.empty(64, 48, dtype=torch.bfloat16, device="meta"), mesh, (Shard(0),), src_data_rank=None
    )
    dcp.load(target, storage_reader=DCPReader(url), planner=DCPLoadPlanner())
    return differences(target, made)


def test_meta_tensors_are_materialized(ranks, tmp_path):
    assert ranks.run(into_meta, 2, str(tmp_path)) == [[], []]


class Halved(DCPSavePlanner):
    def transform_object(self, write_item, object):
        found = super().transform_object(write_item, object)
        return found / 2 if isinstance(found, torch.Tensor) else found


class Doubled(DCPLoadPlanner):
    def commit_tensor(self, read_item, tensor):
        tensor.mul_(2)


def test_overrides_of_a_subclass_are_called(tmp_path):
    made = {"w": torch.arange(8.0)}
    dcp.save(made, storage_writer=DCPWriter(tmp_path), planner=Halved(), no_dist=True)
    target = {"w": torch.zeros(8)}
    dcp.load(target, storage_reader=DCPReader(tmp_path), planner=DCPLoadPlanner(), no_dist=True)
    assert torch.equal(target["w"], made["w"] / 2)
    dcp.load(target, storage_reader=DCPReader(tmp_path), planner=Doubled(), no_dist=True)
    assert torch.equal(target["w"], made["w"])


class Counting(DCPWriter):
    items = 0

    def write_data(self, plan, planner):
        Counting.items += len(plan.items)
        return super().write_data(plan, planner)


class CountingReader(DCPReader):
    items = 0

    def read_data(self, plan, planner):
        CountingReader.items += len(plan.items)
        return super().read_data(plan, planner)


def test_subclasses_of_writer_and_reader_get_the_items(tmp_path):
    made, target = {"w": torch.arange(8.0), "v": torch.ones(2)}, {"w": torch.zeros(8), "v": torch.zeros(2)}
    dcp.save(made, storage_writer=Counting(tmp_path), planner=DCPSavePlanner(), no_dist=True)
    dcp.load(target, storage_reader=CountingReader(tmp_path), planner=DCPLoadPlanner(), no_dist=True)
    assert torch.equal(target["w"], made["w"])
    assert (Counting.items, CountingReader.items) == (2, 2)


def test_a_planner_that_has_saved_can_be_sent_to_another_process(tmp_path):
    planner = DCPSavePlanner()
    made = {"w": torch.arange(8.0)}
    dcp.save(made, storage_writer=DCPWriter(tmp_path / "a"), planner=planner, no_dist=True)
    sent = pickle.dumps(planner)
    assert len(sent) < 1000
    dcp.save(made, storage_writer=DCPWriter(tmp_path / "b"), planner=pickle.loads(sent), no_dist=True)
    assert (tmp_path / "b" / ".metadata").exists()


def test_keys_written_by_torch_before_2_4_need_torchs_planner(tmp_path, monkeypatch):
    """Until 2.4, torch saved a dict without tensors as one object."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, _version

    monkeypatch.setattr(_version, "_derived_version", "2_3")
    made = {"w": torch.arange(8.0), "o": {"lr": 0.5, "betas": {"a": 1}}}
    dcp.save(made, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    monkeypatch.setattr(_version, "_derived_version", None)
    target = {"w": torch.zeros(8), "o": {"lr": 0.0, "betas": {"a": 0}}}
    cause = failure(tmp_path, target, planned=True)
    assert "o.betas.a: not in the checkpoint, which has 'o' as one object" in str(cause)
    dcp.load(target, storage_reader=DCPReader(tmp_path), planner=DefaultLoadPlanner(), no_dist=True)
    assert torch.equal(target["w"], made["w"])
    assert target["o"] == made["o"]


def test_an_idle_planner_keeps_no_tensor_alive(tmp_path):
    planner = DCPSavePlanner()
    made = {"w": torch.arange(8.0)}
    dcp.save(made, storage_writer=DCPWriter(tmp_path), planner=planner, no_dist=True)
    weight = weakref.ref(made.pop("w"))
    gc.collect()
    assert weight() is None
