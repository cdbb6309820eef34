"""Reads checkpoints with one torch.save file per rank, and joins each tensor's parts.

Each rank's value is a DTensor, a ShardedTensor, or a plain tensor that is complete on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import MeshInfo, Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, StoredTensor
from ckptkit.formats.pickles.zip import TorchArchive, read_archive
from ckptkit.formats.trainers.shards import local_parts, mesh_coordinate, slices_of
from ckptkit.storage import Store
from ckptkit.storage.pool import WorkerPool

RankTensor: TypeAlias = StoredTensor | DTensorRecord | ShardedTensorRecord
Key = TypeVar("Key", bound=Hashable)
_THREADS = 8
_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor joined over the ranks. `notes` report replicas that differ. `what` is the files' name template."""

    dtype: str
    shape: tuple[int, ...]
    slices: SliceArray
    mesh: MeshInfo | None = None
    notes: tuple[str, ...] = field(default=())
    what: str = ""

    def entry(
        self, name: str, role: Role, *, fqn: str = "", state: str = "", key: Sequence[str | int] = ()
    ) -> TensorEntry:
        """Return the catalog entry, after checking that every element is covered.

        Raises:
            IncompleteCheckpointError: Elements are missing.
            CorruptCheckpointError: A slice is outside the shape, or slices overlap partially.
        """
        entry = TensorEntry(name, self.dtype, self.shape, self.slices, role, fqn, state, tuple(key))
        try:
            entry.check_coverage()
        except (IncompleteCheckpointError, CorruptCheckpointError) as error:
            if not self.what:
                raise
            raise type(error)(f"{error} Its parts are in {self.what.format(rank='*')}.") from error
        return entry


def is_tensor(value: Any) -> bool:
    """Return whether a value in an archive is a tensor record."""
    return isinstance(value, (StoredTensor, DTensorRecord, ShardedTensorRecord))


def read_archives(
    store: Store, paths: Iterable[str], read: Callable[[Store, str], TorchArchive] = read_archive
) -> list[Any]:
    """Return the values in these torch.save files, in order. Reads no tensor bytes."""
    paths = list(paths)
    if len(paths) < 3 or not store.asking_costs:  # parsing holds the GIL, so threads help only while requests wait
        return [read(store, path).value for path in paths]
    with WorkerPool(min(_THREADS, len(paths)), thread_name_prefix="ckptkit-rank") as pool:
        return [archive.value for archive in pool.map(lambda path: read(store, path), paths)]


def join(values: Sequence[Mapping[Key, Any]], *, what: str) -> dict[Key, Joined]:
    """Join all ranks' tensors by name. The result has rank 0's names in rank 0's order, then rank 1's further names,
    and so on.

    Args:
        values: What each rank saved, in rank order. Values that are not tensors are ignored.
        what: The file name for messages, with "{rank}" in place of the rank.
    """
    names = dict.fromkeys(name for value in values for name, tensor in value.items() if is_tensor(tensor))
    return {
        name: _join_one(str(name), {r: value[name] for r, value in enumerate(values) if name in value}, what)
        for name in names
    }


def _join_one(name: str, parts: Mapping[int, Any], what: str) -> Joined:
    # A rank that holds no shard of a ShardedTensor has no dtype, so compare with the first rank that has one.
    first_rank = min(parts, key=lambda rank: (is_tensor(parts[rank]) and not _dtype(parts[rank]), rank))
    first = parts[first_rank]
    for rank, part in parts.items():
        if type(part) is not type(first) or not is_tensor(part):
            raise CorruptCheckpointError(
                f"tensor {name!r} is a {_kind(first)} in {what.format(rank=first_rank)} and a {_kind(part)} in "
                f"{what.format(rank=rank)}."
            )
        if part.shape != first.shape or _dtype(part) not in (_dtype(first), ""):
            raise CorruptCheckpointError(
                f"tensor {name!r} is {_dtype(first)} {list(first.shape)} in {what.format(rank=first_rank)}, but "
                f"{_dtype(part)} {list(part.shape)} in {what.format(rank=rank)}."
            )
    if isinstance(first, StoredTensor):
        return _replicated(name, parts)
    slices: list[TensorSlice] = []
    if isinstance(first, DTensorRecord):
        _refuse_copies(parts, what)
    for rank, part in parts.items():
        try:
            slices += _dtensor_slices(part, rank) if isinstance(part, DTensorRecord) else _shard_slices(part, rank)
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            raise type(error)(f"{what.format(rank=rank)}: tensor {name!r}: {error}") from error
    mesh = MeshInfo(first.mesh.shape, first.mesh.names or ()) if isinstance(first, DTensorRecord) else None
    return Joined(_dtype(first), first.shape, SliceArray.of(slices, len(first.shape)), mesh, what=what)


def _replicated(name: str, parts: Mapping[int, StoredTensor]) -> Joined:
    """Return one rank's copy of a plain tensor. Compares the copies by their recorded CRC-32s, without reading them."""
    rank = min(parts)
    first = parts[rank]
    differing = [r for r, part in parts.items() if _stored_as(part) != _stored_as(first)]
    notes: tuple[str, ...] = ()
    if differing and first.crc32 is not None:
        notes = (f"tensor {name!r} differs between rank {rank} and rank {differing[0]}; rank {rank}'s is used.",)
    return Joined(first.dtype, first.shape, SliceArray.of([first.slice(rank=rank)], len(first.shape)), None, notes)


def _stored_as(tensor: StoredTensor) -> tuple[Any, ...]:
    return (tensor.crc32, tensor.storage_nbytes, tensor.offset, tensor.strides)


def _dtensor_slices(part: DTensorRecord, rank: int) -> list[TensorSlice]:
    mesh = part.mesh
    coordinate = mesh.coordinate
    if coordinate is None:
        coordinate = mesh_coordinate(rank, mesh.shape, mesh.ranks.reshape(-1).tolist())
    if coordinate is None:
        if part.local.numel:
            raise CorruptCheckpointError(f"rank {rank} is not in the tensor's mesh {mesh.ranks.tolist()!r:.80}.")
        return []
    parts = local_parts(part.shape, mesh.shape, coordinate, part.placements, local_shape=part.local.shape)
    return slices_of(parts, part.local, rank)


def _refuse_copies(parts: Mapping[int, DTensorRecord], what: str) -> None:
    """Raise CorruptCheckpointError if two files have the same coordinate in the same mesh."""
    places: dict[tuple[Any, ...], int] = {}
    for rank, part in parts.items():
        if part.mesh.coordinate is not None:
            place = (part.mesh.coordinate, part.mesh.shape, part.mesh.ranks.tobytes())
            other = places.setdefault(place, rank)
            if other != rank:
                raise CorruptCheckpointError(
                    f"{what.format(rank=rank)} and {what.format(rank=other)} contain the same part of the model, at "
                    f"mesh position {list(part.mesh.coordinate)}: one file is a copy, or from another job."
                )


def _shard_slices(part: ShardedTensorRecord, rank: int) -> list[TensorSlice]:
    found = []
    for shard in part.shards:
        box = Box(shard.offsets, shard.sizes)
        if not box.within(part.shape):
            raise CorruptCheckpointError(f"a shard at {list(shard.offsets)} is outside the shape {list(part.shape)}.")
        found.append(shard.tensor.slice(box, rank=rank))
    return found


def _dtype(part: RankTensor) -> str:
    if isinstance(part, ShardedTensorRecord):
        return part.shards[0].tensor.dtype if part.shards else ""
    return part.dtype


def _kind(part: Any) -> str:
    names = {StoredTensor: "plain tensor", DTensorRecord: "DTensor", ShardedTensorRecord: "ShardedTensor"}
    return names.get(type(part), type(part).__name__)


def refuse_bare_parts(joined: Mapping[Any, Joined], *, what: str) -> None:
    """Raise UnsupportedFormatError if a model's tensors are plain and all differ between ranks.

    Then they are parts of full tensors, and no file says how to join them. If some tensors are equal, the model is
    replicated, and the others are per-rank buffers.
    """
    large = [tensor for tensor in joined.values() if math.prod(tensor.shape) > 1]
    if large and all(tensor.notes for tensor in large):
        raise UnsupportedFormatError(
            f"{what.format(rank='*')}: the ranks have different plain tensors under the same names. They are shards, "
            "and the files do not say how to join them. Save DTensors, or use torch DCP."
        )


def missing_ranks(found: Iterable[int], world_size: int, pattern: str) -> None:
    """Check that each rank's file exists.

    Args:
        pattern: The file name, with "{rank}" in place of the rank.

    Raises:
        IncompleteCheckpointError: Files are missing. The message names them.
    """
    ranks = set(found)
    if not 0 < world_size <= _MAX_RANKS or max(ranks, default=0) >= world_size:
        raise CorruptCheckpointError(
            f"there is a file of rank {max(ranks, default=0)}, but the checkpoint says that it has {world_size} ranks."
        )
    gone = sorted(set(range(world_size)) - ranks)
    if gone:
        names = ", ".join(pattern.format(rank=rank) for rank in gone[:8]) + (", ..." if len(gone) > 8 else "")
        are = "is" if len(gone) == 1 else "are"
        raise IncompleteCheckpointError(f"{len(gone)} of the files of {world_size} ranks {are} missing: {names}.")


# --- checks that all ranks' files belong to one save: they have made the same progress, and none is a copy


_TELLING = 16  # two ranks never have this many equal elements by chance


def check_steps(states: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
    """Check that all ranks' optimizers have counted the same steps.

    Parameters may have different step counts, but if two ranks have no count in common, a file is from a different
    save. Reads no tensor bytes: step tensors are compared by their CRC-32s.

    Args:
        states: For each rank, its parameters' states: {"step": ..., "exp_avg": ...}.
        names: Each rank's file.

    Raises:
        CorruptCheckpointError: Two ranks have no step count in common. The message names the two files.
    """
    counts = [frozenset(_counts(state)) for state in states]
    first = next((rank for rank, found in enumerate(counts) if found), None)
    for rank, found in enumerate(counts):
        if first is not None and found and found.isdisjoint(counts[first]):
            raise CorruptCheckpointError(
                f"{names[rank]} and {names[first]} are from different saves: their optimizers have counted different "
                "steps."
            )


def check_counters(counters: Sequence[Any], names: Sequence[str], what: str) -> None:
    """Check that a number that every rank saved is equal on all ranks. None is ignored.

    Raises:
        CorruptCheckpointError: Two ranks have different numbers. The message names the two files.
    """
    known = [(count, name) for count, name in zip(counters, names, strict=True) if type(count) is int]
    for count, name in known:
        if count != known[0][0]:
            raise CorruptCheckpointError(
                f"{name} and {known[0][1]} are from different saves: {what} is {count} in the first and {known[0][0]} "
                "in the second."
            )


def check_copies(flats: Sequence[Sequence[StoredTensor]], names: Sequence[str]) -> None:
    """Check, by their CRC-32s, that no two ranks have the same flat weights and moments.

    Nothing else can show that a file is a copy of another rank's, because the files do not record their rank.

    Raises:
        CorruptCheckpointError: Two files are equal. The message names them.
    """
    seen: dict[tuple[Any, ...], int] = {}
    for rank, tensors in enumerate(flats):
        if sum(tensor.numel for tensor in tensors) < _TELLING or any(tensor.crc32 is None for tensor in tensors):
            continue
        other = seen.setdefault(tuple((tensor.crc32, tensor.numel, tensor.offset) for tensor in tensors), rank)
        if other != rank:
            raise CorruptCheckpointError(
                f"{names[rank]} and {names[other]} contain the same weights and moments: one is a copy."
            )


def _counts(states: Sequence[Any]) -> Iterator[tuple[str, int | float]]:
    for state in states:
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, StoredTensor) and step.crc32 is not None and step.storage_nbytes == step.itemsize:
            yield step.dtype, step.crc32
        elif isinstance(step, (int, float)):
            yield "", step
