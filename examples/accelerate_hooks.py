"""Accelerate with ckptkit checkpoints: `AcceleratorCheckpoints` replaces save_state and load_state.

python examples/accelerate_hooks.py      # needs: pip install -e '.[hf]'
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from ckptkit import RetentionPolicy
from ckptkit.integrations.accelerate import AcceleratorCheckpoints


def train(url: str, until: int) -> tuple[int, Any]:
    """Train to step `until`. Return the step from which the run was resumed, and the weights."""
    torch.manual_seed(0)
    # The seed and the epoch determine the order of the data, so a resume within an epoch gets the rest of that epoch.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The loader has its own generator, because each new iterator draws a random number. If that number came from the
    # global generator, the dropout masks would change.
    data = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=8, shuffle=True, generator=torch.Generator())
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    checkpoints = AcceleratorCheckpoints(accelerator, url, retention=RetentionPolicy(max_num=2))
    report = checkpoints.load_state()
    start = step = report.step if report is not None and report.step is not None else 0
    while step < until:
        epoch, seen = divmod(step, len(data))
        batches = accelerator.skip_first_batches(data, seen) if seen else data
        batches.set_epoch(epoch)
        for batch in batches:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 7 == 0:  # in the middle of an epoch of 5 steps
                checkpoints.save_state(step)
            if step == until:
                break
    checkpoints.close()
    return start, [parameter.detach().clone() for parameter in model.parameters()]


def main() -> int:
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as twice:
        _, straight = train(once, 12)
        train(twice, 7)
        start, resumed = train(twice, 12)
    equal = all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    print(f"resumed at step {start}: weights {'bit-equal' if equal else 'DIFFER'}")
    return 0 if equal and start == 7 else 1


if __name__ == "__main__":
    sys.exit(main())
