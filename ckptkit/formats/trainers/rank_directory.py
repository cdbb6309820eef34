"""Reads a directory with one torch.save file per rank (`*rank_<R>.pt` and similar) from an unknown system.

Nothing in such a directory says what a number in a file name means. `RankFiles` are files whose names differ in one
number. The number is the rank, and not the step, if the names also contain a step, or if the files contain shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry
from ckptkit.errors import UNREADABLE, CheckpointNotFoundError, CorruptCheckpointError
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.objects import plain
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, StoredTensor, is_tensor
from ckptkit.formats.pickles.zip import sizes_in
from ckptkit.formats.state_names import MODEL_KEYS, OPTIMIZER_KEY, STEPS
from ckptkit.formats.torch_save import begins_like_torch, may_hold_model, open_file, read_torch_file
from ckptkit.formats.trainers import fsdp1_local
from ckptkit.formats.trainers.optimizer_files import OptimizerState, plain_value, read_optimizer
from ckptkit.formats.trainers.rank_files import RankFiles, RankModel, join_model, recorded_ranks
from ckptkit.formats.trainers.steps import ordered, parse_step
from ckptkit.storage import Store
from ckptkit.units import first_few

_RANK = re.compile(r"(.*(?:rank|shard|checkpoint|consolidated|__)[_.-]?)(\d{1,7})((?:[_.-].*)?\.(?:pt|pth|bin|ckpt))")
_KEYED = re.compile(r"(.+_)(\d{1,7})(\.pt)")  # only in directories that contain _KEYS
_KEYS = "metadata.pkl"  # torch_checkpointing writes this file
_MODEL_KEYS = (*MODEL_KEYS, "app")


def is_rank_directory(store: Store, files: Sequence[str]) -> bool:
    """Return whether the model is stored in rank files: two or more, including the file of rank 0."""
    model = _of_model(_rank_files(store, files))
    return model is not None and (_KEYS in files or not model.may_be_steps or _contain_shards(model, store))


def are_rank_files(store: Store, files: Sequence[str], newest: str) -> bool:
    """Return whether the numbers in these file names are ranks, not steps.

    If the names contain both a rank and a step, the newest rank files must have the same step as the file `newest`.
    """
    model = _of_model(_rank_files(store, files))
    if model is None:
        return False
    if model.step is not None and not model.may_be_steps:
        return model.step == parse_step(newest)
    return _contain_shards(model, store)


def _contain_shards(files: RankFiles, store: Store) -> bool:
    """Return whether the numbers are 0, 1, 2, ... without gaps, and the model in file 0 is sharded."""
    if sorted(files.names) != list(range(len(files.names))):
        return False
    try:
        model = _Saved.of(read_torch_file(store, files.names[0])).model
    except UNREADABLE:
        return False  # treat the numbers as steps, so that another file is opened
    tensors = model.values() if isinstance(model, dict) else ()
    return any(isinstance(tensor, (DTensorRecord, ShardedTensorRecord)) for tensor in tensors)


def _rank_files(store: Store, files: Sequence[str]) -> list[RankFiles]:
    """Return groups of files whose names differ only in one number, if this number is a rank.

    It counts as a rank if there is a file of rank 0 and at least one more file. If the directory contains the file
    `_KEYS`, which shows that the numbers are ranks, the file of rank 0 is enough. If the names contain a step, and the
    group of any step meets these conditions, the groups of all steps are returned, so that missing files are noticed.
    A group of .bin files is left out if torch.save did not write its first file.
    """
    found: dict[str, RankFiles] = {}
    keyed = _KEYS in files
    for name in files:
        match = _RANK.fullmatch(name) or (keyed and _KEYED.fullmatch(name)) or None
        if match:
            head, tail = (text.replace("{", "{{").replace("}", "}}") for text in (match[1], match[3]))
            template = f"{head}{{rank}}{tail}"
            found.setdefault(template, RankFiles(template, {})).names[int(match[2])] = name

    def without_numbers(one: RankFiles) -> str:
        return re.sub(r"\d+", "", one.template)

    sure = [one for one in found.values() if 0 in one.names and (keyed or len(one.names) > 1)]
    other_steps = {without_numbers(one) for one in sure}
    return [
        one
        for one in found.values()
        if (one in sure or (one.step is not None and without_numbers(one) in other_steps))
        and (not one.template.endswith(".bin") or begins_like_torch(store, min(one.names.values())))
    ]


def _of_model(groups: Sequence[RankFiles]) -> RankFiles | None:
    """Return the files of the model, or None if there are none. If names contain steps, the latest step is chosen."""
    groups_by_name = {one.template: one for one in groups}
    named = [name for name in groups_by_name if "model" in name.lower()] or may_hold_model(groups_by_name)
    steps = ordered(named)
    chosen = steps[0].name if steps else next(iter(named), None)
    return None if chosen is None else groups_by_name[chosen]


@dataclass(frozen=True, slots=True)
class _Saved:
    """What one rank saved: the model's state dict, and `rest`, all other values with the same nesting."""

    model: Any
    rest: dict[Any, Any]

    @classmethod
    def of(cls, value: Any) -> _Saved:
        levels = _levels(value, _model_key)
        rest = {k: v for outer, inner in pairwise(levels) for k, v in outer.items() if v is not inner}
        return cls(levels[-1], rest)


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Read the rank files.

    Each file is a state dict, or a dict that contains the state dict of the model and, optionally, of the optimizer.

    Raises:
        CheckpointNotFoundError: There are no rank files.
        IncompleteCheckpointError: A rank's file is missing. The message names the file.
    """
    sizes = sizes_in(store)
    groups = _rank_files(store, file_names(store.list()))
    of_model = _of_model(groups)
    if of_model is None:
        raise CheckpointNotFoundError(f"{store.url} has no files whose names differ only in the rank.")
    values = of_model.read(store, options)
    saved = [_Saved.of(value) for value in values]
    models = [one.model for one in saved]
    names = of_model.ordered
    if fsdp1_local.is_flat(models):
        return fsdp1_local.read(store, names, models, sizes, None, options)
    model = join_model(models, what=of_model.template, where=", at the top level or below a known key")
    differing = _differing(values, models[0]) if saved[0].rest else None
    if differing is not None:
        catalog = _of_rank_0(store, names[0], model, differing, options)
    else:
        catalog = _of_all_ranks(store, of_model, groups, saved, model, options)
    info = catalog.info
    files = {name: sizes[name] for name in dict.fromkeys((*names, *info.files))}
    named = of_model.step.step if of_model.step is not None and of_model.step.has_step else None
    info = replace(info, step=named if info.step is None else info.step, world_size=info.world_size or len(names))
    return replace(catalog, info=replace(info, format="rank-files", files=files))


def _of_rank_0(store: Store, name: str, model: RankModel, differing: Sequence[str], options: ReadOptions) -> Catalog:
    """Read the file of rank 0, which contains the whole training state. `differing`: see `_differing`."""
    catalog = open_file(store, name, options=options)
    notes = (*catalog.info.notes, f"each rank saved the whole model; {name} was read.", *model.notes)
    if differing:
        notes += (f"not read: other ranks' values of {first_few(differing)}, which differ from rank 0's.",)
    return replace(catalog, info=replace(catalog.info, notes=notes))


def _of_all_ranks(
    store: Store,
    of_model: RankFiles,
    groups: Sequence[RankFiles],
    saved: Sequence[_Saved],
    model: RankModel,
    options: ReadOptions,
) -> Catalog:
    """Return the joined model and optimizer, and the values that are equal on all ranks, such as a scheduler's."""
    first, names = saved[0], of_model.ordered
    optimizer, key, read = OptimizerState(), _optimizer_key(first.rest), {*names}
    if key is not None and all(isinstance(one.rest.get(key), dict) for one in saved):
        states, what = [one.rest[key] for one in saved], of_model.template
        optimizer = read_optimizer(states, model.params, what=what, replica=model.replica)
    elif (apart := _of_optimizer(groups, of_model)) is not None:
        states = [_levels(value, _optimizer_key)[-1] for value in apart.read(store, options)]
        optimizer = read_optimizer(states, model.params, what=apart.template, replica=model.replica)
        read |= {*apart.names.values()}
    alike, unread = _values(saved, names, key)
    others = {name for one in groups if one.step in (None, of_model.step) for name in one.names.values()} - read
    notes = [f"not read: {', '.join(sorted(others)[:4])}{', ...' * (len(others) > 4)}."] if others else []
    if unread:
        notes.append(f"not read: {first_few(unread)} of {of_model.template.format(rank='*')}.")
    info = CatalogInfo(
        "rank-files",
        producer="torch.save",
        step=next((step for name in STEPS if type(step := first.rest.get(name)) is int), None),
        world_size=max(len(saved), recorded_ranks(first.model.values())),
        mesh=model.mesh,
        files=dict.fromkeys(sorted(read), -1),
        notes=(*model.notes, *optimizer.notes, *notes),
    )
    info = find_side_files(store).described_in(info)
    return Catalog({**model.tensors, **optimizer.tensors}, {**alike, **optimizer.objects}, info)


def _of_optimizer(groups: Sequence[RankFiles], of_model: RankFiles) -> RankFiles | None:
    """Return the optimizer's files if the same ranks wrote them in the same step, otherwise None."""
    found = [one for one in groups if one != of_model and "optim" in one.template.lower()]
    one = next((one for one in found if one.step == of_model.step), None)
    return one if one is not None and one.names.keys() == of_model.names.keys() else None


def _values(saved: Sequence[_Saved], names: Sequence[str], optimizer: Any) -> tuple[dict[str, ObjectEntry], list[str]]:
    """Return the values outside the model that are equal on all ranks, and the names of rank 0's other values.

    Args:
        names: The file of each rank.
        optimizer: The key of the optimizer's state, which is left out.
    """
    rests = [
        plain({key: value for key, value in one.rest.items() if key != optimizer}, file=name)
        for one, name in zip(saved, names, strict=True)
    ]
    alike = {
        str(key): ObjectEntry(str(key), names[0], encoding="value", value=value, key=(str(key),))
        for key, value in rests[0].items()
        if plain_value(value) and all(repr(rest.get(key)) == repr(value) for rest in rests)
    }
    return alike, [str(key) for key in rests[0] if str(key) not in alike]


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


def _model_key(value: Any) -> str | None:
    items = value if isinstance(value, dict) else {}
    return next((key for key in _MODEL_KEYS if isinstance(items.get(key), dict)), None)


def _optimizer_key(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else ()
    return next((key for key, item in items if OPTIMIZER_KEY.fullmatch(str(key)) and isinstance(item, dict)), None)
