"""SHA256SUMS of an export: written on request, checked by verify, and confined to the directory."""

import hashlib
import os
import random
from pathlib import Path

import pytest

from ckptkit import convert, verify
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.offline.export.checksums import SUMS_NAME
from tests.offline.folders import flip, hub_snapshot, largest, names, refused, tree

SOURCE = "hf_ref_llama_untied"


@pytest.fixture
def export(zoo: Path, tmp_path: Path) -> Path:
    target = tmp_path / "export"
    convert(str(zoo / SOURCE), str(target), sha256=True, max_shard_size="100KB")
    return target


def _found(export: Path, name: str) -> list[str]:
    """Return verify's problems of a file; an invalid index cannot even be opened."""
    try:
        return [problem.message for problem in verify(str(export)).problems if problem.path == name]
    except CkptkitError as error:
        return [str(error)]


def test_every_file_of_an_export_has_its_sha256_only_on_request(export, tmp_path):
    files = tree(export, SUMS_NAME)
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in sorted(files.items())]
    assert (export / SUMS_NAME).read_text().splitlines() == sums
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    convert(str(export), str(tmp_path / "again"))
    assert SUMS_NAME not in names(tmp_path / "again")


def test_each_flipped_bit_of_an_export_is_found_with_its_file_and_tensors(export):
    rng = random.Random(0)
    for path in sorted(path for path in export.rglob("*") if path.is_file() and path.name != SUMS_NAME):
        good = path.read_bytes()
        tensors = path.suffix == ".safetensors"
        for _ in range(4):
            # After the header, because a flip in the header gives more messages.
            at = rng.randrange(8 + int.from_bytes(good[:8], "little") if tensors else 0, len(good))
            flip(path, at, bit=rng.randrange(8))
            (message,) = _found(export, path.name)
            assert path.name in message
            assert not tensors or "It contains " in message
            path.write_bytes(good)
    assert verify(str(export)).ok


def test_an_export_in_a_hub_cache_is_proved_through_its_links(export, tmp_path):
    snapshot = hub_snapshot(export, tmp_path / "hub")
    report = verify(str(snapshot))
    assert report.ok and report.unproved_bytes == 0 and report.algorithms == ("sha256",)
    flip(largest(snapshot, "*"), -1)
    assert not verify(str(snapshot)).ok


def test_verify_quick_names_a_listed_file_that_is_missing(export):
    os.unlink(export / "config.json")
    assert "config.json" in [problem.path for problem in verify(str(export), quick=True).problems]


def test_a_truncated_checksum_list_is_found(export):
    lines = (export / SUMS_NAME).read_text().splitlines(keepends=True)
    kept = [line for line in lines if "model-00002" not in line]
    (export / SUMS_NAME).write_text("".join(kept))
    (problem,) = verify(str(export)).problems
    assert problem.path.startswith("model-00002") and SUMS_NAME in problem.message


BAD_LINES = (
    "no sum at all", f"{'0' * 64}  ../outside", f"{'0' * 64}  /etc/hostname", f"{'0' * 63}  config.json", "\x1b[2J",
)  # fmt: skip


@pytest.mark.parametrize("line", [*BAD_LINES, None])
def test_an_invalid_checksum_list_or_a_fifo_in_its_place_is_a_problem(export, line):
    if line is None:
        os.unlink(export / SUMS_NAME)
        os.mkfifo(export / SUMS_NAME)
    else:
        (export / SUMS_NAME).write_text((export / SUMS_NAME).read_text() + line + "\n")
    assert [problem.path for problem in verify(str(export)).problems] == [SUMS_NAME]


def test_checksums_need_a_hugging_face_export(zoo, tmp_path):
    refused(UsageError, "--sha256", convert, zoo / SOURCE, tmp_path / "out", to="dcp", sha256=True)
