"""What verify proves, what it finds, and what it says that it could not prove."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptkit.errors import CkptkitError
from ckptkit.formats.detect import open_source
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify


@pytest.fixture
def ours(zoo: Path, tmp_path: Path) -> Path:
    target = tmp_path / "step_00000004"
    reshard(str(zoo / "verl_fsdp2_w2"), str(target), world_size=2)
    return target


def test_a_checkpoint_of_ours_is_proved_to_the_last_byte(ours: Path) -> None:
    report = verify(str(ours))
    assert report.ok
    assert report.unproved_bytes == 0
    assert report.unproved_files == ()


def test_without_digests_the_files_are_named(zoo: Path) -> None:
    report = verify(str(zoo / "hf_ref_llama_untied"))
    assert report.ok
    assert report.unproved_files == ("model.safetensors",)
    assert "not proved" in report.summary()


def test_zip_records_of_others_are_checked_by_their_crc(zoo: Path) -> None:
    report = verify(str(zoo / "dcp_fsdp2_uneven_w4" / "ckpt"))
    assert report.ok
    assert report.algorithms == ("crc32",)


@pytest.mark.parametrize("change", ["truncate", "remove"])
def test_a_file_that_is_short_or_gone_is_named(ours: Path, change: str) -> None:
    file = ours / "__1_0.distcp"
    if change == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-10])
    try:
        found = " ".join(problem.message for problem in verify(str(ours)).problems)
    except CkptkitError as error:  # what can't even be opened says so
        found = str(error)
    assert "__1_0.distcp" in found


@pytest.mark.parametrize("left", [None, 1000])
def test_a_file_that_is_short_or_gone_says_which_tensors_went_with_it(ours: Path, left: int | None) -> None:
    lost = [name for name, e in open_source(str(ours)).catalog.tensors.items() if "__1_0.distcp" in e.slices.paths]
    file = ours / "__1_0.distcp"
    file.unlink() if left is None else os.truncate(file, left)
    problem = next(p for p in verify(str(ours)).problems if p.path == "__1_0.distcp" and not p.tensor)
    assert "and with it " in problem.message
    assert any(name in problem.message for name in lost)
    assert "tensors)" in problem.message


def test_quick_reads_no_tensor_and_says_so(ours: Path) -> None:
    report = verify(str(ours), quick=True)
    assert (report.digests, report.checked_bytes) == (0, 0)
    assert "not read" in report.summary()


def test_files_swapped_between_two_saves_are_found(zoo: Path, ours: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "step_00000004"
    reshard(str(zoo / "verl_fsdp2_w2"), str(other), world_size=3)
    shutil.copy(other / "__0_0.distcp", ours / "__0_0.distcp")
    assert not verify(str(ours)).ok


def test_verify_changes_nothing(ours: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in ours.rglob("*")}
    verify(str(ours))
    assert {path: path.stat().st_mtime_ns for path in ours.rglob("*")} == before
