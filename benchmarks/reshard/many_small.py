"""Time `reshard` and `diff` of many small tensors: python -m benchmarks.reshard.many_small [--tensors 300000].

The source is a safetensors file of fp32 tensors of 32 bytes. Every command runs in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from benchmarks.convert.bench import timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=300_000)
    parser.add_argument("--where", default="/dev/shm")
    options = parser.parse_args()
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        make(root / "in", options.tensors)
        run = [sys.executable, "-m", "ckptkit"]
        source, out = str(root / "in"), str(root / "out")
        for command in (["reshard", source, out, "--world-size", "2"], ["diff", source, out]):
            wall, cpu, peak = timed([*run, *command], clean=root / "nothing", sync=False)
            print(f"{command[0]:8s} {wall:6.2f} s  cpu {cpu:6.2f} s  peak {peak / 1e6:6.0f} MB", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def make(source: Path, count: int) -> None:
    source.mkdir(parents=True)
    header = {
        f"model.layers.{i // 100}.block.{i % 100}.weight": {
            "dtype": "F32",
            "shape": [4, 2],
            "data_offsets": [32 * i, 32 * i + 32],
        }
        for i in range(count)
    }
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    (source / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + b"\0\0\x80?" * (8 * count))


if __name__ == "__main__":
    main()
