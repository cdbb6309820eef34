"""The description of a checkpoint needs little memory, for any number of slices."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_hundred_thousand_slices_open_without_an_object_for_each():
    command = [sys.executable, "-m", "benchmarks.save_load.scale", "--cases", "334:300", "--torch-up-to", "0", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["slices"] >= 100_000
    # 24 MB, most of it independent of the number of slices; the whole `.metadata` in memory would take as much again.
    assert 0 < found["held"] < 40_000_000
