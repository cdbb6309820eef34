"""--allow-pickle: used only on request, with a warning, and it runs no code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from ckptkit.cli.main import cli
from tests.hostile.sources import Evil, weights


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    torch.save({"state_dict": weights(), "x": Evil(tmp_path / "PWNED")}, tmp_path / "src" / "model.pt")
    return tmp_path / "src"


def run(source: Path, name: str, *flags: str) -> Result:
    rest = {"convert": [str(source.parent / "dst")], "reshard": [str(source.parent / "dst"), "--world-size", "2"]}
    result = CliRunner().invoke(cli, [name, str(source), *rest.get(name, []), *flags])
    assert not (source.parent / "PWNED").exists()
    assert "bug in ckptkit" not in result.output
    return result


@pytest.mark.parametrize("name", ["inspect", "verify", "convert", "reshard"])
def test_a_file_with_an_unknown_class_is_read_only_with_allow_pickle(name: str, source: Path) -> None:
    refused = run(source, name)
    assert refused.exit_code == 1 and "posix.mkdir" in refused.output
    taken = run(source, name, "--allow-pickle")
    assert taken.exit_code == 0, taken.output
    assert "may be incomplete" in " ".join(taken.stderr.split())


def test_the_weights_next_to_an_unknown_class_are_unchanged(source: Path) -> None:
    run(source, "convert", "--allow-pickle")
    found = load_file(source.parent / "dst" / "model.safetensors")
    assert sorted(found) == sorted(weights())
    assert all(torch.equal(found[name], value) for name, value in weights().items())
