"""Plan a save, write its index and open it for very many ranks: ckptkit and torch DCP.

    python -m benchmarks.save_load.scale [--cases 2816:300 16384:300 16384:60] [--torch-up-to 1000000]

torch's fake process group simulates the ranks. One process acts as rank 1 for the work of every rank, and as rank 0
for the work on the parts of all ranks, which are shifted copies of rank 1's. No data files are written. Each row runs
in a new process. Seconds are CPU time, so that other processes on the machine hardly affect them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROWS = 4  # per tensor and rank
COLUMNS = 16


def peak() -> int:
    """Return the peak memory of this process in bytes. Not ru_maxrss, which a forked process inherits."""
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    value = call()
    return time.process_time() - before, value


def state_of(world: int, tensors: int, *, rows: int = 0) -> dict[str, Any]:
    """Return rank 1's DTensors, sharded by rows. `rows`: rows of a whole tensor, default `ROWS` per rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    shape, stride = torch.Size((rows or ROWS * world, COLUMNS)), (COLUMNS, 1)
    each = -(-shape[0] // world)
    state: dict[str, Any] = {}
    for i in range(tensors):
        local = torch.zeros(each, COLUMNS)
        state[f"model.layers.{i}.self_attn.q_proj.weight"] = DTensor.from_local(
            local, mesh, (Shard(0),), shape=shape, stride=stride, run_check=False
        )
    return state


def shifted(part: Any, rank: int, table: bytes) -> Any:
    """Return rank 1's part as rank `rank` would send it; rank 0's includes the table of keys."""
    boxes = part.boxes.reshape(-1, 4).copy()  # offsets and sizes of 2 dimensions
    boxes[:, 0] = ROWS * rank
    path, (record,) = f"__{rank}_0.distcp", part.written.files.values()
    written = dataclasses.replace(part.written, paths=[path], files={path: record})
    return dataclasses.replace(part, written=written, boxes=boxes.reshape(-1), table=table if rank == 0 else None)


def save_ours(directory: str, world: int, tensors: int) -> dict[str, float]:
    """Run the steps of `CheckpointManager.save` between the capture of the state and the commit."""
    from ckptkit.formats.dcp.index import write_index
    from ckptkit.formats.dcp.plan import plan_sharded
    from ckptkit.storage.local import LocalStore

    def gathered(data: bytes) -> list[bytes]:
        return [data] * world

    state, store = state_of(world, tensors), LocalStore(directory)
    spent, plan = timed(lambda: plan_sharded(state, rank=1, world_size=world))
    plan = plan.settle(gathered(plan.signature), gathered)
    part = plan.write(store, sync=False)
    parts = [shifted(part, rank, plan.table) for rank in range(world)]
    index, _ = timed(lambda: write_index(parts, store, sync=False))
    return {
        "plan": spent,
        "sent": len(plan.signature) + len(pickle.dumps(part)),
        "rank0": sum(len(pickle.dumps(part)) for part in parts),
        "index": index,
        "peak": peak(),
    }


def save_torch(directory: str, world: int, tensors: int) -> dict[str, float]:
    """Run the steps of `dcp.save`, with torch's planner and writer."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    planner = DefaultSavePlanner()
    planner.set_up_planner(state_of(world, tensors), is_coordinator=True)
    spent, plan = timed(planner.create_local_plan)
    sent = len(pickle.dumps(plan))
    plans = []
    for rank in range(world):
        items = []
        for item in plan.items:
            offsets = torch.Size([ROWS * rank, 0])
            chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offsets)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(
                dataclasses.replace(item, index=dataclasses.replace(item.index, offset=offsets), tensor_data=data)
            )
        plans.append(dataclasses.replace(plan, items=items))
    writer = FileSystemWriter(directory)
    writer.set_up_storage_writer(True)

    def index() -> Any:
        new_plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(new_plans), metadata

    first, (new_plans, metadata) = timed(index)
    nbytes = ROWS * COLUMNS * 4
    results = [
        [
            WriteResult(item.index, nbytes, _StorageInfo(f"__{rank}_0.distcp", i * nbytes, nbytes))
            for i, item in enumerate(new_plan.items)
        ]
        for rank, new_plan in enumerate(new_plans)
    ]
    sent += len(pickle.dumps(results[1]))
    second, _ = timed(lambda: writer.finish(metadata, results))
    return {
        "plan": spent,
        "sent": sent,
        "rank0": sent * world,
        "index": first + second,
        "peak": peak(),
    }


def open_ours(directory: str, world: int, tensors: int) -> dict[str, float]:
    """Open the index, and plan the load of rank 1 at three quarters of the world size, as the manager does."""
    from ckptkit.catalog.box import Box
    from ckptkit.formats.dcp.fill import Filler
    from ckptkit.formats.own.reader import open_manifest
    from ckptkit.storage import open_store

    store, before = open_store(directory), peak()
    spent, catalog = timed(lambda: open_manifest(store))
    held = peak() - before
    filler, state = Filler(store), state_of(world * 3 // 4, tensors, rows=ROWS * world)

    def plan() -> None:
        for name, value in state.items():
            local = value.to_local()
            filler.add(catalog.tensors[name], Box((len(local), 0), tuple(local.shape)), local)
        filler.plan()

    load, _ = timed(plan)
    slices = sum(len(entry.slices.offsets) for entry in catalog.tensors.values())
    return {"open": spent, "held": held, "slices": slices, "load": load}


def open_torch(directory: str, world: int, tensors: int) -> dict[str, float]:
    """Do the same as `open_ours` with `dcp.load`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    before = peak()
    spent, metadata = timed(lambda: dcp.FileSystemReader(directory).read_metadata())
    held = peak() - before
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state_of(world * 3 // 4, tensors, rows=ROWS * world), metadata, False)
    load, _ = timed(planner.create_local_plan)
    slices = sum(len(getattr(item, "chunks", ())) for item in metadata.state_dict_metadata.values())
    return {"open": spent, "held": held, "slices": slices, "load": load}


HEADS = (
    "ranks",
    "slices",
    "",
    "plan of a save, each rank",
    "it sends",
    "rank 0 receives",
    "rank 0 writes the index",
    "its peak memory",
    "index files",
    "opening them, each rank",
    "memory for it",
    "plan of a load, each rank",
)
CASES = ("2816:300", "16384:300", "16384:60")
"""Ranks and tensors: the rows of docs/planning-at-scale.md."""
PARTS = {function.__name__: function for function in (save_ours, open_ours, save_torch, open_torch)}


def run(name: str, directory: str, world: int, tensors: int) -> dict[str, float]:
    """Measure one of `PARTS` in a separate process."""
    command = [sys.executable, "-m", "benchmarks.save_load.scale", "--part", name, directory, str(world), str(tensors)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(who: str, world: int, tensors: int) -> dict[str, float]:
    """Return the figures of one side, "ours" or "torch"."""
    with tempfile.TemporaryDirectory() as directory:
        found = run(f"save_{who}", directory, world, tensors)
        names = (".metadata", "manifest.safetensors") if who == "ours" else (".metadata",)
        found["file"] = sum(os.path.getsize(os.path.join(directory, name)) for name in names)
        return {**found, **run(f"open_{who}", directory, world, tensors)}


def size(nbytes: float) -> str:
    return (
        f"{nbytes / 1e3:,.0f} kB"
        if nbytes < 1e6
        else f"{nbytes / 1e6:,.1f} MB"
        if nbytes < 1e9
        else f"{nbytes / 1e9:.2f} GB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load.scale", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="RANKS:TENSORS")
    parser.add_argument(
        "--torch-up-to", type=int, default=1_000_000, help="most slices for torch, which needs 3 kB for each"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, directory, world, tensors = options.part
        print(json.dumps(PARTS[name](directory, int(world), int(tensors))))
        return 0
    if not options.json:
        print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|")
    for world, tensors in (map(int, case.split(":")) for case in options.cases):
        for who in ("ours", "torch"):
            if who == "torch" and world * tensors > options.torch_up_to:
                continue
            found = measured(who, world, tensors)
            if options.json:
                print(json.dumps({"ranks": world, "tensors": tensors, "who": who, **found}), flush=True)
                continue
            cells = [f"{world:,}", f"{found['slices']:,.0f}", "ckptkit" if who == "ours" else who]
            cells += [
                f"{1e3 * found['plan']:.1f} ms",
                size(found["sent"]),
                size(found["rank0"]),
            ]
            cells += [f"{found['index']:.2f} s", size(found["peak"]), size(found["file"])]
            cells += [f"{found['open']:.2f} s", size(found["held"]), f"{found['load']:.2f} s"]
            print("| " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
