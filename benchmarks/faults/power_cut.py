"""Cut the power of a real file system while checkpoints are saved and rotated, replay its journal, check what is left.

python -m benchmarks.faults.power_cut --cuts 100 --filesystem xfs --job save --ranks 2       (root only)

The file system is a loop-mounted image. The shutdown ioctl without a log flush (as in xfstests' godown) stops all I/O
at once: data that were not durable are lost, as after a power cut. btrfs has no such ioctl: there the state of the
device at that moment is copied, and the copy is mounted. Every save that had returned must be present and complete.

`--job bytes` saves through the commit only; `save` and `async` use a `CheckpointManager`. With `--every` the cuts come
before every n-th file operation of rank 0, otherwise at random instants. `--no-fsync` is the control that must fail.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.offline.verify import verify
from ckptkit.storage import staging
from ckptkit.storage.open import open_store
from tests.checkpoint import crash, killed
from tests.checkpoint.saving import check, leftovers, save

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2
_PIECE = 40_000  # bytes of one tensor; the number of tensors sets the size of the state
_READY = b"ready\n"


@dataclass(frozen=True, slots=True)
class Job:
    """The job that runs until the power is cut.

    Attributes:
        syncs: Whether fsync works. False for the negative control.
        nth: Number of the file operation of rank 0 before which the power is cut. 0 cuts at a random instant.
    """

    kind: str
    ranks: int
    keep: int
    nbytes: int
    syncs: bool
    nth: int = 0


def sh(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def mounted(image: Path, place: Path, options: str) -> Iterator[None]:
    """Mount the image; the kernel then replays its journal."""
    if not sh("mount", "-o", ",".join(filter(None, ("loop", options))), str(image), str(place)):
        raise OSError(f"{image} can't be mounted after the cut: the file system itself is damaged")
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while not sh("umount", str(place)):
            if time.monotonic() > deadline:
                raise OSError(f"{place} can't be unmounted")
            time.sleep(0.1)


def make(image: Path, filesystem: str) -> bool:
    """Create an image with a file system. Return whether this was possible."""
    with open(image, "wb") as file:
        file.truncate(320 << 20)
    force = "-F" if filesystem == "ext4" else "-f"
    return (
        os.geteuid() == 0
        and shutil.which(f"mkfs.{filesystem}") is not None
        and sh(f"mkfs.{filesystem}", "-q", force, str(image))
    )


def cut_power(image: Path, place: Path, filesystem: str) -> None:
    """Stop all I/O of the file system. For btrfs, copy the device for the next mount instead."""
    if filesystem == "btrfs":
        shutil.copy(image, image.with_suffix(".cut"))
        return
    fd = os.open(place, os.O_RDONLY)
    fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    os.close(fd)


# --- the job


def state(step: int, nbytes: int, mesh: Any = None) -> Any:
    """Return the state of `killed.state` plus small tensors of the requested total size."""
    made = killed.state(step, 0, mesh)
    for number in range(-(-nbytes // _PIECE)):
        value = torch.full((_PIECE // 4,), float(step))
        made.model.register_parameter(f"more{number}", torch.nn.Parameter(value))
    return made


def run(root: str, job: Job, rank: int, said: int, cut: Any) -> None:
    """Resume, and save until the storage is gone."""
    if job.kind == "bytes":
        step = max(check(root), default=0)
        _arm(job, rank, said, cut)
        while True:
            step += 1
            save(root, step, nbytes=job.nbytes)
            os.write(said, b"%d\n" % step)
            rotate(open_store(root), RetentionPolicy(max_num=job.keep))
    mesh = None
    if job.ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (job.ranks,))
    with CheckpointManager(root, retention=RetentionPolicy(max_num=job.keep), timeout_s=20) as manager:
        step = manager.latest() or 0
        _arm(job, rank, said, cut)
        while True:
            step += 1
            if job.kind == "save":
                manager.save(step, state(step, job.nbytes, mesh))
            else:
                manager.save_async(step, state(step, job.nbytes, mesh)).result()
            if rank == 0:
                os.write(said, b"%d\n" % step)


def _arm(job: Job, rank: int, said: int, cut: Any) -> None:
    left, write = job.nth, os.write

    def before(name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            cut()
            os.killpg(0, signal.SIGKILL)

    if rank == 0:
        write(said, _READY)
        if job.nth:
            crash.watch(before, lambda name, args: None)


def start(place: Path, job: Job, rendezvous: Path, cut: Any) -> tuple[list[int], Any]:
    """Fork the ranks of a job in a process group of their own; return their pids and the pipe with their output."""
    reader, writer = os.pipe()
    rendezvous.unlink(missing_ok=True)
    pids: list[int] = []
    for rank in range(job.ranks):
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, pids[0] if pids else 0)
                os.close(reader)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                if job.ranks > 1:
                    where = f"file://{rendezvous}"
                    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=job.ranks)
                if not job.syncs:
                    os.fsync = os.fdatasync = lambda fd: None
                run(str(place / "run"), job, rank, writer, cut)
            finally:
                os._exit(0)
        pids.append(pid)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pids[0])
    os.close(writer)
    return pids, open(reader, "rb")


def stop(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def power_cut(place: Path, job: Job, folder: Path, seconds: float, cut: Any) -> list[int]:
    """Let a job save for `seconds` or until it cuts the power; return the steps whose saves had returned."""
    pids, said = start(place, job, folder / "rendezvous", cut)
    lines = [said.readline()]
    if lines[0] == _READY and not job.nth:
        time.sleep(seconds)
    if job.nth:
        lines += said.readlines()  # until all ranks are dead
    else:
        stop(pids, signal.SIGSTOP)  # every save reported by now had returned by now
        cut()
    stop(pids, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    lines += said.readlines()
    said.close()
    if lines[0] != _READY:
        raise AssertionError("the job ended before it began")
    return [int(line) for line in lines[1:]]


# --- what is left of it


def listed(root: Path, job: Job) -> list[int]:
    """Return the committed steps; raise AssertionError if any differs from what was saved."""
    if job.kind == "bytes":
        return check(root)
    steps = killed.check_run(root, [])
    for step in steps:
        assert verify(f"{root}/step_{step:08d}").ok, f"step {step} is damaged"
        loaded = state(0, job.nbytes)
        with CheckpointManager(root) as manager:
            manager.load(loaded, step)
        killed.same_as_saved(loaded, step)
        more = [v for name, v in loaded.model.named_parameters() if name.startswith("more")]
        assert all(bool((value == step).all()) for value in more), f"step {step} has other numbers"
    return steps


def next_job(root: Path, job: Job, step: int) -> list[str]:
    """Run a fresh job that saves, and return what is left of dead jobs."""
    if job.kind == "bytes":
        save(root, step)
    else:
        with CheckpointManager(root) as manager:
            manager.save(step, state(step, job.nbytes))
    return leftovers(root)


def campaign(options: argparse.Namespace, folder: Path) -> tuple[int, int, list[str]]:
    """Cut the power repeatedly, each job resuming from what is left; return cuts, returned saves and failures."""
    image, place = folder / "image", folder / "mount"
    place.mkdir()
    if not make(image, options.filesystem):
        raise SystemExit(f"skipped: no {options.filesystem} image can be made here (root and mkfs are needed)")
    chance, bad, returned, saved, cuts = random.Random(options.seed), [], 0, 0, 0
    job = Job(options.job, options.ranks, options.keep, options.nbytes, not options.no_fsync)
    end = time.monotonic() + options.seconds

    def cut() -> None:
        cut_power(image, place, options.filesystem)

    while cuts < options.cuts and time.monotonic() < end:
        nth = 1 + options.seed + cuts * options.every if options.every else 0
        now = Job(job.kind, job.ranks, job.keep, job.nbytes, job.syncs, nth)
        with mounted(image, place, options.mount):
            steps = power_cut(place, now, folder, chance.uniform(0.0, options.span), cut)
        if options.filesystem == "btrfs":
            image.with_suffix(".cut").replace(image)
        cuts, saved, returned = cuts + 1, saved + len(steps), max([returned, *steps])
        with mounted(image, place, options.mount):
            root, newest = place / "run", 0
            try:
                there = listed(root, job)
                newest = max(there, default=0)
                if newest < returned:
                    bad.append(f"cut {cuts}: step {returned} had returned, {there} is listed")
            except Exception as error:
                bad.append(f"cut {cuts}: {type(error).__name__}: {error}")
                sh("rm", "-rf", str(root))
            if cuts % 10 == 0 or cuts == options.cuts:
                newest += 1
                bad += [f"left over after cut {cuts}: {name}" for name in next_job(root, job, newest)]
            returned = newest
    return cuts, saved, bad


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--filesystem", choices=["ext4", "xfs", "btrfs"], default="ext4")
    parser.add_argument("--mount", default="", help="mount options: data=journal")
    parser.add_argument("--job", choices=["bytes", "save", "async"], default="bytes")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks, for --job save and async")
    parser.add_argument("--keep", type=int, default=1)
    parser.add_argument("--nbytes", type=int, default=300_000)
    parser.add_argument("--span", type=float, default=0.3, help="maximum seconds that a job runs")
    parser.add_argument("--every", type=int, default=0, help="cut job i before its operation 1 + SEED + i * EVERY")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cut after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="directory for the image")
    parser.add_argument("--no-fsync", action="store_true", help="do not fsync: the control that must fail")
    options = parser.parse_args()
    staging.STARTING_S = -1.0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cuts, saved, bad = campaign(options, Path(folder))
    print(
        f"{options.filesystem} {options.mount} job={options.job} ranks={options.ranks} keep={options.keep} "
        f"nbytes={options.nbytes} every={options.every} seed={options.seed} fsync={not options.no_fsync}: "
        f"{cuts} cuts, {saved} saves returned, {len(bad)} bad",
        flush=True,
    )
    print("\n".join(bad[:20]))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
