"""Fills tensors from a checkpoint's slices. Reads only the bytes needed, straight into the tensors' memory where
possible, and checks digests."""

from __future__ import annotations

import enum
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.dtypes import DTYPES
from ckptkit.catalog.entry import Codec, Digest, TensorEntry
from ckptkit.digests import new_signer
from ckptkit.errors import CheckpointMismatchError, IncompleteCheckpointError
from ckptkit.formats.dcp.digests import (
    Running,
    SliceCheck,
    all_of,
    check_bytes,
    read_pieces,
)
from ckptkit.formats.dcp.host_bytes import host_view, lies_row_major
from ckptkit.formats.pickles.objects import decode_zstd
from ckptkit.storage.store import ReadInto, Store

_FEW = 16  # for at most this many slices, a loop is faster than numpy

_SMALL = 1 << 20  # a tensor of at most this size that must be cast or copied is read whole into its own buffer
_BATCH = 8 << 20
_BATCH_REMOTE = 64 << 20  # read by several concurrent requests
_TILE = 32 << 20  # buffer size for larger regions
_RUN = 32 << 10  # shorter runs of needed bytes are read together with the gaps between them


class Verify(str, enum.Enum):
    """The slices to check against their digests during a load."""

    READ = "read"  # slices that are read whole: needs no additional reads
    FULL = "full"  # all slices: even a slice that is needed only in part is read whole
    OFF = "off"


def read_workers(store: Store) -> int:
    """Return how many reads a rank does at once: 8 on an object store, else twice its share of the cores, up to 8."""
    if store.asking_costs:
        return 8
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(8, 2 * (os.cpu_count() or 1) // ranks_here))


@dataclass(slots=True, eq=False)  # not frozen: creating one would take twice as long, and a model has thousands
class _Fill:
    """A planned read of the region [offsets, offsets + sizes) of a slice into `target`.

    Attributes:
        needed: How many of the slice's `nbytes` bytes the region needs.
        direct: Whether the file's bytes can be read straight into the target.
    """

    name: str
    path: str
    start: int
    nbytes: int
    itemsize: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    digest: Digest | None
    codec: Codec | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    needed: int
    target: torch.Tensor
    direct: bool

    @property
    def whole(self) -> bool:
        return self.sizes == self.shape

    @property
    def checkable(self) -> bool:
        """Whether the digest covers exactly this slice's bytes."""
        d = self.digest
        return d is not None and d.start == self.start and d.nbytes == self.nbytes


class Filler:
    """Collects tensors to fill, then fills all of them with concurrent reads.

    Attributes:
        nbytes: How many bytes of tensor data were read.
    """

    def __init__(self, store: Store, *, verify: Verify = Verify.READ, workers: int = 0, cast: bool = False) -> None:
        self.store = store
        self.verify = verify
        self.workers = workers or read_workers(store)
        self.cast = cast
        self.nbytes = 0
        self._fills: list[_Fill] = []

    def add(self, entry: TensorEntry, row: int, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        """Schedule a read from a tensor's slice `row` into `target`, starting at `offsets` within the slice.

        Raises:
            CheckpointMismatchError: The dtypes differ, and casts are not allowed.
        """
        numel = target.numel()
        if not numel:
            return
        slices, itemsize = entry.slices, DTYPES[entry.dtype].itemsize
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if dtype is not target.dtype and not self.cast:
            wanted = str(target.dtype).removeprefix("torch.")
            raise CheckpointMismatchError(
                f"{entry.name}: the checkpoint has {entry.dtype}, the target is {wanted}. Pass cast=True to convert."
            )
        path, start, nbytes = slices.record(row)
        self._fills.append(
            _Fill(
                entry.name,
                path,
                start,
                nbytes,
                itemsize,
                dtype,
                tuple(slices.sizes[row].tolist()),
                slices.strides.get(row),
                None if self.verify is Verify.OFF else slices.digest(row),
                slices.codecs.get(row),
                offsets,
                tuple(target.shape),
                numel * itemsize,
                target,
                dtype is target.dtype and lies_row_major(target),
            )
        )

    def unchecked(self) -> list[SliceCheck]:
        """Return the slices that the load will read only in part, so that it can't check their digests."""
        found = {
            (fill.path, d.start): SliceCheck(fill.name, fill.path, d.start, d.nbytes, d)
            for fill in self._fills
            if (d := fill.digest) is not None and d.nbytes and fill.codec is None
            if not (fill.whole and fill.checkable)
        }
        return list(found.values())

    def signature(self) -> bytes:
        """Return a 16-byte hash of the planned reads. Two ranks have the same hash if they read the same bytes into
        tensors with the same dtype and layout."""
        found = new_signer()
        for fill in self._fills:
            # The codec is included because it decides what `start` is relative to. The target's layout is included
            # because it decides how the tensor is sent.
            where = fill.path, fill.start, fill.nbytes, fill.offsets, fill.sizes, fill.strides, fill.codec
            found.update(repr((where, str(fill.target.dtype), lies_row_major(fill.target))).encode())
        return found.digest()

    def share_out(self, own: int, count: int) -> list[list[torch.Tensor]]:
        """Divide the reads into `count` shares and keep only share `own`. Return each share's tensors.

        Ranks with equal signatures get the same shares in the same order. Each share is a contiguous range in the
        files.
        """
        fills = sorted(self._fills, key=lambda fill: (fill.path, fill.start, fill.offsets))  # stable
        whole, before = max(1, sum(fill.needed for fill in fills)), 0
        shares: list[list[_Fill]] = [[] for _ in range(count)]
        for fill in fills:
            # A tensor goes to the share that its middle byte falls into.
            shares[min(count - 1, (before + fill.needed // 2) * count // whole)].append(fill)
            before += fill.needed
        self._fills = shares[own]
        return [[fill.target for fill in share] for share in shares]

    def last(self) -> dict[str, tuple[int, str]]:
        """Return the end of the last read in each file, and the tensor that this read fills.

        The tensor is incomplete if the file was truncated.
        """
        found: dict[str, tuple[int, str]] = {}
        for fill in self._fills:
            stop = fill.start + fill.nbytes if fill.codec is None else fill.codec.start + fill.codec.nbytes
            if stop >= found.get(fill.path, (0, ""))[0]:
                found[fill.path] = stop, fill.name
        return found

    def run(self) -> float:
        """Fill all tensors that were added, and return how many seconds it took.

        Raises:
            IntegrityError: Bytes differ from their digest. The message names the tensor and the file.
            IncompleteCheckpointError: A file is too short.
        """
        started = time.perf_counter()
        near = not self.store.asking_costs
        # Requests to an object store are expensive. A large tensor is read by several concurrent requests, and small
        # adjacent tensors share one request.
        direct_most = _BATCH_REMOTE if not near else 1 << 62
        lying: list[tuple[_Fill, int]] = []
        jobs: list[tuple[int, Callable[[], int]]] = []
        for fill in self._fills:
            at = _start_in_file(fill)
            full = self.verify is Verify.FULL and not fill.whole and fill.digest is not None
            if at is not None and not full and fill.needed < (direct_most if fill.direct else _SMALL):
                lying.append((fill, at))
            elif at is None or full or not fill.direct:
                jobs.append((fill.needed, partial(self._through_buffer, fill, full)))
            else:
                jobs.append((fill.needed, partial(self._read_run, [(fill, at)])))
        lying.sort(key=lambda item: (item[0].path, item[1]))
        if near:
            most = max(_BATCH, sum(fill.needed for fill, _ in lying) // (8 * self.workers))
            jobs += [(nbytes, partial(self._read_run, batch)) for nbytes, batch in _batches(lying, most, one_file=True)]
        else:
            # A batch may span files. The store derives its request size from the batch size, so small batches would
            # mean small requests (a few megabytes).
            found = _batches(lying, _BATCH_REMOTE, one_file=False)
            jobs += [(_BATCH_REMOTE, partial(self._joined, batch)) for _, batch in found]
        self._fills = []
        jobs.sort(key=lambda job: -job[0])
        if self.workers > 1 and len(jobs) > 1:
            self.nbytes += sum(all_of([job for _, job in jobs], self.workers))
        else:
            for _, job in jobs:
                self.nbytes += job()
        return time.perf_counter() - started

    # --- reads straight into the target's memory

    def _read_run(self, batch: Sequence[tuple[_Fill, int]]) -> int:
        """Read a batch of tensors from one file, in file order, and hash the bytes while reading. Tensors that can't be
        read in place go through a buffer."""
        parts, into = [], [f.target if f.direct else torch.empty(f.sizes, dtype=f.dtype) for f, _ in batch]
        for (fill, at), tensor in zip(batch, into, strict=True):
            running = Running(fill.digest if fill.whole and fill.checkable else None, fill.path, fill.name)
            parts.append((at, host_view(tensor, writable=True), running))
        read_pieces(self.store, batch[0][0].path, parts)
        for (fill, _), tensor, (_, _, running) in zip(batch, into, parts, strict=True):
            running.check()
            if tensor is not fill.target:
                _copy(fill.target, tensor)
        return sum(len(view) for _, view, _ in parts)

    def _joined(self, batch: Sequence[tuple[_Fill, int]]) -> int:
        """Read a batch of tensors from an object store, and check their digests. Tensors that can't be read in place go
        through a buffer."""
        into = [f.target if f.direct else torch.empty(f.sizes, dtype=f.dtype) for f, _ in batch]
        views = [host_view(tensor, writable=True) for tensor in into]
        reads = [ReadInto(fill.path, at, view) for (fill, at), view in zip(batch, views, strict=True)]
        self.store.read_many(reads, workers=1)
        for (fill, _), view in zip(batch, views, strict=True):
            if fill.whole and fill.checkable:
                check_bytes(fill.digest, view, fill.path, fill.name)
        for (fill, _), tensor in zip(batch, into, strict=True):
            if tensor is not fill.target:
                _copy(fill.target, tensor)
        return sum(map(len, views))

    # --- reads through a buffer: casts, other devices, columns, strides, codecs

    def _through_buffer(self, fill: _Fill, full: bool) -> int:
        if fill.codec is not None or full or (fill.strides is not None and fill.whole):
            return self._whole_slice(fill)
        if fill.whole:
            return self._streamed(fill)
        read = 0
        region = Box(fill.offsets, fill.sizes)
        for tile in region.tiles(max(1, _TILE // fill.itemsize)):
            read += sum(self._span(fill, box) for box in _spans(tile, fill))
        return read

    def _whole_slice(self, fill: _Fill) -> int:
        """Read and check the whole slice, then copy the region out of it."""
        if fill.codec is not None:
            packed = self.store.read(fill.path, fill.codec.start, fill.codec.start + fill.codec.nbytes)
            raw = memoryview(
                decode_zstd(packed, fill.start + fill.nbytes + (64 << 20), file=f"{fill.path} ({fill.name})")
            )
            if len(raw) < fill.start + fill.nbytes:
                raise IncompleteCheckpointError(
                    f"{fill.path}: the record of tensor {fill.name!r} decodes to too few bytes."
                )
            if fill.digest is not None:
                covered = raw[fill.digest.start : fill.digest.start + fill.digest.nbytes]
                check_bytes(fill.digest, covered, fill.path, fill.name)
            data = bytearray(raw[fill.start : fill.start + fill.nbytes])
            buffer, read = torch.frombuffer(data, dtype=torch.uint8), fill.codec.nbytes
        else:
            buffer, read = torch.empty(fill.nbytes, dtype=torch.uint8), fill.nbytes
            state = Running(fill.digest if fill.checkable else None, fill.path, fill.name)
            read_pieces(self.store, fill.path, [(fill.start, host_view(buffer, writable=True), state)])
            state.check()
        strides = fill.strides or row_major_strides(fill.shape)
        offset = sum(o * s for o, s in zip(fill.offsets, strides, strict=True))
        _copy(fill.target, buffer.view(fill.dtype).as_strided(fill.sizes, strides, offset))
        return read

    def _streamed(self, fill: _Fill) -> int:
        """Read a whole row-major slice tile by tile."""
        state = Running(fill.digest if fill.checkable else None, fill.path, fill.name)
        at = fill.start
        whole = Box.whole(fill.shape)
        for tile in whole.tiles(max(1, _TILE // fill.itemsize)):
            buffer = _buffer(tile.sizes, fill)
            view = host_view(buffer, writable=True)
            read_pieces(self.store, fill.path, [(at, view, state)])
            at += len(view)
            _copy(part_of(fill.target, tile.offsets, tile.sizes), buffer)
        state.check()
        return fill.nbytes

    def _span(self, fill: _Fill, box: Box) -> int:
        """Read a box of the slice. Long contiguous runs are read one by one, and short runs together with the gaps
        between them."""
        strides = fill.strides or row_major_strides(fill.shape)
        at = fill.start + fill.itemsize * sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        target = part_of(fill.target, tuple(o - f for o, f in zip(box.offsets, fill.offsets, strict=True)), box.sizes)
        run = fill.itemsize  # bytes of each of the box's contiguous runs
        for size, extent in zip(reversed(box.sizes), reversed(fill.shape), strict=True):
            run *= size
            if size != extent:
                break
        if run >= _RUN and fill.strides is None:
            buffer = _buffer(box.sizes, fill)
            view = host_view(buffer, writable=True)
            starts = _run_starts(box, strides, run // fill.itemsize)
            reads = [
                ReadInto(fill.path, at + s * fill.itemsize, view[i * run : (i + 1) * run]) for i, s in enumerate(starts)
            ]
            self.store.read_many(reads, workers=1)
            _copy(target, buffer)
            return len(view)
        numel = 1 + sum((n - 1) * s for n, s in zip(box.sizes, strides, strict=True))
        buffer = torch.empty(numel * fill.itemsize, dtype=torch.uint8)
        self.store.read_into(fill.path, at, host_view(buffer, writable=True))
        _copy(target, buffer.view(fill.dtype).as_strided(box.sizes, strides))
        return buffer.numel()


def _start_in_file(fill: _Fill) -> int | None:
    """Return where the region starts in the file, or None if its bytes there are not contiguous and row-major."""
    if fill.codec is not None or fill.strides is not None:
        return None
    if fill.whole:
        return fill.start
    box = Box(fill.offsets, fill.sizes)
    return fill.start + fill.itemsize * box.flat_start(fill.shape) if box.is_contiguous_in(fill.shape) else None


def _batches(
    lying: Sequence[tuple[_Fill, int]], most: int, *, one_file: bool
) -> Iterator[tuple[int, list[tuple[_Fill, int]]]]:
    """Yield (number of bytes, reads) per batch of about `most` bytes, in file order."""
    batch: list[tuple[_Fill, int]] = []
    nbytes = 0
    for item in lying:
        if batch and (nbytes >= most or (one_file and item[0].path != batch[0][0].path)):
            yield nbytes, batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += item[0].needed
    if batch:
        yield nbytes, batch


def _spans(tile: Box, fill: _Fill) -> Iterator[Box]:
    """Split a tile into boxes so that each box, with the gaps between its runs, fits into the buffer."""
    strides = fill.strides or row_major_strides(fill.shape)
    numel = 1 + sum((n - 1) * s for n, s in zip(tile.sizes, strides, strict=True))
    dim = next((d for d, n in enumerate(tile.sizes) if n > 1), None)
    if numel * fill.itemsize <= _TILE or dim is None:
        yield tile
        return
    count = min(tile.sizes[dim], -(-numel * fill.itemsize // _TILE))
    for part in range(count):
        start, stop = part * tile.sizes[dim] // count, (part + 1) * tile.sizes[dim] // count
        offsets = (*tile.offsets[:dim], tile.offsets[dim] + start, *tile.offsets[dim + 1 :])
        cut = Box(offsets, (*tile.sizes[:dim], stop - start, *tile.sizes[dim + 1 :]))
        yield from _spans(cut, fill)


def _run_starts(box: Box, strides: Sequence[int], run: int) -> list[int]:
    """Return each run's first position, relative to the box's first element, in row-major order."""
    starts, left = [0], box.numel // run
    for size, stride in zip(box.sizes, strides, strict=True):
        if left <= 1:
            break
        starts = [s + i * stride for s in starts for i in range(size)]
        left //= size
    return starts


def _buffer(sizes: tuple[int, ...], fill: _Fill) -> torch.Tensor:
    pin = fill.target.device.type == "cuda"
    return torch.empty(sizes, dtype=fill.dtype, pin_memory=pin)


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a view of a box within a tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        if target.dtype is source.dtype and target.dtype.itemsize == 1:
            target, source = target.view(torch.uint8), source.view(torch.uint8)  # torch cannot copy some float8 dtypes
        target.copy_(source)


def add_box(filler: Filler, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
    """Schedule the reads that fill `target` with a box of the tensor. A region that several slices hold is read only
    once.

    Raises:
        IncompleteCheckpointError: The slices do not cover the whole box.
    """
    if not target.numel():
        return
    seen: set[Box] = set()
    covered = 0
    offsets, sizes = entry.slices.offsets, entry.slices.sizes
    rows: Sequence[int] = range(len(offsets))
    if len(offsets) > _FEW:
        high = np.minimum(offsets + sizes, box.stops)
        found = np.flatnonzero((high > np.maximum(offsets, box.offsets)).all(axis=1))
        rows, offsets, sizes = found.tolist(), offsets[found], sizes[found]
    for row, *place in zip(rows, offsets.tolist(), sizes.tolist(), strict=True):
        offset, size = map(tuple, place)
        exact = offset == box.offsets and size == box.sizes  # the usual case: sharded as it was saved
        shared = box if exact else Box(offset, size).intersect(box)
        if shared is None or shared in seen:
            continue  # outside the box, or a replica
        seen.add(shared)
        covered += shared.numel
        part = target if shared is box else part_of(target, shared.relative_to(box).offsets, shared.sizes)
        filler.add(entry, row, tuple(map(operator.sub, shared.offsets, offset)), part)
    if covered != target.numel():
        raise IncompleteCheckpointError(
            f"tensor {entry.name!r}: the checkpoint has only {covered} of the {target.numel()} elements at "
            f"offsets {list(box.offsets)}, sizes {list(box.sizes)}."
        )
