"""Every example runs unchanged. `make demo` runs the main one, examples/train_and_export.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "train_and_export.py")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_example_runs(script, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip(), "an example says what it shows"
