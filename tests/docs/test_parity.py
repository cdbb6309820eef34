"""docs/internals/parity.md has every row, and each names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "internals" / "parity.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([^|]+?) \|(.*)\|$", TEXT, re.MULTILINE))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", TEXT)))
NUMBERED = [
    *(f"L{i}" for i in range(1, 35)),
    *(f"O{i}" for i in range(1, 15)),
    *(f"N{i}" for i in range(1, 14)),
    *(f"A{i}" for i in (1, 2, 5, 7, 11)),
    *(f"LB{i}" for i in range(1, 23)),
    *(f"OB{i}" for i in range(6, 11)),
]


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_test_named_on_the_parity_page_exists() -> None:
    named = [name.partition("::") for name in TESTS]
    assert [path + "::" + name for path, _, name in named if name not in functions_in(path)] == []


def test_every_row_of_the_parity_page_exists_and_has_a_test() -> None:
    found = {row: cells for row, cells in ROWS.items() if row not in ("Row", "Bug", "---")}
    assert [row for row in NUMBERED if row not in found] == []
    assert [row for row, cells in found.items() if "`tests/" not in cells] == []
