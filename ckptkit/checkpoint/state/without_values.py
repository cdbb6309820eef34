"""Remembers tensors that were allocated without values, so that a save can refuse them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ckptkit.formats.dcp.host_bytes import local_part

if TYPE_CHECKING:
    import torch

_NEVER_FILLED = (
    "was built on the meta device and never given values. Load a checkpoint, or call load_hf or reset_parameters"
)

# By id, because tensors compare element by element: the tensor, and its version when it was marked.
_marked: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}


def mark_without_values(tensors: Iterable[torch.Tensor]) -> None:
    """Remember that these tensors have no values yet. Floats become NaN, so that a run on them can't go unnoticed."""
    import torch

    for tensor in tensors:
        key, local = id(tensor), local_part(tensor).detach()
        if type(local) is torch.Tensor and _can_be_nan(local):
            local.fill_(torch.nan)
        found = weakref.ref(tensor, lambda _, key=key: _marked.pop(key, None))  # type: ignore[misc]
        _marked[key] = found, _version(tensor)


def mark_filled(tensors: Iterable[torch.Tensor]) -> None:
    """Remember that these tensors have values now. Needed only for writes to their memory that torch does not count."""
    if _marked:
        for tensor in tensors:
            _marked.pop(id(tensor), None)


def never_filled(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return why the marked tensors can't be saved, by name."""
    return {name: _NEVER_FILLED for name, tensor in tensors.items() if without_values(tensor)} if _marked else {}


def without_values(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on the meta device, or was marked and nothing has been written to it since."""
    found = _marked.get(id(tensor))
    if found is None or found[0]() is not tensor or found[1] != _version(tensor):
        return tensor.is_meta
    local = local_part(tensor).detach()
    # A write through `.data` does not change the version, but it replaces the NaN.
    return bool(local.numel()) and (not _can_be_nan(local) or bool(local.flatten()[0].isnan()))


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write to the tensor, or to the local part of a DTensor."""
    return tensor._version + local_part(tensor)._version
