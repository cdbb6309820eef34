"""Loads a Hugging Face directory into a sharded model. Each rank reads only its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ckptkit.arguments import Location, location
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.load.key_map import entry_of
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.state.local_part import part_view
from ckptkit.checkpoint.state.train_state import TrainState, model_tensors
from ckptkit.checkpoint.state.without_values import mark_filled
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.fill import Filler, Verify
from ckptkit.formats.dcp.shared_memory import Claim, check_claims
from ckptkit.formats.hf import safetensors
from ckptkit.fsdp import meta
from ckptkit.keymaps.builtin import choose_map
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store


@dataclass(frozen=True, slots=True)
class HFLoadReport:
    """Lists the loaded names, the names that are missing in the files, and the names that are only in the files."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    nbytes: int = 0


def load_hf(model: nn.Module, url: Location, *, cast: bool = False, strict: bool = True) -> HFLoadReport:
    """Fill `model`, sharded or not, from the safetensors at `url`. Each rank reads only the bytes of its own shards.

    All ranks must call this; if one rank fails, all raise its error. The host holds one shard of one tensor at a time.
    If transformers uses different names in memory than in files (stacked experts), the names are mapped. The files may
    contain a tied weight under any of its names. If they contain it under several names, the tensors must be equal.

    Args:
        model: A model from `prepare_model`. Its parameters are allocated, but need not have values yet.
        url: A directory or a bucket prefix with config.json and *.safetensors.
        cast: Allow lossy casts (fp32 files into bf16 parameters). Widening is always allowed.
        strict: True raises if a name is only in the model or only in the files. False only reports such names.

    Raises:
        CheckpointMismatchError: Names, shapes or dtypes do not match. The message lists all mismatches. The model is
            unchanged.
    """
    url = location("url", url)
    live, _ = model_tensors(model)
    state = TrainState(model=model, rng=False)

    def plan() -> tuple[Store, dict[str, TensorEntry], HFLoadReport]:
        """Check that the files fit the model. Return the store, the tensors by model name, and the report.

        Reads only tied tensors that are stored under several names.
        """
        store = open_store(url)
        catalog = safetensors.open_catalog(store)
        targets = _targets(model, live, catalog)
        chosen, missing = _matched(live, targets)
        entries = {name: entry_of(targets[found], catalog.tensors) for name, found in chosen.items()}
        aliases = {name for names in _names_by_tensor(live).values() for name in names}
        unexpected = [name for name in targets if name not in chosen.values() and name not in aliases]
        _check(url, entries, live, missing if strict else [], unexpected if strict else [], cast)
        check_claims(store, _several_names(live, targets, catalog))
        by_tensor = _names_by_tensor(live)
        loaded = tuple(alias for name in entries for alias in by_tensor[id(live[name])])
        return store, entries, HFLoadReport(loaded, tuple(missing), tuple(unexpected))

    def read() -> int:
        filler = Filler(store, verify=Verify.FULL, cast=True)
        try:
            for name, entry in entries.items():
                view = part_view(name, live[name])
                filler.add_parts(entry, view.parts, view.local)
            filler.run()
        except BaseException:
            state.half_loaded = url  # a save of this model raises
            raise
        return filler.nbytes

    with contextlib.closing(Coordinator()) as coordinator, torch.no_grad():
        store, entries, report = coordinator.run_on_all(plan, f"opening {url}")
        nbytes = coordinator.run_on_all(read, f"loading {url}")
    if not report.missing:
        state.half_loaded = ""
    mark_filled(live[name] for name in report.loaded)
    meta.restore_buffers(model)
    return replace(report, nbytes=nbytes)


def _targets(model: nn.Module, live: Mapping[str, torch.Tensor], catalog: Catalog) -> dict[str, Target]:
    entries = {name: Target.of(entry, name) for name, entry in catalog.tensors.items()}
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not set(entries) & set(live):
        # Either the files contain only a base model and `model` also has a head, or the reverse. transformers supports
        # both cases.
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


def _matched(live: Mapping[str, torch.Tensor], targets: Mapping[str, Target]) -> tuple[dict[str, str], list[str]]:
    """Return a mapping from model names to names in the files, and the model names that the files lack.

    `live` has the model's tensors, and `targets` has the tensors in the files. A tied tensor has several names in the
    model. The results contain only the first of these names.
    """
    chosen: dict[str, str] = {}
    missing: list[str] = []
    for names in _names_by_tensor(live).values():
        found = next((name for name in names if name in targets), None)
        if found is None:
            missing.append(names[0])
        else:
            chosen[names[0]] = found
    return chosen, missing


def _several_names(
    live: Mapping[str, torch.Tensor], targets: Mapping[str, Target], catalog: Catalog
) -> list[list[Claim]]:
    """Return a group of stored tensors for each tied tensor that the files contain under several names.

    All groups contain whole tensors, so that every rank compares the same bytes.
    """
    groups = []
    for names in _names_by_tensor(live).values():
        found = [name for name in names if name in targets]
        if len(found) > 1:
            tensor = live[names[0]]
            groups.append([Claim.whole(name, entry_of(targets[name], catalog.tensors), tensor) for name in found])
    return groups


def _check(
    url: str,
    entries: Mapping[str, TensorEntry],
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
    for name, entry in entries.items():
        tensor = live[name]
        if tuple(tensor.shape) != entry.shape:
            problems.append(f"{name!r} has shape {list(entry.shape)}, the model wants {list(tensor.shape)}")
        stored = getattr(torch, entry.dtype)
        if not cast and torch.promote_types(stored, tensor.dtype) != tensor.dtype:
            kept = str(tensor.dtype).removeprefix("torch.")
            problems.append(f"{name!r} is {entry.dtype}, the model keeps {kept}; pass cast=True to round it")
    if problems:
        raise CheckpointMismatchError(f"{url} does not fit the model; nothing was loaded.\n  " + "\n  ".join(problems))
