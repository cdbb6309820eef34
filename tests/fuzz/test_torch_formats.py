"""A few hundred inputs of each fuzzer, always the same ones; the long form runs by itself (see torch_formats)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.torch_formats import TARGETS, run
from tests.split import PARTS

COUNTS = {"dcp_directories": 30}
PAST = [  # (target, seed) of inputs that once were findings
    ("archives_of_items", 364),
    ("archives_of_items", 565),
    ("archives_of_items", 652),
    ("archives_of_items", 2705),
    ("archives_of_items", 6321),
    ("archives_of_items", 903729),  # padding that pushes the pickle over what follows it
    ("archives_of_items", 537970),  # a pickle of no bytes
    ("dcp_directories", 507171),
    ("torch_files", 112064),  # a storage marked as a directory: torch returns memory nobody wrote
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
