"""Provides the FSDP2 runtime of a training process: mesh, wrapping, precision, optimizer, offload.

Public names are imported on first use, so `import ckptkit.fsdp` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "FSDPConfig": "ckptkit.fsdp.config",
    "ShardingStrategy": "ckptkit.fsdp.config",
    "WrapPolicy": "ckptkit.fsdp.config",
    "BackwardPrefetch": "ckptkit.fsdp.config",
    "FSDPStrategy": "ckptkit.fsdp.strategy",
    "HFLoadReport": "ckptkit.fsdp.hf_load",
    "ParallelPlan": "ckptkit.fsdp.mesh",
    "TrainingMesh": "ckptkit.fsdp.mesh",
    "auto_shard_size": "ckptkit.fsdp.mesh",
    "make_mesh": "ckptkit.fsdp.mesh",
    "apply_tensor_parallel": "ckptkit.fsdp.tensor_parallel",
    "shard": "ckptkit.fsdp.wrap",
    "unwrap_model": "ckptkit.fsdp.wrap",
    "param_groups": "ckptkit.fsdp.groups",
    "NO_DECAY": "ckptkit.fsdp.groups",
    "MasterWeightOptimizer": "ckptkit.fsdp.master_weights",
    "DynamicGradScaler": "ckptkit.fsdp.grad_scaler",
    "grad_norm": "ckptkit.fsdp.gradients",
    "clip_grad_norm": "ckptkit.fsdp.gradients",
    "offload_optimizer": "ckptkit.fsdp.offload",
    "load_optimizer": "ckptkit.fsdp.offload",
    "offload_model": "ckptkit.fsdp.offload",
    "reload_model": "ckptkit.fsdp.offload",
}

__all__ = [
    "FSDPConfig",
    "ShardingStrategy",
    "WrapPolicy",
    "BackwardPrefetch",
    "FSDPStrategy",
    "HFLoadReport",
    "ParallelPlan",
    "TrainingMesh",
    "auto_shard_size",
    "make_mesh",
    "apply_tensor_parallel",
    "shard",
    "unwrap_model",
    "param_groups",
    "NO_DECAY",
    "MasterWeightOptimizer",
    "DynamicGradScaler",
    "grad_norm",
    "clip_grad_norm",
    "offload_optimizer",
    "load_optimizer",
    "offload_model",
    "reload_model",
]

if TYPE_CHECKING:
    from ckptkit.fsdp.config import BackwardPrefetch, FSDPConfig, ShardingStrategy, WrapPolicy
    from ckptkit.fsdp.grad_scaler import DynamicGradScaler
    from ckptkit.fsdp.gradients import clip_grad_norm, grad_norm
    from ckptkit.fsdp.groups import NO_DECAY, param_groups
    from ckptkit.fsdp.hf_load import HFLoadReport
    from ckptkit.fsdp.master_weights import MasterWeightOptimizer
    from ckptkit.fsdp.mesh import ParallelPlan, TrainingMesh, auto_shard_size, make_mesh
    from ckptkit.fsdp.offload import load_optimizer, offload_model, offload_optimizer, reload_model
    from ckptkit.fsdp.strategy import FSDPStrategy
    from ckptkit.fsdp.tensor_parallel import apply_tensor_parallel
    from ckptkit.fsdp.wrap import shard, unwrap_model


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckptkit.fsdp' has no attribute {name!r}")
    # No module may be named like a public function, because importing the module would replace the function.
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
