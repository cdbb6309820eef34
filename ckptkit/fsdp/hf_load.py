"""Loads a Hugging Face directory into a sharded model; each rank reads only its own slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.load.fill import add_parts, fill
from ckptkit.checkpoint.state.local_part import PartView, part_view
from ckptkit.checkpoint.state.train_state import TrainState, model_tensors
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.fill import Filler
from ckptkit.formats.dcp.shared_memory import Claim, check_claims
from ckptkit.formats.hf import safetensors
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.fsdp import meta
from ckptkit.keymaps.builtin import choose_map
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store

__all__ = ["HFLoadReport", "load_hf"]


@dataclass(frozen=True, slots=True)
class HFLoadReport:
    """What `load_hf` did: names loaded, names missing in the files, and names unknown to the model."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    nbytes: int = 0


@torch.no_grad()
def load_hf(
    model: nn.Module,
    url: str,
    *,
    cast: bool = False,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> HFLoadReport:
    """Fill `model`, sharded or not, from the safetensors at `url`. Each rank reads the bytes of its own shards.

    No communication; the host holds one shard of one tensor at a time. File names are mapped to the live model's names
    where transformers uses different ones in memory (stacked experts). Tied weights load under either name; if the
    files contain both, they must be equal.

    Args:
        model: A prepared model: parameters are allocated (by `prepare_model`), with or without values.
        url: A directory or a bucket prefix with config.json and *.safetensors.
        cast: Allow lossy casts (fp32 files into bf16 parameters). Widening is always allowed.
        strict: Raise if names are missing or left over; otherwise they are only reported.
        storage_options: For the file system, as for `open_store`.

    Raises:
        CheckpointMismatchError: Names, shapes or dtypes do not match; lists all of them. The model is unchanged.
    """
    store = open_store(url, storage_options=storage_options)
    catalog = safetensors.open_catalog(store)
    live, _ = model_tensors(model)
    targets = _targets(model, live, catalog)
    chosen, missing = _matched(live, targets)
    used = {name for name, _ in chosen.values()}
    aliases = {name for names in _names_by_tensor(live).values() for name in names}
    unexpected = [name for name in targets if name not in used and name not in aliases]
    _check(url, chosen, live, missing if strict else [], unexpected if strict else [], cast)
    check_claims(store, _several_names(live, targets, catalog))
    rank = dist.get_rank() if dist.is_initialized() else 0
    nbytes = 0
    state = TrainState(model=model, rng=False)
    try:
        for name, (_, target) in chosen.items():
            nbytes += _read(catalog, store, target, part_view(name, live[name], rank))
    except BaseException:
        state.half_loaded = url
        raise
    if not missing:
        state.half_loaded = ""
    by_tensor = _names_by_tensor(live)
    loaded = tuple(alias for name in chosen for alias in by_tensor[id(live[name])])
    meta.mark_initialized(model, *loaded)
    meta.restore_buffers(model)
    return HFLoadReport(loaded, tuple(missing), tuple(unexpected), nbytes)


def _targets(model: nn.Module, live: Mapping[str, torch.Tensor], catalog: Catalog) -> dict[str, Target]:
    entries = {name: Target.of(entry, name) for name, entry in catalog.tensors.items()}
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not set(entries) & set(live):
        # Files of a base model loaded into a model with a head, or vice versa: transformers supports both.
        dot = prefix + "."
        inside = any(name.startswith(dot) for name in live)
        entries = {dot + name if inside else name.removeprefix(dot): target for name, target in entries.items()}
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    config = to_dict() if callable(to_dict) else {}
    return dict(choose_map(entries, wanted=set(live), config=config).mapped.targets)


def _names_by_tensor(live: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in live.items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _matched(
    live: Mapping[str, torch.Tensor], targets: Mapping[str, Target]
) -> tuple[dict[str, tuple[str, Target]], list[str]]:
    """Return each tensor's name in the files and its target, keyed by its first name; and the names without a
    target."""
    chosen: dict[str, tuple[str, Target]] = {}
    missing: list[str] = []
    for names in _names_by_tensor(live).values():
        found = next((name for name in names if name in targets), None)
        if found is None:
            missing.append(names[0])
        else:
            chosen[names[0]] = (found, targets[found])
    return chosen, missing


def _several_names(
    live: Mapping[str, torch.Tensor], targets: Mapping[str, Target], catalog: Catalog
) -> list[list[Claim]]:
    """Return the file contents for all names of one tied tensor, in full, so that every rank compares the same."""
    groups = []
    for names in _names_by_tensor(live).values():
        found = [name for name in names if name in targets and _is_copy(targets[name])]
        if len(found) > 1:
            tensor = live[names[0]]
            entries = {name: catalog.tensors[targets[name].parts[0].source] for name in found}
            groups.append([Claim.whole(name, entry, tensor) for name, entry in entries.items()])
    return groups


def _check(
    url: str,
    chosen: Mapping[str, tuple[str, Target]],
    live: Mapping[str, torch.Tensor],
    missing: list[str],
    unexpected: list[str],
    cast: bool,
) -> None:
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if unexpected:
        problems.append(f"not in the model: {', '.join(unexpected)}")
    for name, (_, target) in chosen.items():
        tensor = live[name]
        if tuple(tensor.shape) != target.shape:
            problems.append(f"{name!r} has shape {list(target.shape)}, the model wants {list(tensor.shape)}")
        stored = getattr(torch, target.source_dtype)
        if not cast and torch.promote_types(stored, tensor.dtype) != tensor.dtype:
            kept = str(tensor.dtype).removeprefix("torch.")
            problems.append(f"{name!r} is {target.source_dtype}, the model keeps {kept}; pass cast=True to round it")
    if problems:
        raise CheckpointMismatchError(f"{url} does not fit the model; nothing was loaded.\n  " + "\n  ".join(problems))


def _read(catalog: Catalog, store: Store, target: Target, view: PartView) -> int:
    """Read this rank's part of one tensor and return the bytes read."""
    dtype = getattr(torch, target.source_dtype)
    if _is_copy(target):
        host = torch.empty(view.local.shape, dtype=dtype)
        nbytes = _fill(store, catalog.tensors[target.parts[0].source], host, view.parts)
        view.local.copy_(host)
        return nbytes
    nbytes = 0
    for held in view.parts:
        for part in target.parts:
            for piece in part.cut(held.box):
                host = torch.empty(piece.source_box.sizes, dtype=dtype)
                whole = LocalPart(piece.source_box, (0,) * piece.source_box.ndim)
                nbytes += _fill(store, catalog.tensors[piece.source], host, [whole])
                host = host.reshape(piece.unfold) if piece.unfold else host
                host = host.permute(piece.axes) if piece.axes else host
                inside = piece.target_box.relative_to(held.box)
                where = tuple(
                    slice(base + at, base + at + size)
                    for base, at, size in zip(held.local_offsets, inside.offsets, inside.sizes, strict=True)
                )
                view.local[where].copy_(host.reshape(inside.sizes))
    return nbytes


def _fill(store: Store, entry: TensorEntry, host: torch.Tensor, parts: Sequence[LocalPart]) -> int:
    filler = Filler(store)
    add_parts(filler, entry, host, parts)
    return fill(filler)


def _is_copy(target: Target) -> bool:
    if len(target.parts) != 1:
        return False
    part = target.parts[0]
    return part.is_plain and part.source_box == part.target_box
