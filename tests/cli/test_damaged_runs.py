"""Commands on a run with damaged checkpoints: each says what is damaged and which checkpoint to try next."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import reshard
from ckptkit.errors import StorageError
from ckptkit.storage.local import LocalStore
from tests.cli.commands import document, ran, run
from tests.patches import refuse

NEWEST, BEFORE, DATA = "step_00000300", "step_00000200", "__0_0.distcp"


def every_bit(data: Path, start: int = 0) -> None:
    data.write_bytes(data.read_bytes()[:start] + bytes(byte ^ 1 for byte in data.read_bytes()[start:]))


def cut(data: Path) -> None:
    os.truncate(data, 100)


def unreadable_record(data: Path) -> None:
    data.with_name("checkpoint.json").write_bytes(b"{")


@pytest.mark.parametrize("file", ["__0_0.distcp", "checkpoint.json", "manifest.safetensors"])
def test_verify_of_a_damaged_newest_checkpoint_names_the_previous_one(root, file):
    (root / NEWEST / file).write_bytes(b"{")
    lines = ran("verify", root, code=1).splitlines()
    assert any(line.endswith(f"{root}/{NEWEST}") for line in lines)
    assert lines[-1] == f"check the previous one: ckptkit verify {root}/{BEFORE}"
    assert "check the previous one" not in ran("verify", root, "-q", code=1)


@pytest.mark.parametrize("address", ["{root}", "{root}/latest", "{root}/step_00000900"])
def test_a_copy_with_the_name_of_a_later_step_is_damage_under_every_address(root, address):
    shutil.copytree(root / NEWEST, root / "step_00000900")
    lines = ran("verify", address.format(root=root), code=1).splitlines()
    assert lines[0] == f"{root}/step_00000900" and NEWEST in lines[1]
    assert lines[-1] == f"check the previous one: ckptkit verify {root}/{NEWEST}"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_the_output_names_the_chosen_checkpoint_unless_it_is_quiet(root, command):
    note = f"{NEWEST} is the newest of 3 step directories in {root}."
    assert note in ran(command, root) and note not in ran(command, root, "-q")
    assert f"{root}/{BEFORE}" in ran(command, root / "latest~1")


@pytest.mark.parametrize("made", ["link", "directory"])
def test_a_quick_verify_finds_what_takes_the_place_of_a_file(root, tmp_path, made):
    data = root / NEWEST / DATA
    data.rename(tmp_path / DATA)
    data.symlink_to(tmp_path / DATA) if made == "link" else data.mkdir()
    bad = [line for line in ran("verify", root, "--quick", code=1).splitlines() if line.startswith("bad: ")]
    assert len(bad) == 1 and bad[0].startswith(f"bad: {DATA} can't be read: ")
    wanted = "is a symbolic link to" if made == "link" else "not a regular file"
    for check in ((), ("--no-check",)):
        assert wanted in ran("convert", root, tmp_path / "out", "--dry-run", *check, code=1)
        assert wanted in ran("convert", root, tmp_path / "out", *check, code=1)


def test_a_damaged_oldest_checkpoint_has_no_previous_one(root):
    (root / "step_00000100" / DATA).unlink()
    assert "check the previous one" not in ran("verify", root / "100", code=1)


@pytest.mark.parametrize(
    "name", ["broken_missing_shard/ckpt", "broken_missing_metadata/ckpt", "broken_verl_missing_rank"]
)
def test_verify_prints_json_for_a_checkpoint_that_cannot_be_opened(zoo, name):
    found = document("verify", zoo / name, code=1)
    assert found["ok"] is False and "missing" in found["problems"][0]["message"]


def test_a_file_with_many_damages_prints_few_lines(tmp_path):
    save_file({f"layers.{i}.weight": np.full((2, 2), i, np.float32) for i in range(40)}, tmp_path / "model.safetensors")
    reshard(str(tmp_path / "model.safetensors"), str(tmp_path / "many"), world_size=1)
    every_bit(tmp_path / "many" / DATA, 200)
    bad = [line for line in ran("verify", tmp_path / "many", code=1).splitlines() if line.startswith("bad: ")]
    assert len(bad) < 15 and "more problems" in bad[-1]
    assert len(document("verify", tmp_path / "many", code=1)["problems"]) > 35


def test_an_unreadable_file_is_one_problem(root, monkeypatch):
    for name in ("read", "read_into"):
        error = StorageError(5, "shards/__0_0.distcp: Input/output error")
        refuse(monkeypatch, LocalStore, name, error, when=lambda store, path, *_: path.endswith(".distcp"))
    lines = run("verify", root).output.splitlines()
    assert [line.count("Input/output error") for line in lines if "__0_0.distcp" in line] == [1]


def test_a_dcp_without_its_metadata_may_be_a_copy_that_left_it_out(zoo, tmp_path):
    shutil.copytree(zoo / "dcp_threads2_w2" / "ckpt", tmp_path / "copy", ignore=shutil.ignore_patterns(".metadata"))
    assert "or a copy left out this hidden file" in ran("verify", tmp_path / "copy", code=1)


def test_ls_shows_step_directories_without_a_record(root):
    (root / NEWEST / "checkpoint.json").unlink()
    (root / "copy").mkdir()
    shutil.copy(root / BEFORE / "checkpoint.json", root / "copy")
    shown, skipped = ran("ls", root), f"1 other directory is skipped; to see why: ckptkit ls --all {root}"
    assert all(words in shown for words in (NEWEST, "no checkpoint.json", skipped))
    assert "copy" in ran("ls", "--all", root)


def test_ls_calls_neither_a_copy_nor_an_export_of_ckptkit_foreign(root):
    shutil.copytree(root / BEFORE, root / "backup")
    ran("convert", root, root / "export", "--to", "torch")
    assert f"1 other directory is skipped; to see why: ckptkit ls --all {root}" in ran("ls", root)
    assert "not checkpoints of this run, never touched: export" in ran("ls", "--all", root)


def test_a_run_whose_records_are_damaged_is_not_called_empty(root):
    (root / "step_00000100").rename(root / "before-decay")
    for record in root.glob("*/checkpoint.json"):
        record.write_bytes(record.read_bytes()[:-20])
    shown = run("ls", root).output  # a renamed directory: its record is lost, and belongs to no other
    assert all(name in shown for name in ("before-decay", BEFORE, NEWEST)), shown
    refused = ran("prune", root, "--max-num", "1", code=1)
    assert "contains no usable checkpoint, only before-decay and 2 more." in refused and "It is empty" not in refused
    assert f"ckptkit ls --all {root}" in refused


PREVIOUS = f"The previous checkpoint: {{root}}/{BEFORE}"
SEE_BOTH = f"To see all damage: ckptkit verify {{root}}/{BEFORE}; ckptkit verify {{root}}/{NEWEST}"


@pytest.mark.parametrize(("damage", "line", "said"), [
    (Path.unlink, "convert {root} {out}", (DATA, NEWEST, PREVIOUS)),
    (Path.unlink, "reshard {root} {out} --world-size 2", (DATA, NEWEST, PREVIOUS)),
    (every_bit, "convert {root} {out}", (f"ckptkit verify {{root}}/{NEWEST}", PREVIOUS)),
    (unreadable_record, "inspect {root}/latest", (f"is {NEWEST}, which cannot be opened", PREVIOUS)),
    (cut, "convert {root} {out} --no-check", ("is truncated: it has 100 bytes, but bytes up to",)),
    (cut, "merge {root} {out} --last 2", (SEE_BOTH,)),  # either source may be the damaged one
])  # fmt: skip
def test_an_error_names_the_damage_and_what_to_do_next(root, tmp_path, damage, line, said):
    damage(root / NEWEST / DATA)
    shown = ran(*line.format(root=root, out=tmp_path / "out").split(), code=1)
    assert [words for words in said if words.format(root=root) not in shown] == [], shown


def test_a_proof_without_digests_says_so(root, tmp_path):
    for name, *options in (("convert", "--to", "torch"), ("reshard", "--world-size", "2")):
        found = document(name, root, tmp_path / name, *options, "--no-check")
        assert "source digests not checked (--no-check)" in found["proved"]
