"""A model with experts on any mesh (FSDP, tensor parallel, expert parallel, pipeline stages), and its whole values."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptkit import Shard, TrainState

warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
LAYERS, EXPERTS = 4, 4

MESHES: dict[str, tuple[int, ...]] = {  # name -> sizes of (pp, dp, ep, tp)
    "one": (1, 1, 1, 1),
    "ep2": (1, 1, 2, 1),
    "ep4": (1, 1, 4, 1),
    "fsdp2": (1, 2, 1, 1),
    "fsdp2 ep2": (1, 2, 2, 1),
    "fsdp2 tp2": (1, 2, 1, 2),
    "pp2": (2, 1, 1, 1),
    "pp2 ep2": (2, 1, 2, 1),
    "pp2 fsdp2": (2, 2, 1, 1),
    "fsdp2 ep2 tp2": (1, 2, 2, 2),
    "pp2 fsdp2 ep2": (2, 2, 2, 1),
    "pp2 ep2 tp2": (2, 1, 2, 2),
    "pp2 fsdp2=ep2 tp2": (2, 2, 1, 2),  # the ranks that share a layer's shards have different experts
}


def world_size(name: str) -> int:
    pp, dp, ep, tp = MESHES[name]
    return pp * dp * ep * tp


class Experts(nn.Module):
    """The experts of one rank, as plain tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(count, 6, 5))
        self.w2 = nn.Parameter(torch.zeros(count, 5, 6))


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.experts = Experts(experts)


class Stage(nn.Module):
    """The layers of one pipeline stage, under their names in the model."""

    def __init__(self, layers: range, experts: int) -> None:
        super().__init__()
        if 0 in layers:
            self.embed = nn.Linear(3, 6)
        self.layers = nn.ModuleDict({str(i): Block(experts) for i in layers})
        if LAYERS - 1 in layers:
            self.head = nn.Linear(6, 3)


def value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the whole tensor of a name, equal on every mesh."""
    generator = torch.Generator().manual_seed(seed * 1000 + sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    return torch.randn(shape, generator=generator)


def part(whole: torch.Tensor, like: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the values of a live tensor; an expert-parallel rank has its chunk of the whole."""
    mine = whole.chunk(size)[rank] if size > 1 else whole
    if not isinstance(like, DTensor):
        return mine
    from ckptkit.checkpoint.state.local_part import part_view

    local = torch.empty_like(like.to_local())
    for piece in part_view("", like).parts:
        at = tuple(slice(o, o + s) for o, s in zip(piece.local_offsets, piece.box.sizes, strict=True))
        of = tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
        local[at] = mine[of]
    return local


def made(name: str, interleaved: bool = False) -> tuple[TrainState, Any]:
    """Return a model without values on a mesh, as a TrainState, and its expert-parallel mesh. Collective."""
    pp, dp, ep, tp = MESHES[name]
    mesh = init_device_mesh("cpu", (pp, dp, ep, tp), mesh_dim_names=("pp", "dp", "ep", "tp"))
    rank, experts = mesh.get_local_rank("pp"), mesh["dp" if "=" in name else "ep"]
    if interleaved:  # stages 0 and 2 on the first rank, 1 and 3 on the second
        ranges = [range(i, i + 1) for i in range(rank, LAYERS, pp)]
    else:
        ranges = [range(rank * LAYERS // pp, (rank + 1) * LAYERS // pp)]
    stages = [Stage(layers, EXPERTS // experts.size()) for layers in ranges]
    for stage in stages:
        apart = {p for name, p in stage.named_parameters() if experts.size() > ep and ".experts." in name}
        for block in stage.layers.values():
            if tp > 1:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if dp > 1:
                fully_shard(block, mesh=mesh["dp"], ignored_params=apart)
        if dp > 1:
            fully_shard(stage, mesh=mesh["dp"], ignored_params=apart)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.1)
    layout = {"*.experts.*": Shard(0, mesh=experts)} if experts.size() > 1 else {}
    model = stages if len(stages) > 1 else stages[0]
    return TrainState(model=model, optimizer=optimizer, layout=layout, rng=False), experts


def tensors(state: TrainState) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return name -> parameter and its moments on this rank."""
    module = state.parts("model")[""]
    return {name: (p, state.optimizer.state[p]) for name, p in module.named_parameters()}


def wanted(state: TrainState, ep: Any, seed: int) -> dict[str, list[torch.Tensor]]:
    """Return this rank's part of every tensor, cut from the whole model of a seed."""
    size, rank = ep.size(), ep.get_local_rank()
    found = {}
    for name, (parameter, _) in tensors(state).items():
        count = size if ".experts." in name else 1
        shape = (parameter.shape[0] * count, *parameter.shape[1:])
        names = (name, f"{name}.exp_avg", f"{name}.exp_avg_sq")
        found[name] = [part(value(key, shape, seed), parameter, rank, count) for key in names]
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(state: TrainState, ep: Any, seed: int) -> None:
    values = wanted(state, ep, seed)
    for name, (parameter, moments) in tensors(state).items():
        moments["step"] = torch.tensor(5.0)
        for key in ("exp_avg", "exp_avg_sq"):
            moments[key] = torch.zeros_like(parameter)
        targets = (parameter, moments["exp_avg"], moments["exp_avg_sq"])
        for target, chosen in zip(targets, values[name], strict=True):
            local(target.detach()).copy_(chosen)


def wrong(state: TrainState, ep: Any, seed: int) -> list[str]:
    """Return the names whose weight, moments or step count differ from those of the seed."""
    values = wanted(state, ep, seed)
    found = []
    for name, (parameter, moments) in tensors(state).items():
        held = [parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        alike = all(torch.equal(local(have), want) for have, want in zip(held, values[name], strict=True))
        types = {type(item) for item in held[1:]}
        kind = DTensor if isinstance(parameter, DTensor) else torch.Tensor
        if not alike or moments["step"].item() != 5.0 or types != {kind}:
            found.append(name)
    return found
