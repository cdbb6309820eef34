"""Reads a directory with one torch.save file per rank (`*rank_<R>.pt` and similar) from an unknown system."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo
from ckptkit.errors import CheckpointNotFoundError, CkptkitError
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, is_tensor
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.formats.state_names import MODEL_KEYS, OPTIMIZER_KEY, STEPS
from ckptkit.formats.trainers import fsdp1_local
from ckptkit.formats.trainers.optimizer_files import OptimizerState, read_optimizer
from ckptkit.formats.trainers.rank_files import join_model, read_ranks, recorded_ranks
from ckptkit.storage import Store
from ckptkit.units import first_few

_RANK = re.compile(r"(.*(?:rank|shard|checkpoint|consolidated|__)[_.-]?)(\d+)((?:[_.-].*)?\.(?:pt|pth|bin|ckpt))")
_KEYED = re.compile(r"(.+_)(\d+)(\.pt)")  # only in directories with torch_checkpointing's metadata.pkl
_MODEL_KEYS = (*MODEL_KEYS, "app")


def is_rank_directory(files: Sequence[str]) -> bool:
    """Return whether at least two files, including the file of rank 0, have names that differ only in the rank."""
    return bool(_groups(files))


def are_rank_files(store: Store, files: Sequence[str]) -> bool:
    """Return whether the numbers in these file names are ranks, not steps.

    The numbers are ranks if file 0 contains shards. Reads the pickle in file 0 if the numbers are 0, 1, 2, ... without
    gaps.
    """
    groups = _groups(files)
    template = _model_group(groups)
    if template is None or sorted(groups[template]) != list(range(len(groups[template]))):
        return False
    try:
        value = _model_in(read_archive(store, groups[template][0]))
    except CkptkitError:
        return False  # unreadable: treat the numbers as steps, so that file 0 is not opened
    tensors = value.values() if isinstance(value, dict) else ()
    return any(isinstance(tensor, (DTensorRecord, ShardedTensorRecord)) for tensor in tensors)


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Read the rank files.

    Each file is a state dict, or a dict that contains the state dict of the model and, optionally, of the optimizer.

    Raises:
        IncompleteCheckpointError: A rank's file is missing. The message names the file.
    """
    listing = store.list()
    sizes = {item.path: item.size for item in listing}
    groups = _groups(file_names(listing))
    template = _model_group(groups)
    if template is None:
        raise CheckpointNotFoundError(f"{store.url} has no files whose names differ only in the rank.")
    ranks = groups[template]
    values = read_ranks(store, ranks, template)
    names = [ranks[rank] for rank in sorted(ranks)]
    models = [_model_in(value) for value in values]
    if fsdp1_local.is_flat(models):
        return fsdp1_local.read(store, names, models, sizes, None, options)
    model = join_model(models, what=template, where=", at the top level or below a known key")
    optimizer = OptimizerState()
    key = _optimizer_key(values[0])
    if key is not None and all(isinstance(value.get(key), dict) for value in values):
        optimizer = read_optimizer([value[key] for value in values], model.params, what=template)
    else:
        apart = next((name for name in groups if name != template and "optim" in name.lower()), "")
        if groups.get(apart, {}).keys() == ranks.keys():
            states = [_optimizer_in(value) for value in read_ranks(store, groups[apart], apart)]
            optimizer = read_optimizer(states, model.params, what=apart)
            names += [groups[apart][rank] for rank in sorted(ranks)]
    unread = sorted({name for files in groups.values() for name in files.values()} - {*names})
    notes = [f"not read: {', '.join(unread[:4])}{', ...' * (len(unread) > 4)}."] if unread else []
    beside = values[0] if models[0] is not values[0] and isinstance(values[0], dict) else {}
    left = [str(name) for name in beside if name not in (_model_key(beside), key, *STEPS)]
    notes += [f"not read: {first_few(left)} of {template.format(rank='*')}."] if left else []
    info = CatalogInfo(
        "rank-files",
        producer="torch.save",
        step=next((step for name in STEPS if type(step := beside.get(name)) is int), None),
        world_size=max(len(values), recorded_ranks(models[0].values())),
        mesh=model.mesh,
        files={name: sizes[name] for name in names},
        notes=(*model.notes, *optimizer.notes, *notes),
    )
    side = find_side_files(store)
    return Catalog({**model.tensors, **optimizer.tensors}, optimizer.objects, side.described_in(info))


def _groups(files: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return the files by name template, then by rank.

    Omits templates without a file of rank 0. Also omits templates with a single file, whose number need not be a rank,
    unless torch_checkpointing wrote the directory.
    """
    found: dict[str, dict[int, str]] = {}
    keyed = "metadata.pkl" in files
    for name in files:
        match = _RANK.fullmatch(name) or (keyed and _KEYED.fullmatch(name)) or None
        if match and len(match[2]) < 8:
            head, tail = (text.replace("{", "{{").replace("}", "}}") for text in (match[1], match[3]))
            found.setdefault(f"{head}{{rank}}{tail}", {})[int(match[2])] = name
    return {template: ranks for template, ranks in found.items() if 0 in ranks and (keyed or len(ranks) > 1)}


def _model_group(groups: Mapping[str, Mapping[int, str]]) -> str | None:
    named = [template for template in groups if "model" in template.lower()]
    rest = [template for template in groups if not re.search(r"optim|rng|sched|extra|random", template.lower())]
    return next(iter(named or rest or groups), None)


def _model_in(value: Any) -> Any:
    """Go down nested dicts by known keys, and return the first dict that contains a tensor or none of the keys."""
    while (key := _model_key(value)) is not None:
        value = value[key]
    return value


def _model_key(value: Any) -> str | None:
    if not isinstance(value, dict) or any(is_tensor(item) for item in value.values()):
        return None
    return next((key for key in _MODEL_KEYS if isinstance(value.get(key), dict)), None)


def _optimizer_in(value: Any) -> Any:
    while (key := _optimizer_key(value)) is not None:
        value = value[key]
    return value


def _optimizer_key(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else ()
    return next((key for key, item in items if OPTIMIZER_KEY.fullmatch(str(key)) and isinstance(item, dict)), None)
