"""Reads safetensors: a single file, a Hugging Face directory, or the shards that torch's DCP writes.

Reads only the headers, the index and config.json, never tensor bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, Role, SliceArray, TensorEntry, WholeTensors
from ckptkit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
)
from ckptkit.formats.dcp.subclasses import SUBCLASSES, Recipe
from ckptkit.formats.hf.dcp_shards import SHARD_NAME, open_shards
from ckptkit.formats.hf.header import HeaderTensor, SafetensorsHeader, read_headers
from ckptkit.formats.hf.shard_files import check_index, numbered_files, read_index
from ckptkit.formats.hf.side_files import SideFiles, file_names, find_side_files, read_json, unread_state
from ckptkit.formats.hf.torchao import DESCRIBED, found_recipes
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.gc_pause import collector_paused
from ckptkit.storage import Store
from ckptkit.storage.store import is_safe_name

_INDEX = ".safetensors.index.json"


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of the safetensors checkpoint at the store's root. Reads only the headers."""
    catalog = open_weights(store)
    if catalog.info.format != "safetensors":
        return catalog
    return replace(
        catalog, info=replace(catalog.info, notes=(*catalog.info.notes, *unread_state(file_names(store.list()))))
    )


def open_weights(store: Store) -> Catalog:
    """Return the same as `open_catalog`, but without notes about training state in other files."""
    listed = file_names(store.list())
    names = [name for name in listed if name.endswith((".safetensors", _INDEX))]
    shards = [name for name in names if SHARD_NAME.fullmatch(name)]
    if shards:
        return open_shards(store, shards)
    headers, notes = _choose(store, names)
    if "modules.json" in listed:
        notes = (*notes, *_modules(store))
    return _catalog(store, headers, find_side_files(store), notes)


def open_file(store: Store, path: str) -> Catalog:
    """Return the catalog of one safetensors file. Reads only the header."""
    headers = read_headers(store, [path])
    header = headers[path]
    if "DCP_SHARDING_INFO" in header.metadata:
        raise IncompleteCheckpointError(
            f"{path} is one of the shards that several ranks wrote. Give the directory that holds them all."
        )
    side = find_side_files(store) if path in ("model.safetensors", "adapter_model.safetensors") else SideFiles()
    return _catalog(store, headers, side, ())


def _catalog(
    store: Store, headers: Mapping[str, SafetensorsHeader], side: SideFiles, notes: tuple[str, ...]
) -> Catalog:
    metadata: dict[str, str] = {}
    differing: dict[str, None] = {}
    for header in headers.values():
        differing.update(dict.fromkeys(k for k, text in header.metadata.items() if metadata.get(k, text) != text))
        metadata.update(header.metadata)
    tensors = {path: header.tensors for path, header in headers.items()}
    recipes: dict[str, Recipe] = {}
    if DESCRIBED in metadata:
        stored = {name: tensor for found in tensors.values() for name, tensor in found.items()}
        recipes, names = found_recipes([header.metadata for header in headers.values()], stored, store.url)
        tensors = {path: {names.get(n, n): tensor for n, tensor in found.items()} for path, found in tensors.items()}
    if recipes:
        metadata = {}  # the recipes contain the same information
    elif differing:
        notes = (*notes, f"the files' __metadata__ differs in {', '.join(differing)}, which is not read.")
    kept = {key: text for key, text in metadata.items() if key != "format" and key not in differing}
    info = _info(store, headers, side, notes, kept)
    objects = {SUBCLASSES: ObjectEntry(SUBCLASSES, encoding="value", value=recipes)} if recipes else {}
    return Catalog(_entries(tensors), objects, info)


class _FileTensors(dict[str, TensorEntry], WholeTensors):
    """The tensors in several files."""


def _entries(files: Mapping[str, Mapping[str, HeaderTensor]]) -> _FileTensors:
    made = _FileTensors()
    with collector_paused():
        for path, tensors in files.items():
            if twice := sorted(made.keys() & tensors.keys()):
                first = made[twice[0]].slices.paths[0]
                raise CorruptCheckpointError(f"tensor {twice[0]!r} is in {first} and again in {path}.")
            paths = (path,)
            for name, (dtype, shape, start, nbytes) in tensors.items():
                slices = SliceArray.whole(paths, start, nbytes, shape)
                made[name] = TensorEntry(name, dtype, shape, slices, Role.MODEL, name)
    return made


def _info(
    store: Store,
    headers: Mapping[str, SafetensorsHeader],
    side: SideFiles,
    notes: tuple[str, ...],
    metadata: Mapping[str, str],
) -> CatalogInfo:
    extra: dict[str, Any] = {**side.extra, "metadata": metadata} if metadata else dict(side.extra)
    if "adapter_model.safetensors" in headers:
        adapter = read_json(store, "adapter_config.json")
        if isinstance(adapter, dict):
            extra["adapter_config"] = adapter
        else:
            notes = (*notes, "adapter_config.json is missing: rank and alpha of the adapter are not known.")
    return CatalogInfo(
        "safetensors",
        producer=next((header.metadata["format"] for header in headers.values() if "format" in header.metadata), ""),
        files={path: header.nbytes for path, header in headers.items()},
        side_files=side.carried,
        notes=(*notes, *side.notes),
        extra=extra,
    )


def _modules(store: Store) -> tuple[str, ...]:
    """Return a note about sentence-transformers modules whose weights are in subdirectories."""
    modules = read_json(store, "modules.json")
    places = [item.get("path") for item in modules if isinstance(item, dict)] if isinstance(modules, list) else []
    safe = [place for place in places[:64] if isinstance(place, str) and is_safe_name(place)]
    ends = (".safetensors", ".bin")
    heavy = [place for place in safe if any(name.endswith(ends) for name in file_names(store.list(place)))]
    if not heavy:
        return ()
    return (
        f"modules.json: {', '.join(heavy)} {'has' if len(heavy) == 1 else 'have'} weights too, which are not read.",
    )


# --- choosing the files that make up the checkpoint


def _choose(store: Store, names: list[str]) -> tuple[dict[str, SafetensorsHeader], tuple[str, ...]]:
    """Choose the files of the checkpoint. Return their headers, and notes.

    If several sets of files could be the checkpoint, chooses as transformers does.
    """
    indices = [name for name in names if name.endswith(_INDEX)]
    tensors = [name for name in names if name.endswith(".safetensors")]
    if indices and "model.safetensors" not in tensors:
        index = "model" + _INDEX if "model" + _INDEX in indices else indices[0]
        if index != "model" + _INDEX and len(indices) > 1:
            raise CorruptCheckpointError(f"{store.url} has several indexes: {', '.join(indices)}. Keep one.")
        weight_map = read_index(store, index, tensors)
        headers = read_headers(store, sorted(set(weight_map.values())))
        check_index(index, weight_map, {path: header.tensors for path, header in headers.items()})
        return headers, _unused(names, [index, *headers])
    chosen = _without_index(store, tensors)
    notes = (f"there is no index; all {len(chosen)} numbered files were used.",) if len(chosen) > 1 else ()
    return read_headers(store, chosen), (*notes, *_unused(names, chosen))


def _without_index(store: Store, tensors: list[str]) -> list[str]:
    for name in ("model.safetensors", "adapter_model.safetensors"):
        if name in tensors:
            return [name]
    numbered = numbered_files(tensors, "safetensors")
    if numbered is not None:
        return numbered
    if not tensors:
        raise CheckpointNotFoundError(f"{store.url} has no *.safetensors file.")
    if len(tensors) > 1 and all(re.search(r"rank[_-]?\d", name) for name in tensors):
        raise UnsupportedFormatError(
            f"{tensors[0]} and {len(tensors) - 1} more are per-rank files, but do not say which part of a tensor each "
            "rank has. Save them with torch's own HuggingFaceStorageWriter, or as a DCP checkpoint."
        )
    if len(tensors) > 1:
        raise CorruptCheckpointError(
            f"{store.url} has {len(tensors)} safetensors files ({', '.join(tensors[:4])}...) and no "
            f"model{_INDEX} that says which belong together. Give one of the files."
        )
    return tensors


def _unused(names: list[str], used: list[str]) -> tuple[str, ...]:
    left = [name for name in names if name not in used]
    return (f"not read: {', '.join(left)}.",) if left else ()
