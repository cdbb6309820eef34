"""ckptkit in place of torchtitan's checkpointer. Makes the calls of torchtitan's training loop with a small model.

python examples/torchtitan_checkpointer.py
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch

from ckptkit.integrations.torchtitan import TorchtitanCheckpointer


class TrainState:
    """The train state, as torchtitan has it. Only the number of steps is kept here."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Schedulers:
    """The learning-rate schedulers, with the part of torchtitan's LRSchedulersContainer that a checkpointer uses."""

    def __init__(self, optimizer: Any) -> None:
        self.schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedulers[0].load_state_dict(dict(state))


def train(folder: str, steps: int, **config: Any) -> tuple[int, list[torch.Tensor]]:
    """Call the checkpointer as torchtitan's `Trainer.train` does. Return the step after the load, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, schedulers = TrainState(), Schedulers(optimizer)
    settings = {"enable": True, "interval": 3, "keep_latest_k": 2, "async_mode": "async", **config}
    states = {"train_state": state}
    checkpointer = TorchtitanCheckpointer(None, [model], [optimizer], schedulers, states, settings, url=folder)
    checkpointer.load(step=-1)
    began = state.step
    while state.step < steps:
        state.step += 1
        model(torch.randn(4, 8)).pow(2).mean().backward()
        checkpointer.maybe_wait_for_staging()
        optimizer.step()
        schedulers.schedulers[0].step()
        optimizer.zero_grad()
        checkpointer.save(state.step, last_step=state.step == steps)
    checkpointer.close()
    return began, [parameter.detach().clone() for parameter in model.parameters()]


def main() -> int:
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as twice:
        _, straight = train(once, 7)
        train(twice, 4)
        began, resumed = train(twice, 7)
    equal = all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    print(f"resumed at step {began}: weights {'bit-equal' if equal else 'DIFFER'}")
    return 0 if equal and began == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
