"""Plans the DCP data files of each rank and their `.metadata`. Slices are stored as columns, one row per slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp.metadata import MetadataPickle, RecordColumns
from ckptkit.formats.dcp.records import RecordFrame, frame_tensor
from ckptkit.offline.copying.plan import CrcField, Literal, OutputFile, OutputTensor, Placement
from ckptkit.offline.export.files import in_disk_order
from ckptkit.offline.resharding.mesh import Cut, RankBoxes, TargetMesh

Int64 = npt.NDArray[np.int64]
Laid = tuple[list[OutputFile], list[Placement], tuple[str, ...]]

METADATA = ".metadata"
MODEL = "model"  # the top-level key, as in `dcp.load({"model": model.state_dict()})` and in accelerate


def dcp_files(catalog: Catalog, tensors: Sequence[OutputTensor], *, world_size: int) -> Laid:
    """Lay out tensors as a DCP checkpoint for `world_size` FSDP2 ranks, under the key "model"."""
    mesh = TargetMesh(shard=world_size)
    boxes = [mesh.boxes(tensor.shape, Cut(0 if tensor.shape else None)) for tensor in tensors]
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
    """Lay out each rank's boxes in a file `__<rank>_0.distcp`, and describe them in `.metadata`.

    Args:
        keys: Each tensor's path in the nested state dict. Its name in `.metadata` is this path, joined by dots.
        objects: (path, encoded bytes) of each object that is not a tensor. Rank 0's file begins with these bytes.
        save_id: The id of the save, which is recorded in `.metadata`. "" if the checkpoint will have no commit record.
    """
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    order = [place[id(tensor)] for tensor in in_disk_order(catalog, tensors)]
    count = 1 + max((int(item.ranks.max()) for item in boxes if len(item.ranks)), default=0)
    head = b"".join(record for _, record in objects)
    # All records, tensor by tensor: frame, rank and start in the rank's file. Rank 0's file begins with `head`.
    cursors = [len(head), *[0] * (count - 1)]
    frames: list[RecordFrame] = []
    owners: list[int] = []
    places: list[int] = []
    known: dict[tuple[str, int], tuple[list[int], list[RecordFrame]]] = {}  # equal shapes share their boxes
    for i in order:
        dtype, item = tensors[i].dtype, boxes[i]
        mine = known.get((dtype, id(item)))
        if mine is None:
            mine = item.ranks.tolist(), [frame_tensor(dtype, tuple(sizes)) for sizes in item.sizes.tolist()]
            known[dtype, id(item)] = mine
        owners += mine[0]
        frames += mine[1]
        for rank, frame in zip(*mine, strict=True):
            start = -(-cursors[rank] // frame.alignment) * frame.alignment
            cursors[rank] = start + frame.length
            places.append(start)
    all_ranks, starts = np.array(owners, np.int64), np.array(places, np.int64)
    payloads = starts + np.array([len(frame.prefix) for frame in frames], np.int64)
    lengths = np.array([frame.length for frame in frames], np.int64)
    ranks = np.flatnonzero(cursors)
    indexes = np.full(count, -1, np.int32)
    indexes[ranks] = np.arange(len(ranks))
    paths = [f"__{rank}_0.distcp" for rank in ranks.tolist()]
    by_rank = np.lexsort((starts, all_ranks))
    bounds = np.searchsorted(all_ranks[by_rank], np.arange(count + 1))
    ordered = [frames[i] for i in by_rank.tolist()]
    sorted_frames = _Frames(ordered, bounds, starts[by_rank], payloads[by_rank], lengths[by_rank])
    files = []
    for path, rank in zip(paths, ranks.tolist(), strict=True):
        literals = _FrameLiterals(sorted_frames, rank, b"" if rank else head)
        files.append(OutputFile(path, cursors[rank], literals, _FrameCrcs(sorted_frames, rank)))
    placements, columns = [], []
    own_files, stop = indexes[all_ranks], 0
    for i in order:
        tensor, box = tensors[i], boxes[i]
        start, stop = stop, stop + len(box.ranks)
        own = own_files[start:stop]
        placements.append(Placement(tensor, own, payloads[start:stop], box.offsets, box.sizes))
        name, records = ".".join(map(str, keys[i])), (starts[start:stop], lengths[start:stop])
        columns.append(RecordColumns(name, tensor.dtype, tensor.shape, box.offsets, box.sizes, own, *records))
    planner = {".".join(map(str, key)): key for key in (*keys, *(key for key, _ in objects))}
    ends = np.cumsum([0, *(len(record) for _, record in objects)]).tolist()
    at = {".".join(map(str, key)): (paths[0], ends[i], len(record)) for i, (key, record) in enumerate(objects)}
    metadata = b"".join(MetadataPickle(columns, paths, at, planner, save_id, save_id).chunks())
    return [*files, OutputFile.of_bytes(METADATA, metadata)], placements, (METADATA,)


@dataclass(frozen=True, slots=True)
class _Frames:
    """The torch.save records in all ranks' files, one per box, sorted by rank and by offset in the file."""

    frames: list[RecordFrame]
    bounds: Int64  # [ranks + 1] where each rank's rows begin
    starts: Int64
    payloads: Int64  # [n] start of the payload
    lengths: Int64  # [n] length of the whole record

    def of_rank(self, rank: int) -> Iterator[tuple[int, RecordFrame]]:
        """Yield (offset in the file, frame) for each record in a rank's file."""
        first, stop = self.bounds[rank : rank + 2].tolist()
        return zip(self.starts[first:stop].tolist(), self.frames[first:stop], strict=True)


@dataclass(frozen=True, slots=True)
class _FrameLiterals:
    """The bytes in a rank's file that are not tensor data, such as zip headers. Each iteration creates them again."""

    frames: _Frames
    rank: int
    head: bytes = b""

    def extents(self, payloads: Int64) -> tuple[Int64, Int64]:
        """Return (starts, lengths) of the literals, without creating their bytes, which would be slow for many files.

        Args:
            payloads: Size in bytes of the tensor data in each record of the file, in order.
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
    """The CRC-32 fields in a rank's file, one for the tensor data of each record."""

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
    """Return the offsets of the CRC in the bytes before the tensor data and in the bytes after it.

    Finds the offsets by inserting two different CRCs and comparing the bytes.
    """
    return _changed(frame.head(0), frame.head(0xFFFFFFFF)), _changed(frame.suffix(0), frame.suffix(0xFFFFFFFF))


def _changed(first: bytes, second: bytes) -> tuple[int, ...]:
    places: list[int] = []
    for at, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other and not (places and at < places[-1] + 4):
            places.append(at)
    return tuple(places)
