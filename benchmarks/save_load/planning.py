"""Planning simulated for many ranks with torch's fake process group: seconds, and bytes each rank exchanges.

    python -m benchmarks.save_load.planning [--ranks 64 1024 8192] [--tensors 300] [--torch-up-to 64]

One process plays rank 1 for what every rank does, and rank 0 for what it does with the parts of all: those of the other
ranks are copies of rank 1's, shifted to their place. Nothing but the index is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptkit.formats.dcp.index import write_index
from ckptkit.formats.dcp.plan import plan_sharded
from ckptkit.formats.own.columns import pack, unpack
from ckptkit.storage.local import LocalStore


def state_of(world: int, tensors: int) -> dict[str, Any]:
    """DTensors with 4 rows of 16 on each rank."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    shape, stride = torch.Size((4 * world, 16)), (16, 1)
    state: dict[str, Any] = {}
    for i in range(tensors):
        local = torch.zeros(4, 16)
        state[f"model.layers.{i}.self_attn.q_proj.weight"] = DTensor.from_local(
            local, mesh, (Shard(0),), shape=shape, stride=stride, run_check=False
        )
    return state


def seconds(call: Any) -> tuple[float, Any]:
    before = time.perf_counter()
    value = call()
    return time.perf_counter() - before, value


def shifted(part: bytes, rank: int, table: bytes) -> bytes:
    """Rank 1's part as rank `rank` would send it; rank 0's has the table of keys."""
    columns = unpack(part, file="part")
    arrays = dict(columns.arrays)
    box = arrays["box"].reshape(-1, 4).copy()  # offsets and sizes of 2 dimensions
    box[:, 0] = 4 * rank
    arrays["box"] = box.reshape(-1)
    header = dict(columns.header)
    path = f"__{rank}_0.distcp"
    header.update(rank=rank, files={path: next(iter(header["files"].values()))})
    arrays["paths"] = np.frombuffer(path.encode(), np.uint8)
    arrays["paths.ends"] = np.array([len(path)], np.int64)
    if rank == 0:
        arrays["table"] = np.frombuffer(table, np.uint8)
    return pack(arrays, header)


def ours(world: int, state: dict[str, Any], directory: str) -> dict[str, float]:
    """What `plan_sharded`, `settle`, `write_part` and `write_index` do and exchange."""

    def gathered(data: bytes) -> list[bytes]:
        return [data] * world

    first, plan = seconds(lambda: plan_sharded(state, rank=1, world_size=world))
    plan = plan.settle(gathered(plan.signature), gathered)
    again, plan = seconds(lambda: plan_sharded(state, rank=1, world_size=world, previous=plan))
    store = LocalStore(f"{directory}/{world}")
    part = plan.write(store, sync=False).part
    parts = [shifted(part, rank, plan.table) for rank in range(world)]
    index, _ = seconds(lambda: write_index(parts, store, sync=False))
    return {
        "plan_s": first,
        "replan_s": again,
        "sent_per_rank": float(len(plan.signature) + len(part)),
        "received_per_rank": float(world * len(plan.signature)),
        "rank0_received": float(sum(map(len, parts))),
        "global_plan_s": index,
        "slices": float(world * len(plan.slices)),
    }


def theirs(world: int, state: dict[str, Any], *, global_plan: bool) -> dict[str, float]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    local, plan = seconds(planner.create_local_plan)
    sent = len(pickle.dumps(plan))
    found = {"plan_s": local, "sent_per_rank": float(sent), "rank0_received": float(sent * world)}
    if global_plan:
        plans = []
        for rank in range(world):
            items = []
            for item in plan.items:
                offsets = torch.Size([4 * rank, 0])
                chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offsets)
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = dataclasses.replace(item.index, offset=offsets)
                items.append(dataclasses.replace(item, index=index, tensor_data=data))
            plans.append(dataclasses.replace(plan, items=items))
        spent, (new_plans, metadata) = seconds(lambda: planner.create_global_plan(plans))
        found["global_plan_s"] = spent
        found["received_per_rank"] = float(len(pickle.dumps(new_plans[1])) + len(pickle.dumps(metadata)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load.planning", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--torch-up-to", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for world in options.ranks:
            dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
            state = state_of(world, options.tensors)
            for name, found in (
                ("ckptkit", ours(world, state, directory)),
                ("torch", theirs(world, state, global_plan=world <= options.torch_up_to)),
            ):
                cells = [f"{k} {v:.4f}" if k.endswith("_s") else f"{k} {v:,.0f}" for k, v in found.items()]
                print(f"{world:5d} ranks  {name:8s} {'  '.join(cells)}", flush=True)
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
