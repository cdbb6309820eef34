"""Declares that a rank's tensors are parts of global tensors, for example the experts of an expert-parallel rank.

A save or a load presents such a tensor as a DTensor. The mesh of the DTensor combines the declared mesh with the
tensor's own mesh, if there is one. So the tensor is saved, loaded and exported like any DTensor, and can be loaded on
any other mesh.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.arguments import wrong
from ckptkit.errors import SaveError, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Declares that the ranks of `mesh` hold consecutive parts of a global tensor along the dimension `dim`.

    Attributes:
        mesh: A one-dimensional mesh, such as `device_mesh["ep"]`.
        size: Size of the global tensor along `dim`. None: all ranks have parts of equal size.
        replicas: A mesh whose ranks have equal copies of each part, such as `device_mesh["dp"]`. Then each part is
            written once.
    """

    dim: int
    mesh: DeviceMesh
    size: int | None = None
    replicas: DeviceMesh | None = None


Layout = Mapping[str, "Shard | Sequence[Shard] | Literal['per_rank', 'any_replica']"]
"""Maps globs of FQNs to shards (outermost first). A matching tensor is a part of a global tensor.

Two words are allowed instead of shards. "per_rank": each rank keeps its own plain tensor. "any_replica": the replicas
of a DTensor, and of its optimizer state, may differ. They are not compared, and one replica is saved.
"""


def check_layout(layout: object) -> None:
    """Raise UsageError unless `layout` maps globs to "per_rank", "any_replica" or shards over 1-D meshes."""
    if not isinstance(layout, Mapping):
        raise wrong(
            "TrainState(layout=...)", layout, "a dict of globs, such as {'*.experts.*': ckptkit.Shard(0, mesh=ep)}"
        )
    for glob, declared in layout.items():
        if declared in ("per_rank", "any_replica"):
            continue
        shards = [declared] if isinstance(declared, Shard) else declared
        if not isinstance(shards, Sequence) or not shards or not all(isinstance(shard, Shard) for shard in shards):
            raise UsageError(
                f"TrainState(layout=...): {glob!r} is {declared!r:.80}, expected ckptkit.Shard(dim, mesh=...), a list "
                "of shards, 'per_rank' or 'any_replica'."
            )
        for shard in shards:
            if getattr(shard.mesh, "ndim", None) != 1:
                raise UsageError(
                    f"TrainState(layout=...): {glob!r} needs a mesh of one dimension, such as device_mesh['ep']; found "
                    f"{shard.mesh!r:.80}."
                )


def shards_of(layout: Layout, fqn: str) -> tuple[Shard, ...]:
    """Return the shards that the first matching glob declares. Returns () if no glob matches."""
    found = next((declared for glob, declared in layout.items() if fnmatch.fnmatchcase(fqn, glob)), ())
    return (found,) if isinstance(found, Shard) else () if isinstance(found, str) else tuple(found)


def is_declared(layout: Layout, fqn: str, word: str) -> bool:
    """Return whether the first glob that matches a tensor maps it to `word` ("per_rank" or "any_replica")."""
    return next((declared == word for glob, declared in layout.items() if fnmatch.fnmatchcase(fqn, glob)), False)


def matches(layout: Layout, fqns: Iterable[str]) -> dict[str, bool]:
    """Return, for each glob, whether it matches a tensor of this rank."""
    names = list(fqns)
    return {glob: bool(fnmatch.filter(names, glob)) for glob in layout}


def refuse_idle(found: Sequence[Mapping[str, bool]]) -> None:
    """Raise UsageError if a glob matches no tensor on any rank. `found`: the result of `matches` on each rank."""
    if idle := sorted({glob for table in found for glob in table if not any(other.get(glob) for other in found)}):
        raise UsageError(
            f"TrainState(layout=...): no tensor of the model on any rank matches {', '.join(map(repr, idle))}. Globs "
            "match whole names, as in model.state_dict(); if there are several models, these start with the name of "
            "the model."
        )


def as_global(what: str, tensor: torch.Tensor, shards: Sequence[Shard]) -> torch.Tensor:
    """Return a DTensor that shares memory with `tensor`, and presents it as a part of a global tensor.

    Returns `tensor` itself if `shards` is empty.

    Raises:
        SaveError: The tensor lacks a dimension that a shard names.
        UsageError: The tensor's shape is not that of this rank's part.
    """
    if not shards:
        return tensor
    import torch
    from torch.distributed.tensor import DTensor, Placement, Replicate
    from torch.distributed.tensor import Shard as TorchShard

    from ckptkit.formats.dcp.plan import joined_mesh, local_box

    shape, placements, meshes = list(tensor.shape), list[Placement](), []
    for shard in shards:
        dim = shard.dim + len(shape) if shard.dim < 0 else shard.dim
        if not 0 <= dim < len(shape):
            raise SaveError(
                f"{what} of shape {list(tensor.shape)} has no dimension {shard.dim}, which its layout shards."
            )
        shape[dim] = shape[dim] * shard.mesh.size() if shard.size is None else shard.size
        if shard.replicas is not None:
            meshes.append(shard.replicas)
            placements += [Replicate()] * shard.replicas.ndim
        meshes.append(shard.mesh)
        placements.append(TorchShard(dim))
    local = tensor
    if isinstance(tensor, DTensor):
        meshes.append(tensor.device_mesh)
        placements += tensor.placements
        local = tensor.to_local()
    mesh = joined_mesh(what, meshes)
    sizes, _ = local_box(torch.Size(shape), mesh, tuple(placements))
    if sizes != tuple(local.shape):
        raise UsageError(
            f"{what}: this rank holds a tensor of shape {list(local.shape)}, but its layout expects a part of shape "
            f"{list(sizes)} of {shape}. Parts have equal sizes by default. If they are split like torch.chunk, with "
            "smaller parts at the end, pass Shard(..., size=)."
        )
    strides = torch.empty(shape, device="meta").stride()
    view: DTensor = DTensor.from_local(
        local.detach(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return view


def global_state(what: str, value: Any, parameter: torch.Tensor, shards: Sequence[Shard]) -> Any:
    """Return an optimizer state as a DTensor if its parameter is declared as a part of a global tensor (`shards`).

    For any other parameter, and for a single number such as a step count, returns `value` itself.
    """
    if not shards or (value.numel() == 1 and value.shape != parameter.shape):
        return value
    if value.shape != parameter.shape:
        raise SaveError(
            f"{what} has shape {list(value.shape)}, but its parameter has shape {list(parameter.shape)} and is "
            "declared as a part of a global tensor, so it is unknown how the ranks' states combine. Use an optimizer "
            "whose states have the parameter's shape."
        )
    return as_global(what, value, shards)
