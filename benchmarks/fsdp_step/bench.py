"""Measure a training step of FSDPStrategy against the same step written by hand, and the cost of fp32 masters.

    torchrun --nproc-per-node 2 benchmarks/fsdp_step/bench.py [--blocks 8 --width 256 --rounds 30] [--json]

Both sides shard the same model over the same units, run the same fused AdamW, clip to one joint norm and skip a step
whose norm is not finite. Rounds of both sides alternate, each side first in turn. A ratio is the median of the ratios
of neighbouring rounds, so that other load on the machine affects both sides. Uses CUDA if available.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptkit.fsdp import FSDPConfig, FSDPStrategy, MasterWeightOptimizer, param_groups


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def built(args: argparse.Namespace) -> Model:
    torch.manual_seed(0)
    return Model(args.blocks, args.width)


def by_hand(args: argparse.Namespace, device: str) -> Callable[[torch.Tensor], None]:
    """Return the step as written without ckptkit. It also clips to one norm, and skips steps with a non-finite norm."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = built(args)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm).item():
            optimizer.step()
        optimizer.zero_grad()

    return step


def through_strategy(args: argparse.Namespace, device: str) -> Callable[[torch.Tensor], None]:
    """Return the same step as `by_hand`, through FSDPStrategy."""
    strategy = FSDPStrategy(FSDPConfig(device=device), max_norm=1.0)
    model = strategy.prepare_model(built(args))
    optimizer = strategy.create_optimizer(model, lr=1e-3, weight_decay=1e-2, no_decay=())

    def step(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer, model)

    return step


def master_steps(args: argparse.Namespace, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a MasterWeightOptimizer step, and the same step written as a loop over tensors."""
    config = FSDPConfig(precision="master", mixed_precision="bf16", device=device)
    strategy = FSDPStrategy(config)
    optimizers: list[Any] = []
    for _ in range(2):
        model = strategy.prepare_model(built(args))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizers.append((model, list(model.parameters())))
    fast = MasterWeightOptimizer(torch.optim.AdamW(param_groups(optimizers[0][0]), lr=1e-3, fused=True))
    parameters = optimizers[1][1]
    masters = [parameter.detach().float() for parameter in parameters]
    plain = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def loop() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        plain.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)
            master.grad = None

    return fast.step_masters, loop


def seconds(run: Callable[[], Any], repeats: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], *, rounds: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of both sides, and the median ratio of neighbouring rounds."""
    for _ in range(3):
        ours()
        theirs()
    a, b = [], []
    for index in range(rounds):
        for run, found in ((ours, a), (theirs, b)) if index % 2 else ((theirs, b), (ours, a)):
            found.append(seconds(run, repeats))
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return {
        "ours_ms": statistics.median(a) * 1e3,
        "theirs_ms": statistics.median(b) * 1e3,
        "ratio": statistics.median(ratios),
        "best_ratio": min(a) / min(b),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    x = torch.randn(args.batch, args.width, device=device)
    hand, strategy = by_hand(args, device), through_strategy(args, device)
    fast, loop = master_steps(args, device)
    results = {
        "training step, FSDPStrategy / by hand": compare(
            lambda: strategy(x), lambda: hand(x), rounds=args.rounds, repeats=args.repeats
        ),
        "MasterWeightOptimizer, foreach / loop over tensors": compare(
            fast, loop, rounds=args.rounds, repeats=args.repeats
        ),
    }
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps(results, indent=2))
        else:
            for name, row in results.items():
                print(
                    f"{name}: {row['ours_ms']:.2f} ms / {row['theirs_ms']:.2f} ms, median ratio {row['ratio']:.3f}, "
                    f"best against best {row['best_ratio']:.3f}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
