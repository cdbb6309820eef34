"""Handles models on the meta device: allocates their tensors and tracks which of them have no values yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ckptkit.errors import SaveError
from ckptkit.fsdp.groups import clean_fqn
from ckptkit.units import first_few

# Names of the tensors that have no values, by model. The keys are weak, so deleted models are forgotten.
_uninitialized: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are built inside the block on the meta device.

    Buffers keep their values: non-persistent buffers are in no checkpoint, so the module has the only copy. At most one
    parameter is allocated at a time, and its memory is never written.
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
    """Allocate the model's meta tensors on `device`, without values, and record their names.

    All other tensors keep their values.
    """
    empty = frozenset(clean_fqn(name) for name, tensor in _named(model) if tensor.is_meta)
    if not empty:
        return
    real = {name: tensor.detach().clone() for name, tensor in _named(model) if not tensor.is_meta}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in _named(model):
            if name in real:
                tensor.copy_(real[name])
    _uninitialized[model] = _uninitialized.get(model, frozenset()) | empty
    restore_buffers(model)


def restore_buffers(model: nn.Module) -> None:
    """Recompute non-persistent buffers that have no values, because no checkpoint contains them.

    This works for transformers models (`_init_weights`) and for modules that have a method `reset_buffers`.
    """
    missing = _uninitialized.get(model, frozenset())
    init_weights = getattr(model, "_init_weights", None)
    restored = []
    for raw_name, module in model.named_modules():
        # State dicts leave these buffers out, and no public function lists their names.
        names = [
            name
            for buffer in sorted(module._non_persistent_buffers_set)
            if (name := clean_fqn(f"{raw_name}.{buffer}" if raw_name else buffer)) in missing
        ]
        reset = getattr(module, "reset_buffers", None)
        if not names or not (callable(reset) or callable(init_weights)):
            continue
        if callable(reset):
            reset()
        elif next(module.parameters(recurse=False), None) is None and callable(init_weights):
            before = {name: module.get_buffer(name.rpartition(".")[2])._version for name in names}
            init_weights(module)
            names = [name for name in names if module.get_buffer(name.rpartition(".")[2])._version != before[name]]
        else:
            continue
        restored += names
    mark_initialized(model, restored)


def uninitialized(model: nn.Module) -> frozenset[str]:
    """Return the names of the model's parameters and buffers that have no values yet."""
    empty = {name for name, t in _named(model) if t.is_meta}
    for prefix, module in model.named_modules():  # a wrapper may have been added after the allocation
        empty |= {f"{prefix}.{name}" if prefix else name for name in _uninitialized.get(module, ())}
    return frozenset(map(clean_fqn, empty))


def mark_initialized(model: nn.Module, names: Iterable[str]) -> None:
    """Record that the model's tensors `names` have values now."""
    _uninitialized[model] = _uninitialized.get(model, frozenset()).difference(names)


def note_loaded(model: nn.Module, absent: Iterable[str]) -> None:
    """Record that all tensors have values now, except those that a load has left out (`absent`).

    Checkpoints do not contain non-persistent buffers, so these are recomputed.
    """
    keys = tuple(absent)
    unsaved = {
        clean_fqn(f"{name}.{buffer}" if name else buffer)
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
    }
    mark_initialized(model, [n for n in uninitialized(model) - unsaved if not any(key.endswith(n) for key in keys)])
    restore_buffers(model)


def require_initialized(model: nn.Module) -> None:
    """Check that all of the model's tensors have values.

    Raises:
        SaveError: Some tensors have no values. Names them and says how to set them.
    """
    left = sorted(uninitialized(model))
    if left:
        raise SaveError(
            f"{first_few(left)}: built on the meta device and never given values, so there is nothing to save. "
            "Load a checkpoint, call load_hf, or call reset_parameters first."
        )


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
