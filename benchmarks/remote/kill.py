"""Kill a process that saves to a real S3 or GCS server at random moments, and check what is left.

    python benchmarks/remote/kill.py [--server rclone|moto|gcs] [--n 100] [--seed 0]

After each kill: every listed checkpoint is complete, byte by byte; every save that had returned is present; the next
save works; and after it and a `prune`, every object and upload belongs to a checkpoint. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.remote.bench import serve
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run import commit
from ckptkit.checkpoint.run.commit import clean_leftovers
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.storage import open_store, staging, upload
from tests.checkpoint.saving import check, fork, save

SMALL, LARGE = 200_000, 12 << 20  # one put; three parts
KEEP = 2


def work(say: Any, url: str, options: dict[str, Any], delay: float, first: int) -> None:
    root = open_store(url, storage_options=options)
    threading.Timer(delay, lambda: os.kill(os.getpid(), 9)).start()
    for step in range(first, first + 10_000):
        save(root, step, nbytes=LARGE if step % 2 else SMALL)
        say(f"{step}\n".encode())
        rotate(root, RetentionPolicy(max_num=KEEP))


def strays(root: Any) -> list[str]:
    """Return the objects and uploads that belong to no checkpoint."""
    known = {"latest"}
    for item in list_checkpoints(root).committed:
        known |= {f"{item.name}/checkpoint.json", *(f"{item.name}/{item.record.data}/{p}" for p in item.record.files)}
    there = [item.path for item in root.list(recursive=True) if not item.path.startswith(".ckptkit/")]
    return [path for path in there if path not in known] + [found.name for found in root.unfinished_uploads()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", choices=["rclone", "moto", "gcs"], default="rclone")
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    upload.UPLOAD_BYTES = 5 << 20
    rng = random.Random(args.seed)
    found = {"kills": 0, "checkpoints_seen": 0, "killed_in_a_save": 0, "damaged": 0, "acked_lost": 0, "left_over": 0}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder, contextlib.ExitStack() as stack:
        options = stack.enter_context(serve(Path(folder), args.server))
        url = f"{'gs' if args.server == 'gcs' else 's3'}://bench/run"
        step = 1
        started = time.monotonic()
        for _ in range(args.n):
            step = one_kill(url, options, rng.uniform(0.1, 1.2), step, found)
        found["seconds"] = round(time.monotonic() - started)
    print(json.dumps({"server": args.server, **found}), flush=True)
    sys.exit(1 if found["damaged"] or found["acked_lost"] or found["left_over"] else 0)


def one_kill(url: str, options: dict[str, Any], delay: float, first: int, found: dict[str, int]) -> int:
    """Kill one run after `delay`, check what is left, save once more, and return the next step."""
    _, said = fork(work, url, options, delay, first)
    acked = [int(line) for line in said.decode().splitlines()]
    root = open_store(url, storage_options=options)
    found["kills"] += 1
    found["killed_in_a_save"] += bool(strays(root))
    try:
        steps = check(root)
    except AssertionError as error:
        found["damaged"] += 1
        print("damaged:", error, file=sys.stderr)
        steps = []
    found["checkpoints_seen"] += len(steps)
    found["acked_lost"] += bool(acked) and acked[-1] not in steps
    last = max([first - 1, *acked, *steps]) + 1
    save(root, last, nbytes=SMALL)  # takes over the lease of the dead run and cleans up
    staging.STARTING_S, commit.UPLOAD_AGE_S = 0.0, 0.0  # only age shows that a probe or an upload is dead
    clean_leftovers(root)
    staging.STARTING_S, commit.UPLOAD_AGE_S = 60.0, 86400.0
    left = strays(root)
    found["left_over"] += bool(left)
    if left:
        print("left over:", left, file=sys.stderr)
    return last + 1


if __name__ == "__main__":
    main()
