"""docs/json.md matches the output of the commands in fields and types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckptkit.offline.reshard import reshard
from tests.cli.commands import run

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def section(command: str) -> str:
    return PAGE.split(f"## ckptkit {command}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def run_root(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("json") / "RUN"
    reshard(str(zoo / "verl_fsdp2_w2"), str(root / "step_00000004"), world_size=2)
    return root


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ls", "ls {run}"),
        ("inspect", "inspect {run} --tensors *norm*"),
        ("verify", "verify {run}"),
        ("diff", "diff {run} {hf}"),
        ("convert", "convert {run} {out}"),
        ("convert", "reshard {run} {out} --world-size 3"),
        ("copy", "copy {run} {out}"),
        ("prune", "prune {run} --max-num 1 --dry-run"),
        ("pin", "pin {run}/latest --why test"),
    ],
)
def test_a_document_has_the_fields_that_are_documented(
    run_root: Path, zoo: Path, tmp_path: Path, name: str, line: str
) -> None:
    places = {"run": run_root, "hf": zoo / "hf_ref_llama_untied", "out": tmp_path / "out"}
    found: dict[str, Any] = json.loads(run(*(word.format(**places) for word in line.split()), "--json").stdout)
    rows = re.findall(r"^(\| `(\w+)` \| ([\w, ]+) \|.*)$", section(name), re.MULTILINE)
    assert set(found) == {field for _, field, _ in rows}
    for row, field, kinds in rows:
        assert type(found[field]) in [t for kind in kinds.split(", ") for t in TYPES[kind]], field
        if field in ("checkpoints", "tensors") and isinstance(found[field], list):
            assert [key for key in found[field][0] if f"`{key}`" not in row] == []
    assert f"`{found['schema']}`" in PAGE
