"""What a tired person types: no mistake deletes anything, and each error says what to do next."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.cli import ls, outcome
from ckptkit.cli import main as commands
from ckptkit.cli.main import cli
from ckptkit.errors import StorageError
from ckptkit.offline.reshard import reshard
from ckptkit.storage.local import LocalStore
from ckptkit.storage.publish import open_staging
from ckptkit.storage.staging import new_nonce


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def made(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with metrics, whose policy keeps the best: the older one."""
    import torch

    from ckptkit import CheckpointManager, TrainState

    root = tmp_path_factory.mktemp("night") / "RUN"
    model = torch.nn.Linear(8, 8)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    policy = RetentionPolicy(max_num=5, keep_best=("loss", "min"))
    with CheckpointManager(str(root), retention=policy) as manager:
        for step, loss in ((100, 1.0), (200, 2.0), (300, 3.0)):
            manager.save(step, state, metrics={"loss": loss})
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "RUN", symlinks=True))


def _flip(file: Path, *, every: int, start: int = 0) -> None:
    data = bytearray(file.read_bytes())
    for at in range(start, len(data), every):
        data[at] ^= 1
    file.write_bytes(data)


# --- what exists


def test_verify_prints_which_checkpoint_it_chose(root: Path) -> None:
    assert run("verify", root / "latest~1").output.splitlines()[0] == f"{root}/step_00000200"


def test_verify_of_a_damaged_checkpoint_names_the_previous_one(root: Path) -> None:
    (root / "step_00000300" / "__0_0.distcp").unlink()
    result = run("verify", root)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == f"check the previous one: ckptkit verify {root}/step_00000200"


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_quiet_prints_neither_the_choice_nor_hints(root: Path, command: str) -> None:
    note = f"step_00000300 is the newest of 3 step directories in {root}."
    assert note in run(command, root).output and note not in run(command, root, "-q").output
    (root / "step_00000300" / "__0_0.distcp").unlink()
    assert "check the previous one" not in run("verify", root, "-q").output


def test_a_damaged_oldest_checkpoint_has_no_previous_one(root: Path) -> None:
    (root / "step_00000100" / "__0_0.distcp").unlink()
    assert "check the previous one" not in run("verify", root / "100").output


@pytest.mark.parametrize(
    "name", ["broken_missing_shard/ckpt", "broken_missing_metadata/ckpt", "broken_verl_missing_rank"]
)
def test_verify_prints_json_for_a_checkpoint_that_cannot_be_opened(zoo: Path, name: str) -> None:
    result = run("verify", zoo / name, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["ok"] is False
    assert "missing" in document["problems"][0]["message"]


def test_ls_shows_step_directories_without_a_record(root: Path) -> None:
    (root / "step_00000300" / "checkpoint.json").unlink()
    (root / "copy").mkdir()
    shutil.copy(root / "step_00000200" / "checkpoint.json", root / "copy")
    shown = run("ls", root).output
    assert "step_00000300" in shown
    assert "no checkpoint.json" in shown
    assert f"1 other directory is skipped; to see why: ckptkit ls --all {root}" in shown
    assert "copy" in run("ls", "--all", root).output


def test_a_run_whose_records_are_damaged_is_not_called_empty(root: Path) -> None:
    (root / "step_00000100").rename(root / "before-decay")
    for record in root.glob("*/checkpoint.json"):
        record.write_bytes(record.read_bytes()[:-20])
    shown = run("ls", root).output  # a renamed directory: its record is lost, and belongs to no other
    assert all(name in shown for name in ("before-decay", "step_00000200", "step_00000300")), shown
    refused = run("prune", root, "--max-num", "1")
    assert refused.exit_code == 1 and "It is empty" not in refused.output
    assert "contains no usable checkpoint, only before-decay, and" in refused.output
    assert f"ckptkit ls --all {root}" in refused.output


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("200", "ckptkit ls {root}"),
        ("step_00000100", "one checkpoint"),
        ("latest", "ckptkit ls {root}"),
        ("step_00000100/.metadata", "is a file"),
    ],
)
def test_ls_of_something_other_than_a_run_says_what_it_is(root: Path, place: str, words: str) -> None:
    result = run("ls", root / place)
    assert result.exit_code == 1
    assert words.format(root=root) in result.stderr


@pytest.mark.parametrize("verb", ["convert", "reshard"])
def test_an_error_about_a_missing_file_names_its_checkpoint_and_the_previous_one(
    root: Path, tmp_path: Path, verb: str
) -> None:
    (root / "step_00000300" / "__0_0.distcp").unlink()
    more = ["--world-size", "2"] if verb == "reshard" else []
    result = run(verb, root, tmp_path / "out", *more)
    assert result.exit_code == 1
    assert "__0_0.distcp" in result.stderr
    assert f"The previous checkpoint: {root}/step_00000200" in result.stderr
    assert f"{root}/step_00000300" in result.stderr


def test_a_conversion_that_finds_damage_names_verify_and_the_previous_checkpoint(root: Path, tmp_path: Path) -> None:
    _flip(root / "step_00000300" / "__0_0.distcp", every=64)
    result = run("convert", root, tmp_path / "out")
    assert result.exit_code == 1
    assert f"ckptkit verify {root}/step_00000300" in result.stderr
    assert f"The previous checkpoint: {root}/step_00000200" in result.stderr


@pytest.mark.parametrize("file", ["checkpoint.json", "manifest.safetensors"])
def test_verify_names_the_previous_checkpoint_if_the_newest_cannot_be_opened(root: Path, file: str) -> None:
    (root / "step_00000300" / file).write_bytes(b"{")
    result = run("verify", root)
    assert result.exit_code == 1
    assert result.output.splitlines()[0] == f"{root}/step_00000300"
    assert result.output.splitlines()[-1] == f"check the previous one: ckptkit verify {root}/step_00000200"


def test_latest_does_not_skip_a_damaged_newest_checkpoint(root: Path) -> None:
    (root / "step_00000300" / "checkpoint.json").write_bytes(b"{")
    result = run("inspect", root / "latest")
    assert result.exit_code == 1
    assert "is step_00000300, which cannot be opened" in result.stderr
    assert f"The previous checkpoint: {root}/step_00000200" in result.stderr


def test_a_file_with_many_damages_prints_few_lines(root: Path) -> None:
    tensors = {f"layers.{i}.weight": np.full((2, 2), i, np.float32) for i in range(40)}
    save_file(tensors, root.parent / "model.safetensors")
    reshard(str(root.parent / "model.safetensors"), str(root.parent / "many" / "step_00000001"), world_size=1)
    _flip(root.parent / "many" / "step_00000001" / "__0_0.distcp", every=1, start=200)
    result = run("verify", root.parent / "many")
    assert result.exit_code == 1
    bad = [line for line in result.output.splitlines() if line.startswith("bad: ")]
    assert len(bad) < 15
    assert "more problems" in bad[-1]
    assert len(json.loads(run("verify", root.parent / "many", "--json").stdout)["problems"]) > 35


def test_an_unreadable_file_is_one_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalStore.read

    def fail(self: Any, path: str, *place: Any) -> Any:
        if path.endswith(".distcp"):
            raise StorageError(5, f"{path}: Input/output error")
        return read(self, path, *place)

    monkeypatch.setattr(LocalStore, "read", fail)
    monkeypatch.setattr(LocalStore, "read_into", fail)
    result = run("verify", root)
    assert [line.count("Input/output error") for line in result.output.splitlines() if "__0_0.distcp" in line] == [1]


def test_diff_by_recorded_digests_does_not_claim_to_have_read_the_tensors(root: Path) -> None:
    result = run("diff", root / "300", root / "300")
    assert result.exit_code == 0
    assert "by recorded digest only; `verify` reads the bytes" in result.output


# --- misspelt names


@pytest.mark.parametrize(("name", "words"), [("best:acc:max", "Existing metrics: loss."), ("best:los:min", "'loss'"),
                                             ("best:loss:mim", "best:METRIC:min")])  # fmt: skip
def test_best_by_an_unknown_metric_lists_the_known_ones(root: Path, name: str, words: str) -> None:
    result = run("inspect", root / name)
    assert result.exit_code == 2
    assert words in result.stderr


def test_ls_of_a_misspelt_run_gets_a_suggestion(root: Path) -> None:
    for verb in ("ls", "prune"):
        result = run(verb, root.parent / "RUM")
        assert result.exit_code == 1
        assert f"Did you mean {root}?" in result.stderr


def test_an_unknown_checkpoint_name_gets_a_suggestion(root: Path) -> None:
    result = run("inspect", root / "lates")
    assert result.exit_code == 1
    assert f"Did you mean {root}/latest?" in result.stderr
    assert "step_00000300" in result.stderr


@pytest.mark.parametrize("name", ["77", "step_00000077", "latest~1"])
def test_an_unknown_name_in_a_run_of_one_checkpoint_names_that_checkpoint(root: Path, name: str) -> None:
    for step in ("step_00000100", "step_00000200"):
        shutil.rmtree(root / step)
    result = run("inspect", root / name)
    assert result.exit_code == 1
    assert f"has no checkpoint '{name}'. There is only step_00000300." in result.stderr


def test_latest_of_another_systems_run_says_what_to_pass(zoo: Path) -> None:
    result = run("inspect", zoo / "deepspeed_zero2_bf16_w2" / "ckpt" / "latest")
    assert result.exit_code == 1
    assert "newest step of another system" in result.stderr


def test_a_protocol_with_one_slash_gets_a_suggestion() -> None:
    result = run("inspect", "s3:/bucket/run")
    assert result.exit_code == 2
    assert "Did you mean s3://bucket/run?" in result.stderr


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_pinning_a_run_pins_its_newest_checkpoint(root: Path, verb: str) -> None:
    run("pin", root / "300", "--why", "first")
    more = ["--why", "x"] if verb == "pin" else []
    assert "step_00000300" in run(verb, root, *more).output


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_only_a_checkpoint_can_be_pinned(tmp_path: Path, verb: str) -> None:
    result = run(verb, tmp_path / "nosuch", *(["--why", "x"] if verb == "pin" else []))
    assert result.exit_code == 1
    assert "nosuch" in result.stderr


MISSING = [
    *([verb] for verb in ("inspect", "verify", "pin", "unpin", "ls", "prune")),
    *([verb, "OUT"] for verb in ("convert", "copy")),
    ["reshard", "OUT", "--world-size", "2"],
    ["diff", "nosuch"],
    ["push", "me/model"],
    ["merge", "OUT", "--last", "2"],
]


@pytest.mark.parametrize("words", MISSING, ids=lambda words: words[0])
def test_every_command_answers_a_missing_checkpoint_with_exit_code_1(words: list[str], tmp_path: Path) -> None:
    result = run(words[0], tmp_path / "nosuch", *words[1:])
    assert result.exit_code == 1, result.output
    assert "does not exist" in result.stderr


def test_inspect_with_after_but_without_html_is_wrong_usage(root: Path) -> None:
    result = run("inspect", root, "--after", root / "100")
    assert result.exit_code == 2
    assert "--html" in result.stderr


@pytest.mark.parametrize("verb", ["inspect", "verify", "convert"])
def test_a_missing_path_gets_a_suggestion(root: Path, tmp_path: Path, verb: str) -> None:
    more = [tmp_path / "out"] if verb == "convert" else []
    result = run(verb, tmp_path / "RUM" / "step_00000100", *more)
    assert result.exit_code == 1
    assert f"does not exist. Did you mean {tmp_path}/RUN/step_00000100?" in result.stderr


def test_a_missing_path_without_a_suggestion_names_the_parent_that_exists(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "x" / "y")
    assert result.exit_code == 1
    assert f"does not exist (nor does {tmp_path}/x; {tmp_path} does)." in result.stderr


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "gs://"])
def test_a_url_without_a_bucket_is_wrong_usage(url: str) -> None:
    for command in (["ls", url], ["verify", url], ["inspect", url], ["prune", url, "--max-num", "1"]):
        result = run(*command)
        assert result.exit_code == 2
        assert f"Error: {url} has no bucket. Write {url[:2]}://BUCKET/" in result.output


def test_a_prune_of_something_other_than_a_run_says_that_nothing_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    result = run("prune", tmp_path, "--max-num", "1")
    assert f"Error: Nothing was deleted: {tmp_path} contains no ckptkit checkpoint." in result.output
    assert result.output.endswith(f"ckptkit inspect {tmp_path}\n")  # the command is last, so that it can be copied


def test_a_pin_has_a_reason(root: Path) -> None:
    result = run("pin", root / "300", "--why", " ")
    assert result.exit_code == 2
    assert "give a reason" in result.stderr


def test_a_max_shard_size_of_0_is_wrong_usage(root: Path, tmp_path: Path) -> None:
    result = run("convert", root, tmp_path / "out", "--max-shard-size", "0")
    assert result.exit_code == 2
    assert "5GB" in result.stderr


# --- mistakes that would delete


def test_prune_limits_keep_the_exemptions_of_the_run(root: Path) -> None:
    assert run("prune", root, "--max-num", "1").exit_code == 0
    assert run("ls", "-q", root).output.split() == ["step_00000100", "step_00000300"]


def test_forget_recorded_drops_the_exemptions_of_the_run(root: Path) -> None:
    assert run("prune", root, "--max-num", "1", "--forget-recorded").exit_code == 0
    assert run("ls", "-q", root).output.split() == ["step_00000300"]


def test_a_misspelt_metric_deletes_nothing(root: Path) -> None:
    result = run("prune", root, "--max-num", "1", "--keep-best", "lss:min")
    assert result.exit_code == 2
    assert "Did you mean 'loss'?" in result.stderr
    assert len(run("ls", "-q", root).output.split()) == 3


def test_push_of_a_directory_without_an_export_does_not_suggest_writing_into_it(root: Path) -> None:
    result = run("push", root, "user/repo")
    assert f"ckptkit convert {root} EXPORT" in result.stderr


def test_a_library_warning_reads_like_a_warning(root: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "ckptkit", "ls", str(root), "--max-mem", "1kB"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("Warning: ")
    assert "ckptkit.checkpoint" not in done.stderr


# --- Ctrl-C, and narrow terminals


def test_the_message_of_an_interrupted_conversion_names_what_is_left(tmp_path: Path) -> None:
    dst = str(tmp_path / "out")
    assert "start over" in outcome.interrupted_words(dst, overwrite=False)
    staging = open_staging(LocalStore(tmp_path), "out", new_nonce())
    staging.write("part.safetensors", b"x" * 5000)
    words = outcome.interrupted_words(dst, overwrite=False)
    assert f"is kept in {staging.url}" in words
    assert "same command again" in words
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "is unchanged" in outcome.interrupted_words(dst, overwrite=True)
    assert "is unchanged, or its complete replacement is in" in outcome.interrupted_words(
        "s3://bucket/out", overwrite=True
    )


def test_ctrl_c_before_a_command_began_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.importlib, "import_module", pressed)
    result = run("ls", "x")
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"


def test_a_narrow_terminal_prints_reasons_on_separate_lines() -> None:
    table = [["name", "rotation"], ["step_00000100", "keep: the newest; a multiple of 400 (keep_every)"]]
    assert len(ls._aligned(table, 0)) == len(ls._aligned(table, 100)) == 2
    narrow = ls._aligned(table, 40)
    assert narrow[0] == "name"
    assert max(map(len, narrow)) <= 40
    assert " ".join(line.strip() for line in narrow[2:]) == table[1][1]
