"""Records and `.metadata` written without torch equal those of torch; tensors of other memory orders become bytes."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptkit.formats.dcp import host_bytes
from ckptkit.formats.dcp.host_bytes import HostBytes
from ckptkit.formats.dcp.metadata import MetadataPickle, RecordColumns
from ckptkit.formats.dcp.records import frame_tensor

SHAPES = [(), (0,), (0, 3), (3, 5), (2, 3, 4, 5), (40, 50, 2), (300, 300)]
FILES = ["__0_0.distcp", "__1_0.distcp"]
PLANNER = {"model.weight": ("model", "weight"), "o.k": ("o", 7)}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_record_is_a_valid_zip_of_the_predicted_length_that_torch_loads(shape):
    values, frame = np.arange(np.prod(shape), dtype=np.float32).reshape(shape), frame_tensor("float32", shape)
    record = frame.record(values.tobytes())
    assert len(record) == frame.length and zipfile.ZipFile(io.BytesIO(record)).testzip() is None
    assert torch.equal(torch.load(io.BytesIO(record), weights_only=True), torch.from_numpy(values))


@pytest.mark.parametrize("shape", [(40, 50, 2), (300, 300), (1 << 31, 4)])
def test_large_payloads_are_aligned(shape):
    assert len(frame_tensor("float32", shape).prefix) % 64 == 0


@pytest.mark.parametrize("numel", [(1 << 30) - 1, 1 << 30, (1 << 30) + 5])
def test_a_record_past_four_gigabytes_is_zip64(tmp_path, numel):
    frame = frame_tensor("float32", (numel,))
    tail = frame.suffix(0)
    with (tmp_path / "x").open("wb") as file:  # the payload is a hole
        file.write(frame.prefix)
        file.seek(frame.length - len(tail))
        file.write(tail)
    info = zipfile.ZipFile(tmp_path / "x").getinfo("a/data/0")
    assert info.file_size == info.compress_size == 4 * numel
    assert torch._C.PyTorchFileReader(str(tmp_path / "x")).get_record_offset("data/0") == len(frame.prefix)


def columns(name, count, shape, dtype="float32"):
    rng = np.random.default_rng(count)
    boxes, files = rng.integers(0, 50, (2, count, len(shape))), rng.integers(0, 2, count).astype(np.int32)
    starts, lengths = rng.integers(0, 1 << 40, count), rng.integers(0, 1 << 33, count)
    return RecordColumns(name, dtype, shape, boxes[0], boxes[1], files, starts, lengths)


TENSORS = [
    columns("x" * 300, 3, (7, 9)), columns("model.weight", 20, (7, 9), "bfloat16"), columns("step", 1, ()),
    columns("wide", 2, (1 << 35,)), columns("wide.many", 30, (1 << 35, 2)), columns("nothing", 0, (0,)),
    columns("é\n", 1, (3,), "float8_e4m3fn"),
]  # fmt: skip


def expected() -> torchs.Metadata:
    tensors, places = {}, {}
    for t in TENSORS:
        boxes = zip(t.offsets.tolist(), t.sizes.tolist(), strict=True)
        chunks = [torchs.ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes]
        properties = torchs.TensorProperties(getattr(torch, t.dtype))
        tensors[t.name] = torchs.TensorStorageMetadata(properties, torch.Size(t.shape), chunks)
        for i, offsets in enumerate(t.offsets.tolist()):
            info = _StorageInfo(FILES[t.files[i]], int(t.starts[i]), int(t.lengths[i]))
            places[torchs.MetadataIndex(t.name, offsets, i)] = info
    tensors["o.k"] = torchs.BytesStorageMetadata()
    places[torchs.MetadataIndex("o.k")] = _StorageInfo(FILES[1], 2, 3)
    return torchs.Metadata(tensors, PLANNER, places, torchs.StorageMeta("/x", "id"), "1.0.0")


@pytest.mark.parametrize("load", [pickle.loads, lambda data: pickle._Unpickler(io.BytesIO(data)).load()])
def test_metadata_unpickles_to_torchs_own_objects(load):
    places = {"objects": {"o.k": (FILES[1], 2, 3)}, "planner_data": PLANNER, "checkpoint_id": "/x", "save_id": "id"}
    found = load(b"".join(MetadataPickle(TENSORS, FILES, **places).chunks()))
    assert found == expected()
    assert [key.index for key in found.storage_data] == [key.index for key in expected().storage_data]
    chunk = next(iter(found.state_dict_metadata.values())).chunks[0]
    assert type(chunk.offsets) is type(chunk.sizes) is torch.Size


# --- the bytes of tensors with other memory orders: copied in tiles, not as a whole

PLAIN = torch.arange(6000, dtype=torch.float32).reshape(20, 300)
ODD = {
    "transposed": PLAIN.t(), "every second column": PLAIN[:, ::2], "one dimension": PLAIN.reshape(-1)[::3],
    "long rows": PLAIN.reshape(2, 10, 300).transpose(1, 2), "conjugate": torch.complex(PLAIN, PLAIN + 1).conj(),
    "conjugate and transposed": torch.complex(PLAIN, PLAIN + 1).conj().t(),
    "expanded": torch.arange(5).expand(700, 5), "bool": (PLAIN > 9).t(), "no elements": PLAIN[:, :0].t(),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_bytes_are_row_major_and_copies_are_at_most_one_tile(name, monkeypatch):
    monkeypatch.setattr(host_bytes, "_TILE", 1000)
    tensor = ODD[name]
    pieces = [bytes(piece) for piece in HostBytes().pieces(tensor)]
    expected = tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    assert b"".join(pieces) == bytes(expected.numpy())
    assert all(len(piece) <= 1000 for piece in pieces)
    assert HostBytes().at_rest(tensor) is None or tensor.is_contiguous()
