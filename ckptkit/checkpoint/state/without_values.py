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

# Maps a tensor's id to its version when it was marked, and its memory. Weak references to the tensors are not used,
# because `Module.to` refuses to change a tensor that has weak references. A later tensor may have the same id, but not
# the same memory.
_marked: dict[int, tuple[int, weakref.ref[torch.UntypedStorage] | None]] = {}


def mark_without_values(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Remember, while `model` exists, that the given tensors of the model have no values yet.

    Fills floating-point tensors with NaN, so that the results of a run that uses them are NaN.
    """
    import torch

    ids = []
    for tensor in tensors:
        local = local_part(tensor).detach()
        plain = type(local) is torch.Tensor
        if plain and _can_be_nan(local):
            local.fill_(torch.nan)
        _marked[id(tensor)] = _version(tensor), weakref.ref(local.untyped_storage()) if plain else None
        ids.append(id(tensor))
    weakref.finalize(model, _forget, ids).atexit = False


def mark_filled(tensors: Iterable[torch.Tensor]) -> None:
    """Remember that the given tensors have values now.

    This is needed only after writes that do not change a tensor's version (see `_version`).
    """
    if _marked:
        _forget(map(id, tensors))


def never_filled(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the reason why each marked tensor can't be saved, by the tensor's name."""
    empty = [name for name, tensor in tensors.items() if id(tensor) in _marked and without_values(tensor)]
    return dict.fromkeys(empty, _NEVER_FILLED)


def without_values(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on the meta device, or has not been written to since `mark_without_values`."""
    version, memory = _marked.get(id(tensor), (-1, None))
    if version != _version(tensor):
        return tensor.is_meta
    local = local_part(tensor).detach()
    if not local.numel():
        return False
    if _can_be_nan(local):  # a write through `.data` does not change the version, but it replaces the NaN
        return bool(local.flatten()[0].isnan())
    return memory is None or memory() is local.untyped_storage()


def _forget(ids: Iterable[int]) -> None:
    for key in ids:
        _marked.pop(key, None)


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _version(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write to the tensor, or to the local part of a DTensor."""
    return tensor._version + local_part(tensor)._version
