"""The work of ranks in the reshard tests: save a job, and load it elsewhere."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ckptkit import CheckpointManager, TrainState
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import jobs, states
from tests.checkpoint.states import module_of, optimized, trained
from tests.dtensors import whole

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def save(url: str, layout: str, types: tuple[str, ...]) -> dict[str, Any]:
    """Train two steps and save step 2 below <url>/<type> for each type; return every value."""
    job = jobs.make(layout)
    jobs.seed(7, jobs.data_rank(layout))
    job.train(2)
    for kind in types:
        with CheckpointManager(f"{url}/{kind}", state_dict_type=kind) as manager:
            manager.save(2, job.state(), metrics={"loss": 0.5}, client_state={"seen": 3})
    return jobs.everything(job)


def load(url: str, layout: str) -> dict[str, Any]:
    """Load a checkpoint into a fresh job; return every value."""
    job = jobs.make(layout, start=99)
    with CheckpointManager(str(Path(url).parent)) as manager:
        manager.load(job.state(), url, per_rank_on_resize="keep")
    return jobs.everything(job)


def normed(*, sharded: bool) -> TrainState:
    """Return a state whose model has buffers, and a weight that FSDP2 ignores. Unless `sharded`, it was trained."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4, bias=False))
    if sharded:
        fully_shard(model, ignored_params={model[2].weight})
    return optimized(model, torch.optim.AdamW) if sharded else trained(model)


def load_normed(root: str) -> dict[str, Any]:
    state = normed(sharded=True)
    states.load(root, state)
    return jobs.numbers(state.model, state.optimizer)


def go_on(
    url: str, shapes: Shapes, tied: dict[str, str], buffers: list[str], groups: list[list[str]], masters: bool = False
) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[str]]:
    """Load a checkpoint strictly into a sharded model with AdamW, return its values, then train a step.

    Returns model tensors, optimizer tensors by "<fqn>.<state>", the settings of the groups, and the loaded names.
    """
    values = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()}
    model = module_of(values, trained=shapes.keys() - set(buffers))
    for name, other in tied.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, model.get_parameter(other))
    ignored = {p for p in model.parameters() if p.ndim == 0}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    named = dict(model.named_parameters())
    optimizer: Any = torch.optim.AdamW([{"params": [named[fqn] for fqn in group]} for group in groups], lr=123.0)
    if masters:
        optimizer = MasterWeightOptimizer(optimizer)
    with CheckpointManager(str(Path(url).parent)) as manager:
        report = manager.load(TrainState(model=model, optimizer=optimizer, rng=False), url)
    names = {id(p): n for n, p in named.items()}
    weights = {n: whole(t).detach().clone() for n, t in model.state_dict().items()}
    states = {
        f"{names[id(p)]}.{k}": whole(v).detach().clone()
        for p, state in optimizer.state.items()
        for k, v in state.items()
    }
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return weights, states, settings, list(report.loaded)
