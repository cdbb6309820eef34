"""`DCPWriter` and `DCPReader` against torch's own, in both directions, on real ranks."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptkit.errors import CheckpointExistsError, CheckpointMismatchError, IntegrityError, UnsafePickleError
from ckptkit.formats.dcp.host_bytes import host_view
from ckptkit.formats.dcp.planners import DCPLoadPlanner, DCPSavePlanner
from ckptkit.formats.dcp.torch_api import DCPReader, DCPWriter
from tests.formats.dcp_states import LAYOUTS, differences, state
from tests.offline.folders import flip
from tests.ranks import on_ranks

PAIRS = [
    *((layout, layout) for layout in LAYOUTS),
    ("shard0@2", "shard0@3"), ("shard1@2", "shard0@3"), ("shard0@3", "shard1@2"), ("hsdp@4", "plain@1"),
    ("replicate@2", "hsdp@4"), ("plain@1", "tp@4"),
]  # fmt: skip


BOTH = pytest.mark.parametrize("planned", [False, True], ids=["torch's planners", "our planners"])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_planner(planned: bool) -> DCPSavePlanner | None:
    return DCPSavePlanner() if planned else None


def load_planner(planned: bool) -> DCPLoadPlanner | None:
    return DCPLoadPlanner() if planned else None


def save(layout: str, url: str, ours: bool = True, planned: bool = False) -> None:
    writer = DCPWriter(url, sync=False) if ours else dcp.FileSystemWriter(url, sync_files=False)
    dcp.save(state(layout), storage_writer=writer, planner=save_planner(planned))


def load_with_torch(layout: str, url: str) -> list[str]:
    target = state(layout, zeros=True)
    dcp.load(target, storage_reader=dcp.FileSystemReader(url))
    return differences(target, state(layout))


def load_common(layout: str, url: str, planned: bool = False) -> list[str]:
    """Load the keys that every layout has."""
    target, expected = state(layout, zeros=True), state(layout)
    for made in (target, expected):
        made["model"] = {k: v for k, v in made["model"].items() if not k.startswith(("d1", "d2"))}
    dcp.load(target, storage_reader=DCPReader(url), planner=load_planner(planned))
    return differences(target, expected)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_reads_what_dcp_writer_wrote(ranks, tmp_path, layout, planned):
    world_size = LAYOUTS[layout][0]
    ranks.run(save, world_size, layout, str(tmp_path), True, planned)
    assert ranks.run(load_with_torch, world_size, layout, str(tmp_path)) == [[]] * world_size


LOADS = [
    *((*pair, ours, False) for pair in PAIRS for ours in (False, True)),
    *((*pair, True, True) for pair in (*PAIRS[-6:], ("tp@4", "shard0@2"))),
    *((*pair, False, True) for pair in (("shard0@2", "shard1@2"), ("hsdp@4", "shard0@3"))),
]


@pytest.mark.parametrize(("source", "target", "ours", "planned"), LOADS)
def test_dcp_reader_loads_any_layout_into_any_other(ranks, tmp_path, source, target, ours, planned):
    ranks.run(save, LAYOUTS[source][0], source, str(tmp_path), ours, ours and planned)
    assert ranks.run(load_common, LAYOUTS[target][0], target, str(tmp_path), planned) == [[]] * LAYOUTS[target][0]


def one(url, planned: bool = False, **options) -> dict[str, torch.Tensor]:
    made = {"w": torch.arange(50_000.0), "small": torch.arange(5), "o": {"lr": 0.5}}
    dcp.save(made, storage_writer=DCPWriter(url, **options), planner=save_planner(planned), no_dist=True)
    return made


def test_the_offline_tools_of_torch_read_our_files(tmp_path):
    made = one(tmp_path / "c")
    dcp_to_torch_save(str(tmp_path / "c"), str(tmp_path / "x.pt"))
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(found["w"], made["w"])
    assert found["o"] == {"lr": 0.5}


def test_metadata_equals_what_torch_would_write(tmp_path):
    made = one(tmp_path / "ours")
    dcp.save(made, checkpoint_id=tmp_path / "torch", no_dist=True)
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "torch"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()


@BOTH
@pytest.mark.parametrize("needle", [torch.arange(50_000.0), torch.arange(5)], ids=["large", "small"])
def test_a_flipped_byte_is_found_on_load_and_named(tmp_path, needle, planned):
    made = one(tmp_path, planned)
    file = next(tmp_path.glob("*.distcp"))
    flip(file, file.read_bytes().index(needle.numpy().tobytes()) + 9, bit=2)
    cause = failure(tmp_path, made, planned)
    assert isinstance(cause, IntegrityError) and file.name in str(cause)


def test_a_checkpoint_is_overwritten_only_on_request(tmp_path):
    one(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(dcp.api.CheckpointException) as error:
        one(tmp_path)
    assert isinstance(next(iter(error.value.failures.values()))[0], CheckpointExistsError)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_overwriting_leaves_no_stale_file(tmp_path):
    one(tmp_path)
    (tmp_path / "__7_0.distcp").write_bytes(b"stale")
    one(tmp_path, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.safetensors"]


def test_leftovers_of_an_unfinished_save_are_replaced(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"half")
    for name in ("__0_1.distcp", ".metadata", "__1.metadata", "manifest.safetensors"):
        (tmp_path / f".{name}.0123456789ab.part").write_bytes(b"the writer was killed")
    made = one(tmp_path)
    assert torch.equal(loaded(tmp_path)["w"], made["w"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.safetensors"]


def test_a_manifest_of_other_metadata_is_not_used(tmp_path):
    one(tmp_path)
    newer = {"w": torch.ones(50_000), "small": torch.ones(5, dtype=torch.int64), "o": {"lr": 0.1}}
    with pytest.warns(UserWarning, match="overwriting"):
        dcp.save(newer, checkpoint_id=tmp_path, no_dist=True)
    target = loaded(tmp_path)
    assert torch.equal(target["w"], newer["w"])
    assert target["o"] == {"lr": 0.1}


def loaded(url) -> dict[str, torch.Tensor]:
    target = {"w": torch.zeros(50_000), "small": torch.zeros(5, dtype=torch.int64), "o": {"lr": 0.0}}
    dcp.load(target, storage_reader=DCPReader(url), no_dist=True)
    return target


def failure(url, target, planned: bool = False) -> BaseException:
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(target, storage_reader=DCPReader(url), planner=load_planner(planned), no_dist=True)
    return next(iter(error.value.failures.values()))[0]


def test_a_dtype_is_cast_only_when_asked(tmp_path):
    made, target = one(tmp_path), {"w": torch.zeros(50_000, dtype=torch.bfloat16)}
    assert isinstance(failure(tmp_path, target), CheckpointMismatchError)
    assert not target["w"].any()
    dcp.load(target, storage_reader=DCPReader(tmp_path, cast=True), no_dist=True)
    assert torch.equal(target["w"], made["w"].bfloat16())


@BOTH
@on_ranks(2)
def test_without_collectives_each_rank_writes_its_own_metadata(tmp_path, planned):
    writer = DCPWriter(tmp_path, sync=False)
    dcp.save(state("shard0@2"), storage_writer=writer, planner=save_planner(planned), use_collectives=False)
    dist.barrier()
    assert load_common("shard0@2", str(tmp_path), planned) == []
    assert {p.name for p in tmp_path.glob("*metadata")} == {"__0.metadata", "__1.metadata"}


@BOTH
@on_ranks(4)
def test_torchs_async_save_takes_our_writer(tmp_path, planned):
    made, planner = state("hsdp@4"), save_planner(planned)
    group = dist.new_group(backend="gloo")
    wanted = made["model"]["large"].clone()
    for i in range(2):
        writer = DCPWriter(tmp_path / str(i), sync=False)
        future = dcp.async_save(made, storage_writer=writer, planner=planner, process_group=group)
        made["model"]["large"] += 1  # training continues
        future.result()
        made["model"]["large"].copy_(wanted)
        assert load_with_torch("hsdp@4", str(tmp_path / str(i))) == []
    dist.destroy_process_group(group)


def test_a_writer_can_be_sent_to_torchs_background_process(tmp_path):
    writer = pickle.loads(pickle.dumps(DCPWriter(tmp_path)))
    dcp.save({"w": torch.arange(4.0)}, storage_writer=writer, no_dist=True)
    found = {"w": torch.zeros(4)}
    dcp.load(found, storage_reader=pickle.loads(pickle.dumps(DCPReader(tmp_path))), no_dist=True)
    assert torch.equal(found["w"], torch.arange(4.0))


ZOO = [
    "dcp_appstate_w2", "dcp_dtensor_2d", "dcp_dtypes_w2", "dcp_fsdp2_uneven_w4", "dcp_hsdp_2x2",
    "dcp_no_collectives_w2", "dcp_serialization_safetensors_w2", "dcp_threads2_w2", "dcp_zstd_w2",
]  # fmt: skip


def raw(tensor: torch.Tensor) -> bytes:
    kept = tensor.detach().contiguous()
    return bytes(host_view(kept))


@BOTH
@pytest.mark.parametrize("name", ZOO)
def test_checkpoints_of_other_versions_and_writers_load(zoo, name, planned):
    """The expected values of the samples have the names without the wrapper's prefix."""
    reader = DCPReader(zoo / name / "ckpt")
    target = {n: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for n, e in reader.catalog.tensors.items()}
    dcp.load(target, storage_reader=reader, planner=load_planner(planned), no_dist=True)
    expected = load_file(zoo / name / "EXPECTED.safetensors")
    assert expected
    for key, value in expected.items():
        (found,) = [t for n, t in target.items() if n == key or n == f"model.{key}" or n == f"app.model.{key}"]
        assert (found.shape, found.dtype, raw(found)) == (value.shape, value.dtype, raw(value))


def test_a_hostile_metadata_is_refused_by_name(zoo):
    folder = next(p.parent for p in (zoo / "hostile_metadata").rglob(".metadata"))
    with pytest.raises(UnsafePickleError, match=r"asks for 'builtins\.exec', which is not on the allow-list"):
        DCPReader(folder).read_metadata()
    with pytest.raises(dcp.api.CheckpointException):  # torch 2.10 omits the reason
        dcp.load({"x": torch.zeros(1)}, storage_reader=DCPReader(folder), no_dist=True)
