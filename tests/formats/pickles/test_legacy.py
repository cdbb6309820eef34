"""The formats before the zip give the same records: byte ranges with the values that torch reads."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.legacy import is_tar, read_legacy, read_tar
from ckptkit.formats.pickles.objects import read_tensor
from ckptkit.storage.local import LocalStore
from tests.hostile.sources import saved


def test_every_tensor_of_a_legacy_file_is_bit_exact(zoo):
    store = LocalStore(zoo / "torchsave_legacy_nonzip")
    value = read_legacy(store, "pytorch_model.bin")
    expected = load_file(zoo / "torchsave_legacy_nonzip" / "EXPECTED.safetensors")
    assert value.keys() >= expected.keys()
    for name, array in expected.items():
        assert (read_tensor(store, value[name]) == array).all()
    assert value["lm_head.weight"].storage is value["model.embed_tokens.weight"].storage


def _big_endian(raw: bytes) -> bytes:
    front, key, rest = raw.partition(b"little_endian")
    return front + key + rest.replace(b"\x88", b"\x89", 1)


LEGACY: dict[str, tuple[Callable[[bytes], bytes], type[Exception], str]] = {
    **{f"{cut} bytes are missing": (lambda raw, cut=cut: raw[:-cut], CorruptCheckpointError, r"x\.bin: ")
       for cut in (1, 8, 24, 40, 300)},
    "a size that contradicts the pickle": (
        lambda raw: raw[:-32] + raw[-32:-24].replace(struct.pack("<q", 6), struct.pack("<q", 1 << 40)) + raw[-24:],
        CorruptCheckpointError, "does not have the size recorded"),
    "big-endian": (_big_endian, UnsupportedFormatError, "big-endian"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LEGACY)
def test_a_damaged_or_big_endian_legacy_file_is_refused(tmp_path, fault):
    change, error, text = LEGACY[fault]
    raw = saved({"w": torch.arange(6.0), "n": 3}, _use_new_zipfile_serialization=False)
    (tmp_path / "x.bin").write_bytes(change(raw))
    with pytest.raises(error, match=text):
        read_legacy(LocalStore(tmp_path), "x.bin")


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
    (tmp_path / "x.pt").write_bytes(tar_of(old_tar()))
    assert torch.load(tmp_path / "x.pt", weights_only=False)["w"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


TARS = {
    **{f"a member {name}": (tar_of({**old_tar(), name: b"x"}), "does not belong in the tar")
       for name in ("../escape", "/etc/passwd", "extra")},
    **{f"only {keep} bytes": (tar_of(old_tar())[:keep], r"x\.pt: ") for keep in (600, 1800, 3000)},
}  # fmt: skip


@pytest.mark.parametrize("fault", TARS)
def test_a_truncated_tar_or_one_with_other_members_is_refused(tmp_path, fault):
    data, text = TARS[fault]
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=text):
        read_tar(LocalStore(tmp_path), "x.pt")
