"""Parameter groups as optimizers over DTensors need them: by weight decay, dtype, mesh and placement, with names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["NO_DECAY", "param_groups", "clean_fqn"]

NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
"""A parameter whose name holds one of these is not decayed."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def param_groups(
    model: nn.Module, *, weight_decay: float = 0.0, no_decay: Sequence[str] = NO_DECAY
) -> list[dict[str, Any]]:
    """Return groups `{"params", "param_names", "weight_decay"}` that together hold each trainable parameter once.

    fused and foreach kernels take one dtype and either only plain tensors or only DTensors of one mesh, so a group
    never mixes those. Names are checkpoint FQNs: without what torch.compile and checkpoint wrappers put in.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for raw_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = clean_fqn(raw_name)
        decay = 0.0 if any(part in name for part in no_decay) else weight_decay
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        key = (decay, parameter.dtype, layout)
        group = groups.setdefault(key, {"params": [], "param_names": [], "weight_decay": decay})
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(groups.values())


def clean_fqn(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
