"""A typical job: a model of many small layers under FSDP2, with Adam, after its first step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["Job"]

_BLOCKS, _WIDTH = 125, 16


class Job:
    """A job with 500 small parameters and three tensors of Adam for each: 2,000 tensors."""

    def __init__(self, device: str = "cpu") -> None:
        def block() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH))

        self.device = device
        self.model = nn.Sequential(*(block() for _ in range(_BLOCKS))).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=True)
        self.step()

    def step(self) -> None:
        """Train one step."""
        self.model(torch.randn(2, _WIDTH, device=self.device)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def torch_state(self) -> dict[str, Any]:
        """Return the argument for `dcp.save`, as in torch's tutorial."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """Return the local tensors of the model and of the optimizer's state on this rank."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [value.detach() for value in [*self.model.parameters(), *states]]
        return [value.to_local() if isinstance(value, DTensor) else value for value in found]
