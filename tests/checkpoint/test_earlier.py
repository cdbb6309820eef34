"""Checkpoints of earlier versions resume bit-exactly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import reshard
from ckptkit.errors import CheckpointMismatchError
from tests.checkpoint import earlier, states
from tests.ranks import Pool

KEPT = Path(__file__).parent / "kept_0.1"
CASES = [(case, size) for case, written in earlier.SIZES.items() for size in sorted({1, 2, written})]


def _loaded(url: str, case: str) -> dict[str, Any]:
    state, _ = earlier.made(case)
    report = states.load(url, state)
    assert report is not None and not report.missing and not report.unexpected and not report.skipped
    assert (state.step, report.metrics, report.client_state) == (3, {"loss": 1.5}, {"epoch": 1})
    return earlier.values(state)


@pytest.mark.parametrize(("case", "size"), CASES)
def test_checkpoints_of_an_earlier_version_load_bit_for_bit(case: str, size: int, ranks: Pool, tmp_path: Path) -> None:
    kept = KEPT / case
    run = tmp_path / "run"
    shutil.copytree(kept / "run", run)
    if case == "local" and size != earlier.SIZES[case]:
        with pytest.raises(AssertionError, match=CheckpointMismatchError.__name__):
            ranks.run(_loaded, size, str(run), case)
        reshard(str(run), str(tmp_path / "resharded/step_00000003"), world_size=size, type="local")
        run = tmp_path / "resharded"
    expected = torch.load(kept / "expected.pt", weights_only=True)
    for found in ranks.run(_loaded, size, str(run), case):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
            assert same, name
