"""Sharded states written and read without torch's planners, over real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
from tests.formats.dcp_states import differences, state
from tests.formats.sharded import all_gather, catalog_of, gather, read_alone, read_sharded, write_alone, write_sharded
from tests.offline.folders import flip


def save(
    made: dict[str, Any], url: str, previous: ShardedPlan | None = None, exchange: Any = all_gather
) -> ShardedPlan:
    options: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "sync": False}
    _, plan = write_sharded(made, LocalStore(url), gather=gather, all_gather=exchange, previous=previous, **options)
    dist.barrier()
    return plan


def wrote(made: dict[str, Any], url: str, ranks: int | None = None) -> str:
    """Save step by step, with the slices of so many ranks; return the error."""
    plan = plan_sharded(made, rank=dist.get_rank(), world_size=2)
    plan = plan.settle(all_gather(plan.signature), all_gather)
    store = LocalStore(url)
    parts = gather(plan.write(store, sync=False).part)
    try:
        return "" if parts is None else str(write_index(parts[:ranks], store))
    except SaveError as error:
        return str(error)


def save_layout(layout: str, url: str) -> None:
    save(state(layout), url)


def replicated(url: str, kind: str) -> tuple[int, int]:
    world = dist.get_world_size()
    full = torch.randn(world * 1024, 1024, generator=torch.Generator().manual_seed(0))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        made = {"w": distribute_tensor(full, mesh, (Replicate(), Shard(0)), src_data_rank=None)}
    else:
        made = {"w": full}
    save(made, url)
    files = [os.path.getsize(f"{url}/{n}") for n in os.listdir(url) if n.startswith(f"__{dist.get_rank()}_")]
    return sum(files), full.numel() * 4


@pytest.mark.parametrize("kind", ["plain", "hsdp"])
def test_a_replica_is_written_once_and_evenly(ranks, tmp_path, kind):
    answers = ranks.run(replicated, 4, str(tmp_path), kind)
    written, total = [a[0] for a in answers], answers[0][1]
    assert total < sum(written) < 1.01 * total
    assert max(written) < 1.01 * min(written)


def small_replicas(url: str) -> int:
    made = {f"layers.{i}.norm": torch.full((64,), float(i)) for i in range(400)}
    return len(save(made, url).slices)


def test_small_replicas_are_spread_over_the_ranks(ranks, tmp_path):
    counts = ranks.run(small_replicas, 4, str(tmp_path))
    assert sum(counts) == 400
    assert min(counts) > 60


def uneven_keys(url: str) -> list[str]:
    rank = dist.get_rank()
    made: dict[str, Any] = {
        "all": torch.arange(10.0),
        f"only.{rank}": torch.full((3,), float(rank)),
        f"rng.{rank}": [rank],
    }
    if rank:
        made["some"] = torch.ones(4)
    save(made, url)
    target = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for name, v in made.items()}
    read_alone(url, target)
    return differences(target, made)


def test_keys_that_only_some_ranks_have_are_saved(ranks, tmp_path):
    assert ranks.run(uneven_keys, 3, str(tmp_path)) == [[]] * 3
    names = {*catalog_of(tmp_path).tensors, *catalog_of(tmp_path).objects}
    assert names == {"all", "some", *(f"{kind}.{rank}" for kind in ("only", "rng") for rank in range(3))}


def private_keys() -> tuple[bytes, int]:
    rank = dist.get_rank()
    made = {"all": torch.arange(10.0), f"rng.{rank}": torch.ones(3)}
    plan = plan_sharded(made, rank=rank, world_size=2, private=[f"rng.{rank}"])
    return plan.digest, sum(plan.keys[s.key].name.startswith("rng") for s in plan.slices)


def test_keys_of_one_rank_are_written_by_it_and_do_not_change_the_signature(ranks):
    (first, mine), (second, theirs) = ranks.run(private_keys, 2)
    assert (first, mine, theirs) == (second, 1, 1)


def second_save(url: str) -> tuple[int, list[str]]:
    exchanged = []

    def counted(data: bytes) -> list[bytes]:
        exchanged.append(data)
        return all_gather(data)

    made = state("hsdp@4")
    made["model"][f"own.{dist.get_rank()}"] = torch.ones(2)
    first = save(made, f"{url}/0", exchange=counted)
    before = len(exchanged)
    made["model"]["large"] += 1
    made["extra"]["objects"]["lr"] = 0.5
    save(made, f"{url}/1", first, exchange=counted)
    target = state("hsdp@4", zeros=True)
    read_alone(f"{url}/1", target)
    del made["model"][f"own.{dist.get_rank()}"]
    return len(exchanged) - before - 1, differences(target, made)


def test_a_second_save_of_the_same_structure_exchanges_nothing(ranks, tmp_path):
    assert ranks.run(second_save, 4, str(tmp_path)) == [(0, [])] * 4


def changes(url: str) -> list[tuple[list[str], str]]:
    """Save tensors of one name and shape repeatedly, each time with another placement or dtype."""
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "tp")]
    kinds: list[tuple[int, Any, torch.dtype]] = [
        (0, Shard(0), torch.float32),
        (0, Shard(0), torch.float32),
        (0, Shard(1), torch.float32),
        (0, Replicate(), torch.float32),
        (1, Replicate(), torch.float32),
        (1, Replicate(), torch.bfloat16),
        (1, Replicate(), torch.bfloat16),
    ]
    plan, found = None, []
    for i, (mesh, placement, dtype) in enumerate(kinds):
        full = torch.arange(64.0).reshape(8, 8).to(dtype) + i
        made = {"w": distribute_tensor(full, meshes[mesh], (placement,), src_data_rank=None)}
        plan = save(made, f"{url}/{i}", plan)
        catalog = catalog_of(f"{url}/{i}")
        target = {"w": torch.zeros(8, 8, dtype=dtype)}
        read_sharded(catalog, LocalStore(f"{url}/{i}"), target)
        placed = catalog.info.extra[PLACEMENTS]["w"]
        text = f"{catalog.info.extra['meshes'][placed[0]]['names'][0]}:{placed[1][0]}"
        found.append((differences(target, {"w": full}), text))
    return found


def test_a_changed_dtype_placement_or_mesh_is_saved(ranks, tmp_path):
    for found in ranks.run(changes, 2, str(tmp_path)):
        assert [problems for problems, _ in found] == [[]] * 7
        assert [text for _, text in found] == ["dp:S(0)", "dp:S(0)", "dp:S(1)", "dp:R", "tp:R", "tp:R", "tp:R"]


@pytest.mark.parametrize("staged", [[], [torch.zeros(3)]])
def test_staged_copies_of_other_tensors_are_refused(tmp_path, staged):
    plan = plan_sharded({"w": torch.ones(1000)})
    with pytest.raises(SaveError, match="staged"):
        plan.write(LocalStore(str(tmp_path)), tensors=staged)


@pytest.mark.parametrize("sync", [True, False])
def test_writeback_starts_before_the_fsync(tmp_path, monkeypatch, sync):
    begun: list[int] = []
    monkeypatch.setattr("ckptkit.formats.dcp.files._DIRTY", 1 << 20)
    monkeypatch.setattr("ckptkit.formats.dcp.files.start_writing", lambda fd: begun.append(os.fstat(fd).st_size))
    plan = plan_sharded({f"w{i}": torch.zeros(300, 1024) for i in range(4)})
    part = plan.write(LocalStore(tmp_path), workers=1, sync=sync)
    assert len(begun) == (4 if sync else 0)
    assert all(0 < size < sum(item.nbytes for item in part.files.values()) for size in begun)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_full_tmpfs_fails_the_write_and_removes_its_file(tmp_path, workers):
    plan = plan_sharded({f"w{i}": torch.randn(3 << 20) for i in range(6)})
    with disk(tmp_path / "small", "tmpfs", 24 << 10) as place:
        with pytest.raises(NoSpaceError, match="No space left"):
            plan.write(LocalStore(str(place)), workers=workers)
        assert len(list(place.iterdir())) < workers  # files that were not started are not written


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_reported_files_are_the_files_on_disk(tmp_path, workers):
    import xxhash

    plan = plan_sharded({f"w{i}": torch.randn(3 << 20) for i in range(5)} | {"o": [1, 2]})
    store = LocalStore(str(tmp_path))
    part = plan.write(store, workers=workers)
    files = {**part.files, **write_index([part.part], store)}
    assert len(part.files) == workers
    assert files.keys() == {p.name for p in tmp_path.iterdir()}
    for name, item in files.items():
        data = (tmp_path / name).read_bytes()
        assert len(data) == item.nbytes
        assert item.outlined == (name in part.files)
        if not item.outlined:
            assert xxhash.xxh3_64_hexdigest(data) == item.checksum


def test_metadata_is_written_after_the_manifest(tmp_path):
    class Broken(LocalStore):
        def write(self, path: str, *args: Any, **options: Any) -> None:
            assert METADATA_NAME not in os.listdir(tmp_path)
            raise NoSpaceError(28, f"{path}: no space left")

    plan = plan_sharded({"w": torch.randn(10)})
    part = plan.write(LocalStore(str(tmp_path)))
    with pytest.raises(NoSpaceError, match="manifest"):
        write_index([part.part], Broken(str(tmp_path)))
    assert os.listdir(tmp_path) == list(part.files)


def test_an_object_that_would_run_code_is_refused_when_saving():
    class Local:
        pass

    with pytest.raises(SaveError, match=r"x\.y: a value of type"):
        plan_sharded({"x": {"y": Local}})


def partial_sum() -> str:
    mesh = init_device_mesh("cpu", (2,))
    try:
        plan_sharded({"w": DTensor.from_local(torch.ones(3), mesh, (Partial(),))}, rank=dist.get_rank(), world_size=2)
    except SaveError as error:
        return str(error)
    return "planned"


def test_a_partial_sum_is_refused(ranks):
    assert all("partial sum" in answer for answer in ranks.run(partial_sum, 2))


def wrong_shape(url: str) -> str:
    return wrote({"w": torch.zeros(3 + dist.get_rank())}, url)


def test_a_duplicate_name_fails_the_save(ranks, tmp_path):
    assert "w: rank 1 has float32 of shape [4]" in ranks.run(wrong_shape, 2, str(tmp_path))[0]
    assert not (tmp_path / ".metadata").exists()


def test_meshes_and_placements_are_in_the_manifest(ranks, tmp_path):
    ranks.run(save_layout, 4, "tp@4", str(tmp_path))
    info = catalog_of(tmp_path).info
    assert info.extra["meshes"] == [{"shape": [2, 2], "names": ["a", "b"]}]
    assert info.extra[PLACEMENTS]["model.d0.s1"] == [0, ["S(0)", "S(1)"]]


# --- reading


def resharded(url: str, placement: Any, verify: str) -> tuple[bool, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(3.0 * 2**20).reshape(3 << 10, 1 << 10)
    made = {"w": distribute_tensor(torch.zeros_like(full), mesh, (placement,), src_data_rank=None)}
    found = read_alone(url, made, verify=Verify(verify))
    expected = distribute_tensor(full, mesh, (placement,), src_data_rank=None).to_local()
    return torch.equal(made["w"].to_local(), expected), found.filler.nbytes / (expected.numel() * 4)


@pytest.fixture
def large(tmp_path):
    write_alone({"w": torch.arange(3.0 * 2**20).reshape(3 << 10, 1 << 10)}, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("verify", ["read", "full", "off"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_reshard_gives_the_same_elements(ranks, large, placement, verify):
    for same, ratio in ranks.run(resharded, 3, large, placement, verify):
        assert same
        assert ratio <= 1.05 or placement != Shard(0) or verify == "full"  # only the rows needed


def asked_of_the_system(url: str, reader: str) -> float:
    """Return the bytes that read calls of this process returned, divided by the bytes of its rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {"w": distribute_tensor(torch.zeros(3 << 10, 1 << 10), mesh, (Shard(0),), src_data_rank=None)}
    catalog, own = catalog_of(url), DCPReader(url)
    assert own.catalog is not None
    before = returned()
    if reader == "read_sharded":
        read_sharded(catalog, LocalStore(url), made)
    else:
        dcp.load(made, storage_reader=own, no_dist=True)
    found = returned() - before
    assert torch.equal(made["w"].to_local()[0, :3], 1024.0 * (dist.get_rank() << 10) + torch.arange(3.0))
    return found / (made["w"].to_local().numel() * 4)


def returned() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("reader", ["read_sharded", "DCPReader"])
def test_a_row_reshard_reads_only_its_rows_from_the_disk(ranks, large, reader):
    for ratio in ranks.run(asked_of_the_system, 3, large, reader):
        assert 1.0 <= ratio <= 1.05


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
    write_alone({"model": {"w": torch.ones(nbytes // 4)}}, tmp_path)
    part = catalog_of(tmp_path).tensors["model.w"].slices[0]
    flip(tmp_path / part.path, part.start + nbytes // 2)
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp: .*'model\.w'"):
        read_alone(tmp_path, {"model": {"w": torch.zeros(nbytes // 4)}}, verify=Verify(verify))


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
    written = plan_sharded({"w": torch.ones(1 << 20)}).write(LocalStore(str(tmp_path)))
    assert {phase for phase, _, _ in written.phases} == {"digest", "sync", "write"}
    assert all(4 << 20 <= nbytes < 5 << 20 for _, _, nbytes in written.phases)


def torn(url: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    return wrote({"w": distribute_tensor(torch.ones(4, 4), mesh, (Shard(0),), src_data_rank=None)}, url, 1)


def test_a_tensor_with_elements_that_no_rank_wrote_fails_the_save(ranks, tmp_path):
    assert "have 8 of 16 elements" in ranks.run(torn, 2, str(tmp_path))[0]
    assert not (tmp_path / ".metadata").exists()


def table_sizes(url: str) -> int:
    made = {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(500)}
    plan = plan_sharded(made, rank=dist.get_rank(), world_size=4)
    plan = plan.settle(all_gather(plan.signature), all_gather)
    return len(plan.write(LocalStore(url), sync=False).part)


def test_names_are_sent_by_only_one_rank(ranks, tmp_path):
    first, *others = ranks.run(table_sizes, 4, str(tmp_path))
    assert max(others) < first / 2
