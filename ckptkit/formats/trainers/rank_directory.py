"""Reads a directory with one torch.save file per rank (`*rank_<R>.pt` and similar) from an unknown system."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry
from ckptkit.errors import UNREADABLE, CheckpointNotFoundError, CorruptCheckpointError
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.objects import plain
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, StoredTensor, is_tensor
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.formats.state_names import MODEL_KEYS, OPTIMIZER_KEY, STEPS
from ckptkit.formats.torch_save import begins_like_torch, may_hold_model, open_file
from ckptkit.formats.trainers import fsdp1_local
from ckptkit.formats.trainers.optimizer_files import OptimizerState, plain_value, read_optimizer
from ckptkit.formats.trainers.rank_files import join_model, read_ranks, recorded_ranks
from ckptkit.formats.trainers.steps import ordered, step_in
from ckptkit.storage import Store
from ckptkit.units import first_few

_RANK = re.compile(r"(.*(?:rank|shard|checkpoint|consolidated|__)[_.-]?)(\d+)((?:[_.-].*)?\.(?:pt|pth|bin|ckpt))")
_NUMBER = re.compile(r"\d+")
_KEYED = re.compile(r"(.+_)(\d+)(\.pt)")  # only in directories that contain _KEYS
_KEYS = "metadata.pkl"  # torch_checkpointing writes this file
_MODEL_KEYS = (*MODEL_KEYS, "app")


def is_rank_directory(store: Store, files: Sequence[str]) -> bool:
    """Return whether at least two files, including the file of rank 0, have names that differ only in the rank.

    Files whose names are those of an optimizer or other state do not count. If the numbers may be steps, as in
    checkpoint_0.pt but not in step_100_rank_0.pt, file 0 must contain shards.
    """
    groups = _groups(store, files)
    template = _model_group(groups)
    if template is None:
        return False
    return _KEYS in files or not _may_be_steps(template, groups[template]) or _contain_shards(store, groups[template])


def are_rank_files(store: Store, files: Sequence[str], newest: str) -> bool:
    """Return whether the numbers in these file names are ranks, not steps.

    The numbers are ranks if the names also contain a step, and `newest`, the file of the latest step, has this step.
    Otherwise, they are ranks if file 0 contains shards. Reads the pickle in file 0 if the numbers are 0, 1, 2, ...
    without gaps.
    """
    groups = _groups(store, files)
    template = _model_group(groups)
    if template is None:
        return False
    step = step_in(template)
    if step is not None and not _may_be_steps(template, groups[template]):
        return step == step_in(newest)
    return _contain_shards(store, groups[template])


def _may_be_steps(template: str, ranks: Mapping[int, str]) -> bool:
    return any(step_in(name) != step_in(template) for name in ranks.values())


def _contain_shards(store: Store, ranks: Mapping[int, str]) -> bool:
    if sorted(ranks) != list(range(len(ranks))):
        return False
    try:
        value = _levels(read_archive(store, ranks[0]), _model_key)[-1]
    except UNREADABLE:
        return False  # file 0 can't be read: treat the numbers as steps, so that another file is opened
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
    groups = _groups(store, file_names(listing))
    template = _model_group(groups)
    if template is None:
        raise CheckpointNotFoundError(f"{store.url} has no files whose names differ only in the rank.")
    ranks, at = groups[template], step_in(template)
    named = at[0] if at is not None and (at[0] > 0 or at[1] < 0) else None  # the step is 0 in a name with only an epoch
    values = read_ranks(store, ranks, template)
    names = [ranks[rank] for rank in sorted(ranks)]
    levels = [_levels(value, _model_key) for value in values]
    models = [found[-1] for found in levels]
    if fsdp1_local.is_flat(models):
        return fsdp1_local.read(store, names, models, sizes, None, options)
    model = join_model(models, what=template, where=", at the top level or below a known key")
    side = find_side_files(store)
    beside = [_beside(found) for found in levels]  # what each rank saved with its model
    if beside[0] and (differing := _differing(values, models[0])) is not None:
        whole = open_file(store, names[0])  # the file of rank 0 also has the scheduler and all other values
        said = (f"each rank saved the whole model; {names[0]} was read.", *model.notes)
        said += (f"not read: other ranks' values of {first_few(differing)}, which differ from rank 0's.",) * bool(
            differing
        )
        info = replace(whole.info, format="rank-files", world_size=len(names), files={n: sizes[n] for n in names})
        info = replace(info, step=named if info.step is None else info.step, notes=(*info.notes, *said))
        return Catalog(whole.tensors, whole.objects, info)
    optimizer, key = OptimizerState(), _optimizer_key(beside[0])
    if key is not None and all(isinstance(value.get(key), dict) for value in beside):
        optimizer = read_optimizer([value[key] for value in beside], model.params, what=template)
    else:
        apart = next((n for n in groups if n != template and "optim" in n.lower() and step_in(n) == at), "")
        if groups.get(apart, {}).keys() == ranks.keys():
            states = [_levels(value, _optimizer_key)[-1] for value in read_ranks(store, groups[apart], apart)]
            optimizer = read_optimizer(states, model.params, what=apart)
            names += [groups[apart][rank] for rank in sorted(ranks)]
    others = {name for other, files in groups.items() if step_in(other) in (None, at) for name in files.values()}
    unread = sorted(others - {*names})
    notes = [f"not read: {', '.join(unread[:4])}{', ...' * (len(unread) > 4)}."] if unread else []
    rests = [
        plain({name: item for name, item in value.items() if name != key}, file=ranks[rank])
        for rank, value in zip(sorted(ranks), beside, strict=True)
    ]
    rest = rests[0]
    shared = {  # what all ranks saved alike, such as a scheduler
        str(name): ObjectEntry(str(name), ranks[0], encoding="value", value=value, key=(str(name),))
        for name, value in rest.items()
        if plain_value(value) and all(repr(other.get(name)) == repr(value) for other in rests)
    }
    left = [str(name) for name in rest if str(name) not in shared]
    notes += [f"not read: {first_few(left)} of {template.format(rank='*')}."] if left else []
    info = CatalogInfo(
        "rank-files",
        producer="torch.save",
        step=next((step for name in STEPS if type(step := beside[0].get(name)) is int), named),
        world_size=max(len(values), recorded_ranks(models[0].values())),
        mesh=model.mesh,
        files={name: sizes[name] for name in names},
        notes=(*model.notes, *optimizer.notes, *notes),
    )
    return Catalog({**model.tensors, **optimizer.tensors}, {**shared, **optimizer.objects}, side.described_in(info))


def _differing(values: Sequence[Any], model: Any) -> list[str] | None:
    """Return the keys of the values that differ between ranks, if each rank saved the whole training state.

    Returns None if each rank saved only a part of the state: parts of tensors, or its own optimizer states.

    Args:
        model: The state dict of rank 0. Weights are not compared.
    """
    if not isinstance(model, dict) or not all(isinstance(t, StoredTensor) for t in model.values() if is_tensor(t)):
        return None
    found = {path: None for value in values[1:] for path in _differences(values[0], value, (), model)}
    return None if () in found else [".".join(map(str, path)) for path in found]


def _differences(first: Any, other: Any, path: tuple[Any, ...], model: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value that differs between two ranks.

    Yields () instead if each rank has only a part of a tensor, or if the value is in an optimizer. These differences
    show that each rank saved only its own part of the state.
    """
    if first is model:
        return
    if isinstance(first, dict) and isinstance(other, dict):
        is_optimizer = {"state", "param_groups"} <= first.keys()
        for key in dict.fromkeys((*first, *other)):
            below = (*path, key)
            same = key in first and key in other
            for one in _differences(first[key], other[key], below, model) if same else (below,):
                yield () if is_optimizer else one
    elif isinstance(first, (list, tuple)) and type(first) is type(other) and len(first) == len(other):
        for i, pair in enumerate(zip(first, other, strict=True)):
            yield from _differences(*pair, (*path, i), model)
    elif isinstance(first, StoredTensor) and isinstance(other, StoredTensor):
        views = [(t.dtype, t.shape, t.strides, t.offset) for t in (first, other)]
        if views[0] != views[1] or not first.same_storage(other):
            yield path
    elif is_tensor(first) or is_tensor(other):
        yield ()
    elif type(first) is not type(other) or repr(first) != repr(other):
        yield path


def _groups(store: Store, files: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return the files by name template (such as "model_rank_{rank}.pt"), then by rank.

    Omits templates without a file of rank 0. Also omits a template with only one file, because the number in the file's
    name may not be a rank. Keeps such a template if it differs from another template only in the step, because a rank's
    file is missing in this step. In a directory that torch_checkpointing wrote, a template with one file is kept.
    Omits .bin files whose first bytes show that torch.save did not write them, because other programs use this ending,
    too.
    """
    found: dict[str, dict[int, str]] = {}
    keyed = _KEYS in files
    for name in files:
        match = _RANK.fullmatch(name) or (keyed and _KEYED.fullmatch(name)) or None
        if match and len(match[2]) < 8:
            head, tail = (text.replace("{", "{{").replace("}", "}}") for text in (match[1], match[3]))
            found.setdefault(f"{head}{{rank}}{tail}", {})[int(match[2])] = name
    sure = {template for template, ranks in found.items() if 0 in ranks and (keyed or len(ranks) > 1)}
    alike = {_NUMBER.sub("", template) for template in sure}
    return {
        template: ranks
        for template, ranks in found.items()
        if (template in sure or (step_in(template) is not None and _NUMBER.sub("", template) in alike))
        and (not template.endswith(".bin") or begins_like_torch(store, min(ranks.values())))
    }


def _model_group(groups: Mapping[str, Mapping[int, str]]) -> str | None:
    """Return the name template of the model's files. If their names contain steps, those of the latest step."""
    named = [template for template in groups if "model" in template.lower()] or may_hold_model(groups)
    steps = ordered(named)
    return steps[0].name if steps else next(iter(named), None)


def _levels(value: Any, key_of: Callable[[Any], Any]) -> list[Any]:
    """Return the chain of nested dicts, outermost first, that ends with the state dict of a model or an optimizer.

    Args:
        key_of: Returns the key of the next inner dict, or None for the innermost dict.
    """
    levels = [value]
    while (key := key_of(levels[-1])) is not None:
        inner = levels[-1][key]
        if any(inner is level for level in levels):  # a hostile pickle
            raise CorruptCheckpointError(f"the dict at {key!r} contains itself. The file is damaged or malicious.")
        levels.append(inner)
    return levels


def _beside(levels: Sequence[Any]) -> dict[Any, Any]:
    """Return the values that a rank saved in addition to its model. `levels`: the result of `_levels` for the model."""
    return {key: value for level, inner in pairwise(levels) for key, value in level.items() if value is not inner}


def _model_key(value: Any) -> str | None:
    items = value if isinstance(value, dict) else {}
    return next((key for key in _MODEL_KEYS if isinstance(items.get(key), dict)), None)


def _optimizer_key(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else ()
    return next((key for key, item in items if OPTIMIZER_KEY.fullmatch(str(key)) and isinstance(item, dict)), None)
