"""The objects of a load: all read, and refused together, before a tensor of the state is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptkit.catalog.entry import ObjectEntry
from ckptkit.errors import CheckpointMismatchError, UnsafePickleError
from ckptkit.formats.dcp_digests import check_bytes
from ckptkit.formats.objects import load_object_torch
from ckptkit.formats.torch_bytes import parse_object
from ckptkit.storage.store import ReadInto, Store

__all__ = ["check_fits", "filled_by", "load_objects"]

_LISTED = 20


def load_objects(store: Store, entries: Mapping[str, ObjectEntry]) -> dict[str, Any]:
    """Return the values of objects by key, checked against their digests. Plain data are loaded, nothing is run.

    Raises:
        UnsafePickleError: Some ask for classes that the caller has not allowed; each is named.
    """
    raw = _read(store, entries)
    values: dict[str, Any] = {}
    unsafe: list[UnsafePickleError] = []
    for name, entry in entries.items():
        try:
            values[name] = (
                parse_object(raw[name], file=entry.path, name=name) if name in raw else load_object_torch(store, entry)
            )
        except UnsafePickleError as error:
            unsafe.append(error)
    if len(unsafe) == 1:
        raise unsafe[0]
    if unsafe:
        lines = [*map(str, unsafe[:_LISTED]), *([f"and {len(unsafe) - _LISTED} more"] if len(unsafe) > _LISTED else [])]
        raise UnsafePickleError(f"{len(unsafe)} objects are not loaded:\n  " + "\n  ".join(lines))
    return values


def _read(store: Store, entries: Mapping[str, ObjectEntry]) -> dict[str, bytearray]:
    """The bytes of those that lie as torch.save wrote them: neighbours share a read."""
    raw = {
        name: bytearray(entry.nbytes)
        for name, entry in entries.items()
        if entry.encoding == "torch_save" and entry.codec is None and entry.nbytes
    }
    store.read_many([ReadInto(entries[name].path, entries[name].start, memoryview(data)) for name, data in raw.items()])
    for name, data in raw.items():
        entry = entries[name]
        digest = entry.digest
        if digest is not None and digest.start == entry.start and digest.nbytes == entry.nbytes:
            check_bytes(digest, memoryview(data), entry.path, name)
    return raw


def check_fits(current: Any, value: Any, name: str) -> None:
    """Check that a tensor among the objects is like the one that the state has there, if it has one.

    Raises:
        CheckpointMismatchError: Shapes or dtypes differ.
    """
    if not _is_filled(current, value):
        return
    if (current.shape, current.dtype, current.layout) != (value.shape, value.dtype, value.layout):
        raise CheckpointMismatchError(
            f"{name}: the checkpoint has {value.dtype} {list(value.shape)} ({value.layout}), the state has "
            f"{current.dtype} {list(current.shape)} ({current.layout})."
        )


def filled_by(current: Any, value: Any) -> Any:
    """Return what stands in the state once this value was loaded: the tensor that is there, filled, or the value."""
    if not _is_filled(current, value):
        return value
    with torch.no_grad():
        current.copy_(value)  # not of a detached alias: a quantized tensor would keep its own scale
    return current


def _is_filled(current: Any, value: Any) -> bool:
    both = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)
    return both and not isinstance(current, DTensor) and not current.is_meta
