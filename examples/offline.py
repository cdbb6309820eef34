"""The offline functions in Python: list, inspect, verify, reshard, convert, compare. No GPU or process group needed.

python examples/offline.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ckptkit import (
    CheckpointManager,
    RetentionPolicy,
    TrainState,
    convert,
    diff,
    inspect,
    list_run,
    reshard,
    verify,
)


def make_run(root: str) -> None:
    """Save a small model and its optimizer at two steps."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    with CheckpointManager(root, retention=RetentionPolicy(max_num=5)) as manager:
        for step in (1, 2):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            manager.save(step, state, metrics={"loss": loss.item()})


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        run, wide, export = f"{work}/run", f"{work}/wide", f"{work}/export"
        make_run(run)
        for row in list_run(run).checkpoints:
            print(f"{row.name}: {row.nbytes} bytes, {'kept' if row.keep else 'to be deleted'}: {row.why}")
        for section in inspect(f"{run}/latest").sections:
            print(f"{section.role}: {section.tensors} tensors, {section.numel} elements")
        print(verify(run).summary())
        print(reshard(run, wide, world_size=3, verify=True).proof())
        print(convert(wide, export, to="hf", dtype="bf16").proof())
        assert diff(f"{run}/latest", wide, include=["0.*", "1.*"]).equal
        print(diff(f"{run}/latest~1", f"{run}/latest", include=["0.*", "1.*"]).summary())
        print(sorted(path.name for path in Path(export).iterdir()))


if __name__ == "__main__":
    main()
