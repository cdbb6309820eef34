"""Accelerate with checkpoints of ckptkit: `AcceleratorCheckpoints` in place of save_state and load_state.

python examples/accelerate_hooks.py      # needs: pip install -e '.[hf]'
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator

from ckptkit import RetentionPolicy
from ckptkit.integrations.accelerate import AcceleratorCheckpoints


def train(url: str, until: int) -> tuple[int, Any]:
    """Train to step `until`; return the step that was resumed from, and the weights."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    checkpoints = AcceleratorCheckpoints(accelerator, url, retention=RetentionPolicy(max_num=2))
    report = checkpoints.load_state()
    start = report.step if report is not None and report.step is not None else 0
    for step in range(start + 1, until + 1):
        accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            checkpoints.save_state(step)
    checkpoints.close()
    return start, [parameter.detach().clone() for parameter in model.parameters()]


def main() -> int:
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as twice:
        _, straight = train(once, 6)
        train(twice, 3)
        start, resumed = train(twice, 6)
    equal = all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    print(f"resumed at step {start}: weights {'bit-equal' if equal else 'DIFFER'}")
    return 0 if equal and start == 3 else 1


if __name__ == "__main__":
    sys.exit(main())
