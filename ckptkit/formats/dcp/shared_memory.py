"""Checks that the checkpoint has equal values for live tensors that share memory (tied weights, views)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import TensorEntry, same_by_record
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.host_bytes import row_major
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor in the checkpoint, and this rank's part of the live tensor that the load will fill.

    Attributes:
        shape: Shape of the whole live tensor.
        local: The local tensor on this rank.
        parts: The regions of the whole tensor that `local` contains, with their positions in `local`.
    """

    key: str
    entry: TensorEntry
    shape: tuple[int, ...]
    local: torch.Tensor
    parts: Sequence[LocalPart]

    @classmethod
    def whole(cls, key: str, entry: TensorEntry, like: torch.Tensor) -> Claim:
        """Return a `Claim` for the whole of the tensor `like`, so that all ranks compare the same bytes."""
        import torch

        shape = tuple(like.shape)
        local = torch.empty(shape, dtype=like.dtype, device="meta")
        return cls(key, entry, shape, local, [LocalPart(Box.whole(shape), (0,) * len(shape))])


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return groups of tensors whose memory overlaps, as lists of indices into `tensors`."""
    spans = sorted((t.data_ptr(), _extent(t), i) for i, t in enumerate(tensors))
    groups: list[list[int]] = []
    stop = 0
    for start, nbytes, index in spans:
        if not start or not nbytes:  # on the meta device, or empty
            continue
        if start < stop:
            groups[-1].append(index)
        else:
            groups.append([index])
        stop = max(stop, start + nbytes)
    return [group for group in groups if len(group) > 1]


def check_claims(store: Store, groups: Iterable[Sequence[Claim]]) -> None:
    """Check that the checkpoint has equal values for tensors that share memory.

    Reads the values only if locations and digests do not show whether the values are equal.

    Raises:
        CheckpointMismatchError: Values differ, so one tensor would overwrite another. The message names all tensors
            whose values differ.
    """
    wrong = [group for group in groups if not are_one(store, group)]
    if wrong:
        lines = "\n  ".join(" and ".join(dict.fromkeys(claim.key for claim in group)) for group in wrong)
        raise CheckpointMismatchError(
            f"{store.url}: tensors that share memory in this model (tied weights) have different values in the "
            f"checkpoint; nothing was loaded.\n  {lines}\n"
            "Try: a model that does not tie them (config.tie_word_embeddings=False); "
            "CheckpointManager.load with exclude=[...]; or, with dcp.load, leave one of the names out of the state."
        )


def are_one(store: Store, claims: Sequence[Claim | None]) -> bool:
    """Return whether the checkpoint has equal values for tensors that share memory.

    An item of `claims` is None if the checkpoint lacks that tensor. The result is then False.
    """
    group = [claim for claim in claims if claim is not None]
    if len(group) < len(claims):
        return False
    first, *others = group
    if any(claim.entry.shape != claim.shape for claim in group):
        return False
    if all(_place(claim.local) == _place(first.local) for claim in others):
        known = [same_by_record(first.entry, claim.entry) for claim in others]
        if False in known:
            return False
        if None not in known:
            return True
    return _reads_alike(store, group)


def _reads_alike(store: Store, group: Sequence[Claim]) -> bool:
    """Return whether tensors that share memory keep their values if one after the other is loaded.

    Tries this in temporary memory, in which this rank's parts of the tensors overlap as they do in the live tensors.
    """
    import torch

    from ckptkit.formats.dcp.fill import Filler

    read = [torch.empty(tuple(c.local.shape), dtype=c.local.dtype) for c in group]
    filler = Filler(store, cast=True)
    for claim, values in zip(group, read, strict=True):
        filler.add_parts(claim.entry, claim.parts, values)
    filler.run()
    base = min(claim.local.data_ptr() for claim in group)
    stop = max(claim.local.data_ptr() + _extent(claim.local) for claim in group)
    memory = torch.zeros(stop - base, dtype=torch.uint8)
    laid = []
    for claim, values in zip(group, read, strict=True):
        live = claim.local
        begin = live.data_ptr() - base
        room = memory[begin : begin + _extent(live)].view(live.dtype)
        room = room.as_strided(live.shape, live.stride())
        room = room.conj() if live.is_conj() else room
        laid.append(torch._neg_view(room) if live.is_neg() else room)
        laid[-1].copy_(values)
    return all(torch.equal(_bits(one), _bits(other)) for one, other in zip(laid, read, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return row_major(tensor).reshape(-1).view(torch.uint8)


def _place(local: torch.Tensor) -> tuple[object, ...]:
    return local.data_ptr(), local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg()


def _extent(local: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of the last element in memory."""
    itemsize = local.element_size()
    if local.is_contiguous():
        return local.numel() * itemsize
    return (1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))) * itemsize
