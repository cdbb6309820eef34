"""Reads DeepSpeed ZeRO-1, 2 and 3: splits each rank's flat fp32 partition into parameters. Does not need DeepSpeed.

As in DeepSpeed's own exporter, the catalog's weights are the fp32 masters. They are listed both as MODEL and as MASTER.
The low-precision copies in the model file equal the cast masters, and are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
)
from ckptkit.formats.deepspeed.experts import EXPERT_FILE, EXPERT_OPTIMIZER, read_experts
from ckptkit.formats.deepspeed.files import ModelStates, read_model_states, read_optim_states
from ckptkit.formats.deepspeed.groups import add_moments, check_experts, check_layout, groups_of, settings
from ckptkit.formats.deepspeed.layout import Shape
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.fsdp1_local import range_slices
from ckptkit.formats.trainers.master_check import MasterSampler
from ckptkit.formats.trainers.optimizer_files import OptimizerState, is_state_dicts, read_optimizer
from ckptkit.formats.trainers.param_order import Param, assign
from ckptkit.formats.trainers.rank_files import Joined, join
from ckptkit.formats.trainers.verl import parameters
from ckptkit.storage import Store
from ckptkit.units import counted

# Without ZeRO, DeepSpeed stores the optimizer in the model file: torch's optimizer state, and fp32 masters. The masters
# are full tensors in parameter group order (deepspeed/runtime/fp16/unfused_optimizer.py).


Masters = dict[str, Joined]
_MASTERS = "fp32_groups"


def read_plain_optimizer(
    store: Store, model: Mapping[str, Any], weights: Mapping[str, TensorEntry], file: str
) -> tuple[OptimizerState, Masters]:
    """Return the optimizer in the model file, and its fp32 masters by parameter.

    Adds a note about state that can't be read, such as a fused optimizer's concatenated state.

    Args:
        model: The model file's contents.
        weights: The model's tensors by name.
    """
    given = model.get("optimizer")
    if not isinstance(given, dict):
        return OptimizerState(), {}
    inner = given.get("optimizer_state_dict", given)
    params = parameters(model["module"], weights)
    groups = given.get(_MASTERS)
    if groups is None or not _are_masters(groups) or not is_state_dicts([inner]):
        return read_optimizer([inner], params, what=file), {}
    assigned = _assigned(store, groups, inner["param_groups"], params, weights, file)
    if assigned is None:
        note = "does not prove which weight each fp32 master belongs to; the masters were skipped."
        found = read_optimizer([inner], params, what=file)
        return OptimizerState(found.tensors, found.objects, [*found.notes, f"{file} {note}"]), {}
    names = {
        key: fqn
        for group, fqns in zip(inner["param_groups"], assigned, strict=True)
        for key, fqn in zip(group["params"], fqns, strict=True)
    }
    masters = {
        fqn: joined
        for tensors, fqns in zip(groups, assigned, strict=True)
        for fqn, joined in join([dict(zip(fqns, tensors, strict=True))], what=file).items()
    }
    return read_optimizer([inner], params, what=file, names=names), masters


def _are_masters(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, list) and all(isinstance(tensor, StoredTensor) for tensor in group) for group in groups
    )


def _assigned(
    store: Store,
    groups: Sequence[Sequence[StoredTensor]],
    settings: Sequence[Mapping[str, Any]],
    params: Sequence[Param],
    weights: Mapping[str, TensorEntry],
    file: str,
) -> list[list[str]] | None:
    """Return each master's parameter name, or None if names, shapes and the weights' values do not prove it."""
    if [len(group["params"]) for group in settings] != [len(group) for group in groups]:
        return None
    shapes = [[tensor.shape for tensor in group] for group in groups]
    no_decay = [group.get("weight_decay") == 0 for group in settings]
    keyed = {(g, i): tensor for g, group in enumerate(groups) for i, tensor in enumerate(group)}
    entries = {key: joined.entry("master", Role.MASTER) for key, joined in join([keyed], what=file).items()}
    sampler = MasterSampler(store, weights)
    return assign(params, shapes, no_decay, lambda group, index, fqn: sampler.fits(entries[group, index], fqn))


MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Read one tag's DeepSpeed checkpoint at the store's root, but no tensor bytes.

    Raises:
        IncompleteCheckpointError: A rank's file is missing. The message names it.
        UnsupportedFormatError: The checkpoint was written with tensor parallelism.
        CorruptCheckpointError: The files contradict each other.
    """
    listing = store.list()
    files = file_names(listing)
    _refuse_foreign(store, files)
    models = read_model_states(store, files, MODEL_FILE)
    experts = _experts(store, files, models)
    optims = read_optim_states(store, files, OPTIM_FILE, models)
    weights = models.whole(elsewhere=models.trained if optims is not None else frozenset())
    optimizer = OptimizerState(notes=list(models.notes))
    by_settings = groups_of(models, optims, experts)
    groups = [group for parts in by_settings for group in parts]
    masters = {name: joined for group in groups for name, joined in group.cut("")}
    weights.update(experts)
    check_experts(experts, masters)
    check_layout(store, groups, masters, lambda: {**models.whole(elsewhere=frozenset()), **experts})
    weights.update(masters)
    weights.update(frozen_weights(models))
    if optims is not None:
        for group in groups:
            add_moments(optimizer, group)
        names = [[name for group in parts for name in group.params] for parts in by_settings]
        optimizer.objects.update(settings(models.param_shapes if models.stage3 else names, optims))
    elif not models.stage3:
        optimizer.notes.append("there are no *_optim_states.pt files: the weights are those of the model file.")
        masters = _add_plain(store, files, models, weights, optimizer)
    _check_complete(models, weights)
    side = find_side_files(store)
    return Catalog(
        {**weight_entries(weights, masters, models.shared), **optimizer.tensors},
        {**models.objects(), **optimizer.objects},
        CatalogInfo(
            "deepspeed",
            producer=f"deepspeed {models.version}".strip(),
            step=models.step,
            world_size=optims.world_size if optims is not None else models.world_size,
            files={item.path: item.size for item in listing if item.path.endswith("_states.pt")},
            side_files=side.carried,
            notes=tuple(optimizer.notes),
            extra={
                **side.extra,
                "zero_stage": optims.stage if optims is not None else 0,
                "missing": _missing(models, optims is not None),
            },
        ),
    )


def _missing(models: ModelStates, has_optimizer: bool) -> list[str]:
    """Return messages about files that should exist according to the job's settings, but are missing."""
    config = models.values[0].get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if has_optimizer or type(stage) is not int or stage < 1:
        return []
    return [f"the *_optim_states.pt files are missing: the job ran with ZeRO stage {stage}, which writes one per rank."]


def _refuse_foreign(store: Store, files: Sequence[str]) -> None:
    parallel = sorted({int(match[2]) for name in files if (match := MODEL_FILE.fullmatch(name))})
    if not parallel:
        raise CheckpointNotFoundError(f"{store.url} has no *mp_rank_00_model_states.pt of DeepSpeed.")
    if len(parallel) > 1:
        raise UnsupportedFormatError(
            f"mp_rank_{parallel[-1]:02d}_model_states.pt is from a job with tensor parallelism, whose files do not say "
            "how to join the parts of a tensor. Convert it to a universal checkpoint with DeepSpeed's "
            "ds_to_universal.py first."
        )


def _experts(store: Store, files: Sequence[str], models: ModelStates) -> dict[str, Joined]:
    """Return the weights in the experts' files."""
    if models.values[0].get("ds_autoep_layers"):
        raise UnsupportedFormatError(
            "the model file has ds_autoep_layers: experts that AutoEP fused. Convert it to a universal checkpoint with "
            "DeepSpeed's ds_to_universal.py first."
        )
    if models.values[0].get("num_experts") or any(map(EXPERT_FILE.fullmatch, files)):
        return read_experts(store, files, models.values[0])
    return {}


def _add_plain(
    store: Store, files: Sequence[str], models: ModelStates, weights: Mapping[str, Joined], optimizer: OptimizerState
) -> dict[str, Joined]:
    """For a job without ZeRO, add the optimizer, and return its masters."""
    experts = [name for name in files if EXPERT_OPTIMIZER.fullmatch(name)]
    if experts:
        optimizer.notes.append(
            f"the experts' optimizer files, such as {experts[0]}, were not read: the job ran without ZeRO."
        )
        return {}
    entries = {name: joined.entry(name, Role.MODEL, fqn=name) for name, joined in weights.items()}
    found, masters = read_plain_optimizer(store, models.values[0], entries, models.file)
    optimizer.tensors.update(found.tensors)
    optimizer.objects.update(found.objects)
    optimizer.notes += found.notes
    return masters


def frozen_weights(models: ModelStates) -> dict[str, Joined]:
    """Return the frozen parameters. With ZeRO-3, every rank's model file has a part of each."""
    if not models.stage3:
        return {}
    found = {}
    for name, shape in models.frozen.items():
        fragments = [dict(value.get("frozen_param_fragments") or {}).get(name) for value in models.values]
        if not all(isinstance(fragment, StoredTensor) for fragment in fragments):
            raise IncompleteCheckpointError(f"frozen parameter {name!r} is not in the model files of all ranks.")
        found[name] = _joined_fragments(shape, [f for f in fragments if isinstance(f, StoredTensor)])
    return found


def _joined_fragments(shape: Shape, fragments: Sequence[StoredTensor]) -> Joined:
    numel = 1
    for n in shape:
        numel *= n
    slices: list[TensorSlice] = []
    position = 0
    for rank, fragment in enumerate(fragments):
        stop = min(position + fragment.numel, numel)
        if position < stop:
            slices += range_slices(shape, position, stop, fragment, 0, rank)
        position += fragment.numel
    return Joined(fragments[0].dtype, shape, SliceArray.of(slices, len(shape)))


def weight_entries(
    weights: Mapping[str, Joined], masters: Mapping[str, Joined], shared: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """Return MODEL entries for all weights, and MASTER entries for the fp32 masters.

    Args:
        shared: A tied weight's name -> the name under which it is stored.
    """
    found = {name: joined.entry(name, Role.MODEL, fqn=name) for name, joined in weights.items()}
    for alias, kept in shared.items():
        if kept in weights:
            found[alias] = weights[kept].entry(alias, Role.MODEL, fqn=alias)
    aliases = {alias: masters[kept] for alias, kept in shared.items() if kept in masters}
    for fqn, joined in {**masters, **aliases}.items():
        name = f"optimizer.master.{fqn}"
        found[name] = joined.entry(name, Role.MASTER, fqn=fqn, state="master", key=("optimizer", "master", fqn))
    return found


def _check_complete(models: ModelStates, weights: Mapping[str, Joined]) -> None:
    wanted = models.trained | models.frozen.keys()
    if wanted <= weights.keys():
        return
    missing = sorted(wanted - weights.keys())
    if models.stage3:
        raise IncompleteCheckpointError(
            f"the *_optim_states.pt files are missing; in ZeRO-3 they contain the weights ({missing[0]!r}, ...)."
        )
    raise IncompleteCheckpointError(
        f"{counted(len(missing), 'parameter', 'are')} in no file: {', '.join(missing[:4])}."
    )
