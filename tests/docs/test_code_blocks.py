"""Every code block of README.md and docs/ runs, and prints what the page shows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from ckptkit.cli.main import cli
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.keymaps.file import parse_key_map
from tests.checkpoint.states import save, trained
from tests.docs.pages import PAGES, ROOT, blocks, text_of
from tests.docs.place import make_place, run_python
from tests.ranks import run_ranks

KINDS = {"console", "python", "toml", "text", ""}  # the last two are output or diagrams
ELSEWHERE = ("make ", "python3 -m venv", "torchrun ", "git clone")  # `.ci/run` runs these


def cases(kind: str) -> list[object]:
    return [pytest.param(block, id=place) for place, block in blocks(kind)]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("docs")
    make_place(place)
    return place


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Path:
    """A fresh copy for each block: pages do not depend on each other."""
    return Path(shutil.copytree(template, tmp_path / "place", symlinks=True))


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Return the command lines of a console block, each with the output that the page shows."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"a console block starts with a prompt: {line}"
            found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """Return the line without details that differ between runs: numbers, units of time and size, column widths."""
    line = re.sub(r"\b(d|h|min|ms|s|B|kB|MB|GB)\b", "", re.sub(r"\d[\d.]*(e-\d+)?", "0", line))
    return re.sub(r"[\s0-]+", " ", line).strip()


@pytest.mark.parametrize("block", cases("console"))
def test_commands_run_and_print_what_the_page_shows(block, place, monkeypatch):
    monkeypatch.chdir(place)
    for line, shown in commands(block):
        words = shlex.split(line, comments=True)
        if "://" in line and words[0] == "ckptkit":  # there is no such bucket, but the options must be valid
            command = cli.get_command(cli.make_context("ckptkit", ["ls", "-h"], resilient_parsing=True), words[1])
            assert command is not None
            command.make_context(words[1], words[2:])
            continue
        if line.startswith(ELSEWHERE) or "://" in line:
            _check_elsewhere(line)
            continue
        code, output = _run(line, words, place)
        expected = int(match[1]) if (match := re.search(r"# exit (\d)", line)) else 0
        assert code == expected, f"$ {line}\n{output}"
        printed = [shape(text) for text in output.replace(f"{place}/", "").splitlines()]
        for text in shown:
            assert text == "..." or shape(text) in printed, f"$ {line}\npage: {text}\n{output}"


def _run(line: str, words: list[str], place: Path) -> tuple[int, str]:
    """Run a line: a plain ckptkit command in this process, which is faster, anything else in bash."""
    if words[0] == "ckptkit" and not re.search(r"[$>|;&]", line):
        result = CliRunner().invoke(cli, words[1:], env={"NO_COLOR": "1"})
        return result.exit_code, result.output
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=place, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _check_elsewhere(line: str) -> None:
    """Check a line that would install packages or start other programs against the files that it names."""
    if line.startswith("make "):
        assert re.search(rf"^{shlex.split(line, comments=True)[1]}:", text_of("Makefile"), re.MULTILINE)
    for extras in re.findall(r"'\.\[([\w,]+)\]'", line):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", text_of("pyproject.toml"), re.MULTILINE), extra


@pytest.mark.parametrize("block", cases("python"))
def test_python_blocks_run(block, place):
    run_ranks(run_python, 2 if "cp=2" in block else 1, block, str(place))


def test_plain_torch_loads_fp32_masters(tmp_path):
    """As "Without ckptkit" of docs/how-to-resume.md says."""
    model = torch.nn.Linear(8, 8).bfloat16()
    save(tmp_path, trained(model, lambda params: MasterWeightOptimizer(torch.optim.AdamW(params))))
    masters = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    dcp.load({"optimizer": {"master": masters}}, checkpoint_id=tmp_path / "step_00000001", no_dist=True)
    for name, p in model.named_parameters():
        assert masters[name].any() and torch.equal(masters[name].bfloat16(), p)


@pytest.mark.parametrize("block", cases("toml"))
def test_key_maps_parse(block):
    if sys.version_info >= (3, 11):
        assert parse_key_map(block, file="docs.toml").rules


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is_and_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
    assert len(fences) % 2 == 0 and set(fences[::2]) <= KINDS
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target
