"""Measure how much background saves every 10 steps slow down training: ours compared with `dcp.async_save`.

    python -m benchmarks.save_load.slowdown [--ranks 2] [--where /dev/shm] [--gigabytes 0.5] [--steps 60] [--repeat 3]

A step resembles small eager training: many short operations that need the interpreter, an all-reduce, and an in-place
update of the whole state. The loop without saves runs in the same ranks before and after the loop with saves; its
faster time is the baseline. A loop ends with its last step; a save may still be running then. If the ranks use every
core, the work of a save always slows the steps.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.save_load.measure import make_state, timed
from benchmarks.save_load.stall import hush, starter
from tests.ranks import run_ranks

PEERS = ("ckptkit", "torch thread", "torch process")
EVERY = 10


class Training:
    """Run steps of a fixed amount of work."""

    def __init__(self, state: dict[str, Any], operations: int) -> None:
        self.tensors = [tensor._local_tensor for tensor in state["model"].values()]
        self.weight = torch.eye(64)
        self.operations = operations

    def step(self) -> None:
        x = torch.ones(16, 64)
        for _ in range(self.operations):
            x = torch.relu(x @ self.weight)
        dist.all_reduce(x)
        torch._foreach_add_(self.tensors, 1e-6)

    def loop(self, steps: int, save: Callable[[int], Any] | None) -> Any:
        waits: list[Any] = []
        for step in range(1, steps + 1):
            self.step()
            if save is not None and step % EVERY == 0:
                while waits:
                    waits.pop()()  # one save in flight, for every contestant
                waits.append(save(step))
        return waits


def measure(peer: str, gigabytes: float, root: str, steps: int, operations: int) -> tuple[float, float]:
    """Return (seconds of the loop without saves, seconds with saves)."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hush(peer)
    state = make_state("large", gigabytes, 0)
    training = Training(state, operations)
    save, end = starter(peer, state, root)
    training.loop(5, None)
    save(1)()  # one-time costs of the first save belong to the benchmark of stalls
    alone = timed(lambda: training.loop(steps, None))[0]
    waits: list[Any] = []
    beside = timed(lambda: waits.extend(training.loop(steps, lambda step: save(step + 1))))[0]
    for wait in waits:
        wait()
    end()
    return min(alone, timed(lambda: training.loop(steps, None))[0]), beside


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load.slowdown", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--operations", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    options = parser.parse_args()
    best: dict[str, tuple[float, float]] = {}
    for _ in range(options.repeat):
        for peer in options.peers:
            root = f"{options.where}/ckptkit-slowdown"
            arguments = (peer, options.gigabytes, root, options.steps, options.operations)
            alone, beside = run_ranks(measure, options.ranks, *arguments, timeout=900)[0]
            shutil.rmtree(root, ignore_errors=True)
            known = best.get(peer, (float("inf"), float("inf")))
            best[peer] = min(known, (beside / alone, alone / options.steps))
    print(f"{options.where}, {options.ranks} ranks, {options.gigabytes} GiB, a save every {EVERY} of {options.steps}")
    for peer, (ratio, step) in best.items():
        print(f"  {peer:16s} {100 * (ratio - 1):6.1f} % slower  (a step alone {step * 1e3:.0f} ms)")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
