"""Sharded states written and read without torch's planners, over real ranks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ckptkit.catalog.box import Box
from ckptkit.errors import IntegrityError, NoSpaceError, SaveError
from ckptkit.formats.dcp.fill import Filler
from ckptkit.formats.dcp.index import METADATA_NAME, write_index
from ckptkit.formats.dcp.plan import ShardedPlan, plan_sharded
from ckptkit.formats.dcp.read import Verify
from ckptkit.formats.dcp.torch_api import DCPReader
from ckptkit.formats.own.manifest import PLACEMENTS
from ckptkit.storage.local import LocalStore
from tests.checkpoint.full_disk import disk
from tests.formats.dcp_states import state
from tests.formats.interop_cases import blank
from tests.formats.sharded import (
    all_gather,
    assert_reads,
    catalog_of,
    gather,
    read_alone,
    read_sharded,
    write_alone,
    write_sharded,
)
from tests.offline.folders import flip
from tests.ranks import on_ranks


def save(
    made: dict[str, Any], url: str, previous: ShardedPlan | None = None, exchange: Any = all_gather
) -> ShardedPlan:
    options: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "sync": False}
    _, plan = write_sharded(made, LocalStore(url), gather=gather, all_gather=exchange, previous=previous, **options)
    dist.barrier()
    return plan


@pytest.mark.parametrize("kind", ["plain", "hsdp"])
@on_ranks(4)
def test_a_replica_is_written_once_and_evenly(tmp_path, kind):
    full = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
    made = {"w": full}
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        made = {"w": distribute_tensor(full, mesh, (Replicate(), Shard(0)), src_data_rank=None)}
    save(made, str(tmp_path))
    written = [sum(path.stat().st_size for path in tmp_path.glob(f"__{rank}_*")) for rank in range(4)]
    assert full.nbytes < sum(written) < 1.01 * full.nbytes
    assert max(written) < 1.01 * min(written)


@on_ranks(4)
def test_small_replicas_are_spread_over_the_ranks(tmp_path):
    plan = save({f"layers.{i}.norm": torch.full((64,), float(i)) for i in range(400)}, str(tmp_path))
    counts = [int(count) for count in all_gather(b"%d" % len(plan.slices))]
    assert sum(counts) == 400 and min(counts) > 60


@on_ranks(3)
def test_keys_that_only_some_ranks_have_are_saved(tmp_path):
    rank = dist.get_rank()
    made = {"all": torch.arange(10.0), f"only.{rank}": torch.full((3,), float(rank)), f"rng.{rank}": [rank]}
    if rank:
        made["some"] = torch.ones(4)
    save(made, str(tmp_path))
    assert_reads(tmp_path, made)
    names = {*catalog_of(tmp_path).tensors, *catalog_of(tmp_path).objects}
    assert names == {"all", "some", *(f"{kind}.{rank}" for kind in ("only", "rng") for rank in range(3))}


@on_ranks(2)
def test_keys_of_one_rank_are_written_by_it_and_do_not_change_the_signature():
    rank = dist.get_rank()
    made = {"all": torch.arange(10.0), f"rng.{rank}": torch.ones(3)}
    plan = plan_sharded(made, rank=rank, world_size=2, private=[f"rng.{rank}"])
    assert len(set(all_gather(plan.digest))) == 1
    assert sum(plan.keys[s.key].name.startswith("rng") for s in plan.slices) == 1


@on_ranks(4)
def test_a_second_save_of_the_same_structure_exchanges_nothing(tmp_path):
    exchanged = []

    def counted(data: bytes) -> list[bytes]:
        exchanged.append(data)
        return all_gather(data)

    made = state("hsdp@4")
    made["model"][f"own.{dist.get_rank()}"] = torch.ones(2)
    first = save(made, f"{tmp_path}/0", exchange=counted)
    before = len(exchanged)
    made["model"]["large"] += 1
    made["extra"]["objects"]["lr"] = 0.5
    save(made, f"{tmp_path}/1", first, exchange=counted)
    assert len(exchanged) - before == 1  # its signature
    assert_reads(f"{tmp_path}/1", made)


@on_ranks(2)
def test_a_changed_dtype_placement_or_mesh_is_saved(tmp_path):
    """Save tensors of one name and shape repeatedly, each time with another placement or dtype."""
    meshes = {name: init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "tp")}
    kinds: list[tuple[str, Any, torch.dtype]] = [
        ("dp", Shard(0), torch.float32), ("dp", Shard(0), torch.float32), ("dp", Shard(1), torch.float32),
        ("dp", Replicate(), torch.float32), ("tp", Replicate(), torch.float32), ("tp", Replicate(), torch.bfloat16),
        ("tp", Replicate(), torch.bfloat16),
    ]  # fmt: skip
    plan = None
    for i, (mesh, placement, dtype) in enumerate(kinds):
        full = torch.arange(64.0).reshape(8, 8).to(dtype) + i
        made = {"w": distribute_tensor(full, meshes[mesh], (placement,), src_data_rank=None)}
        plan = save(made, f"{tmp_path}/{i}", plan)
        assert_reads(f"{tmp_path}/{i}", {"w": full})
        extra = catalog_of(f"{tmp_path}/{i}").info.extra
        number, (text,) = extra[PLACEMENTS]["w"]
        assert extra["meshes"][number]["names"] == [mesh]
        assert text == (f"S({placement.dim})" if placement.is_shard() else "R")


@pytest.mark.parametrize("staged", [[], [torch.zeros(3)]])
def test_staged_copies_of_other_tensors_are_refused(tmp_path, staged):
    plan = plan_sharded({"w": torch.ones(1000)})
    with pytest.raises(SaveError, match="staged"):
        plan.write(LocalStore(str(tmp_path)), tensors=staged)


@pytest.mark.parametrize("sync", [True, False])
def test_writeback_starts_before_the_fsync(tmp_path, monkeypatch, sync):
    begun: list[int] = []
    monkeypatch.setattr("ckptkit.storage.local._DIRTY", 1 << 20)
    monkeypatch.setattr("ckptkit.storage.local.start_writing", lambda fd: begun.append(os.fstat(fd).st_size))
    plan = plan_sharded({f"w{i}": torch.zeros(300, 1024) for i in range(4)})
    part = plan.write(LocalStore(tmp_path), workers=1, sync=sync)
    assert len(begun) == (4 if sync else 0)
    assert all(0 < size < sum(item.nbytes for item in part.written.files.values()) for size in begun)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_full_tmpfs_fails_the_write_and_removes_its_file(tmp_path, workers):
    plan = plan_sharded({f"w{i}": torch.randn(3 << 20) for i in range(6)})
    with disk(tmp_path / "small", "tmpfs", 24 << 10) as place:
        with pytest.raises(NoSpaceError, match="No space left"):
            plan.write(LocalStore(str(place)), workers=workers)
        assert len(list(place.iterdir())) < workers  # files that were not started are not written


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_reported_files_are_the_files_on_disk(tmp_path, workers):
    plan = plan_sharded({f"w{i}": torch.randn(3 << 20) for i in range(5)} | {"o": [1, 2]})
    store = LocalStore(str(tmp_path))
    part = plan.write(store, workers=workers)
    files = {**part.written.files, **write_index([part], store)}
    assert len(part.written.files) == workers
    assert files.keys() == {p.name for p in tmp_path.iterdir()}
    for name, item in files.items():
        data = (tmp_path / name).read_bytes()
        assert len(data) == item.nbytes and item.outlined == (name in part.written.files)
        assert item.outlined or xxhash.xxh3_64_hexdigest(data) == item.checksum


def test_metadata_is_written_after_the_manifest(tmp_path):
    class Broken(LocalStore):
        def write(self, path: str, *args: Any, **options: Any) -> None:
            assert METADATA_NAME not in os.listdir(tmp_path)
            raise NoSpaceError(28, f"{path}: no space left")

    plan = plan_sharded({"w": torch.randn(10)})
    part = plan.write(LocalStore(str(tmp_path)))
    with pytest.raises(NoSpaceError, match="manifest"):
        write_index([part], Broken(str(tmp_path)))
    assert os.listdir(tmp_path) == list(part.written.files)


def test_an_object_that_would_run_code_is_refused_when_saving():
    with pytest.raises(SaveError, match=r"x\.y: a value of type"):
        plan_sharded({"x": {"y": type("Local", (), {})}})


def settled(made: dict[str, Any], previous: ShardedPlan | None = None, **options: Any) -> ShardedPlan:
    """Plan a save step by step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = plan_sharded(made, rank=rank, world_size=world_size, previous=previous, **options)
    return plan.settle(all_gather(plan.signature), all_gather)


def wrote(made: dict[str, Any], url: str, ranks: int | None = None) -> None:
    """Save step by step, with the slices of so many ranks; all ranks raise the error of rank 0."""
    store = LocalStore(url)
    write_index(all_gather(settled(made).write(store, sync=False))[:ranks], store)


@on_ranks(2)
def test_tensors_without_a_consistent_whole_are_refused_by_name(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.ones(4, 4), mesh, (Shard(0),), src_data_rank=None)
    for i, (made, ranks, text) in enumerate((
        (DTensor.from_local(torch.ones(3), mesh, (Partial(),)), 2, "partial sum"),
        (torch.zeros(3 + dist.get_rank()), 2, r"w: rank 1 has float32 of shape \[4\]"),
        (rows, 1, "cover only 8 of 16 elements"),  # one rank wrote nothing
    )):  # fmt: skip
        with pytest.raises(SaveError, match=text):
            wrote({"w": made}, f"{tmp_path}/{i}", ranks)
        assert not (tmp_path / str(i) / ".metadata").exists()


@on_ranks(4)
def test_meshes_and_placements_are_in_the_manifest(tmp_path):
    save(state("tp@4"), str(tmp_path))
    info = catalog_of(tmp_path).info
    assert info.extra["meshes"] == [{"shape": [2, 2], "names": ["a", "b"]}]
    assert info.extra[PLACEMENTS]["model.d0.s1"] == [0, ["S(0)", "S(1)"]]


# --- reading


WIDE = torch.arange(3.0 * 2**20).reshape(3 << 10, 1 << 10)


@pytest.fixture
def large(tmp_path):
    write_alone({"w": WIDE}, tmp_path)
    return str(tmp_path)


def sharded(full: torch.Tensor, placement: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(full, mesh, (placement,), src_data_rank=None)}


@pytest.mark.parametrize("verify", ["read", "full", "off"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@on_ranks(3)
def test_a_reshard_gives_the_same_elements(large, placement, verify):
    made, expected = sharded(torch.zeros_like(WIDE), placement), sharded(WIDE, placement)["w"].to_local()
    found = read_alone(large, made, verify=Verify(verify))
    assert torch.equal(made["w"].to_local(), expected)
    # only the rows needed
    assert found.filler.nbytes <= 1.05 * expected.nbytes or placement != Shard(0) or verify == "full"


@pytest.mark.parametrize("reader", ["read_sharded", "DCPReader"])
@on_ranks(3)
def test_a_row_reshard_reads_only_its_rows_from_the_disk(large, reader):
    made = sharded(torch.zeros_like(WIDE), Shard(0))
    catalog, own = catalog_of(large), DCPReader(large)
    assert own.catalog is not None
    before = returned()
    if reader == "read_sharded":
        read_sharded(catalog, LocalStore(large), made)
    else:
        dcp.load(made, storage_reader=own, no_dist=True)
    found, local = returned() - before, made["w"].to_local()
    assert torch.equal(local, sharded(WIDE, Shard(0))["w"].to_local())
    assert local.nbytes <= found <= 1.05 * local.nbytes


def returned() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_long_runs_of_columns_are_read_without_the_gaps(tmp_path):
    write_alone({"w": torch.arange(64.0 * 65536).reshape(64, 65536)}, tmp_path)
    target = torch.zeros(64, 16384)
    filler = Filler(LocalStore(str(tmp_path)))
    filler.add(catalog_of(tmp_path).tensors["w"], Box((0, 16384), (64, 16384)), target)
    filler.run()
    assert torch.equal(target, torch.arange(64.0 * 65536).reshape(64, 65536)[:, 16384:32768])
    assert filler.nbytes == target.numel() * 4


@pytest.mark.parametrize("nbytes", [40, 40_000, 4_000_000])
@pytest.mark.parametrize("verify", ["read", "full"])
def test_a_flipped_byte_is_found_and_named(tmp_path, nbytes, verify):
    others = {f"v{i}": torch.full((5, 3), float(i)) for i in range(20)}  # read together with a small tensor
    write_alone({"model": {"w": torch.ones(nbytes // 4), **others}}, tmp_path)
    part = catalog_of(tmp_path).tensors["model.w"].slices[0]
    flip(tmp_path / part.path, part.start + nbytes // 2)
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp: .*'model\.w'"):
        read_alone(tmp_path, {"model": {"w": torch.zeros(nbytes // 4), **blank(others)}}, verify=Verify(verify))


def test_damage_is_loaded_without_verification(tmp_path):
    write_alone({"step": torch.tensor(7)}, tmp_path)
    part = catalog_of(tmp_path).tensors["step"].slices[0]
    flip(tmp_path / part.path, part.start)
    target = {"step": torch.tensor(0)}
    read_alone(tmp_path, target, verify=Verify.OFF)
    assert int(target["step"]) == 6


def test_full_verification_finds_damage_outside_of_the_needed_bytes(tmp_path):
    write_alone({"w": torch.ones(1000, 1000)}, tmp_path)
    entry = catalog_of(tmp_path).tensors["w"]
    flip(tmp_path / entry.slices[0].path, entry.slices[0].start + 3_900_000)
    fillers = [Filler(LocalStore(str(tmp_path)), verify=verify) for verify in (Verify.READ, Verify.FULL)]
    for filler in fillers:
        filler.add(entry, Box((0, 0), (10, 1000)), torch.zeros(10, 1000))
    fillers[0].run()
    with pytest.raises(IntegrityError):
        fillers[1].run()


def test_a_flipped_byte_in_an_object_is_found(tmp_path):
    write_alone({"o": {"text": "needle in the haystack"}}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"needle", b"noodle"))
    with pytest.raises(IntegrityError, match=r"o\.text"):
        read_alone(tmp_path, {"o": {"text": ""}})


def test_a_write_reports_the_bytes_of_each_phase(tmp_path):
    part = plan_sharded({"w": torch.ones(1 << 20)}).write(LocalStore(str(tmp_path)))
    assert {phase for phase, _, _ in part.written.phases} == {"digest", "sync", "write"}
    assert all(4 << 20 <= nbytes < 5 << 20 for _, _, nbytes in part.written.phases)


@on_ranks(2)
def test_all_ranks_notice_a_change_on_one_rank(tmp_path):
    """Before the second save, rank 1 alone gets new keys, private and shared ones. No rank may hang."""
    rank, plan = dist.get_rank(), None
    for i in range(4):
        made: dict[str, Any] = {"all": torch.arange(10.0) + i, f"own.{rank}": torch.full((2,), float(i))}
        if rank == 1 and i >= 1:
            made["own.1"] = torch.full((3,), float(i))
        if rank == 1 and i == 2:
            made.update({f"new.{n}": torch.full((4,), float(i)) for n in range(40)})
        plan = settled(made, plan, private=[f"own.{rank}"])
        store = LocalStore(f"{tmp_path}/{i}")
        parts = gather(plan.write(store, sync=False))
        if parts is not None:
            write_index(parts, store, sync=False)
        dist.barrier()
        assert_reads(f"{tmp_path}/{i}", made)


@on_ranks(4)
def test_names_are_sent_by_only_one_rank(tmp_path):
    plan = settled({f"layers.{i}.weight": torch.zeros(4, 4) for i in range(500)})
    first, *others = (len(pickle.dumps(part)) for part in all_gather(plan.write(LocalStore(str(tmp_path)), sync=False)))
    assert max(others) < first / 2
