"""Tensors that are not copied as runs: gathered tile by tile, cast or permuted in memory, written dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.offline.copying.casts import cast_into
from ckptkit.offline.copying.gather import Gatherer, strided
from ckptkit.offline.copying.jobs import BandJob, BandTarget, EntryMap, TileJob
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.offline.copying.pool import Job, Worker
from ckptkit.offline.copying.sinks import LocalSink
from ckptkit.offline.copying.streams import BoxDigest, Digested

__all__ = ["BoxCopier", "tile_numel"]

Bytes = npt.NDArray[np.uint8]


def tile_numel(tensor: OutputTensor, maps: dict[str, EntryMap], small: int, big: int, *, gatherer: Gatherer) -> int:
    """Return how many elements of a target to make at once: few, unless each tile reads all over the source."""
    if isinstance(tensor, ComputedTensor):
        rows = gatherer.rows_at_once(tensor, 2 * big)
        return max(1, tensor.numel // max(1, tensor.shape[0] if tensor.shape else 1) * rows)
    entries = [maps[key].entry for key in tensor.sources]
    widest = max([dtype_of(tensor.dtype).itemsize, *(dtype_of(entry.dtype).itemsize for entry in entries)])
    scattered = any(part.axes and not part.unfold for part in tensor.parts)
    scattered = scattered or any(entry.slices.strides for entry in entries)
    return max(1, (big if scattered else small) // widest)


class BoxCopier:
    """Writes boxes of tensors to a local destination. Safe for several threads.

    Attributes:
        tile_nbytes: Of source elements that are held at once; `big_nbytes` where small tiles would read
            the source many times over.
        digested: Takes the digests of boxes that are written whole and in order.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        maps: dict[str, EntryMap],
        sink: LocalSink,
        *,
        tile_nbytes: int,
        big_nbytes: int,
        done: Callable[[int], None],
        digested: Digested | None = None,
    ) -> None:
        self._gatherer = gatherer
        self._maps = maps
        self._sink = sink
        self._tile_nbytes = tile_nbytes
        self._big_nbytes = big_nbytes
        self._done = done
        self._digested = digested

    def jobs(self, bands: Sequence[BandJob], tiles: Sequence[TileJob]) -> list[Job]:
        return [*(partial(self._do_band, band) for band in bands), *(partial(self._do_tile, tile) for tile in tiles)]

    def _do_tile(self, job: TileJob, worker: Worker) -> None:
        itemsize = dtype_of(job.tensor.dtype).itemsize
        at = job.start
        numel = tile_numel(job.tensor, self._maps, self._tile_nbytes, self._big_nbytes, gatherer=self._gatherer)
        for tile in job.box.tiles(numel):
            out = worker.room(tile.numel * itemsize)
            self._gatherer.make_box(job.tensor, tile, out)
            self._sink.write(job.file, at, [out.data])
            at += len(out)
            self._done(len(out))

    def _do_band(self, job: BandJob, worker: Worker) -> None:
        """Walk over the rows of a source once; each tile goes to all the boxes that want a part of it."""
        entry = self._maps[job.key].entry
        itemsize = dtype_of(entry.dtype).itemsize
        first = min(target.box.offsets[0] for target in job.targets)
        stop = max(target.box.stops[0] for target in job.targets)
        rows = Box((first, *(0,) * (len(entry.shape) - 1)), (stop - first, *entry.shape[1:]))
        small = max(self._tile_nbytes, min(self._big_nbytes, len(entry.slices) << 16))  # 64 KiB a read, or more
        nbytes = self._big_nbytes if entry.slices.strides else small
        writers = [self._writer(target) for target in job.targets]
        for tile in rows.tiles(max(1, nbytes // itemsize)):
            data = worker.room(tile.numel * itemsize)
            self._gatherer.read_box(job.key, tile, data)
            for target, write in zip(job.targets, writers, strict=True):
                shared = tile.intersect(target.box)
                if shared is not None:
                    write(shared, _cut(data, tile, shared, target, entry.dtype))
            self._done(len(data))

    def _writer(self, target: BandTarget) -> Callable[[Box, Bytes], None]:
        """What writes the parts of a box, which come in order: tiles are cut row-major, so each is a run of the box."""
        itemsize = dtype_of(target.dtype).itemsize
        if self._digested is None or not target.whole:
            sink = self._sink

            def write(part: Box, data: Bytes) -> None:
                at = part.relative_to(target.box).flat_start(target.box.sizes) * itemsize
                sink.write(target.file, target.start + at, [data.data])

            return write
        whole = BoxDigest(self._sink, self._digested, target.file, target.start)
        left = target.box.numel * itemsize

        def write_next(part: Box, data: Bytes) -> None:
            nonlocal left
            whole.write(data.data)
            left -= len(data)
            if not left:
                whole.finish()

        return write_next


def _cut(data: Bytes, tile: Box, shared: Box, target: BandTarget, source_dtype: str) -> Bytes:
    """Return a box that lies in a tile, row-major, in the dtype of the target."""
    itemsize = dtype_of(source_dtype).itemsize
    inside = shared.relative_to(tile)
    first = inside.flat_start(tile.sizes) * itemsize
    if inside.is_contiguous_in(tile.sizes):
        part = data[first : first + shared.numel * itemsize]
    else:
        view = strided(data, first, shared.sizes, row_major_strides(tile.sizes), itemsize)
        part = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
    if target.dtype != source_dtype:
        made = np.empty(shared.numel * dtype_of(target.dtype).itemsize, np.uint8)
        cast_into(part, made, source_dtype, target.dtype)
        part = made
    return part
