"""Reads DeepSpeed's MoE experts: one file of weights for each expert, and the experts' optimizer state.

An expert's optimizer state is partitioned over the ranks that hold the expert. In the optimizer files and
`param_shapes`, the experts of each rank are numbered from 0. The experts' own files, and the names returned by this
module, number all experts of a layer across the ranks (deepspeed/runtime/engine.py: _save_moe_checkpoint).

With E expert parallel ranks, rank r of the job has the experts of expert parallel rank r % E. If the job's config sets
use_data_before_expert_parallelism, rank r has the experts of expert parallel rank r // (ranks / E) instead
(deepspeed/utils/groups.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.rank_files import Joined, join, read_files
from ckptkit.storage import Store

EXPERT_FILE = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")  # for jobs without ZeRO
_EXPERT = re.compile(r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranks over which a parameter group is partitioned, in order, and the experts that these ranks hold.

    Attributes:
        number: The expert parallel rank, or None if all ranks have the same parameters.
        experts: Number of experts per rank, by the layer's name prefix.
    """

    ranks: Sequence[int]
    number: int | None = None
    experts: Mapping[str, int] | None = None

    def renamed(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values under names that number experts across all ranks instead of within one rank."""
        return {self._name(name): value for name, value in values.items()}

    def _name(self, name: str) -> str:
        match = _EXPERT.fullmatch(name) if self.experts is not None and self.number is not None else None
        if match is None or self.experts is None or self.number is None:
            return name
        return f"{match[1]}{self.number * self.experts.get(match[1], 0) + int(match[2])}{match[3]}"


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert, judging by its name."""
    return _EXPERT.fullmatch(name) is not None


def data_first(model: Mapping[str, Any]) -> bool:
    """Return whether adjacent ranks have the same experts. `model` is the content of a model file."""
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
    """Return a parameter group's partitions: one per expert parallel rank, or a single partition over all ranks.

    Args:
        partitions: Number of ranks that share each parameter in the group.
        counts: Number of experts in each layer, from `counted`.

    Raises:
        UnsupportedFormatError: The group has fewer partitions than there are ranks, and its parameters are not experts.
        CorruptCheckpointError: The numbers of ranks, partitions and experts contradict each other.
    """
    if partitions == world_size:
        return [Partition(range(world_size))]
    if not all(map(is_expert, params)):
        raise UnsupportedFormatError(
            f"the optimizer files of {world_size} ranks have a parameter group in {partitions} partitions, and its "
            "parameters are not experts of deepspeed.moe. Convert the checkpoint to a universal one with DeepSpeed's "
            "ds_to_universal.py first."
        )
    size = world_size // partitions
    layers = {match[1]: counts.get(match[1], 0) for name in params if (match := _EXPERT.fullmatch(name))}
    if world_size % partitions or not all(count and count % size == 0 for count in layers.values()):
        raise CorruptCheckpointError(
            f"the optimizer files of {world_size} ranks have experts in {partitions} partitions, but the layers have "
            f"{sorted(set(layers.values()))} experts. Are all files from one save?"
        )
    experts = {layer: count // size for layer, count in layers.items()}
    found = []
    for number in range(size):
        stop = (number + 1) * partitions
        ranks = range(number * partitions, stop) if data_first else range(number, world_size, size)
        found.append(Partition(ranks, number, experts))
    return found


def counted(experts: Iterable[str]) -> dict[str, int]:
    """Return the number of experts in each layer, by the prefix of the layer's names."""
    found: dict[str, int] = {}
    for name in experts:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def group_order(first: Mapping[str, Any], other: Mapping[str, Any], *, file: str) -> list[int]:
    """Return, for each parameter group of rank 0, the index of the same group on another rank.

    The order of the expert groups differs between processes, because DeepSpeed iterates over a set to create them
    (deepspeed/moe/utils.py). Groups are matched by name. Groups with the same name have the same order on all ranks.
    """
    there: dict[tuple[Any, Any], list[int]] = {}
    for index, key in enumerate(_group_keys(other)):
        there.setdefault(key, []).append(index)
    found = [there[key].pop(0) if there.get(key) else -1 for key in _group_keys(first)]
    if -1 in found or any(there.values()):
        raise CorruptCheckpointError(f"the parameter groups in {file} differ from those in the file of rank 0.")
    return found


def _group_keys(inner: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return, for each parameter group in a rank's file, its name (or None) and its number of partitions as text."""
    counts = inner.get("partition_count")
    counts = counts if isinstance(counts, list) else []
    base = inner.get("base_optimizer_state")
    groups = base.get("param_groups") if isinstance(base, dict) else None
    names = [group.get("name") if isinstance(group, dict) else None for group in groups or ()]
    if len(names) != len(counts):
        names = [None] * len(counts)
    return [(name if isinstance(name, str) else None, repr(count)) for name, count in zip(names, counts, strict=True)]


def read_experts(
    store: Store, files: Sequence[str], model: Mapping[str, Any], options: ReadOptions
) -> dict[str, Joined]:
    """Return the weights in the experts' files. `model` is the content of the model file."""
    found = {(int(match[1] or -1), int(match[2])): match[0] for file in files if (match := EXPERT_FILE.fullmatch(file))}
    names = _complete(found, model)
    tensors: dict[str, StoredTensor] = {}
    for (key, file), value in zip(names.items(), read_files(store, names.values(), options), strict=True):
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{file} contains no weights of an expert.")
        for name, tensor in value.items():
            match = _EXPERT.fullmatch(str(name))
            if match is None or int(match[2]) != key[1] or not isinstance(tensor, StoredTensor):
                raise CorruptCheckpointError(
                    f"{file} contains {name!r:.200}, which is not a weight of expert {key[1]}."
                )
            if name in tensors:
                raise CorruptCheckpointError(f"{name!r} is in {tensors[name].path} and again in {file}.")
            tensors[name] = tensor
    return join([tensors], what="the files of the experts")


def _complete(found: Mapping[tuple[int, int], str], model: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Check that no expert's file is missing. Return the files by (layer, expert), in order."""
    counts = model.get("num_experts")
    layers = sorted({layer for layer, _ in found})
    if isinstance(counts, list) and layers != [-1]:
        if not all(type(count) is int and 0 <= count < 1 << 20 for count in counts) or len(counts) > 1 << 20:
            raise CorruptCheckpointError(f"the model file's num_experts is {counts!r:.80}, expected a list of counts.")
        wanted = [(layer, expert) for layer, count in enumerate(counts) for expert in range(count)]
    else:
        most = {layer: max(expert for other, expert in found if other == layer) for layer in layers}
        if any(number > len(found) for number in most.values()):
            raise IncompleteCheckpointError(f"the files of {len(found)} experts are not numbered 0, 1, ...")
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
        raise CorruptCheckpointError(
            f"{found[extra[0]]} belongs to no layer of the model file. Are all files from one save?"
        )
    return {place: found[place] for place in wanted}
