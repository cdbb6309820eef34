"""Details of the commands: help, names, hints, progress, interrupts, colours, logging, narrow terminals."""

import dataclasses
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import RetentionPolicy, convert, log
from ckptkit.cli import frame, ls, outcome, prune
from ckptkit.cli import main as commands
from ckptkit.cli.retention import take_policy
from ckptkit.storage.local import LocalStore
from ckptkit.storage.publish import open_staging
from ckptkit.storage.staging import new_nonce
from tests.cli.commands import document, ran, run
from tests.formats.damages import lay
from tests.patches import failing

DCP = "dcp_fsdp2_uneven_w4/ckpt"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SAID: dict[str, tuple[int, str, str]] = {  # the rule: exit code, command line, words of the output
    "full names of dtypes are accepted": (0, "convert {dcp} {out} --dtype bfloat16 --dry-run", "nothing was written"),
    "verify names the files that it could not prove":
        (0, "verify {zoo}/hf_ref_llama_untied", "not proved: 101.0 kB in model.safetensors"),
    "inspect shows how tensors are sharded": (0, "inspect {zoo}/verl_fsdp2_w2", "sharding: dim 0 in 2 (21)"),
    "verify names the damaged tensor": (1, "verify {zoo}/broken_bitflip_shard/ckpt", "embed_tokens"),
    "a quick verify reads no tensor": (0, "verify --quick {zoo}/broken_bitflip_shard/ckpt", "not read"),
    "diff by recorded digests does not claim to have read the tensors":
        (0, "diff {root}/300 {root}/300", "by recorded digest only; `verify` reads the bytes"),
    "new rows may be zeros":
        (0, "convert {zoo}/hf_ref_llama_untied {out} --vocab-size 160 --new-rows zeros --dry-run", "rows are zeros"),
    "pin of a run pins its newest checkpoint": (0, "pin {root} --why x", "step_00000300"),
}  # fmt: skip


@pytest.mark.parametrize("rule", SAID)
def test_a_command_prints_what_the_rule_says(zoo, root, tmp_path, rule):
    code, line, words = SAID[rule]
    assert words in ran(*line.format(zoo=zoo, dcp=zoo / DCP, root=root, out=tmp_path / "out").split(), code=code)


@pytest.mark.parametrize("name", ["latest", "300", "step_00000300"])
@pytest.mark.parametrize("verb", ["inspect", "verify", "convert", "reshard", "diff", "pin"])
def test_every_command_accepts_names_of_checkpoints(root, tmp_path, verb, name):
    more = {"convert": f"{tmp_path}/o --dry-run", "reshard": f"{tmp_path}/o --world-size 2 --dry-run"}
    more |= {"diff": f"{root}/latest", "pin": "--why test"}
    ran(verb, root / name, *more.get(verb, "").split())


def test_a_symlink_called_latest_or_a_number_as_a_name_of_another_system_is_followed(zoo, tmp_path):
    shutil.copytree(zoo / DCP, tmp_path / "300")
    os.symlink("300", tmp_path / "latest")
    for name in ("latest", "300"):
        assert document("inspect", tmp_path / name)["url"].endswith("/300")
    (tmp_path / "latest").unlink()
    os.symlink("gone", tmp_path / "latest")
    assert "there is no 'latest'" in run("inspect", tmp_path / "latest").output


def test_an_export_with_a_config_prints_the_serve_command(zoo, tmp_path):
    last = ran("convert", zoo / "verl_fsdp2_w2", tmp_path / "out put", "--verify").strip().splitlines()
    assert last[-1] == f"serve it with: vllm serve '{tmp_path}/out put'"
    assert "equal to the source" in last[-2]


def test_a_dry_run_that_would_fail_lists_five_faults_of_a_kind_unless_verbose(zoo, tmp_path):
    words = ("convert", zoo / DCP, tmp_path / "out", "--base", zoo / "hf_ref_llama_untied", "--dry-run")
    short, long = ran(*words, code=1), ran(*words, "--verbose", code=1)
    assert "would fail: missing: lm_head.weight" in short and "nothing was written" in short
    for kind, many in (("  from __", 18), ("would fail: missing: ", 21), ("would fail: unexpected: ", 18)):
        assert (short.count(kind), long.count(kind)) == (5, many)
        assert f"\n... and {many - 5} more of {many}; --verbose lists them\n" in short
    assert "--verbose" not in long


def test_an_adapter_config_from_a_file_is_written_into_the_export(zoo, tmp_path):
    lora = {f"base_model.model.q.lora_{x}.weight": np.ones(s, np.float32) for x, s in (("A", (2, 8)), ("B", (8, 2)))}
    save_file(lora, tmp_path / "weights.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "base_model_name_or_path": "x/y"}
    (tmp_path / "adapter.json").write_text(json.dumps(config))
    ran("convert", tmp_path / "weights.safetensors", tmp_path / "out", "--adapter-config", tmp_path / "adapter.json")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 4


def test_inspect_prints_equal_layers_on_one_line(tmp_path):
    weight = np.zeros((2, 2), np.float32)
    layers = {f"model.layers.{i}.w": weight[: 1 + (i != 11)] for i in (*range(12), 20, 21)}
    save_file({**layers, **{f"model.z{i}.w": weight for i in range(30)}}, tmp_path / "model.safetensors")
    lines = [line.split("  ")[0] for line in map(str.strip, ran("inspect", tmp_path, "--depth", "3").splitlines())]
    at = lines.index("layers")
    assert lines[at + 1 : at + 4] == ["0-10 (11 modules, each)", "11", "20-21 (2 modules, each)"]
    assert lines[-1] == "... 11 more; --json lists all"


@pytest.mark.parametrize("name", ["²", "9" * 5000])
def test_inspect_prints_modules_whose_digits_are_no_number(tmp_path, name):
    weight = np.zeros(2, np.float32)
    save_file({f"model.{part}.w": weight for part in (name, "0")}, tmp_path / "model.safetensors")
    modules = ran("inspect", tmp_path).partition("  modules\n")[2]
    assert [line.split()[0] for line in modules.splitlines()] == ["model", name, "0"]


def test_a_narrow_terminal_prints_reasons_on_separate_lines():
    table = [["name", "rotation"], ["step_00000100", "keep: the newest; a multiple of 400 (keep_every)"]]
    assert len(ls._aligned(table, 0)) == len(ls._aligned(table, 100)) == 2
    narrow = ls._aligned(table, 40)
    assert narrow[0] == "name" and max(map(len, narrow)) <= 40
    assert " ".join(line.strip() for line in narrow[2:]) == table[1][1]


@pytest.mark.parametrize(
    ("stream", "quiet", "delay_s"), [(io.StringIO, False, 0.0), (Terminal, True, 0.0), (Terminal, False, 1.0)]
)
def test_a_pipe_a_quiet_command_and_less_than_a_second_of_work_show_no_progress(monkeypatch, stream, quiet, delay_s):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(frame, "PROGRESS_DELAY_S", delay_s)
    with click.Context(click.Command("x")) as context:
        context.meta["ckptkit.quiet"] = quiet
        with frame.progress_bar("convert") as update:
            if update is not None:
                update(1_000_000, 4_000_000, "model-00001.safetensors")
    assert sys.stderr.getvalue() == ""


def test_colours_are_for_terminals_without_no_color(monkeypatch):
    for stream, no_color, coloured in ((Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert frame._colour(stream) is coloured


def test_progress_names_the_current_file(zoo, tmp_path):
    seen: list[tuple[int, int, str]] = []
    convert(str(zoo / DCP), str(tmp_path / "out"), verify=True, progress=lambda *call: seen.append(call))
    named = {Path(name).suffix for _, _, name in seen}
    assert named >= {".distcp", ".safetensors"}  # files that are copied, and files that are read again
    assert seen[-1][0] == seen[-1][1]


def test_the_message_of_an_interrupted_conversion_names_what_is_left(tmp_path):
    dst, words = str(tmp_path / "out"), outcome.interrupted_words
    assert "start over" in words(dst, overwrite=False)
    staging = open_staging(LocalStore(tmp_path), "out", new_nonce())
    staging.write("part.safetensors", b"x" * 5000)
    for said in (f"is kept in {staging.url}", "same command again"):
        assert said in words(dst, overwrite=False)
    lay(tmp_path, {"out/config.json": "{}"})
    assert "is unchanged" in words(dst, overwrite=True)
    assert "is unchanged, or its complete replacement is in" in words("s3://bucket/out", overwrite=True)


def test_ctrl_c_before_a_command_began_ends_with_130(monkeypatch):
    monkeypatch.setattr(commands.importlib, "import_module", failing(KeyboardInterrupt()))
    assert ran("ls", "x", code=130) == "Interrupted.\n"


def test_log_records_have_a_rank(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "3")
    logging.getLogger("ckptkit").setLevel(logging.WARNING)  # a command of another test may have used --quiet
    logging.getLogger("ckptkit.checkpoint.anything").warning("hello")
    (record,) = caplog.records
    assert isinstance(record.rank, int)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("configured", "printed"), [("pass", "ckptkit: disk at %90%\n"), ("logging.basicConfig()", "")]
)
def test_warnings_are_printed_only_if_the_program_has_not_configured_logging(configured, printed):
    code = f"import logging, ckptkit; {configured}; log = logging.getLogger('ckptkit.x')"
    code += "; log.warning('disk at %s', '%90%'); log.info('quiet')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr == (printed or "WARNING:ckptkit.x:disk at %90%\n")


def test_a_warning_raises_no_error_if_stderr_is_closed(monkeypatch):
    monkeypatch.setattr(log, "_is_handled", lambda name: False)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    logging.getLogger("ckptkit.x").warning("disk at 90%")


@pytest.mark.parametrize("command", [ls.command, prune.command])
def test_each_retention_rule_has_an_option(command):
    assert {field.name for field in dataclasses.fields(RetentionPolicy)} <= {param.name for param in command.params}


def test_the_options_make_a_policy():
    given = ["--max-num=3", "--max-mem=1GB", "--keep-every=10", "--keep-daily=7", "--keep-best=loss:min:2"]
    made = prune.command.make_context("prune", ["RUN", *given]).params
    assert take_policy(made) == RetentionPolicy(3, "1GB", 10, ("loss", "min", 2), 7)
    none = prune.command.make_context("prune", ["RUN"]).params
    assert take_policy(none) is None
    assert not {field.name for field in dataclasses.fields(RetentionPolicy)} & {*made, *none}
