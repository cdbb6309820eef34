"""Chooses the dtypes for storage, compute and reduction, and refuses combinations that can't work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ckptkit.errors import UsageError
from ckptkit.formats.dcp.host_bytes import dtype_name

if TYPE_CHECKING:
    from ckptkit.fsdp.config import FSDPConfig


_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def mixed_precision_policy(
    config: FSDPConfig, *, is_root: bool = False, is_training: bool = True, stored: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    """Return fully_shard's precision policy for a unit whose trainable parameters have the dtype `stored`.

    Inference computes in the stored dtype. Gradients in fp64 are reduced in fp64, not in fp32.
    """
    # Only the root gets output_dtype: a block that returned fp32 would pass it to the next block's bf16 weights.
    output = _TORCH[config.output_dtype] if is_root and config.output_dtype else None
    casts = config.cast_forward_inputs
    if not is_training:
        return MixedPrecisionPolicy(output_dtype=output, cast_forward_inputs=casts)
    reduce = _TORCH[config.reduce_dtype] if config.reduce_dtype else None
    # Also set for "master". Trainable parameters already have this dtype, but frozen parameters are cast when gathered.
    compute = _TORCH[config.mixed_precision] if config.mixed_precision else None
    if stored == torch.float64 and compute is None and reduce == torch.float32:
        reduce = torch.float64
    return MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, output_dtype=output, cast_forward_inputs=casts
    )


def offload_policy(config: FSDPConfig, device_type: str) -> OffloadPolicy:
    """Return fully_shard's offload policy. Host memory is pinned only if an accelerator copies from it."""
    if config.offload != "params":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def storage_dtype(config: FSDPConfig) -> torch.dtype | None:
    """Return the dtype in which to store trainable parameters. None means that parameters keep their dtypes."""
    if config.mixed_precision is None:
        return None
    return _TORCH[config.mixed_precision] if config.precision == "master" else torch.float32


def set_storage_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Cast the trainable floating-point parameters to `dtype`, in place.

    Frozen parameters keep their dtype: they are never updated, so a wider dtype has no advantage. Buffers also keep
    their dtype: rotary frequencies and running statistics would lose too much precision in bf16.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def check_unit_dtypes(name: str, parameters: Iterable[tuple[str, nn.Parameter]], policy: MixedPrecisionPolicy) -> None:
    """Check that FSDP2 can gather and reduce the unit (the parameters of one fully_shard call) as one buffer.

    Raises:
        UsageError: The dtypes do not allow this. The message names the unit, the dtypes, and one parameter of each
            dtype.
    """
    unit = f"The unit {name!r}" if name else "The root unit"
    first: dict[torch.dtype, str] = {}
    trainable: dict[torch.dtype, str] = {}
    for fqn, parameter in parameters:
        if not parameter.is_floating_point():
            raise UsageError(
                f"Parameter {fqn!r} has dtype {dtype_name(parameter.dtype)}: it can be neither trained nor gathered "
                "with floating-point parameters. Register it as a buffer."
            )
        first.setdefault(parameter.dtype, fqn)
        if parameter.requires_grad:
            trainable.setdefault(parameter.dtype, fqn)
    if len(trainable) > 1:
        raise UsageError(
            f"{unit} has trainable parameters of {_listed(trainable)}; FSDP2 reduces the gradients of a unit in one "
            "dtype. Cast them to one dtype, or set mixed_precision so that all are kept in fp32."
        )
    if len(first) > 1 and policy.param_dtype is None:
        raise UsageError(
            f"{unit} has parameters of {_listed(first)}; without a compute dtype FSDP2 can't gather them together. "
            "Cast them to one dtype, or set mixed_precision='bf16'."
        )


def _listed(found: dict[torch.dtype, str]) -> str:
    return " and ".join(f"{dtype_name(dtype)} (such as {fqn!r})" for dtype, fqn in found.items())
