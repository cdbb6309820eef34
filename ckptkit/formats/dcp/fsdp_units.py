"""Makes FSDP2 keep reduced gradients in fp32. FSDP2's mixed precision policy has no option for this."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def keep_fp32_gradients(model: nn.Module) -> None:
    """Keep the reduced gradients of bf16 and fp16 parameters in fp32, in all FSDP2 units of `model`.

    By default, FSDP2 rounds each gradient to the parameter's dtype after the reduction over the ranks. If several
    reduced gradients are accumulated, each of them is rounded.
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
                        # None accepts gradients of any dtype. A parameter that was replaced has lost this setting.
                        parameter.sharded_param.grad_dtype = None

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    model.register_forward_pre_hook(before_forward)
