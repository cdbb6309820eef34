"""What one rank of the benchmark does: make a state, save and load it by each way, time it."""

from __future__ import annotations

import logging
import mmap
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit.checkpoint.coordinator import Coordinator

Result = dict[str, tuple[float, float]]


def make_state(kind: str, gigabytes: float, tensors: int) -> dict[str, Any]:
    """Few large tensors, or many small ones: DTensors cut along dim 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    count = 16 if kind == "large" else tensors
    world = dist.get_world_size()
    rows = int(gigabytes * 2**30) // (4 * 1024 * count * world) if kind == "large" else 4
    columns = 1024 if kind == "large" else 16
    state = {}
    for i in range(count):
        local = torch.full((rows, columns), float(i + dist.get_rank()))
        state[f"layers.{i}.weight"] = DTensor.from_local(
            local, mesh, (Shard(0),), shape=torch.Size((rows * world, columns)), stride=(columns, 1), run_check=False
        )
    return {"model": state, "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]}}


def get_memory(nbytes: int) -> None:
    """Have as much memory as is about to be written at hand, whoever writes: use it once, and free it.

    A virtual machine may give what it has freed back to its host, within seconds, and gets it again at 0.5 GB/s: that
    is the speed of neither contestant, and chance tells which of them it falls to.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """(seconds of the slowest rank, CPU seconds of all)."""
    dist.barrier()
    before, cpu = time.perf_counter(), time.process_time()
    call()
    spent = torch.tensor([time.perf_counter() - before, time.process_time() - cpu], dtype=torch.float64)
    slowest, total = spent[:1].clone(), spent[1:].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total)


class Bench:
    """One state, one directory; each peer saves to a fresh directory every time."""

    def __init__(self, state: dict[str, Any], root: str, sync: bool) -> None:
        self.state = state
        self.root = root
        self.sync = sync
        self.coordinator = Coordinator()
        self.plan: Any = None
        self.planner: Any = None

    def fresh(self, name: str) -> str:
        path = f"{self.root}/{name}"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def torch_save(self, path: str) -> None:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path, sync_files=self.sync))

    def torch_load(self, path: str) -> None:
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(path))

    def writer_save(self, path: str) -> None:
        from ckptkit import DCPWriter

        dcp.save(self.state, storage_writer=DCPWriter(path, sync=self.sync))

    def reader_load(self, path: str) -> None:
        from ckptkit import DCPReader

        dcp.load(self.state, storage_reader=DCPReader(path))

    def planned_save(self, path: str) -> None:
        from ckptkit import DCPSavePlanner, DCPWriter

        self.planner = self.planner or DCPSavePlanner()
        dcp.save(self.state, storage_writer=DCPWriter(path, sync=self.sync), planner=self.planner)

    def planned_load(self, path: str) -> None:
        from ckptkit import DCPLoadPlanner, DCPReader

        dcp.load(self.state, storage_reader=DCPReader(path), planner=DCPLoadPlanner())

    def sharded_save(self, path: str) -> None:
        from ckptkit.formats.dcp_write import write_sharded
        from ckptkit.storage import open_store

        ranks = self.coordinator  # as the manager has its ranks talk

        def all_gather(data: bytes) -> list[bytes]:
            return ranks.broadcast(ranks.gather(data))

        _, self.plan = write_sharded(
            self.state,
            open_store(path),
            gather=ranks.gather,
            all_gather=all_gather,
            rank=ranks.rank,
            world_size=ranks.world_size,
            previous=self.plan,
            sync=self.sync,
        )
        ranks.barrier()

    def sharded_load(self, path: str) -> None:
        from ckptkit.formats.ckptkit import open_manifest
        from ckptkit.formats.dcp_read import read_sharded
        from ckptkit.storage import open_store

        store = open_store(path)
        catalog = open_manifest(store)
        assert catalog is not None
        read_sharded(catalog, store, self.state)


PEERS = {
    "torch dcp": ("torch_save", "torch_load"),
    "DCPWriter/Reader": ("writer_save", "reader_load"),
    "the same, planners": ("planned_save", "planned_load"),
    "write/read_sharded": ("sharded_save", "sharded_load"),
}


def rank_main(
    kind: str, gigabytes: float, tensors: int, root: str, sync: bool, repeat: int, cold: bool
) -> dict[str, Result]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    bench = Bench(make_state(kind, gigabytes, tensors), root, sync)
    nbytes = sum(tensor.to_local().nbytes for tensor in bench.state["model"].values())
    best: dict[str, Result] = {name: {} for name in PEERS}
    for _ in range(repeat):
        for name, (save, load) in PEERS.items():
            path = bench.fresh("c")
            if not cold:
                get_memory(nbytes + nbytes // 8)
            for phase, method in (("save", save), ("load", load)):
                found = timed(lambda method=method, path=path: getattr(bench, method)(path))
                known = best[name].get(phase, found)
                best[name][phase] = (min(known[0], found[0]), min(known[1], found[1]))
    bench.fresh("c")
    return best
