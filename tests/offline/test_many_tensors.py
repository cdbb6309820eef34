"""Checkpoints of very many small tensors: the work for each is bounded, however many there are."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import convert, verify
from ckptkit.offline.diff import diff


def _made(path: Path, count: int) -> str:
    path.mkdir()
    tensors = {f"model.layers.{i // 100}.experts_{i % 100}.w": np.full((2, 2), i, np.float32) for i in range(count)}
    save_file(tensors, path / "model.safetensors")
    return str(path)


def _diff(url: str, place: Path) -> None:
    assert diff(url, url).equal


def _dry_run(url: str, place: Path) -> None:
    assert convert(url, str(place / "out"), dry_run=True).plan_lines()


def _convert(url: str, place: Path) -> None:
    convert(url, str(place / "out"), workers=1)


def _verify(url: str, place: Path) -> None:
    assert verify(url).ok


def _calls(work: Callable[[str, Path], Any], url: str, place: Path) -> int:
    profile = cProfile.Profile()
    profile.runcall(work, url, place)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("work", "most"), [(_diff, 65), (_dry_run, 170), (_convert, 190), (_verify, 20)])
def test_a_command_makes_few_function_calls_for_each_of_many_tensors(
    tmp_path: Path, work: Callable[[str, Path], Any], most: int
) -> None:
    few, many = _made(tmp_path / "few", 1000), _made(tmp_path / "many", 3000)
    work(few, tmp_path / "warm")  # what is imported and cached once does not count
    counts = [_calls(work, url, tmp_path / str(place)) for place, url in enumerate((few, many))]
    each = (counts[1] - counts[0]) / 2000
    assert each < most, f"{each:.0f} calls for each tensor"
