"""Reads verl's FSDP checkpoints: `model_world_size_<N>_rank_<R>.pt`, with files for the optimizer and for extra state.

SkyRL and other systems use the same names. Tensors are DTensors (FSDP2, FSDP1 with a mesh), ShardedTensors (FSDP1) or
plain replicas. Reading them needs no process group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, Role, TensorEntry
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckptkit.formats.hf.side_files import SideFiles, file_names, find_side_files, read_json
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, StoredTensor
from ckptkit.formats.trainers.optimizer_files import OptimizerState, is_state_dicts, read_flat_optimizer, read_optimizer
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.trainers.rank_files import Joined, is_tensor, join, missing_ranks, read_archives, refuse_bare_parts
from ckptkit.keymaps.wrappers import strip_infixes
from ckptkit.storage import Store

MODEL_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MODEL = "model_world_size_{size}_rank_{{rank}}.pt"
_OPTIM = "optim_world_size_{size}_rank_{{rank}}.pt"
_EXTRA = "extra_state_world_size_{size}_rank_{{rank}}.pt"


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Read verl's rank files at the store's root, but no tensor bytes.

    Raises:
        IncompleteCheckpointError: A rank's file is missing. The message names it.
        CorruptCheckpointError: The files contradict each other.
    """
    sizes = {entry.path: entry.size for entry in store.list()}
    files = file_names(store.list())
    world_size = _world_size(store, files)
    pattern = _MODEL.format(size=world_size)
    ranks = [int(match[2]) for name in files if (match := MODEL_FILE.fullmatch(name))]
    missing_ranks(ranks, world_size, pattern)
    values = read_archives(store, [pattern.format(rank=rank) for rank in range(world_size)])
    joined = join(_state_dicts(values, pattern), what=pattern)
    refuse_bare_parts(joined, what=pattern)
    tensors = model_entries(joined)
    notes = [note for tensor in joined.values() for note in tensor.notes]
    optimizer = _optimizer(store, files, world_size, parameters(values[0], tensors))
    objects = _extra_state(sizes, files, world_size)
    side = _side_files(store)
    return Catalog(
        {**tensors, **optimizer.tensors},
        {**objects, **optimizer.objects},
        CatalogInfo(
            "verl",
            producer="verl",
            step=_step(store.url),
            world_size=world_size,
            mesh=next((tensor.mesh for tensor in joined.values() if tensor.mesh is not None), None),
            files={name: sizes[name] for name in files if f"_world_size_{world_size}_rank_" in name},
            side_files=side.carried,
            notes=(*notes, *optimizer.notes, *side.notes),
            extra={**side.extra, **_adapter(store)},
        ),
    )


def model_entries(joined: Mapping[str, Joined]) -> dict[str, TensorEntry]:
    """Return MODEL entries for joined tensors, after checking their coverage. FQNs do not include wrapper names."""
    fqns = strip_infixes(joined)
    return {name: tensor.entry(name, Role.MODEL, fqn=fqns[name]) for name, tensor in joined.items()}


def parameters(state_dict: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> list[Param]:
    """Return the model's parameters in module order, given one rank's state dict.

    If some tensors are distributed, the plain ones are buffers. A tied parameter is listed once, under its first name.
    """
    distributed = any(isinstance(value, (DTensorRecord, ShardedTensorRecord)) for value in state_dict.values())
    found, seen = [], set()
    for name, value in state_dict.items():
        if name not in entries or (distributed and isinstance(value, StoredTensor)):
            continue
        identity = _identity(value)
        if identity is None or identity not in seen:
            seen.add(identity)
            found.append(Param(entries[name].fqn, entries[name].shape))
    return found


def _identity(value: Any) -> tuple[str, int] | None:
    """Return a tensor's storage and offset, which tied names share, or None if this rank's part is empty."""
    if isinstance(value, ShardedTensorRecord):
        if not value.shards:
            return None
        value = value.shards[0].tensor
    elif isinstance(value, DTensorRecord):
        value = value.local
    return (value.storage.key, value.offset) if value.numel else None


def _state_dicts(values: Sequence[Any], pattern: str) -> list[Mapping[str, Any]]:
    for rank, value in enumerate(values):
        if not isinstance(value, dict) or not any(is_tensor(item) for item in value.values()):
            raise CorruptCheckpointError(f"{pattern.format(rank=rank)} contains no state dict of tensors.")
    return list(values)


def _world_size(store: Store, files: Sequence[str]) -> int:
    found = {int(match[1]) for name in files if (match := MODEL_FILE.fullmatch(name))}
    if not found:
        raise CheckpointNotFoundError(f"{store.url} has no model_world_size_<N>_rank_<R>.pt.")
    if len(found) > 1:
        raise CorruptCheckpointError(
            f"{store.url} has model files of {len(found)} world sizes: {sorted(found)}. Keep those of one save."
        )
    (world_size,) = found
    config = read_json(store, "fsdp_config.json") if "fsdp_config.json" in files else None
    recorded = config.get("world_size") if isinstance(config, dict) else None
    if isinstance(recorded, int) and recorded != world_size:
        raise CorruptCheckpointError(
            f"fsdp_config.json has world_size {recorded}, but the model files have {world_size}: they are from two "
            "saves."
        )
    return world_size


def _optimizer(store: Store, files: Sequence[str], world_size: int, params: Sequence[Param]) -> OptimizerState:
    pattern = _OPTIM.format(size=world_size)
    names = [pattern.format(rank=rank) for rank in range(world_size)]
    there = [name for name in names if name in files]
    if not there:
        return OptimizerState()
    if len(there) < world_size:
        gone = [name for name in names if name not in files]
        are = "is" if len(gone) == 1 else "are"
        note = f"{len(there)} optimizer files were skipped, because {', '.join(gone[:4])} {are} missing."
        return OptimizerState(notes=[note])
    values = read_archives(store, names)
    found = read_optimizer(values, params, what=pattern)
    if found.tensors or found.objects:
        return found
    return (read_flat_optimizer(values, params) if is_state_dicts(values) else None) or found


def _extra_state(sizes: Mapping[str, int], files: Sequence[str], world_size: int) -> dict[str, ObjectEntry]:
    """Return the files that hold schedulers and random states (one per rank) as objects."""
    found = {}
    for rank in range(world_size):
        path = _EXTRA.format(size=world_size).format(rank=rank)
        if path in files:
            name = f"extra_state.{rank}"
            found[name] = ObjectEntry(name, path, 0, sizes[path], key=("extra_state", rank))
    return found


def _side_files(store: Store) -> SideFiles:
    return find_side_files(store, "huggingface")


def _adapter(store: Store) -> dict[str, Any]:
    for path in ("lora_train_meta.json", "lora_adapter/adapter_config.json"):
        meta = read_json(store, path)
        if isinstance(meta, dict):
            return {"lora": meta}
    return {}


def _step(url: str) -> int | None:
    match = re.search(r"global_step_(\d+)(?:/[^/]*)?/?$", url)
    return int(match[1]) if match else None
