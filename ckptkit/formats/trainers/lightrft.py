"""Reads LightRFT's FSDP2 checkpoints: a DCP with the model, and the directory `optim_states/` with the optimizer.

The keys of the DCP are the model's parameter names, without a wrapper such as "model". With a plain optimizer,
`optim_states/` is a second DCP. With FSDPadaptOptimizer, `optim_states/` has one file `_rank<R>` per rank. These files
contain fp32 master weights and moments as DTensors, without names, in the order of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.dcp import catalog
from ckptkit.formats.nested import entries_of
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.inert import Record
from ckptkit.formats.pickles.objects import plain
from ckptkit.formats.pickles.walk import loads
from ckptkit.formats.pickles.zip import sizes_in
from ckptkit.formats.trainers.merge import assembled, open_part, renamed
from ckptkit.formats.trainers.optimizer_files import (
    OptimizerState,
    master_entry,
    match_masters,
    names_by_key,
    read_optimizer,
)
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.trainers.rank_files import RankFiles, join, recorded_ranks
from ckptkit.storage import Store

OPTIMIZER_DIRECTORY = "optim_states"
_NEVER = 1 << 10  # more dimensions than any tensor has
_PATTERN = f"{OPTIMIZER_DIRECTORY}/_rank{{rank}}"
_OBJECTS = {"client_state": "client_state.pt", "scheduler": "scheduler_state.pt"}


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Read the model's DCP and, if there is an optimizer, its DCP or rank files."""
    model = catalog.open_catalog(store, options=options)
    below = sizes_in(store, OPTIMIZER_DIRECTORY)
    parts = [model]
    if f"{OPTIMIZER_DIRECTORY}/{catalog.METADATA}" in below:
        parts.append(renamed(open_part(catalog.open_catalog, store, OPTIMIZER_DIRECTORY, options), "optimizer"))
    elif below:
        parts.append(_rank_files(store, below, model, options))
    return assembled(store, parts, CatalogInfo("lightrft", producer="lightrft"), _OBJECTS)


# --- an optimizer with one file per rank


def _rank_files(store: Store, below: Mapping[str, int], model: Catalog, options: ReadOptions) -> Catalog:
    files = RankFiles.matching(_PATTERN, below)
    if not files.names:
        raise CorruptCheckpointError(f"{OPTIMIZER_DIRECTORY}/ has neither .metadata nor _rank<R> files.")
    values = files.read(store, options)
    for rank, value in enumerate(values):
        keys = ("base_optim_states", "flat_fp32_weights")
        if not isinstance(value, dict) or not all(isinstance(value.get(key), dict) for key in keys):
            raise CorruptCheckpointError(f"{_PATTERN.format(rank=rank)} lacks base_optim_states or flat_fp32_weights.")
    groups = values[0]["flat_fp32_weights"].values()
    files.check(max(len(values), recorded_ranks(t for group in groups for t in group)))
    optimizer = _optimizer(store, values, model)
    info = CatalogInfo(
        "lightrft",
        world_size=len(values),
        files={path: below[path] for path in files.ordered},
        notes=tuple(optimizer.notes),
    )
    return Catalog(optimizer.tensors, optimizer.objects, info)


def _state_dict_order(store: Store) -> list[str]:
    """Return the keys in the order of the state dict.

    In `.metadata`, `planner_data` has this order, but the tensors are ordered by the rank that wrote them.
    """
    metadata = loads(store.read(catalog.METADATA), file=catalog.METADATA, max_bytes=catalog.MAX_METADATA_BYTES)
    paths = metadata.fields.get("planner_data") if isinstance(metadata, Record) else None
    return [key for key in paths if isinstance(key, str)] if isinstance(paths, dict) else []


def _params(model: Catalog, order: Sequence[str], tied_ndim: int) -> list[Param]:
    """Return the float tensors of the model in module order.

    DCP stores a tied tensor under each of its names. Tensors with equal bytes and at least `tied_ndim` dimensions are
    considered tied, and only the first tensor is returned.
    """
    found, seen = [], set()
    for name in dict.fromkeys([*order, *model.tensors]):
        entry = model.tensors.get(name)
        if entry is None or entry.role is not Role.MODEL or dtype_of(entry.dtype).kind != "float":
            continue
        parts = frozenset((part.box, part.digest.value) for part in entry.slices if part.digest is not None)
        known = len(entry.shape) >= tied_ndim and entry.numel > 1 and len(parts) == len(entry.slices)
        same = (entry.shape, entry.dtype, parts) if known else None
        if same is None or same not in seen:
            seen.add(same)
            found.append(Param(entry.fqn, entry.shape))
    return found


def _optimizer(store: Store, values: Sequence[Mapping[str, Any]], model: Catalog) -> OptimizerState:
    masters = join([dict(_indexed(value["flat_fp32_weights"])) for value in values], what=_PATTERN)
    base = [value["base_optim_states"] for value in values]
    groups = base[0].get("param_groups") or []
    order, weights = _state_dict_order(store), model.by_role(Role.MODEL)
    # Equal norm weights are rarely tied: low precision can keep all of them at 1. Equal matrices usually are.
    for tied_ndim in (2, 0, _NEVER):
        params = _params(model, order, tied_ndim)
        assigned = match_masters(store, masters, groups, params, weights)
        if assigned is not None:
            break
    else:
        note = (
            "the optimizer was skipped: the model's names and shapes do not prove which weight each master belongs to."
        )
        return OptimizerState(notes=[f"{OPTIMIZER_DIRECTORY}/_rank*: {note}"])
    found = read_optimizer(base, params, what=_PATTERN, names=names_by_key(groups, assigned))
    for (group, index), joined in masters.items():
        entry = master_entry(assigned[group][index], joined)
        found.tensors[entry.name] = entry
        found.notes += joined.notes
    scaler = plain(values[0].get("grad_scaler"), file=_PATTERN.format(rank=0))
    if isinstance(scaler, dict):
        tensors, objects = entries_of({_PATTERN.format(rank=0): {"grad_scaler": scaler}}, levels=2)
        found.tensors |= tensors
        found.objects |= objects
    return found


def _indexed(groups: Mapping[Any, Any]) -> list[tuple[tuple[int, int], Any]]:
    found = []
    for group, tensors in groups.items():
        if type(group) is not int or not isinstance(tensors, list) or not 0 <= group < 1 << 16:
            raise CorruptCheckpointError(f"{OPTIMIZER_DIRECTORY}/_rank*: flat_fp32_weights is not a dict of lists.")
        found += [((group, index), tensor) for index, tensor in enumerate(tensors)]
    return found
