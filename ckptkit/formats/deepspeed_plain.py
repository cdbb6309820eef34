"""The optimizer of DeepSpeed without ZeRO, which lies in the model file: torch's own state, and fp32 masters beside it.

The masters are whole tensors in the order of the parameter groups (deepspeed/runtime/fp16/unfused_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.formats._torch_records import StoredTensor
from ckptkit.formats.master_check import MasterSampler
from ckptkit.formats.optimizer_files import OptimizerState, is_state_dicts, read_optimizer
from ckptkit.formats.param_order import Param, assign
from ckptkit.formats.rank_files import Joined, join
from ckptkit.formats.verl import parameters
from ckptkit.storage import Store

__all__ = ["Masters", "read_plain_optimizer"]

Masters = dict[str, Joined]
_MASTERS = "fp32_groups"


def read_plain_optimizer(
    store: Store, model: Mapping[str, Any], weights: Mapping[str, TensorEntry], file: str
) -> tuple[OptimizerState, Masters]:
    """Return the optimizer that `model`, the content of the model file, holds, and its fp32 masters by parameter.

    What is there and can't be read, such as states that a fused optimizer laid end to end, is noted.

    Args:
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
        note = "does not prove whose the fp32 masters are, by names, shapes and values; they were skipped."
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
    """The parameter of each master, where names and shapes, or the weights' own values, leave one way."""
    if [len(group["params"]) for group in settings] != [len(group) for group in groups]:
        return None
    shapes = [[tensor.shape for tensor in group] for group in groups]
    no_decay = [group.get("weight_decay") == 0 for group in settings]
    keyed = {(g, i): tensor for g, group in enumerate(groups) for i, tensor in enumerate(group)}
    entries = {key: joined.entry("master", Role.MASTER) for key, joined in join([keyed], what=file).items()}
    sampler = MasterSampler(store, weights)
    return assign(params, shapes, no_decay, lambda group, index, fqn: sampler.fits(entries[group, index], fqn))
