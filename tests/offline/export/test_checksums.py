"""SHA256SUMS of an export: written on request, checked by verify, and confined to the directory."""

import hashlib
import os
import random
from pathlib import Path

import pytest

from ckptkit import convert, verify
from ckptkit.errors import CkptkitError
from ckptkit.offline.export.checksums import SUMS_NAME
from tests.offline.folders import flip, hub_snapshot, largest, names, tree

SOURCE = "hf_ref_llama_untied"


@pytest.fixture
def export(zoo: Path, tmp_path: Path) -> Path:
    target = tmp_path / "export"
    convert(str(zoo / SOURCE), str(target), sha256=True, max_shard_size="100KB")
    return target


def test_every_file_of_an_export_has_its_sha256_only_on_request(export, tmp_path):
    files = tree(export, SUMS_NAME)
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in sorted(files.items())]
    assert (export / SUMS_NAME).read_text().splitlines() == sums
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    convert(str(export), str(tmp_path / "again"))
    assert SUMS_NAME not in names(tmp_path / "again")


def test_an_export_in_a_hub_cache_is_proved_through_its_links(export, tmp_path):
    snapshot = hub_snapshot(export, tmp_path / "hub")
    report = verify(str(snapshot))
    assert report.ok and report.unproved_bytes == 0 and report.algorithms == ("sha256",)
    flip(largest(snapshot, "*"), -1)
    assert not verify(str(snapshot)).ok


def test_each_flipped_bit_of_an_export_is_found_with_its_file_and_tensors(export):
    rng = random.Random(0)
    for path in sorted(path for path in export.rglob("*") if path.is_file() and path.name != SUMS_NAME):
        good = path.read_bytes()
        tensors = path.suffix == ".safetensors"
        for _ in range(4):
            # After the header, because a flip in the header gives more messages.
            at = rng.randrange(8 + int.from_bytes(good[:8], "little") if tensors else 0, len(good))
            flip(path, at, bit=rng.randrange(8))
            try:
                (message,) = [problem.message for problem in verify(str(export)).problems if problem.path == path.name]
            except CkptkitError as error:  # an invalid index cannot even be opened
                message = str(error)
            assert path.name in message and (not tensors or "It contains " in message)
            path.write_bytes(good)
    assert verify(str(export)).ok


@pytest.mark.parametrize("line", [
    "no sum at all", f"{'0' * 64}  ../outside", f"{'0' * 64}  /etc/hostname", f"{'0' * 63}  config.json", "\x1b[2J",
    None,
])  # fmt: skip
def test_an_invalid_checksum_list_or_a_fifo_in_its_place_is_a_problem(export, line):
    if line is None:
        os.unlink(export / SUMS_NAME)
        os.mkfifo(export / SUMS_NAME)
    else:
        (export / SUMS_NAME).write_text((export / SUMS_NAME).read_text() + line + "\n")
    assert [problem.path for problem in verify(str(export)).problems] == [SUMS_NAME]


def test_a_file_that_the_checksum_list_lacks_or_that_only_the_list_has_is_named(export):
    lines = (export / SUMS_NAME).read_text().splitlines(keepends=True)
    (export / SUMS_NAME).write_text("".join(line for line in lines if "model-00002" not in line))
    (problem,) = verify(str(export)).problems
    assert problem.path.startswith("model-00002") and SUMS_NAME in problem.message
    os.unlink(export / "config.json")
    assert "config.json" in [problem.path for problem in verify(str(export), quick=True).problems]
