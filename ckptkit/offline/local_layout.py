"""LOCAL files for any mesh: one file a rank, each tensor the part that the rank is the chosen holder of."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog
from ckptkit.formats.local_shards import LocalTensor, file_metadata, file_name
from ckptkit.formats.safetensors_header import HeaderTensor, lay_out
from ckptkit.offline.hf_files import in_disk_order
from ckptkit.offline.plan import Literal, OutputFile, OutputTensor, Placement
from ckptkit.offline.rank_files import Laid, RankBoxes

__all__ = ["lay_out_local", "turn_of"]

Placed = tuple[int, tuple[str, ...]] | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which boxes each rank has, as (tensor, row) pairs sorted by rank."""

    bounds: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def of(cls, boxes: Sequence[RankBoxes], world_size: int) -> _Rows:
        empty = np.zeros(0, np.int64)
        ranks = np.concatenate([empty, *(item.ranks for item in boxes)])
        owners = np.repeat(np.arange(len(boxes)), [len(item.ranks) for item in boxes])
        rows = np.concatenate([empty, *(np.arange(len(item.ranks)) for item in boxes)])
        order = np.lexsort((owners, ranks))
        return cls(np.searchsorted(ranks[order], np.arange(world_size + 1)), owners[order], rows[order])

    def of_rank(self, rank: int) -> tuple[list[int], list[int]]:
        part = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))
        return self.owners[part].tolist(), self.rows[part].tolist()


def turn_of(key: str) -> int:
    """Return which of its replicas stores a tensor, counted round: spread over the holders as a training job does."""
    return zlib.crc32(key.encode("utf-8", "surrogatepass"))


def lay_out_local(
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
    boxes: Sequence[RankBoxes],
    *,
    world_size: int,
    meshes: Sequence[dict[str, Any]],
    placements: Sequence[Placed],
) -> Laid:
    """Lay boxes out as `local_<rank>.safetensors`, a file for every rank; returns (files, placements, ()).

    Args:
        placements: For each tensor (index into `meshes`, texts), or None for a plain one.
    """
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    order = [place[id(tensor)] for tensor in in_disk_order(catalog, tensors)]
    ordered = [boxes[i] for i in order]
    starts = [np.zeros(len(item.ranks), np.int64) for item in ordered]
    table = _Rows.of(ordered, world_size)
    files = []
    for rank in range(world_size):
        parts = []
        owners, rows = table.of_rank(rank)
        for owner, row in zip(owners, rows, strict=True):
            tensor, item = tensors[order[owner]], ordered[owner]
            box = Box(tuple(item.offsets[row].tolist()), tuple(item.sizes[row].tolist()))
            name = tensor.name
            parts.append(LocalTensor(name, name, tensor.dtype, tensor.shape, box, placements[order[owner]]))
        headers = [HeaderTensor(part.name, part.dtype, part.box.sizes) for part in parts]
        layout = lay_out(headers, file_metadata(rank, world_size, meshes, parts))
        files.append(OutputFile(file_name(rank), layout.nbytes, (Literal(0, layout.header),)))
        for owner, row, start in zip(owners, rows, layout.starts, strict=True):
            starts[owner][row] = start
    placed = [
        Placement(tensors[i], item.ranks.astype(np.int32), start, item.offsets, item.sizes)
        for i, item, start in zip(order, ordered, starts, strict=True)
    ]
    return files, placed, ()
