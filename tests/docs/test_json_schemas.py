"""docs/json.md matches the output of the commands in fields and types."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckptkit import reshard
from tests.cli.commands import run

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


SHARED = "Fields of several commands"


def section(heading: str) -> str:
    return PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]


def fields(heading: str) -> dict[str, tuple[list[str], str]]:
    """Return the fields that a section lists: name -> types and the item of the list. An item may list several."""
    found = {}
    for item in re.findall(r"^- .*(?:\n  .*)*", section(heading), re.MULTILINE):
        match = re.match(r"- ((?:`\w+`,? )+)\(([\w, ]+)\)", item)
        assert match, item
        names, types = re.findall(r"\w+", match[1]), match[2].split(", ")
        own = len(names) == len(types) > 1 and "null" not in types  # one type for each field
        found.update({name: ([types[i]] if own else types, item) for i, name in enumerate(names)})
    return found


@pytest.fixture(scope="module")
def run_root(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("json") / "RUN"
    reshard(str(zoo / "verl_fsdp2_w2"), str(root / "step_00000004"), world_size=2)
    return root


@pytest.mark.parametrize(("name", "line"), [
    ("ckptkit ls", "ls {run}"), ("ckptkit inspect", "inspect {run} --tensors *norm*"),
    ("ckptkit verify", "verify {run}"), ("ckptkit diff", "diff {run} {hf}"),
    ("ckptkit convert, reshard, merge", "convert {run} {out}"),
    ("ckptkit convert, reshard, merge", "reshard {run} {out} --world-size 3"),
    ("ckptkit copy", "copy {run} {out}"), ("ckptkit prune", "prune {run} --max-num 1 --dry-run"),
    ("ckptkit pin, unpin", "pin {run}/latest --why test"),
])  # fmt: skip
def test_a_document_has_the_fields_that_are_documented(run_root, zoo, tmp_path, name, line):
    places = {"run": run_root, "hf": zoo / "hf_ref_llama_untied", "out": tmp_path / "out"}
    found: dict[str, Any] = json.loads(run(*(word.format(**places) for word in line.split()), "--json").stdout)
    shared, own = fields(SHARED), fields(name)
    also = re.search(r"^Common fields: ([^.]*)", section(name), re.MULTILINE)
    assert also
    documented = {**{field: shared[field] for field in re.findall(r"\w+", also[1])}, **own}
    assert set(found) == set(documented)
    for field, (kinds, item) in documented.items():
        assert type(found[field]) in [t for kind in kinds for t in TYPES[kind]], field
        if field in ("checkpoints", "tensors") and isinstance(found[field], list):
            assert [key for key in found[field][0] if f"`{key}`" not in item] == []
    command = name.removeprefix("ckptkit ").partition(",")[0]
    assert found["schema"] == f"ckptkit.{command}/1"
