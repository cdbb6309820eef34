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
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.zip import sizes_in
from ckptkit.formats.trainers.optimizer_files import OptimizerState, read_optimizer
from ckptkit.formats.trainers.rank_files import RankFiles, RankModel, join_model
from ckptkit.storage import Store

_MODEL_FILE = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")
_ADAPTERS = ("lora_train_meta.json", "lora_adapter/adapter_config.json")


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of verl's rank files at the store's root. Reads no tensor bytes."""
    sizes = sizes_in(store)
    files = file_names(store.list())
    world_size = _world_size(store, files)
    of_model, of_optimizer, of_extra = (
        RankFiles.matching(f"{kind}_world_size_{world_size}_rank_{{rank}}.pt", files)
        for kind in ("model", "optim", "extra_state")
    )
    of_model.check(world_size)
    model = join_model(of_model.read(store, options), what=of_model.template)
    optimizer = OptimizerState()
    if of_optimizer.names:
        optimizer = _optimizer(store, of_optimizer, world_size, model, options)
    lora = next((meta for path in _ADAPTERS if isinstance(meta := read_json(store, path), dict)), None)
    info = CatalogInfo(
        "verl",
        producer="verl",
        world_size=world_size,
        mesh=model.mesh,
        files={name: sizes[name] for name in files if f"_world_size_{world_size}_rank_" in name},
        notes=(*model.notes, *optimizer.notes),
        extra={} if lora is None else {"lora": lora},
    )
    objects = {
        f"extra_state.{rank}": ObjectEntry(
            f"extra_state.{rank}", path, 0, max(0, sizes[path]), key=("extra_state", rank)
        )
        for rank, path in sorted(of_extra.names.items())
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
    store: Store, files: RankFiles, world_size: int, model: RankModel, options: ReadOptions
) -> OptimizerState:
    try:
        files.check(world_size)
    except IncompleteCheckpointError as error:
        return OptimizerState(notes=[f"the optimizer was skipped: {error}"])
    return read_optimizer(files.read(store, options), model.params, what=files.template, replica=model.replica)
