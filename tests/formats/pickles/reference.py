"""C's unpickler with our allow-list, as a reference for `walk`, and results as values that can be compared."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.pickles.allowed import allowed_global
from ckptkit.formats.pickles.inert import Record, Stub, unknown_type
from ckptkit.formats.pickles.tensors import Storage, StoredTensor
from ckptkit.formats.pickles.walk import PersistentLoad, Unknown, guarded


class _Reference(pickle.Unpickler):
    functions: Mapping[tuple[str, str], Any]
    storage: PersistentLoad | None
    unknown: Unknown

    def find_class(self, module: str, name: str) -> Any:
        found = self.functions.get((module, name)) or allowed_global(module, name)
        if found is None and self.unknown == "record":
            return unknown_type(f"{module}.{name}"[:200])
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found

    def persistent_load(self, identity: Any) -> Any:
        assert self.storage is not None
        return self.storage(identity)


def loads_in_c(
    data: bytes,
    *,
    file: str,
    functions: Mapping[tuple[str, str], Any] | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
    max_bytes: int | None = None,
) -> Any:
    """Return what `walk.loads` must return, by C's unpickler."""
    reader = _Reference(io.BytesIO(data), encoding="latin1")
    reader.functions, reader.storage, reader.unknown = functions or {}, persistent_load, unknown
    try:
        return guarded(file, reader.load)
    except (pickle.UnpicklingError, AssertionError) as error:
        raise CorruptCheckpointError(f"{file}: {error}") from None


def described(value: Any) -> Any:
    """Return stubs, and records of tensors field by field, as plain values."""
    if isinstance(value, Record):
        return (value.kind, described(value.args), described(value.state))
    if isinstance(value, dict):
        return [(described(k), described(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (Stub, StoredTensor, Storage)) or hasattr(value, "__dataclass_fields__"):
        slots = getattr(type(value), "__slots__", None) or vars(value)
        return (type(value).__name__, [described(getattr(value, slot, None)) for slot in slots])
    return value
