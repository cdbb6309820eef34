"""A few hundred fixed inputs of each fuzzer of torch formats; torch_formats itself runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.torch_formats import TARGETS, run
from tests.split import PARTS

COUNTS = {"dcp_directories": 30}
PAST = [  # (target, seed) of former findings
    ("archives_of_items", 364),
    ("archives_of_items", 565),
    ("archives_of_items", 652),
    ("archives_of_items", 2705),
    ("archives_of_items", 6321),
    ("archives_of_items", 903729),  # padding that moves the pickle over the next bytes
    ("archives_of_items", 537970),  # an empty pickle
    ("dcp_directories", 507171),
    ("torch_files", 112064),  # a storage marked as a directory: torch returns uninitialized memory
    ("torch_files", 122315),
    ("torch_files", 134130),
    ("torch_files", 146601),
    ("torch_files", 148720),
]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_bytes_are_refused_or_harmless(target: str, part: int, tmp_path: Path) -> None:
    for seed in range(part, COUNTS.get(target, 150), PARTS):
        run(target, seed, tmp_path / "x")


@pytest.mark.parametrize(("target", "seed"), PAST)
def test_past_findings_stay_fixed(target: str, seed: int, tmp_path: Path) -> None:
    run(target, seed, tmp_path / "x")
