"""Plans the DCP data files of each rank and their `.metadata`. Slices are stored as columns, one row per slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp.metadata import RecordColumns, encode_metadata
from ckptkit.formats.dcp.records import RecordFrame, frame_tensor
from ckptkit.offline.copying.plan import CrcField, Literal, OutputFile, OutputTensor, Placement
from ckptkit.offline.export.files import in_disk_order

__all__ = ["RankBoxes", "chunked", "dcp_files", "lay_out_dcp"]

Int64 = npt.NDArray[np.int64]
Laid = tuple[list[OutputFile], list[Placement], tuple[str, ...]]

METADATA = ".metadata"
MODEL = "model"  # the top-level key, as in `dcp.load({"model": model.state_dict()})` and in accelerate


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """Which rank stores each box of a tensor. Boxes do not repeat, and only a tensor without elements has an empty one.

    Attributes:
        ranks: [n] the rank.
        offsets, sizes: [n, ndim] the box, in elements.
    """

    ranks: Int64
    offsets: Int64
    sizes: Int64


def chunked(shape: tuple[int, ...], world_size: int) -> RankBoxes:
    """Return the boxes for FSDP2 sharding, which splits dimension 0 like `torch.chunk`. Scalars go to rank 0."""
    ndim = len(shape)
    if not shape or 0 in shape or world_size == 1:
        zeros = np.zeros((1, ndim), np.int64)
        return RankBoxes(np.zeros(1, np.int64), zeros, np.array([shape], np.int64).reshape(1, ndim))
    length = -(-shape[0] // world_size)
    count = -(-shape[0] // length)  # ranks from here on store nothing
    ranks = np.arange(count)
    offsets = np.zeros((count, ndim), np.int64)
    offsets[:, 0] = ranks * length
    sizes = np.tile(np.array(shape, np.int64), (count, 1))
    sizes[:, 0] = np.minimum(length, shape[0] - offsets[:, 0])
    return RankBoxes(ranks, offsets, sizes)


# --- DCP


def dcp_files(catalog: Catalog, tensors: Sequence[OutputTensor], *, world_size: int) -> Laid:
    """Lay out tensors as a DCP checkpoint for `world_size` FSDP2 ranks, under the key "model"."""
    boxes = [chunked(tensor.shape, world_size) for tensor in tensors]
    return lay_out_dcp(catalog, tensors, boxes, keys=[(MODEL, tensor.name) for tensor in tensors])


def lay_out_dcp(
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
    boxes: Sequence[RankBoxes],
    *,
    keys: Sequence[tuple[str | int, ...]],
    objects: Sequence[tuple[tuple[str | int, ...], bytes]] = (),
) -> Laid:
    """Lay out boxes in `__<rank>_0.distcp` files and `.metadata`.

    Args:
        keys: Each tensor's path in the nested state dict. Its name in `.metadata` is this path, joined by dots.
        objects: (path, record) for everything that is not a tensor. The records are at the beginning of rank 0's file.
    """
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    order = [place[id(tensor)] for tensor in in_disk_order(catalog, tensors)]
    count = 1 + max((int(item.ranks.max()) for item in boxes if len(item.ranks)), default=0)
    cursors = [0] * count
    head = b"".join(record for _, record in objects)
    cursors[0] = len(head)
    starts: list[_Records] = [_Records.laid(tensors[i], i, boxes[i], cursors) for i in order]
    ranks = np.flatnonzero(cursors)
    indexes = np.full(count, -1, np.int32)
    indexes[ranks] = np.arange(len(ranks))
    paths = [f"__{rank}_0.distcp" for rank in ranks.tolist()]
    frames = _Frames.of(starts, tensors, count)
    files = [
        OutputFile(path, cursors[rank], _FrameLiterals(frames, rank, b"" if rank else head), _FrameCrcs(frames, rank))
        for path, rank in zip(paths, ranks.tolist(), strict=True)
    ]
    placements, columns = [], []
    for item in starts:
        tensor, box = tensors[item.tensor], boxes[item.tensor]
        own = indexes[box.ranks]
        placements.append(Placement(tensor, own, item.starts + item.heads, box.offsets, box.sizes))
        name = ".".join(map(str, keys[item.tensor]))
        columns.append(
            RecordColumns(name, tensor.dtype, tensor.shape, box.offsets, box.sizes, own, item.starts, item.lengths)
        )
    planner = {".".join(map(str, key)): key for key in (*keys, *(key for key, _ in objects))}
    ends = np.cumsum([0, *(len(record) for _, record in objects)]).tolist()
    places = {".".join(map(str, key)): (0, ends[i], len(record)) for i, (key, record) in enumerate(objects)}
    metadata = b"".join(encode_metadata(columns, paths, objects=places, planner_data=planner))
    return [*files, OutputFile.of_bytes(METADATA, metadata)], placements, (METADATA,)


@dataclass(frozen=True, slots=True)
class _Records:
    """One tensor's records: start, length, and number of bytes before the payload (`heads`)."""

    tensor: int
    ranks: Int64
    sizes: Int64
    starts: Int64
    heads: Int64
    lengths: Int64

    @classmethod
    def laid(cls, tensor: OutputTensor, index: int, boxes: RankBoxes, cursors: list[int]) -> _Records:
        """Append the records to their ranks' files. Updates `cursors`, which are the ends of these files."""
        table: list[tuple[int, int, int]] = []
        for rank, sizes in zip(boxes.ranks.tolist(), boxes.sizes.tolist(), strict=True):
            frame = frame_tensor(tensor.dtype, tuple(sizes))
            start = -(-cursors[rank] // frame.alignment) * frame.alignment
            cursors[rank] = start + frame.length
            table.append((start, len(frame.prefix), frame.length))
        starts, heads, lengths = np.array(table, np.int64).reshape(-1, 3).T
        return cls(index, boxes.ranks, boxes.sizes, starts, heads, lengths)


@dataclass(frozen=True, slots=True)
class _Frames:
    """All records, sorted by rank and start. A file's frames are created only when the file is written."""

    tensors: Sequence[OutputTensor]
    bounds: Int64  # [ranks + 1] where each rank's rows begin
    owners: Int64  # [n] index of the record's tensor
    rows: Int64  # [n] index among that tensor's records
    starts: Int64
    payloads: Int64  # [n] start of the payload
    lengths: Int64  # [n] length of the whole record
    records: dict[int, _Records]

    @classmethod
    def of(cls, records: Sequence[_Records], tensors: Sequence[OutputTensor], world_size: int) -> _Frames:
        empty = np.zeros(0, np.int64)
        ranks = np.concatenate([empty, *(item.ranks for item in records)])
        starts = np.concatenate([empty, *(item.starts for item in records)])
        owners = np.concatenate([empty, *(np.full(len(item.ranks), item.tensor, np.int64) for item in records)])
        rows = np.concatenate([empty, *(np.arange(len(item.ranks)) for item in records)])
        order = np.lexsort((starts, ranks))
        bounds = np.searchsorted(ranks[order], np.arange(world_size + 1))
        payloads = starts + np.concatenate([empty, *(item.heads for item in records)])
        lengths = np.concatenate([empty, *(item.lengths for item in records)])
        return cls(
            tensors,
            bounds,
            owners[order],
            rows[order],
            starts[order],
            payloads[order],
            lengths[order],
            {item.tensor: item for item in records},
        )

    def of_rank(self, rank: int) -> Iterator[tuple[int, RecordFrame]]:
        """Yield (start, frame) for each record in a rank's file."""
        for i in range(int(self.bounds[rank]), int(self.bounds[rank + 1])):
            owner = int(self.owners[i])
            sizes = tuple(self.records[owner].sizes[int(self.rows[i])].tolist())
            yield int(self.starts[i]), frame_tensor(self.tensors[owner].dtype, sizes)


@dataclass(frozen=True, slots=True)
class _FrameLiterals:
    """The bytes in a rank's file besides the payloads. Each iteration creates them anew."""

    frames: _Frames
    rank: int
    head: bytes = b""

    def extents(self, payloads: Int64) -> tuple[Int64, Int64]:
        """Return (starts, lengths) of the literals without creating them, which would be slow for a thousand files.

        Args:
            payloads: Size of each payload in bytes, in file order.
        """
        part = slice(int(self.frames.bounds[self.rank]), int(self.frames.bounds[self.rank + 1]))
        starts, inner = self.frames.starts[part], self.frames.payloads[part]
        ends = starts + self.frames.lengths[part]
        behind = inner + payloads
        gaps = np.concatenate([[len(self.head)], ends[:-1]])[: len(starts)]
        places = (np.zeros(1, np.int64), gaps, starts, behind)
        sizes = (np.array([len(self.head)]), starts - gaps, inner - starts, ends - behind)
        return np.concatenate(places), np.concatenate(sizes)

    def __iter__(self) -> Iterator[Literal]:
        end = len(self.head)
        if end:
            yield Literal(0, self.head)
        for start, frame in self.frames.of_rank(self.rank):
            if start > end:
                yield Literal(end, bytes(start - end))
            end = start + frame.length
            yield Literal(start, frame.head(0))
            tail = frame.suffix(0)
            yield Literal(end - len(tail), tail)


@dataclass(frozen=True, slots=True)
class _FrameCrcs:
    """The CRC-32 fields of a rank's file, one per payload."""

    frames: _Frames
    rank: int

    def __iter__(self) -> Iterator[CrcField]:
        for start, frame in self.frames.of_rank(self.rank):
            payload = start + len(frame.prefix)
            at = [start + offset for offset in _crc_places(frame)[0]]
            at += [payload + frame.nbytes + offset for offset in _crc_places(frame)[1]]
            yield CrcField(tuple(at), payload, frame.nbytes)


@functools.lru_cache(maxsize=65536)
def _crc_places(frame: RecordFrame) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the CRC's offsets in a frame's head and in its suffix, which are found by writing two different CRCs."""
    return _changed(frame.head(0), frame.head(0xFFFFFFFF)), _changed(frame.suffix(0), frame.suffix(0xFFFFFFFF))


def _changed(first: bytes, second: bytes) -> tuple[int, ...]:
    places = []
    at = 0
    while at < len(first):
        if first[at] != second[at]:
            places.append(at)
            at += 4
        else:
            at += 1
    return tuple(places)
