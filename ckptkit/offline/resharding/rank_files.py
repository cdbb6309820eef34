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

Int64 = npt.NDArray[np.int64]
Laid = tuple[list[OutputFile], list[Placement], tuple[str, ...]]

METADATA = ".metadata"
MODEL = "model"  # the top-level key, as in `dcp.load({"model": model.state_dict()})` and in accelerate


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """The rank that stores each box of a tensor.

    Boxes do not repeat, and only a tensor without elements has an empty one.

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
    save_id: str = "",
) -> Laid:
    """Lay out boxes in `__<rank>_0.distcp` files and `.metadata`.

    Args:
        keys: Each tensor's path in the nested state dict. Its name in `.metadata` is this path, joined by dots.
        objects: (path, record) for everything that is not a tensor. The records are at the beginning of rank 0's file.
        save_id: Recorded in `.metadata` if a commit record will follow.
    """
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    order = [place[id(tensor)] for tensor in in_disk_order(catalog, tensors)]
    count = 1 + max((int(item.ranks.max()) for item in boxes if len(item.ranks)), default=0)
    head = b"".join(record for _, record in objects)
    records = _Records.laid([tensors[i].dtype for i in order], [boxes[i] for i in order], count, len(head))
    ranks = np.flatnonzero(records.nbytes)
    indexes = np.full(count, -1, np.int32)
    indexes[ranks] = np.arange(len(ranks))
    paths = [f"__{rank}_0.distcp" for rank in ranks.tolist()]
    frames = _Frames.of(records)
    files = []
    for path, rank in zip(paths, ranks.tolist(), strict=True):
        literals = _FrameLiterals(frames, rank, b"" if rank else head)
        files.append(OutputFile(path, int(records.nbytes[rank]), literals, _FrameCrcs(frames, rank)))
    placements, columns = [], []
    own_files, payloads, stop = indexes[records.ranks], records.starts + records.heads, 0
    for i in order:
        tensor, box = tensors[i], boxes[i]
        start, stop = stop, stop + len(box.ranks)
        own = own_files[start:stop]
        placements.append(Placement(tensor, own, payloads[start:stop], box.offsets, box.sizes))
        starts, lengths = records.starts[start:stop], records.lengths[start:stop]
        name = ".".join(map(str, keys[i]))
        columns.append(RecordColumns(name, tensor.dtype, tensor.shape, box.offsets, box.sizes, own, starts, lengths))
    planner = {".".join(map(str, key)): key for key in (*keys, *(key for key, _ in objects))}
    ends = np.cumsum([0, *(len(record) for _, record in objects)]).tolist()
    places = {".".join(map(str, key)): (0, ends[i], len(record)) for i, (key, record) in enumerate(objects)}
    metadata = b"".join(
        encode_metadata(columns, paths, objects=places, planner_data=planner, checkpoint_id=save_id, save_id=save_id)
    )
    return [*files, OutputFile.of_bytes(METADATA, metadata)], placements, (METADATA,)


@dataclass(frozen=True, slots=True)
class _Records:
    """All records, tensor by tensor: rank, frame, start, number of bytes before the payload (`heads`), and length.

    Attributes:
        nbytes: [ranks] size of each rank's file.
    """

    frames: list[RecordFrame]
    ranks: Int64
    starts: Int64
    heads: Int64
    lengths: Int64
    nbytes: Int64

    @classmethod
    def laid(cls, dtypes: Sequence[str], boxes: Sequence[RankBoxes], count: int, first: int) -> _Records:
        """Lay out each tensor's records in the files of `count` ranks. Rank 0's file has `first` bytes before them."""
        cursors = [0] * count
        cursors[0] = first
        frames: list[RecordFrame] = []
        ranks: list[int] = []
        starts: list[int] = []
        known: dict[tuple[str, int], tuple[list[int], list[RecordFrame]]] = {}  # equal shapes share their boxes
        for dtype, item in zip(dtypes, boxes, strict=True):
            own = known.get((dtype, id(item)))
            if own is None:
                own = item.ranks.tolist(), [frame_tensor(dtype, tuple(sizes)) for sizes in item.sizes.tolist()]
                known[dtype, id(item)] = own
            ranks += own[0]
            frames += own[1]
            for rank, frame in zip(*own, strict=True):
                start = -(-cursors[rank] // frame.alignment) * frame.alignment
                cursors[rank] = start + frame.length
                starts.append(start)
        heads = np.array([len(frame.prefix) for frame in frames], np.int64)
        lengths = np.array([frame.length for frame in frames], np.int64)
        return cls(
            frames, np.array(ranks, np.int64), np.array(starts, np.int64), heads, lengths, np.array(cursors, np.int64)
        )


@dataclass(frozen=True, slots=True)
class _Frames:
    """All records, sorted by rank and start."""

    frames: list[RecordFrame]
    bounds: Int64  # [ranks + 1] where each rank's rows begin
    starts: Int64
    payloads: Int64  # [n] start of the payload
    lengths: Int64  # [n] length of the whole record

    @classmethod
    def of(cls, records: _Records) -> _Frames:
        order = np.lexsort((records.starts, records.ranks))
        bounds = np.searchsorted(records.ranks[order], np.arange(len(records.nbytes) + 1))
        frames, starts = [records.frames[i] for i in order.tolist()], records.starts[order]
        return cls(frames, bounds, starts, starts + records.heads[order], records.lengths[order])

    def of_rank(self, rank: int) -> Iterator[tuple[int, RecordFrame]]:
        """Yield (start, frame) for each record in a rank's file."""
        first, stop = self.bounds[rank : rank + 2].tolist()
        return zip(self.starts[first:stop].tolist(), self.frames[first:stop], strict=True)


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
