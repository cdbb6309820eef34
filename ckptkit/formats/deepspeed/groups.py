"""Reads the flat groups in DeepSpeed's optimizer files: their parameters, moments and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from ckptkit.catalog.entry import ObjectEntry, Role, SliceArray
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.deepspeed.experts import Partition, counted, data_first, is_expert, parts_of
from ckptkit.formats.deepspeed.files import ModelStates, OptimStates
from ckptkit.formats.deepspeed.layout import Shape, Zero3Group, Zero12Group, flat_states
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.fsdp1_local import FlatVector
from ckptkit.formats.trainers.master_check import MasterSampler
from ckptkit.formats.trainers.optimizer_files import OptimizerState, group_objects
from ckptkit.formats.trainers.rank_files import Joined
from ckptkit.storage import Store

Groups: TypeAlias = Sequence[Zero12Group | Zero3Group]


def groups_of(models: ModelStates, optims: OptimStates | None, experts: Iterable[str] = ()) -> Sequence[Groups]:
    """Return each parameter group's flat groups. There is one, except for experts: one per expert parallel rank.

    Args:
        experts: The names of the weights in the experts' files.
    """
    if optims is None:
        return []
    if models.stage3:
        return [[_zero3(models, optims)]]
    if len(models.param_shapes) != len(optims.weights[0]):
        raise CorruptCheckpointError(
            f"the model file has {len(models.param_shapes)} parameter groups, but the optimizer files have "
            f"{len(optims.weights[0])}. Are all files from one save?"
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


def _zero12(index: int, params: Mapping[str, Shape], optims: OptimStates, part: Partition) -> Zero12Group:
    vectors = {"": FlatVector.of_ranks((rank, optims.weights[rank][index]) for rank in part.ranks)}
    states = [optims.states[rank][index] if index < len(optims.states[rank]) else {} for rank in part.ranks]
    for name in flat_states(states):
        vectors[name] = FlatVector.of_ranks((rank, state[name]) for rank, state in zip(part.ranks, states, strict=True))
    paddings = optims.paddings[index] if index < len(optims.paddings) else [0] * len(params)
    if len(paddings) != len(params):
        raise CorruptCheckpointError(
            f"parameter group {index} has {len(params)} parameters and {len(paddings)} alignment paddings."
        )
    return Zero12Group(
        part.renamed(params),
        vectors,
        {name: value for name, value in states[0].items() if name not in vectors},
        paddings,
        [
            part.renamed(fragments[index]) if index < len(fragments) and rank in part.ranks else {}
            for rank, fragments in enumerate(optims.fragments)
        ],
        2 * len(part.ranks),
    )


def _zero3(models: ModelStates, optims: OptimStates) -> Zero3Group:
    vectors = {"": [FlatVector.of_ranks((rank, t) for t in flat) for rank, flat in enumerate(optims.weights)]}
    all_states = [state for states in optims.states for state in states]
    if all(len(states) == len(flat) for states, flat in zip(optims.states, optims.weights, strict=True)):
        for name in flat_states(all_states):
            vectors[name] = [
                FlatVector.of_ranks((rank, state[name]) for state in states)
                for rank, states in enumerate(optims.states)
            ]
    params = {name: shape for group in models.param_shapes for name, shape in group.items()}
    scalars = {name: value for name, value in (all_states[0] if all_states else {}).items() if name not in vectors}
    return Zero3Group(params, vectors, scalars)


def check_layout(
    store: Store, groups: Groups, masters: Mapping[str, Joined], copies: Callable[[], Mapping[str, Joined]]
) -> None:
    """Compare the parameters whose position in the flat group is in doubt with their low-precision copies.

    A position is in doubt if the positions recorded for its group differ from those computed from the shapes. One
    parameter per partition of experts is compared as well, because no file records which experts a rank has. Reads a
    few kilobytes per parameter.

    Args:
        copies: Returns the low-precision weights by name. Called only if there is a parameter to compare.

    Raises:
        CorruptCheckpointError: A copy differs from the cast master.
    """
    asked: list[str] = []
    for group in groups:
        if isinstance(group, Zero12Group) and not group.agrees():
            asked += group.params
        elif isinstance(group, Zero12Group) and any(map(is_expert, group.params)):
            asked.append(max(group.params, key=lambda name: math.prod(group.params[name])))
    whole = copies() if asked else {}
    weights = {name: whole[name].entry(name, Role.MODEL, fqn=name) for name in asked if name in whole}
    sampler = MasterSampler(store, weights)
    for name in weights:
        if not sampler.fits(masters[name].entry(name, Role.MASTER, fqn=name), name):
            raise CorruptCheckpointError(
                f"parameter {name!r}: the fp32 weights at the position computed from the shapes do not equal the "
                f"weights in {whole[name].slices[0].path}. Are all files from one save?"
            )


def check_experts(experts: Mapping[str, Joined], masters: Mapping[str, Joined]) -> None:
    """Check that for each expert's master, the experts' files have a weight with the same shape."""
    for name, master in masters.items():
        if is_expert(name) and (name not in experts or experts[name].shape != master.shape):
            shape = f"has shape {list(experts[name].shape)}" if name in experts else "is missing"
            raise CorruptCheckpointError(
                f"{name!r} has shape {list(master.shape)} in the optimizer files; in the experts' files it {shape}. "
                "Are all files from one save?"
            )


def add_moments(
    optimizer: OptimizerState, group: Zero12Group | Zero3Group, names: Mapping[str, str] | None = None
) -> None:
    """Add the moments and steps of a group's parameters to the optimizer.

    Args:
        names: Old name -> new name. Parameters that are not listed are omitted. None keeps all names.
    """
    names = {name: name for name in group.params} if names is None else names
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


def settings(params: Sequence[Iterable[str]], optims: OptimStates) -> dict[str, ObjectEntry]:
    """Return the parameter groups' settings, with the given names as their "params"."""
    groups = [{**given, "params": list(names)} for given, names in zip(optims.param_groups, params, strict=False)]
    return group_objects(groups, {})
