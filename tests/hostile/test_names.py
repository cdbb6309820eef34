"""Hostile names from users and files: tags, steps, pointers, destinations, globs."""

from pathlib import Path

import pytest

from ckptkit.storage.store import is_safe_name
from tests.cli import commands
from tests.formats.damages import lay
from tests.hostile.sources import safetensors

NAMES = [
    "", "latest", "00012", "12", "١٢", "../step_00000001", " step_00000001", "step_00000001\n", "step_00000001@0123",
    "st\u0435p_00000001", "step_\u0660\u0661\u0662\u0663\u0664\u0665\u0666\u0667",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["nul", "CON.txt", "a:b", "a.", "x" * 256, "é" * 128, "a/b", "a\x7f", "COM¹", "conin$"]
)
def test_a_name_that_some_file_system_forbids_is_not_safe(name):
    assert not is_safe_name(name)
    assert all(map(is_safe_name, ("model-00001-of-00002.safetensors", "__0_0.distcp", ".metadata", "null", "模型.bin")))


def convert(folder: Path, *arguments: str) -> int:
    lay(folder, {"src/model.safetensors": safetensors({"a" * 100: [1]})})
    result = commands.run("convert", folder / "src", *arguments)
    assert "bug in ckptkit" not in result.output
    return result.exit_code


@pytest.mark.parametrize(
    "glob", ["[", "[!", "*" * 200, "../*", "\0", "(a+)+$", "[a-", "*" + "a*" * 60 + "b"], ids=ascii
)
def test_any_text_is_safe_as_a_glob(glob, tmp_path):
    assert convert(tmp_path, str(tmp_path / "dst"), "--include", glob) in (0, 1, 2)


@pytest.mark.parametrize("name", ["a\0b", "..", ".", "", "x" * 300], ids=ascii)
def test_an_impossible_destination_is_refused_and_nothing_is_left(name, tmp_path):
    assert convert(tmp_path, f"{tmp_path}/{name}") in (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
