"""Loads a Hugging Face directory into a sharded model. Each rank reads only its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap

import torch
from torch import nn

from ckptkit.arguments import Location, location
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.load.checkpoint import load_checkpoint
from ckptkit.checkpoint.load.foreign import aligned, with_aliases
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.load.plan import LoadPlan
from ckptkit.checkpoint.load.planner import plan_load
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.save.hf_config import config_of
from ckptkit.checkpoint.state.model_tensors import model_tensors
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.formats.dcp.host_bytes import dtype_name
from ckptkit.formats.hf import safetensors
from ckptkit.fsdp import meta
from ckptkit.keymaps.builtin import choose_map
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store


@dataclass(frozen=True, slots=True)
class HFLoadReport:
    """Lists the loaded names, the names that are missing in the files, and the names that are only in the files.

    `nbytes` is the number of bytes that this rank read.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    nbytes: int = 0


def load_hf(model: nn.Module, url: Location, *, cast: bool = False, strict: bool = True) -> HFLoadReport:
    """Fill `model`, sharded or not, from the safetensors at `url`; see `FSDPStrategy.load_hf`.

    If transformers uses different names in memory than in files (stacked experts), the names are mapped. The files may
    contain a tied weight under any of its names. If they contain it under several names, the tensors must be equal.

    Args:
        cast: Allow lossy casts (fp32 files into bf16 parameters). Widening is always allowed.
    """
    url = location("url", url)
    state, live = TrainState(model=model, rng=False), model_tensors(model)[0]

    def opened() -> tuple[Catalog, Store, LoadOptions]:
        store = open_store(url)
        catalog = _under_live_names(safetensors.open_catalog(store), state)
        targets = {name: Target.of(entry, name) for name, entry in catalog.tensors.items()}
        key_map = choose_map(targets, wanted=live.keys(), config=config_of(model)).key_map
        # A key map loads only weights, and no optimizer or scheduler from files beside them.
        options = LoadOptions(strict=strict, convert_dtype=True, key_map=key_map)
        stored, kept = {entry.dtype for entry in catalog.tensors.values()}, {tensor.dtype for tensor in live.values()}
        if not cast and any(starmap(_is_rounded, product(stored, kept))):  # only then plan twice
            plan = plan_load(state, catalog, store, options, rank=coordinator.rank, world_size=coordinator.world_size)
            if rounded := list(_rounded(plan)):
                plan.mismatches.add("others", "model", rounded)
                plan.mismatches.check(store.url, strict=strict, call="load_hf")
        return catalog, store, options

    with contextlib.closing(Coordinator()) as coordinator:
        catalog, store, options = coordinator.run_on_all(opened, f"opening {url}")
        origin = state.half_loaded
        report = load_checkpoint(
            state, lambda: (catalog, store), options, coordinator=coordinator, origin=origin, call="load_hf"
        )
    meta.restore_buffers(model)
    loaded = {id(live[key.removeprefix("model.")]) for key in report.loaded}  # a tied tensor is listed once
    missing, unexpected = ([key.removeprefix("model.") for key in keys] for keys in (report.missing, report.unexpected))
    names = [name for name, tensor in live.items() if id(tensor) in loaded]
    return HFLoadReport(tuple(names), tuple(missing), tuple(unexpected), report.nbytes)


def _under_live_names(catalog: Catalog, state: TrainState) -> Catalog:
    """Return the catalog with its names changed to the live model's names.

    Names may differ by a prefix, for example if only one of model and checkpoint has a head or is a PEFT model. They
    may also differ by the parts that PEFT inserts into names.
    """
    rename, aliases, _ = aligned(catalog, state)
    names = {name: rename(name) for name in catalog.tensors}
    if len(set(names.values())) < len(names):
        return catalog
    tensors = {new: replace(catalog.tensors[old], name=new, fqn=new) for old, new in names.items()}
    return replace(catalog, tensors=tensors, info=with_aliases(catalog.info, aliases))


def _rounded(plan: LoadPlan) -> Iterator[str]:
    """Describe each tensor that the load would round."""
    for target in plan.models:
        stored, kept = target.entry.dtype, target.live.dtype
        if _is_rounded(stored, kept):
            text = "to round it, set FSDPConfig(mixed_precision=...)"
            yield f"{target.key} is {stored}, the model keeps {dtype_name(kept)}; {text}"


def _is_rounded(stored: str, kept: torch.dtype) -> bool:
    dtype = getattr(torch, stored)
    is_cast_float8 = dtype != kept and dtype_of(stored).kind == "float8"
    return is_cast_float8 or torch.promote_types(dtype, kept) != kept
