"""Reads verl's FSDP checkpoints: `model_world_size_<N>_rank_<R>.pt`, with files for the optimizer and for extra state.

SkyRL and other systems use the same names. Tensors are DTensors (FSDP2, FSDP1 with a mesh), ShardedTensors (FSDP1) or
plain replicas. No process group is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.hf.side_files import file_names, find_side_files, read_json
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.trainers.optimizer_files import OptimizerState, is_state_dicts, read_flat_optimizer, read_optimizer
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.trainers.rank_files import join_model, missing_ranks, one_replica, read_files, read_ranks
from ckptkit.storage import Store

_MODEL_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MODEL = "model_world_size_{size}_rank_{{rank}}.pt"
_OPTIM = "optim_world_size_{size}_rank_{{rank}}.pt"
_ADAPTERS = ("lora_train_meta.json", "lora_adapter/adapter_config.json")
_EXTRA = "extra_state_world_size_{size}_rank_{{rank}}.pt"


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Return the catalog of verl's rank files at the store's root. Reads no tensor bytes."""
    sizes = {entry.path: entry.size for entry in store.list()}
    files = file_names(store.list())
    world_size = _world_size(store, files)
    pattern = _MODEL.format(size=world_size)
    ranks = {int(match[2]): match[0] for match in map(_MODEL_FILE.fullmatch, files) if match}
    state_dicts = read_ranks(store, ranks, pattern, world_size, options)
    model = join_model(state_dicts, what=pattern)
    optimizer = _optimizer(store, files, world_size, model.params, one_replica(state_dicts), options)
    lora = next((meta for path in _ADAPTERS if isinstance(meta := read_json(store, path), dict)), None)
    step = re.search(r"global_step_(\d+)(?:/[^/]*)?/?$", store.url)
    info = CatalogInfo(
        "verl",
        producer="verl",
        step=int(step[1]) if step else None,
        world_size=world_size,
        mesh=model.mesh,
        files={name: sizes[name] for name in files if f"_world_size_{world_size}_rank_" in name},
        notes=(*model.notes, *optimizer.notes),
        extra={} if lora is None else {"lora": lora},
    )
    extras = {f"extra_state.{rank}": _EXTRA.format(size=world_size).format(rank=rank) for rank in range(world_size)}
    objects = {
        name: ObjectEntry(name, path, 0, sizes[path], key=("extra_state", rank))
        for rank, (name, path) in enumerate(extras.items())
        if path in files
    }
    side = find_side_files(store, "huggingface")
    return Catalog({**model.tensors, **optimizer.tensors}, {**objects, **optimizer.objects}, side.described_in(info))


def _world_size(store: Store, files: Sequence[str]) -> int:
    found = {int(match[1]) for name in files if (match := _MODEL_FILE.fullmatch(name))}
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


def _optimizer(
    store: Store,
    files: Sequence[str],
    world_size: int,
    params: Sequence[Param],
    replica: Sequence[int],
    options: ReadOptions | None,
) -> OptimizerState:
    pattern = _OPTIM.format(size=world_size)
    ranks = {rank: name for rank in range(world_size) if (name := pattern.format(rank=rank)) in files}
    if not ranks:
        return OptimizerState()
    try:
        missing_ranks(ranks, world_size, pattern)
    except IncompleteCheckpointError as error:
        return OptimizerState(notes=[f"the optimizer was skipped: {error}"])
    values = read_files(store, ranks.values(), options)
    found = read_optimizer(values, params, what=pattern)
    if found.tensors or found.objects or not is_state_dicts(values):
        return found
    return read_flat_optimizer({rank: values[rank] for rank in replica}, params) or found
