"""States on any device: every dtype, every layout, and a training state with its optimizer."""

from __future__ import annotations

import torch
from torch import nn

from ckptkit import TrainState

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class Tensors(nn.Module):
    """Buffers of every dtype, empty and large, transposed and sliced; filled with `seed`, or zeros."""

    def __init__(self, device: str, seed: int | None = None) -> None:
        super().__init__()
        for dtype in DTYPES:
            self._add(f"as_{dtype}".replace("torch.", ""), self._filled(seed, 37, 11).to(dtype), device)
        self._add("empty", torch.empty(0, 3), device)
        self._add("scalar", self._filled(seed).reshape(()), device)
        self._add("columns", self._filled(seed, 300, 50), device)
        self.columns = self.columns.T
        self._add("strided", self._filled(seed, 40, 40), device)
        self.strided = self.strided[::2, 3:9]

    def _add(self, name: str, value: torch.Tensor, device: str) -> None:
        self.register_buffer(name, value.to(device))

    @staticmethod
    def _filled(seed: int | None, *shape: int) -> torch.Tensor:
        if seed is None:
            return torch.zeros(shape)
        return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def training(device: str, seed: int | None = None) -> TrainState:
    """Return a model with tensors of every dtype and an optimizer after a step; values depend on the seed."""
    torch.manual_seed(0 if seed is None else seed)
    model = nn.ModuleDict({"layer": nn.Linear(16, 8), "tensors": Tensors(device, seed)}).to(device)
    optimizer = torch.optim.AdamW(model["layer"].parameters(), lr=0.1)
    model["layer"](torch.randn(4, 16).to(device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(model=model, optimizer=optimizer)


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return all tensors of a state by name, without copies."""
    found = dict(state.model.state_dict())
    for index, values in state.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    return found


def copied(state: TrainState) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a state on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in tensors(state).items()}


def assert_same(found: TrainState, expected: dict[str, torch.Tensor], device: str) -> None:
    """Check that a state holds these values bit for bit, and its model is on this device."""
    assert tensors(found).keys() == expected.keys()
    for name, value in tensors(found).items():
        assert name.startswith("optimizer.") or value.device.type == device, name
        bits, wanted = (each.cpu().contiguous().view(-1).view(torch.uint8) for each in (value, expected[name]))
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(bits, wanted), name
