"""The formats before the zip give the same records: byte ranges with the values that torch reads."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.legacy import is_tar, read_legacy, read_tar
from ckptkit.formats.pickles.objects import read_tensor
from ckptkit.storage.local import LocalStore


def test_every_tensor_of_a_legacy_file_is_bit_exact(zoo):
    store = LocalStore(zoo / "torchsave_legacy_nonzip")
    value = read_legacy(store, "pytorch_model.bin")
    expected = load_file(zoo / "torchsave_legacy_nonzip" / "EXPECTED.safetensors")
    assert value.keys() >= expected.keys()
    for name, array in expected.items():
        assert (read_tensor(store, value[name]) == array).all()
    assert value["lm_head.weight"].storage is value["model.embed_tokens.weight"].storage


@pytest.fixture
def legacy(tmp_path):
    import torch

    torch.save({"w": torch.arange(6.0), "n": 3}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    return tmp_path / "x.bin"


@pytest.mark.parametrize("cut", [1, 8, 24, 40, 300])
def test_a_truncated_legacy_file_is_refused(legacy, cut):
    legacy.write_bytes(legacy.read_bytes()[:-cut])
    with pytest.raises(CorruptCheckpointError, match=r"x\.bin: "):
        read_legacy(LocalStore(legacy.parent), "x.bin")


def test_a_storage_whose_size_contradicts_the_pickle_is_refused(legacy):
    raw = legacy.read_bytes()
    assert raw[-32:-24] == struct.pack("<q", 6)
    legacy.write_bytes(raw[:-32] + struct.pack("<q", 1 << 40) + raw[-24:])
    with pytest.raises(CorruptCheckpointError, match="does not have the size recorded"):
        read_legacy(LocalStore(legacy.parent), "x.bin")


def test_a_big_endian_legacy_file_is_refused(legacy):
    raw = legacy.read_bytes()
    at = raw.index(b"little_endian")
    true = raw.index(b"\x88", at)
    legacy.write_bytes(raw[:true] + b"\x89" + raw[true + 1 :])
    with pytest.raises(UnsupportedFormatError, match="big-endian"):
        read_legacy(LocalStore(legacy.parent), "x.bin")


def tar_of(members: Mapping[str, bytes], fields: Mapping[str, Mapping[str, Any]] | None = None) -> bytes:
    """Return a tar file of these members, some with other fields in their headers."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in (fields or {}).get(name, {}).items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


class FloatStorage:
    __module__ = "torch"


class FloatTensor:
    __module__ = "torch"


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return "20" if isinstance(obj, np.ndarray) else None


def reduced(value: object) -> bytes:
    out = io.BytesIO()
    Pickler(out, 2).dump(value)
    return out.getvalue()


def old_tar() -> dict[str, bytes]:
    """Return the four members that torch 0.1 wrote for {"w": FloatTensor([[0..3],[4..7]])}."""
    array = np.arange(8, dtype=np.float32)
    storage = b"\x80\x02(K\nX\x03\x00\x00\x00cpuctorch\nFloatStorage\nt."
    tensor = b"\x80\x02(K\x14K\nctorch\nFloatTensor\nt."
    return {
        "sys_info": pickle.dumps({"little_endian": True}, 2),
        "storages": pickle.dumps(1, 2) + storage + struct.pack("<q", 8) + array.tobytes() + pickle.dumps([], 2),
        "tensors": pickle.dumps(1, 2) + tensor + struct.pack("<i4x5q", 2, 2, 4, 4, 1, 0),
        "pickle": reduced({"w": array, "epoch": 3}),
    }


def test_a_tar_file_is_read(tmp_path):
    (tmp_path / "x.pt").write_bytes(tar_of(old_tar()))
    assert is_tar((tmp_path / "x.pt").read_bytes()[:512])
    store = LocalStore(tmp_path)
    value = read_tar(store, "x.pt")
    assert value["epoch"] == 3
    assert (read_tensor(store, value["w"]) == np.arange(8, dtype=np.float32).reshape(2, 4)).all()


def test_torch_reads_the_same_tar(tmp_path):
    import torch

    (tmp_path / "x.pt").write_bytes(tar_of(old_tar()))
    assert torch.load(tmp_path / "x.pt", weights_only=False)["w"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "extra"])
def test_a_tar_with_other_members_is_refused(tmp_path, name):
    (tmp_path / "x.pt").write_bytes(tar_of({**old_tar(), name: b"x"}))
    with pytest.raises(CorruptCheckpointError, match="does not belong in the tar"):
        read_tar(LocalStore(tmp_path), "x.pt")


@pytest.mark.parametrize("keep", [600, 1800, 3000])
def test_a_truncated_tar_is_refused(tmp_path, keep):
    (tmp_path / "x.pt").write_bytes(tar_of(old_tar())[:keep])
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt: "):
        read_tar(LocalStore(tmp_path), "x.pt")
