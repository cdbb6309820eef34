"""Checks the arguments of FSDPStrategy's methods, so that swapped arguments raise an error."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from ckptkit.arguments import wrong
from ckptkit.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def _is_model(value: Any) -> bool:
    # a mapping from names to models, which TrainState also accepts
    several = list(value.values()) if isinstance(value, Mapping) else [value]
    return bool(several) and all(isinstance(model, nn.Module) for model in several)


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and callable(getattr(value, "zero_grad", None))


def _is_scheduler(value: Any) -> bool:
    # An optimizer also has `step`, but as a scheduler it would step twice, so it is refused.
    return callable(getattr(value, "step", None)) and not hasattr(value, "param_groups")


def _is_tokenizer(value: Any) -> bool:
    return value is None or (callable(getattr(value, "save_pretrained", None)) and not isinstance(value, nn.Module))


def _is_location(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and value != ""


# For each argument name: what the argument must be, in words and as a check.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "loss": ("a tensor", lambda value: isinstance(value, torch.Tensor)),
    "model": ("a module", _is_model),
    "optimizer": ("an optimizer", _is_optimizer),
    "scheduler": ("a scheduler", _is_scheduler),
    "tokenizer": ("a tokenizer (with save_pretrained) or None", _is_tokenizer),
    "name": ("a name", lambda value: isinstance(value, str)),
    "tag": ("a name or None", lambda value: isinstance(value, str)),
    "step": ("a whole number or None", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "save_dir": ("a path or URL", _is_location),
    "load_dir": ("a path or URL", _is_location),
    "output_dir": ("a path or URL", _is_location),
    "url": ("a path or URL", _is_location),
    "is_training": ("True or False", lambda value: isinstance(value, bool)),
}


def checked(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments `names` of a method. Arguments with default None may be None."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        optional = {name for name in names if signature.parameters[name].default is None}

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments
            values = {name: given[name] for name in names if name in given}
            check_arguments(
                f"{method.__name__}({', '.join(names)})",
                **{name: value for name, value in values.items() if value is not None or name not in optional},
            )
            return method(*args, **kwargs)

        return call

    return decorate


def check_arguments(call: str, **values: object) -> None:
    """Check that each argument has the type that the parameter's name implies.

    Raises:
        UsageError: An argument has the wrong type. The message names the call and each wrong argument.
    """
    found = [str(wrong(name, value, _KINDS[name][0])) for name, value in values.items() if not _KINDS[name][1](value)]
    if found:
        hint = " To name a step, pass step=." if isinstance(values.get("tag"), int) else ""
        raise UsageError(f"{call}: {' '.join(found)}{hint}")
