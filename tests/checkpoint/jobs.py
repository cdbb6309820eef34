"""Small training jobs whose values are all compared: model, masters, moments, scheduler, data, random numbers."""

import logging
import random
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit import TrainState
from ckptkit.fsdp import MasterWeightOptimizer
from tests import dtensors

# Two harmless warnings of torch: a read-only view, and two all-gathers where full_tensor needs two.
warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Net(nn.Module):
    """Uneven sizes, dropout, a persistent buffer, a frozen weight, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 2)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.frozen(x) + self.down(self.drop(torch.relu(self.up(x)))))


class Data:
    """A dataloader: each rank has its own numbers, and draws from three generators."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0

    def batch(self) -> torch.Tensor:
        self.position += 1
        noise = random.random() + float(np.random.rand())
        generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
        return torch.randn(4, 6, generator=generator) + noise + 0.1 * torch.randn(4, 6)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.rank = state["rank"]


@dataclass
class Job:
    model: nn.Module
    optimizer: Any
    scheduler: Any
    data: Data
    losses: list[float]

    def state(self, **more: Any) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            dataloader=self.data,
            extra={"losses": len(self.losses)},
            **more,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(self.data.batch()).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())


def data_rank(layout: str) -> int:
    """Return the rank that selects data and random numbers: equal within a tensor-parallel group."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank // 2 if layout == "tp" else rank


def seed(value: int, rank: int) -> None:
    random.seed(value + rank)
    np.random.seed(value + rank)
    torch.manual_seed(value + rank)


def shard(model: Net, layout: str, policy: MixedPrecisionPolicy) -> None:
    """Wrap a model and two of its layers for a layout, on all ranks. "plain": not at all."""
    if layout == "plain":
        return
    size = dist.get_world_size()
    dims = {
        "1d": {"shard": size},
        "hsdp": {"replicate": 2, "shard": size // 2},
        "replicated": {"replicate": size, "shard": 1},
        "tp": {"shard": size // 2, "tp": 2},
        "one-replica-tp": {"replicate": 1, "shard": size // 2, "tp": 2},
        "hsdp-tp": {"replicate": 2, "shard": 1, "tp": 2},
    }[layout]
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    if "tp" in dims:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh[tuple(name for name in dims if name != "tp")]
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def make(layout: str = "1d", precision: str = "fp32", start: int = 0, net: type[Net] = Net) -> Job:
    torch.manual_seed(start)
    model = net()
    policy = MixedPrecisionPolicy()
    if precision == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if precision == "master":
        model = model.to(torch.bfloat16)
        policy = MixedPrecisionPolicy(cast_forward_inputs=True, param_dtype=torch.bfloat16)
    shard(model, layout, policy)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    optimizer: Any = torch.optim.AdamW(groups, lr=0.05)
    if precision == "master":
        optimizer = MasterWeightOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    rank = data_rank(layout)
    seed(start, rank)
    return Job(model, optimizer, scheduler, Data(rank), [])


def whole(value: Any) -> Any:
    """Return tensors whole and bit by bit, anything else unchanged."""
    if isinstance(value, torch.Tensor):
        tensor = dtensors.whole(value).detach().clone().contiguous()
        return (str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return value


def numbers(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the weights, the states of the optimizer by parameter, and the settings of its groups."""
    found: dict[str, Any] = {f"model.{k}": whole(v) for k, v in model.state_dict().items()}
    names = {id(p): n for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{key}": whole(value) for key, value in state.items()}
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {**found, "groups": repr(settings)}


def everything(job: Job) -> dict[str, Any]:
    """Return every value of a job, comparable across processes and world sizes (except per-rank state)."""
    scheduler = {k: v for k, v in job.scheduler.state_dict().items() if k != "lr_lambdas"}
    return {**numbers(job.model, job.optimizer), "scheduler": repr(scheduler)}


def alone(job: Job) -> dict[str, Any]:
    """Return the per-rank state of each rank."""
    return {
        "data": job.data.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
