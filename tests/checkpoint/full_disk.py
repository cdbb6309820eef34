"""Save to real file systems that are full at some point, from several writing threads on two ranks.

Used by `test_manager_faults.py` (a selection) and `benchmarks.faults.disk_full` (all cases).
"""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit import CheckpointManager, verify
from ckptkit.checkpoint.run import commit
from ckptkit.errors import CkptkitError
from ckptkit.formats.dcp import files
from tests.checkpoint import killed
from tests.checkpoint.saving import leftovers

FILESYSTEMS = ("tmpfs", "ext4")
DISK_KIB = 12 << 10
_PIECES, _PIECE = 8, 30_000  # number of tensors, and the bytes of one on each rank
_SLACK = 16 << 10  # directories do not shrink after they have grown


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a save on one rank.

    Attributes:
        error: Type, text and named ranks; empty if the save returned.
        seconds: The time until the error was raised.
        wrong: The checks that failed.
    """

    error: tuple[str, str, tuple[int, ...]] | None
    seconds: float
    wrong: list[str]


@contextlib.contextmanager
def disk(place: Path, filesystem: str = "tmpfs", kib: int = DISK_KIB) -> Iterator[Path]:
    """Yield a mounted file system of `kib` KiB; skip the test if mounting is not possible."""
    place.mkdir()
    image = place.with_suffix(".image")
    if os.geteuid():
        pytest.skip("a small file system can only be mounted by root")
    if filesystem == "ext4":
        with open(image, "wb") as file:
            file.truncate(kib << 10)
        _sh("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        _sh("mount", "-o", "loop", str(image), str(place))
    else:
        _sh("mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        image.unlink(missing_ok=True)


def _sh(*command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]} here")
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


def free(place: Path) -> int:
    room = os.statvfs(place)
    return room.f_bfree * room.f_frsize


def state(step: int) -> Any:
    """Return the state of `killed.state` with tensors large enough for several files, all sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made: Any = killed.state(step, 0, mesh)
    for number in range(_PIECES):
        mine = torch.full((_PIECE // 4,), float(step + dist.get_rank()))
        whole = torch.nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
        made.model.register_parameter(f"piece{number}", whole)
    return made


def same(step: int, loaded: Any) -> None:
    """Raise AssertionError unless this rank has the complete state of `step`."""
    killed.same_as_saved(loaded, step)
    for number in range(_PIECES):
        mine = getattr(loaded.model, f"piece{number}").to_local()
        assert bool((mine == step + dist.get_rank()).all()), step


@contextlib.contextmanager
def threads(workers: int, *, known: bool = True) -> Iterator[None]:
    """Let each rank write `workers` files at once; `known`: check the free space first, as by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "default_workers", lambda store, tensors: workers)
        patch.setattr(files, "_FILE", 1)
        if not known:
            patch.setattr(commit, "_check_space", lambda *args, **_: None)  # the space is used up after the check
        yield


def fill_up(
    place: str, workers: int, lefts: Sequence[int], known: bool = False, kind: str = "sharded", mode: str = "sync"
) -> list[Outcome]:
    """Save with only so many bytes left, once for each of `lefts`, on all ranks."""
    found = []
    made = CheckpointManager(f"{place}/run-{known}", state_dict_type=kind, timeout_s=30)
    with threads(workers, known=known), made as manager:
        manager.save(1, state(1))
        for number, left in enumerate(lefts):
            ballast = Path(place) / "ballast"
            if dist.get_rank() == 0:
                fill(ballast, left)
            dist.barrier()
            found.append(_try(manager, Path(place), 3 * number + 2, mode))
            if dist.get_rank() == 0:
                ballast.unlink()
            dist.barrier()
            found[-1].wrong.extend(_next(manager, 3 * number + 3))
    return found


def fill(ballast: Path, left: int) -> None:
    """Fill the disk except for `left` bytes, or as far as possible."""
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := free(ballast.parent) - left) >= 4096:
            file.write(bytes(min(room, 1 << 20) & ~4095))
            os.fsync(file.fileno())


def _try(manager: CheckpointManager, place: Path, step: int, mode: str = "sync") -> Outcome:
    steps, room = [record.step for record in manager.list()], free(place)
    dist.barrier()
    error, started = None, time.monotonic()
    try:
        killed.save(manager, mode, step, state(step))
    except (CkptkitError, OSError) as caught:
        error = (type(caught).__name__, str(caught), tuple(sorted(getattr(caught, "causes", ()))))
    seconds = time.monotonic() - started
    wrong = []
    dist.barrier()
    if [record.step for record in manager.list()] != steps + [step] * (error is None):
        wrong.append(f"{error} left {[record.step for record in manager.list()]} after {steps}")
    if error is not None:
        known = error[0] == "NoSpaceError" and "Nothing was written" in error[1]
        named = error[0] == "RankFailedError" and error[2] and re.search(rf"failed on ranks? {error[2][0]}\b", error[1])
        if "No space left on device" not in error[1] or not (known or named):
            wrong.append(f"not said, or no rank is named: {error}")
        if leftovers(manager.url):
            wrong.append(f"left over: {leftovers(manager.url)}")
        if free(place) < room - _SLACK:
            wrong.append(f"{room - free(place)} bytes were not given back")
    dist.barrier()
    return Outcome(error, seconds, wrong + _loads(manager, step if error is None else steps[-1]))


def _loads(manager: CheckpointManager, step: int) -> list[str]:
    loaded = state(0)
    try:
        manager.load(loaded)
        same(step, loaded)
    except (CkptkitError, OSError, AssertionError) as error:
        return [f"step {step} is not loaded: {error}"]
    return []


def _next(manager: CheckpointManager, step: int) -> list[str]:
    """Save again with enough space, and keep only that checkpoint; return what is wrong."""
    try:
        manager.save(step, state(step))
    except (CkptkitError, OSError) as error:
        return [f"the next save fails: {error}"]
    dist.barrier()
    wrong = []
    if dist.get_rank() == 0 and not verify(f"{manager.url}/step_{step:08d}").ok:
        wrong.append(f"the next save, of step {step}, is damaged")
    wrong += _loads(manager, step)
    for record in manager.list():
        if record.step != step:
            manager.delete(record.step)
    return wrong


def sizes(count: int, need: int) -> list[int]:
    """Return amounts of free space from nothing to just enough for a save; the last is far more."""
    return [need * i // (count - 2) for i in range(count - 1)] + [3 * need]


def agreed(results: Sequence[Sequence[Outcome]]) -> list[str]:
    """Return what is wrong with the outcomes, given one list per rank."""
    wrong = [text for rank in results for outcome in rank for text in outcome.wrong]
    for outcomes in zip(*results, strict=True):
        if len({outcome.error for outcome in outcomes}) != 1:
            wrong.append(f"the ranks do not say the same: {[outcome.error for outcome in outcomes]}")
    return wrong


NEED = 2 * _PIECES * _PIECE + (64 << 10)
"""Return about how many bytes a save of two ranks needs."""
