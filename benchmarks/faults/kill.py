"""Kill a job of real ranks at random instants, resume with the next job, and check what is left.

python -m benchmarks.faults.kill --kills 200 --ranks 4 --keep 1 --victims all|one|term

Failures are: a listed checkpoint that differs from what was saved, a missing checkpoint whose save had returned, and a
rank that is still running after the deadline.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch  # noqa: F401  imported before the forks, so that each fork takes milliseconds
import torch.distributed as dist

from ckptkit.checkpoint.manager import SignalWatch
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.storage import staging
from ckptkit.storage.lock import acquire_lease
from ckptkit.storage.open import open_store
from tests.checkpoint.saving import check, leftovers, save

DEADLINE_S = 30.0


def job(rank: int, ranks: int, root: str, rendezvous: str, keep: int, said: int) -> None:
    """Resume and save repeatedly until killed, or until the ranks have agreed on a signal."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    coordinator = Coordinator(timeout_s=10)
    store = open_store(root)
    lease = acquire_lease(store) if coordinator.is_main else None
    step = max(check(root), default=0) if coordinator.is_main else 0
    step = coordinator.decide(lambda: step, "choosing a step")
    with closing(SignalWatch(coordinator)) as watch:
        while True:
            step += 1
            save(store, step, coordinator=coordinator, nbytes=100_000, lease=lease, planned_bytes=100_000)
            if coordinator.is_main:
                os.write(said, b"%d\n" % step)
                rotate(store, RetentionPolicy(max_num=keep))
            if watch.agreed():
                os._exit(0)


def start(ranks: int, root: str, keep: int, rendezvous: str) -> tuple[list[int], int]:
    reader, writer = os.pipe()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            try:
                job(rank, ranks, root, rendezvous, keep, writer)
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(writer)
    return pids, reader


def end(pids: list[int], victims: str, chance: random.Random) -> bool:
    """Kill the victims; return whether all ranks had ended before the deadline."""
    if victims == "one":
        os.kill(chance.choice(pids), signal.SIGKILL)
    elif victims == "term":
        os.kill(chance.choice(pids), signal.SIGTERM)
        time.sleep(chance.uniform(0.0, 0.05))
    if victims != "one":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    deadline, left = time.monotonic() + DEADLINE_S, list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not left


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--keep", type=int, default=1)
    parser.add_argument("--victims", choices=["all", "one", "term"], default="all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    bad, hung, returned, saved = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        for number in range(options.kills):
            pids, reader = start(options.ranks, str(root), options.keep, f"{folder}/rendezvous-{number}")
            time.sleep(chance.uniform(0.15, 0.9))
            hung += not end(pids, options.victims, chance)
            with open(reader, "rb") as said:
                steps = [int(line) for line in said.read().split()]
            saved += len(steps)
            returned = max([returned, *steps])
            try:
                listed = check(root)
                if returned and (not listed or listed[-1] < returned):
                    bad.append(f"kill {number}: {returned} had returned, {listed} is listed")
            except AssertionError as error:
                bad.append(f"kill {number}: {error}")
        staging.STARTING_S = -1.0  # a killed rank may leave an empty owner file: only its age shows that it is dead
        save(root, returned + 1000)
        if leftovers(root):
            bad.append(f"left over: {leftovers(root)}")
    print(
        f"victims={options.victims} ranks={options.ranks} keep={options.keep} seed={options.seed}: "
        f"{options.kills} kills, {saved} saves returned, {len(bad)} bad, {hung} hung"
    )
    print("\n".join(bad))
    raise SystemExit(bool(bad or hung))


if __name__ == "__main__":
    main()
