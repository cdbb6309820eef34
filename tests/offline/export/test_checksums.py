"""SHA256SUMS of an export: written on request, checked by verify, and confined to the directory."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.offline.convert import convert
from ckptkit.offline.export.checksums import SUMS_NAME
from ckptkit.offline.verify import verify
from tests.offline.folders import flip

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


def test_every_file_of_an_export_has_its_sha256_on_request(export: Path) -> None:
    lines = (export / SUMS_NAME).read_text().splitlines()
    files = sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())
    assert lines == [
        f"{hashlib.sha256((export / name).read_bytes()).hexdigest()}  {name}" for name in files if name != SUMS_NAME
    ]
    assert len([name for name in files if name.endswith(".safetensors")]) > 1


def test_checksums_are_written_only_on_request(zoo: Path, export: Path, tmp_path: Path) -> None:
    convert(str(export), str(tmp_path / "again"))
    assert not (tmp_path / "again" / SUMS_NAME).exists()


def test_each_flipped_bit_of_an_export_is_found_with_its_file_and_tensors(export: Path) -> None:
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


def test_an_export_in_a_hub_cache_is_proved_through_its_links(export: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a/blobs", tmp_path / "models--a/snapshots/1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(export.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    report = verify(str(snapshot))
    assert report.ok and report.unproved_bytes == 0 and report.algorithms == ("sha256",)
    last = max(blobs.iterdir(), key=lambda path: path.stat().st_size)
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    assert not verify(str(snapshot)).ok


def test_verify_quick_names_a_listed_file_that_is_missing(export: Path) -> None:
    os.unlink(export / "config.json")
    assert "config.json" in [problem.path for problem in verify(str(export), quick=True).problems]


def test_a_truncated_checksum_list_is_found(export: Path) -> None:
    lines = (export / SUMS_NAME).read_text().splitlines(keepends=True)
    kept = [line for line in lines if "model-00002" not in line]
    (export / SUMS_NAME).write_text("".join(kept))
    (problem,) = verify(str(export)).problems
    assert problem.path.startswith("model-00002")
    assert SUMS_NAME in problem.message


@pytest.mark.parametrize(
    "line",
    ["no sum at all", f"{'0' * 64}  ../outside", f"{'0' * 64}  /etc/hostname", f"{'0' * 63}  config.json", "\x1b[2J"],
)
def test_an_invalid_checksum_list_is_a_problem(export: Path, line: str) -> None:
    with (export / SUMS_NAME).open("a") as file:
        file.write(line + "\n")
    problems = verify(str(export)).problems
    assert [problem.path for problem in problems] == [SUMS_NAME]


def test_a_fifo_instead_of_the_checksum_list_is_a_problem(export: Path) -> None:
    os.unlink(export / SUMS_NAME)
    os.mkfifo(export / SUMS_NAME)
    assert [problem.path for problem in verify(str(export)).problems] == [SUMS_NAME]


def test_checksums_need_a_hugging_face_export(zoo: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--sha256"):
        convert(str(zoo / SOURCE), str(tmp_path / "out"), to="dcp", sha256=True)
    assert not (tmp_path / "out").exists()
