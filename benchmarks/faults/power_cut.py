"""Cut the power of a real file system while checkpoints are saved and rotated, replay its journal, check what is left.

python -m benchmarks.faults.power_cut --cuts 100 --filesystem ext4     (root only; a loop-mounted image)

The shutdown ioctl without flushing the log (what xfstests' godown does) stops all I/O at once: what was not
made durable is gone, as after a power cut. A save that had returned must be there, whole.
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
from pathlib import Path

from ckptkit.checkpoint.delete import rotate
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.storage import staging
from ckptkit.storage.store import open_store
from tests.checkpoint.saving import check, leftovers, save

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
_NO_LOG_FLUSH = 2


def sh(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def mounted(image: Path, place: Path) -> Iterator[None]:
    """Mount the image; its journal is replayed by the kernel here."""
    if not sh("mount", "-o", "loop", str(image), str(place)):
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
    with open(image, "wb") as file:
        file.truncate(320 << 20)
    options = ["-q", "-F"] if filesystem == "ext4" else ["-q", "-f"]
    return (
        os.geteuid() == 0
        and shutil.which(f"mkfs.{filesystem}") is not None
        and sh(f"mkfs.{filesystem}", *options, str(image))
    )


def run(root: str, keep: int, nbytes: int, said: int) -> None:
    """Go on from what is there, and save until the storage is gone."""
    step = max(check(root), default=0)
    while True:
        step += 1
        save(root, step, nbytes=nbytes)
        os.write(said, b"%d\n" % step)
        rotate(open_store(root), RetentionPolicy(max_num=keep))


def cut(place: Path, keep: int, nbytes: int, seconds: float, syncs: bool) -> list[int]:
    """Let a job save for `seconds`, cut the power, and return the steps whose saves had returned."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if not syncs:
            os.fsync = lambda fd: None  # the negative control: without fsync this must go wrong
        try:
            run(str(place / "run"), keep, nbytes, writer)
        finally:
            os._exit(0)
    os.close(writer)
    time.sleep(seconds)
    fd = os.open(place, os.O_RDONLY)
    os.kill(pid, signal.SIGSTOP)  # what it had said by now had returned by now
    fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    os.close(fd)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(reader, "rb") as said:
        return [int(line) for line in said.read().split()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--filesystem", choices=["ext4", "xfs"], default="ext4")
    parser.add_argument("--keep", type=int, default=1)
    parser.add_argument("--nbytes", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-fsync", action="store_true", help="the negative control")
    options = parser.parse_args()
    staging.STARTING_S = -1.0
    chance = random.Random(options.seed)
    bad: list[str] = []
    returned = saved = 0
    with tempfile.TemporaryDirectory() as folder:
        image, place = Path(folder) / "image", Path(folder) / "mount"
        place.mkdir()
        if not make(image, options.filesystem):
            print(f"skipped: a {options.filesystem} image can't be made and mounted here (root and mkfs are needed)")
            return
        for number in range(options.cuts):
            with mounted(image, place):
                steps = cut(place, options.keep, options.nbytes, chance.uniform(0.02, 0.5), not options.no_fsync)
            saved += len(steps)
            returned = max([returned, *steps])
            with mounted(image, place):
                try:
                    listed = check(place / "run")
                    if returned and (not listed or listed[-1] < returned):
                        bad.append(f"cut {number}: step {returned} had returned, {listed} is listed")
                        returned = max(listed, default=0)
                except AssertionError as error:
                    bad.append(f"cut {number}: {error}")
                    sh("rm", "-rf", str(place / "run"))
                    returned = 0
        with mounted(image, place):
            save(place / "run", returned + 1000)
            bad += [f"left over: {name}" for name in leftovers(place / "run")]
    print(
        f"{options.filesystem} keep={options.keep} nbytes={options.nbytes} fsync={not options.no_fsync}: "
        f"{options.cuts} cuts, {saved} saves returned, {len(bad)} bad"
    )
    print("\n".join(bad[:20]))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
