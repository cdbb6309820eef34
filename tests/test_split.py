"""The table of daily and nightly tests is consistent, and rules that only the night checks are listed."""

import re
from collections import namedtuple
from pathlib import Path

from tests.split import LONG, NIGHT, at_night, sweeps

ROOT = Path(__file__).parents[1]


Item = namedtuple("Item", "nodeid")


def test_each_path_of_the_table_exists():
    assert [place for place in NIGHT if not _exists(place)] == []
    assert not _exists("tests/nothing.py") and not _exists("tests/split.py::at_nigh")


def _exists(place: str) -> bool:
    file, *names = place.split("::")
    if not names:
        return (ROOT / file).exists()
    text = (ROOT / file).read_text(encoding="utf-8")
    return all(re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE) for name in names)


def test_each_long_file_exists():
    assert [file for file in LONG if not (ROOT / file).exists()] == []


def _listed(heading: str) -> list[str]:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(tests/[^`]+)`", section, re.MULTILINE)


def test_rules_checked_only_at_night_are_listed():
    assert _listed("Rules checked only at night") == [place for place, every in NIGHT.items() if every == 0]


def test_slow_tests_that_are_listed_exist_and_run_by_day():
    places = _listed("Daily tests that take more than 2 s")
    assert places and [place for place in places if not _exists(place) or NIGHT.get(place) == 0] == []


def test_every_nth_case_of_each_test_runs_by_day(monkeypatch):
    monkeypatch.setattr("tests.split.NIGHT", {"a": 2, "a/x.py": 3, "a/x.py::T": 0})
    items = [Item(f"a/x.py::f[{n}]") for n in range(4)] + [Item("a/y.py::g[0]"), Item("a/y.py::g[1]")]
    items += [Item("a/x.py::T::m"), Item("a/y.py::one"), Item("b/a/x.py::h[0]"), Item("b/a/x.py::h[1]")]
    others = ["a/x.py::f[1]", "a/x.py::f[2]", "a/y.py::g[1]"]
    assert [item.nodeid for item in at_night(items)] == [*others, "a/x.py::T::m"]
    items.append(Item("a/x.py::T::m[1]"))
    assert [item.nodeid for item in sweeps(items)] == [*others, "a/x.py::T::m[1]"]
