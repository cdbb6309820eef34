"""Opening the description of a checkpoint of very many slices: seconds and memory, in a process that does nothing else.

    python -m benchmarks.save_load.million [--slices 1000000] [--tensors 300] [--repeat 3] [--torch]

The manifest is what `write_index` makes of the parts of as many ranks as it takes; no data files are written. Memory is
the growth of the resident set's peak. `--torch` lets torch's own reader open the `.metadata` beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

_OPEN = """
import json, sys, time
from ckptkit.formats.own.reader import open_manifest
from ckptkit.storage import open_store
import numpy
def peak():  # not ru_maxrss, which a process takes over from the one that started it
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before, started = peak(), time.perf_counter()
catalog = open_manifest(open_store(sys.argv[1]))
seconds = time.perf_counter() - started
slices = sum(len(entry.slices.offsets) for entry in catalog.tensors.values())
print(json.dumps({"seconds": seconds, "bytes": peak() - before, "slices": slices}))
"""
_OPEN_TORCH = """
import json, sys, time
import torch.distributed.checkpoint as dcp
def peak():  # not ru_maxrss, which a process takes over from the one that started it
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before, started = peak(), time.perf_counter()
metadata = dcp.FileSystemReader(sys.argv[1]).read_metadata()
seconds = time.perf_counter() - started
slices = sum(len(getattr(item, "chunks", ())) for item in metadata.state_dict_metadata.values())
print(json.dumps({"seconds": seconds, "bytes": peak() - before, "slices": slices}))
"""


def describe(directory: str, slices: int, tensors: int) -> float:
    """Write manifest and `.metadata`; return the seconds that took."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.save_load.planning import shifted, state_of
    from ckptkit.formats.dcp.index import write_index
    from ckptkit.formats.dcp.plan import plan_sharded
    from ckptkit.storage.local import LocalStore

    world = -(-slices // tensors)
    dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
    plan = plan_sharded(state_of(world, tensors), rank=1, world_size=world)
    store = LocalStore(directory)
    part = plan.write(store, sync=False).part
    parts = [shifted(part, rank, plan.table) for rank in range(world)]
    started = time.perf_counter()
    write_index(parts, store, sync=False)
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    return seconds


def opened(code: str, directory: str, repeat: int) -> dict[str, Any]:
    """Return the best of several runs, each in a process of its own."""
    runs = []
    for _ in range(repeat):
        done = subprocess.run([sys.executable, "-c", code, directory], check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout))
    return min(runs, key=lambda run: run["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load.million", description=__doc__)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        written = describe(directory, options.slices, options.tensors)
        found = {"ckptkit": opened(_OPEN, directory, options.repeat)}
        if options.torch:
            found["torch"] = opened(_OPEN_TORCH, directory, 1)
    print(json.dumps({"write_s": written, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
