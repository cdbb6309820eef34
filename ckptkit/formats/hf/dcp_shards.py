"""Reads the safetensors shards that torch's DCP writes: `shard-R-model-i-of-n`, one set per rank, without `.metadata`.

The entry `DCP_SHARDING_INFO` in the header of each file contains the offsets of the shards in the full tensors. The
full shape is not recorded. It is computed as the largest end of any shard
(torch/distributed/checkpoint/_consolidate_hf_safetensors.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, CatalogInfo, Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.catalog.tiles import not_in_rows
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats.hf.header import SafetensorsHeader, read_headers
from ckptkit.formats.hf.side_files import SideFiles, find_side_files
from ckptkit.formats.own.json import parse
from ckptkit.storage import Store

SHARD_NAME = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_MAX_RANKS = 1 << 20
_KEY = "DCP_SHARDING_INFO"
_VOCABULARY = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "tok_embeddings.weight")


def open_shards(store: Store, names: Sequence[str]) -> Catalog:
    """Return the catalog of the shards `names`, which are all at the store's root."""
    ranks = _ranks(names)
    headers = read_headers(store, names)
    parts: dict[str, list[TensorSlice]] = {}
    dtypes: dict[str, str] = {}
    for path, header in headers.items():
        offsets = saved_offsets(header, path)
        for name, tensor in header.tensors.items():
            if dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise CorruptCheckpointError(f"{path}: {name!r} is {tensor.dtype} here, {dtypes[name]} elsewhere.")
            box = Box(offsets.get(name, (0,) * len(tensor.shape)), tensor.shape)
            parts.setdefault(name, []).append(TensorSlice(box, path, tensor.start, tensor.nbytes, rank=ranks[path]))
    entries = {name: _entry(name, dtypes[name], slices) for name, slices in parts.items()}
    world_size = max(ranks.values()) + 1
    _check_coverage(entries, ranks, world_size)
    side = _side_files(store)
    counted = _check_vocabulary(entries, side.config or {}, world_size)
    doubt = (
        {}
        if counted
        else {"unproved": "that no files of the last ranks are missing: no file says how many ranks there were"}
    )
    return Catalog(
        entries,
        info=CatalogInfo(
            "safetensors-shards",
            producer="torch.distributed.checkpoint",
            world_size=world_size,
            files={path: header.nbytes for path, header in headers.items()},
            side_files=side.carried,
            notes=side.notes,
            extra={**side.extra, **doubt},
        ),
    )


def saved_offsets(header: SafetensorsHeader, path: str) -> dict[str, tuple[int, ...]]:
    """Return each tensor's offsets in the full tensor, as recorded in a file's header."""
    text = header.metadata.get(_KEY)
    if text is None:
        return {}
    info = parse(text, file=f"{path}: {_KEY} of the header")
    if not isinstance(info, dict):
        raise CorruptCheckpointError(f"{path}: {_KEY} of the header is not a JSON object.")
    found = {}
    for name, tensor in header.tensors.items():
        if name in info:
            ndim = len(tensor.shape)
            offsets = info[name].get("saved_offsets") if isinstance(info[name], dict) else None
            good = isinstance(offsets, list) and all(type(x) is int and 0 <= x < 2**62 for x in offsets)
            if offsets is None or not good or len(offsets) != ndim:
                raise CorruptCheckpointError(
                    f"{path}: saved_offsets of {name!r} are {offsets!r:.80}; expected {ndim} integers."
                )
            found[name] = tuple(offsets)
    return found


def _ranks(names: Sequence[str]) -> dict[str, int]:
    """Return the rank that wrote each file. Ranks count from 0, but the numbers in the file names count from 1."""
    found: dict[str, int] = {}
    totals: set[str] = set()
    for name in names:
        match = SHARD_NAME.fullmatch(name)
        if match is None:
            raise CorruptCheckpointError(f"{name} is not a shard-<rank>-model-<i>-of-<n>.safetensors.")
        found[name] = int(match[1])
        totals.add(match[3])
    if max(found.values(), default=0) > _MAX_RANKS:
        last = max(found, key=found.__getitem__)
        raise CorruptCheckpointError(f"{last}: the rank in its name is too large (at most {_MAX_RANKS}).")
    if len(totals) > 1:
        raise CorruptCheckpointError(
            f"shards of {len(totals)} saves ({', '.join(sorted(totals))} files per rank) share a directory. Keep one."
        )
    first = min(1, *found.values()) if found else 1
    return {name: rank - first for name, rank in found.items()}


def _entry(name: str, dtype: str, slices: list[TensorSlice]) -> TensorEntry:
    ndim = slices[0].box.ndim
    if any(part.box.ndim != ndim for part in slices):
        other = next(part for part in slices if part.box.ndim != ndim)
        raise CorruptCheckpointError(f"{other.path}: {name!r} has {other.box.ndim} dimensions here, {ndim} elsewhere.")
    shape = tuple(max(part.box.stops[dim] for part in slices) for dim in range(ndim))
    return TensorEntry(name, dtype, shape, SliceArray.of(slices, ndim), Role.MODEL, name)


def _check_coverage(entries: Mapping[str, TensorEntry], ranks: Mapping[str, int], world_size: int) -> None:
    absent = sorted(set(range(world_size)) - set(ranks.values()))
    for entry in not_in_rows(list(entries.values())):
        try:
            entry.check_coverage()
        except IncompleteCheckpointError as error:
            gone = ", ".join(f"shard-{rank + 1:05}-model-*" for rank in absent[:8])
            hint = (
                f" Missing files: {gone}."
                if absent
                else " A rank wrote several parts of the tensor, and only one was kept."
            )
            raise IncompleteCheckpointError(f"{error}{hint}") from error


def _check_vocabulary(entries: Mapping[str, TensorEntry], config: Mapping[str, Any], world_size: int) -> bool:
    """Check that the embedding has all rows that config.json requires. Return whether the check was possible.

    Only this check can reveal that the shards of the last ranks are missing.
    """
    wanted, checked = config.get("vocab_size"), False
    if type(wanted) is not int:
        return False
    for name, entry in entries.items():
        if name.endswith(_VOCABULARY) and entry.shape and entry.shape[0] < wanted:
            raise IncompleteCheckpointError(
                f"tensor {name!r} has {entry.shape[0]} rows in the shards of {world_size} ranks, but config.json says "
                f"vocab_size {wanted}: the last ranks are missing (shard-{world_size + 1:05}-model-*, ...)."
            )
        checked = checked or name.endswith(_VOCABULARY)
    return checked


def _side_files(store: Store) -> SideFiles:
    a = find_side_files(store)
    if a.config is not None:
        return a
    b = find_side_files(store, ".hf_metadata")
    return SideFiles((*a.carried, *b.carried), (*a.code, *b.code), b.config, (*a.notes, *b.notes))
