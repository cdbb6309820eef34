"""Reads torch.save files (one .pt, .bin or .ckpt file, or shards with an index) as a catalog. Reads no tensor bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role, TensorEntry
from ckptkit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsafePickleError,
)
from ckptkit.formats.hf.shard_files import check_index, numbered_files, read_index
from ckptkit.formats.hf.side_files import find_side_files, unread_state
from ckptkit.formats.nested import entries_of, other_containers
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.objects import plain, read_pickled
from ckptkit.formats.pickles.tensors import is_tensor
from ckptkit.formats.pickles.walk import Unknown
from ckptkit.formats.state_names import STEP_PATHS, STEPS
from ckptkit.storage.store import Store

# Names that people give only to torch.save files of models.
MODEL_FILES = ("pytorch_model.bin", "model.pt", "model.pth", "model.bin", "model.ckpt", "model_optim_rng.pt")

# Parts of names that people give to other torch.save files: optimizers, schedulers, loss functions.
_OTHER_FILES = re.compile(r"optim|sched|scaler|rng|random|extra|criterion|sampler|dataloader", re.IGNORECASE)
TORCH_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".pth.tar", ".th")  # endings of torch.save files
TORCH_STARTS = (b"PK", b"\x80\x02")  # first bytes of a torch.save file: a zip archive, or a pickle
_MAX_BIN = 16  # if a directory has more .bin files, they are not opened
INDEX_SUFFIX = ".bin.index.json"
# Megatron saves its arguments with the weights. These arguments say over how many ranks the model is split.
_SPLITS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def open_catalog(
    store: Store,
    *,
    path: str | None = None,
    options: ReadOptions = DEFAULTS,
) -> Catalog:
    """Open the torch.save file or files at the store's root.

    If a LightningModule has its model in an attribute, the attribute's name is stripped from the weights' names.

    Args:
        path: The file to open. By default, the first of these that exists: the shards in an index, all numbered
            files, a file with a usual name for a model, the only file that may hold a model.
    """
    if path is not None:
        catalog = open_file(store, path, options=options)
    else:
        names = [info.path for info in store.list() if info.kind in ("file", "symlink")]
        catalog = _open_directory(store, names, options)
        notes = unread_state(name for name in names if name not in catalog.info.files)
        catalog = replace(catalog, info=replace(catalog.info, notes=(*catalog.info.notes, *notes)))
    if not catalog.info.producer.startswith("lightning") or options.strip_prefix is not None:
        return catalog
    from ckptkit.formats.trainers import lightning  # lazy, because other files do not need it

    prefix = lightning.module_prefix(entry.fqn for entry in catalog.tensors.values() if entry.role is Role.MODEL)
    return lightning.without_prefix(catalog, prefix)


def _open_directory(store: Store, names: Sequence[str], options: ReadOptions) -> Catalog:
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if indices:
        index = min(indices)
        weight_map = read_index(store, index, names)
        values = _shards(store, list(dict.fromkeys(weight_map.values())), options)
        listed = {
            path: {name for name, item in value.items() if is_tensor(item) or weight_map.get(name) == path}
            for path, value in values.items()
        }
        check_index(index, weight_map, listed)
        return _catalog(store, values, index)
    numbered = numbered_files(names, "bin") if "pytorch_model.bin" not in names else None
    if numbered is not None:
        return _catalog(store, _shards(store, numbered, options))
    files = torch_files(store, names) or [name for name in names if name.endswith(TORCH_ENDINGS)]
    chosen = model_file(files)
    if not files:
        raise CheckpointNotFoundError(f"{store.url} has no torch.save file.")
    if chosen is None:
        raise CheckpointNotFoundError(
            f"{store.url} has {len(files)} torch.save files: {', '.join(files[:5])}. Name the one you mean."
        )
    return open_file(store, chosen, options=options)


def torch_files(store: Store, names: Iterable[str]) -> list[str]:
    """Return the torch.save files. A .bin file counts only if its first bytes are those of a torch.save file.

    If many files end in .bin, they are assumed to be data, except those with a usual name for a model.
    """
    found = [name for name in names if name.endswith(TORCH_ENDINGS)]
    if sum(name.endswith(".bin") for name in found) > _MAX_BIN:  # so many files are probably data
        found = [name for name in found if not name.endswith(".bin") or name in MODEL_FILES]
    return [name for name in found if not name.endswith(".bin") or begins_like_torch(store, name)]


def begins_like_torch(store: Store, name: str) -> bool:
    """Return whether a file is empty, or its first bytes are those of a torch.save file.

    If the file is a symlink that is broken or leads out of the store, returns whether its name contains "model". Other
    such links usually lead to data.
    """
    try:
        return store.read(name, 0, 2) in (b"", *TORCH_STARTS)
    except (UnsafePathError, FileNotFoundError):
        return "model" in name  # reading it raises an error that names the symlink


def model_file(files: Sequence[str]) -> str | None:
    """Return the file with a usual name for a model ("model.pt"), or else the only file that may hold a model.

    Files that `may_hold_model` leaves out count only if there are no others. Returns None if there is no such file.
    """
    likely = may_hold_model(files) or files
    return next((name for name in (*MODEL_FILES, *(likely if len(likely) == 1 else ())) if name in files), None)


def may_hold_model(files: Iterable[str]) -> list[str]:
    """Return the files that may hold a model: all except those with a usual name for an optimizer or other state."""
    return [name for name in files if not _OTHER_FILES.search(name)]


def open_file(store: Store, path: str, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of one torch.save file."""
    value = plain(read_torch_file(store, path, options), file=path)
    _refuse_part(value, path)
    return _catalog(store, {path: value})


def _refuse_part(value: Any, path: str) -> None:
    """Raise IncompleteCheckpointError if the arguments in a Megatron file say that it holds only a part of a model."""
    saved = isinstance(value, dict) and "checkpoint_version" in value and value.get("args")
    split = {name: n for name in _SPLITS if isinstance(saved, dict) and type(n := saved.get(name)) is int and n > 1}
    if split:
        sizes = ", ".join(f"{name} is {size}" for name, size in split.items())
        raise IncompleteCheckpointError(
            f"{path} holds only the part of one rank of Megatron ({sizes}), and the files do not say how to join the "
            "parts. Load it in Megatron and save it with --ckpt-format torch_dist."
        )


def read_torch_file(store: Store, path: str, options: ReadOptions = DEFAULTS) -> Any:
    """Return the value in a torch.save file (zip or the older format) or in a plain pickle, which has no tensors.

    Reads no tensor bytes. With `options.allow_pickle`, instances of classes that are not on the allow-list become inert
    records.
    """
    allow_pickle = options.allow_pickle
    unknown: Unknown = "record" if allow_pickle else "refuse"
    try:
        return read_pickled(store, path, file=path, unknown=unknown)
    except UnsafePickleError as error:
        if allow_pickle or "is not on the allow-list" not in str(error):
            raise
        raise UnsafePickleError(
            f"{error} --allow-pickle reads the tensors and leaves out the values of unknown classes; it runs no code "
            "either. It is an option of convert, reshard, copy, inspect and verify."
        ) from None


def _shards(store: Store, paths: Sequence[str], options: ReadOptions) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path in paths:
        value = plain(read_torch_file(store, path, options), file=path)
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{path}: a shard holds a {type(value).__name__}, not a dict of tensors.")
        values[path] = value
    return values


# --- information about the checkpoint as a whole


def _catalog(store: Store, values: Mapping[str, Any], index: str | None = None) -> Catalog:
    tensors, objects = entries_of(values, sharded=index is not None)
    return Catalog(tensors, objects, _info(store, values, index, tensors))


def _info(
    store: Store, values: Mapping[str, Any], index: str | None, entries: Mapping[str, TensorEntry]
) -> CatalogInfo:
    files: dict[str, int] = {}
    for path in (*values, *([index] if index else [])):
        found = store.info(path)
        files[path] = found.size if found is not None and found.kind == "file" else -1
    producer, step = "torch.save", None
    notes: list[str] = []
    for value in values.values():
        if isinstance(value, dict):
            if "pytorch-lightning_version" in value:
                producer = f"lightning {str(value['pytorch-lightning_version'])[:20]}"
            meta = value.get("meta")
            if "ema_state_dict" in value and isinstance(meta, dict) and "mmengine_version" in meta:
                notes.append(  # EMAHook swaps weights and average before a save, and swaps them back on resuming
                    "state_dict is the moving average of the weights, for inference. MMEngine stores the weights "
                    "that it trains in ema_state_dict."
                )
            step = _step(value)
    side = find_side_files(store)
    tied = _tied(entries)
    containers = other_containers(values.values())
    notes += [f"{', '.join(names[1:])} shares its bytes with {names[0]} (tied)." for names in tied]
    return CatalogInfo(
        "torch",
        producer=producer,
        step=step,
        files=files,
        side_files=side.carried,
        notes=(*notes, *side.notes),
        extra={
            **side.extra,
            **({"tied": tied} if tied else {}),
            **({"containers": containers} if containers else {}),
        },
    )


def _step(value: Mapping[str, Any]) -> int | None:
    for path in (*((name,) for name in STEPS), *STEP_PATHS):
        found: Any = value
        for part in path:
            if isinstance(found, list) and isinstance(part, int):
                found = found[part] if found else None
            else:
                found = found.get(part) if isinstance(found, dict) else None
        if type(found) is int and found >= 0:
            return found
    return None


def _tied(entries: Mapping[str, TensorEntry]) -> list[list[str]]:
    """Return groups of weights that share the same bytes in a file."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for name, entry in entries.items():
        if entry.role is Role.MODEL and len(entry.slices) == 1:
            part = entry.slices[0]
            place = (part.path, part.start, part.nbytes, part.strides, entry.shape, entry.dtype)
            places.setdefault(place, []).append(name)
    return [names for names in places.values() if len(names) > 1]
