"""The values of tensors that may be sharded."""

from typing import Any

from torch.distributed.tensor import DTensor


def local(value: Any) -> Any:
    """Return this rank's part of a DTensor, and anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Any) -> Any:
    """Return a DTensor whole, and anything else as it is. All ranks of its mesh must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
