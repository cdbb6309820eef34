"""Jobs with a `CheckpointManager`, on one or several ranks, killed before the Nth file operation of one of them.

The remaining checkpoints are compared with what was saved, resumed from, and saved over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckptkit import CheckpointManager, RetentionPolicy, TrainState, open_checkpoint
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import CkptkitError, RankFailedError
from ckptkit.formats.own.record import data_store
from ckptkit.offline.prune import prune
from ckptkit.storage import open_store, publish
from tests.checkpoint import crash
from tests.checkpoint.saving import leftovers, start
from tests.checkpoint.states import module_of

MODES = ("sync", "async")
ROWS, COLUMNS = 6, 3
COUNT = 1 << 30  # an operation that is never reached: the job reports how many there were
DEADLINE_S = 60.0
_RANK_TIMEOUT_S = 20.0
Say = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """One job and one kill.

    Attributes:
        mode: How the job saves: "sync", or "async" with `save_async`.
        victim: "all" ranks at once, or one rank by its number.
        nth: The file operation of the victim (of rank 0 for "all") before which it is killed; 0: never.
        keep: `max_num` of the rotation after each save.
        swap: Whether the file system can swap two names.
    """

    mode: str
    victim: str
    nth: int
    ranks: int = 2
    keep: int = 1
    swap: bool = True

    def at(self, nth: int) -> Plan:
        """Return the same job, killed at another operation."""
        return replace(self, nth=nth)


def content(step: int, variant: int) -> np.ndarray[Any, Any]:
    """Return the weights of a step."""
    return (np.arange(ROWS * COLUMNS, dtype=np.float32) + 1000 * step + 100 * variant).reshape(ROWS, COLUMNS)


def state(step: int, variant: int = 0, mesh: Any = None) -> TrainState:
    """Return the state of a job: a sharded weight, a replicated bias, and other objects."""
    whole, bias = torch.from_numpy(content(step, variant)), torch.full((2,), float(step))
    if mesh is not None:
        from torch.distributed.tensor import DTensor, Shard

        # Without communication: the training's own collectives are not under test.
        whole = DTensor.from_local(whole.chunk(mesh.size())[mesh.get_rank()].clone(), mesh, [Shard(0)])
    return TrainState(model=module_of({"weight": whole, "bias": bias}), extra={"variant": variant}, rng=False)


# --- the job


def job(say: Say, root: str, plan: Plan, rank: int) -> None:
    """Resume; save two steps, the second one twice; delete one explicitly. Each save rotates."""
    mesh = None
    if plan.ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (plan.ranks,))
    if not plan.swap:
        publish._exchange = lambda first, second: False
    counted = None
    with CheckpointManager(root, retention=RetentionPolicy(plan.keep), timeout_s=_RANK_TIMEOUT_S) as manager:
        if plan.victim == str(rank) or (plan.victim == "all" and rank == 0):
            counted = crash.kill_at(plan.nth, os.getpgid(0) if plan.victim == "all" else None)
        start = manager.latest() or 0
        if start:
            loaded = state(0, 0, mesh)
            manager.load(loaded)
            same_as_saved(loaded, start)
        for step, variant in ((start + 1, 0), (start + 2, 0), (start + 2, 1)):
            saved, again = state(step, variant, mesh), variant > 0
            save(manager, plan.mode, step, saved, overwrite=again)
            say(f"saved {step} {variant}")
        steps = [record.step for record in manager.list()]
        if len(steps) > 2:
            manager.delete(start + 1)
        if plan.nth == COUNT:
            say(f"counted {counted() if counted else 0}")


def save(manager: CheckpointManager, mode: str, step: int, saved: TrainState, **options: Any) -> None:
    """Save in the foreground ("sync"), or in the background, and wait for it."""
    if mode == "sync":
        manager.save(step, saved, **options)
    else:
        manager.save_async(step, saved, **options).result(DEADLINE_S)


def same_as_saved(loaded: TrainState, step: int) -> None:
    """Raise AssertionError unless a job has the complete state of `step`."""
    variant = loaded.extra["variant"]
    model: Any = loaded.model
    weight = model.weight.detach()
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    assert np.array_equal(weight.numpy(), content(step, variant)), (step, variant, weight)
    assert model.bias.detach().tolist() == [float(step)] * 2, (step, model.bias)


# --- its processes


def _say(write: Callable[[int, bytes], int], writer: int, rank: int, text: str) -> None:
    write(writer, f"{rank} {text}\n".encode())


def _rank(say: Say, root: str, plan: Plan, rank: int, rendezvous: str, leader: int) -> None:
    os.setpgid(0, leader)
    torch.set_num_threads(1)
    if plan.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=plan.ranks)
        dist.barrier()
    try:
        job(say, root, plan, rank)
        if plan.ranks > 1:
            dist.barrier()
    except RankFailedError as error:
        say(f"lost {error}")
        os._exit(3)
    except CkptkitError as error:
        say(f"refused {type(error).__name__}: {error}")
        os._exit(4)


def run(root: Path, plan: Plan, rendezvous: Path) -> tuple[list[int], list[str]]:
    """Run a job; return the exit code of each rank (None: it hung and was killed) and the output of the ranks."""
    reader, writer = os.pipe()
    rendezvous.unlink(missing_ok=True)
    pids: list[int] = []
    for rank in range(plan.ranks):
        say = functools.partial(_say, os.write, writer, rank)
        leader = pids[0] if pids else 0
        pids.append(start(functools.partial(_rank, say, str(root), plan, rank, str(rendezvous), leader)))
        with contextlib.suppress(OSError):
            os.setpgid(pids[-1], pids[0])
    os.close(writer)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for rank in set(range(len(pids))) - set(codes):
                os.kill(pids[rank], signal.SIGKILL)
                os.waitpid(pids[rank], 0)
                codes[rank] = -99
        time.sleep(0.002)
    with open(reader, encoding="utf-8", errors="replace") as said:
        return [codes[rank] for rank in range(len(pids))], said.read().splitlines()


# --- what is left of it


def check_run(root: Path, said: list[str]) -> list[int]:
    """Return the listed steps; raise AssertionError if one differs from what was saved or is lost."""
    inventory = list_checkpoints(open_store(str(root)))
    for item in inventory.committed:
        found = open_checkpoint(f"{root}/{item.path}")
        variant = found["extra.variant"]
        assert np.array_equal(found["model.weight"].numpy(), content(item.step, variant)), item.path
        assert found["model.bias"].numpy().tolist() == [float(item.step)] * 2, item.path
        data = data_store(open_store(f"{root}/{item.path}"), item.record)
        there = {entry.path: entry.size for entry in data.list(recursive=True) if entry.path != "checkpoint.json"}
        assert there == {path: file.nbytes for path, file in item.record.files.items()}, item.path
    steps = [item.step for item in inventory.committed]
    returned = [int(line.split()[2]) for line in said if line.split()[1] == "saved"]
    if returned:
        assert steps and steps[-1] >= max(returned), f"{max(returned)} had returned, {steps} is listed"
    return steps


def go_on(root: Path, *, by_prune: bool) -> int:
    """Resume from what is left, clean up by a save or by `prune`, and save; return the step that was resumed from."""
    found = list_checkpoints(open_store(str(root)))
    if by_prune and (found.committed or found.abandoned):
        prune(str(root), policy=RetentionPolicy(max_num=100))
        assert leftovers(root) == [], os.listdir(root)
    with CheckpointManager(root) as manager:
        step = manager.latest() or 0
        loaded = state(0)
        if step:
            manager.load(loaded)
            same_as_saved(loaded, step)
        manager.save(step + 1, state(step + 1))
        assert manager.latest() == step + 1
    listed = [item.name for item in list_checkpoints(open_store(str(root))).committed]
    assert sorted(os.listdir(root)) == sorted([*listed, ".ckptkit", "latest"]), os.listdir(root)
    assert not [name for name in os.listdir(root / ".ckptkit") if not name.startswith(("lease-", "pins", "deleting"))]
    return step


def kill(folder: Path, plan: Plan, *, by_prune: bool) -> bool:
    """Run a job on a root with a checkpoint, kill it, and check all guarantees; return False if it was not killed.

    Raises AssertionError with all details if a check fails.
    """
    root = folder / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
    codes, said = run(root, plan, folder / "rendezvous")
    try:
        victims = [r for r in range(plan.ranks) if plan.victim in ("all", str(r))]
        dead = any(codes[rank] == -signal.SIGKILL for rank in victims)
        for rank, code in enumerate(codes):
            allowed = (-signal.SIGKILL,) if rank in victims else (3,)
            assert code == 0 or (dead and code in allowed), f"rank {rank} ended with {code}"
        steps = check_run(root, said)
        assert steps, "nothing is listed"
        assert go_on(root, by_prune=by_prune) == steps[-1]
    except AssertionError as error:
        raise AssertionError(f"{plan}: {error}; codes {codes}; said {said}; {sorted(os.listdir(root))}") from error
    shutil.rmtree(folder)
    return dead


def kill_everywhere(folder: Path, plan: Plan, *, stride: int = 1, offset: int = 1, most: int = 10_000) -> int:
    """Kill the job at every `stride`-th operation until it survives, or `most` times; return the number of kills."""
    for kills, nth in enumerate(range(offset, offset + most * stride, stride)):
        here = folder / str(nth)
        here.mkdir(parents=True)
        # Only a save finishes a replacement that was killed between its two renames.
        if not kill(here, plan.at(nth), by_prune=plan.swap and kills % 2 == 1):
            return kills
    return most
