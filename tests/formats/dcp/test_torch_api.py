"""`DCPWriter` and `DCPReader` against torch's own, in both directions, on real ranks."""

import pickle
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import DCPReader, DCPSavePlanner, DCPWriter
from ckptkit.errors import CheckpointExistsError, CheckpointMismatchError, IntegrityError
from tests.conftest import ZOO
from tests.formats.dcp_states import LAYOUTS, assert_loads, failure, load, save, state
from tests.formats.interop_cases import same
from tests.offline.folders import flip, names, tree
from tests.ranks import on_ranks

PAIRS = [
    *((layout, layout) for layout in LAYOUTS),
    ("shard0@2", "shard0@3"), ("shard1@2", "shard0@3"), ("shard0@3", "shard1@2"), ("hsdp@4", "plain@1"),
    ("replicate@2", "hsdp@4"), ("plain@1", "tp@4"),
]  # fmt: skip


BOTH = pytest.mark.parametrize("planned", [False, True], ids=["torch's planners", "our planners"])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved_on_ranks(layout: str, url: str, ours: bool = True, planned: bool = False) -> None:
    writer = DCPWriter(url, sync=False) if ours else dcp.FileSystemWriter(url, sync_files=False)
    save(writer, state(layout), planned)


def load_with_torch(layout: str, url: str) -> None:
    assert_loads(dcp.FileSystemReader(url), state(layout))


def load_common(layout: str, url: str, planned: bool = False) -> None:
    """Load the keys that every layout has."""
    made = state(layout)
    made["model"] = {k: v for k, v in made["model"].items() if not k.startswith(("d1", "d2"))}
    assert_loads(url, made, planned)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_reads_what_dcp_writer_wrote(ranks, tmp_path, layout, planned):
    ranks.run(saved_on_ranks, LAYOUTS[layout][0], layout, str(tmp_path), True, planned)
    ranks.run(load_with_torch, LAYOUTS[layout][0], layout, str(tmp_path))


LOADS = [
    *((*pair, ours, False) for pair in PAIRS for ours in (False, True)),
    *((*pair, True, True) for pair in (*PAIRS[-6:], ("tp@4", "shard0@2"))),
    *((*pair, False, True) for pair in (("shard0@2", "shard1@2"), ("hsdp@4", "shard0@3"))),
]


@pytest.mark.parametrize(("source", "target", "ours", "planned"), LOADS)
def test_dcp_reader_loads_any_layout_into_any_other(ranks, tmp_path, source, target, ours, planned):
    ranks.run(saved_on_ranks, LAYOUTS[source][0], source, str(tmp_path), ours, ours and planned)
    ranks.run(load_common, LAYOUTS[target][0], target, str(tmp_path), planned)


def one(url, planned: bool = False, **options) -> dict[str, torch.Tensor]:
    made = {"w": torch.arange(50_000.0), "small": torch.arange(5), "o": {"lr": 0.5}}
    save(DCPWriter(url, **options), made, planned)
    return made


def test_metadata_equals_what_torch_would_write(tmp_path):
    save(dcp.FileSystemWriter(tmp_path / "torch"), one(tmp_path / "ours"))
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "torch"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()


NEEDLES: dict[str, bytes] = {
    "w": torch.arange(50_000.0).numpy().tobytes(), "small": torch.arange(5).numpy().tobytes(),
    "o.lr": struct.pack(">d", 0.5),  # as pickled
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("verify", ["read", "full"])
@pytest.mark.parametrize("name", NEEDLES)
def test_a_flipped_byte_is_found_on_load_and_named(tmp_path, name, verify, planned):
    made = one(tmp_path, planned)
    (file,) = tmp_path.glob("*.distcp")
    flip(file, file.read_bytes().index(NEEDLES[name]) + 6, bit=2)
    cause = failure(load, DCPReader(tmp_path, verify=verify), made, planned)
    assert isinstance(cause, IntegrityError) and file.name in str(cause) and f"'{name}'" in str(cause)


def test_damage_is_loaded_without_verification(tmp_path):
    made = one(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    flip(file, file.read_bytes().index(NEEDLES["small"]))
    assert load(DCPReader(tmp_path, verify="off"), {"small": made["small"]})["small"].tolist() == [1, 1, 2, 3, 4]


@on_ranks(3)
def test_a_row_reshard_reads_only_its_rows_from_the_disk(tmp_path):
    wide, mesh = torch.arange(3.0 * 2**20).reshape(3 << 10, 1 << 10), init_device_mesh("cpu", (3,))
    save(tmp_path, {"w": wide})
    target = distribute_tensor(torch.zeros_like(wide), mesh, (Shard(0),))
    reader = DCPReader(tmp_path)
    assert reader.catalog is not None
    before = bytes_read()
    dcp.load({"w": target}, storage_reader=reader, no_dist=True)
    found, local = bytes_read() - before, target.to_local()
    assert torch.equal(local, wide.chunk(3)[dist.get_rank()])
    assert local.nbytes <= found <= 1.05 * local.nbytes


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_checkpoint_is_overwritten_only_on_request_and_without_a_stale_file(tmp_path):
    one(tmp_path)
    (tmp_path / "__7_0.distcp").write_bytes(b"stale")
    before = tree(tmp_path)
    assert isinstance(failure(one, tmp_path), CheckpointExistsError) and tree(tmp_path) == before
    one(tmp_path, overwrite=True)
    assert names(tmp_path) == [".metadata", "__0_0.distcp", "manifest.safetensors"]


def test_leftovers_of_an_unfinished_save_are_replaced(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"half")
    for name in ("__0_1.distcp", ".metadata", "__1.metadata", "manifest.safetensors"):
        (tmp_path / f".{name}.0123456789ab.part").write_bytes(b"the writer was killed")
    assert_loads(tmp_path, one(tmp_path))
    assert names(tmp_path) == [".metadata", "__0_0.distcp", "manifest.safetensors"]


def test_a_manifest_of_other_metadata_is_not_used(tmp_path):
    one(tmp_path)
    newer = {"w": torch.ones(50_000), "small": torch.ones(5, dtype=torch.int64), "o": {"lr": 0.1}}
    with pytest.warns(UserWarning, match="overwriting"):
        dcp.save(newer, checkpoint_id=tmp_path, no_dist=True)
    assert_loads(tmp_path, newer)


def test_a_dtype_is_cast_only_when_asked(tmp_path):
    made, target = one(tmp_path), {"w": torch.zeros(50_000, dtype=torch.bfloat16)}
    error = failure(load, tmp_path, target)
    assert isinstance(error, CheckpointMismatchError) and "cast=True" in str(error) and not target["w"].any()
    assert torch.equal(load(DCPReader(tmp_path, cast=True), target)["w"], made["w"].bfloat16())


@BOTH
@on_ranks(2)
def test_without_collectives_each_rank_writes_its_own_metadata(tmp_path, planned):
    save(tmp_path, state("shard0@2"), planned, use_collectives=False)
    dist.barrier()
    load_common("shard0@2", str(tmp_path), planned)
    assert {p.name for p in tmp_path.glob("*metadata")} == {"__0.metadata", "__1.metadata"}


@BOTH
@on_ranks(4)
def test_torchs_async_save_takes_our_writer(tmp_path, planned):
    made = state("hsdp@4")
    group = dist.new_group(backend="gloo")
    wanted = made["model"]["large"].clone()
    for i in range(2):
        writer = DCPWriter(tmp_path / str(i), sync=False)
        planner = DCPSavePlanner() if planned else None
        future = dcp.async_save(made, storage_writer=writer, planner=planner, process_group=group)
        made["model"]["large"] += 1  # training continues
        future.result()
        made["model"]["large"].copy_(wanted)
        load_with_torch("hsdp@4", str(tmp_path / str(i)))
    dist.destroy_process_group(group)


def test_a_writer_can_be_sent_to_torchs_background_process(tmp_path):
    save(pickle.loads(pickle.dumps(DCPWriter(tmp_path))), {"w": torch.arange(4.0)})
    assert_loads(pickle.loads(pickle.dumps(DCPReader(tmp_path))), {"w": torch.arange(4.0)})


@BOTH
@pytest.mark.parametrize("name", sorted(path.parent.name for path in ZOO.glob("dcp_*/ckpt")))
def test_checkpoints_of_other_versions_and_writers_load(name, planned):
    """The expected values of the samples have the names without the wrapper's prefix."""
    reader = DCPReader(ZOO / name / "ckpt")
    target = {n: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for n, e in reader.catalog.tensors.items()}
    load(reader, target, planned)
    expected = load_file(ZOO / name / "EXPECTED.safetensors")
    assert expected
    for key, value in expected.items():
        (found,) = [t for n, t in target.items() if n in (key, f"model.{key}", f"app.model.{key}")]
        assert same(found, value), key
