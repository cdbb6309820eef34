"""A few fixed inputs of each fuzzer of our own files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.fuzz.own_formats import OWN
from tests.fuzz.running import run_input
from tests.split import PARTS

INPUTS = {"commit_records": 120, "manifests": 120, "run_directories": 25, "local_files": 60}
PAST = [
    ("commit_records", 80),
    ("commit_records", 110),  # a name of thousands of characters; a number beyond a float's range
    ("manifests", 96),
    ("manifests", 737),  # a long dtype; a path that is a number
    ("run_directories", 85),
    ("run_directories", 126),  # pins and leases nested deeper than the parser allows
    ("local_files", 74),
    ("local_files", 1793),  # 10^12 ranks
    ("committed_checkpoints", 1000907),  # a lone surrogate in the name of a file
]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", INPUTS)
def test_damaged_ckptkit_files_are_refused_or_harmless(target: str, part: int, tmp_path: Path) -> None:
    for seed in range(part, INPUTS[target], PARTS):
        run_input(OWN[target], random.Random(f"{target} {seed}"), tmp_path / "x")


@pytest.mark.parametrize(("target", "seed"), PAST)
def test_past_findings_stay_fixed(target: str, seed: int, tmp_path: Path) -> None:
    run_input(OWN[target], random.Random(f"{target} {seed}"), tmp_path / "x")
