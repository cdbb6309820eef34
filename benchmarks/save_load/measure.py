"""Run one rank of the benchmark: create a state, save and load it with each contestant, and time it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Result = dict[str, tuple[float, float]]


def make_state(kind: str, gigabytes: float, tensors: int, device: str = "cpu") -> dict[str, Any]:
    """Return a few large tensors, or many small ones: DTensors sharded along dim 0."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    count = 16 if kind == "large" else tensors
    world = dist.get_world_size()
    rows = int(gigabytes * 2**30) // (4 * 1024 * count * world) if kind == "large" else 4
    columns = 1024 if kind == "large" else 16
    state = {}
    for i in range(count):
        local = torch.full((rows, columns), float(i + dist.get_rank()), device=device)
        state[f"layers.{i}.weight"] = DTensor.from_local(
            local, mesh, (Shard(0),), shape=torch.Size((rows * world, columns)), stride=(columns, 1), run_check=False
        )
    return {"model": state, "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]}}


def get_memory(nbytes: int) -> None:
    """Use and free as much memory as will be written, before either side writes.

    A virtual machine may return freed memory to its host within seconds, and gets it back at only 0.5 GB/s. Otherwise
    chance would decide which side pays for that.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1


def settle() -> None:
    """Wait for the queued GPU work of this process."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return (seconds of the slowest rank, CPU seconds of all ranks)."""
    settle()
    dist.barrier()
    before, cpu = time.perf_counter(), time.process_time()
    call()
    settle()
    spent = torch.tensor([time.perf_counter() - before, time.process_time() - cpu], dtype=torch.float64)
    slowest, total = spent[:1].clone(), spent[1:].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest), float(total)


class Job:
    """A model with or without an optimizer, and the state that torch's checkpoint functions take from it."""

    def __init__(self, kind: str, gigabytes: float, tensors: int, device: str) -> None:
        self.optimizer: torch.optim.Optimizer | None = None
        if kind == "adamw":
            self.model, self.optimizer = _llama(gigabytes, device)
        else:
            self.model = nn.Module()
            for i, tensor in enumerate(make_state(kind, gigabytes, tensors, device)["model"].values()):
                self.model.register_parameter(f"weight{i}", nn.Parameter(tensor))

    def torch_state(self) -> dict[str, Any]:
        """Return the state for `dcp.save` and `dcp.load`, as in torch's tutorial."""
        if self.optimizer is None:
            return {"model": self.model.state_dict()}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def accept(self, state: dict[str, Any]) -> None:
        """Apply the state that `dcp.load` has filled."""
        if self.optimizer is not None:
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )

    def local_tensors(self) -> list[torch.Tensor]:
        """Return the local tensors of the model and of the optimizer's state on this rank."""
        states = [] if self.optimizer is None else [v for s in self.optimizer.state.values() for v in s.values()]
        found = [tensor.detach() for tensor in [*self.model.parameters(), *states]]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]


def _llama(gigabytes: float, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a transformers model under FSDP2 after one step; weights and AdamW moments take `gigabytes`."""
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round((gigabytes * 2**30 / 12 - 2 * 4096 * 1024) / (1024 * 1024 * 12)))
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2731, num_hidden_layers=layers, num_attention_heads=8
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.arange(8, device=device).reshape(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Bench:
    """Save and load one job with the public calls of each contestant."""

    def __init__(self, job: Job, sync: bool) -> None:
        self.job = job
        self.sync = sync
        self.planner: Any = None

    @contextlib.contextmanager
    def torch_dcp(self, path: str) -> Any:
        def load() -> None:
            state = self.job.torch_state()
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))
            self.job.accept(state)

        writer = dcp.FileSystemWriter(path, sync_files=self.sync)
        yield lambda: dcp.save(self.job.torch_state(), storage_writer=writer), load

    @contextlib.contextmanager
    def writer_reader(self, path: str) -> Any:
        from ckptkit import DCPLoadPlanner, DCPReader, DCPSavePlanner, DCPWriter

        self.planner = self.planner or DCPSavePlanner()

        def load() -> None:
            state = self.job.torch_state()
            dcp.load(state, storage_reader=DCPReader(path), planner=DCPLoadPlanner())
            self.job.accept(state)

        writer = DCPWriter(path, sync=self.sync)
        yield lambda: dcp.save(self.job.torch_state(), storage_writer=writer, planner=self.planner), load

    @contextlib.contextmanager
    def manager(self, path: str) -> Any:
        from ckptkit import CheckpointManager, TrainState

        state = TrainState(model=self.job.model, optimizer=self.job.optimizer, rng=False)
        with CheckpointManager(path) as manager:
            yield lambda: manager.save(1, state), lambda: manager.load(state)

    @contextlib.contextmanager
    def bare(self, path: str) -> Any:
        """Write and read the same bytes with plain calls, one file per thread: the limit of the machine."""
        tensors = [tensor for tensor in self.job.local_tensors() if tensor.numel()]
        count = max(1, (os.cpu_count() or 1) // dist.get_world_size())
        files = [(Path(path, f"{dist.get_rank()}_{i}"), tensors[i::count]) for i in range(count)]

        def write(file: Path, tensors: list[torch.Tensor]) -> None:
            with file.open("wb", buffering=0) as target:
                for tensor in tensors:
                    view = memoryview(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy())
                    while view:
                        view = view[target.write(view) :]
                if self.sync:
                    os.fsync(target.fileno())

        def read(file: Path, tensors: list[torch.Tensor]) -> None:
            with file.open("rb", buffering=0) as source:
                for tensor in tensors:
                    there = tensor.device.type == "cpu"
                    host = tensor if there else torch.empty_like(tensor, device="cpu", pin_memory=True)
                    view = memoryview(host.view(-1).view(torch.uint8).numpy())
                    while view:
                        view = view[source.readinto(view) :]
                    if not there:
                        tensor.copy_(host)

        Path(path).mkdir(exist_ok=True)
        with ThreadPoolExecutor(count) as pool:

            def each(work: Callable[[Path, list[torch.Tensor]], None]) -> Callable[[], None]:
                return lambda: list(pool.map(work, *zip(*files, strict=True))) and None

            yield each(write), each(read)


PEERS = {
    "bare writes and reads": Bench.bare,
    "dcp.save, dcp.load": Bench.torch_dcp,
    "DCPWriter, DCPReader": Bench.writer_reader,
    "CheckpointManager": Bench.manager,
}


def fresh(root: str) -> str:
    """Return an empty directory for the next contestant."""
    path = f"{root}/c"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        Path(root).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return path


def leave_cache(path: str) -> None:
    """Remove the files below `path` from the page cache, so that the next load reads them from the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        for file in filter(Path.is_file, Path(path).rglob("*")):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def rank_main(
    kind: str,
    gigabytes: float,
    tensors: int,
    root: str,
    sync: bool,
    repeat: int,
    cold: bool,
    device: str,
    uncached: bool = False,
) -> dict[str, Result]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    bench = Bench(Job(kind, gigabytes, tensors, device), sync)
    nbytes = sum(tensor.nbytes for tensor in bench.job.local_tensors())
    best: dict[str, Result] = {name: {} for name in PEERS}
    for _ in range(repeat):
        for name, peer in PEERS.items():
            path = fresh(root)
            if not cold:
                get_memory(nbytes + nbytes // 8)
            with peer(bench, path) as (save, load):
                for phase, call in (("save", save), ("load", load)):
                    if uncached and phase == "load":
                        leave_cache(path)
                    found = timed(call)
                    known = best[name].get(phase, found)
                    best[name][phase] = (min(known[0], found[0]), min(known[1], found[1]))
    fresh(root)
    return best
