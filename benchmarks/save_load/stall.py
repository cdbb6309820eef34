"""Measure how long `save_async` stops training, compared with a clone of the state and `dcp.async_save`.

    python -m benchmarks.save_load.stall [--ranks 2] [--where /dev/shm] [--gigabytes 1] [--saves 4] [--repeat 3]
        [--device cuda]

A stall is the time of the slowest rank between two barriers, from the call to its return; each save is committed
before the next. "first" is the first save of a new set of processes, "later" the best of the others; the table shows
the best and the median of `--repeat` sets. In brackets: the multiple of a clone of the state (of the first clone for
first saves, because both allocate memory, of a later one for later saves). `--kind model` is a job: 500 small
parameters under FSDP2 with Adam, and a step between the saves. Every contestant has its own ranks. With `--device
cuda` each rank has a GPU, and the clone stays on it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.save_load.job import Job
from benchmarks.save_load.measure import make_state, timed
from tests.ranks import run_ranks

PEERS = ("clone", "ckptkit", "torch thread", "torch process")
Save = Callable[[int], Callable[[], Any]]


def starter(peer: str, state: dict[str, Any] | Job, root: str) -> tuple[Save, Callable[[], None]]:
    """Return two functions: one that starts a save, and one to call at the end.

    The first takes the step, and returns a function that waits until the save is complete.
    """
    if peer.startswith("ckptkit"):
        from ckptkit import CheckpointManager, RetentionPolicy, TrainState

        manager = CheckpointManager(root, retention=RetentionPolicy(max_num=1))
        if isinstance(state, Job):
            held = TrainState(model=state.model, optimizer=state.optimizer)
        else:
            held = TrainState(extra={"state": Holder(state)})
        return lambda step: manager.save_async(step, held).result, manager.close
    group = dist.new_group(backend="gloo")
    way = AsyncCheckpointerType.THREAD if peer.endswith("thread") else AsyncCheckpointerType.PROCESS
    steps: list[int] = []

    def save(step: int) -> Callable[[], Any]:
        if steps and dist.get_rank() == 0:  # keep one checkpoint, like the manager
            shutil.rmtree(f"{root}/{steps[-1]}", ignore_errors=True)
        steps.append(step)
        writer = dcp.FileSystemWriter(f"{root}/{step}", sync_files=True)
        made = state.torch_state() if isinstance(state, Job) else state
        future = dcp.async_save(made, storage_writer=writer, process_group=group, async_checkpointer_type=way)
        return future.result  # type: ignore[union-attr, return-value]

    return save, lambda: None


def hush(peer: str) -> None:
    """Hide the log of torch's background process, which no setting turns off."""
    if peer == "torch process":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class Holder:
    """A stateful object whose state is the tensors."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def measure(
    peer: str, gigabytes: float, tensors: int, kind: str, root: str, saves: int, device: str = "cpu"
) -> list[float]:
    """Return the seconds of each stall."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hush(peer)
    state = Job(device) if kind == "model" else make_state(kind, gigabytes, tensors, device)
    if peer == "clone":
        memory = state.tensors() if isinstance(state, Job) else [t._local_tensor for t in state["model"].values()]
        return [timed(lambda: [t.clone() for t in memory])[0] for _ in range(saves)]
    save, end = starter(peer, state, root)
    stalls, waits = [], []
    for step in range(1, saves + 1):
        stalls.append(timed(lambda step=step: waits.append(save(step)))[0])  # type: ignore[misc]
        waits.pop()()
        if isinstance(state, Job):
            state.step()
    end()
    return stalls


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load.stall", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--kind", choices=["large", "small", "model"], default="large")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {peer: [] for peer in options.peers}
    for _ in range(options.repeat):
        for peer, rows in found.items():
            root = f"{options.where}/ckptkit-stall"
            arguments = (peer, options.gigabytes, options.tensors, options.kind, root, options.saves, options.device)
            first, *others = run_ranks(measure, options.ranks, *arguments, timeout=900, device=options.device)[0]
            shutil.rmtree(root, ignore_errors=True)
            rows.append((first, min(others)))
    print(f"{options.where}, {options.ranks} ranks, {options.kind}, {options.gigabytes} GiB; milliseconds (clones)")
    for peer, rows in found.items():
        cells = []
        for place, phase in enumerate(("first", "later")):
            for name, of_all in (("best", min), ("median", statistics.median)):
                spent = of_all([row[place] for row in rows])
                clone = of_all([row[place] for row in found["clone"]]) if "clone" in found else float("nan")
                cells.append(f"{phase}, {name} {spent * 1e3:7.1f} ({spent / clone:5.2f})")
        print(f"  {peer:16s} {'   '.join(cells)}")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
