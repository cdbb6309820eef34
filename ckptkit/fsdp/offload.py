"""Moves optimizer state and models to the host and back. Each call waits until the move is complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.errors import UsageError

O = TypeVar("O", bound=Optimizer)  # noqa: E741 - the one-letter name of a type variable
T = TypeVar("T")


def offload_optimizer(optimizer: O) -> O:
    """Move all tensors in the optimizer's state to the host. Return the optimizer.

    This includes a MasterWeightOptimizer's masters. You can save while the state is offloaded. Call `load_optimizer`
    before the next step.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                # A non-blocking copy from a device goes to pinned memory; `_finish` waits for all copies.
                state[name] = value.to("cpu", non_blocking=True)
    _finish()
    return optimizer


def load_optimizer(optimizer: O) -> O:
    """Move the optimizer's state back to the device of its parameters. Return the optimizer."""
    on_device = _step_on_device(optimizer)
    for parameter, state in optimizer.state.items():
        device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
        for name, value in state.items():
            stays = name == "step" and id(parameter) not in on_device
            if isinstance(value, torch.Tensor) and not stays:
                state[name] = value.to(device, non_blocking=True)
    _finish()
    return optimizer


def offload_model(models: T, *, empty_cache: bool = True) -> T:
    """Move one module, or each module in a list or tuple, to the host. Return the argument.

    Other objects are ignored.

    Args:
        empty_cache: Return the freed memory from torch's caching allocator to the device.

    Raises:
        UsageError: The argument is or contains an optimizer.
    """
    for module in _modules(models):
        module.to("cpu")
    _finish()
    if empty_cache and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if device is not None:
            getattr(torch, device.type).empty_cache()
    return models


def reload_model(models: T, *, device: torch.device | str | None = None) -> T:
    """Move one module, or each module in a list or tuple, back to `device`. Return the argument.

    Other objects are ignored.

    Args:
        device: None means the accelerator, or the CPU if there is no accelerator.

    Raises:
        UsageError: The argument is or contains an optimizer.
    """
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found if found is not None else "cpu"
    for module in _modules(models):
        module.to(device, non_blocking=True)
    _finish()
    return models


def _modules(models: object) -> Iterable[nn.Module]:
    # A ModuleList counts as one module, a list as several.
    several = models if isinstance(models, (list, tuple)) else [models]
    if any(isinstance(given, Optimizer) for given in several):
        raise UsageError("offload_model and reload_model move modules, found an optimizer. Try offload_optimizer.")
    return [module for module in several if isinstance(module, nn.Module)]


def _step_on_device(optimizer: Optimizer) -> set[int]:
    """Return the `id()` of each parameter whose step count must be on the device, because device kernels read it."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
