"""The formats before the zip give the same records: byte ranges with the values that torch reads."""

import struct
from collections.abc import Callable

import pytest
import torch

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.legacy import read_legacy
from ckptkit.storage.local import LocalStore
from tests.hostile.sources import saved


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
