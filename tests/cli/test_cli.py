"""The commands as in a shell: output, exit codes, JSON, and one clear message per error."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckptkit import CheckpointManager, convert, open_checkpoint, verify
from ckptkit.cli.frame import _message
from ckptkit.cli.main import cli, main
from ckptkit.errors import UsageError
from ckptkit.formats.detect import open_source
from ckptkit.offline.inspect import inspect
from ckptkit.units import format_count
from tests.test_package import modules_after, run_cli

DCP = "dcp_fsdp2_uneven_w4/ckpt"
HF = "hf_ref_llama_untied"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


@pytest.mark.parametrize(
    "command",
    ["convert", "merge", "reshard", "copy", "inspect", "ls", "verify", "diff", "prune", "pin", "unpin", "push"],
)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.output
    tried = re.findall(rf"^ +ckptkit ({command} .*)$", result.output, re.MULTILINE)
    assert len(tried) == 2
    for line in tried:  # each command line parses
        found = cli.get_command(cli.make_context("ckptkit", ["ls", "-h"], resilient_parsing=True), command)
        assert found is not None
        found.make_context(command, shlex.split(line, comments=True)[1:])
    page = re.search(r"^ *More: docs/(\S+) in the repository$", result.output, re.MULTILINE)
    assert page and (Path(__file__).parents[2] / "docs" / page[1]).is_file()


def test_a_program_that_calls_main_keeps_its_sigint_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", ""), ("inspect", "file://"), ("inspect", "IN", "--html", "out", "--after", ""), ("verify", ""),
        ("ls", ""), ("prune", "", "--max-num", "1"), ("pin", ""), ("unpin", ""), ("diff", "", "IN"), ("diff", "IN", ""),
        ("convert", "", "out"), ("convert", "IN", ""), ("convert", "IN", "out", "--base", ""), ("copy", "", "out"),
        ("copy", "IN", ""), ("reshard", "", "out", "--world-size", "1"), ("reshard", "IN", "", "--world-size", "1"),
        ("push", "", "me/model"), ("convert", "IN", "out", "--push", ""), ("convert", "IN", "out", "--key-map", ""),
        ("verify", "IN", "--layout", ""), ("convert", "IN", "out", "--include", ""),
    ],
    ids=str,
)  # fmt: skip
def test_an_empty_path_or_option_is_refused(
    zoo: Path, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(zoo / HF, tmp_path, dirs_exist_ok=True)  # an empty path would read the current directory
    result = run(*(str(zoo / HF) if word == "IN" else word for word in words))
    assert result.exit_code == 2 and "is empty. Is a shell variable not set?" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", [CheckpointManager, open_checkpoint, verify, lambda url: convert(url, "out")])
def test_an_empty_path_is_refused_in_python(call: Callable[[str], object]) -> None:
    with pytest.raises(UsageError, match="The path is empty"):
        call("")


def test_an_alias_of_a_format_gets_a_suggestion(tmp_path: Path) -> None:
    result = run("convert", tmp_path, tmp_path / "out", "--to", "safetensors")
    assert result.exit_code == 2 and "Did you mean 'hf'?" in result.stderr


def test_diff_prints_a_summary_by_layer_and_verbose_every_tensor(zoo: Path, tmp_path: Path) -> None:
    run("convert", zoo / DCP, tmp_path / "out", "--dtype", "bf16")
    brief, every = run("diff", zoo / DCP, tmp_path / "out"), run("diff", zoo / DCP, tmp_path / "out", "--verbose")
    assert brief.exit_code == every.exit_code == 1
    assert len(brief.stdout.splitlines()) < len(every.stdout.splitlines())
    assert "differs, by layer" in brief.stdout and "--verbose lists them" in brief.stdout
    some = run("diff", zoo / DCP, tmp_path / "out", "--exclude", "*norm*", "--json")
    names = [row["name"] for row in json.loads(some.stdout)["different"]]
    assert names and not any("norm" in name for name in names)


def test_quiet_prints_only_the_result(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / DCP, tmp_path / "out", "--quiet")
    assert result.stderr == "" and [line.split(":")[0] for line in result.stdout.splitlines()] == ["proved"]
    result = run("diff", zoo / DCP, tmp_path / "out", "--quiet")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1


def test_a_misspelt_command_gets_a_suggestion() -> None:
    result = run("converrt")
    assert result.exit_code == 2
    assert "Did you mean 'convert'" in result.stderr


def test_a_misspelt_option_gets_a_suggestion(zoo: Path) -> None:
    result = run("inspect", zoo / HF, "--tensor")
    assert result.exit_code == 2
    assert "--tensors" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["verify"], ["convert", "--dry-run"], ["reshard", "--world-size", "2", "--dry-run"]]
)
def test_no_command_without_a_cast_imports_torch(zoo: Path, tmp_path: Path, arguments: list[str]) -> None:
    places = [str(zoo / DCP)] if arguments[0] in ("inspect", "verify") else [str(zoo / DCP), str(tmp_path / "out")]
    assert "torch" not in modules_after(run_cli(*arguments, *places))


def test_convert_and_reshard_do_not_import_torch(zoo: Path, tmp_path: Path) -> None:
    assert "torch" not in modules_after(run_cli("convert", str(zoo / DCP), str(tmp_path / "a")))
    assert "torch" not in modules_after(run_cli("reshard", str(zoo / DCP), str(tmp_path / "b"), "--world-size", "3"))


def test_a_missing_path_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    result = run("convert", tmp_path / "nothing", tmp_path / "out")
    assert result.exit_code == 1
    assert str(tmp_path / "nothing") in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "ls"])
def test_an_empty_directory_holds_no_checkpoint(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path)
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


def test_the_error_for_a_directory_that_is_not_a_checkpoint_says_what_it_contains(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert "notes.txt" in result.stderr


def test_a_destination_that_exists_is_refused_and_left_alone(zoo: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("keep")
    result = run("convert", zoo / DCP, target)
    assert result.exit_code == 1
    assert "--overwrite" in result.stderr
    assert [p.name for p in target.iterdir()] == ["mine"]


def test_overwrite_replaces_the_destination(zoo: Path, tmp_path: Path) -> None:
    assert run("convert", zoo / DCP, tmp_path / "out").exit_code == 0
    result = run("convert", zoo / HF, tmp_path / "out", "--overwrite")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out" / "config.json").exists()


def test_a_directory_of_steps_means_its_newest_step_and_the_output_names_it(zoo: Path) -> None:
    result = run("inspect", zoo / "steps_dir_lightrft")
    assert result.exit_code == 0
    assert "global_step10" in result.output


def test_a_dry_run_writes_nothing(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / DCP, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "nothing was written" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_prints_what_was_proved(zoo: Path, tmp_path: Path) -> None:
    model = next(s for s in inspect(str(zoo / DCP)).sections if s.role == "model")
    result = run("convert", zoo / DCP, tmp_path / "out", "--verify")
    assert result.exit_code == 0, result.stderr
    n, elements = model.tensors, format_count(model.numel)
    assert re.fullmatch(
        rf"proved: {n} tensors, {elements} elements, each covered once; \d+ source digests checked; "
        rf"{n} header entries match the plan; {n}/{n} tensors equal to the source",
        result.output.strip().splitlines()[-1],
    )


def test_a_proof_states_the_numbers_of_the_result(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / DCP, tmp_path / "out", "--include", "*.norm.weight")
    assert "proved: 2 tensors, 20 elements, each covered once; 8 source digests checked; 2 " in result.output
    result = run("reshard", zoo / DCP, tmp_path / "two", "--world-size", "2")
    sections = inspect(str(tmp_path / "two")).sections
    tensors, elements = sum(s.tensors for s in sections), format_count(sum(s.numel for s in sections))
    assert f"proved: {tensors} tensors, {elements} elements, each covered once; " in result.output
    slices = [s for entry in open_source(str(tmp_path / "two")).catalog.tensors.values() for s in entry.slices]
    again = run("reshard", tmp_path / "two", tmp_path / "three", "--world-size", "3")
    digests = len({(s.path, s.start) for s in slices if s.nbytes})
    assert f"; {digests} source digests checked; committed as step 0 of 3 ranks" in again.output


def test_the_error_for_a_damaged_source_names_file_and_tensor_and_nothing_is_left(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / "broken_bitflip_shard" / "ckpt", tmp_path / "out")
    assert result.exit_code == 1
    assert "embed_tokens" in result.stderr
    assert ".distcp" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_verify_names_the_damaged_tensor_and_exits_with_1(zoo: Path) -> None:
    result = run("verify", zoo / "broken_bitflip_shard" / "ckpt")
    assert result.exit_code == 1
    assert "embed_tokens" in result.output


def test_verify_quick_reads_no_tensor(zoo: Path) -> None:
    result = run("verify", "--quick", zoo / "broken_bitflip_shard" / "ckpt")
    assert result.exit_code == 0
    assert "not read" in result.output


def test_verify_finds_a_flipped_bit_in_every_file_of_our_own_checkpoint(zoo: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    assert run("reshard", zoo / DCP, good, "--world-size", "2").exit_code == 0
    assert run("verify", good).exit_code == 0
    for file in sorted(p for p in good.iterdir() if p.is_file()):
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        data = bytearray((bad / file.name).read_bytes())
        data[len(data) // 2] ^= 1
        (bad / file.name).write_bytes(bytes(data))
        result = run("verify", bad)
        assert result.exit_code == 1, file.name
        assert file.name in result.output + result.stderr
        shutil.rmtree(bad)


def test_inspect_lists_slices_with_their_owners(zoo: Path) -> None:
    result = run("inspect", zoo / DCP, "--tensors", "*", "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == "ckptkit.inspect/1"
    tensor = max(document["tensors"], key=lambda t: t["nbytes"])
    assert sorted(s["rank"] for s in tensor["slices"]) == [0, 1, 2, 3]


def test_every_command_prints_one_json_document(zoo: Path, tmp_path: Path) -> None:
    commands = [
        ["inspect", zoo / DCP],
        ["verify", zoo / DCP],
        ["convert", zoo / DCP, tmp_path / "a"],
        ["reshard", zoo / DCP, tmp_path / "run" / "step_00000001", "--world-size", "2"],
        ["diff", zoo / DCP, zoo / DCP],
    ]
    for arguments in commands:
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        json.loads(result.stdout)


def test_diff_of_a_checkpoint_and_its_export_is_equal(zoo: Path, tmp_path: Path) -> None:
    assert run("convert", zoo / DCP, tmp_path / "out").exit_code == 0
    result = run("diff", zoo / DCP, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.output.strip().splitlines()[-1].startswith("equal")


def test_diff_shows_a_cast_and_exits_with_1(zoo: Path, tmp_path: Path) -> None:
    assert run("convert", zoo / DCP, tmp_path / "out", "--dtype", "bf16").exit_code == 0
    result = run("diff", zoo / DCP, tmp_path / "out", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["dtypes"]
    assert 0 < max(row["max_rel"] for row in document["different"]) < 2**-7


def test_wrong_sizes_are_wrong_usage(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / DCP, tmp_path / "out", "--max-shard-size", "lots")
    assert result.exit_code == 2
    assert "lots" in result.stderr


def test_a_mesh_that_does_not_fit_is_wrong_usage(zoo: Path, tmp_path: Path) -> None:
    result = run("reshard", zoo / DCP, tmp_path / "out", "--world-size", "4", "--mesh", "replicate=3,shard=2")
    assert result.exit_code == 2
    assert all(number in result.stderr for number in ("3", "2", "6", "4"))


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptkit", "inspect", str(tmp_path / "nothing"), "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_an_interrupted_conversion_exits_with_130_and_leaves_nothing(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptkit.offline.conversion.execute", interrupt)
    result = run("convert", zoo / DCP, tmp_path / "out")
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(None), OSError(5, None), OSError(5, "")])
def test_a_system_error_without_a_message_gets_one(error: OSError) -> None:
    assert _message(error) == "Error: OSError without a message."
