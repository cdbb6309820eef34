"""Initializes a sharded model with the values that a single process would draw. Holds one full module at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptkit.checkpoint.state.local_part import part_view
from ckptkit.checkpoint.state.without_values import mark_filled
from ckptkit.errors import UsageError
from ckptkit.formats.dcp.fill import part_of


@torch.no_grad()
def reset_parameters(model: nn.Module, *, seed: int | None = None) -> None:
    """Initialize every parameter with the values that a single process would draw. All ranks must call this.

    Every rank draws one module's full parameters at a time on the host, and keeps only its own shards. All ranks draw
    from the same random state (`seed`, or rank 0's state), so they need not communicate parameters. Drawing directly
    into DTensors would be wrong: every rank would put the same numbers into a different shard.

    Children are initialized before their parents, by transformers' `_init_weights` or by their own `reset_parameters`.
    A module with neither method keeps its values. A tied weight is drawn once for each of its names, but only the
    values for the first name are kept, as in a single process that ties weights after it has created the modules.
    PEFT's LoRA layers are initialized last, by PEFT's own method: by default, lora_B is 0.

    Raises:
        UsageError: The base weights determine the adapter's initial values (`init_lora_weights="pissa"`, for example).
    """
    done: dict[int, tuple[int, str]] = {}
    with torch.random.fork_rng(devices=[]):
        _seed(seed)
        for module, init_weights in _children_first(model):
            draw = _method(module, init_weights)
            if draw is None:
                continue
            # `_init_weights` writes only the module's own parameters. For nn.MultiheadAttention, it also writes those
            # of the child `out_proj`.
            own_only = init_weights is not None and not isinstance(module, nn.MultiheadAttention)
            with _full_parameters([module] if own_only else list(module.modules()), done):
                draw()
        for module, adapters in _lora_layers(model):
            with _full_parameters(list(module.modules()), done):
                for adapter, init in adapters.items():
                    module.reset_lora_parameters(adapter, init)
    mark_filled(parameter for parameter in model.parameters() if id(parameter) in done)


def _lora_layers(model: nn.Module) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each LoRA layer of PEFT, with the value of `init_lora_weights` of each of its adapters.

    Raises:
        UsageError: The base weights determine an adapter's initial values.
    """
    configs: dict[str, Any] = next((vars(m)["peft_config"] for m in model.modules() if "peft_config" in vars(m)), {})
    inits = {name: getattr(config, "init_lora_weights", True) for name, config in configs.items()}
    module: Any
    for module in model.modules():
        if not hasattr(module, "reset_lora_parameters"):
            continue
        mine = {name: inits.get(name, True) for name in module.r}
        if others := [init for init in mine.values() if init not in (True, False, "gaussian")]:
            raise UsageError(
                f"reset_parameters: init_lora_weights={others[0]!r} computes an adapter from the base weights. Create "
                "the model without meta_init, or use init_lora_weights=True."
            )
        yield module, mine


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)
        return
    if dist.is_initialized() and dist.get_world_size() > 1:
        states = [torch.get_rng_state()]
        dist.broadcast_object_list(states, src=0)
        torch.set_rng_state(states[0])


def _children_first(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the modules in the order of `Module.apply`, each with the nearest enclosing `_init_weights` (or None)."""
    order: list[tuple[nn.Module, Any]] = []
    seen: set[int] = set()

    def visit(module: nn.Module, init_weights: Any) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        own = getattr(module, "_init_weights", None)  # a nested model uses its own method
        init_weights = own if callable(own) else init_weights
        for child in module.children():
            visit(child, init_weights)
        order.append((module, init_weights))

    visit(model, None)
    return order


def _method(module: nn.Module, init_weights: Any) -> Callable[[], object] | None:
    if init_weights is not None:
        return lambda: init_weights(module)
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def _full_parameters(owners: list[nn.Module], done: dict[int, tuple[int, str]]) -> Iterator[None]:
    """Inside the block, replace the parameters in `owners` with full, uninitialized host tensors.

    On exit, put the parameters back. If a full tensor was written to, copy this rank's shard of it into the parameter.
    """
    swapped: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    whole: dict[int, nn.Parameter] = {}
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in whole:
                # The system allocates memory only when it is written to, so parameters that stay unwritten cost
                # nothing.
                full = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            swapped.append((owner, name, parameter, whole[id(parameter)]))
    before = {id(full): full._version for full in whole.values()}
    try:
        for owner, name, _, full in swapped:
            owner._parameters[name] = full
        yield
    finally:
        for owner, name, parameter, _ in swapped:
            owner._parameters[name] = parameter
    for owner, name, parameter, full in swapped:
        # Copy a parameter only under its first name. Under this name, a parent may overwrite what its child drew.
        if full._version != before[id(full)] and done.setdefault(id(parameter), (id(owner), name)) == (id(owner), name):
            view = part_view(name, parameter)
            for part in view.parts:
                box = part.box
                if box.numel:  # the shape of an empty local tensor need not match
                    mine = part_of(view.local, part.local_offsets, box.sizes)
                    mine.copy_(part_of(full.data, box.offsets, box.sizes))
