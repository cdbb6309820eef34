"""The work of ranks in the reshard tests: save a job, load it elsewhere, count the bytes read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.fsdp.master_weights import MasterWeightOptimizer
from tests.checkpoint import jobs

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def save(url: str, layout: str, types: tuple[str, ...], precision: str = "fp32") -> dict[str, Any]:
    """Train two steps and save step 2 below <url>/<type> for each type; return every value."""
    job = jobs.make(layout, precision)
    jobs.seed(7, jobs.data_rank(layout))
    job.train(2)
    for kind in types:
        with CheckpointManager(f"{url}/{kind}", state_dict_type=kind) as manager:
            manager.save(2, job.state(), metrics={"loss": 0.5}, client_state={"seen": 3})
    return jobs.everything(job)


def load(url: str, layout: str, precision: str = "fp32") -> dict[str, Any]:
    """Load a checkpoint into a fresh job; return every value."""
    job = jobs.make(layout, precision, start=99)
    with CheckpointManager(str(Path(url).parent)) as manager:
        manager.load(job.state(), url, per_rank_on_resize="keep")
    return jobs.everything(job)


class Wide(nn.Module):
    """Large enough that data dominate headers; 301 rows are uneven for any world size."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4096, 302)
        self.down = nn.Linear(302, 4096)
        self.head = nn.Linear(4096, 301)


def _wide(layout: str) -> tuple[nn.Module, Any]:
    model = Wide()
    jobs.shard(model, layout, MixedPrecisionPolicy())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save_wide(url: str, layout: str) -> None:
    torch.manual_seed(0)
    model, optimizer = _wide(layout)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with CheckpointManager(url) as manager:
        manager.save(1, TrainState(model=model, optimizer=optimizer, rng=False))


def _read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _local_nbytes(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def count_reads(url: str, layout: str) -> dict[str, tuple[int, int]]:
    """Return (bytes read, bytes needed) of a load by our manager, and by plain torch DCP of the model only."""
    model, optimizer = _wide(layout)
    found = {}
    with CheckpointManager(str(Path(url).parent)) as manager:
        state = TrainState(model=model, optimizer=optimizer, rng=False)
        for _ in range(2):  # the first load also imports
            before = _read_bytes()
            manager.load(state, url)
            read = _read_bytes() - before
    needed = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    found["manager"] = (read, _local_nbytes(needed))
    for _ in range(2):
        tensors = get_model_state_dict(model)
        before = _read_bytes()
        dcp.load({"model": tensors}, checkpoint_id=url)
        read = _read_bytes() - before
    found["dcp"] = (read, _local_nbytes(tensors.values()))
    return found


class Bare(nn.Module):
    """Parameters of any names and shapes, without a forward."""

    def __init__(self, shapes: Shapes, tied: dict[str, str], buffers: list[str]) -> None:
        super().__init__()
        made: dict[str, nn.Parameter] = {}
        for name, (dtype, shape) in shapes.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            value = torch.zeros(shape, dtype=getattr(torch, dtype))
            if name in buffers:
                owner.register_buffer(last, value)
                continue
            made[name] = made[tied[name]] if name in tied else nn.Parameter(value)
            owner.register_parameter(last, made[name])


def go_on(
    url: str, shapes: Shapes, tied: dict[str, str], buffers: list[str], groups: list[list[str]], masters: bool = False
) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[str]]:
    """Load a checkpoint strictly into a sharded model with AdamW, return its values, then train a step.

    Returns model tensors, optimizer tensors by "<fqn>.<state>", the settings of the groups, and the loaded names.
    """
    model = Bare(shapes, tied, buffers)
    ignored = {p for p in model.parameters() if p.ndim == 0}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    named = dict(model.named_parameters())
    optimizer: Any = torch.optim.AdamW([{"params": [named[fqn] for fqn in group]} for group in groups], lr=123.0)
    if masters:
        optimizer = MasterWeightOptimizer(optimizer)
    with CheckpointManager(str(Path(url).parent)) as manager:
        report = manager.load(TrainState(model=model, optimizer=optimizer, rng=False), url)
    names = {id(p): n for n, p in named.items()}
    weights = {n: _full(t) for n, t in model.state_dict().items()}
    states = {f"{names[id(p)]}.{k}": _full(v) for p, state in optimizer.state.items() for k, v in state.items()}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return weights, states, settings, list(report.loaded)


def _full(tensor: torch.Tensor) -> Any:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
