"""Plain torch: `dcp.save` and `dcp.load` with ckptkit's storage, Stateful objects and a StatefulDataLoader.

    python examples/plain_torch.py      # needs: pip install -e . torchdata

`DCPWriter` and `DCPReader` replace torch's FileSystemWriter and FileSystemReader. They add digests and work on any
storage.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptkit import DCPReader, DCPWriter


class App:
    """A Stateful object that holds a model and its optimizer, like AppState in torch's tutorial."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def made() -> tuple[App, StatefulDataLoader]:
    model = torch.nn.Linear(4, 1)
    data = [torch.full((4,), float(i)) for i in range(12)]
    return App(model, torch.optim.AdamW(model.parameters())), StatefulDataLoader(data, batch_size=2)


def steps(app: App, batches: Any, count: int) -> None:
    for _ in range(count):
        app.model(next(batches)).pow(2).mean().backward()
        app.optimizer.step()
        app.optimizer.zero_grad()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        app, loader = made()
        batches = iter(loader)
        steps(app, batches, 3)
        url = f"{folder}/checkpoint"
        dcp.save({"app": app, "loader": loader.state_dict()}, storage_writer=DCPWriter(url), no_dist=True)
        steps(app, batches, 3)
        again, fresh = made()
        state: dict[str, Any] = {"app": again, "loader": fresh.state_dict()}
        dcp.load(state, storage_reader=DCPReader(url), no_dist=True)
        fresh.load_state_dict(state["loader"])
        steps(again, iter(fresh), 3)
    equal = all(torch.equal(a, b) for a, b in zip(app.model.parameters(), again.model.parameters(), strict=True))
    print(f"6 steps, and 3 + 3 with a checkpoint between: {'bit-equal' if equal else 'DIFFER'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
