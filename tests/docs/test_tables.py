"""The tables of the documents match the code: errors, tests, examples."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import ckptkit
from ckptkit import errors
from tests.docs.pages import ROOT, text_of
from tests.sources import sources

PARITY, FRAMEWORKS = "docs/internals/parity.md", "docs/internals/parity-frameworks.md"


def numbered(**last: int) -> list[str]:
    return [f"{letters}{i}" for letters, count in last.items() for i in range(1, count + 1)]


HEADINGS = ("Promise", "Row", "Bug")
ROWS = numbered(N=17, NB=12, P=20, PB=15)
PARITY_ROWS = {*numbered(L=34, O=14, A=2, LB=22), *numbered(OB=10)[5:]}


def rows(page: str) -> list[list[str]]:
    """Return the cells of every table row of a page, without headings and rules."""
    lines = [line for line in text_of(page).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set(row[0]) <= set("-: ")]


def named_tests(cell: str) -> list[tuple[Path, str]]:
    """Return the tests that a cell names in backticks: files, directories, `file::test`. A bare file name is in the
    directory of the previous one."""
    found: list[tuple[Path, str]] = []
    folder = ROOT
    for words in re.findall(r"`([\w./:\[\]*-]+)`", cell):
        place, _, name = words.partition("::")
        if place.startswith(("tests/", "benchmarks/")):
            path = ROOT / place
        elif place.startswith("test_") and place.endswith(".py"):
            path = folder / place
        else:
            continue
        folder = path if path.is_dir() else path.parent
        found.append((path, name))
    return found


def check_tests(cells: list[list[str]], column: int) -> None:
    wrong = []
    for row in cells:
        named = named_tests(row[column])
        if not named and "make demo" not in row[column]:
            wrong.append(f"{row[0]}: names no test")
        for path, name in named:
            if not path.exists():
                wrong.append(f"{row[0]}: no {path.relative_to(ROOT)}")
            elif name and not re.search(rf"^ *def {re.escape(name)}\(", path.read_text(encoding="utf-8"), re.MULTILINE):
                wrong.append(f"{row[0]}: no {name} in {path.relative_to(ROOT)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("page", "column", "expected"), [
    ("docs/internals/promises-tests.md", 1, set()), ("docs/internals/faults.md", -1, set()),
    (FRAMEWORKS, 2, set(ROWS)), (PARITY, -1, PARITY_ROWS),
])  # fmt: skip
def test_each_row_names_tests_that_exist(page, column, expected):
    table = [row for row in rows(page) if row[0] and row[0] not in HEADINGS]
    assert expected <= {row[0] for row in table}
    check_tests(table, column)


def test_each_name_in_the_frameworks_table_is_public():
    for row in rows(FRAMEWORKS):
        for words in re.findall(r"`(ckptkit\.[\w.]+)`", row[1]) if row[0] in ROWS else ():
            module, _, name = words.rpartition(".")
            assert name in importlib.import_module(module).__all__, words


def test_where_to_change_what_names_files_that_exist():
    text = text_of("docs/internals/where-to-change-what.md")
    named = re.findall(r"`((?:ckptkit|tests|docs|examples)/[\w./-]+|examples|pyproject\.toml)`", text)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_table_of_errors_matches_the_package():
    """An indented class derives from the class above it; parentheses name the built-in base."""
    page = text_of("docs/errors.md")
    public = {name: getattr(errors, name) for name in errors.__all__ if name != "CkptkitError"}
    classes = {name: item for name, item in public.items() if isinstance(item, type)}
    listed, above = [], ""
    for indent, name, builtin in re.findall(r"^( *)(\w+Error)(?: \((\w+)\))?  +\S", page, re.MULTILINE):
        above = above if indent else name
        bases = {base.__name__ for base in classes[name].__mro__}
        assert {above, builtin} - {""} <= bases, name
        listed.append(name)
        assert classes[name].exit_code == (2 if name == "UsageError" else 1), name
    assert sorted(listed) == sorted(classes)
    assert "exit code of a command is 2 for `UsageError`, and 1 for every other error" in " ".join(page.split())


def test_no_error_is_defined_elsewhere():
    """Import every module: an exception class outside of errors.py must be a subclass of a documented class."""
    for info in pkgutil.walk_packages(ckptkit.__path__, "ckptkit."):
        if not info.name.startswith(("ckptkit.integrations", "ckptkit.__main__")):
            importlib.import_module(info.name)
    every = [errors.CkptkitError]
    for cls in every:
        every += cls.__subclasses__()
    ours = [cls for cls in every if cls.__module__.startswith("ckptkit") and cls.__module__ != "ckptkit.errors"]
    text = text_of("docs/errors.md")
    public = [cls.__name__ for cls in ours if not cls.__name__.startswith("_")]  # the others do not leave their module
    assert public and not [name for name in public if name not in text]


def _texts(tree: ast.AST) -> list[str]:
    """Return the strings of a module; an f-string is one string, with a NUL for each field."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_the_messages_of_the_troubleshooting_page_exist_in_the_package():
    said = [text for tree in sources().values() for text in _texts(tree)]
    messages = re.findall(r"^- `([^`]+)`:", text_of("docs/troubleshooting.md"), re.MULTILINE)
    wanted = {part.strip(" :") for message in messages for part in re.split(r"\[?\.\.\.\)?| N\b", message)}
    wanted = {part for part in wanted if len(part.split()) > 1}
    assert len(wanted) > 30
    assert not {part for part in wanted if not any(part in text for text in said)}


def test_each_measured_figure_of_the_readme_is_in_a_benchmarks_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*/README.md"))
    text = text_of("README.md")
    table = text[text.index("## Measured") : text.index("## What it promises")]
    cells = [line.split("|")[2:5] for line in table.splitlines() if line.startswith("| ")][1:]
    figures = {number for row in cells for cell in row for number in re.findall(r"\d+\.\d+", cell)}
    assert len(figures) > 10
    assert not {number for number in figures if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", pages)}


@pytest.mark.parametrize("words", ["@ git+URL", "`make test` takes", "another project", "`python -m benchmarks`"])
def test_the_readme_says_how_to_install_test_and_measure(words):
    assert words in text_of("README.md")


def test_the_table_of_examples_names_only_existing_scripts():
    named = re.findall(r"\]\((\w+\.py)\)", text_of("examples/README.md"))
    assert sorted(named) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
