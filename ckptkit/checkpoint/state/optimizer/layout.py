"""Decides how to store optimizer states that are not sharded like their parameter, and where they may be loaded.

There are three kinds of states:

- A *shard* is a part of a tensor that is split over the ranks. It is a DTensor (which may be inside a list or dict), or
  a plain tensor with the shape of the parameter's local shard. It is stored like a weight, and loads on any number of
  ranks.
- A *whole* state is equal on all ranks: numbers, settings, or a plain tensor that each rank computed from the whole
  gradient. It is stored once, and loads on any number of ranks.
- A rank's *own* state differs between ranks, because it was computed from the local shard. Examples are a factor of the
  shard, or a projector. It is stored for each rank. A load is refused unless each rank has the same shards as in the
  saved job.

A plain tensor counts as a shard only if all plain tensors of the optimizer (of more than one element) have the shapes
of their parameters' local shards. Without this rule, a factor that happens to have such a shape would count as a shard.
With a single rank, whole states and own states look the same. So every state that is not a shard is saved as the rank's
own state. Such a state cannot be loaded if parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.local_part import ShardLayout, layout_of, parts_here
from ckptkit.checkpoint.state.values import order_of
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.dcp.host_bytes import local_part
from ckptkit.formats.dcp.subclasses import is_state_in_parts
from ckptkit.formats.trainers.shards import mesh_coordinate

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

Held = str | list[str]
"""The storage of a state: SHARD, PLAIN, or a DTensor's placements as in the manifest (one string per mesh
dimension).
"""

SHARD = "shard"  # a plain tensor that is this rank's shard, and placed like the parameter
PLAIN = "plain"  # a plain tensor that is complete on each rank
_CONTAINERS = (dict, list, tuple, set, frozenset)


def cuts(parameters: Mapping[str, torch.Tensor]) -> dict[str, ShardLayout]:
    """Return, by name, the layouts of the parameters that are split over several ranks."""
    from torch.distributed.tensor import DTensor

    return {
        name: layout_of(parameter)
        for name, parameter in parameters.items()
        if isinstance(parameter, DTensor)
        and any(parameter.device_mesh.size(d) > 1 and not p.is_replicate() for d, p in enumerate(parameter.placements))
    }


def layouts(cut: Mapping[str, ShardLayout]) -> list[Any]:
    """Return the distinct layouts in `cut`, the result of `cuts`, as JSON: a list of [mesh shape, placements]."""
    return sorted([list(shape), list(texts)] for shape, texts in {(o.mesh_shape, o.texts()) for o in cut.values()})


def places(cut: Mapping[str, ShardLayout], rank: int) -> list[Any]:
    """Return, as JSON, the distinct positions of a rank in the meshes that shard parameters.

    A position is a list with [size, placement, coordinate] for each mesh dimension that splits the parameter. If a
    rank's positions are the same in the saved job and in this job, the rank has the same shards in both.
    """
    found = set()
    for one in cut.values():
        coordinate = mesh_coordinate(rank, one.mesh_shape, one.mesh_ranks)
        rows = zip(one.mesh_shape, one.texts(), coordinate or (), strict=coordinate is not None)
        found.add(tuple((size, text, at) for size, text, at in rows if size > 1 and text != "R"))
    return [[list(row) for row in place] for place in sorted(found)]


def shard_names(states: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]) -> frozenset[str]:
    """Return the names ("exp_avg") of the states whose plain tensors are shards (see this module's docstring).

    `states` has, for each parameter, the parameter and its states by name.
    """
    names = set()
    for parameter, state in states:
        if not _is_sharded(parameter):
            continue
        for name, value in state.items():
            for tensor in _plain_in(value):
                if tensor is value and is_shard(tensor, parameter) and tensor.numel() != 1:
                    names.add(name)
                elif tensor.numel() > 1:
                    return frozenset()
    return frozenset(names)


def is_shard(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value is a plain tensor with the shape of the parameter's local shard."""
    import torch
    from torch.distributed.tensor import DTensor

    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_plain and _is_sharded(parameter) and value.shape == local_part(parameter).shape


def placed(
    value: torch.Tensor, parameter: torch.Tensor, name: str, shards: frozenset[str]
) -> tuple[torch.Tensor, Held | None]:
    """Return the tensor to store for an optimizer state, and how it is stored (see `Held`).

    The second value is None if a load can derive it from the parameter and the shapes.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return value, None
    if isinstance(value, DTensor):
        alike = value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
        return value, None if alike and value.shape == parameter.shape else _texts(value)
    if name in shards and is_shard(value, parameter):
        mesh, placements, stride = parameter.device_mesh, parameter.placements, parameter.stride()
        made = DTensor.from_local(value, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)
        return made, SHARD
    return value, None if value.numel() == 1 and value.shape != parameter.shape else PLAIN


def held_nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Held]:
    """Return, by key, how each DTensor in `tensors` is stored. All other tensors are plain."""
    from torch.distributed.tensor import DTensor

    return {k: held for k, t in tensors.items() if isinstance(t, DTensor) and (held := _texts(t)) is not None}


def has_plain(value: Any) -> bool:
    """Return whether a value contains a tensor that is not stored as a shard, apart from tensors of one element."""
    return any(tensor.numel() > 1 for tensor in _plain_in(value))


def new_held(parameter: torch.Tensor, held: Held | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """Return an uninitialized tensor for a state that the checkpoint stores as `held`.

    Returns None if the state must get the placements of the parameter instead. This is the case if `held` is None or
    SHARD, if the parameter is not a DTensor, or if its mesh does not have one dimension for each placement in `held`.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if held is None or held == SHARD or not isinstance(parameter, DTensor):
        return None
    if held == PLAIN:
        return torch.empty(shape, dtype=dtype, device=local_part(parameter).device)
    placements = [_placement(text) for text in held]
    if len(placements) != parameter.device_mesh.ndim:
        return None
    return new_placed(parameter, placements, dtype, shape)


def held_by_any(
    parameters: Iterable[torch.Tensor], held: Held | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> Any:
    """Return an uninitialized DTensor for a state that belongs to no parameter.

    It is on the mesh of the first parameter for which `new_held` returns a tensor. Returns None if there is no such
    parameter, or if the state is a plain tensor.
    """
    made = (new_held(parameter, held, dtype, shape) for parameter in parameters if isinstance(held, list))
    return next((tensor for tensor in made if tensor is not None), None)


def placed_whole(parameters: Iterable[torch.Tensor], held: Held | None, whole: torch.Tensor) -> torch.Tensor:
    """Return the values in `whole`, a state that belongs to no parameter, as a DTensor with the placements `held`.

    See `held_by_any` for the DTensor's mesh. Without such a mesh, and for a plain tensor, returns `whole` itself.
    """
    made: torch.Tensor | None = held_by_any(parameters, held, whole.dtype, tuple(whole.shape))
    if made is None:
        return whole
    fill_from_whole(made, whole)
    return made


def fill_from_whole(made: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole` into the DTensor `made`. Does not communicate."""
    local = local_part(made)
    for part in parts_here(made, local)[1]:
        ranges = [
            tuple(slice(start, start + size) for start, size in zip(offsets, part.box.sizes, strict=True))
            for offsets in (part.local_offsets, part.box.offsets)
        ]
        local[ranges[0]] = whole[ranges[1]]


def new_placed(parameter: Any, placements: list[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> DTensor:
    """Return an uninitialized DTensor on a parameter's mesh and device."""
    import torch
    from torch.distributed.tensor import DTensor, empty

    mesh = parameter.device_mesh
    made = empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    # An offloaded parameter is not on the mesh's device.
    local = torch.empty_like(local_part(made), device=local_part(parameter).device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=made.shape, stride=made.stride())


def _is_sharded(parameter: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements)


def _plain_in(value: Any, *, in_object: bool = False) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value that are not stored as shards.

    These are plain tensors, and DTensors that are attributes of an object such as a projector. Such an object is stored
    as one piece, including the meshes of its DTensors.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if is_state_in_parts(value):
        return
    if isinstance(value, torch.Tensor):
        if in_object or not isinstance(value, DTensor):
            yield value
    elif isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _plain_in(item, in_object=in_object)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _plain_in(vars(value), in_object=True)


def _texts(tensor: Any) -> Held | None:
    """Return a DTensor's placements as strings, or None if one is a partial sum or a strided shard."""
    unnamed = any(p.is_partial() or getattr(p, "split_factor", None) is not None for p in tensor.placements)
    return None if unnamed else list(layout_of(tensor).texts())


def _placement(text: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if text == "R":
        return Replicate()
    number = text[2:-1] if isinstance(text, str) and text.startswith("S(") else ""
    if not number.isdecimal():
        raise CorruptCheckpointError(f"saved optimizer: {text!r} is not a placement; expected 'R' or 'S(dim)'.")
    return Shard(int(number))


def memory_order(state: torch.Tensor, parameter: torch.Tensor) -> list[int] | None:
    """Return the order of a state's dimensions in memory, slowest first.

    Returns None if a load gives a new state this order anyway: the parameter's order if the shapes are equal, otherwise
    row-major. Also returns None if the state is not a plain strided tensor.
    """
    import torch

    strided = (
        type(state) in (torch.Tensor, torch.nn.Parameter) and state.layout is torch.strided and not state.is_nested
    )
    if not strided or state.dim() < 2:
        return None
    order, usual = order_of(state), order_of(parameter) if state.shape == parameter.shape else None
    return None if order == usual else order or list(range(state.dim()))
