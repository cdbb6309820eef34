"""Reads DeepSpeed's two kinds of files, model states and optimizer states, into typed values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ckptkit.catalog.entry import ObjectEntry, Role, TensorEntry
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.deepspeed.experts import group_order
from ckptkit.formats.nested import entries_of
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.inert import Record
from ckptkit.formats.pickles.objects import plain
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.rank_files import (
    Joined,
    check_copies,
    check_steps,
    join,
    missing_ranks,
    read_files,
)
from ckptkit.storage import Store

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WEIGHTS = {False: "single_partition_of_fp32_groups", True: "fp32_flat_groups"}  # by whether it is ZeRO-3
Shape: TypeAlias = tuple[int, ...]

_OURS = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_config",
        "frozen_param_fragments", "sparse_tensor_module_names", "skipped_steps", "data_sampler", "random_ltd",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The contents of the model files.

    Attributes:
        values: Contents of each file. With ZeRO-3, there is one file per rank. Without ZeRO-3, there is one file.
        file: Name of the first file.
        param_shapes: For each parameter group, name -> shape, in the order of the flat vector.
        shared: Name of a tied weight -> the name under which the weight is stored.
        frozen: Name of a frozen parameter -> its shape.
    """

    values: Sequence[Mapping[str, Any]]
    stage3: bool
    param_shapes: Sequence[Mapping[str, Shape]]
    shared: Mapping[str, str]
    frozen: Mapping[str, Shape]
    file: str

    @property
    def version(self) -> str:
        return str(self.values[0].get("ds_version") or "")

    @property
    def step(self) -> int | None:
        step = self.values[0].get("global_steps")
        return step if isinstance(step, int) else None

    @property
    def world_size(self) -> int | None:
        size = self.values[0].get("dp_world_size")
        return size if isinstance(size, int) else None

    @property
    def trained(self) -> frozenset[str]:
        """The names of the trained parameters: those in `param_shapes`."""
        return frozenset(name for group in self.param_shapes for name in group)

    def client_state(self, taken: Collection[str]) -> tuple[dict[str, TensorEntry], dict[str, ObjectEntry]]:
        """Return the tensors and the other values of the scheduler, the counters and the user's client state.

        Args:
            taken: Names that the catalog already uses. A tensor with such a name gets the prefix "client_state.".
        """
        rest = {key: value for key, value in self.values[0].items() if key not in _OURS and value is not None}
        tensors, parts = entries_of({self.file: plain(rest, file=self.file)}, levels=1)
        objects = {name: replace(entry, role=Role.OTHER) for name, entry in parts.items()}
        names = {name: f"client_state.{name}" if name in taken else name for name in tensors}
        others = {
            names[name]: replace(entry, name=names[name], role=Role.OTHER, fqn="", state="")
            for name, entry in tensors.items()
        }
        return others, objects

    def whole(self, *, elsewhere: frozenset[str]) -> dict[str, Joined]:
        """Return the tensors that the files store in full under "module", such as buffers and frozen parameters.

        With ZeRO-3, "module" also has empty placeholders for the partitioned parameters. These are left out.

        Args:
            elsewhere: Names to omit because other files contain the tensors.
        """
        module = self.values[0]["module"]
        skip = elsewhere | self.shared.keys() | (self.frozen.keys() if self.stage3 else frozenset())
        buffers = set(self.values[0].get("buffer_names") or ())
        names = [
            name
            for name, tensor in module.items()
            if name not in skip
            and isinstance(tensor, StoredTensor)
            and (name in buffers or not self.stage3 or tensor.numel)
        ]
        return join([{name: module[name] for name in names}], what="the model file")


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One rank's part of a parameter group.

    Attributes:
        weights: Flat fp32 weights.
        states: States of the base optimizer.
        fragments: name -> (numel, start) of each parameter in this part, or {} if the file does not list the
            parameters.
    """

    weights: StoredTensor
    states: Mapping[str, Any]
    fragments: Mapping[str, tuple[int, int]]

    def flats(self) -> list[StoredTensor]:
        """Return the weights and the moments, but no step counts."""
        return [self.weights, *(t for t in self.states.values() if isinstance(t, StoredTensor) and t.shape)]


@dataclass(frozen=True, slots=True)
class OptimStates:
    """The contents of the optimizer files.

    Attributes:
        parts: Parts of the parameter groups, by rank, then by group.
        param_groups: Settings of the base optimizer's groups.
        paddings: Alignment padding after each parameter, by group, or [] if the files do not record the padding.
        partitions: Number of partitions of each group. Groups of experts have fewer partitions than there are ranks.
    """

    world_size: int
    stage: int
    parts: Sequence[Sequence[FlatPart]]
    param_groups: Sequence[Mapping[str, Any]]
    paddings: Sequence[Sequence[int]]
    partitions: Sequence[int]


def read_model_states(
    store: Store, files: Sequence[str], options: ReadOptions, *, without_module: bool = False
) -> ModelStates:
    """Read the model files at the root.

    Args:
        without_module: The weights are in other files, so the model files need not contain `module`.
    """
    matches = [match for name in files if (match := MODEL_FILE.fullmatch(name))]
    stage3 = all(match[1] is not None for match in matches)
    chosen = sorted((m for m in matches if stage3 or m[1] is None), key=lambda m: (int(m[1] or 0), int(m[2])))
    names = [match[0] for match in chosen]
    template = f"zero_pp_rank_{{rank}}_mp_rank_{matches[0][2]}_model_states.pt"
    ranks = [int(match[1] or 0) for match in matches]
    if stage3:
        missing_ranks(ranks, max(ranks) + 1, template)
    values = read_files(store, names, options)
    for name, value in zip(names, values, strict=True):
        if without_module and isinstance(value, dict) and value.get("module", {}) is None:
            value["module"] = {}
        if not isinstance(value, dict) or not isinstance(value.get("module"), dict):
            raise CorruptCheckpointError(f"{name} is not a DeepSpeed model file: it has no 'module'.")
    check_steps([[{"step": value.get("global_steps")}] for value in values], names)
    first = values[0]
    recorded = first.get("dp_world_size")
    if stage3 and isinstance(recorded, int):
        missing_ranks(ranks, max(*ranks, recorded - 1) + 1, template)
    shapes = first.get("param_shapes") or []
    groups = [shapes] if isinstance(shapes, dict) else shapes
    return ModelStates(
        values,
        stage3,
        [_shapes(group, names[0]) for group in groups],
        {str(alias): str(kept) for alias, kept in dict(first.get("shared_params") or {}).items()},
        _shapes(first.get("frozen_param_shapes") or {}, names[0]),
        names[0],
    )


def read_optim_states(
    store: Store, files: Sequence[str], models: ModelStates, options: ReadOptions
) -> OptimStates | None:
    """Read the optimizer files at the root. Returns None if the root contains no optimizer files."""
    matches = sorted((m for name in files if (m := OPTIM_FILE.fullmatch(name))), key=lambda m: int(m[2]))
    if not matches:
        return None
    names = [match[0] for match in matches]
    inner = [_optimizer_dict(value, name) for name, value in zip(names, read_files(store, names, options), strict=True)]
    partitions = _partitions(inner[0], len(names), names[0])
    world_size = max(partitions)
    template = names[0].replace(f"rank_{matches[0][2]}_", "rank_{rank}_", 1)
    missing_ranks([int(match[2]) for match in matches], world_size, template)
    parts = [_parts(value, name, models.stage3) for name, value in zip(names, inner, strict=True)]
    if len({len(of_rank) for of_rank in parts}) > 1:
        raise CorruptCheckpointError(
            f"the ranks have different numbers of groups in {_WEIGHTS[models.stage3]}: "
            f"{sorted({len(of_rank) for of_rank in parts})}."
        )
    if len(set(partitions)) > 1:  # with experts, the groups' order may differ between ranks
        for rank, (name, value) in enumerate(zip(names, inner, strict=True)):
            order = group_order(inner[0], value, file=name)
            if len(order) == len(parts[rank]):
                parts[rank] = [parts[rank][index] for index in order]
    check_steps([[part.states for part in of_rank] for of_rank in parts], names)
    check_copies([[tensor for part in of_rank for tensor in part.flats()] for of_rank in parts], names)
    groups = inner[0].get("optimizer_state_dict" if models.stage3 else "base_optimizer_state")
    groups = groups.get("param_groups") if isinstance(groups, dict) else None
    return OptimStates(
        world_size,
        _stage(inner[0], models.stage3),
        parts,
        groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else [],
        [] if models.stage3 else [list(group) for group in inner[0].get("param_alignment_paddings") or []],
        partitions if len(partitions) == len(parts[0]) else [world_size] * len(parts[0]),
    )


def _parts(inner: Mapping[str, Any], file: str, stage3: bool) -> list[FlatPart]:
    key = _WEIGHTS[stage3]
    weights = inner.get(key)
    if isinstance(weights, StoredTensor):
        weights = [weights]
    elif not isinstance(weights, list) or not all(isinstance(t, StoredTensor) and len(t.shape) == 1 for t in weights):
        raise IncompleteCheckpointError(
            f"{file}: {key} is not a list of flat tensors. Was it saved without the weights?"
        )
    states = _states(inner.get("optimizer_state_dict" if stage3 else "base_optimizer_state"))
    if stage3 and len(states) != len(weights):
        states = []  # these states cannot be matched to the subgroups
    fragments = [_fragments(group) for group in inner.get("param_slice_mappings") or []]
    return [
        FlatPart(flat, states[i] if i < len(states) else {}, fragments[i] if i < len(fragments) else {})
        for i, flat in enumerate(weights)
    ]


def _shapes(group: Any, file: str) -> dict[str, Shape]:
    if not isinstance(group, dict):
        raise CorruptCheckpointError(f"{file}: param_shapes is not a dict of shapes.")
    found = {}
    for name, shape in group.items():
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise CorruptCheckpointError(f"{file}: the shape of {name!r} is {shape!r:.80}, expected a tuple of sizes.")
        found[str(name)] = shape
    return found


def _optimizer_dict(value: Any, file: str) -> Mapping[str, Any]:
    inner = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        raise CorruptCheckpointError(f"{file} is not a DeepSpeed optimizer file: it has no 'optimizer_state_dict'.")
    if inner.get("ds_zero_partition_groups"):
        raise UnsupportedFormatError(
            f"{file}: its parameters are partitioned over subgroups of ranks, which is not supported."
        )
    return inner


def _partitions(inner: Mapping[str, Any], files: int, file: str) -> list[int]:
    """Return the number of partitions of each group. If the group has no experts, this is the number of ranks."""
    recorded = inner.get("partition_count", files)
    counts = recorded if isinstance(recorded, list) and recorded else [recorded or files]
    for count in counts:
        if type(count) is not int or not 0 < count < 1 << 24:
            raise CorruptCheckpointError(f"{file}: partition_count is {count!r:.40}, expected a positive integer.")
    if files > max(counts):
        raise CorruptCheckpointError(
            f"there are optimizer files of {files} ranks, but {file} says {max(counts)}: they are from two saves."
        )
    return counts


def _stage(inner: Mapping[str, Any], stage3: bool) -> int:
    stage = inner.get("zero_stage")
    if isinstance(stage, Record) and stage.args:
        stage = stage.args[0]
    return stage if isinstance(stage, int) else (3 if stage3 else 1)


def _states(base: Any) -> list[Mapping[str, Any]]:
    """Return one dict of states per group.

    The file contains either a list (elastic checkpoints), or a dict keyed by the index of each group's flat parameter.
    """
    if isinstance(base, list):
        return [state if isinstance(state, dict) else {} for state in base]
    state = base.get("state") if isinstance(base, dict) else None
    if not isinstance(state, dict):
        return []
    indices = [index for group in base.get("param_groups", []) for index in group.get("params", [])]
    return [state.get(index, {}) for index in indices]


def _fragments(group: Any) -> dict[str, tuple[int, int]]:
    found = {}
    for name, address in dict(group).items():
        # fragment_address is a dataclass (numel, start), pickled with positional values or with fields.
        numbers = address.args if isinstance(address, Record) and address.args else address
        if isinstance(address, Record) and address.fields:
            numbers = (address.fields.get("numel"), address.fields.get("start"))
        if isinstance(numbers, tuple) and len(numbers) == 2:
            found[str(name)] = (numbers[0], numbers[1])
    return found
