"""Kill jobs and commands before each of their file operations; print a table.

python -m benchmarks.faults.operations
python -m benchmarks.faults.operations --scenarios "reshard,reshard again,prune" --stride 1

A job saves, overwrites, rotates and deletes checkpoints. `again` means that the result exists already.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.storage import staging
from tests.checkpoint.killed import Plan, kill_everywhere, state
from tests.offline.test_kill_commands import COMMANDS, kill_command, kill_prune

JOBS = {
    "job that keeps 1": Plan("sync", "all", 0, ranks=1),
    "job that keeps 3 without swap": Plan("sync", "all", 0, ranks=1, keep=3, swap=False),
}
SCENARIOS = (*JOBS, *COMMANDS, *(f"{name} again" for name in COMMANDS), "prune")


def kills_of(name: str, folder: Path, stride: int) -> int:
    """Kill a scenario at every `stride`-th operation; raise at the first failure; return the number of kills."""
    if name in JOBS:
        return kill_everywhere(folder, JOBS[name], stride=stride)
    run, place = folder / "run", folder / "killed"
    with CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    if name == "prune":
        return kill_prune(run, place, stride=stride, offset=1)
    command = name.removesuffix(" again")
    return kill_command(command, run, place, again=name != command, stride=stride, offset=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--stride", type=int, default=1)
    options = parser.parse_args()
    staging.STARTING_S = -1.0
    print("| scenario | kill points | bad |\n|---|---|---|")
    for name in options.scenarios.split(","):
        with tempfile.TemporaryDirectory() as folder:
            kills = kills_of(name, Path(folder), options.stride)
        print(f"| {name} | {kills} | 0 |", flush=True)


if __name__ == "__main__":
    main()
