"""Compare `reshard` with `cp -r` on the same bytes in one run; print ratios.

    python -m benchmarks.reshard.bench [--size 1GB] [--ranks 4] [--where /dev/shm] [--repeat 5]

Every command runs in a fresh process, and its time includes the start of Python. The source is a SHARDED checkpoint of
ckptkit in bf16 with the shapes of a llama and one digest per slice. The best time of each command counts. All files are
deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.convert.bench import environment, make_model
from ckptkit.units import parse_size

RUN = "from ckptkit import reshard; reshard({src!r}, {dst!r}, {options})"
PLAN = '"*.q_proj.weight": 0, "*.k_proj.weight": 0, "*.up_proj.weight": 1'


def commands(source: Path, out: Path, ranks: int) -> dict[str, list[str]]:
    def ours(options: str) -> list[str]:
        return [sys.executable, "-c", RUN.format(src=str(source), dst=str(out), options=options)]

    more = f"world_size={ranks + 2}"
    split = f"world_size={2 * ranks}, mesh={{'tp': 2}}, tp_plan={{{PLAN}}}"
    return {
        "cp -r": ["cp", "-r", str(source), str(out)],
        "rows --no-check": ours(f"{more}, check=False"),
        "rows": ours(more),
        "rows --verify": ours(f"{more}, verify=True"),
        "rows --type local --no-check": ours(f"{more}, type='local', check=False"),
        "rows --type local": ours(f"{more}, type='local'"),
        "columns and strided --no-check": ours(f"{split}, check=False"),
        "columns and strided": ours(split),
    }


def timed(command: list[str], clean: Path) -> tuple[float, float, int]:
    """Run a fresh process and return (wall seconds, CPU seconds, peak resident bytes)."""
    shutil.rmtree(clean, ignore_errors=True)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} failed with {status}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", metavar="NAME", action="append", help="run only this command (repeatable)")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:  # in a separate process: the memory of this one would count towards the peak of its children
        make_model(options.make, parse_size(options.size), "bfloat16", False)
        return
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(root: Path, options: argparse.Namespace) -> dict[str, tuple[float, float, int]]:
    """Return the best wall seconds, CPU seconds and peak memory of each command."""
    model, source, out = root / "hf", root / "run" / "step_00000001", root / "new" / "step_00000001"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.reshard.bench", "--size", options.size, "--make", str(model)], check=True
    )
    make = RUN.format(src=str(model), dst=str(source), options=f"world_size={options.ranks}")
    subprocess.run([sys.executable, "-c", make], check=True)
    shutil.rmtree(model)
    out.parent.mkdir()
    total = sum(file.stat().st_size for file in source.iterdir())
    best: dict[str, tuple[float, float, int]] = {}
    for turn in range(-1, options.repeat):  # the commands take turns, so that other load affects all of them
        for name, command in commands(source, out, options.ranks).items():
            if options.only and name not in options.only:
                continue
            found = timed(command, out)
            if turn < 0:  # the first turn compiles the modules that a command imports
                continue
            before = best.get(name, (float("inf"), float("inf"), 0))
            best[name] = (min(before[0], found[0]), min(before[1], found[1]), max(before[2], found[2]))
    cp = best["cp -r"]
    print(f"{total / 1e9:.2f} GB bfloat16, llama shapes, {options.ranks} ranks, {options.where}")
    for name, (wall, cpu, peak) in best.items():
        ratio = f"{wall / cp[0]:5.2f} x cp  cpu {cpu:5.2f} s = {cpu / cp[1]:5.2f} x"
        print(f"  {name:32s} {wall:6.2f} s  {ratio}  peak {peak / 1e6:6.0f} MB", flush=True)
    return best


if __name__ == "__main__":
    main()
