"""A file system that fills up during a save of several ranks and threads: all ranks raise, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.full_disk import FILESYSTEMS, NEED, agreed, disk, fail_worker, fill_up, sizes


@pytest.mark.parametrize(("filesystem", "workers"), list(zip(FILESYSTEMS, (2, 4), strict=True)))
def test_a_disk_that_is_full_at_any_point_fails_all_ranks_and_the_next_save_works(
    ranks: Any, tmp_path: Path, filesystem: str, workers: int
) -> None:
    with disk(tmp_path / "disk", filesystem) as place:
        results = ranks.run(fill_up, 2, str(place), workers, sizes(4, NEED))
    assert agreed(results) == []
    failed = [outcome.error for outcome in results[0]]
    assert failed[0] is not None and failed[1] is not None and failed[-1] is None


def test_a_disk_with_too_little_free_space_is_an_error_before_anything_is_written(ranks: Any, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "tmpfs") as place:
        results = ranks.run(fill_up, 2, str(place), 1, [0, NEED // 2], True)
    assert agreed(results) == []
    assert all(outcome.error and "Nothing was written" in outcome.error[1] for outcome in results[0])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_writing_thread_that_finds_the_disk_full_fails_all_ranks(ranks: Any, tmp_path: Path, workers: int) -> None:
    points = [("write", 1), ("fsync", 1)][: 3 - workers // 2]
    with disk(tmp_path / "disk", "tmpfs") as place:  # a separate disk, whose free space nobody else changes
        results = ranks.run(fail_worker, 2, str(place), workers, points)
    assert agreed(results) == []
