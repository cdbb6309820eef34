"""Fill small file systems while two ranks save; print a table.

python -m benchmarks.faults.disk_full --sizes 15        (root only: a tmpfs and a loop-mounted ext4)

For each amount of free space and each number of writing threads, either all ranks raise the same error with "No space
left on device" and the rank, or all return. The previous checkpoint loads, the space is freed, and the next save, with
enough space, works.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.checkpoint.full_disk import FILESYSTEMS, NEED, Outcome, agreed, disk, fill_up, sizes
from tests.ranks import Pool


def row(what: str, workers: int, results: Sequence[Sequence[Outcome]]) -> list[str]:
    """Print what the ranks reported; return the failures."""
    outcomes = results[0]
    wrong = agreed(results)
    slowest = max((outcome.seconds for rank in results for outcome in rank if outcome.error), default=0.0)
    failed = sum(outcome.error is not None for outcome in outcomes)
    print(f"| {what} | {workers} | {len(outcomes)} | {failed} | {len(wrong)} | {slowest:.2f} |", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, default=15)
    parser.add_argument("--filesystems", default=",".join(FILESYSTEMS))
    parser.add_argument("--workers", default="1,2,4")
    options = parser.parse_args()
    pool, wrong = Pool(), []
    print("| full | threads | saves | failed | bad | slowest error, s |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, filesystem in enumerate(options.filesystems.split(",")):
            for workers in map(int, options.workers.split(",")):
                with disk(Path(folder) / f"{number}-{workers}", filesystem) as place:
                    for known in (False, True):
                        lefts = sizes(options.sizes, NEED)
                        results = pool.run(fill_up, 2, str(place), workers, lefts, known, timeout=200)
                        name = f"{filesystem}, {'known before' if known else 'found while writing'}"
                        wrong += row(name, workers, results)
    pool.close()
    print("\n".join(wrong))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
