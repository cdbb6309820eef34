"""read_archive finds every tensor of a torch.save zip without torch, and refuses what torch.save never writes."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats._torch_records import DTensorRecord, ShardedTensorRecord, StoredTensor
from ckptkit.formats._torch_zip import read_archive
from ckptkit.storage.local import LocalStore

ARCHIVES = (
    "verl_fsdp2_w2/global_step_4/actor/model_world_size_2_rank_1.pt",
    "verl_old_torch23_dtensor_emulated_w2/global_step_4/actor/model_world_size_2_rank_1.pt",
    "accelerate_fsdp2_nodcp_llama_untied_w2/checkpoint/pytorch_model_fsdp_0_rank1.bin",
)


@pytest.mark.parametrize("path", ARCHIVES)
def test_dtensors_arrive_with_their_mesh_placements_and_rank(zoo: Path, path: str) -> None:
    value = read_archive(LocalStore(zoo), path).value
    record = value["model.embed_tokens.weight"]
    assert isinstance(record, DTensorRecord)
    assert record.shape == (128, 32)
    assert record.local.shape == (64, 32)
    assert [p.kind for p in record.placements] == ["shard"]
    assert record.mesh.ranks.tolist() == [0, 1]
    assert record.rank == 1


def test_sharded_tensors_arrive_without_a_process_group(zoo: Path) -> None:
    path = "verl_fsdp1_nomesh_w2/global_step_4/actor/model_world_size_2_rank_1.pt"
    record = read_archive(LocalStore(zoo), path).value["model.embed_tokens.weight"]
    assert isinstance(record, ShardedTensorRecord)
    assert (record.rank, record.world_size) == (1, 2)
    assert [b.offsets for b in record.boxes] == [(0, 0), (64, 0)]
    assert record.shards[0].offsets == (64, 0)


def test_a_tensor_is_the_byte_range_that_torch_reads(tmp_path: Path) -> None:
    import torch

    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    torch.save({"view": base[1:, :, 2], "t": base.transpose(0, 2)}, tmp_path / "x.pt")
    value = read_archive(LocalStore(tmp_path), "x.pt").value
    raw = (tmp_path / "x.pt").read_bytes()
    for name, expected in (("view", base[1:, :, 2]), ("t", base.transpose(0, 2))):
        tensor: StoredTensor = value[name]
        flat = np.frombuffer(raw[tensor.start : tensor.start + tensor.nbytes], np.float32)
        found = np.lib.stride_tricks.as_strided(flat, tensor.shape, [4 * s for s in tensor.strides])
        assert (found == expected.numpy()).all()
    assert value["view"].storage is value["t"].storage


def rezip(path: Path, change, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the archive with each (name, data) passed through `change`, which returns pairs to write."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w", method) as target:
        for name in source.namelist():
            for new, data in change(name, source.read(name)):
                target.writestr(new, data)
    return out.getvalue()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    import torch

    torch.save({"w": torch.arange(6.0)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_an_archive_that_python_zipped_anew_is_read(saved: Path) -> None:
    saved.write_bytes(rezip(saved, lambda n, d: [(n, d)]))
    assert read_archive(LocalStore(saved.parent), "x.pt").value["w"].shape == (6,)


def test_compressed_members_are_refused(saved: Path) -> None:
    saved.write_bytes(rezip(saved, lambda n, d: [(n, d)], zipfile.ZIP_DEFLATED))
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt: member .* is compressed"):
        read_archive(LocalStore(saved.parent), "x.pt")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_members_are_refused(saved: Path) -> None:
    saved.write_bytes(rezip(saved, lambda n, d: [(n, d), (n, d)] if n.endswith("data/0") else [(n, d)]))
    with pytest.raises(CorruptCheckpointError, match="two members are called"):
        read_archive(LocalStore(saved.parent), "x.pt")


@pytest.mark.parametrize("name", ["../x", "x/../../y", "/etc/passwd", "x//y", "a\\b", "C:/x", "x/\x07"])
def test_members_that_could_escape_are_refused(saved: Path, name: str) -> None:
    saved.write_bytes(rezip(saved, lambda n, d: [(n, d), (name, d)] if n.endswith("data/0") else [(n, d)]))
    with pytest.raises(CorruptCheckpointError, match="unsafe name"):
        read_archive(LocalStore(saved.parent), "x.pt")


def test_big_endian_archives_are_refused(saved: Path) -> None:
    saved.write_bytes(rezip(saved, lambda n, d: [(n, b"big" if n.endswith("byteorder") else d)]))
    with pytest.raises(UnsupportedFormatError, match="endian"):
        read_archive(LocalStore(saved.parent), "x.pt")


def test_a_storage_smaller_than_its_tensor_is_refused(saved: Path) -> None:
    saved.write_bytes(rezip(saved, lambda n, d: [(n, d[:-4] if n.endswith("data/0") else d)]))
    with pytest.raises(CorruptCheckpointError, match="declares 24 bytes, but 20 are stored"):
        read_archive(LocalStore(saved.parent), "x.pt")


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.zeros(1).expand(2**40)}, tmp_path / "x.pt")
    with pytest.raises(CorruptCheckpointError, match="declares 4398046511104 bytes, but its storage holds 4"):
        read_archive(LocalStore(tmp_path), "x.pt")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["sparse", "quantized"])
def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    import torch

    make = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
    }[kind]
    torch.save(make(), tmp_path / "x.pt")
    with pytest.raises(UnsupportedFormatError, match=f"{kind} tensor|qint8"):
        read_archive(LocalStore(tmp_path), "x.pt")


@pytest.mark.parametrize("keep", [0, 1, 21, 100, 700])
def test_a_truncated_archive_is_refused(saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt: "):
        read_archive(LocalStore(saved.parent), "x.pt")
