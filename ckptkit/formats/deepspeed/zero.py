"""Reads DeepSpeed ZeRO-1, 2 and 3: splits each rank's flat fp32 partition into parameters. Does not need DeepSpeed.

As in DeepSpeed's own exporter, the catalog's weights are the fp32 master weights. Each master weight is listed both as
MODEL and as MASTER. The low-precision copies in the model file equal the cast master weights, and are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
)
from ckptkit.formats.deepspeed.experts import EXPERT_FILE, EXPERT_OPTIMIZER, read_experts
from ckptkit.formats.deepspeed.files import MODEL_FILE, ModelStates, OptimStates, read_model_states, read_optim_states
from ckptkit.formats.deepspeed.groups import (
    FlatGroup,
    add_moments,
    check_experts,
    check_layout,
    check_saves,
    groups_of,
    settings,
)
from ckptkit.formats.hf.side_files import file_names, find_side_files
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.trainers.optimizer_files import (
    OptimizerState,
    is_state_dicts,
    master_entry,
    match_masters,
    names_by_key,
    read_optimizer,
    values_agree,
)
from ckptkit.formats.trainers.rank_files import FlatVector, Joined, join, parameters
from ckptkit.storage import Store
from ckptkit.units import counted


@dataclass(frozen=True, slots=True)
class Stage:
    """The parameters of a pipeline stage. A job without a pipeline has one stage.

    Attributes:
        by_settings: The flat groups of each parameter group. ZeRO-3 splits a large parameter group into several flat
            groups.
        masters: fp32 weights, under the names that the files use.
    """

    models: ModelStates
    optims: OptimStates | None
    by_settings: Sequence[Sequence[FlatGroup]]
    masters: Mapping[str, Joined]
    notes: Sequence[str] = ()


def read_stage(
    store: Store,
    files: Sequence[str],
    models: ModelStates,
    copies: Mapping[str, Joined],
    options: ReadOptions,
    experts: Mapping[str, Joined] | None = None,
) -> Stage:
    """Read the optimizer files that belong to a model file, and check that the optimizer fits the model's weights.

    Args:
        experts: Weights in the experts' files, or None if the experts have no files of their own.
    """
    optims = read_optim_states(store, files, models, options)
    by_settings = groups_of(models, optims, experts or ())
    groups = [group for parts in by_settings for group in parts]
    masters = {name: joined for group in groups for name, joined in group.cut("")}
    if experts is not None:
        check_experts(experts, masters)
    check_layout(store, groups, masters, copies)
    return Stage(models, optims, by_settings, masters, check_saves(store, models, groups, masters, copies))


def joined_stages(
    stages: Sequence[Stage], ties: Mapping[str, Sequence[str]] = {}
) -> tuple[dict[str, Joined], OptimizerState]:
    """Return the master weights and the optimizer of all stages.

    Args:
        ties: For each parameter of a shared module, its names in the layers that share the module. The first is used.
    """

    def name_of(name: str) -> str:
        return ties.get(name, [name])[0]

    masters: dict[str, Joined] = {}
    optimizer = OptimizerState()
    params: dict[int, dict[str, None]] = {}  # of each parameter group, in order
    for stage in stages:
        new = {name: name_of(name) for name in stage.masters if name_of(name) not in masters}
        optimizer.notes += stage.notes
        masters.update({new[name]: stage.masters[name] for name in new})
        for index, groups in enumerate(stage.by_settings):
            for group in groups:
                params.setdefault(index, {}).update((name_of(name), None) for name in group.params)
                add_moments(optimizer, group, new)
    if stages[0].optims is not None:
        optimizer.objects.update(settings(params, stages[0].optims))
    return masters, optimizer


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of a DeepSpeed checkpoint. The store's root is the directory of one tag (`global_step10`).

    Reads samples of a few tensors.
    """
    files = file_names(store.list())
    _refuse_foreign(store, files)
    models = read_model_states(store, files, options)
    experts = _experts(store, files, models, options)
    copies = {**models.whole(elsewhere=frozenset()), **experts}
    stage = read_stage(store, files, models, copies, options, experts)
    optims, (masters, optimizer) = stage.optims, joined_stages([stage])
    whole = models.whole(elsewhere=models.trained if optims is not None else frozenset())
    weights = {**whole, **experts, **masters, **frozen_weights(models)}
    if optims is None and not models.stage3:
        optimizer.notes.append("there are no *_optim_states.pt files: the weights are those of the model file.")
        masters = _add_plain(store, files, models, weights, optimizer)
    _check_complete(models, weights)
    extra = {"zero_stage": optims.stage if optims is not None else 0, "missing": _missing(models, optims is not None)}
    world_size = optims.world_size if optims is not None else models.world_size
    return catalog_of(store, models, weights, masters, models.shared, optimizer, world_size=world_size, extra=extra)


def catalog_of(
    store: Store,
    models: ModelStates,
    weights: Mapping[str, Joined],
    masters: Mapping[str, Joined],
    shared: Mapping[str, str],
    optimizer: OptimizerState,
    *,
    layout: str = "deepspeed",
    files: Mapping[str, int] | None = None,
    world_size: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Catalog:
    """Return the catalog of a DeepSpeed checkpoint.

    The catalog contains the weights (as MODEL entries), their fp32 master weights (as MASTER entries), the optimizer,
    and the other tensors and values in the model file.

    Args:
        shared: Name of a tied weight -> the name under which the weight is stored.
        files: Additional files that belong to the checkpoint, with their sizes.
    """
    tensors = {name: joined.entry(name, Role.MODEL, fqn=name) for name, joined in weights.items()}
    for alias, kept in shared.items():
        if kept in weights:
            tensors[alias] = weights[kept].entry(alias, Role.MODEL, fqn=alias)
    aliases = {alias: masters[kept] for alias, kept in shared.items() if kept in masters}
    for fqn, joined in {**masters, **aliases}.items():
        entry = master_entry(fqn, joined)
        tensors[entry.name] = entry
    sizes = {item.path: item.size for item in store.list() if item.path.endswith("_states.pt")}
    info = CatalogInfo(
        layout,
        producer=f"deepspeed {models.version}".strip(),
        step=models.step,
        world_size=world_size,
        files={**sizes, **(files or {})},
        notes=tuple(optimizer.notes),
        extra=dict(extra or {}),
    )
    tensors.update(optimizer.tensors)
    others, objects = models.client_state(tensors)
    objects.update(optimizer.objects)
    return Catalog({**tensors, **others}, objects, find_side_files(store).described_in(info))


def _missing(models: ModelStates, has_optimizer: bool) -> list[str]:
    """Return messages about missing files that the job must have written, according to its settings."""
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
            "how to join the parts of a tensor. Convert the checkpoint to a universal one with DeepSpeed's "
            "ds_to_universal.py first."
        )


def _experts(store: Store, files: Sequence[str], models: ModelStates, options: ReadOptions) -> dict[str, Joined]:
    if models.values[0].get("ds_autoep_layers"):
        raise UnsupportedFormatError(
            "the model file has ds_autoep_layers: experts that AutoEP fused. Convert the checkpoint to a universal one "
            "with DeepSpeed's ds_to_universal.py first."
        )
    if models.values[0].get("num_experts") or any(map(EXPERT_FILE.fullmatch, files)):
        return read_experts(store, files, models.values[0], options)
    return {}


def _add_plain(
    store: Store, files: Sequence[str], models: ModelStates, weights: Mapping[str, Joined], optimizer: OptimizerState
) -> dict[str, Joined]:
    """Add the optimizer of a job without ZeRO, and return the fp32 master weights by parameter.

    DeepSpeed stores the optimizer's state and the full master weights in the model file. The master weights are in the
    order of the parameter groups (deepspeed/runtime/fp16/unfused_optimizer.py). If a state can't be read, such as the
    concatenated state of a fused optimizer, a note says so.
    """
    experts = [name for name in files if EXPERT_OPTIMIZER.fullmatch(name)]
    if experts:
        optimizer.notes.append(
            f"the experts' optimizer files, such as {experts[0]}, were not read: the job ran without ZeRO."
        )
        return {}
    given = models.values[0].get("optimizer")
    if not isinstance(given, dict):
        return {}
    entries = {name: joined.entry(name, Role.MODEL, fqn=name) for name, joined in weights.items()}
    params = parameters(models.values[0]["module"], entries)
    inner, groups = given.get("optimizer_state_dict", given), given.get("fp32_groups")
    names, masters, notes = None, {}, []
    if is_state_dicts([inner]) and isinstance(groups, list) and _are_masters(groups):
        keyed = {(g, i): tensor for g, group in enumerate(groups) for i, tensor in enumerate(group)}
        joined = join([keyed], what=models.file)
        assigned = match_masters(store, joined, inner["param_groups"], params, entries)
        if assigned is None or not values_agree(store, joined, assigned, entries):
            note = "does not prove which weight each fp32 master belongs to; the masters were skipped."
            notes.append(f"{models.file} {note}")
            params = []  # the values contradict the assumed order, so the moments' order is unknown too
        else:
            names = names_by_key(inner["param_groups"], assigned)
            masters = {assigned[group][i]: master for (group, i), master in joined.items()}
    found = read_optimizer([inner], params, what=models.file, names=names)
    optimizer.tensors.update(found.tensors)
    optimizer.objects.update(found.objects)
    optimizer.notes += [*found.notes, *notes]
    return masters


def _are_masters(groups: Sequence[Any]) -> bool:
    return all(isinstance(group, list) and all(isinstance(t, StoredTensor) for t in group) for group in groups)


def frozen_weights(models: ModelStates) -> dict[str, Joined]:
    """Return the frozen parameters of a ZeRO-3 job, joined from the parts in all ranks' model files."""
    found = {}
    for name, shape in models.frozen.items() if models.stage3 else ():
        fragments = [dict(value.get("frozen_param_fragments") or {}).get(name) for value in models.values]
        if not all(isinstance(fragment, StoredTensor) for fragment in fragments):
            raise IncompleteCheckpointError(f"frozen parameter {name!r} is not in the model files of all ranks.")
        vector = FlatVector.of_ranks((rank, f) for rank, f in enumerate(fragments) if isinstance(f, StoredTensor))
        found[name] = vector.tensor(shape)
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
