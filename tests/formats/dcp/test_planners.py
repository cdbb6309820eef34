"""`DCPSavePlanner` and `DCPLoadPlanner` in `dcp.save` and `dcp.load`: with our writer and reader, and with torch's."""

import gc
import pickle
import re
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, _version
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ckptkit import DCPLoadPlanner, DCPReader, DCPSavePlanner, DCPWriter
from ckptkit.errors import CheckpointExistsError, CheckpointMismatchError, SaveError
from tests.formats.dcp.test_torch_api import one
from tests.formats.dcp_states import assert_loads, differences, failure, load, save, state
from tests.formats.interop_cases import blank
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@on_ranks(4)
def test_with_torchs_writer_and_reader_the_planners_behave_as_torchs(tmp_path):
    made = state("hsdp@4")
    save(dcp.FileSystemWriter(tmp_path, sync_files=False), made, DCPSavePlanner())
    assert_loads(dcp.FileSystemReader(tmp_path), made, DCPLoadPlanner())


@pytest.mark.parametrize("kind", ["plain", "hsdp"])
@on_ranks(4)
def test_a_replica_is_written_once_and_evenly(tmp_path, kind):
    full = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    made = {"w": full}
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        made = {"w": distribute_tensor(full, mesh, (Replicate(), Shard(0)), src_data_rank=None)}
    save(tmp_path, made, DCPSavePlanner())
    written = [sum(path.stat().st_size for path in tmp_path.glob(f"__{rank}_*")) for rank in range(4)]
    assert full.nbytes < sum(written) < 1.01 * full.nbytes
    assert max(written) < 1.01 * min(written)


@on_ranks(4)
def test_small_replicas_are_spread_over_the_ranks(tmp_path):
    save(tmp_path, {f"layers.{i}.norm": torch.full((64,), float(i)) for i in range(400)}, DCPSavePlanner())
    counts = Counter(part.rank for entry in DCPReader(tmp_path).catalog.tensors.values() for part in entry.slices)
    assert counts.total() == 400 and min(counts[rank] for rank in range(4)) > 60


@on_ranks(3)
def test_a_subgroup_saves_complete_replicas(tmp_path):
    group = dist.new_group([1, 2])
    if dist.get_rank():
        made = {"w": torch.arange(600_000.0), "small": torch.arange(3), "o": {"lr": 0.5}}
        save(tmp_path, made, DCPSavePlanner(), process_group=group)
        assert_loads(tmp_path, made, DCPLoadPlanner(), process_group=group)
        dist.destroy_process_group(group)


@on_ranks(2)
def test_a_save_after_a_failed_save_is_complete(tmp_path):
    """The first save is refused; the second, with the same planner, must not count as a later save."""
    rank, planner = dist.get_rank(), DCPSavePlanner()
    made = {"all": torch.arange(10.0), f"own.{rank}": torch.ones(2)}
    if rank == 0:
        DCPWriter(tmp_path, sync=False)._store().write(".metadata", b"a checkpoint")
    dist.barrier()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path, made, planner)
    assert all(isinstance(cause[0], CheckpointExistsError) for cause in caught.value.failures.values())
    save(tmp_path / "again", made, planner)
    assert_loads(tmp_path / "again", made, DCPLoadPlanner())


@on_ranks(2)
def test_every_rank_gets_the_metadata_of_what_was_saved(tmp_path):
    made = state("shard0@2")
    both = save(tmp_path / "a", made, DCPSavePlanner()), save(dcp.FileSystemWriter(tmp_path / "b"), made)
    ours, torchs = (
        {
            name: (found.size, found.properties.dtype) if isinstance(found, TensorStorageMetadata) else type(found)
            for name, found in metadata.state_dict_metadata.items()
        }
        for metadata in both
    )
    assert ours == torchs and dict(both[0].planner_data) == dict(both[1].planner_data)


def test_all_mismatches_are_listed_and_nothing_is_changed(tmp_path):
    one(tmp_path, planned=True)
    target = {"w": torch.zeros(50_000), "small": torch.zeros(6), "more": torch.zeros(1), "o": {"lr": 0.0}}
    cause = failure(load, tmp_path, target, DCPLoadPlanner())
    assert isinstance(cause, CheckpointMismatchError) and not target["w"].any()
    assert "small: " in str(cause) and "more: not in the checkpoint" in str(cause)


def test_a_partial_load_leaves_missing_keys_unchanged(tmp_path):
    made = one(tmp_path, planned=True)
    target = {"w": torch.zeros(50_000), "more": torch.ones(1), "o": {"lr": 0.0, "new": 7}}
    load(tmp_path, target, DCPLoadPlanner(allow_partial_load=True))
    assert torch.equal(target["w"], made["w"]) and target["more"].item() == 1
    assert target["o"] == {"lr": 0.5, "new": 7}


@on_ranks(2)
def test_meta_tensors_are_materialized(tmp_path):
    made, mesh = state("shard0@2"), init_device_mesh("cpu", (2,))
    save(tmp_path, made, DCPSavePlanner())
    target = blank(made)
    target["model"]["large"] = torch.empty(700, 1100, device="meta")
    empty = torch.empty(64, 48, dtype=torch.bfloat16, device="meta")
    target["model"]["d0.s1"] = distribute_tensor(empty, mesh, (Shard(0),), src_data_rank=None)
    assert differences(load(tmp_path, target, DCPLoadPlanner()), made) == []


@on_ranks(2)
def test_tensors_without_a_consistent_whole_are_refused_by_name(tmp_path):
    partial = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), (Partial(),))
    different = torch.zeros(3 + dist.get_rank())
    for i, (made, text) in enumerate(((partial, "partial sum"), (different, r"rank 1 has float32 of shape \[4\]"))):
        error = failure(save, f"{tmp_path}/{i}", {"w": made}, DCPSavePlanner())
        assert isinstance(error, SaveError) and re.match(f"w: .*{text}", str(error))
        assert not (tmp_path / str(i) / ".metadata").exists()


def test_overrides_of_a_subclass_are_called(tmp_path):
    class Halved(DCPSavePlanner):
        def transform_object(self, write_item, object):
            found = super().transform_object(write_item, object)
            return found / 2 if isinstance(found, torch.Tensor) else found

    class Doubled(DCPLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            tensor.mul_(2)

    made = torch.arange(8.0)
    save(tmp_path, {"w": made}, Halved())
    assert_loads(tmp_path, {"w": made / 2}, DCPLoadPlanner())
    assert_loads(tmp_path, {"w": made}, Doubled())


@pytest.mark.parametrize(("base", "method"), [(DCPWriter, "write_data"), (DCPReader, "read_data")])
def test_subclasses_of_writer_and_reader_get_the_items(tmp_path, base, method):
    counts = []

    def counted(self, plan, planner):
        counts.append(len(plan.items))
        return getattr(base, method)(self, plan, planner)

    made, kinds = {"w": torch.arange(8.0), "v": torch.ones(2)}, {base: type("Counting", (base,), {method: counted})}
    save(kinds.get(DCPWriter, DCPWriter)(tmp_path), made, DCPSavePlanner())
    assert_loads(kinds.get(DCPReader, DCPReader)(tmp_path), made, DCPLoadPlanner())
    assert counts == [2]


def test_a_planner_that_has_saved_can_be_sent_to_another_process_and_keeps_no_tensor_alive(tmp_path):
    planner, made = DCPSavePlanner(), {"w": torch.arange(8.0)}
    save(tmp_path / "a", made, planner)
    sent = pickle.dumps(planner)
    assert len(sent) < 1000
    save(tmp_path / "b", made, pickle.loads(sent))
    assert (tmp_path / "b" / ".metadata").exists()
    weight = weakref.ref(made.pop("w"))
    gc.collect()
    assert weight() is None


def test_keys_written_by_torch_before_2_4_need_torchs_planner(tmp_path, monkeypatch):
    """Until 2.4, torch saved a dict without tensors as one object."""
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    made = {"w": torch.arange(8.0), "o": {"lr": 0.5, "betas": {"a": 1}}}
    save(dcp.FileSystemWriter(tmp_path), made)
    monkeypatch.setattr(_version, "_derived_version", None)
    cause = failure(load, tmp_path, blank(made), DCPLoadPlanner())
    assert "o.betas.a: not in the checkpoint, which has 'o' as one object" in str(cause)
    assert_loads(tmp_path, made, DefaultLoadPlanner())
