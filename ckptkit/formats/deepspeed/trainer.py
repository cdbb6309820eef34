"""Reads the DeepSpeed checkpoints of the Hugging Face Trainer and of accelerate.

DeepSpeed's files are in the subdirectory `global_step<N>/` or `pytorch_model/`. The checkpoint's root contains the
scheduler, the random states, and config.json. If one rank has all weights of the model or of an adapter, the Trainer
also writes these weights to the root as safetensors. Safetensors files with other names come from the user's script,
for example an export or an average of weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import CheckpointNotFoundError, CkptkitError, StorageError
from ckptkit.formats.deepspeed import zero
from ckptkit.formats.hf import safetensors
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.models import numbered
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.trainers.merge import assembled, open_part, recorded_step, state_files
from ckptkit.formats.trainers.steps import ordered
from ckptkit.storage import Store
from ckptkit.units import first_few

_ACCELERATE = re.compile(r"pytorch_model(?:_(\d+))?")
_WEIGHTS = re.compile(r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors")


def _of_models(directories: Iterable[str]) -> dict[int, str]:
    """Return DeepSpeed's directory for each model, by model number.

    The Trainer has only one model. If there are directories of several steps, the newest one is returned.
    """
    names = list(directories)
    steps = ordered(name for name in names if name.startswith("global_step"))
    if steps:
        return {0: steps[0].name}
    return dict(sorted((int(match[1] or 0), name) for name in names if (match := _ACCELERATE.fullmatch(name))))


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Read DeepSpeed's files, and the other files at the store's root.

    If the Trainer also wrote the weights as safetensors, these are the model's weights, and DeepSpeed's fp32 weights
    are only the master weights. In this case, unreadable DeepSpeed files raise no error, and a note says why they were
    not read.
    """
    listing = store.list()
    directories = _of_models(item.path for item in listing if item.kind == "directory")
    if not directories:
        raise CheckpointNotFoundError(f"{store.url} has no global_step<N>/ and no pytorch_model/.")
    files = file_names(listing)
    is_trainer = "trainer_state.json" in files
    writer = "transformers Trainer" if is_trainer else "accelerate"
    has_file = is_trainer and any(map(_WEIGHTS.fullmatch, files))
    unread = [name for name in files if name.endswith(".safetensors") and not has_file]
    notes: tuple[str, ...] = (f"not read: {first_few(unread)}.",) if unread else ()
    info = CatalogInfo("deepspeed", producer=writer, step=recorded_step(store, "trainer_state.json"), notes=notes)
    parts = []
    if has_file:
        weights = safetensors.open_weights(store)
        # With ZeRO-3, the Trainer may write an adapter's file without tensors, or with empty ones.
        if weights.tensors and all(0 not in entry.shape for entry in weights.tensors.values()):
            parts.append(weights)
    has_weights = bool(parts)
    for index, directory in directories.items():
        try:
            state = open_part(zero.open_catalog, store, directory, options)
        except CkptkitError as error:
            if not has_weights or isinstance(error, StorageError):
                raise
            notes = (*info.notes, f"the optimizer was not read: {error}")
            info = replace(info, format=parts[0].info.format, notes=notes)
            continue
        info = replace(info, producer=f"{writer}, {state.info.producer}")
        if has_weights:
            masters = {name: entry for name, entry in state.tensors.items() if entry.role is not Role.MODEL}
            state = Catalog(masters, state.objects, state.info)
        parts.append(numbered(state, index))
    return assembled(store, parts, find_side_files(store).described_in(info), state_files(files))
