"""What the commands and reports say about a checkpoint is so: counts, names, and the commands that they propose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ckptkit import CheckpointManager, TrainState
from ckptkit.cli.main import cli


class Tied(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 8)
        self.head = torch.nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def saved(root: Path, kind: str = "sharded", steps: tuple[int, ...] = (1, 2)) -> Path:
    model = Tied()
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager(root, state_dict_type=kind) as manager:
        for step in steps:
            manager.save(step, state)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return saved(tmp_path / "RUN")


def _cut(step: Path) -> None:
    data = step / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:100])


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_save_reports_the_bytes_of_the_files_that_the_rank_wrote(kind: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "RUN", state_dict_type=kind) as manager:
        report = manager.save(1, TrainState(model=Tied()))
    files = [path for path in Path(report.url).rglob("*") if path.is_file() and path.name != "checkpoint.json"]
    assert report.rank_bytes == report.total_bytes == sum(path.stat().st_size for path in files)


def test_ls_calls_neither_a_copy_nor_an_export_of_ckptkit_foreign(root: Path) -> None:
    shutil.copytree(root / "step_00000001", root / "backup")
    assert run("convert", root, root / "export", "--to", "torch").exit_code == 0
    assert f"1 other directory is skipped; to see why: ckptkit ls --all {root}" in run("ls", root).output
    assert "not checkpoints of this run, never touched: export" in run("ls", "--all", root).output


def test_ls_says_that_its_list_of_entries_is_cut_off(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).mkdir()
    assert "It contains a, b, c, d, e, ...." in run("ls", tmp_path).output


@pytest.mark.parametrize("kind", ["full", "local"])
@pytest.mark.parametrize("to", ["dcp", "torch", "local", "hf"])
def test_convert_names_the_tied_tensors_that_the_result_lacks(kind: str, to: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "RUN", kind)
    said = run("convert", source, tmp_path / "out", "--to", to).output
    assert "tied in the source, and written under one name only: head.weight is embed.weight" in said


def test_merge_names_the_tied_tensors_that_the_result_lacks(tmp_path: Path) -> None:
    said = run("merge", saved(tmp_path / "RUN", "full"), tmp_path / "out", "--last", "2").output
    assert "written under one name only: head.weight is embed.weight" in said


def test_convert_does_not_name_a_tied_tensor_whose_holder_is_excluded(tmp_path: Path) -> None:
    source = saved(tmp_path / "RUN", "full")
    assert "tied in the source" not in run("convert", source, tmp_path / "out", "--include", "nothing*").output


def test_a_copy_of_a_run_does_not_say_that_nothing_was_copied(root: Path, tmp_path: Path) -> None:
    (root / "step_00000002" / "__0_0.distcp").unlink()
    result = run("copy", root, tmp_path / "new")
    assert result.exit_code == 1 and (tmp_path / "new" / "step_00000001").is_dir()
    assert "step_00000002 was not copied" in result.output
    assert "has 1 other complete checkpoint." in result.output
    assert "Nothing was copied" not in result.output


def test_the_command_that_lists_all_damage_ends_where_its_sentence_ends(root: Path) -> None:
    (root / "step_00000002" / "__0_0.distcp").unlink()
    told = run("diff", root, root / "step_00000001").output
    assert told.count("ckptkit verify") == 1
    assert f"To see all damage: ckptkit verify {root}/step_00000002\n" in told


def test_if_either_source_may_be_the_damaged_one_both_are_to_be_checked(root: Path, tmp_path: Path) -> None:
    _cut(root / "step_00000002")
    told = run("merge", root, tmp_path / "out", "--last", "2").output
    one, two = (f"ckptkit verify {root}/step_0000000{step}" for step in (1, 2))
    assert f"To see all damage: {one}; {two}" in told


def test_a_truncated_file_is_said_to_have_the_bytes_that_it_has(root: Path, tmp_path: Path) -> None:
    _cut(root / "step_00000002")
    told = run("convert", root, tmp_path / "out", "--no-check").output
    assert "the file has 100 bytes, but bytes up to" in told


def test_a_proof_without_digests_says_so(root: Path, tmp_path: Path) -> None:
    for command in (("convert", "--to", "torch"), ("reshard", "--world-size", "2")):
        said = run(command[0], root, tmp_path / command[0], *command[1:], "--no-check", "--json")
        assert "source digests not checked (--no-check)" in json.loads(said.stdout)["proved"]


def test_a_dcp_without_its_metadata_may_be_a_copy_that_left_it_out(zoo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(zoo / "dcp_threads2_w2" / "ckpt", copy, ignore=shutil.ignore_patterns(".metadata"))
    said = run("verify", copy)
    assert said.exit_code == 1
    assert "or a copy left out this hidden file" in said.output


def test_diff_accepts_the_names_that_inspect_shows(root: Path, tmp_path: Path) -> None:
    """Its error says: see the names with `ckptkit inspect`."""
    run("convert", root, tmp_path / "out")
    assert "model.embed.weight" in run("inspect", root, "--tensors", "*").output
    for one, other in ((root, tmp_path / "out"), (tmp_path / "out", root)):
        for names in (("--include", "model.embed.*"), ("--include", "embed.*"), ("--exclude", "model.head.*")):
            found = run("diff", one, other, *names, "--exclude", "optimizer*", "--exclude", "rng*", "--json")
            assert found.exit_code == 0 and json.loads(found.stdout)["same"] == 1, (names, found.output)
