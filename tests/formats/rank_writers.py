"""Checkpoints written by real ranks: each function runs on every rank of the pool and returns the whole tensors."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests import dtensors
from tests.fsdp.models import TinyLM


def net(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> TinyLM:
    """Return a small model of uneven sizes, with an integer buffer and optionally a tied head."""
    torch.manual_seed(7)
    model = TinyLM(tied).to(dtype)
    model.register_buffer("steps", torch.arange(3))
    return model


def train(model: nn.Module, step: Callable[[], object]) -> None:
    """Make two steps of an optimizer, with fixed batches."""
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randint(0, 11, (2, 3))).float().square().mean().backward()
        step()
        model.zero_grad()


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: dtensors.whole(tensor).detach().clone() for name, tensor in tensors.items()}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the first moments by parameter name, whole."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = {names[id(p)]: values["exp_avg"] for p, values in optimizer.state.items()}
    return whole(state)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


def sharded(kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> TinyLM:
    """Return a model under FSDP2: 1-D, HSDP, or on top of tensor parallelism."""
    model, world = net(tied=tied, dtype=dtype), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    elif kind == "tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        for layer in model.layers:
            parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _wrapped(model, mesh)


def _wrapped(model: TinyLM, mesh: Any) -> TinyLM:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_rank(out: str, **values: Any) -> None:
    """Save each value under the name that verl gives to the file of this rank."""
    for name, value in values.items():
        torch.save(value, f"{out}/{name}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def write_verl(out: str, kind: str, tied: bool, dtype: torch.dtype, trained: int) -> dict[str, Any]:
    model = sharded(kind, tied=tied, dtype=dtype)
    optimizer = torch.optim.AdamW(decay_groups(model) if kind != "hsdp" else model.parameters(), foreach=False)
    for _ in range(trained):
        train(model, optimizer.step)
    state = model.state_dict()
    save_rank(out, model=state, optim=optimizer.state_dict(), extra_state={"lr_scheduler": None, "rng": {}})
    return {"model": whole(state), "moments": moments(model, optimizer)}


def write_lightrft(out: str, lr: float = 1e-3) -> dict[str, Any]:
    """Write LightRFT's layout: bf16 weights in DCP, fp32 masters and moments in one file per rank, two groups, one
    frozen."""
    model = net(tied=True, dtype=torch.bfloat16)
    model.layers[0].norm.weight.requires_grad = False
    _wrapped(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)))
    groups = decay_groups(model)
    masters = [[p.detach().float() for p in group["params"]] for group in groups]
    pairs = list(zip((p for group in groups for p in group["params"]), itertools.chain(*masters), strict=True))
    both = [{**group, "params": flat} for group, flat in zip(groups, masters, strict=True)]
    base = torch.optim.AdamW(both, lr, foreach=False)

    def step() -> None:
        for parameter, master in pairs:
            master.grad = parameter.grad.float()
        base.step()
        for parameter, master in pairs:
            parameter.data.copy_(master.data)

    train(model, step)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=out)
    Path(out, "optim_states").mkdir(exist_ok=True)
    payload = {
        "grad_scaler": {"_scale": torch.ones(1), "_growth_step": 0, "_hysteresis_step": 0},
        "base_optim_states": base.state_dict(),
        "flat_fp32_weights": dict(enumerate(masters)),
    }
    torch.save(payload, f"{out}/optim_states/_rank{dist.get_rank()}")
    names = {id(p): name for name, p in model.named_parameters()}
    by_name = {names[id(p)]: m for p, m in pairs}
    return {
        "model": whole(state),
        "masters": whole(by_name),
        "moments": whole({name: base.state[m]["exp_avg"] for name, m in by_name.items()}),
    }


def _fsdp1(model: TinyLM, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    options["device_id"] = torch.device("cpu")
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer, **options)
    return FSDP(model, **options)


def write_verl_fsdp1(out: str, use_orig_params: bool, replicas: int) -> dict[str, Any]:
    """Write verl under FSDP1: ShardedTensors (DTensors with several replicas), and an optimizer with each rank's part
    of flat parameters."""
    world, options = dist.get_world_size(), dict[str, Any]()
    if replicas > 1:
        options["device_mesh"] = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("ddp", "fsdp"))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    wrapped = _fsdp1(net(), use_orig_params=use_orig_params, **options)
    groups: list[Any] = [*wrapped.parameters()]
    if use_orig_params:  # without them, a flat parameter contains matrices and vectors
        matrices = [p for name, p in wrapped.named_parameters() if "norm" not in name and "bias" not in name]
        vectors = [p for p in groups if all(p is not matrix for matrix in matrices)]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    train(wrapped, optimizer.step)
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        expected = whole(wrapped.state_dict())
    with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        save_rank(out, model=wrapped.state_dict(), optim=optimizer.state_dict())
    for parameter, state in optimizer.state.items():  # so that the model's state is the moments, whole
        parameter.data.copy_(state["exp_avg"])
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        averages = whole(wrapped.state_dict())
    return {"model": expected, "moments": {name: averages[name] for name, _ in net().named_parameters()}}


def write_fsdp1_local(out: str, use_orig_params: bool, with_optimizer: bool, frozen: bool = False) -> dict[str, Any]:
    """Write FSDP1 LOCAL_STATE_DICT as accelerate saves it, with the optimizer's DCP in the next directory."""
    model = net()
    model.layers[0].requires_grad_(not frozen)
    expected = whole(model.state_dict())
    wrapped = _fsdp1(model, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0, momentum=0.9)
    train(wrapped, optimizer.step)
    with FSDP.state_dict_type(wrapped, StateDictType.LOCAL_STATE_DICT):
        torch.save(wrapped.state_dict(), f"{out}/pytorch_model_fsdp_rank{dist.get_rank()}.bin")
        if with_optimizer:
            state = FSDP.optim_state_dict(wrapped, optimizer)
            dcp.save({"optimizer": state}, checkpoint_id=f"{out}/optimizer_0")
    return expected
