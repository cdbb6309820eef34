"""The work of ranks in the tests of --vocab-size: train a model with embedding and head, save, load a larger one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.fsdp.master_weights import MasterWeightOptimizer

ROWS, WIDTH = 37, 6  # uneven for any number of ranks


class Model(nn.Module):
    def __init__(self, rows: int, *, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(rows, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, rows, bias=not tied)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.embed_tokens(tokens)))


def make(layout: str, rows: int, *, tied: bool, masters: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, size = Model(rows, tied=tied), dist.get_world_size()
    policy = MixedPrecisionPolicy()
    if masters:
        model = model.bfloat16()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    if layout == "tp":
        whole = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shard", "tp"))
        plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()}
        parallelize_module(model, whole["tp"], plan)
        mesh = whole["shard"]
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, MasterWeightOptimizer(optimizer) if masters else optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        tokens = torch.arange(step, step + 12) % ROWS
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(url: str, layout: str, types: tuple[str, ...], tied: bool, masters: bool) -> None:
    model, optimizer = make(layout, ROWS, tied=tied, masters=masters)
    train(model, optimizer, 2)
    for kind in types:
        with CheckpointManager(f"{url}/{kind}", state_dict_type=kind) as manager:
            manager.save(2, TrainState(model=model, optimizer=optimizer, rng=False))


def load(url: str, layout: str, rows: int, tied: bool, masters: bool) -> bool:
    """Load a checkpoint into a model of `rows` tokens and train a step."""
    model, optimizer = make(layout, rows, tied=tied, masters=masters)
    with CheckpointManager(url) as manager:
        report = manager.load(TrainState(model=model, optimizer=optimizer, rng=False))
    train(model, optimizer, 1)
    return report is not None and not report.skipped and not report.missing
