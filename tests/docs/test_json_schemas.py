"""docs/json.md matches the output of the commands in fields and types; errors.md matches the error tree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ckptkit.errors
from ckptkit.cli.main import cli
from ckptkit.errors import CkptkitError
from ckptkit.offline.reshard import reshard

DOCS = Path(__file__).parents[2] / "docs"
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def documented(command: str) -> dict[str, list[str]]:
    section = (DOCS / "json.md").read_text(encoding="utf-8").split(f"## ckptkit {command}\n")[1].split("\n## ")[0]
    return {m[1]: m[2].split(", ") for m in re.finditer(r"^\| `(\w+)` \| ([\w, ]+) \|", section, re.MULTILINE)}


@pytest.fixture(scope="module")
def run_root(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("json") / "RUN"
    reshard(str(zoo / "verl_fsdp2_w2"), str(root / "step_00000004"), world_size=2)
    return root


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ls", ["ls", "{run}"]),
        ("inspect", ["inspect", "{run}", "--tensors", "*"]),
        ("verify", ["verify", "{run}"]),
        ("diff", ["diff", "{run}", "{hf}"]),
        ("convert", ["convert", "{run}", "{out}/a"]),
        ("convert", ["reshard", "{run}", "{out}/b", "--world-size", "3"]),
        ("copy", ["copy", "{run}", "{out}/c"]),
        ("prune", ["prune", "{run}", "--max-num", "1", "--dry-run"]),
        ("pin", ["pin", "{run}/latest", "--why", "test"]),
    ],
)
def test_a_document_has_the_fields_that_are_documented(
    run_root: Path, zoo: Path, tmp_path: Path, name: str, arguments: list[str]
) -> None:
    places = {"run": str(run_root), "hf": str(zoo / "hf_ref_llama_untied"), "out": str(tmp_path)}
    result = CliRunner().invoke(cli, [*(a.format(**places) for a in arguments), "--json"])
    document: dict[str, Any] = json.loads(result.stdout)
    fields = documented(name)
    assert set(document) == set(fields)
    for field, kinds in fields.items():
        assert type(document[field]) in [t for kind in kinds for t in TYPES[kind]], field
    stated = re.search(rf"`{re.escape(document['schema'])}`", (DOCS / "json.md").read_text(encoding="utf-8"))
    assert stated, document["schema"]


@pytest.mark.parametrize(
    ("name", "field"),
    [("ls", "checkpoints"), ("inspect", "tensors"), ("prune", "checkpoints"), ("copy", "checkpoints")],
)
def test_rows_have_the_fields_that_are_documented(run_root: Path, tmp_path: Path, name: str, field: str) -> None:
    arguments = {
        "copy": [str(tmp_path / "out")],
        "inspect": ["--tensors", "*norm*"],
        "prune": ["--max-num", "1", "--dry-run"],
    }.get(name, [])
    row = json.loads(CliRunner().invoke(cli, [name, str(run_root), *arguments, "--json"]).stdout)[field][0]
    section = (DOCS / "json.md").read_text(encoding="utf-8").split(f"## ckptkit {name}\n")[1].split("\n## ")[0]
    text = re.search(rf"^\| `{field}` \|.*$", section, re.MULTILINE)
    assert text
    assert [key for key in row if f"`{key}`" not in text[0]] == []


def test_every_error_class_is_in_the_table_with_its_exit_code() -> None:
    table = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = {m[1]: (m[2], int(m[3])) for m in re.finditer(r"^\| `(\w+)` \| ([^|]+) \| (\d) \|", table, re.MULTILINE)}
    classes = {name: getattr(ckptkit.errors, name) for name in ckptkit.errors.__all__}
    assert set(rows) == {name for name, kind in classes.items() if kind is not CkptkitError}
    for name, (bases, code) in rows.items():
        assert classes[name].exit_code == code, name
        for base in re.findall(r"`(\w+)`", bases):
            assert base in [kind.__name__ for kind in classes[name].__mro__], (name, base)
