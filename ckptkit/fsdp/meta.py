"""Handles models on the meta device: allocates their tensors, and finds the tensors that have no values yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ckptkit.checkpoint.state.without_values import mark_filled, mark_without_values, without_values
from ckptkit.keymaps.wrappers import without_infixes


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside the block, move the parameters of every new module to the meta device.

    Buffers are not moved, because checkpoints do not contain non-persistent buffers. A module's constructor allocates
    each parameter before it is moved, so one parameter at a time takes memory.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            moved = type(param)(param.to("meta"), requires_grad=param.requires_grad)
            moved.__dict__.update(param.__dict__)
            param = moved
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the model's meta tensors on `device`, and mark them as tensors without values.

    All other tensors keep their values. If there were meta tensors, `restore_buffers` is called at the end.
    """
    empty = {name for name, tensor in _named(model) if tensor.is_meta}
    if not empty:
        return
    real = {name: tensor.detach().clone() for name, tensor in _named(model) if not tensor.is_meta}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in _named(model):
            if name in real:
                tensor.copy_(real[name])
    mark_without_values(model, (tensor for name, tensor in _named(model) if name in empty))
    restore_buffers(model)


def restore_buffers(model: nn.Module) -> None:
    """Recompute the non-persistent buffers that have no values.

    A load cannot fill these buffers, because checkpoints do not contain them. They are recomputed by the module's
    method `reset_buffers`. For modules without this method and without parameters, the transformers model's
    `_init_weights` recomputes them.
    """
    init_weights = getattr(model, "_init_weights", None)
    for module in model.modules():
        # State dicts leave these buffers out, and no public function lists their names.
        empty = {name: buffer for name in sorted(module._non_persistent_buffers_set)
                 if (buffer := getattr(module, name)) is not None and without_values(buffer)}  # fmt: skip
        reset = getattr(module, "reset_buffers", None)
        if not empty:
            continue
        if callable(reset):
            reset()
            mark_filled(empty.values())
        elif next(module.parameters(recurse=False), None) is None and callable(init_weights):
            init_weights(module)


def uninitialized(model: nn.Module) -> frozenset[str]:
    """Return the names of the model's parameters and buffers that have no values yet."""
    return frozenset(without_infixes(name) for name, tensor in _named(model) if without_values(tensor))


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
