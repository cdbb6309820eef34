"""Reads experts of DeepSpeed's MoE layers: one file per expert, and optimizer partitions over its ranks.

Names in the optimizer files and in `param_shapes` count the experts of one rank from 0; the names in the experts' own
files, and those given here, count all of a layer's (deepspeed/runtime/engine.py: _save_moe_checkpoint). With E expert
parallel ranks, rank r of the job holds the experts of r % E, or of r // (ranks / E) where its config has
use_data_before_expert_parallelism (deepspeed/utils/groups.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.rank_files import Joined, join, read_archives
from ckptkit.storage import Store

__all__ = [
    "EXPERT_FILE",
    "EXPERT_OPTIMIZER",
    "Partition",
    "data_first",
    "group_order",
    "is_expert",
    "parts_of",
    "read_experts",
]

EXPERT_FILE = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")  # without ZeRO
_EXPERT = re.compile(r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranks over which a parameter group is partitioned, in order, and their experts.

    Attributes:
        number: The expert parallel rank; None if the parameters are the same on all ranks.
        experts: Number of experts per rank of each layer, by name prefix.
    """

    ranks: Sequence[int]
    number: int | None = None
    experts: Mapping[str, int] | None = None

    def renamed(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values under names that count all experts of a layer."""
        return {self._name(name): value for name, value in values.items()}

    def _name(self, name: str) -> str:
        match = _EXPERT.fullmatch(name) if self.experts is not None and self.number is not None else None
        if match is None or self.experts is None or self.number is None:
            return name
        return f"{match[1]}{self.number * self.experts.get(match[1], 0) + int(match[2])}{match[3]}"


def is_expert(name: str) -> bool:
    """Return whether a parameter is an expert's, by its name."""
    return _EXPERT.fullmatch(name) is not None


def data_first(model: Mapping[str, Any]) -> bool:
    """Return whether adjacent ranks have the same experts. `model`: the contents of a model file."""
    config = model.get("ds_config")
    return isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True


def parts_of(
    params: Mapping[str, Any],
    *,
    partitions: int,
    world_size: int,
    data_first: bool,
    counts: Mapping[str, int],
) -> list[Partition]:
    """Return the parts of a parameter group that is cut into `partitions`: one per rank of expert parallelism.

    Args:
        counts: The experts of each layer, as `counted` gives them.

    Raises:
        UnsupportedFormatError: It is cut into fewer than there are ranks, and is not of experts.
        CorruptCheckpointError: The ranks cannot hold as many experts.
    """
    if partitions == world_size:
        return [Partition(range(world_size))]
    if not all(map(is_expert, params)):
        raise UnsupportedFormatError(
            "the optimizer files have a group of parameters that are no experts' of deepspeed.moe, cut into "
            f"{partitions} parts by {world_size} ranks. Turn it into a universal checkpoint with DeepSpeed's "
            "ds_to_universal.py first."
        )
    size = world_size // partitions
    layers = {match[1]: counts.get(match[1], 0) for name in params if (match := _EXPERT.fullmatch(name))}
    if world_size % partitions or not all(count and count % size == 0 for count in layers.values()):
        raise CorruptCheckpointError(
            f"the optimizer files cut experts into {partitions} parts by {world_size} ranks; the layers have "
            f"{sorted(set(layers.values()))} experts. Are the files of one save?"
        )
    experts = {layer: count // size for layer, count in layers.items()}
    found = []
    for number in range(size):
        stop = (number + 1) * partitions
        ranks = range(number * partitions, stop) if data_first else range(number, world_size, size)
        found.append(Partition(ranks, number, experts))
    return found


def counted(experts: Iterable[str]) -> dict[str, int]:
    """Return the experts of each layer, by the beginning of their names. `experts`: the weights in their files."""
    found: dict[str, int] = {}
    for name in experts:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def group_order(first: Mapping[str, Any], other: Mapping[str, Any], *, file: str) -> list[int]:
    """Return where the groups of rank 0 are among those of another rank.

    DeepSpeed takes the groups of experts from a set of names, which each process orders as it likes
    (deepspeed/moe/utils.py). They have names of their own; groups of one name are in one order everywhere.

    Args:
        first, other: The optimizer's state in the files of rank 0 and of the other rank.
    """
    there: dict[tuple[Any, Any], list[int]] = {}
    for index, key in enumerate(_group_keys(other)):
        there.setdefault(key, []).append(index)
    found = [there[key].pop(0) if there.get(key) else -1 for key in _group_keys(first)]
    if -1 in found or any(there.values()):
        raise CorruptCheckpointError(f"{file} has other groups of parameters than the file of rank 0.")
    return found


def _group_keys(inner: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The identity of a rank's groups: their names and numbers of partitions."""
    counts = inner.get("partition_count")
    counts = counts if isinstance(counts, list) else []
    base = inner.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, dict) else None
    names = [group.get("name") if isinstance(group, dict) else None for group in groups or ()]
    if len(names) != len(counts):
        names = [None] * len(counts)
    return [(name if isinstance(name, str) else None, repr(count)) for name, count in zip(names, counts, strict=True)]


def read_experts(store: Store, files: Sequence[str], model: Mapping[str, Any]) -> dict[str, Joined]:
    """Return the weights in the experts' files. `model`: the contents of the model file.

    Raises:
        IncompleteCheckpointError: An expert's file is missing; names it.
        CorruptCheckpointError: A file holds another expert's weights.
    """
    found = {(int(match[1] or -1), int(match[2])): match[0] for file in files if (match := EXPERT_FILE.fullmatch(file))}
    names = _complete(found, model)
    tensors: dict[str, StoredTensor] = {}
    for (key, file), value in zip(names.items(), read_archives(store, names.values()), strict=True):
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{file} holds no weights of an expert.")
        for name, tensor in value.items():
            match = _EXPERT.fullmatch(str(name))
            if match is None or int(match[2]) != key[1] or not isinstance(tensor, StoredTensor):
                raise CorruptCheckpointError(f"{file} holds {name!r:.200}, which is no weight of expert {key[1]}.")
            if name in tensors:
                raise CorruptCheckpointError(f"{name!r} is in {tensors[name].path} and again in {file}.")
            tensors[name] = tensor
    return join([tensors], what="the files of the experts")


def _complete(found: Mapping[tuple[int, int], str], model: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """The files by layer and expert, in order, after checking that none is missing."""
    counts = model.get("num_experts")
    layers = sorted({layer for layer, _ in found})
    if isinstance(counts, list) and layers != [-1]:
        if not all(type(count) is int and 0 <= count < 1 << 20 for count in counts) or len(counts) > 1 << 20:
            raise CorruptCheckpointError(f"the model file's num_experts is {counts!r:.80}.")
        wanted = [(layer, expert) for layer, count in enumerate(counts) for expert in range(count)]
    else:
        most = {layer: max(expert for other, expert in found if other == layer) for layer in layers}
        if any(number > len(found) for number in most.values()):
            raise IncompleteCheckpointError(f"there are files of {len(found)} experts, but not of experts 0, 1, ...")
        wanted = [(layer, expert) for layer in layers for expert in range(most[layer] + 1)]
    missing = [place for place in wanted if place not in found]
    if missing:
        layer, expert = missing[0]
        prefix = f"layer_{layer}_" if layer >= 0 else ""
        raise IncompleteCheckpointError(
            f"{prefix}expert_{expert}_mp_rank_00_model_states.pt is missing ({len(missing)} in all)."
        )
    extra = sorted(found.keys() - set(wanted))
    if extra:
        raise CorruptCheckpointError(f"{found[extra[0]]} is of no layer of the model file. Two saves lie together?")
    return {place: found[place] for place in wanted}
