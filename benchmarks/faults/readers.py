"""Read the newest checkpoint of a run repeatedly while another process saves and rotates; count failures.

python -m benchmarks.faults.readers --reads 200 --keep 1

The readers are a manager's load, `open_checkpoint` of a pinned checkpoint, and `convert`. Each read starts with the
checkpoint that is the latest at that moment. A read fails if its checkpoint is gone, changed or incomplete. A second
job also tries to save to the same root. It must be refused with an error that names the first job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ckptkit import convert
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.mapping import open_checkpoint
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.inventory import resolve
from ckptkit.checkpoint.run.pins import pin_while_reading
from ckptkit.errors import CheckpointNotFoundError, LeaseHeldError
from ckptkit.offline.verify import verify
from ckptkit.storage.open import open_store
from tests.checkpoint.killed import content, same_as_saved, state


def save_for_ever(root: str, keep: int) -> None:
    with CheckpointManager(root, retention=RetentionPolicy(max_num=keep)) as manager:
        step = manager.latest() or 0
        while True:
            step += 1
            manager.save(step, state(step))


def by_manager(root: Path, place: Path) -> int:
    loaded = state(0)
    with CheckpointManager(root) as manager:
        report = manager.load(loaded)
    assert report is not None
    same_as_saved(loaded, report.step)
    return report.step


def by_hand(root: Path, place: Path) -> int:
    """Choose, pin and read a checkpoint, as the documentation says."""
    store = open_store(str(root))
    while True:
        try:
            with pin_while_reading(store, resolve(store).name) as record:
                return of_one_step(f"{root}/{record.name}")
        except CheckpointNotFoundError:
            continue  # it was deleted between the listing and the pin: list again


def by_convert(root: Path, place: Path) -> int:
    convert(f"{root}/latest", str(place), to="dcp")
    assert verify(str(place)).ok
    return of_one_step(str(place))


def of_one_step(url: str) -> int:
    """Return the step of a checkpoint; raise AssertionError if its tensors belong to two steps."""
    found = open_checkpoint(url)
    step = int(found["model.bias"].numpy()[0])
    assert np.array_equal(found["model.weight"].numpy(), content(step, 0)), url
    return step


READERS: tuple[Callable[[Path, Path], int], ...] = (by_manager, by_hand, by_convert)


def second_job(root: Path, pid: int) -> str:
    """Return what is wrong with the error that a second writer gets, or "" if it is correct."""
    with CheckpointManager(root) as manager:
        try:
            manager.save(10**9, state(1))
        except LeaseHeldError as error:
            return "" if f"process {pid} " in str(error) else f"the first job is not named: {error}"
    return "a second job saved"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--keep", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root, place = Path(folder) / "run", Path(folder) / "out"
        with CheckpointManager(root) as manager:
            manager.save(1, state(1))
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever(str(root), options.keep)
            finally:
                os._exit(1)
        while not list(root.glob("step_00000003")):
            time.sleep(0.001)
        seen = dict.fromkeys(READERS, 0)
        steps = set()
        try:
            for number in range(options.reads):
                reader = READERS[number % len(READERS)]
                try:
                    steps.add(reader(root, place))
                except Exception as error:
                    bad.append(f"read {number}, {reader.__name__}: {type(error).__name__}: {error}")
                seen[reader] += 1
                shutil.rmtree(place, ignore_errors=True)
            wrong = second_job(root, pid)
            bad += [wrong] * bool(wrong)
            alive = os.waitpid(pid, os.WNOHANG) == (0, 0)
            bad += [] if alive else ["the job that saves has ended"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    counts = ", ".join(f"{reader.__name__} {count}" for reader, count in seen.items())
    print(f"keep={options.keep}: {counts}; {len(steps)} steps seen of about {max(steps, default=0)}, {len(bad)} bad")
    print("\n".join(bad[:20]))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
