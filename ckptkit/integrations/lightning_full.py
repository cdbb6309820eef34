"""Gathers sharded tensors on rank 0 for a CheckpointIO, and scatters the tensors that a CheckpointIO has loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.state.capture import check_whole
from ckptkit.checkpoint.state.model_tensors import model_tensors, parameter_names
from ckptkit.checkpoint.state.optimizer.capture import capture_optimizer, named_parameters
from ckptkit.checkpoint.state.optimizer.restore import apply_state
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.checkpoint.state.values import decode
from ckptkit.errors import CheckpointMismatchError

T = TypeVar("T")
_log = logging.getLogger(__name__)


def gathered(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return full tensors on rank 0's CPU, and {} on other ranks.

    Gathers one tensor at a time. All ranks must call this.
    """
    main = _rank() == 0
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        whole = value.detach() if isinstance(value, torch.Tensor) else value
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if main:
            found[name] = whole.to("cpu", copy=True) if isinstance(whole, torch.Tensor) else whole
    return found


def sharded_optimizer(optimizer: Any, state: TrainState) -> dict[str, Any]:
    """Return an optimizer's state by FQN, without copying: {"state": {fqn: {...}}, "param_groups": [...]}."""
    check_whole(state)
    taken = capture_optimizer(optimizer, parameter_names(state), "optimizer")
    master = getattr(optimizer, "master_state_name", None)
    states: dict[str, dict[str, Any]] = {}
    for (fqn, name), tensor in taken.tensors.items():
        states.setdefault(fqn, {})[name] = tensor
    for fqn, tensor in taken.masters.items():
        states.setdefault(fqn, {})[str(master)] = tensor
    for fqn, values in taken.tree["values"].items():
        states.setdefault(fqn, {}).update({k: decode(v, taken.loose.__getitem__) for k, v in values.items()})
    groups = [
        {k: v if k == "params" else decode(v, taken.loose.__getitem__) for k, v in group.items()}
        for group in taken.tree["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def gathered_optimizer(optimizer: Any, state: TrainState) -> dict[str, Any]:
    """Return, on rank 0, the result of `sharded_optimizer` with full tensors. Return {} on other ranks.

    All ranks must call this.
    """
    taken = sharded_optimizer(optimizer, state)
    states = {fqn: gathered(values) for fqn, values in taken["state"].items()}
    return {"state": states, "param_groups": taken["param_groups"]} if _rank() == 0 else {}


def scatter_model(module: torch.nn.Module, whole: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load rank 0's tensors into a live model. All ranks must call this. Ranks other than 0 pass {}.

    Casts are logged.

    Raises:
        CheckpointMismatchError: Names or shapes do not match, or tied weights have different values in `whole`.
            Nothing was changed. All ranks raise the same error.
    """
    live = model_tensors(module)[0]

    def look() -> tuple[dict[str, tuple[int, ...]], list[str]]:
        shapes = {name: tuple(value.shape) for name, value in whole.items() if isinstance(value, torch.Tensor)}
        return shapes, _different_twins(live, whole)

    shapes, different = _from_main(look)
    if different:
        raise CheckpointMismatchError(
            "weights that are tied in this model have different values in the checkpoint: "
            f"{', '.join(different)}. Nothing was loaded. Use a model that does not tie them."
        )
    missing, unexpected = sorted(set(live) - set(shapes)), sorted(set(shapes) - set(live))
    wrong = [name for name in live if name in shapes and shapes[name] != tuple(live[name].shape)]
    if wrong or (strict and (missing or unexpected)):
        raise CheckpointMismatchError(
            f"the checkpoint does not fit the model: {len(missing)} missing: {missing[:5]}, {len(unexpected)} "
            f"unexpected: {unexpected[:5]}, {len(wrong)} with a different shape: {wrong[:5]}. Nothing was loaded."
        )
    cast = [n for n, t in live.items() if isinstance(whole.get(n), torch.Tensor) and whole[n].dtype != t.dtype]
    if cast:
        saved, kept = whole[cast[0]].dtype, live[cast[0]].dtype
        _log.warning(
            "%d tensors of the checkpoint are cast to the model's dtype: %s from %s to %s, ...",
            len(cast), cast[0], saved, kept,
        )  # fmt: skip
    with torch.no_grad():
        for name, tensor in live.items():
            if name in shapes:
                tensor.copy_(_placed(whole.get(name), tensor, tensor.dtype, shapes[name]))


def _different_twins(live: Mapping[str, torch.Tensor], whole: Mapping[str, Any]) -> list[str]:
    """Return the pairs of tied names under which `whole` contains different values."""
    names: dict[int, str] = {}
    found = []
    for name, tensor in live.items():
        if isinstance(whole.get(name), torch.Tensor):
            first = names.setdefault(id(tensor), name)
            one, other = (whole[n].contiguous().reshape(-1).view(torch.uint8) for n in (first, name))
            if first != name and not torch.equal(one, other):  # bitwise, so that NaN equals NaN
                found.append(f"{first} and {name}")
    return found


def scatter_optimizer(optimizer: Any, state: TrainState, whole: Mapping[str, Any]) -> None:
    """Load rank 0's optimizer state into a live optimizer. All ranks must call this.

    Args:
        whole: A state dict, whose "state" is keyed by FQN or by the parameter's number. Used only on rank 0.
    """
    parameters = named_parameters(optimizer, parameter_names(state), "optimizer")
    names = list(parameters)
    given: dict[str, Any] = {}

    def look() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        given.update({names[k] if isinstance(k, int) else k: v for k, v in whole.get("state", {}).items()})
        table = {
            fqn: {k: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
            for fqn, values in given.items()
        }
        groups = whole.get("param_groups", ())
        return table, [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]

    table, settings = _from_main(look)
    states: dict[str, dict[str, Any]] = {}
    for fqn, values in table.items():
        parameter = parameters[fqn]
        for name, value in values.items():
            if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], torch.dtype):
                states.setdefault(fqn, {})[name] = value
                continue
            like = parameter if value[0] == tuple(parameter.shape) else None
            mine = given[fqn][name] if given else None
            states.setdefault(fqn, {})[name] = _placed(mine, like, value[1], value[0])
    if len(settings) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"the checkpoint's optimizer has {len(settings)} groups, the live one has {len(optimizer.param_groups)}."
        )
    apply_state(optimizer, parameters, states, {}, settings)


def _placed(whole: Any, like: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return rank 0's tensor on every rank, sharded like `like`."""
    device = like.device if like is not None else torch.device("cpu")
    full = whole.to(device=device, dtype=dtype) if whole is not None else torch.empty(shape, dtype=dtype, device=device)
    full = full.contiguous()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(full, 0)
    if isinstance(like, DTensor):
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return full


def placed_like(live: Any, value: Any) -> Any:
    """Return `value` sharded like `live`.

    A full tensor is sharded without communication, so every rank must pass the full tensor.
    """
    if not isinstance(live, DTensor) or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return value
    whole = value.to(live.device)
    return distribute_tensor(whole, live.device_mesh, live.placements, src_data_rank=None)


def _from_main(look: Callable[[], T]) -> T:
    """Call `look` on rank 0 and return the result on every rank. If `look` raises, all ranks raise the error."""
    with closing(Coordinator()) as coordinator:
        return coordinator.decide(look, "giving every rank its part of the checkpoint")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
