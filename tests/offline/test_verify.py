"""verify: what it proves, what it finds, and what it reports as not proved."""

import errno
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from ckptkit import TrainState, convert, reshard, verify
from ckptkit.errors import CkptkitError
from ckptkit.formats.detect import open_source
from ckptkit.formats.own.outline import LEAST, SPARES
from ckptkit.formats.own.record import FileRecord, read_record
from ckptkit.storage.local import LocalStore
from tests.checkpoint.states import save
from tests.docs.test_format import save_large
from tests.offline.folders import flip
from tests.patches import refuse


@pytest.fixture
def ours(zoo: Path, tmp_path: Path) -> Path:
    target = tmp_path / "step_00000004"
    reshard(str(zoo / "verl_fsdp2_w2"), str(target), world_size=2)
    return target


@pytest.mark.parametrize("quick", [False, True])
def test_state_that_other_programs_save_beside_the_weights_is_checked_too(tmp_path, quick):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.ones(1000)}}, "param_groups": []}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "numpy.pkl").write_bytes(b"not an archive")
    report = verify(tmp_path, quick=quick)
    assert report.ok and report.files == 2
    whole = (tmp_path / "optimizer.pt").read_bytes()
    (tmp_path / "optimizer.pt").write_bytes(whole[:-100])
    assert [problem.path for problem in verify(tmp_path, quick=quick).problems] == ["optimizer.pt"]
    (tmp_path / "optimizer.pt").write_bytes(whole)
    flip(tmp_path / "optimizer.pt", whole.index(torch.ones(8).numpy().tobytes()))
    assert [problem.path for problem in verify(tmp_path).problems] == ["optimizer.pt"]


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_state_without_crcs_is_listed_as_not_proved(form, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.serialization.set_crc32_options(False)
    try:
        saved = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}
        torch.save(saved, tmp_path / "optimizer.pt", _use_new_zipfile_serialization=form == "zip")
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path)
    assert report.ok and "optimizer.pt" in report.unproved_files


LEFT: dict[str, Callable[[Path], Any]] = {
    "empty": Path.touch,
    "zeroed": lambda path: path.write_bytes(b"\0" * 100),
    "a link to nothing": lambda path: path.symlink_to("gone.pt"),
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_state_that_a_crash_left_empty_or_zeroed_or_that_is_a_dangling_link_is_reported(name, left, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    LEFT[left](tmp_path / name)
    for quick in (True, False):
        assert [problem.path for problem in verify(tmp_path, quick=quick).problems] == [name]


def test_files_that_no_load_reads_beside_the_weights_are_not_checked(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "traced.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("notes.txt", "not of torch")
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    report = verify(tmp_path)
    assert report.ok and report.files == 1


@pytest.mark.parametrize("left", [None, 1000])
def test_a_truncated_or_missing_file_is_reported_with_its_tensors(ours, left):
    lost = [name for name, e in open_source(str(ours)).catalog.tensors.items() if "__1_0.distcp" in e.slices.paths]
    file = ours / "__1_0.distcp"
    file.unlink() if left is None else os.truncate(file, left)
    problem = next(p for p in verify(str(ours)).problems if p.path == "__1_0.distcp" and not p.tensor)
    assert ("and with it " if left is None else "The missing bytes belong to ") in problem.message
    assert any(name in problem.message for name in lost) and " more." in problem.message


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Path:
    """A checkpoint whose files have outlines, with one part stored twice."""
    ranks.run(save_large, 4, str(tmp_path), "sharded")
    return tmp_path / "step_00000003"


def test_bytes_that_two_digests_cover_count_once_and_those_of_an_outline_are_read_once(saved):
    reported = []
    report = verify(str(saved), progress=lambda done, total, _: reported.append((done, total)))
    assert report.ok and report.unproved_bytes == 0 and report.unproved_files == ()
    files = sum(path.stat().st_size for path in saved.iterdir() if path.name != "checkpoint.json")
    assert report.checked_bytes == files
    slices = [part.nbytes for entry in open_source(str(saved)).catalog.tensors.values() for part in entry.slices]
    read = files + sum(nbytes for nbytes in slices if nbytes < LEAST)
    assert reported[-1] == (read, read)


def test_one_flipped_bit_is_found_at_any_position(saved):
    catalog = open_source(str(saved)).catalog
    slices = {path: [(0, 0)] for path in catalog.info.files}
    for entry in catalog.tensors.values():
        for part in entry.slices:
            slices[part.path].append((part.start, part.start + part.nbytes))
    (spare, start, nbytes, _), *_ = catalog.info.extra[SPARES]
    places = {(spare, start + nbytes // 2): "a copy that no tensor uses"}
    for path, found in slices.items():
        if path.endswith(".distcp") and max(b - a for a, b in found) >= LEAST:
            places[path, max(found)[0] + 5] = "tensor "
            places[path, max(found)[1] + 1] = "between the tensors"
    for (path, at), words in places.items():
        flip(saved / path, at)
        messages = [problem.message for problem in verify(str(saved)).problems]
        flip(saved / path, at)
        assert any(words in message for message in messages), (path, at, messages)


def test_digests_of_whole_files_are_compared(saved):
    record = read_record(LocalStore(saved))
    files = {name: (saved / name).read_bytes() for name in record.files}
    plain = {name: FileRecord(len(data), xxhash.xxh3_64_hexdigest(data)) for name, data in files.items()}
    (saved / "checkpoint.json").write_bytes(replace(record, files=plain).to_json())
    assert b"outline" not in (saved / "checkpoint.json").read_bytes()
    assert verify(str(saved)).ok
    file = next(saved.glob("__0_*.distcp"))
    flip(file, -1)
    assert [problem.path for problem in verify(str(saved)).problems] == [file.name]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Steps of two runs with the same file names."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 4)
        state = TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1 * seed))
        found.append(Path(save(tmp_path / f"run{seed}", state), "step_00000001"))
    return found[0], found[1]


def failures(step: Path, out: Path, **options: Any) -> list[str]:
    """Return the complaints of verify, verify --quick, a conversion and its dry run about a step; "" for none."""
    calls: list[Callable[[], Iterable[Any]]] = [
        lambda: [problem.message for problem in verify(str(step)).problems],
        lambda: [problem.message for problem in verify(str(step), quick=True).problems],
        lambda: convert(str(step), str(out), to="dcp", **options).faults,
        lambda: convert(str(step), str(out / "dry"), to="dcp", dry_run=True, **options).faults,
    ]
    said = []
    for call in calls:
        try:
            said.append(" ".join(map(str, call())))
        except CkptkitError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("change", ["swap", "remove", "truncate", "append"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.safetensors", "objects.json"])
def test_each_file_of_another_save_is_found(pair, tmp_path, name, change):
    ours, other = (step / name for step in pair)
    data = ours.read_bytes()
    if change == "remove":
        ours.unlink()
    else:
        ours.write_bytes({"swap": other.read_bytes(), "truncate": data[:-3], "append": data + b"xxx"}[change])
    full, quick, converted, planned = failures(pair[0], tmp_path / "out")
    assert name in full and name in converted
    assert not (tmp_path / "out").exists()
    if (name, change) != ("__0_0.distcp", "swap"):  # only the bytes of tensors reveal it, and these are not read
        assert name in quick and name in planned


def test_with_no_check_unneeded_files_may_be_missing(pair, tmp_path):
    (pair[0] / ".metadata").unlink()
    assert failures(pair[0], tmp_path / "out", check=False)[2:] == ["", ""]


def test_a_file_that_may_not_be_read_is_not_called_damaged(ours, monkeypatch):
    refuse(monkeypatch, LocalStore, "open_file", errno.EACCES, when=lambda store, path: path.endswith(".distcp"))
    report = verify(str(ours))
    assert not report.ok and report.summary().startswith("not verified: ")
    assert "Permission denied" in report.problems[0].message
