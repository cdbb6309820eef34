"""Reads the flat groups in DeepSpeed's optimizer files: positions of parameters, moments, and settings.

ZeRO-1/2 concatenate a group's parameters and split the resulting vector over the ranks. The last rank's part may be
stored without padding. ZeRO-3 splits each parameter into ceil(numel / ranks) elements per rank, and each rank
concatenates its parts (deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import ObjectEntry, Role, SliceArray, TensorSlice
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.deepspeed.experts import Partition, counted, data_first, is_expert, parts_of
from ckptkit.formats.deepspeed.files import FlatPart, ModelStates, OptimStates, Shape
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.sources import read_box
from ckptkit.formats.trainers.master_check import SAMPLE, MasterSampler
from ckptkit.formats.trainers.optimizer_files import OptimizerState, group_objects
from ckptkit.formats.trainers.rank_files import FlatVector, Joined
from ckptkit.storage import Store


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One parameter group of ZeRO-1/2, or one of the subgroups into which ZeRO-3 splits large parameter groups.

    Attributes:
        params: Names and shapes of the parameters, in the order of the flat vector.
        vectors: Name of a state -> its flat vectors. The name "" stands for the fp32 weights. ZeRO-1/2 have one vector,
            with one piece per rank. ZeRO-3 has one vector per rank.
        scalars: States that are not flat vectors, such as the step.
        paddings: Number of padding elements after each parameter.
        fragments: For each rank, the recorded positions of parameters: name -> (numel, start in the rank's partition).
        slack: Maximum number of padding elements after the last parameter.
        notes: The states that belong to no single parameter.
    """

    params: Mapping[str, Shape]
    vectors: Mapping[str, Sequence[FlatVector]]
    scalars: Mapping[str, Any]
    paddings: Sequence[int]
    fragments: Sequence[Mapping[str, tuple[int, int]]] = ()
    slack: int = 0
    notes: Sequence[str] = ()

    def cut(self, state: str) -> Iterator[tuple[str, Joined]]:
        """Yield the name of each parameter with its part of the vectors for `state`."""
        vectors = self.vectors[state]
        position = 0
        for (name, shape), padding in zip(self.params.items(), self.paddings, strict=True):
            numel = math.prod(shape)
            part = -(-numel // len(vectors))
            slices: list[TensorSlice] = []
            for rank, vector in enumerate(vectors):
                if position + part > vector.numel:
                    where = f"rank {rank}" if len(vectors) > 1 else "its group"
                    raise IncompleteCheckpointError(
                        f"parameter {name!r} ends at element {position + part}, but {where} has {vector.numel}."
                    )
                first = min(rank * part, numel)
                slices += vector.slices(shape, position, first, min(part, numel - first))
            yield name, Joined(vectors[0].dtype, shape, SliceArray.of(slices, len(shape)))
            position += part + padding
        if any(vector.numel - position > self.slack for vector in vectors):
            numels = [vector.numel for vector in vectors]
            raise CorruptCheckpointError(
                f"a parameter group has {position} elements{' per rank' * (len(vectors) > 1)} according to its shapes, "
                f"but {numels[0] if len(vectors) == 1 else numels[:8]} on the ranks."
            )

    def agrees(self) -> bool:
        """Return whether the positions that newer DeepSpeed versions record equal those computed from the shapes.

        A difference does not prove that the computed positions are wrong. With round_robin_gradients, DeepSpeed records
        wrong positions, because the order in which link_hp_params gets the parameters differs from the flat group's.
        """
        position = 0
        for (name, shape), padding in zip(self.params.items(), self.paddings, strict=True):
            numel = math.prod(shape)
            for piece in self.vectors[""][0].pieces if self.fragments else ():
                recorded = self.fragments[piece.rank] if piece.rank < len(self.fragments) else {}
                first, last = max(position, piece.start), min(position + numel, piece.stop)
                wanted = (last - first, first - piece.start) if first < last else None
                if recorded and recorded.get(name) != wanted:
                    return False
            position += numel + padding
        return True


def groups_of(
    models: ModelStates, optims: OptimStates | None, experts: Iterable[str] = ()
) -> Sequence[Sequence[FlatGroup]]:
    """Return the flat groups of each parameter group.

    With ZeRO-3, there is one flat group per subgroup. Without ZeRO-3, a parameter group of experts has one flat group
    per expert parallel rank, and any other parameter group has a single flat group.
    """
    if optims is None:
        return []
    if models.stage3:
        return _zero3(models, optims)
    if len(models.param_shapes) != len(optims.parts[0]):
        raise CorruptCheckpointError(
            f"the model file has {len(models.param_shapes)} parameter groups, but the optimizer files have "
            f"{len(optims.parts[0])}. Are all files from one save?"
        )
    first, counts = data_first(models.values[0]), counted(experts)
    found = []
    for index, params in enumerate(models.param_shapes):
        parts = parts_of(
            params,
            partitions=optims.partitions[index],
            world_size=optims.world_size,
            data_first=first,
            counts=counts,
        )
        found.append([_zero12(index, params, optims, part) for part in parts])
    return found


def _zero12(index: int, params: Mapping[str, Shape], optims: OptimStates, part: Partition) -> FlatGroup:
    parts = [(rank, optims.parts[rank][index]) for rank in part.ranks]
    vectors = {name: [FlatVector.of_ranks(pieces)] for name, pieces in _pieces(parts).items()}
    paddings = optims.paddings[index] if index < len(optims.paddings) else [0] * len(params)
    if len(paddings) != len(params):
        raise CorruptCheckpointError(
            f"parameter group {index} has {len(params)} parameters, but {len(paddings)} alignment paddings. "
            "Expected one for each parameter."
        )
    fragments = [
        part.renamed(flats[index].fragments) if rank in part.ranks else {} for rank, flats in enumerate(optims.parts)
    ]
    scalars = _scalars(parts, vectors)
    slack, notes = 2 * len(part.ranks), _notes(parts, scalars)
    return FlatGroup(part.renamed(params), vectors, scalars, paddings, fragments, slack, notes)


def _zero3(models: ModelStates, optims: OptimStates) -> Sequence[Sequence[FlatGroup]]:
    """Return the subgroups of each parameter group. A subgroup contains whole parameters."""
    ends = list(itertools.accumulate(flat.weights.numel for flat in optims.parts[0]))
    if not ends:
        return []
    # The groups in param_shapes are not used, because older versions record all parameters as one group.
    shapes: list[dict[str, Shape]] = [{} for _ in ends]
    position = 0
    for name, shape in ((name, shape) for group in models.param_shapes for name, shape in group.items()):
        shapes[min(bisect.bisect_right(ends, position), len(ends) - 1)][name] = shape
        position += -(-math.prod(shape) // optims.world_size)
    groups = iter([_subgroup(index, params, optims) for index, params in enumerate(shapes)])
    found = [list(itertools.islice(groups, len(given.get("params", [])))) for given in optims.param_groups]
    return [*found, list(groups)]


def _subgroup(index: int, params: Mapping[str, Shape], optims: OptimStates) -> FlatGroup:
    parts = [(rank, flats[index]) for rank, flats in enumerate(optims.parts)]
    vectors = {name: [FlatVector.of_ranks([piece]) for piece in pieces] for name, pieces in _pieces(parts).items()}
    scalars = _scalars(parts, vectors)
    return FlatGroup(params, vectors, scalars, [0] * len(params), notes=_notes(parts, scalars))


def _pieces(parts: Sequence[tuple[int, FlatPart]]) -> dict[str, list[tuple[int, Any]]]:
    """Return (rank, 1-D tensor) of the weights (under the name "") and of each moment that all ranks have.

    A moment has as many elements as the weights, or a few more if the weights are stored without their padding. Other
    1-D tensors, such as the trust ratio of LAMB, belong to the whole flat vector.
    """
    pieces: dict[str, list[tuple[int, Any]]] = {"": [(rank, flat.weights) for rank, flat in parts]}
    for name in parts[0][1].states:
        found = [(rank, flat.states.get(name)) for rank, flat in parts]
        if all(
            isinstance(tensor, StoredTensor)
            and len(tensor.shape) == 1
            and 0 <= tensor.numel - weights.numel <= 2 * len(parts)
            for (_, tensor), (_, weights) in zip(found, pieces[""], strict=True)
        ):
            pieces[name] = found
    return pieces


def _scalars(parts: Sequence[tuple[int, FlatPart]], vectors: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in parts[0][1].states.items() if name not in vectors}


def _notes(parts: Sequence[tuple[int, FlatPart]], scalars: Mapping[str, Any]) -> list[str]:
    """Return notes about the states that were not read, and about numbers that differ between ranks."""
    found = []
    for name, value in scalars.items():
        if isinstance(value, StoredTensor) and value.numel != 1:
            shape = f"its shape {list(value.shape)} is neither that of the flat weights nor that of a number"
            found.append(f"the optimizer's {name!r} was not read: {shape}.")
            continue
        for rank, flat in parts[1:]:
            other = flat.states.get(name)
            if isinstance(value, StoredTensor) and isinstance(other, StoredTensor):
                differs = None not in (value.crc32, other.crc32) and not value.same_storage(other)
            else:
                differs = value != other
            if differs:
                first = parts[0][0]
                found.append(
                    f"the optimizer's {name!r} differs between rank {first} and rank {rank}; rank {first}'s is used."
                )
                break
    return found


def check_layout(
    store: Store, groups: Sequence[FlatGroup], masters: Mapping[str, Joined], copies: Mapping[str, Joined]
) -> None:
    """Compare fp32 master weights with low-precision weights if the positions of a group's parameters are uncertain.

    The positions are uncertain if the recorded positions differ from those computed from the shapes. In a flat group of
    experts, one parameter is always compared. No file records which experts a rank has. ckptkit computes this from the
    rank, and the result could be wrong. Reads a few kilobytes per parameter.

    Raises:
        CorruptCheckpointError: The weights of a parameter differ.
    """
    asked: list[str] = []
    for group in groups:
        if not group.agrees():
            asked += group.params
        elif any(map(is_expert, group.params)):
            asked.append(max(group.params, key=lambda name: math.prod(group.params[name])))
    weights = {name: copies[name].entry(name, Role.MODEL, fqn=name) for name in asked if name in copies}
    sampler = MasterSampler(store, weights)
    for name in weights:
        if not sampler.fits(masters[name].entry(name, Role.MASTER, fqn=name), name):
            raise CorruptCheckpointError(
                f"parameter {name!r}: the fp32 weights at the position computed from the shapes do not equal the "
                f"weights in {copies[name].slices[0].path}. Are all files from one save?"
            )


def check_saves(
    store: Store,
    models: ModelStates,
    groups: Sequence[FlatGroup],
    masters: Mapping[str, Joined],
    copies: Mapping[str, Joined],
) -> list[str]:
    """Check that the optimizer files are from the save of the model files. Returns a note if this is uncertain.

    Rounds some master weights (see `_compared`), and compares them with the weights in the model files. If none of them
    are equal, the job may have changed the weights after its last step. If the optimizer has counted more or fewer
    steps than the model file, the job may have begun with a new optimizer. Each of these alone gives a note.

    Raises:
        CorruptCheckpointError: The files are from different saves. Only some of the weights are equal, or none are
            equal and the numbers of steps differ.
    """
    steps = [_number(store, group.scalars["step"]) for group in groups if "step" in group.scalars]
    chosen = _compared(masters, copies, by_rank=not steps)
    sampler = MasterSampler(store, {name: copies[name].entry(name, Role.MODEL, fqn=name) for name, _ in chosen})
    wrong = [
        f"{path} and {copies[name].slices[0].path}"
        for (name, rank), path in chosen.items()
        if not sampler.fits(masters[name].entry(name, Role.MASTER, fqn=name), name, rank=rank)
    ]
    skipped = models.values[0].get("skipped_steps")
    taken = None if models.step is None else models.step - (skipped if type(skipped) is int else 0)
    other = None not in (taken, *steps) and bool(steps) and taken not in steps
    counted = ""
    if other:
        counted = f"the optimizer has counted {str(steps[0]).removesuffix('.0')} steps, but {models.file} says {taken}"
    if wrong and (other or len(wrong) < len(chosen)):
        raise CorruptCheckpointError(
            f"{wrong[0]} are from different saves: the fp32 weights in the first file, rounded, do not equal the "
            f"weights in the second{'; ' * other}{counted}."
        )
    if wrong:
        return [f"{wrong[0]} have different weights: are they from one save? The job may have changed the weights."]
    return [f"{counted}: are they from one save? The job may have begun with a new optimizer."] if other else []


def _compared(
    masters: Mapping[str, Joined], copies: Mapping[str, Joined], *, by_rank: bool
) -> dict[tuple[str, int], str]:
    """Choose a parameter in each file of weights, for a comparison with its master weight.

    Prefers a small matrix, because every step changes it. A step may not change some rows of an embedding, or a rounded
    scale near 1.

    Args:
        by_rank: Choose a parameter for each file and each rank of the optimizer.

    Returns:
        The optimizer file that has the master weight, by (parameter, rank).
    """
    found: dict[tuple[str, int | None], tuple[bool, int, str, int, str]] = {}
    for name in sorted(masters.keys() & copies.keys()):
        for part in masters[name].slices if masters[name].shape == copies[name].shape else ():
            telling = len(masters[name].shape) > 1 and part.box.numel >= SAMPLE
            size = -part.box.numel if telling else part.box.numel
            key = copies[name].slices[0].path, part.rank if by_rank else None
            found[key] = max(found.get(key, (False, 0, "", 0, "")), (telling, size, name, part.rank, part.path))
    return {(name, rank): path for _, _, name, rank, path in found.values() if name}


def _number(store: Store, value: Any) -> float | None:
    """Return a step count as a number, or None if `value` is neither a number nor a tensor with one number."""
    if isinstance(value, StoredTensor) and value.numel == 1 and value.dtype in ("float32", "int64", "int32"):
        entry = Joined(value.dtype, value.shape, SliceArray.of([value.slice()], len(value.shape))).entry("", Role.OTHER)
        return float(read_box(store, entry, Box.whole(value.shape)).view(value.dtype).item())
    return value if type(value) in (int, float) else None


def check_experts(experts: Mapping[str, Joined], masters: Mapping[str, Joined]) -> None:
    """Check that the experts' files have a weight of the same shape for each master weight of an expert."""
    for name, master in masters.items():
        if is_expert(name) and (name not in experts or experts[name].shape != master.shape):
            shape = f"has shape {list(experts[name].shape)}" if name in experts else "is missing"
            raise CorruptCheckpointError(
                f"{name!r} has shape {list(master.shape)} in the optimizer files; in the experts' files it {shape}. "
                "Are all files from one save?"
            )


def add_moments(optimizer: OptimizerState, group: FlatGroup, names: Mapping[str, str]) -> None:
    """Add the moments and steps of a group's parameters to the optimizer.

    Args:
        names: Old name -> new name. Parameters that are not listed are omitted.
    """
    optimizer.notes += [note for note in group.notes if note not in optimizer.notes]
    for state in group.vectors:
        if state:
            for name, joined in group.cut(state):
                if name in names:
                    optimizer.add(names[name], state, joined)
    for state, value in group.scalars.items():
        for name in (names[name] for name in group.params if name in names):
            if isinstance(value, StoredTensor) and value.numel == 1:
                slices = SliceArray.of([value.slice()], len(value.shape))
                optimizer.add(name, state, Joined(value.dtype, value.shape, slices))
            elif isinstance(value, (int, float)):
                optimizer.add_value(name, state, value)


def settings(params: Mapping[int, Iterable[str]], optims: OptimStates) -> dict[str, ObjectEntry]:
    """Return the settings of the parameter groups (lr, betas). `params` has the names of the parameters, by group."""
    groups = [{**given, "params": list(params.get(index, ()))} for index, given in enumerate(optims.param_groups)]
    return group_objects(groups, {})
