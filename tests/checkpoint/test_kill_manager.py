"""A manager's saves in every mode, rotations and deletions, killed before their file operations: a selection.

`benchmarks.faults.manager` kills at every operation of one rank and of all ranks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoint.killed import MODES, Plan, kill_everywhere

pytestmark = pytest.mark.usefixtures("no_grace")


@pytest.mark.parametrize(("mode", "keep"), list(zip(MODES, (1, 3), strict=True)))
def test_a_manager_killed_at_any_file_operation_loses_nothing(tmp_path: Path, mode: str, keep: int) -> None:
    plan = Plan(mode, "all", 0, ranks=1, keep=keep)
    assert kill_everywhere(tmp_path, plan, stride=97, offset=1 + random.Random(mode).randrange(97)) >= 3


@pytest.mark.parametrize(("mode", "victim", "offset"), [("sync", "1", 25), ("async", "0", 180)])
def test_a_killed_rank_ends_the_others_and_loses_nothing(tmp_path: Path, mode: str, victim: str, offset: int) -> None:
    assert kill_everywhere(tmp_path, Plan(mode, victim, 0), stride=5000, offset=offset, most=1) == 1
