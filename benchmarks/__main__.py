"""Measure the table of the README on this machine: `python -m benchmarks [--where /dev/shm /tmp] [--gigabytes 1]`.

Every row times a public call and its peer in the same run: saves, loads and stalls of a `CheckpointManager` on two
ranks, and `convert` and `reshard` as separate processes. It takes about ten minutes and needs transformers. The rows
of object stores need a server: see benchmarks/remote.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.convert import bench as convert
from benchmarks.reshard import bench as reshard

RANKS = 2


class Row(NamedTuple):
    """One row: a call, its time, the time of its peer, and the name of the peer."""

    call: str
    ours: str
    peer: str
    name: str


def saves_and_loads(where: str, gigabytes: float, repeat: int) -> Iterator[Row]:
    """Measure saves and loads of a transformers model with AdamW under FSDP2."""
    from benchmarks.save_load import measure
    from tests.ranks import run_ranks

    root = f"{where}/ckptkit-benchmark"
    arguments = ("adamw", gigabytes, 0, root, True, repeat, False, "cpu")
    found = run_ranks(measure.rank_main, RANKS, *arguments, timeout=1800)[0]
    shutil.rmtree(root, ignore_errors=True)
    ours, torch, bare = (found[name] for name in ("CheckpointManager", "dcp.save, dcp.load", "bare writes and reads"))
    for phase, note in (("save", "with fsync; plain writes"), ("load", "plain reads")):
        yield Row(
            f"`CheckpointManager.{phase}`, model and AdamW, {gigabytes:g} GiB, {RANKS} ranks, {where}",
            f"{ours[phase][0]:.2f} s",
            f"{torch[phase][0]:.2f} s",
            f"`dcp.{phase}`; {note}: {bare[phase][0]:.2f} s",
        )


def stalls(where: str, gigabytes: float, repeat: int) -> Iterator[Row]:
    """Measure how long training waits for `save_async`."""
    from benchmarks.save_load import stall
    from tests.ranks import run_ranks

    best: dict[str, list[float]] = {}
    for peer in ("clone", "ckptkit", "torch thread"):
        for _ in range(repeat):
            root = f"{where}/ckptkit-stall"
            found = run_ranks(stall.measure, RANKS, peer, gigabytes, 0, "large", root, 4, timeout=900)[0]
            shutil.rmtree(root, ignore_errors=True)
            best.setdefault(peer, []).append(min(found[1:]))
    ours, torch, clone = (min(best[peer]) for peer in ("ckptkit", "torch thread", "clone"))
    yield Row(
        f"`CheckpointManager.save_async`, {gigabytes:g} GiB, {RANKS} ranks, {where}: how long training waits, from the "
        "second save on",
        f"{ours:.3f} s",
        f"{torch:.3f} s",
        f"`dcp.async_save`; a clone of the state: {clone:.3f} s",
    )


def conversions(where: str, gigabytes: float, repeat: int) -> Iterator[Row]:
    """Measure `convert` to Hugging Face as a ratio to `cp -r`."""
    size, wanted = f"{2 * gigabytes:g}GiB", ["convert --no-check", "convert", "dcp_to_torch_save"]
    options = argparse.Namespace(
        size=size, ranks=4, where=where, dtype="bfloat16", small=False, peers=True, verl=None, only=wanted,
        only_memory=False, repeat=repeat,
    )  # fmt: skip
    root = Path(where, f"ckptkit-bench-{os.getpid()}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = convert.measure(root, options)["best"]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    cp = found["cp -r"]["wall_s"]
    times = {name: row["wall_s"] / cp for name, row in found.items()}
    yield Row(
        f"`convert` of a DCP from 4 ranks, {size}, to Hugging Face, {where}"
        + ("" if where == "/dev/shm" else ", until it is on the disk"),
        f"{times['convert']:.2f}",
        f"{times['dcp_to_torch_save']:.2f}",
        f"`dcp_to_torch_save`; 1 is `cp -r` ({cp:.2f} s). With `--no-check` {times['convert --no-check']:.2f}; peak "
        f"memory {found['convert']['peak'] / 1e6:.0f} MB",
    )


def resharding(where: str, gigabytes: float, repeat: int) -> Iterator[Row]:
    """Measure `reshard` as a ratio to `cp -r`."""
    wanted = ["cp -r", "rows", "columns and strided"]
    options = argparse.Namespace(size=f"{2 * gigabytes:g}GiB", ranks=4, where=where, repeat=repeat, only=wanted)
    root = Path(where, f"ckptkit-bench-{os.getpid()}")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = reshard.measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    cp = found["cp -r"][0]
    yield Row(
        f"`reshard` from 4 to 6 ranks, {2 * gigabytes:g} GiB, {where}",
        f"{found['rows'][0] / cp:.2f}",
        "1",
        f"`cp -r` ({cp:.2f} s). To 8 ranks with tensor parallelism of 2: {found['columns and strided'][0] / cp:.2f}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "--where", nargs="+", default=["/dev/shm", "/tmp"], help="one directory on each storage to measure"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print("| Call | ckptkit | Peer | Peer and conditions |\n|---|---|---|---|")
    # Conversions come first, because the memory of this process counts towards the peak of its children, and the other
    # tables make it import torch.
    for table in (conversions, resharding, saves_and_loads, stalls):
        # `cp` does not wait for the disk, so only peak memory is compared with `cp`.
        for where in options.where if table is not resharding else options.where[:1]:
            for row in table(where, options.gigabytes, options.repeat):
                print("| " + " | ".join(row) + " |", flush=True)
    step = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        "benchmarks/fsdp_step/bench.py",
    ]
    found = subprocess.run([sys.executable, *step], check=True, capture_output=True, text=True)
    print(found.stdout.splitlines()[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
