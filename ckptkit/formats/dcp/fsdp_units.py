"""Keeps the gradients that FSDP2 has reduced in fp32, for which its policy has no option."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_fp32_gradients(model: nn.Module) -> None:
    """Keep the reduced gradients of bf16 and fp16 parameters in fp32, in all FSDP2 units of `model`.

    Otherwise FSDP2 rounds each sum over the ranks to the parameter's dtype, also when it accumulates several.
    """

    def before_forward(_module: nn.Module, _args: Any) -> None:
        # FSDP2 sets these dtypes before the first forward of the root, in a hook that runs before this one.
        for unit in units:
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in groups:
                for parameter in group.fsdp_params if group is not None else ():
                    if parameter.orig_dtype in (torch.bfloat16, torch.float16):
                        group._orig_dtype = torch.float32
                        parameter.sharded_param.grad_dtype = None  # accepts any; a replaced parameter has lost it

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    model.register_forward_pre_hook(before_forward)
