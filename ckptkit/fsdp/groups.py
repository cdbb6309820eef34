"""Parameter groups as optimizers over DTensors need them: by weight decay, dtype, mesh and placement, with names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.errors import UsageError

__all__ = ["NO_DECAY", "NoDecay", "is_norm", "param_groups", "clean_fqn"]

NoDecay = str | type[nn.Module] | Callable[[str, nn.Module, nn.Parameter], bool]
"""What isn't decayed: a part of a name, a class of modules, or a function of FQN, owning module and parameter."""

_NORM_CLASS = re.compile(r"norm(?:act|\d+d)*$", re.IGNORECASE)  # LlamaRMSNorm, LayerNorm2d
_NORM_NAME = re.compile(r"(?:^|_)(?:(?:layer|rms|batch|group)?norm|ln|bn|gn)\d*(?:_|$)", re.IGNORECASE)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)  # the last: batch and instance norms


def is_norm(name: str, module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether `parameter`, which `module` owns, is the scale or shift of a normalization.

    By the module's class; by a class name that ends with "Norm", as models bring their own; or, for parameters of one
    dimension, by a part of the module's or the parameter's name: `ln_1.weight`, `bn.weight`, `norm1.scale`.
    """
    if isinstance(module, _NORMS):
        return True
    if parameter.ndim > 1:  # a projection that is called `norm`, or sits inside of one
        return False
    return bool(
        _NORM_CLASS.search(type(module).__name__) or any(_NORM_NAME.search(part) for part in name.split(".")[-2:])
    )


NO_DECAY: tuple[NoDecay, ...] = ("bias", is_norm)
"""Biases and normalizations. To keep more from decaying: `no_decay=(*NO_DECAY, "embed", MyScale)`."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def param_groups(
    model: nn.Module, *, weight_decay: float = 0.0, no_decay: Sequence[NoDecay] = NO_DECAY
) -> list[dict[str, Any]]:
    """Return groups `{"params", "param_names", "weight_decay"}` that together hold each trainable parameter once.

    fused and foreach kernels take one dtype and either only plain tensors or only DTensors of one mesh, so a group
    never mixes those. Names are checkpoint FQNs: without what torch.compile and checkpoint wrappers put in.

    Args:
        no_decay: Parameters that one of these means are not decayed. A string is a part of the name between "." or
            "_" and may have several ("lm_head.weight"): "bias" means `up.bias` and `bias_ih_l0`, not `unbiased.weight`.

    Raises:
        UsageError: `no_decay` holds something else.
    """
    rules = [_rule(item) for item in _several(no_decay)]
    groups: dict[Any, dict[str, Any]] = {}
    for raw_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = clean_fqn(raw_name)
        owner = model.get_submodule(raw_name.rpartition(".")[0])
        decay = 0.0 if any(rule(name, owner, parameter) for rule in rules) else weight_decay
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        key = (decay, parameter.dtype, layout)
        group = groups.setdefault(key, {"params": [], "param_names": [], "weight_decay": decay})
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(groups.values())


def clean_fqn(name: str) -> str:
    """Return `name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _several(no_decay: object) -> Sequence[Any]:
    if isinstance(no_decay, str) or not isinstance(no_decay, (list, tuple, set, frozenset)):
        raise UsageError(f"no_decay is {no_decay!r}; it must be a list. Try no_decay=[{no_decay!r}].")
    return list(no_decay)


def _rule(item: Any) -> Callable[[str, nn.Module, nn.Parameter], bool]:
    if isinstance(item, str) and item.strip("._"):
        # "norm.weight" is two parts in a row: of `attention_norm.weight` and `norm1.weight`, not of `norm.proj.weight`
        parts = [rf"(?:[^.]*_)?{re.escape(part)}\d*(?:_[^.]*)?" for part in item.strip("._").split(".")]
        pattern = re.compile(r"(?:^|\.)" + r"\.".join(parts) + r"(?:\.|$)", re.IGNORECASE)
        return lambda name, module, parameter: pattern.search(name) is not None
    if isinstance(item, type) and issubclass(item, nn.Module):
        return lambda name, module, parameter: isinstance(module, item)
    if callable(item) and not isinstance(item, type):
        return item  # type: ignore[no-any-return]
    raise UsageError(f"no_decay holds {item!r}; it must hold parts of names, classes of modules, or functions.")
