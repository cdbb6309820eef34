"""Splits parameters, with their names, into optimizer groups by weight decay, dtype, mesh and placement."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.errors import UsageError
from ckptkit.keymaps.wrappers import without_infixes

NoDecay = str | type[nn.Module] | Callable[[str, nn.Module, nn.Parameter], bool]
"""A choice of parameters to exclude from weight decay.

The choice is a name component, a module class, or a function that takes the FQN, the owning module and the parameter.
"""

_NORM_CLASS = re.compile(r"norm(?:act|\d+d)*$", re.IGNORECASE)  # LlamaRMSNorm, LayerNorm2d
_NORM_NAME = re.compile(r"(?:^|_)(?:(?:layer|rms|batch|group)?norm|ln|bn|gn)\d*(?:_|$)", re.IGNORECASE)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)  # the last: batch and instance norms


def is_norm(name: str, module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether `parameter` of `module` is the scale or shift of a normalization.

    This is true for all parameters of torch's norm classes. For other classes, the parameter must have at most one
    dimension. In addition, the class name must end with "Norm", or the last or second-last component of `name` must
    look like a normalization: `ln_1.weight`, `bn.weight`, `norm1.scale`.
    """
    if isinstance(module, _NORMS):
        return True
    if parameter.ndim > 1:  # a projection that is named `norm` or is part of a normalization
        return False
    return bool(
        _NORM_CLASS.search(type(module).__name__) or any(_NORM_NAME.search(part) for part in name.split(".")[-2:])
    )


NO_DECAY: tuple[NoDecay, ...] = ("bias", is_norm)
"""The default: biases and normalizations. To exclude more, pass `no_decay=(*NO_DECAY, "embed", MyScale)`."""


def param_groups(
    model: nn.Module, *, weight_decay: float = 0.0, no_decay: Sequence[NoDecay] = NO_DECAY
) -> list[dict[str, Any]]:
    """Return groups `{"params", "param_names", "weight_decay"}`, which together contain each trainable parameter once.

    All parameters of a group have the same dtype, mesh and placement, and a group never mixes plain tensors with
    DTensors. Fused and foreach kernels need this. Names are checkpoint FQNs, without the prefixes that torch.compile
    and checkpoint wrappers add.

    Args:
        no_decay: Parameters that match any of these items are not decayed. A string matches whole components of the
            name, separated by "." or "_": "bias" matches `up.bias` and `bias_ih_l0`, but not `unbiased.weight`. A
            string may have several components ("lm_head.weight").

    Raises:
        UsageError: An item of `no_decay` is not a string, a module class or a function.
    """
    rules = [_rule(item) for item in _several(no_decay)]
    groups: dict[Any, dict[str, Any]] = {}
    for raw_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = without_infixes(raw_name)
        owner = model.get_submodule(raw_name.rpartition(".")[0])
        decay = 0.0 if any(rule(name, owner, parameter) for rule in rules) else weight_decay
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        key = (decay, parameter.dtype, layout)
        group = groups.setdefault(key, {"params": [], "param_names": [], "weight_decay": decay})
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(groups.values())


def _several(no_decay: object) -> Sequence[Any]:
    if isinstance(no_decay, str) or not isinstance(no_decay, (list, tuple, set, frozenset)):
        raise UsageError(f"no_decay is {no_decay!r}; it must be a list. Try no_decay=[{no_decay!r}].")
    return list(no_decay)


def _rule(item: Any) -> Callable[[str, nn.Module, nn.Parameter], bool]:
    if isinstance(item, str) and item.strip("._"):
        # "norm.weight" must match two adjacent components: it matches `attention_norm.weight` and `norm1.weight`, but
        # not `norm.proj.weight`.
        parts = [rf"(?:[^.]*_)?{re.escape(part)}\d*(?:_[^.]*)?" for part in item.strip("._").split(".")]
        pattern = re.compile(r"(?:^|\.)" + r"\.".join(parts) + r"(?:\.|$)", re.IGNORECASE)
        return lambda name, module, parameter: pattern.search(name) is not None
    if isinstance(item, type) and issubclass(item, nn.Module):
        return lambda name, module, parameter: isinstance(module, item)
    if callable(item) and not isinstance(item, type):
        return item  # type: ignore[no-any-return]
    raise UsageError(
        f"no_decay contains {item!r}; each item must be components of a parameter name ('bias', 'norm.weight'), a "
        "module class, or a function."
    )
