"""The commands as in a shell: output, exit codes and JSON, and that they say what is so."""

import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import CheckpointManager, TrainState, inspect
from ckptkit.cli.frame import _message
from ckptkit.cli.main import _COMMANDS, cli, main
from ckptkit.formats.detect import open_source
from ckptkit.units import format_count
from tests.cli.commands import document, ran, run
from tests.offline.test_diff import tied
from tests.test_package import HEAVY, modules_after, run_cli

DCP = "dcp_fsdp2_uneven_w4/ckpt"


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_has_help(command):
    page = ran(command, "--help")
    assert "Usage: " in page
    tried = re.findall(rf"^ +ckptkit ({command} .*)$", page, re.MULTILINE)
    assert len(tried) == 2
    for line in tried:  # each command line parses
        found = cli.get_command(cli.make_context("ckptkit", ["ls", "-h"], resilient_parsing=True), command)
        assert found is not None
        found.make_context(command, shlex.split(line, comments=True)[1:])
    more = re.search(r"^ *More: \S*\bdocs/(\S+)", page, re.MULTILINE)
    assert more and (Path(__file__).parents[2] / "docs" / more[1]).is_file()


def test_a_program_that_calls_main_keeps_its_sigint_handler():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert signal.getsignal(signal.SIGINT) is before


def test_no_command_imports_torch(zoo, tmp_path):
    lines = [run_cli(command, str(zoo / DCP)) for command in ("inspect", "verify")]
    for line in ("convert --verify", "convert --dry-run", "convert --dtype bf16", "convert --to torch",
                 "convert --to dcp --world-size 3", "reshard --world-size 3"):  # fmt: skip
        lines.append(run_cli(*line.split(), str(zoo / DCP), str(tmp_path / str(len(lines)))))
    assert not modules_after("\n".join(lines)) & {*HEAVY, "fsspec", "safetensors", "huggingface_hub"}


def test_ls_imports_no_framework_and_no_numpy(root):
    assert not modules_after(run_cli("ls", str(root))).intersection({*HEAVY, "numpy", "fsspec"})


def test_a_proof_states_the_numbers_of_the_result(zoo, tmp_path):
    said = ran("convert", zoo / DCP, tmp_path / "out", "--include", "*.norm.weight", "--verify")
    assert said.strip().splitlines()[-1] == (
        "proved: 2 tensors, 20 elements, each covered once; 8 source digests checked; "
        "2 header entries match the plan; 2/2 tensors equal to the source"
    )
    said = ran("reshard", zoo / DCP, tmp_path / "two", "--world-size", "2")
    sections = inspect(str(tmp_path / "two")).sections
    tensors, elements = sum(s.tensors for s in sections), format_count(sum(s.numel for s in sections))
    assert f"proved: {tensors} tensors, {elements} elements, each covered once; " in said
    slices = [s for entry in open_source(str(tmp_path / "two")).catalog.tensors.values() for s in entry.slices]
    digests = len({(s.path, s.start) for s in slices if s.nbytes})
    said = ran("reshard", tmp_path / "two", tmp_path / "three", "--world-size", "3")
    assert f"; {digests} source digests checked; committed as step 0 of 3 ranks" in said


def test_diff_of_a_checkpoint_and_its_export_is_equal_and_quiet_prints_only_that(zoo, tmp_path):
    result = run("convert", zoo / DCP, tmp_path / "out", "--quiet")
    assert result.stderr == "" and [line.split(":")[0] for line in result.stdout.splitlines()] == ["proved"]
    assert ran("diff", zoo / DCP, tmp_path / "out").strip().splitlines()[-1].startswith("equal")
    assert len(ran("diff", zoo / DCP, tmp_path / "out", "--quiet").splitlines()) == 1


def test_verbose_diff_lists_what_was_not_compared(root, tmp_path):
    ran("convert", root, tmp_path / "out", "-q")
    assert "not compared: rng" not in ran("diff", root, tmp_path / "out")
    assert "not compared: rng" in ran("diff", root, tmp_path / "out", "-v")


def test_diff_shows_a_cast_by_layer_or_tensor_and_exits_with_1(zoo, tmp_path):
    both = zoo / DCP, tmp_path / "out"
    ran("convert", *both, "--dtype", "bf16")
    brief, every = (ran("diff", *both, *more, code=1) for more in ((), ("--verbose",)))
    assert len(brief.splitlines()) < len(every.splitlines())
    assert "differs, by layer" in brief and "--verbose lists them" in brief
    found = document("diff", *both, "--exclude", "*norm*", code=1)
    assert found["dtypes"] and 0 < max(row["max_rel"] for row in found["different"]) < 2**-7
    assert not any("norm" in row["name"] for row in found["different"])


def test_diff_accepts_the_names_that_inspect_shows(zoo, root, tmp_path):
    """Its error says: see the names with `ckptkit inspect`."""
    ran("convert", root, tmp_path / "out")
    assert "model.weight" in ran("inspect", root, "--tensors", "*")
    for one, other in ((root, tmp_path / "out"), (tmp_path / "out", root)):
        for chosen in (("--include", "model.w*"), ("--include", "weight"), ("--exclude", "model.bias*")):
            assert document("diff", one, other, *chosen, "--exclude", "optimizer*", "--exclude", "rng*")["same"] == 1
    assert "optimizer.state.gain.exp_avg " in ran("inspect", zoo / DCP, "--tensors", "*")
    assert document("diff", zoo / DCP, zoo / DCP, "--include", "optimizer.state.gain.*")["same"] == 3
    found = document("diff", zoo / DCP, zoo / DCP, "--exclude", "optimizer.*", "--exclude", "optimiser.*")
    assert found["same"] == 18
    assert found["notes"] == ["--exclude 'optimiser.*' matches no tensor or value"]


def saved(root: Path, kind: str) -> Path:
    """Save a model whose head is its embedding."""
    with CheckpointManager(root, state_dict_type=kind) as manager:
        for step in (1, 2):
            report = manager.save(step, TrainState(model=tied()))
    files = [path for path in Path(report.url).rglob("*") if path.is_file() and path.name != "checkpoint.json"]
    assert report.rank_bytes == report.total_bytes == sum(path.stat().st_size for path in files)
    return root


@pytest.mark.parametrize("kind", ["full", "local", "sharded"])
@pytest.mark.parametrize("line", [
    *(f"convert RUN out --to {to}" for to in ("dcp", "torch", "local", "hf")), "merge RUN out --last 2",
    "merge RUN/step_00000001 other out",
])  # fmt: skip
def test_a_result_has_each_tied_tensor_under_all_its_names_unless_excluded(kind, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "RUN", kind)
    saved(tmp_path / "other", "sharded")
    for out, excluded, kept in (("a", "nothing", ["embed", "head"]), ("b", "embed*", ["head"]), ("c", "h*", ["embed"])):
        ran(*(out if word == "out" else word for word in line.split()), "--exclude", excluded, "--verify")
        found = document("inspect", out, "--tensors", "*")["tensors"]
        assert sorted(tensor["fqn"] for tensor in found) == [f"{name}.weight" for name in kept]


@pytest.mark.parametrize(
    ("options", "kept"), [((), ["step_00000100", "step_00000300"]), (("--forget-recorded",), ["step_00000300"])]
)
def test_prune_limits_keep_the_exemptions_of_the_run_unless_told_to_forget_them(root, options, kept):
    ran("prune", root, "--max-num", "1", *options)
    assert ran("ls", "-q", root).split() == kept


def test_unpinning_a_run_unpins_its_newest_checkpoint(root):
    ran("pin", root / "300", "--why", "first")
    assert "step_00000300" in ran("unpin", root)


def test_the_current_directory_can_be_a_checkpoint(root, monkeypatch):
    monkeypatch.chdir(root / "step_00000200")
    assert f"to list its run: ckptkit ls {root}\n" in ran("ls", ".", code=1)
    assert ran("pin", ".", "--why", "x") == "pinned step_00000200: x\n"
    assert ran("unpin", ".") == "unpinned step_00000200\n"


def test_quiet_ls_of_a_run_without_checkpoints_prints_nothing(root):
    for record in root.glob("*/checkpoint.json"):
        record.unlink()
    assert ran("ls", "-q", root) == ""


def shell(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ckptkit", *words], capture_output=True, text=True, check=False)


def test_debug_shows_the_traceback(tmp_path):
    done = shell("inspect", tmp_path / "nothing", "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.parametrize("error", [OSError(None), OSError(5, None), OSError(5, "")])
def test_a_system_error_without_a_message_gets_one(error):
    assert _message(error) == "Error: OSError without a message."


def test_a_library_warning_reads_like_a_warning(root):
    done = shell("ls", root, "--max-mem", "1kB")
    assert done.returncode == 0 and done.stderr.startswith("Warning: ") and "ckptkit.checkpoint" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of glibc's malloc")
def test_a_merge_does_not_get_its_buffers_from_the_kernel_again_for_each_piece(tmp_path):
    for name in ("a", "b"):
        save_file({"w": np.ones((64, 1 << 18), np.float16)}, tmp_path / f"{name}.safetensors")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    done = shell("merge", tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "out", "-q")
    pages = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before) * resource.getpagesize()
    assert done.returncode == 0 and pages < 64 << 20
