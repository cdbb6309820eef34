"""The formats before the zip give the same records: byte ranges with the values that torch reads."""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Callable

import pytest
import torch
from safetensors.numpy import load_file

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.detect import open_source
from ckptkit.formats.pickles.legacy import read_legacy
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


def test_a_tar_of_torch_0_1_is_refused_with_advice(tmp_path):
    with tarfile.open(tmp_path / "x.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("sys_info"))
    with pytest.raises(UnsupportedFormatError, match=r"x\.pt is a tar archive.*save it again"):
        open_source(str(tmp_path / "x.pt"))
