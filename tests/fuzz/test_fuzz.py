"""A few fixed inputs of each fuzzer; `python -m tests.fuzz` runs more."""

import random
from pathlib import Path

import pytest

from tests.fuzz.__main__ import ALL
from tests.fuzz.running import run_input
from tests.split import PARTS

INPUTS = {
    "metadata_pickles": 150, "archives": 150, "torch_files": 150, "dcp_directories": 30, "archives_of_items": 150,
    "commit_records": 120, "manifests": 120, "run_directories": 25, "local_files": 60,
    "safetensors_files": 60, "indexes": 40, "configs": 40, "rank_files": 12, "key_maps": 200, "layouts": 60,
}  # fmt: skip
PAST = {
    # 903729: padding that moves the pickle over the next bytes; 537970: an empty pickle
    "archives_of_items": (364, 565, 652, 2705, 6321, 903729, 537970),
    "dcp_directories": (507171,),
    "torch_files": (122315, 134130, 146601, 148720, 112064),  # the last: torch returns uninitialized memory
    "commit_records": (80, 110),  # a name of thousands of characters; a number beyond a float's range
    "manifests": (96, 737),  # a long dtype; a path that is a number
    "run_directories": (85, 126),  # pins and leases nested deeper than the parser allows
    "local_files": (74, 1793),  # the last: 10^12 ranks
    "committed_checkpoints": (1000907,),  # a lone surrogate in the name of a file
    "configs": (1700, 2026),  # lone surrogates in a config
    "rank_files": (3176, 6520),  # parameter groups that are a boolean; a step too large for a float
    "layouts": (1003663,),  # a string among the sizes, multiplied by another size
}
pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def run(target: str, seed: int, folder: Path) -> None:
    run_input(ALL[target], random.Random(f"{target} {seed}"), folder / "x")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", INPUTS)
def test_a_damaged_file_is_refused_or_harmless(target, part, tmp_path):
    for seed in range(part, INPUTS[target], PARTS):
        run(target, seed, tmp_path)


@pytest.mark.parametrize(("target", "seed"), [(target, seed) for target, seeds in PAST.items() for seed in seeds])
def test_past_findings_stay_fixed(target, seed, tmp_path):
    run(target, seed, tmp_path)
