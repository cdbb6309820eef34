"""Converts the result of an unpickler to plain values that can be compared."""

from typing import Any

import numpy as np

from ckptkit.formats.pickles.inert import Record, Stub
from ckptkit.formats.pickles.tensors import Storage, StoredTensor


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
