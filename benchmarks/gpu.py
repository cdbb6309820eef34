"""Print the tables of saves, loads, stalls and steps on one GPU, as `make gpu` does after the tests.

    python -m benchmarks.gpu [--where /dev/shm /tmp] [--gigabytes 1] [--repeat 3] [--device cuda]

Each table is a separate benchmark, run as a process with one rank. Without a device, all tables are reported as
skipped, and the exit code is 0. `--device cpu` runs the same code on the host.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def tables(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the `python` arguments that print each table, by the table's name."""
    kinds = ["large", "adamw", "small"] if importlib.util.find_spec("transformers") else ["large", "small"]
    size = ["--gigabytes", str(options.gigabytes), "--repeat", str(options.repeat), "--device", options.device]
    stall = ["-m", "benchmarks.save_load.stall", "--ranks", "1", "--where", options.where[0], *size]
    step = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "benchmarks/fsdp_step/bench.py"]
    saves = ["-m", "benchmarks.save_load", "--ranks", "1", "--where", *options.where, "--kinds", *kinds, *size]
    return {
        "saves and loads, beside torch DCP": saves,
        "stall of save_async, beside a clone on the device": [*stall, "--kind", "large"],
        "stall of save_async, a model of 500 small parameters": [*stall, "--kind", "model"],
        "a training step through FSDPStrategy, beside one by hand": [*step, "--rounds", str(10 * options.repeat)],
    }


def about(device: str) -> str:
    """Return the name of the device or machine."""
    if device == "cpu":
        name = platform.processor() or platform.machine()
    else:
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"{name}; {os.cpu_count()} CPU cores, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--where", nargs="+", default=["/dev/shm", "/tmp"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    there = options.device == "cpu" or torch.cuda.is_available()
    failed = []
    if there:
        print(about(options.device), flush=True)
    for name, command in tables(options).items():
        if not there:
            print(f"SKIPPED {name}: there is no CUDA device")
            continue
        print(f"\n== {name}", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if subprocess.run([sys.executable, *command], check=False, cwd=ROOT, env=environment).returncode:
            failed.append(name)
    for name in failed:
        print(f"FAILED {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
