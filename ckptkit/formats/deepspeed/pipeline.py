"""Reads DeepSpeed pipelines: one file per layer and, for each stage, a model file and the optimizer's partitions.

Names are PipelineModule's: the layer's number, then the name within the layer. Several layers may share a module. Each
stage's optimizer names the module's parameters `tied_modules.<key>.<name>`, and the file of each layer that shares the
module contains them as well (deepspeed/runtime/pipe/module.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.deepspeed.files import ModelStates, OptimStates, read_model_states, read_optim_states
from ckptkit.formats.deepspeed.groups import Groups, add_moments, check_layout, groups_of, settings
from ckptkit.formats.deepspeed.zero import MODEL_FILE, OPTIM_FILE, weight_entries
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.master_check import MasterSampler
from ckptkit.formats.trainers.optimizer_files import OptimizerState
from ckptkit.formats.trainers.rank_files import Joined, join, missing_ranks, read_archives
from ckptkit.storage import Store

LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_FILE = "mp_rank_{rank:02d}_model_states.pt"


@dataclass(frozen=True, slots=True)
class _Stage:
    """The contents of one stage's files. `masters` has the names that the files use."""

    models: ModelStates
    optims: OptimStates | None
    by_settings: Sequence[Groups]
    masters: Mapping[str, Joined] = field(default_factory=dict)

    @property
    def groups(self) -> Groups:
        return [group for parts in self.by_settings for group in parts]


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Read one tag's checkpoint at the store's root. It may have any number of stages, but no tensor parallelism.

    Raises:
        IncompleteCheckpointError: A file is missing. The message names it.
        UnsupportedFormatError: The layers are split by tensor parallelism.
    """
    listing = store.list()
    files = file_names(listing)
    layers = _layers(store, files)
    stages = [_stage(store, files, number, layers) for number in _numbers(files, store)]
    _check_layers(stages, layers)
    ties = _ties(store, stages, layers)
    masters: dict[str, Joined] = {}
    optimizer = OptimizerState()
    for stage in stages:
        new = {name: ties.get(name, [name])[0] for name in stage.masters if ties.get(name, [name])[0] not in masters}
        masters.update({new[name]: stage.masters[name] for name in new})
        for group in stage.groups:
            add_moments(optimizer, group, new)
    _add_settings(optimizer, stages, ties)
    first = stages[0].models
    shared = {alias: names[0] for names in ties.values() for alias in names[1:]}
    weights = {name: joined for name, joined in {**layers, **masters}.items() if name not in shared}
    sizes = {item.path: item.size for item in listing if item.path.endswith("_states.pt")}
    side = find_side_files(store)
    ranks = [stage.optims.world_size for stage in stages if stage.optims is not None]
    return Catalog(
        {**weight_entries(weights, masters, shared), **optimizer.tensors},
        {**first.objects(), **optimizer.objects},
        CatalogInfo(
            "deepspeed",
            producer=f"deepspeed {first.version}".strip(),
            step=first.step,
            world_size=sum(ranks) or None,
            files=sizes,
            side_files=side.carried,
            notes=tuple(optimizer.notes),
            extra={**side.extra, "pipeline_stages": len(stages)},
        ),
    )


def _layers(store: Store, files: Sequence[str]) -> dict[str, Joined]:
    """Return all layers' tensors, in layer order, in the job's compute dtype."""
    found: dict[int, str] = {}
    for match in filter(None, map(LAYER_FILE.fullmatch, files)):
        if int(match[2] or 0) > 0:
            raise UnsupportedFormatError(
                f"{match[0]}: the layers are split by tensor parallelism, and the files do not say how to join them. "
                "Convert it to a universal checkpoint with DeepSpeed's ds_to_universal.py first."
            )
        if int(match[1]) in found:
            raise CorruptCheckpointError(f"{match[0]} and {found[int(match[1])]} contain the same layer. Keep one.")
        found[int(match[1])] = match[0]
    tensors: dict[str, StoredTensor] = {}
    for number, value in zip(sorted(found), read_archives(store, [found[n] for n in sorted(found)]), strict=True):
        if not isinstance(value, dict):
            raise CorruptCheckpointError(f"{found[number]} contains no state dict of a layer.")
        tensors.update({f"{number}.{name}": item for name, item in value.items() if isinstance(item, StoredTensor)})
    return join([tensors], what="the files of the layers")


def _numbers(files: Sequence[str], store: Store) -> list[int]:
    numbers = sorted({int(match[2]) for name in files if (match := MODEL_FILE.fullmatch(name)) and not match[1]})
    if not numbers:
        raise IncompleteCheckpointError(f"{store.url} has files of layers, but mp_rank_00_model_states.pt is missing.")
    missing_ranks(numbers, max(numbers) + 1, _FILE)
    return numbers


def _stage(store: Store, files: Sequence[str], number: int, layers: Mapping[str, Joined]) -> _Stage:
    file = _FILE.format(rank=number)
    models = read_model_states(store, [file], MODEL_FILE, without_module=True)
    size = models.values[0].get("mp_world_size")
    if type(size) is int and 0 < size < 1 << 16:
        missing_ranks(_numbers(files, store), size, _FILE)
    mine = [name for name in files if (match := OPTIM_FILE.fullmatch(name)) and int(match[3]) == number]
    optims = read_optim_states(store, mine, OPTIM_FILE, models)
    if optims is None and models.param_shapes:
        raise IncompleteCheckpointError(f"zero_pp_rank_0_mp_rank_{number:02d}_optim_states.pt is missing.")
    by_settings = groups_of(models, optims)
    groups = [group for parts in by_settings for group in parts]
    masters = {name: joined for group in groups for name, joined in group.cut("")}
    check_layout(store, groups, masters, lambda: layers)
    return _Stage(models, optims, by_settings, masters)


def _check_layers(stages: Sequence[_Stage], layers: Mapping[str, Joined]) -> None:
    """Check that each trained parameter is in its layer's file, with the same shape."""
    for stage in stages:
        for name, master in stage.masters.items():
            if _TIED.fullmatch(name):
                continue
            if name not in layers:
                file = f"layer_{int(name.partition('.')[0]):02d}" if name.partition(".")[0].isdigit() else "layer_*"
                raise IncompleteCheckpointError(f"{file}-model_states.pt is missing, or lacks {name!r}.")
            if layers[name].shape != master.shape:
                raise CorruptCheckpointError(
                    f"{layers[name].slices[0].path}: {name!r} has shape {list(layers[name].shape)}, but "
                    f"{stage.models.file} says {list(master.shape)}. Are all files from one save?"
                )


def _ties(store: Store, stages: Sequence[_Stage], layers: Mapping[str, Joined]) -> dict[str, list[str]]:
    """Return, for each parameter of a shared module, its names in the layers that share the module.

    Such layers have no parameters of their own. If there are several shared modules, shapes and values tell which of
    them a layer uses.
    """
    names = {name for stage in stages for name in stage.masters}
    own = {name.partition(".")[0] for name in names if not _TIED.fullmatch(name)}
    free = sorted({name.partition(".")[0] for name in layers} - own, key=int)
    keys: dict[str, dict[str, Joined]] = {}
    for stage in stages:
        for match in filter(None, map(_TIED.fullmatch, stage.masters)):
            keys.setdefault(match[1], {}).setdefault(match[2], stage.masters[match[0]])
    entries = {name: joined.entry(name, Role.MODEL, fqn=name) for name, joined in layers.items()}
    sampler = MasterSampler(store, entries)
    found: dict[str, list[str]] = {}
    for layer in free:
        fitting = [key for key, masters in keys.items() if _is_layer(sampler, layers, layer, masters)]
        if len(fitting) > 1:
            raise UnsupportedFormatError(f"layer {layer} may be any of the shared modules {', '.join(fitting[:4])}.")
        for rest in keys[fitting[0]] if fitting else ():
            found.setdefault(f"tied_modules.{fitting[0]}.{rest}", []).append(f"{layer}.{rest}")
    return found


def _is_layer(sampler: MasterSampler, layers: Mapping[str, Joined], layer: str, masters: Mapping[str, Joined]) -> bool:
    return all(
        f"{layer}.{rest}" in layers
        and layers[f"{layer}.{rest}"].shape == master.shape
        and sampler.fits(master.entry("master", Role.MASTER), f"{layer}.{rest}")
        for rest, master in masters.items()
    )


def _add_settings(optimizer: OptimizerState, stages: Sequence[_Stage], ties: Mapping[str, Sequence[str]]) -> None:
    """Add the groups' settings, with all stages' parameters."""
    plain = [stage.models.file for stage in stages if stage.models.values[0].get("optimizer") is not None]
    if plain:
        optimizer.notes.append(f"the optimizer in {plain[0]} was not read: it is from a pipeline without ZeRO.")
    optims = stages[0].optims
    if optims is None:
        return
    names: list[list[str]] = [[] for _ in optims.param_groups]
    for stage in stages:
        for known, parts in zip(names, stage.by_settings, strict=False):
            known.extend(_unseen(known, (ties.get(name, [name])[0] for group in parts for name in group.params)))
    optimizer.objects.update(settings(names, optims))


def _unseen(there: Sequence[str], names: Iterator[str]) -> list[str]:
    known = set(there)
    return [name for name in names if name not in known]
