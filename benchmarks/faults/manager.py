"""Kill jobs that save through a `CheckpointManager`, each before one of its file operations; print a table.

python -m benchmarks.faults.manager --kills 200 --ranks 2

Each row of the table is a way to save (sync or `save_async`) and a victim: all ranks or one rank. The kills of a row
are spread evenly over all file operations of the victim between the first save and the last deletion. After each kill:
every listed checkpoint was saved, no save that had returned is lost, the next job resumes from the newest, and its save
or a prune removes all leftovers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.storage import staging
from tests.checkpoint.killed import COUNT, MODES, Plan, kill, run, state


def plans(ranks: int) -> list[Plan]:
    """Return one plan per row of the table, without a kill."""
    victims = ["all", *(str(rank) for rank in range(ranks))]
    return [Plan(mode, victim, 0, ranks, keep=1 + 2 * (i % 2)) for i, mode in enumerate(MODES) for victim in victims]


def count(folder: Path, plan: Plan) -> int:
    """Return the number of file operations of the victim of a plan."""
    root = folder / "counted"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
    codes, said = run(root, plan.at(COUNT), folder / "rendezvous")
    assert codes == [0] * plan.ranks, (codes, said)
    return max(int(line.split()[2]) for line in said if line.split()[1] == "counted")


def points(operations: int, kills: int, seed: int) -> list[int]:
    """Return operation numbers, spread evenly; another seed returns numbers in between."""
    step = max(1.0, operations / kills)
    return sorted({1 + int(i * step + (seed * 0.618 % 1) * step) % operations for i in range(min(kills, operations))})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200, help="of all rows; a very large number: every operation")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="", help="only these rows of the table, by number: 0,1,2")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    staging.STARTING_S = -1.0
    table = plans(options.ranks)
    chosen = [table[int(row)] for row in options.rows.split(",") if row] or table
    each = -(-options.kills // len(table))
    print("| mode | victim | max_num | operations | kills | bad | s |\n|---|---|---|---|---|---|---|")
    bad: list[str] = []
    for plan in chosen:
        started, dead, wrong = time.monotonic(), 0, 0
        with tempfile.TemporaryDirectory() as folder:
            operations = count(Path(folder), plan)
            for nth in points(operations, each, options.seed):
                place = Path(folder) / str(nth)
                place.mkdir()
                try:
                    dead += kill(place, plan.at(nth), by_prune=nth % 2 == 1)
                except AssertionError as error:
                    bad.append(str(error))
                    wrong += 1
        seconds = time.monotonic() - started
        print(
            f"| {plan.mode} | {plan.victim} | {plan.keep} | {operations} | {dead} | {wrong} | {seconds:.0f} |",
            flush=True,
        )
    print("\n".join(bad))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
