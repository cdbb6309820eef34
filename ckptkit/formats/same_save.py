"""Whether the files of all ranks are of one save: what each says of how far the run was, and no copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats._torch_records import StoredTensor

__all__ = ["check_copies", "check_counters", "check_steps"]

_TELLING = 16  # elements that are the same in two ranks by no accident


def check_steps(states: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
    """Check that the optimizers of all ranks count the same steps.

    Parameters may have been stepped more or less often than others; that no count at all is shared by two ranks
    happens only where a file is of another save. Tensor bytes are not read: their CRC-32 are compared.

    Args:
        states: For each rank, the states of its parameters: {"step": ..., "exp_avg": ...}.
        names: The file of each rank.

    Raises:
        CorruptCheckpointError: It names the two files.
    """
    counts = [frozenset(_counts(state)) for state in states]
    first = next((rank for rank, found in enumerate(counts) if found), None)
    for rank, found in enumerate(counts):
        if first is not None and found and found.isdisjoint(counts[first]):
            raise CorruptCheckpointError(
                f"{names[rank]} is of another step than {names[first]}: their optimizers count different steps. "
                "Files of two saves lie together."
            )


def check_counters(counters: Sequence[Any], names: Sequence[str], what: str) -> None:
    """Check that a number that every rank saved is the same in all; ranks that have None are passed over.

    Raises:
        CorruptCheckpointError: It names the two files.
    """
    known = [(count, name) for count, name in zip(counters, names, strict=True) if type(count) is int]
    for count, name in known:
        if count != known[0][0]:
            raise CorruptCheckpointError(
                f"{name} is of another step than {known[0][1]}: {what} is {count} in the one and {known[0][0]} in the "
                "other. Files of two saves lie together."
            )


def check_copies(flats: Sequence[Sequence[StoredTensor]], names: Sequence[str]) -> None:
    """Check that no two ranks hold the same flat weights and moments, by their CRC-32: nothing else says whose part a
    file is.

    Raises:
        CorruptCheckpointError: It names the two files.
    """
    seen: dict[tuple[Any, ...], int] = {}
    for rank, tensors in enumerate(flats):
        if sum(tensor.numel for tensor in tensors) < _TELLING or any(tensor.crc32 is None for tensor in tensors):
            continue
        other = seen.setdefault(tuple((tensor.crc32, tensor.numel, tensor.offset) for tensor in tensors), rank)
        if other != rank:
            raise CorruptCheckpointError(
                f"{names[rank]} holds the same weights and moments as {names[other]}: one is a copy."
            )


def _counts(states: Sequence[Any]) -> Iterator[tuple[str, int | float]]:
    for state in states:
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, StoredTensor) and step.crc32 is not None and step.storage_nbytes == step.itemsize:
            yield step.dtype, step.crc32
        elif isinstance(step, (int, float)):
            yield "", step
