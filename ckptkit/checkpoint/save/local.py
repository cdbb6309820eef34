"""Saves LOCAL checkpoints: each rank writes its local tensors to its own file, without communication.

Replicated parts are written by only one rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ckptkit.checkpoint.save.stream import open_stream, phases_of
from ckptkit.checkpoint.state.capture import Captured
from ckptkit.checkpoint.state.local_part import PartView, check_safetensors, holders_of, part_view, this_rank
from ckptkit.digests import crc32, signature_of
from ckptkit.formats.dcp.index import PlainSlice, PlannedKey, RankPart, mesh_index, plain_part
from ckptkit.formats.hf.header import TensorToWrite
from ckptkit.formats.own.local import LocalTensor, file_metadata, file_name

if TYPE_CHECKING:
    import torch

    from ckptkit.storage.store import Store


@dataclass(frozen=True, slots=True)
class LocalTensors:
    """The tensors that this rank writes.

    If several ranks have the same part of a tensor, exactly one rank writes the part.
    """

    rank: int
    world_size: int
    views: tuple[PartView, ...]
    mine: tuple[PartView, ...]
    signature: bytes

    indexes: ClassVar[Mapping[str, bytes]] = {}

    @classmethod
    def of(cls, captured: Captured, rank: int, world_size: int, saving: Collection[int] | None = None) -> LocalTensors:
        """Return the plan for a captured state. Does not communicate. `saving`: as for `plan_sharded`."""
        views = tuple(part_view(key, tensor) for key, tensor in captured.tensors(aliases=False))
        check_safetensors(views)
        common = sorted(f"{v.key} {v.dtype} {v.shape}" for v in views if v.layout is None and v.key not in captured.own)
        signature = signature_of("\n".join(common).encode("utf-8", "surrogatepass"))
        mine = []
        for view in views:
            # A checksum of the key chooses one of the ranks that have a replica.
            turn, layout = crc32(view.key.encode("utf-8", "surrogatepass")), view.layout
            if layout is None:
                ours = turn % world_size == rank
            else:
                holders: Sequence[int] = holders_of(layout, this_rank())
                holders = holders if saving is None else [other for other in holders if other in saving]
                ours = bool(holders) and holders[turn % len(holders)] == this_rank()
            if ours or view.key in captured.own:
                mine.append(view)
        return cls(rank, world_size, views, tuple(mine), signature)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [view.local for view in self.mine]

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.mine) + 512 * len(self.mine)

    @property
    def file_names(self) -> str:
        return "|".join(re.escape(file_name(rank)) for rank in range(self.world_size))

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> LocalTensors:
        """Return this plan, adjusted to the other ranks.

        If the ranks do not all have the same plain (unsharded) tensors, each rank writes all of its own plain tensors,
        because it may be the only rank that has them.
        """
        if len(set(signatures)) <= 1:
            return self
        mine = {view.key for view in self.mine}
        return replace(self, mine=tuple(v for v in self.views if v.layout is None or v.key in mine))

    def write(self, store: Store, tensors: Sequence[torch.Tensor] | None, *, sync: bool) -> RankPart:
        memory = self.tensors if tensors is None else tensors
        meshes: list[dict[str, Any]] = []
        stored = [_stored(view, meshes) for view in self.mine]
        flat = [item for items in stored for item in items]
        path = file_name(self.rank)
        started = time.perf_counter()
        head = [TensorToWrite(item.name, item.dtype, item.box.sizes) for item in flat]
        with open_stream(store, path, head, file_metadata(self.rank, self.world_size, meshes, flat), sync=sync) as out:
            for view, items, local in zip(self.mine, stored, memory, strict=True):
                for item, piece in zip(items, _pieces(view, local), strict=True):
                    out.write(item.name, piece)
        written = out.written
        phases = phases_of([written], time.perf_counter() - started)
        files = {path: written.record}
        slices = [
            PlainSlice(PlannedKey(t.key, t.dtype, t.shape, (), t.placement), t.box, path, *written.tensors[t.name])
            for t in flat
        ]
        return plain_part(self.world_size, slices, files, phases, meshes)


def _stored(view: PartView, meshes: list[dict[str, Any]]) -> list[LocalTensor]:
    placement = None
    if view.layout is not None:
        placement = (mesh_index(view.layout.mesh_json(), meshes), view.layout.texts())
    names = [view.key] if len(view.parts) == 1 else [f"{view.key}#{i}" for i in range(len(view.parts))]
    return [
        LocalTensor(name, view.key, view.dtype, view.shape, part.box, placement)
        for name, part in zip(names, view.parts, strict=True)
    ]


def _pieces(view: PartView, local: torch.Tensor) -> list[torch.Tensor]:
    from ckptkit.formats.dcp.fill import part_of

    if len(view.parts) == 1:
        return [local.reshape(view.parts[0].box.sizes)]
    return [part_of(local, part.local_offsets, part.box.sizes) for part in view.parts]
