"""Compare `CheckpointManager.save` and `load` with `dcp.save` and `dcp.load`: same ranks, same disk, one run.

    python -m benchmarks.save_load [--ranks 2 4] [--where /dev/shm /tmp] [--gigabytes 1] [--tensors 2000]
        [--uncached] [--device cuda] [--json FILE]

The kinds of states are: large (16 parameters), adamw (a transformers model with AdamW) and small (`--tensors` small
parameters). `bare` writes and reads the same bytes with plain calls.

Every figure is the best of `--repeat` runs. The time of a run is that of the slowest rank between two barriers, and its
CPU time is the sum over all ranks. Ratios are torch's time divided by ours: 2.0 means half the time.

Before each save of either side, every rank uses and frees as much memory as it will write, because a virtual machine
may have returned its memory to the host. `--cold` omits that. Loads from a disk read from the page cache; with
`--uncached` they read from the disk, as on a restarted machine. With `--device cuda` each rank has a GPU, and `bare`
copies through pinned memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.save_load.measure import rank_main
from tests.ranks import run_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--where", nargs="+", default=["/dev/shm", "/tmp"])
    parser.add_argument("--kinds", nargs="+", default=["large", "adamw", "small"], choices=["large", "adamw", "small"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument(
        "--cold", action="store_true", help="include the time in which a virtual machine gets memory from its host"
    )
    parser.add_argument("--uncached", action="store_true", help="load from the disk instead of the page cache")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for where in options.where:
        dd = dd_seconds(where, options.gigabytes, options.repeat)
        print(f"\n{where}  dd with fsync, {options.gigabytes} GiB: {dd:.3f} s")
        for ranks in options.ranks:
            for kind in options.kinds:
                root = f"{where}/ckptkit-benchmark"
                arguments = (kind, options.gigabytes, options.tensors, root)
                settings = (not options.no_sync, options.repeat, options.cold, options.device, options.uncached)
                found = run_ranks(rank_main, ranks, *arguments, *settings, timeout=1800, device=options.device)[0]
                rows.append({"where": where, "ranks": ranks, "kind": kind, "dd": dd, "best": found})
                show(rows[-1])
                shutil.rmtree(root, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def dd_seconds(where: str, gigabytes: float, repeat: int) -> float:
    """Return the seconds that `dd` takes to write as many bytes and fsync them: the lower bound of a save."""
    path = Path(where) / "ckptkit-benchmark.dd"
    best = float("inf")
    for _ in range(repeat):
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={int(gigabytes * 256)}", "conv=fsync"]
        before = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        best = min(best, time.perf_counter() - before)
        path.unlink()
    return best


def show(row: dict[str, Any]) -> None:
    """Print one table: seconds, CPU seconds, and torch's divided by ours."""
    print(f"\n{row['where']}  {row['ranks']} ranks  {row['kind']}")
    reference = row["best"]["dcp.save, dcp.load"]
    for name, phases in row["best"].items():
        cells = []
        for phase in ("save", "load"):
            seconds, cpu = phases[phase]
            wall, work = reference[phase][0] / seconds, reference[phase][1] / cpu
            cells.append(f"{phase} {seconds:7.3f} s (x{wall:5.2f})  cpu {cpu:7.3f} s (x{work:5.2f})")
        print(f"  {name:22s} {'   '.join(cells)}")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
