"""Finds the FQNs of the parameters that a saved optimizer only numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from ckptkit.catalog.entry import Catalog, Role
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.trainers.param_order import Param
from ckptkit.formats.training_state import TrainingState
from ckptkit.keymaps.wrappers import strip_infixes

ParameterNames: TypeAlias = Mapping[str, Mapping[str, str]]
"""The FQN of each saved name or number of a parameter, by the prefix of the optimizer's names."""

_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")  # buffers, some with the shape of a weight


def without_wrappers(catalog: Catalog) -> Catalog:
    """Return the catalog with FQNs that lack the prefixes of wrappers, such as DDP's "module.".

    Returns the catalog unchanged if two FQNs would become equal.
    """
    try:
        names = strip_infixes(catalog.by_role(Role.MODEL))
    except CheckpointMismatchError:
        return catalog
    tensors = {name: replace(entry, fqn=names.get(entry.fqn, entry.fqn)) for name, entry in catalog.tensors.items()}
    return replace(catalog, tensors=tensors)


def parameter_names(catalog: Catalog, saved: TrainingState) -> ParameterNames:
    """Return, for each optimizer, a mapping from the saved names or numbers of its parameters to FQNs.

    If parameters are numbered, the FQNs are derived from the order and the shapes of the model's tensors. If order
    and shapes do not determine the FQNs, the mapping is empty.
    """
    params: dict[tuple[str, int, str], Param] = {}  # by their place on disk; of tied weights, only the first counts
    weights = catalog.by_role(Role.MODEL)
    for entry in weights.values():
        if entry.fqn.rpartition(".")[2] not in _BATCH_NORM and len(entry.slices):
            part = entry.slices[0]
            place = (part.path, part.start, entry.fqn if not part.nbytes else "")
            params.setdefault(place, Param(entry.fqn, entry.shape))
    found: dict[str, dict[str, str]] = {}
    for prefix, one in saved.optimizers.items():
        if one.is_numbered and not one.names:
            found[prefix] = one.assigned([*params.values()]) or {}
        else:
            named = {n: name if name in weights else strip_infixes([name])[name] for n, name in one.names.items()}
            found[prefix] = {**named, **{part.param: part.fqn for part in one.tensors if part.fqn}}
    return found


def with_named_masters(catalog: Catalog, read_state: Callable[[], TrainingState]) -> Catalog:
    """Return the catalog with an FQN for each master weight that the optimizer only numbers, if it can be determined.

    Args:
        read_state: Reads the training state. Called only if a master weight has no FQN.
    """
    if not any(entry.role is Role.MASTER and not entry.fqn for entry in catalog.tensors.values()):
        return catalog
    saved = read_state()
    names = parameter_names(catalog, saved)
    tensors = dict(catalog.tensors)
    for prefix, one in saved.optimizers.items():
        for part in one.tensors:
            if part.entry.role is Role.MASTER and not part.entry.fqn:
                tensors[part.entry.name] = replace(part.entry, fqn=names[prefix].get(part.param, ""))
    return replace(catalog, tensors=tensors)
