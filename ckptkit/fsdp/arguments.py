"""Checks the arguments of FSDPStrategy's methods, so that swapped arguments raise an error."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from ckptkit.errors import UsageError

_WANTED = {
    "loss": "a tensor",
    "model": "a module",
    "optimizer": "an optimizer",
    "scheduler": "a scheduler",
    "tokenizer": "a tokenizer (with save_pretrained) or None",
    "name": "a name",
    "tag": "a name or None",
    "step": "a whole number or None",
    "save_dir": "a path or URL",
    "load_dir": "a path or URL",
    "output_dir": "a path or URL",
    "url": "a path or URL",
    "is_training": "True or False",
}
_OPTIONAL = frozenset({"scheduler", "tokenizer", "tag", "step"})


def check_arguments(call: str, *, optional: frozenset[str] | set[str] = frozenset(), **values: object) -> None:
    """Check that each argument has the type that its name implies. Arguments named in `optional` may be None.

    Raises:
        UsageError: An argument has the wrong type. Names the call and each wrong argument, and says whether two of them
            look swapped.
    """
    wrong = {
        name: value
        for name, value in values.items()
        if not (value is None and (name in _OPTIONAL or name in optional)) and not _fits(name, value)
    }
    if not wrong:
        return
    found = "; ".join(
        f"{name} must be {_WANTED[name]}, found {value!r}"
        if isinstance(value, (str, int, float, type(None)))
        else f"{name} must be {_WANTED[name]}, found {type(value).__name__}"
        for name, value in wrong.items()
    )
    swapped = next(
        (
            f" Are {first} and {second} swapped?"
            for first in wrong
            for second in values
            if first != second and _fits(second, wrong[first]) and (second in wrong or _fits(first, values[second]))
        ),
        "",
    )
    hint = " To name a step, pass step=." if isinstance(wrong.get("tag"), int) else ""
    raise UsageError(f"{call}: {found}.{swapped}{hint}")


def _fits(name: str, value: object) -> bool:
    if name == "loss":
        return isinstance(value, torch.Tensor)
    if name == "model":
        # a mapping from names to models, which TrainState also accepts
        several = list(value.values()) if isinstance(value, Mapping) else [value]
        return bool(several) and all(isinstance(model, nn.Module) for model in several)
    if name == "optimizer":
        return hasattr(value, "param_groups") and callable(getattr(value, "zero_grad", None))
    if name == "scheduler":
        # An optimizer also has `step`, but as a scheduler it would step twice, so it is refused.
        return callable(getattr(value, "step", None)) and not hasattr(value, "param_groups")
    if name == "tokenizer":
        return callable(getattr(value, "save_pretrained", None)) and not isinstance(value, nn.Module)
    if name == "step":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "is_training":
        return isinstance(value, bool)
    if name in ("name", "tag"):
        return isinstance(value, str)
    return isinstance(value, (str, os.PathLike))
