"""DeepSpeed ZeRO-1, 2 and 3: flat fp32 partitions a rank, cut back into parameters. Nothing of DeepSpeed is needed.

The weights of the catalog are the fp32 masters, which is what DeepSpeed's own exporter gives; they appear as
MODEL and as MASTER. The low-precision copies in the model file are their cast and are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
)
from ckptkit.formats._torch_records import StoredTensor
from ckptkit.formats.deepspeed_files import ModelStates, OptimStates, read_model_states, read_optim_states
from ckptkit.formats.deepspeed_layout import Shape, Zero3Group, Zero12Group, flat_states
from ckptkit.formats.flat import FlatVector, range_slices
from ckptkit.formats.master_check import MasterSampler
from ckptkit.formats.optimizer_files import OptimizerState, group_objects
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.rank_files import Joined
from ckptkit.formats.side_files import file_names, find_side_files
from ckptkit.storage import Store

__all__ = ["MODEL_FILE", "OPTIM_FILE", "frozen_weights", "open_catalog", "weight_entries"]

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM_FILE = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FOREIGN = re.compile(r"layer_\d+.*_states\.pt|expp_rank_\d+.*_optim_states\.pt")
_Groups = Sequence[Zero12Group | Zero3Group]


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Read the DeepSpeed checkpoint of one tag at the store's root, without tensor bytes.

    Raises:
        IncompleteCheckpointError: The file of a rank is missing; it names the file.
        UnsupportedFormatError: It was written with tensor or pipeline parallelism, or with experts.
        CorruptCheckpointError: The files contradict each other.
    """
    listing = store.list()
    files = file_names(listing)
    _refuse_foreign(store, files)
    models = read_model_states(store, files, MODEL_FILE)
    optims = read_optim_states(store, files, OPTIM_FILE, models)
    weights = models.whole(elsewhere=models.trained if optims is not None else frozenset())
    optimizer = OptimizerState(notes=list(models.notes))
    groups = _groups(models, optims)
    masters = {name: joined for group in groups for name, joined in group.cut("")}
    _check_layout(store, models, groups, masters)
    weights.update(masters)
    weights.update(frozen_weights(models))
    if optims is not None:
        for group in groups:
            _add_moments(optimizer, group)
        optimizer.objects.update(_settings(models, optims))
    elif masters or not models.stage3:
        optimizer.notes.append("there are no *_optim_states.pt files: the weights are those of the model file.")
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
            extra={**side.extra, "zero_stage": optims.stage if optims is not None else 0},
        ),
    )


def _refuse_foreign(store: Store, files: Sequence[str]) -> None:
    parallel = sorted({int(match[2]) for name in files if (match := MODEL_FILE.fullmatch(name))})
    if not parallel:
        raise CheckpointNotFoundError(f"{store.url} has no *mp_rank_00_model_states.pt of DeepSpeed.")
    foreign = [name for name in files if _FOREIGN.fullmatch(name)]
    if foreign or len(parallel) > 1:
        what = foreign[0] if foreign else f"mp_rank_{parallel[-1]:02d}_model_states.pt"
        raise UnsupportedFormatError(
            f"{what} is of a job with pipeline, expert or tensor parallelism, whose files do not say how the parts of "
            "a tensor fit together. Turn it into a universal checkpoint with DeepSpeed's ds_to_universal.py first."
        )


def _groups(models: ModelStates, optims: OptimStates | None) -> _Groups:
    if optims is None:
        return []
    if models.stage3:
        return [_zero3(models, optims)]
    if len(models.param_shapes) != len(optims.weights[0]):
        raise CorruptCheckpointError(
            f"the model file has {len(models.param_shapes)} parameter groups, the optimizer files "
            f"{len(optims.weights[0])}. They are of two saves?"
        )
    return [_zero12(index, params, optims) for index, params in enumerate(models.param_shapes)]


def _zero12(index: int, params: Mapping[str, Shape], optims: OptimStates) -> Zero12Group:
    vectors = {"": FlatVector.of_ranks((rank, flat[index]) for rank, flat in enumerate(optims.weights))}
    states = [state[index] if index < len(state) else {} for state in optims.states]
    for name in flat_states(states):
        vectors[name] = FlatVector.of_ranks((rank, state[name]) for rank, state in enumerate(states))
    paddings = optims.paddings[index] if index < len(optims.paddings) else [0] * len(params)
    if len(paddings) != len(params):
        raise CorruptCheckpointError(
            f"parameter group {index} has {len(params)} parameters and {len(paddings)} alignment paddings."
        )
    return Zero12Group(
        params,
        vectors,
        {name: value for name, value in states[0].items() if name not in vectors},
        paddings,
        [fragments[index] if index < len(fragments) else {} for fragments in optims.fragments],
        2 * optims.world_size,
    )


def _zero3(models: ModelStates, optims: OptimStates) -> Zero3Group:
    vectors = {"": [FlatVector.of_ranks((rank, t) for t in flat) for rank, flat in enumerate(optims.weights)]}
    all_states = [state for states in optims.states for state in states]
    if all(len(states) == len(flat) for states, flat in zip(optims.states, optims.weights, strict=True)):
        for name in flat_states(all_states):
            vectors[name] = [
                FlatVector.of_ranks((rank, state[name]) for state in states)
                for rank, states in enumerate(optims.states)
            ]
    params = {name: shape for group in models.param_shapes for name, shape in group.items()}
    scalars = {name: value for name, value in (all_states[0] if all_states else {}).items() if name not in vectors}
    return Zero3Group(params, vectors, scalars)


def _check_layout(store: Store, models: ModelStates, groups: _Groups, masters: Mapping[str, Joined]) -> None:
    """Where the ranks recorded other places than the shapes give, let the model file's own copies decide.

    Reads a few kilobytes a parameter.
    """
    doubtful = [group for group in groups if isinstance(group, Zero12Group) and not group.agrees()]
    if not doubtful:
        return
    whole = models.whole(elsewhere=frozenset())
    weights = {name: joined.entry(name, Role.MODEL, fqn=name) for name, joined in whole.items()}
    sampler = MasterSampler(store, weights)
    for name in (name for group in doubtful for name in group.params if name in weights):
        if not sampler.fits(masters[name].entry(name, Role.MASTER, fqn=name), name):
            raise CorruptCheckpointError(
                f"parameter {name!r}: neither the places that the ranks recorded nor the weights in the model file "
                "agree with the order of the parameters' shapes. Are the files of one save?"
            )


def frozen_weights(models: ModelStates) -> dict[str, Joined]:
    """Parameters that were not trained. ZeRO-3 keeps a part of each in every rank's model file."""
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
    """Return the MODEL entries of all weights, and MASTER entries of those that are fp32 masters.

    Args:
        shared: Tied name -> the name it is stored under.
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


def _add_moments(optimizer: OptimizerState, group: Zero12Group | Zero3Group) -> None:
    for state in group.vectors:
        if state:
            for name, joined in group.cut(state):
                optimizer.add(name, state, joined)
    for state, value in group.scalars.items():
        for name in group.params:
            if isinstance(value, StoredTensor) and value.numel == 1:
                slices = SliceArray.of([value.slice()], len(value.shape))
                optimizer.add(name, state, Joined(value.dtype, value.shape, slices))
            elif isinstance(value, (int, float)):
                optimizer.add_value(name, state, value)


def _settings(models: ModelStates, optims: OptimStates) -> dict[str, ObjectEntry]:
    """The groups' settings, `params` by name. ZeRO-3 cuts the user's groups further; those say less and less."""
    groups = []
    for settings, params in zip(optims.param_groups, models.param_shapes, strict=False):
        groups.append({**settings, "params": list(params)})
    return group_objects(groups, {})


def _check_complete(models: ModelStates, weights: Mapping[str, Joined]) -> None:
    wanted = models.trained | models.frozen.keys()
    if wanted <= weights.keys():
        return
    missing = sorted(wanted - weights.keys())
    if models.stage3:
        raise IncompleteCheckpointError(
            f"the *_optim_states.pt files are missing; with ZeRO-3 only they hold the weights ({missing[0]!r}, ...)."
        )
    raise IncompleteCheckpointError(f"{len(missing)} parameters are nowhere: {', '.join(missing[:4])}.")
