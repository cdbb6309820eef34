"""Creates the tensors of an optimizer's states, and puts loaded states and settings into the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.optimizer.layout import Held, new_held, new_placed
from ckptkit.checkpoint.state.optimizer.methods import finish_load, with_inner
from ckptkit.formats.dcp.host_bytes import local_part, placed_like, without_subclass

if TYPE_CHECKING:
    import torch


def new_state_tensor(
    parameter: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    *,
    on_device: bool,
    held: Held | None = None,
) -> torch.Tensor:
    """Return an uninitialized tensor for one of a parameter's states, sharded over ranks like the parameter.

    If the state's shape differs from the parameter's, the state is sharded only along dimensions of equal size.

    Args:
        name: The state's name, such as "exp_avg".
        held: How the state is stored. None: as the parameter is stored.
        on_device: Whether the group keeps step counts on the device (fused or capturable). If False, a tensor of one
            element is put on the CPU, where torch keeps step counts.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = tuple(shape)
    made: torch.Tensor | None = new_held(parameter, held, dtype, shape)
    if made is not None:
        return made
    single = torch.Size(shape).numel() == 1
    if isinstance(parameter, DTensor) and shape != tuple(parameter.shape) and not single:
        # The state has no entry in `held`, so it was saved as a DTensor. Accept only Shard itself: a strided shard
        # (FSDP over tensor parallelism) has different parts.
        least = min(len(shape), parameter.dim())
        same = {dim for dim in range(least) if shape[dim] == parameter.shape[dim]}
        placements = [p if type(p) is Shard and p.dim in same else Replicate() for p in parameter.placements]
        return new_placed(parameter, placements, dtype, shape)
    # If the shape is (), only the name tells a step count from a moment. torch's load_state_dict also uses the name.
    if shape != tuple(parameter.shape) or (not shape and name == "step"):
        device = parameter.device if on_device or not single else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return torch.empty_like(without_subclass(parameter), dtype=dtype, requires_grad=False)
    local = torch.empty_like(without_subclass(local_part(parameter)), dtype=dtype, requires_grad=False)
    return placed_like(parameter, local)


def is_paged(state: torch.Tensor) -> bool:
    """Return whether a tensor is in bitsandbytes' paged memory, which moves between host and device on demand."""
    return bool(getattr(state, "is_paged", False))


def new_paged(
    optimizer: Any, parameter: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Return a new state in bitsandbytes' paged memory, or None if the optimizer would not put this state there.

    A paged optimizer puts only its two moments into paged memory, and only on an accelerator.
    """
    import torch
    from torch.distributed.tensor import DTensor

    pages = next((one for one in with_inner(optimizer) if is_paged(one) and hasattr(one, "get_state_buffer")), None)
    if pages is None or name not in ("state1", "state2") or dtype not in (torch.float32, torch.uint8):
        return None
    if isinstance(parameter, DTensor):
        return None
    allocate = None
    if shape == tuple(parameter.shape):
        allocate = pages.get_state_buffer
    elif shape == (2, *parameter.shape):
        allocate = getattr(pages, "_get_state_double_buffer", None)  # AdEMAMix has two moments in one state
    return None if allocate is None else allocate(parameter, dtype=dtype)


def apply_state(
    optimizer: Any,
    parameters: Mapping[str, torch.nn.Parameter],
    states: Mapping[str, dict[str, Any]],
    shared: Mapping[str, Any],
    settings: Iterable[Mapping[str, Any]],
    *,
    keep: Iterable[str] = (),
) -> None:
    """Replace the optimizer's state, and set the settings of each group.

    Args:
        states: The new state of each parameter, by FQN.
        shared: The new state that belongs to no parameter.
        keep: FQNs of parameters that keep their current state.
    """
    kept = {fqn: optimizer.state[parameters[fqn]] for fqn in keep if parameters[fqn] in optimizer.state}
    optimizer.state.clear()
    for fqn, parameter in parameters.items():
        if fqn in kept:
            optimizer.state[parameter] = kept[fqn]
        elif fqn in states:
            optimizer.state[parameter] = states[fqn]
    optimizer.state.update(shared)
    _apply_settings(optimizer, settings)
    finish_load(optimizer)


def _apply_settings(optimizer: Any, settings: Iterable[Mapping[str, Any]]) -> None:
    """Set the settings of each live group.

    A learning rate in a tensor is updated in place and keeps its device, because compiled steps and schedulers refer to
    the tensor.
    """
    import torch

    for group, new in zip(optimizer.param_groups, settings, strict=True):
        for key, value in new.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor):
                with torch.no_grad():
                    live.copy_(value) if isinstance(value, torch.Tensor) else live.fill_(float(value))
            elif isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
                group[key] = value.item()
            else:
                group[key] = value
