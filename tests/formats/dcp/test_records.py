"""Records and `.metadata` written without torch equal those that torch writes and reads."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

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


def test_the_overhead_of_a_small_tensor_is_about_a_quarter_of_torchs():
    """A fifth is impossible: the headers of the three members that torch needs take 0.19 of torch's size."""
    file = io.BytesIO()
    torch.save(torch.zeros(8), file)
    assert frame_tensor("float32", (8,)).length - 32 < 0.29 * (len(file.getvalue()) - 32)


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
    boxes = rng.integers(0, 50, (2, count, len(shape)))
    files = rng.integers(0, 2, count).astype(np.int32)
    return RecordColumns(
        name, dtype, shape, boxes[0], boxes[1], files, rng.integers(0, 1 << 40, count), rng.integers(0, 1 << 33, count)
    )


TENSORS = [
    columns("x" * 300, 3, (7, 9)), columns("model.weight", 20, (7, 9), "bfloat16"), columns("step", 1, ()),
    columns("wide", 2, (1 << 35,)), columns("wide.many", 30, (1 << 35, 2)), columns("nothing", 0, (0,)),
    columns("é\n", 1, (3,), "float8_e4m3fn"),
]  # fmt: skip


def expected() -> Metadata:
    tensors, places = {}, {}
    for t in TENSORS:
        chunks = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s))
            for o, s in zip(t.offsets.tolist(), t.sizes.tolist(), strict=True)
        ]
        tensors[t.name] = TensorStorageMetadata(TensorProperties(getattr(torch, t.dtype)), torch.Size(t.shape), chunks)
        for i, offsets in enumerate(t.offsets.tolist()):
            info = _StorageInfo(FILES[t.files[i]], int(t.starts[i]), int(t.lengths[i]))
            places[MetadataIndex(t.name, offsets, i)] = info
    tensors["o.k"] = BytesStorageMetadata()
    places[MetadataIndex("o.k")] = _StorageInfo(FILES[1], 2, 3)
    return Metadata(tensors, PLANNER, places, StorageMeta("/x", "id"), "1.0.0")


@pytest.mark.parametrize("load", [pickle.loads, lambda data: pickle._Unpickler(io.BytesIO(data)).load()])
def test_metadata_unpickles_to_torchs_own_objects(load):
    places = {"objects": {"o.k": (FILES[1], 2, 3)}, "planner_data": PLANNER, "checkpoint_id": "/x", "save_id": "id"}
    found = load(b"".join(MetadataPickle(TENSORS, FILES, **places).chunks()))
    assert found == expected()
    assert [key.index for key in found.storage_data] == [key.index for key in expected().storage_data]
    chunk = next(iter(found.state_dict_metadata.values())).chunks[0]
    assert type(chunk.offsets) is type(chunk.sizes) is torch.Size
