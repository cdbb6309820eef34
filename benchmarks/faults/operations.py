"""Kill saves, overwrites, rotations and deletions before every one of their file operations; print a table.

python -m benchmarks.faults.operations
python -m benchmarks.faults.operations --scenarios "overwrite,delete"
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ckptkit.storage import staging
from tests.checkpoint.test_kill import kill_everywhere

SCENARIOS = ("keep 1", "keep 2", "overwrite", "overwrite without swap", "delete")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    options = parser.parse_args()
    staging.STARTING_S = -1.0
    print("| scenario | kill points | bad |\n|---|---|---|")
    for name in options.scenarios.split(","):
        with tempfile.TemporaryDirectory() as folder:
            kills = kill_everywhere(name, Path(folder), stride=1)  # raises at the first bad one
        print(f"| {name} | {kills} | 0 |", flush=True)


if __name__ == "__main__":
    main()
