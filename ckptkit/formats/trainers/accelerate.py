"""Reads the FSDP checkpoints of accelerate and the Hugging Face Trainer, with any state-dict type.

The file names, for model number i and rank r (versions before 0.25 omit `_fsdp`):

- SHARDED: the DCP checkpoints `pytorch_model_fsdp_<i>/` and `optimizer_<i>/`.
- SHARDED, saved without DCP: `pytorch_model_fsdp_<i>_rank<r>.bin` and `optimizer_<i>_rank<r>.bin`.
- FULL: `pytorch_model_fsdp[_<i>].bin` and `optimizer[_<i>].bin`.
- LOCAL: `pytorch_model_fsdp[_<i>]_rank<r>.bin`, with the optimizer as DCP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckptkit.formats.dcp import catalog
from ckptkit.formats.hf.side_files import find_side_files, read_json
from ckptkit.formats.models import numbered
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.zip import sizes_in
from ckptkit.formats.state_names import ACCELERATE_MODEL
from ckptkit.formats.trainers import fsdp1_local
from ckptkit.formats.trainers.merge import assembled, open_part, recorded_step, renamed, state_files
from ckptkit.formats.trainers.optimizer_files import OptimizerState, read_optimizer
from ckptkit.formats.trainers.rank_files import RankFiles, join_model, recorded_ranks
from ckptkit.storage import Store

_OPTIMIZER = re.compile(r"optimizer(?:_(\d+))?(?:_rank(\d+))?(\.bin|/)")
_STATE = "trainer_state.json"


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of all models and optimizers in the checkpoint."""
    listing = {item.path: item for item in store.list()}
    models = _by_index(listing, ACCELERATE_MODEL)
    if not models:
        raise CheckpointNotFoundError(f"{store.url} has nothing named pytorch_model_fsdp* or pytorch_model_<i>.")
    optimizers = _by_index(listing, _OPTIMIZER)
    sizes = sizes_in(store)
    parts = []
    for index, names in models.items():
        found = _open_one(store, names, optimizers.get(index, []), sizes, options)
        parts += found if index == min(models) else [numbered(part, index) for part in found]
    producer = "transformers Trainer" if isinstance(read_json(store, _STATE), dict) else "accelerate"
    info = CatalogInfo("accelerate", producer=producer, step=recorded_step(store, _STATE))
    return assembled(store, parts, find_side_files(store).described_in(info), state_files(sizes))


def _by_index(listing: Mapping[str, Any], pattern: re.Pattern[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, item in listing.items():
        if match := pattern.fullmatch(f"{name}/" if item.kind == "directory" else name):
            found.setdefault(int(match[1] or 0), []).append(name)
    return dict(sorted(found.items()))


def _open_one(
    store: Store,
    models: Sequence[str],
    optimizers: Sequence[str],
    sizes: Mapping[str, int],
    options: ReadOptions,
) -> list[Catalog]:
    """Return the catalogs of one model and its optimizer."""
    for names in (models, optimizers):
        saves = {_template(name): name for name in names}
        if len(saves) > 1:
            raise CorruptCheckpointError(
                f"{' and '.join(list(saves.values())[:2])} are files of two saves. Remove the files of one save."
            )
    parts = []
    if optimizers and not optimizers[0].endswith(".bin"):
        parts.append(renamed(open_part(catalog.open_catalog, store, optimizers[0], options), "optimizer"))
    if not models[0].endswith(".bin"):
        return [open_part(catalog.open_catalog, store, models[0], options), *parts]
    files, values = _read(store, models, options)
    names = files.ordered
    if fsdp1_local.is_flat(values):
        return [fsdp1_local.read(store, names, values, sizes, parts[0] if parts else None, options), *parts]
    model, optimizer = join_model(values, what=files.template), OptimizerState()
    if not parts and optimizers:
        others, states = _read(store, optimizers, options)
        optimizer = read_optimizer(states, model.params, what=others.template, replica=model.replica)
        names = [*names, *others.ordered]
    info = CatalogInfo(
        "accelerate",
        world_size=len(values) if "{rank}" in files.template else None,
        mesh=model.mesh,
        files={name: sizes.get(name, -1) for name in names},
        notes=(*model.notes, *optimizer.notes),
    )
    return [Catalog({**model.tensors, **optimizer.tensors}, optimizer.objects, info), *parts]


def _read(store: Store, names: Sequence[str], options: ReadOptions) -> tuple[RankFiles, list[Any]]:
    """Return the files and their values: one file per rank, in rank order, or a single full file."""
    files = RankFiles.matching(_template(names[0]), names)
    values = files.read(store, options)
    if isinstance(values[0], dict) and "{rank}" in files.template:
        files.check(max(len(values), recorded_ranks(values[0].values())))
    return files, values


def _template(name: str) -> str:
    return re.sub(r"_rank\d+\.bin$", "_rank{rank}.bin", name)
