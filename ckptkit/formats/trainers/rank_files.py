"""Reads checkpoints with one torch.save file per rank, and joins the parts of each tensor.

`join` accepts DTensors, ShardedTensors, and plain tensors that are complete on every rank. `FlatVector` cuts parameters
out of the ranks' pieces of a flat vector, in which several parameters are concatenated. `what` and `pattern` are file
names for messages, with "{rank}" in place of the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from ckptkit.catalog.box import flat_range_boxes, row_major_strides
from ckptkit.catalog.entry import MeshInfo, Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, StoredTensor, is_tensor
from ckptkit.formats.torch_save import read_torch_file
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.trainers.shards import local_parts, mesh_coordinate, slices_of
from ckptkit.formats.trainers.steps import StepName, parse_step
from ckptkit.keymaps.wrappers import strip_infixes
from ckptkit.storage import Store
from ckptkit.storage.pool import WorkerPool

RankTensor: TypeAlias = StoredTensor | DTensorRecord | ShardedTensorRecord
Key = TypeVar("Key", bound=Hashable)
_THREADS = 8
_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor, joined from the parts of all ranks.

    Attributes:
        notes: Messages about replicas that differ.
        what: Name of the files with the parts, for error messages. "" if unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    slices: SliceArray
    mesh: MeshInfo | None = None
    notes: tuple[str, ...] = ()
    what: str = ""

    def entry(
        self, name: str, role: Role, *, fqn: str = "", state: str = "", key: Sequence[str | int] = ()
    ) -> TensorEntry:
        """Return the catalog entry, after checking that every element is covered."""
        entry = TensorEntry(name, self.dtype, self.shape, self.slices, role, fqn, state, tuple(key))
        try:
            entry.check_coverage()
        except (IncompleteCheckpointError, CorruptCheckpointError) as error:
            if not self.what:
                raise
            raise type(error)(f"{error} Its parts are in {self.what.format(rank='*')}.") from error
        return entry


def read_files(store: Store, paths: Iterable[str], options: ReadOptions = DEFAULTS) -> list[Any]:
    """Return the values in the torch.save files `paths`, in order. Reads no tensor bytes."""
    paths = list(paths)
    if len(paths) < 3 or not store.asking_costs:  # parsing holds the GIL, so threads help only while requests wait
        return [read_torch_file(store, path, options) for path in paths]
    with WorkerPool(min(_THREADS, len(paths)), thread_name_prefix="ckptkit-rank") as pool:
        return list(pool.map(lambda path: read_torch_file(store, path, options), paths))


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files that hold the same part of one save, such as the model: one file per rank.

    Attributes:
        template: The file name with "{rank}" in place of the rank, such as "model_rank_{rank}.pt".
        names: The file names by rank.
    """

    template: str
    names: dict[int, str]

    @classmethod
    def matching(cls, template: str, files: Iterable[str]) -> RankFiles:
        """Return the files whose names are `template` with a number in place of "{rank}".

        If `template` lacks "{rank}", returns the single file with this name.
        """
        pattern = re.compile(re.escape(template).replace(re.escape("{rank}"), r"(\d+)"))
        found = filter(None, map(pattern.fullmatch, files))
        return cls(template, {int(match[1]) if pattern.groups else 0: match[0] for match in found})

    @property
    def ordered(self) -> list[str]:
        """The file names in the order of the ranks."""
        return [self.names[rank] for rank in sorted(self.names)]

    @property
    def step(self) -> StepName | None:
        """The step that all names contain, or None. The rank is not taken for a step."""
        return parse_step(self.template)

    @property
    def may_be_steps(self) -> bool:
        """Whether the number that differs may be the step, as in checkpoint_0.pt but not in step_100_rank_0.pt."""
        return any(parse_step(name) != self.step for name in self.names.values())

    def check(self, world_size: int) -> None:
        """Raise IncompleteCheckpointError if a rank has no file."""
        missing_ranks(self.names, world_size, self.template)

    def read(self, store: Store, options: ReadOptions = DEFAULTS) -> list[Any]:
        """Return the values in the files, in rank order. All ranks up to the highest must have a file."""
        self.check(max(self.names) + 1)
        return read_files(store, self.ordered, options)


def recorded_ranks(tensors: Iterable[Any]) -> int:
    """Return the world size that the tensors imply: the highest rank in any mesh or process group, plus one."""
    found = 1
    for tensor in tensors:
        if isinstance(tensor, DTensorRecord) and tensor.mesh.ranks.size:
            found = max(found, int(tensor.mesh.ranks.max()) + 1)
        elif isinstance(tensor, ShardedTensorRecord):
            found = max(found, tensor.world_size or 1)
    return found


def _one_replica(state_dicts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks that hold one replica of an FSDP1 model, in the order of the shards.

    With HSDP, these are the ranks in the first row of the mesh. Without HSDP, these are all ranks.
    """
    for tensor in state_dicts[0].values():
        if isinstance(tensor, DTensorRecord) and [p.kind for p in tensor.placements] == ["replicate", "shard"]:
            ranks: list[int] = tensor.mesh.ranks[0].tolist()
            if all(0 <= rank < len(state_dicts) for rank in ranks):
                return ranks
    return list(range(len(state_dicts)))


# --- the model


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model, joined from the files of all ranks.

    Attributes:
        params: The model's parameters in module order.
        replica: The ranks that hold one replica of the model, in the order of the shards.
    """

    tensors: dict[str, TensorEntry]
    params: list[Param]
    mesh: MeshInfo | None
    notes: tuple[str, ...]
    replica: list[int]


def join_model(state_dicts: Sequence[Any], *, what: str, where: str = "") -> RankModel:
    """Join the model's state dicts of all ranks, and check that the parts cover each tensor.

    Args:
        where: Description of where the state dict was searched, for messages.

    Raises:
        UnsupportedFormatError: Plain tensors differ between the ranks, and the files do not say how to join the
            tensors.
        CorruptCheckpointError: A rank's value is not a state dict, or the ranks' tensors contradict each other.
        IncompleteCheckpointError: The parts do not cover a tensor.
    """
    for rank, value in enumerate(state_dicts):
        if not isinstance(value, dict) or not any(map(is_tensor, value.values())):
            raise CorruptCheckpointError(f"{what.format(rank=rank)} contains no state dict of tensors{where}.")
    joined = join(state_dicts, what=what)
    # With tensor parallelism, only small tensors such as norms are equal on all ranks. In a replicated model, only
    # per-rank buffers differ.
    differing = sum(math.prod(tensor.shape) for tensor in joined.values() if tensor.notes)
    if differing > max(1, sum(math.prod(tensor.shape) for tensor in joined.values()) / 2):
        raise UnsupportedFormatError(
            f"{what.format(rank='*')}: the ranks have different plain tensors under the same names. They are shards, "
            "and the files do not say how to join them. Save DTensors, or use torch DCP."
        )
    fqns = strip_infixes(joined)
    tensors = {name: tensor.entry(name, Role.MODEL, fqn=fqns[name]) for name, tensor in joined.items()}
    mesh = next((tensor.mesh for tensor in joined.values() if tensor.mesh is not None), None)
    notes = tuple(note for tensor in joined.values() for note in tensor.notes)
    return RankModel(tensors, parameters(state_dicts[0], tensors), mesh, notes, _one_replica(state_dicts))


def parameters(state_dict: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> list[Param]:
    """Return the model's parameters in module order, given one rank's state dict.

    If some tensors are distributed, plain tensors are assumed to be buffers. A tied parameter is listed once, under its
    first name.
    """
    distributed = any(isinstance(value, (DTensorRecord, ShardedTensorRecord)) for value in state_dict.values())
    found, seen = [], set()
    for name, value in state_dict.items():
        if name not in entries or (distributed and isinstance(value, StoredTensor)):
            continue
        stored = value
        if isinstance(value, DTensorRecord):
            stored = value.local
        elif isinstance(value, ShardedTensorRecord):
            stored = value.shards[0].tensor if value.shards else None
        # Tied names share a storage and an offset. A part without elements does not show whether names are tied.
        identity = (stored.storage.key, stored.offset) if stored is not None and stored.numel else None
        if identity is None or identity not in seen:
            seen.add(identity)
            found.append(Param(entries[name].fqn, entries[name].shape))
    return found


# --- tensors that the ranks hold as DTensors, ShardedTensors or replicas


def join(values: Sequence[Mapping[Key, Any]], *, what: str) -> dict[Key, Joined]:
    """Join the tensors of all ranks by name. Values that are not tensors are ignored.

    The result lists rank 0's names in rank 0's order, then the names that only rank 1 adds, and so on.
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
    """Return the first rank's copy of a plain tensor, with a note if another rank's copy differs.

    Compares the copies by CRC-32, without reading the values.
    """
    rank, *others = sorted(parts)
    first = parts[rank]
    notes: tuple[str, ...] = ()
    for other in others:
        part = parts[other]
        if (part.offset, part.strides) != (first.offset, first.strides) or not part.same_storage(first):
            notes = (f"tensor {name!r} differs between rank {rank} and rank {other}; rank {rank}'s is used.",)
            break
    return Joined(first.dtype, first.shape, SliceArray.of([first.slice(rank=rank)], len(first.shape)), None, notes)


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
        if not shard.box.within(part.shape):
            at = list(shard.box.offsets)
            raise CorruptCheckpointError(f"a shard at {at} is outside the shape {list(part.shape)}.")
        found.append(shard.tensor.slice(shard.box, rank=rank))
    return found


def _dtype(part: RankTensor) -> str:
    if isinstance(part, ShardedTensorRecord):
        return part.shards[0].tensor.dtype if part.shards else ""
    return part.dtype


def _kind(part: Any) -> str:
    names = {StoredTensor: "plain tensor", DTensorRecord: "DTensor", ShardedTensorRecord: "ShardedTensor"}
    return names.get(type(part), type(part).__name__)


# --- flat vectors that concatenate parameters: FSDP1's flat parameters, ZeRO's partitions


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements [start, start + numel) of a flat vector, which one rank stores as the 1-D `tensor`."""

    start: int
    tensor: StoredTensor
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel


class FlatVector:
    """Concatenated parameters, stored as pieces in order of `start`. Padding may follow the parameters."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.start)

    @classmethod
    def of_ranks(cls, tensors: Iterable[tuple[int, StoredTensor]]) -> FlatVector:
        """Return the concatenation of the ranks' tensors, which are given as (rank, 1-D tensor)."""
        pieces, position = [], 0
        for rank, tensor in tensors:
            pieces.append(Piece(position, tensor, rank))
            position += tensor.numel
        return cls(pieces)

    @property
    def numel(self) -> int:
        return max((piece.stop for piece in self.pieces), default=0)

    @property
    def dtype(self) -> str:
        return self.pieces[0].tensor.dtype

    def tensor(self, shape: tuple[int, ...], position: int = 0) -> Joined:
        """Return the tensor of this shape whose first element is the vector's element `position`."""
        slices = self.slices(shape, position, 0, math.prod(shape))
        return Joined(self.dtype, shape, SliceArray.of(slices, len(shape)))

    def slices(self, shape: tuple[int, ...], position: int, first: int, numel: int) -> list[TensorSlice]:
        """Return slices that read the row-major elements [first, first + numel) of a tensor of this shape.

        In the flat vector, these elements start at `position`.
        """
        found = []
        for piece in self.pieces:
            start, stop = max(position, piece.start), min(position + numel, piece.stop)
            if start >= stop:
                continue
            tensor, offset = piece.tensor, piece.tensor.offset + start - piece.start
            if len(tensor.shape) != 1 or not tensor.contiguous:
                raise CorruptCheckpointError(
                    f"{tensor.path}: a flat tensor has shape {list(tensor.shape)}, expected {tensor.numel} elements in "
                    "one dimension."
                )
            for box in flat_range_boxes(shape, first + start - position, first + stop - position):
                view = replace(tensor, shape=box.sizes, strides=row_major_strides(box.sizes), offset=offset)
                found.append(view.slice(box, rank=piece.rank))
                offset += box.numel
        return found


# --- checks that the files of all ranks are there


def missing_ranks(found: Iterable[int], world_size: int, pattern: str) -> None:
    """Check that `found`, the ranks with a file, are all ranks from 0 to `world_size` - 1.

    Args:
        pattern: The names of the files, with "{rank}" for the rank.

    Raises:
        IncompleteCheckpointError: The files of some ranks are missing. The message names them.
        CorruptCheckpointError: A rank is not below `world_size`.
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


# --- checks that all ranks' files belong to one save: step counts agree, and no file is a copy of another file

_TELLING = 16  # two ranks never have this many equal elements by chance


def check_steps(states: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
    """Check that all ranks have counted the same steps.

    Within a rank, parameters may have different step counts. But if two ranks have no step count in common, their files
    come from different saves. Reads no tensor bytes: step tensors are compared by their CRC-32s.

    Args:
        states: For each rank, the states of the rank's parameters: {"step": ..., "exp_avg": ...}.
    """
    counts = [frozenset(_counts(state)) for state in states]
    first = next((rank for rank, found in enumerate(counts) if found), None)
    for rank, found in enumerate(counts):
        if first is not None and found and found.isdisjoint(counts[first]):
            raise CorruptCheckpointError(
                f"{names[rank]} and {names[first]} are from different saves: they have counted different steps."
            )


def check_copies(flats: Sequence[Sequence[StoredTensor]], names: Sequence[str]) -> None:
    """Check that the flat weights and moments of any two ranks differ. Compares CRC-32s.

    The files do not record their rank. If a file is a copy of another rank's file, only the equal contents show it.
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
        if isinstance(step, StoredTensor) and step.crc32 is not None and step.storage.nbytes == step.itemsize:
            yield step.dtype, step.crc32
        elif isinstance(step, (int, float)):
            yield "", step
