"""Every example of an integration runs on the CPU, and says itself whether it did what it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "lightning_fsdp2": "lightning",
    "hf_trainer": "accelerate",
    "accelerate_hooks": "accelerate",
    "plain_torch": "torchdata",
    "torchtitan_checkpointer": "torch",
}


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(name):
    pytest.importorskip(NEEDS[name])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
