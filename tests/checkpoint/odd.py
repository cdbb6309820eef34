"""A model with unusual parameters and buffers, two optimizers, and the meshes to shard it over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit.fsdp.master_weights import MasterWeightOptimizer
from tests.checkpoint import jobs


class Adapted(nn.Module):
    """A frozen layer and adapters of rank 1: shards that are empty on most ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.lora_A = nn.Linear(6, 1, bias=False)
        self.lora_B = nn.Linear(1, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Odd(nn.Module):
    """Tied, frozen, adapted, unused, scalar and 3-D parameters, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.adapted = Adapted()
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.ones(1))
        self.three = nn.Parameter(torch.randn(3, 1, 2))
        self.never = nn.Parameter(torch.ones(5, 2))
        self.named = nn.ParameterDict({"a-b": nn.Parameter(torch.randn(2, 3)), "é": nn.Parameter(torch.randn(9))})
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        self.count += 1
        self.mean += x.detach().float().mean((0, 1))
        x = self.frozen(x) + self.down(torch.relu(self.up(x))) + self.adapted(x)
        return self.head(x) * self.one + self.three.sum() + sum(p.sum() for p in self.named.values())


def spread(model: Odd, layout: str) -> None:
    size = dist.get_world_size()
    shapes = {"1d": (size,), "hsdp": (2, size // 2), "replicated": (size, 1), "tp": (1, size // 2), "hsdp-tp": (2, 1)}
    if layout == "plain":
        return
    if not layout.endswith("tp"):
        mesh = init_device_mesh("cpu", shapes[layout], mesh_dim_names=("replicate", "shard")[-len(shapes[layout]) :])
    else:
        whole = init_device_mesh("cpu", (*shapes[layout], 2), mesh_dim_names=("replicate", "shard", "tp"))
        parallelize_module(model, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = whole["replicate", "shard"]
    for part in (model.up, model.down, model.adapted):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def made(layout: str, optimizers: str, seed: int) -> tuple[Odd, dict[str, Any]]:
    """Return the model and its optimizers.

    "muon" is Muon and Adam with amsgrad, a tensor learning rate and an empty group; "master" is bf16 with fp32
    masters.
    """
    torch.manual_seed(seed)
    model = Odd()
    if optimizers == "master":
        model = model.to(torch.bfloat16)
    spread(model, layout)
    matrices = [model.up.weight, model.down.weight, model.frozen.weight]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    if optimizers == "master":
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}, {"params": []}]
        return model, {"all": MasterWeightOptimizer(torch.optim.AdamW(groups, lr=0.01))}
    adam = torch.optim.Adam([{"params": others, "lr": torch.tensor(0.01)}, {"params": []}], lr=0.02, amsgrad=True)
    return model, {"muon": torch.optim.Muon(matrices, lr=0.02), "adam": adam}


def train(model: Odd, optimizers: dict[str, Any], steps: range) -> list[float]:
    """Train on the same tokens on every rank; return the losses."""
    losses = []
    for index in steps:
        tokens = torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(index))
        loss = model(tokens).float().square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def numbers(model: Odd, optimizers: dict[str, Any]) -> dict[str, Any]:
    """Return all values bit by bit, by optimizer."""
    return {key: jobs.numbers(model, optimizer) for key, optimizer in optimizers.items()}
