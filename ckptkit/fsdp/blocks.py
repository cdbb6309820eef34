"""Applies activation checkpointing and compilation to individual blocks, without renaming parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(model: Any, modules: Sequence[nn.Module]) -> None:
    """Recompute the activations of `modules` in backward. transformers models use their own implementation.

    This replaces the forward method, not the module, because a wrapper module would add its name to every FQN.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        # transformers knows what must not run twice, such as filling a key-value cache.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for module in modules:
        module.forward = functools.wraps(module.forward)(functools.partial(_recomputed, module, module.forward))


def compile_blocks(modules: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Compile the forward of `modules`. FSDP's hooks stay outside the graph, and FQNs don't change."""
    for module in modules:
        module.forward = torch.compile(module.forward, backend=backend)


def fill_unused_gradients(model: FSDPModule) -> None:
    """Let ranks skip different modules of the root unit in the same step.

    FSDP2 reduces only the gradients that exist. If one rank lacks some, its buffer has a different size and the
    reduction hangs, so missing gradients are replaced with zeros.
    """
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    else:  # torch < 2.13
        fill_unused_gradients_by_hook(model)


def fill_unused_gradients_by_hook(model: FSDPModule) -> None:
    """Replace missing gradients with zeros, in a hook that runs when the root unit's backward begins.

    For torch versions that `fill_unused_gradients` cannot configure.
    """
    root: Any = model
    inner = [module for module in root.modules() if isinstance(module, FSDPModule) and module is not root]
    inside = {id(child) for module in inner for child in module.modules()}  # type: ignore[attr-defined]
    owners = [module for module in root.modules() if id(module) not in inside]

    def fill(gradient: torch.Tensor) -> torch.Tensor:
        # FSDP's own hook on the output has already run, so the parameters registered now are the gathered ones.
        for owner in owners:
            for parameter in owner.parameters(recurse=False):
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return gradient

    def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(fill)  # type: ignore[no-untyped-call]

    root.register_forward_hook(after_forward)


def _recomputed(module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
