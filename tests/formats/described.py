"""Converts the result of an unpickler to plain values that can be compared."""

from typing import Any

import numpy as np

from ckptkit.formats.pickles.inert import Record, Stub
from ckptkit.formats.pickles.tensors import Storage, StoredTensor


def shown(value: Any) -> Any:
    """Return a stub as plain values, to compare two results."""
    if isinstance(value, Record):
        return (value.kind, shown(value.args), shown(value.state))
    if isinstance(value, Stub) and not isinstance(value, dict):
        return (type(value).__name__, [shown(getattr(value, slot, None)) for slot in type(value).__slots__])
    if isinstance(value, dict):
        return [(shown(k), shown(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(shown, value)]
    return value


def described(value: Any) -> Any:
    """Like `shown`, with records of tensors field by field."""
    if isinstance(value, dict):
        return [(described(k), described(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (StoredTensor, Storage)) or hasattr(value, "__dataclass_fields__"):
        slots = getattr(type(value), "__slots__", None) or vars(value)
        return (type(value).__name__, [described(getattr(value, slot)) for slot in slots])
    return shown(value)
