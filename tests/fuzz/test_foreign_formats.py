"""A few fixed inputs of each fuzzer of other systems' files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.fuzz.foreign_formats import FOREIGN
from tests.fuzz.running import run_input
from tests.split import PARTS

INPUTS = {
    "safetensors_files": 60, "indexes": 40, "configs": 40, "rank_files": 6, "deepspeed": 6, "tar_files": 50,
    "key_maps": 200, "layouts": 60,
}  # fmt: skip
PAST = [
    ("configs", 1700),
    ("configs", 2026),  # lone surrogates in a config
    ("rank_files", 3176),  # parameter groups that are a boolean
    ("rank_files", 6520),  # a step too large for a float
    ("layouts", 1003663),  # a string among the sizes, multiplied by another size
]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", INPUTS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_foreign_files_are_refused_or_harmless(target: str, part: int, tmp_path: Path) -> None:
    for seed in range(part, INPUTS[target], PARTS):
        run_input(FOREIGN[target], random.Random(f"{target} {seed}"), tmp_path / "x")


@pytest.mark.parametrize(("target", "seed"), PAST)
@pytest.mark.filterwarnings("ignore")
def test_past_findings_stay_fixed(target: str, seed: int, tmp_path: Path) -> None:
    run_input(FOREIGN[target], random.Random(f"{target} {seed}"), tmp_path / "x")
