"""Converts weights to a committed LOCAL ckptkit checkpoint: one file per FSDP2 rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS
from ckptkit.offline.copying.plan import ComputedTensor, OutputFile, OutputTensor
from ckptkit.offline.reshard import identity_of
from ckptkit.offline.resharding.mesh import Cut, Cuts, TargetMesh
from ckptkit.offline.resharding.plan import lay_out_local, turn_of
from ckptkit.offline.resharding.rank_files import Laid
from ckptkit.offline.resharding.seal import Seal, SealedTensor

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source

__all__ = ["local_target"]

_OBJECTS = "objects.json"
_RECORD = "checkpoint.json"


def local_target(
    source: Source,
    tensors: Sequence[OutputTensor],
    dst: str,
    *,
    world_size: int,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[Laid, Seal]:
    """Lay weights out for `world_size` ranks that shard all of it; `seal` then commits what was written.

    A tensor that is copied as it is keeps the cut that it had (a buffer that was whole stays whole); any other is
    cut along dimension 0 where it is of floats.

    Raises:
        UsageError: The name of `dst` is that of another step, or cannot be the name of a checkpoint.
    """
    identity = identity_of(source, dst, storage_options)
    mesh = TargetMesh.parse(None, world_size=world_size)
    known = Cuts(source.catalog, mesh)
    named = [replace(tensor, name=f"model.{tensor.name}") for tensor in tensors]
    cuts = [_cut(source.catalog, known, tensor) for tensor in tensors]
    kinds: dict[tuple[str, ...], int] = {}
    placements: list[Any] = []
    for cut in cuts:
        placed = mesh.placement(cut)
        placements.append(None if placed is None else (kinds.setdefault(placed[0], len(kinds)), placed[1]))
    meshes = [mesh.describe(dims) for dims in kinds]
    boxes = [mesh.boxes(tensor.shape, cut, turn=turn_of(tensor.name)) for tensor, cut in zip(named, cuts, strict=True)]
    files, placed_at, _ = lay_out_local(
        source.catalog, named, boxes, world_size=world_size, meshes=meshes, placements=placements
    )
    objects = json.dumps({"format": 1, "objects": {"step": identity.step}}, separators=(",", ":")).encode()
    ranks = np.array([*range(world_size), -1], np.int32)
    where = {tensor.name: [place[0], list(place[1])] for tensor, place in zip(named, placements, strict=True) if place}
    seal = Seal(
        step=identity.step,
        tag=identity.tag,
        state_dict_type="local",
        world_size=world_size,
        mesh=mesh.describe(),
        tensors={
            new.name: SealedTensor(Role.MODEL, old.name, "", ("model", old.name))
            for new, old in zip(named, tensors, strict=True)
        },
        ranks=ranks,
        objects={},
        extra={MESHES: meshes, PLACEMENTS: where, "step": identity.step, "objects": _OBJECTS},
        record=identity.record,
    )
    return ([*files, OutputFile.of_bytes(_OBJECTS, objects)], placed_at, (_RECORD,)), seal


def _cut(catalog: Catalog, known: Cuts, tensor: OutputTensor) -> Cut:
    if not isinstance(tensor, ComputedTensor) and len(tensor.parts) == 1 and tensor.parts[0].is_plain:
        entry = catalog.tensors[tensor.parts[0].source]
        if entry.shape == tensor.shape:
            return known.of(entry)
    sharded = bool(tensor.shape) and dtype_of(tensor.dtype).kind == "float"
    return Cut(fsdp=0 if sharded else None)
