"""Compares values of a training state, such as numbers, tensors and containers of both."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.values import encode
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.host_bytes import local_part, row_major, why_not_dense

if TYPE_CHECKING:
    import torch


def same_values(one: Any, other: Any) -> bool:
    """Return whether two values are equal.

    A list can equal a tuple. A number can equal a tensor of one element. Two tensors of several elements are equal if
    their dtypes, shapes and bytes are equal. Values of unknown types are equal only if they are the same object.
    """
    import torch

    both = one, other
    if one is other:
        return True
    if all(isinstance(value, (tuple, list)) for value in both):
        return len(one) == len(other) and all(map(same_values, one, other))
    if all(isinstance(value, Mapping) for value in both):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    a, b = number(one, other), number(other, one)
    if a is not None and b is not None:
        return bool(a == b) or (is_real(a) and is_real(b) and math.isnan(a) and math.isnan(b))
    if all(isinstance(value, torch.Tensor) and not why_not_dense(value) for value in both):
        return same_tensors(one, other)
    mine, theirs = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    try:
        trees = encode(one, "", mine), encode(other, "", theirs)
    except SaveError:
        return False
    return trees[0] == trees[1] and all(same_tensors(mine[key], theirs[key]) for key in mine)


def number(value: Any, like: Any) -> Any:
    """Return `value` if it is a number. If it is a tensor of one element, return the element. Else return None.

    If `like` is a floating-point tensor, a number is rounded to the dtype of `like`.
    """
    import torch

    if isinstance(value, torch.Tensor):
        local = local_part(value)
        return None if why_not_dense(local) or local.numel() != 1 else local.item()
    if isinstance(like, torch.Tensor) and like.is_floating_point() and is_real(value):
        return torch.tensor(float(value), dtype=like.dtype).item()
    return value if isinstance(value, numbers.Number) else None


def is_real(value: Any) -> bool:
    """Return whether `value` is a real number that a float can hold. Infinity counts as a real number."""
    try:
        return isinstance(value, numbers.Real) and isinstance(float(value), float)
    except OverflowError:
        return False


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    mine, theirs = (row_major(local_part(t)).cpu().reshape(-1).view(torch.uint8) for t in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(mine, theirs)
