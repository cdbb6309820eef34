"""Details of the commands: help, suggestions, progress, interrupts, colours, logging, dry runs."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from ckptkit.cli import frame
from ckptkit.cli.main import cli
from ckptkit.offline.convert import convert
from ckptkit.offline.reshard import reshard
from tests.test_package import HEAVY, modules_after, run_cli

DCP = "dcp_fsdp2_uneven_w4/ckpt"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def run_root(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("details") / "RUN"
    reshard(str(zoo / "verl_fsdp2_w2"), str(root / "step_00000004"), world_size=2)
    return root


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- help and suggestions


def test_help_has_a_heading_for_each_group_of_options() -> None:
    page = run("convert", "--help").output
    headings = [line for line in page.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["What:", "Model:", "Names:", "Files:", "Safety:", "Resources:", "Output:"]


@pytest.mark.parametrize(("option", "typed", "meant"), [("--to", "hff", "hf"), ("--dtype", "bf15", "bf16"),
                                                        ("--weights", "masters", "master")])  # fmt: skip
def test_a_misspelt_choice_gets_a_suggestion(option: str, typed: str, meant: str) -> None:
    result = run("convert", "a", "b", option, typed)
    assert result.exit_code == 2
    assert f"Did you mean '{meant}'?" in result.stderr


def test_full_dtype_names_are_accepted(zoo: Path, tmp_path: Path) -> None:
    assert run("convert", zoo / DCP, tmp_path / "out", "--dtype", "bfloat16", "--dry-run").exit_code == 0


def test_completion_knows_commands_and_options() -> None:
    env = {**os.environ, "_CKPTKIT_COMPLETE": "bash_complete", "COMP_WORDS": "ckptkit convert --ba", "COMP_CWORD": "2"}
    script = "import sys; sys.argv = ['ckptkit']; from ckptkit.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert "plain,--base" in done.stdout


# --- names for checkpoints


@pytest.mark.parametrize("name", ["latest", "4", "step_00000004"])
@pytest.mark.parametrize("verb", ["inspect", "verify", "convert", "reshard", "diff", "pin"])
def test_every_command_accepts_names_of_checkpoints(run_root: Path, tmp_path: Path, verb: str, name: str) -> None:
    more: dict[str, list[str | Path]] = {
        "convert": [tmp_path / "o", "--dry-run"],
        "reshard": [tmp_path / "o", "--world-size", "2", "--dry-run"],
        "diff": [run_root / "latest"],
        "pin": ["--why", "test"],
    }
    result = run(verb, run_root / name, *more.get(verb, []))
    assert result.exit_code == 0, result.output


def test_a_symlink_called_latest_of_another_system_is_followed(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo / DCP, tmp_path / "step-2")
    os.symlink("step-2", tmp_path / "latest")
    result = run("inspect", tmp_path / "latest", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["url"].endswith("/step-2")
    (tmp_path / "latest").unlink()
    os.symlink("gone", tmp_path / "latest")
    assert "there is no 'latest'" in run("inspect", tmp_path / "latest").output


# --- output of commands


def test_an_export_with_a_config_prints_the_serve_command(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / "verl_fsdp2_w2", tmp_path / "out put", "--verify")
    last = result.output.strip().splitlines()
    assert last[-1] == f"serve it with: vllm serve '{tmp_path}/out put'"
    assert "equal to the source" in last[-2]


@pytest.mark.parametrize("case", ["no tokenizer", "key map"])
def test_an_export_that_vllm_cannot_serve_prints_no_serve_command(zoo: Path, tmp_path: Path, case: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(zoo / "hf_ref_llama_untied", source)
    more: list[Any] = []
    if case == "no tokenizer":
        for path in source.glob("tokenizer*"):
            path.unlink()
    else:
        rule = {"op": "rename", "from": "{name:*}", "to": "other.{name}"}
        (tmp_path / "map.json").write_text(json.dumps({"rules": [rule]}))
        more = ["--key-map", tmp_path / "map.json"]
    result = run("convert", source, tmp_path / "out", *more)
    assert result.exit_code == 0, result.output
    assert "vllm serve" not in result.output
    assert ("tokenizer's files" in result.output) is (case == "no tokenizer")


def test_a_dry_run_that_would_fail_lists_why_and_exits_with_1(zoo: Path, tmp_path: Path) -> None:
    result = run("convert", zoo / DCP, tmp_path / "out", "--base", zoo / "hf_ref_llama_untied", "--dry-run")
    assert result.exit_code == 1
    assert "would fail: missing: lm_head.weight" in result.output
    assert "nothing was written" in result.output


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("[1]", "JSON object"), ("{", "not valid JSON")])
def test_an_invalid_adapter_config_is_wrong_usage(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "adapter.json"
    if text is not None:
        file.write_text(text)
    result = run("convert", "a", "b", "--adapter-config", file)
    assert result.exit_code == 2
    assert words in result.stderr
    assert str(file) in result.stderr


def test_an_adapter_config_from_a_file_is_written_into_the_export(zoo: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    lora = {f"base_model.model.q.lora_{x}.weight": np.ones(s, np.float32) for x, s in (("A", (2, 8)), ("B", (8, 2)))}
    save_file(lora, source / "weights.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "base_model_name_or_path": "x/y"}
    (tmp_path / "adapter.json").write_text(json.dumps(config))
    result = run("convert", source, tmp_path / "out", "--adapter-config", tmp_path / "adapter.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 4


def test_verify_names_the_files_it_could_not_prove(zoo: Path) -> None:
    result = run("verify", zoo / "hf_ref_llama_untied")
    assert result.exit_code == 0
    assert "not proved: 101.0 kB in model.safetensors" in result.output


def test_inspect_shows_how_tensors_are_sharded(zoo: Path) -> None:
    assert "21 dim 0 in 2" in run("inspect", zoo / "verl_fsdp2_w2").output


def test_inspect_of_an_unknown_tensor_says_how_to_list_names(zoo: Path) -> None:
    result = run("inspect", zoo / DCP, "--tensors", "nothing*")
    assert result.exit_code == 2
    assert "--tensors '*'" in result.stderr


def test_ls_quiet_prints_only_names(run_root: Path) -> None:
    assert run("ls", "-q", run_root).output == "step_00000004\n"


def test_ls_imports_no_framework_and_no_numpy(run_root: Path) -> None:
    assert not modules_after(run_cli("ls", str(run_root))).intersection({*HEAVY, "numpy", "fsspec"})


# --- progress, colours, interrupts


def _with_bar(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, quiet: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(frame, "PROGRESS_DELAY_S", 0.0)
    with click.Context(click.Command("x")) as context:
        context.meta["ckptkit.quiet"] = quiet
        with frame.progress_bar("convert") as update:
            if update is not None:
                update(1_000_000, 4_000_000, "model-00001.safetensors")
                time.sleep(0.15)  # tqdm draws ten times a second at most
                update(4_000_000, 4_000_000, "model-00001.safetensors")
                update(1_000_000, 4_000_000, "verify: model-00001.safetensors")
    return stream.getvalue()


def test_a_terminal_sees_bytes_rate_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _with_bar(monkeypatch, Terminal())
    assert "4.00M" in drawn
    assert "B/s" in drawn
    assert "model-00001.safetensors" in drawn
    assert drawn.index("convert: ") < drawn.index("verify: ")


def test_a_pipe_sees_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _with_bar(monkeypatch, io.StringIO()) == ""


def test_progress_names_the_current_file(zoo: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    convert(str(zoo / DCP), str(tmp_path / "out"), verify=True, progress=lambda *call: seen.append(call))
    named = {Path(name).suffix for _, _, name in seen}
    assert named >= {".distcp", ".safetensors"}  # files that are copied, and files that are read again
    assert seen[-1][0] == seen[-1][1]


def test_quiet_silences_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _with_bar(monkeypatch, Terminal(), quiet=True) == ""


def test_work_of_less_than_a_second_draws_no_bar() -> None:
    assert frame.PROGRESS_DELAY_S == 1.0


@pytest.mark.parametrize(("stream", "no_color", "coloured"), [(Terminal(), "", True), (Terminal(), "1", False),
                                                             (io.StringIO(), "", False)])  # fmt: skip
def test_colours_are_for_terminals_without_no_color(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, no_color: str, coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    assert frame._colour(stream) is coloured


def test_three_ctrl_c_exit_with_130_and_print_a_working_command_to_continue(zoo: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, ckptkit.offline.conversion as c\n"
        "from ckptkit.cli.main import main\n"
        "real = c.execute\n"
        "def execute(plan, source, destination, **kw):\n"
        "    def progress(*a): [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)]\n"
        "    return real(plan, source, destination, **{**kw, 'progress': progress})\n"
        "c.execute = execute\n"
        f"main(['convert', {str(zoo / DCP)!r}, {str(tmp_path / 'out')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "Interrupted." in done.stderr
    assert "same command again" in done.stderr
    assert all(path.name.startswith(".tmp-out-") for path in tmp_path.iterdir())  # finished steps, if any
    subprocess.run([sys.executable, "-m", "ckptkit", "convert", str(zoo / DCP), str(tmp_path / "out")], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- the library logger


def test_the_library_prints_nothing_and_log_records_have_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    seen: list[Any] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.rank)  # type: ignore[attr-defined]

    handler = Keep()
    logging.getLogger().addHandler(handler)
    logging.getLogger("ckptkit").setLevel(logging.WARNING)  # a command of another test may have used --quiet
    try:
        logging.getLogger("ckptkit.checkpoint.anything").warning("hello")
    finally:
        logging.getLogger().removeHandler(handler)
    assert len(seen) == 1
    assert isinstance(seen[0], int)
    assert any(isinstance(h, logging.NullHandler) for h in logging.getLogger("ckptkit").handlers)
