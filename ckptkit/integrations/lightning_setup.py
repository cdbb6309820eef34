"""Translates the arguments of NeMo's and Lightning's strategies. Does not import Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.fsdp.config import FSDPConfig, ShardingStrategy, Size, WrapPolicy
from ckptkit.fsdp.mesh import ParallelPlan
from ckptkit.fsdp.units import Policy
from ckptkit.fsdp.wrap import shard


def group_sizes(
    world_size: int, *, dp: Size, tp: Size, cp: int = 1, has_plan: bool = False, nodes: int = 1
) -> tuple[int, int]:
    """Return the numbers of (data-parallel, tensor-parallel) ranks.

    If one number is "auto", it is computed from the other number. If both are "auto" and there is a custom plan, each
    node is one tensor-parallel group, as in NeMo and Lightning. If both are "auto" without a plan, all ranks are
    data-parallel.

    Raises:
        UsageError: dp x cp x tp is not the number of ranks.
    """
    if dp == "auto" and tp == "auto":
        tp = world_size // (nodes * cp) if has_plan else 1
    plan = ParallelPlan.resolve(world_size, shard=dp, tp=tp, cp=cp)
    return plan.shard, plan.tp


def fsdp_config(
    *,
    sharding_strategy: Any,
    mesh: tuple[int, int] | None,
    dp: int,
    tp: int,
    cp: int,
    precision: str,
    mp_policy: Any,
    offload: bool,
    state_dict_type: Any,
    device: str,
) -> FSDPConfig:
    """Return the FSDPConfig that corresponds to a strategy's arguments.

    Args:
        mesh: The sizes (replicate, shard), if a mesh was given.
        precision: Lightning's precision, such as "bf16-mixed". Ignored if an `mp_policy` (FSDP2's or FSDP1's) is given.
    """
    strategy = str(getattr(sharding_strategy, "name", sharding_strategy)).upper().lstrip("_")
    if mesh is not None and mesh[0] > 1 and strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        strategy = "HYBRID_SHARD" if strategy == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
    if mesh is not None and mesh[0] * mesh[1] != dp:
        raise UsageError(f"device_mesh={mesh} has {mesh[0] * mesh[1]} ranks, data_parallel_size is {dp}.")
    values: dict[str, Any] = {"sharding_strategy": strategy, "tp": tp, "cp": cp, "device": device}
    if mesh is not None and ShardingStrategy[strategy].is_hybrid:
        values |= {"replicate": mesh[0], "shard": mesh[1]}
    if mp_policy is not None:
        values |= {
            "mixed_precision": None if mp_policy.param_dtype == torch.float32 else mp_policy.param_dtype,
            "reduce_dtype": mp_policy.reduce_dtype,
            "output_dtype": getattr(mp_policy, "output_dtype", None),
        }
    elif precision.endswith("-mixed"):
        values["mixed_precision"] = "bf16" if precision.startswith("bf16") else "fp16"
    if offload:
        values["offload"] = "params"
    return FSDPConfig(**values, state_dict_type=state_dict_type)


def wrap_policy(value: Any) -> Policy | None:
    """Return the wrap policy for a set of classes, or for FSDP1's callable (module, recurse, nonwrapped_numel)."""
    if value is None:
        return None
    if isinstance(value, type):
        value = {value}
    if isinstance(value, Iterable):
        classes = tuple(value)
        return lambda model: [name for name, m in model.named_modules() if name and isinstance(m, classes)]
    if not callable(value):
        raise UsageError(f"auto_wrap_policy is {value!r}: give a set of module classes, or FSDP1's callable.")

    def accepted(module: nn.Module) -> bool:
        numel = sum(parameter.numel() for parameter in module.parameters())
        return bool(value(module=module, recurse=False, nonwrapped_numel=numel))

    return lambda model: [name for name, module in model.named_modules() if name and accepted(module)]


def modules_of(model: nn.Module, value: Any) -> list[nn.Module]:
    """Return the modules that `value` selects. `value` is a set of classes, or a callable as for FSDP1."""
    policy = wrap_policy(value)
    return [] if policy is None else [model.get_submodule(name) for name in policy(model)]


def roots(module: nn.Module) -> list[nn.Module]:
    """Return the modules that become FSDP roots: the children of a LightningModule that have parameters.

    A ModuleList or ModuleDict is replaced by its own children. The LightningModule itself can't be a root, because
    Lightning calls methods such as `training_step` instead of `forward`.
    """
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += roots(child)
        elif next(child.parameters(), None) is not None and all(child is not other for other in found):
            found.append(child)
    return found


def loose_parameters(module: nn.Module, inside: list[nn.Module]) -> list[str]:
    """Return the names of a LightningModule's trainable parameters that no module in `inside` contains."""
    held = {id(parameter) for root in inside for parameter in root.parameters()}
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: Any = None,
    mp_policy: Any = None,
    use_hf_tp_plan: bool = True,
    tp_shard_plan: Mapping[str, Any] | None = None,
    offload_policy: Any = None,
) -> nn.Module:
    """Shard a model like NeMo's function of the same name: first each block in a ModuleList, then the whole model.

    The last block stays gathered after forward. `device_mesh` has the dimension data_parallel and, optionally,
    tensor_parallel.
    """
    sizes = dict(zip(device_mesh.mesh_dim_names, device_mesh.mesh.shape, strict=True))
    config = fsdp_config(
        sharding_strategy="FULL_SHARD",
        mesh=None,
        dp=sizes["data_parallel"],
        tp=sizes.get("tensor_parallel", 1),
        cp=sizes.get("context_parallel", 1),
        precision="32-true",
        mp_policy=mp_policy,
        offload=offload_policy is not None,
        state_dict_type="SHARDED",
        device=device_mesh.device_type,
    )
    config = replace(config, auto_wrap_policy=WrapPolicy.BLOCKS, keep_last_block=True)
    del use_hf_tp_plan  # not needed: without a plan, the model's own plan is used anyway
    plan = dict(tp_shard_plan) if tp_shard_plan is not None else None
    return shard(model, config, tp_plan=plan)
