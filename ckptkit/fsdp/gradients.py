"""Computes the joint norm of all gradients and clips them. Gradients may be plain, sharded, replicated or missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ckptkit.arguments import check_flags
from ckptkit.errors import NonFiniteGradientError, UsageError
from ckptkit.fsdp.grad_scaler import DynamicGradScaler
from ckptkit.units import first_few

_Key = tuple[DeviceMesh, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GradientReport:
    """Describes the gradients before a step.

    Attributes:
        norm: The joint norm of the unscaled gradients.
        finite: Whether the norm is finite on all ranks.
        factor: The factor by which to multiply the gradients before the step.
    """

    norm: torch.Tensor
    finite: bool
    factor: float


@torch.no_grad()
def grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], p: float = 2.0) -> torch.Tensor:
    """Return the p-norm (1 <= p <= inf) of all gradients as one scalar.

    All ranks get the same result, which is the norm that a single process would compute. The result is fp64 if any
    parameter or gradient is fp64, otherwise fp32. It is NaN on every rank if any rank has a NaN. A gradient that is
    replicated over ranks counts once. A plain gradient must be equal on all ranks, and also counts once. Parameters
    without a gradient count as zero. All ranks must call this with the same parameters in the same order. There is one
    small all-reduce for each kind of sharding.

    Raises:
        UsageError: `p` is not a number from 1 to inf.
    """
    p = checked_norm_type(p)
    parameters = _listed(parameters)
    plain: list[torch.Tensor] = []
    sharded: dict[_Key, list[torch.Tensor]] = {}
    device: torch.device | None = None
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            # Group by the parameter, not by its gradient: a rank without a gradient must also join the all-reduce.
            key, local = _place(parameter, gradient)
            bucket = sharded.setdefault(key, [])
            if local is not None:
                bucket.append(local)
            device = device or parameter.to_local().device
        elif isinstance(gradient, DTensor):
            key, local = _place(gradient, gradient)
            sharded.setdefault(key, []).append(local)  # type: ignore[arg-type]
        else:
            if gradient is not None:
                plain.append(gradient)
            device = device or parameter.device
    device = device or torch.device("cpu")
    parts = [_power(plain, p, device)]
    for (mesh, dims), locals_ in sharded.items():
        parts.append(_reduced(_power(locals_, p, device), mesh, dims, p))
    total = torch.stack(parts)
    norm = total.max() if p == math.inf else total.sum().pow(1.0 / p)
    # The parameters' dtypes count too, so that a rank without a gradient returns the same dtype.
    found = {parameter.dtype for parameter in parameters}
    found |= {parameter.grad.dtype for parameter in parameters if parameter.grad is not None}
    return norm if torch.float64 in found else norm.float()


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | None,
    p: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their joint p-norm is at most `max_norm`. Return the norm before scaling.

    If `max_norm` is 0 or None, this only returns the norm. All ranks must call this.

    Raises:
        NonFiniteGradientError: `error_if_nonfinite` is set, and the norm is inf or NaN on some rank. The error is
            raised on every rank, and the gradients are unchanged. This check waits for the device.
        UsageError: `max_norm` is negative, or `p` is not a number from 1 to inf.
    """
    max_norm = checked_max_norm(max_norm)
    check_flags(error_if_nonfinite=error_if_nonfinite)
    parameters = _listed(parameters)
    norm = grad_norm(parameters, p)
    if error_if_nonfinite and not is_finite_everywhere(norm, parameters):
        refuse_nonfinite(((f"parameter {index}", parameter) for index, parameter in enumerate(parameters)), norm)
    if max_norm:
        # Don't branch on the value, because that would wait for the device. torch adds the same 1e-6.
        scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply all gradients by `factor` in place, with only a few kernels."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            groups.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), gradients in groups.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        torch._foreach_mul_(gradients, factor.to(device, wide) if isinstance(factor, torch.Tensor) else factor)


def is_finite_everywhere(norm: torch.Tensor, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether `norm` is finite on all ranks. All ranks must call this; all get the same result.

    If all gradients are sharded over one mesh of all ranks, the norm is already the same on every rank, so nothing is
    communicated.
    """
    finite = torch.isfinite(norm)
    if dist.is_initialized() and dist.get_world_size() > 1 and not _norm_is_global(parameters):
        flag = finite.to(torch.int32)
        mesh_device = _collective_device(flag.device)
        flag = flag.to(mesh_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())
    return bool(finite.item())


def refuse_nonfinite(parameters: Iterable[tuple[str, torch.Tensor]], norm: torch.Tensor) -> NoReturn:
    """Raise NonFiniteGradientError. The message names the gradients on this rank that are inf or NaN."""
    names = [name for name, parameter in parameters if parameter.grad is not None and not _is_finite(parameter.grad)]
    rank = dist.get_rank() if dist.is_initialized() else 0
    held = (
        f"not finite: {first_few(names, 3)}"
        if names
        else "this rank's gradients are finite, those of another rank are not"
    )
    raise NonFiniteGradientError(
        f"rank {rank}: the norm of the gradients is {norm.item()}; {held}. No optimizer stepped, and the gradients are "
        "unchanged. Inspect them, and clear them with optimizer.zero_grad() before you continue."
    )


def named_parameters_of(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter) for each parameter of `optimizer`. Unnamed ones are named "group 0, parameter 3"."""
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)


def _is_finite(gradient: torch.Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(torch.isfinite(local).all().item())


def inspect_gradients(
    parameters: Sequence[torch.Tensor],
    *,
    scaler: DynamicGradScaler | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    divisor: float | None = None,
) -> GradientReport:
    """Return the unscaled joint norm, whether it is finite on all ranks, and the factor for the gradients.

    The norm and the factor are divided by `divisor` (default: the scaler's scale). Updates the scaler, but does not
    change the gradients. All ranks must call this.
    """
    max_norm = checked_max_norm(max_norm)
    scale = scaler.scale if scaler is not None else 1.0
    scale = scale if divisor is None else divisor
    norm = grad_norm(parameters, norm_type)
    if scale != 1.0:
        norm = norm / scale
    finite = is_finite_everywhere(norm, parameters)
    if scaler is not None:
        scaler.update(not finite)
    factor = 1.0 / scale
    if max_norm and finite:
        factor *= min(1.0, max_norm / (norm.item() + 1e-6))
    return GradientReport(norm, finite, factor)


def _norm_is_global(parameters: Iterable[torch.Tensor]) -> bool:
    meshes = set()
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or any(placement.is_replicate() for placement in parameter.placements):
            return False
        meshes.add(parameter.device_mesh)
    return len(meshes) == 1 and meshes.pop().size() == dist.get_world_size()


def _collective_device(device: torch.device) -> torch.device:
    if device.type != "cpu" or "cpu:" in str(dist.get_backend_config()):
        return device
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None else device


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return parameters if isinstance(parameters, (list, tuple)) else list(parameters)


def widened(loss: torch.Tensor) -> torch.Tensor:
    """Return `loss` in at least fp32, because scaling or dividing a narrower value would round it."""
    return loss if loss.dtype == torch.float64 else loss.float()


def checked_norm_type(p: float) -> float:
    """Return `p` as a float. Raises UsageError unless 1 <= p <= inf."""
    try:
        value = float(p)
    except (TypeError, ValueError):
        value = math.nan
    if not value >= 1:
        raise UsageError(f"The norm type p is {p!r}; a norm needs 1 <= p <= inf.")
    return value


def checked_max_norm(max_norm: float | None) -> float | None:
    """Return `max_norm`. Raises UsageError unless it is None or a number >= 0.

    A negative number would reverse the gradients.
    """
    if max_norm is None:
        return None
    if isinstance(max_norm, (str, bool)) or not float(max_norm) >= 0:
        raise UsageError(f"max_norm is {max_norm!r}; it must be 0 or None (no clipping), or a number above 0.")
    return max_norm


def _place(parameter: DTensor, gradient: Any) -> tuple[_Key, torch.Tensor | None]:
    mesh, placements = parameter.device_mesh, parameter.placements
    if isinstance(gradient, DTensor):
        if any(placement.is_partial() for placement in gradient.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
        mesh, placements = gradient.device_mesh, gradient.placements
        gradient = gradient.to_local()
    dims = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    return (mesh, dims), gradient


def _power(tensors: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the p-th powers over `tensors`, in fp64. If p is inf, return the largest magnitude."""
    full = [tensor for tensor in tensors if tensor.numel()]  # an empty shard has no maximum
    total = torch.zeros((), dtype=_wide(device), device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in full:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (_, dtype), group in groups.items():
        # compute each norm in fp32, because in bf16 it would have only three digits
        wide = dtype if dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(group, p, dtype=wide)).to(device, _wide(device))
        total = torch.maximum(total, norms.max()) if p == math.inf else total + norms.pow(p).sum()
    return total


def _reduced(value: torch.Tensor, mesh: DeviceMesh, dims: tuple[int, ...], p: float) -> torch.Tensor:
    moved = value.to(mesh.device_type) if value.device.type != mesh.device_type else value
    if p == math.inf:
        # A backend's MAX may drop NaN (gloo's does), so a NaN flag is reduced along with the value.
        nan = torch.isnan(moved)
        moved = torch.stack([moved.nan_to_num(nan=0.0, posinf=math.inf), nan.to(moved.dtype)])
    for dim in dims:
        if mesh.size(dim) > 1:
            operation = dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM
            dist.all_reduce(moved, op=operation, group=mesh.get_group(dim))
    if p == math.inf:
        moved = torch.where(moved[1] > 0, math.nan, moved[0])
    return moved.to(value.device)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no fp64
