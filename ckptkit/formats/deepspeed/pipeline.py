"""Reads DeepSpeed pipelines: one file per layer and, for each stage, a model file and the optimizer's partitions.

Names follow PipelineModule: the number of the layer, then the name within the layer. Several layers may share a
module. Each of these layers has the module's parameters in its file. The optimizer of each stage names these parameters
`tied_modules.<key>.<name>` (deepspeed/runtime/pipe/module.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptkit.catalog.entry import Catalog, Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.deepspeed.files import MODEL_FILE, OPTIM_FILE, read_model_states
from ckptkit.formats.deepspeed.zero import Stage, catalog_of, joined_stages, read_stage
from ckptkit.formats.hf.side_files import file_names
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.master_check import MasterSampler
from ckptkit.formats.trainers.rank_files import Joined, join, missing_ranks, read_files
from ckptkit.storage import Store

LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_FILE = "mp_rank_{rank:02d}_model_states.pt"


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Read a DeepSpeed pipeline checkpoint. The store's root is the directory of one tag, such as `global_step10`.

    Supports any number of stages, but no tensor parallelism.
    """
    files = file_names(store.list())
    layers = _layers(store, files, options)
    stages = [_stage(store, files, number, layers, options) for number in _numbers(files, store)]
    _check_layers(stages, layers)
    ties = _ties(store, stages, layers)
    masters, optimizer = joined_stages(stages, ties)
    plain = [stage.models.file for stage in stages if stage.models.values[0].get("optimizer") is not None]
    if plain:
        optimizer.notes.append(f"the optimizer in {plain[0]} was not read: it is from a pipeline without ZeRO.")
    shared = {alias: names[0] for names in ties.values() for alias in names[1:]}
    weights = {name: joined for name, joined in {**layers, **masters}.items() if name not in shared}
    world_size = sum(stage.optims.world_size for stage in stages if stage.optims is not None) or None
    extra = {"pipeline_stages": len(stages)}
    first = stages[0].models
    return catalog_of(store, first, weights, masters, shared, optimizer, world_size=world_size, extra=extra)


def _layers(store: Store, files: Sequence[str], options: ReadOptions) -> dict[str, Joined]:
    """Return the tensors of all layers, in layer order, in the job's compute dtype."""
    found: dict[int, str] = {}
    for match in filter(None, map(LAYER_FILE.fullmatch, files)):
        if int(match[2] or 0) > 0:
            raise UnsupportedFormatError(
                f"{match[0]}: the layers are split by tensor parallelism, and the files do not say how to join them. "
                "Convert the checkpoint to a universal one with DeepSpeed's ds_to_universal.py first."
            )
        if int(match[1]) in found:
            raise CorruptCheckpointError(f"{match[0]} and {found[int(match[1])]} contain the same layer. Keep one.")
        found[int(match[1])] = match[0]
    tensors: dict[str, StoredTensor] = {}
    for number, value in zip(sorted(found), read_files(store, [found[n] for n in sorted(found)], options), strict=True):
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


def _stage(
    store: Store, files: Sequence[str], number: int, layers: Mapping[str, Joined], options: ReadOptions
) -> Stage:
    models = read_model_states(store, [_FILE.format(rank=number)], options, without_module=True)
    size = models.values[0].get("mp_world_size")
    if type(size) is int and 0 < size < 1 << 16:
        missing_ranks(_numbers(files, store), size, _FILE)
    mine = [name for name in files if (match := OPTIM_FILE.fullmatch(name)) and int(match[3]) == number]
    if not mine and models.param_shapes:
        raise IncompleteCheckpointError(f"zero_pp_rank_0_mp_rank_{number:02d}_optim_states.pt is missing.")
    return read_stage(store, mine, models, layers, options)


def _check_layers(stages: Sequence[Stage], layers: Mapping[str, Joined]) -> None:
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


def _ties(store: Store, stages: Sequence[Stage], layers: Mapping[str, Joined]) -> dict[str, list[str]]:
    """Return, for each parameter of a shared module, the parameter's names in the layers that share the module.

    A layer that uses a shared module has no other parameters. If there are several shared modules, the shapes and
    values in the layer's file show which module the layer uses.
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
