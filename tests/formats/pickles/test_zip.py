"""Every tensor of a torch.save zip or an older file is found without torch; what torch.save never writes is refused."""

import struct
import zipfile
from collections.abc import Callable

import pytest
import torch

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.legacy import read_legacy
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.storage.local import LocalStore
from tests.formats.damages import rezipped
from tests.hostile.sources import saved as torch_saved


@pytest.fixture
def saved(tmp_path):
    torch.save({"w": torch.arange(6.0)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_an_archive_that_is_rewritten_unchanged_is_read(saved):
    raw = saved.read_bytes()
    at = raw.index(b"PK\x01\x02")
    for same in (rezip(lambda n, d: [(n, d)])(raw), patched(raw, b"PK\x01\x02", 16, raw[at + 16 : at + 20])):
        saved.write_bytes(same)
        assert read_archive(LocalStore(saved.parent), "x.pt")["w"].shape == (6,)


def test_every_view_of_a_storage_with_two_dtypes_is_located(saved):
    integers = torch.arange(6, dtype=torch.int32)
    torch.save({"a": torch.arange(6.0), "b": integers, "c": integers.view(2, 3)}, saved)
    own, shared = (b"X\x01\x00\x00\x00" + key for key in (b"1", b"0"))  # the storages' names in the pickle
    saved.write_bytes(
        rezip(lambda n, d: [(n, d.replace(own, shared) if n.endswith(".pkl") else d)])(saved.read_bytes())
    )
    found = read_archive(LocalStore(saved.parent), "x.pt")
    assert [found[name].dtype for name in "abc"] == ["float32", "int32", "int32"]
    assert len({found[name].start for name in "abc"}) == 1 and found["a"].start > 0


def rezip(change, method: int = zipfile.ZIP_STORED) -> Callable[[bytes], bytes]:
    return lambda raw: rezipped(raw, change, method)


def beside_data(name: str | None) -> Callable[[bytes], bytes]:
    """Return an edit that adds a member to an archive: of this name, or of the name of the data."""
    return rezip(lambda n, d: [(n, d), (name or n, d)] if n.endswith("data/0") else [(n, d)])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: torch.zeros(1).expand(2**40), CorruptCheckpointError, "declares 4398046511104 bytes, .* holds 4"),
    (lambda: torch.eye(3).to_sparse(), UnsupportedFormatError, "sparse tensor"),
    (lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), UnsupportedFormatError, "quantized|qint8"),
], ids=["expanded", "sparse", "quantized"])  # fmt: skip
def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path, make, error, text):
    torch.save({"w": make()}, tmp_path / "x.pt")
    with pytest.raises(error, match=text):
        read_archive(LocalStore(tmp_path), "x.pt")


def patched(raw: bytes, magic: bytes, offset: int, value: bytes) -> bytes:
    """Overwrite a field of the first record with this magic number in the zip directory."""
    at = raw.index(magic, raw.index(b"PK\x01\x02")) + offset
    return raw[:at] + value + raw[at + len(value) :]


ZIP_FAULTS = {
    "a directory of a billion members": (b"PK\x06\x06", 24, b"\xff" * 16),
    "a directory of exabytes": (b"PK\x06\x06", 40, b"\xff" * 8),
    "a directory beyond the end": (b"PK\x06\x06", 48, b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "an end record elsewhere": (b"PK\x06\x07", 8, b"\x00" * 8),
    "two end records that differ": (b"PK\x05\x06", 8, b"\x01\x00\x01\x00"),
    "a comment": (b"PK\x05\x06", 20, b"\x05\x00"),
    "an encrypted member": (b"PK\x01\x02", 8, b"\x01\x00"),
    "a member beyond the directory": (b"PK\x01\x02", 42, b"\xf0\xff\xff\x0f"),
    "a member of gigabytes": (b"PK\x01\x02", 20, b"\xf0\xff\xff\x7f" * 2),
    "a member compressed a thousandfold": (b"PK\x01\x02", 24, b"\xf0\xff\xff\x7f"),
    "a member with a name of 64 kB": (b"PK\x01\x02", 28, b"\xff\xff"),
    "a member on another disk": (b"PK\x01\x02", 34, b"\x01\x00"),
    "a member that is a directory": (b"PK\x01\x02", 38, b"\x10\x00"),
    "a pickle that is not the one checked": (b"PK\x01\x02", 16, b"\x00\x00\x00\x00"),
}


FAULTS = {
    "compressed": (rezip(lambda n, d: [(n, d)], zipfile.ZIP_DEFLATED), r"x\.pt: member .* is compressed"),
    "duplicate": (beside_data(None), "two members are called"),
    "too small": (rezip(lambda n, d: [(n, d[:-4] if n.endswith("data/0") else d)]), "declares 24 bytes, but 20 are"),
    "big-endian": (rezip(lambda n, d: [(n, b"big" if n.endswith("byteorder") else d)]), "endian"),
    **{name: (beside_data(name), "unsafe name")
       for name in ("../x", "x/../../y", "/etc/passwd", "x//y", "a\\b", "C:/x", "x/\x07")},
    **{f"only {keep} bytes": (lambda raw, keep=keep: raw[:keep], r"x\.pt: ") for keep in (0, 1, 21, 100, 700)},
    **{fault: (lambda raw, field=field: patched(raw, *field), r"x\.pt: ") for fault, field in ZIP_FAULTS.items()},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("what", FAULTS)
def test_a_truncated_archive_and_what_torch_does_not_write_are_refused(saved, what):
    edit, text = FAULTS[what]
    saved.write_bytes(edit(saved.read_bytes()))
    error = UnsupportedFormatError if what == "big-endian" else CorruptCheckpointError
    with pytest.raises(error, match=text):
        read_archive(LocalStore(saved.parent), "x.pt")


def test_storages_that_overlap_are_refused(tmp_path):
    torch.save([torch.arange(6.0), torch.arange(6.0) + 6], tmp_path / "x.pt")
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    first, second = (raw.rindex(name) - 46 for name in (b"x/data/0", b"x/data/1"))  # in the zip directory
    raw[second + 42 : second + 46] = raw[first + 42 : first + 46]
    (tmp_path / "x.pt").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match="overlaps"):
        read_archive(LocalStore(tmp_path), "x.pt")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_program_is_refused_as_such(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 3)).save(tmp_path / "m.pt")
    with pytest.raises(UnsupportedFormatError, match=r"m\.pt is a TorchScript program"):
        read_archive(LocalStore(tmp_path), "m.pt")


# --- the formats before the zip


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
    raw = torch_saved({"w": torch.arange(6.0), "n": 3}, _use_new_zipfile_serialization=False)
    (tmp_path / "x.bin").write_bytes(change(raw))
    with pytest.raises(error, match=text):
        read_legacy(LocalStore(tmp_path), "x.bin")
