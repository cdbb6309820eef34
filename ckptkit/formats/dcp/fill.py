"""Fills tensors with regions of a checkpoint's tensors, and checks digests.

Reads only the bytes needed, straight into the memory of the tensors where possible.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import distinct, is_dense, row_major
from ckptkit.catalog.entry import Catalog, SliceArray, TensorEntry
from ckptkit.catalog.tiles import pieces
from ckptkit.digests import new_signer
from ckptkit.errors import CheckpointMismatchError, IncompleteCheckpointError
from ckptkit.formats.checks import RecordTable, Verifier, recorded
from ckptkit.formats.dcp.digests import ADVICE, SliceCheck, all_of, batches, check_slices, raise_with_tensor
from ckptkit.formats.dcp.host_bytes import dtype_name, host_view, lies_row_major
from ckptkit.formats.sources import UNITS, Origin, Origins, Range, SourceReader
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.storage.store import Store

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_FEW = 16  # if a tensor has more slices, the slices outside the box are left out first
_SMALL = 1 << 20  # a region of at most this size that must be cast or copied is read into its own buffer
_BATCH = 8 << 20  # bytes that a thread reads, or checks, at a time
_BATCH_REMOTE = 64 << 20  # the same on an object store, where several concurrent requests read the bytes
_TILE = 32 << 20  # buffer size for larger regions


class Verify(str, enum.Enum):
    """Selects the slices that a load checks against their digests."""

    READ = "read"  # only slices that are read whole anyway; this needs no additional reads
    FULL = "full"  # all slices; a slice of which only a part is needed is read once more as a whole
    OFF = "off"


class _Wanted(NamedTuple):
    """A region of a tensor in the checkpoint, and the memory that the load fills with the region's values."""

    entry: TensorEntry
    box: Box
    target: torch.Tensor
    dtype: torch.dtype  # of the entry


@dataclass(frozen=True, slots=True)
class _Reads:
    """The regions of slices to read, as columns with one row per region.

    The rows of `offsets`, `sizes` and `strides` have the same length: tensors with fewer dimensions get leading
    dimensions of size 1.

    Attributes:
        owners: Index of the `_Wanted` that the region fills.
        sources, starts: Position of the region's first byte: an index into `origins` (files, or decompressed parts of
            files), and a byte offset there.
        nbytes: Size of the region in bytes.
        offsets, sizes: Position and sizes of the region in the target, in elements.
        strides: Strides of the region in the source, in elements.
        places: Byte offset of the region's first element in the target, or -1 if the region can't be read straight into
            the target.
        dense: True if the region is contiguous and row-major in the source.
        raw: True if the region is `dense` and the source is not compressed.
        checked: True if the slice's digest covers exactly the region's bytes.
        records: Digests of the slices. Row i belongs to region i. The algorithm is -1 if a slice has no digest.
    """

    origins: Sequence[Origin]
    owners: Int64
    sources: Int64
    starts: Int64
    nbytes: Int64
    offsets: Int64
    sizes: Int64
    strides: Int64
    places: Int64
    dense: Bool
    raw: Bool
    checked: Bool
    records: RecordTable

    def take(self, rows: Int64) -> _Reads:
        columns = {name: getattr(self, name)[rows] for name in self.__slots__[1:-1]}
        return _Reads(self.origins, **columns, records=self.records.take(rows))


class Filler:
    """Collects tensors to fill, then fills all of them with concurrent reads.

    Attributes:
        nbytes: Number of bytes of tensor data read so far.
    """

    def __init__(self, store: Store, *, verify: Verify = Verify.READ, workers: int = 0, cast: bool = False) -> None:
        self.store = store
        self.verify = verify
        self.workers = workers or read_workers(store)
        self.cast = cast
        self.nbytes = 0
        self._wanted: list[_Wanted] = []
        self._planned: _Reads | None = None

    def add(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Schedule reads that fill `target` with the region `box` of a tensor in the checkpoint.

        Raises:
            CheckpointMismatchError: The dtypes differ, and casts are not allowed.
        """
        if not target.numel():
            return
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if dtype is not target.dtype and not self.cast:
            wanted = dtype_name(target.dtype)
            raise CheckpointMismatchError(
                f"{entry.name}: the checkpoint has {entry.dtype}, the target is {wanted}. Pass cast=True to convert."
            )
        self._wanted.append(_Wanted(entry, box, target, dtype))
        self._planned = None

    def add_parts(self, entry: TensorEntry, parts: Iterable[LocalPart], local: torch.Tensor) -> None:
        """Schedule reads that fill `local`, a local tensor that holds `parts` of the full tensor."""
        for part in parts:
            if part.box.numel:  # the shape of an empty local tensor need not match
                is_all = part.box.sizes == local.shape
                self.add(entry, part.box, local if is_all else part_of(local, part.local_offsets, part.box.sizes))

    def add_whole(self, catalog: Catalog, name: str) -> torch.Tensor:
        """Schedule reads of a full tensor into new CPU memory, and return the new tensor.

        Raises:
            IncompleteCheckpointError: The catalog has no tensor `name`.
        """
        entry = catalog.tensors.get(name)
        if entry is None:
            raise IncompleteCheckpointError(
                f"{self.store.url}: objects.json refers to a tensor {name!r} that is missing."
            )
        local = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self.add(entry, Box.whole(entry.shape), local)
        return local

    # --- what will be read

    def plan(self) -> _Reads:
        """Find the regions to read for all scheduled tensors. Reads nothing.

        Raises:
            IncompleteCheckpointError: The slices of a tensor do not cover the region to fill.
        """
        if self._planned is None:
            self._planned = _plan(self._wanted, check=self.verify is not Verify.OFF)
        return self._planned

    def check_sizes(self) -> None:
        """Check that each file exists and is large enough for the scheduled reads. Reads no data.

        Raises:
            IncompleteCheckpointError: A file is missing or truncated. The message names the file and a tensor.
        """
        for path, (stop, name) in self._last().items():
            found = self.store.info(path)
            if found is None:
                raise IncompleteCheckpointError(f"tensor {name!r}: {path} is missing.")
            if found.size < stop:
                raise IncompleteCheckpointError(
                    f"tensor {name!r}: {path} is truncated: it has {found.size} bytes, expected at least {stop}."
                )

    def unchecked(self) -> list[SliceCheck]:
        """Return the slices of which only a part will be read. The load can't check their digests."""
        reads, found = self.plan(), {}
        table = reads.records
        for row in np.flatnonzero((table.algorithms >= 0) & (table.nbytes > 0) & ~reads.checked).tolist():
            origin, start = reads.origins[reads.sources[row]], int(table.starts[row])
            name = self._wanted[reads.owners[row]].entry.name
            found[origin, start] = SliceCheck(
                name, origin, start, int(table.nbytes[row]), int(table.algorithms[row]), int(table.values[row])
            )
        return list(found.values())

    def signature(self) -> bytes:
        """Return a 16-byte hash of the planned reads.

        Two ranks have the same hash if both read the same bytes into tensors with the same dtype and layout.
        """
        reads, found = self.plan(), new_signer()
        # The target's layout is included because it decides how the tensor is sent.
        targets = [(str(wanted.target.dtype), lies_row_major(wanted.target)) for wanted in self._wanted]
        used = [reads.origins[source] for source in distinct(reads.sources).tolist()]
        found.update(repr((used, targets)).encode())
        for column in (reads.owners, reads.sources, reads.starts, reads.offsets, reads.sizes, reads.strides):
            found.update(np.ascontiguousarray(column).data.cast("B"))
        return found.digest()

    def share_out(self, own: int, count: int) -> list[list[torch.Tensor]]:
        """Divide the planned reads into `count` shares of about equal size, and keep only the share with index `own`.

        Ranks whose `signature` is equal divide the reads in the same way. Each share is a contiguous range in the
        files.

        Returns:
            For each share, the views of the targets that the share's reads would fill.
        """
        reads = self.plan()
        reads = reads.take(np.lexsort((reads.starts, reads.sources)))
        before = np.cumsum(reads.nbytes) - reads.nbytes
        # A region goes to the share that its middle byte falls into.
        shares = np.minimum(count - 1, (before + reads.nbytes // 2) * count // max(1, int(reads.nbytes.sum())))
        self._planned = reads.take(np.flatnonzero(shares == own))
        return [[self._part(reads, row) for row in np.flatnonzero(shares == share).tolist()] for share in range(count)]

    def _last(self) -> dict[str, tuple[int, str]]:
        """For each file, return the byte at which the furthest read ends, and the tensor that this read fills.

        If a file was truncated, at least this tensor is incomplete.
        """
        reads, found = self.plan(), dict[str, tuple[int, str]]()
        spans = reads.nbytes // np.prod(reads.sizes, axis=1) * (1 + ((reads.sizes - 1) * reads.strides).sum(axis=1))
        stops = reads.starts + spans
        order = np.lexsort((stops, reads.sources))
        for row in order[np.diff(reads.sources[order], append=-1) != 0].tolist():
            origin, stop = reads.origins[reads.sources[row]], int(stops[row])
            if origin.codec is not None:
                stop = origin.codec.start + origin.codec.nbytes
            if stop >= found.get(origin.path, (0, ""))[0]:
                found[origin.path] = stop, self._wanted[reads.owners[row]].entry.name
        return found

    def _part(self, reads: _Reads, row: int) -> torch.Tensor:
        """Return a view of the part of a target that region `row` fills."""
        target = self._wanted[reads.owners[row]].target
        first = reads.sizes.shape[1] - target.dim()
        return part_of(target, reads.offsets[row, first:].tolist(), reads.sizes[row, first:].tolist())

    # --- reading

    def run(self) -> None:
        """Fill all tensors that were added.

        Raises:
            IntegrityError: Bytes differ from their digest. The message names the tensor and the file.
            IncompleteCheckpointError: A file is missing or too short. The message names the tensor and the file.
        """
        if not self._wanted:
            return
        reads, wanted = self.plan(), self._wanted
        verifier = Verifier(
            reads.records,
            lambda row: f"{reads.origins[reads.sources[row]].path}: {wanted[reads.owners[row]].entry.name!r}",
            ADVICE,
        )
        together = reads.raw & ((reads.places >= 0) | (reads.nbytes < _SMALL))
        rows = np.flatnonzero(together)
        rows = rows[np.lexsort((reads.starts[rows], reads.sources[rows]))]
        most = _BATCH_REMOTE
        if not self.store.asking_costs:
            most = max(_BATCH, int(reads.nbytes[rows].sum()) // (8 * self.workers))
        if self.verify is Verify.FULL:
            self.nbytes += check_slices(self.store, self.unchecked(), self.workers)
        with closing(SourceReader(self.store, reads.origins, verifier, cached=False)) as reader:
            jobs: list[tuple[int, Callable[[], int]]] = [
                (int(reads.nbytes[batch].sum()), partial(self._read_raw, reader, reads, batch))
                for batch in batches(rows, reads.nbytes[rows], most)
            ]
            jobs += [
                (int(reads.nbytes[row]), partial(self._read_region, reader, reads, row))
                for row in np.flatnonzero(~together).tolist()
            ]
            jobs.sort(key=itemgetter(0), reverse=True)
            try:
                self.nbytes += sum(all_of([job for _, job in jobs], self.workers))
            except (FileNotFoundError, IncompleteCheckpointError) as error:
                raise_with_tensor(error, {path: name for path, (_, name) in self._last().items()})
                raise
        self._wanted, self._planned = [], None

    def _read_raw(self, reader: SourceReader, reads: _Reads, rows: Int64) -> int:
        """Read the regions `rows`, which are contiguous and not compressed, in file order. Return their size."""
        ranges: list[Range] = []
        buffers: list[tuple[int, torch.Tensor]] = []
        columns = (reads.owners, reads.sources, reads.starts, reads.nbytes, reads.places, reads.checked)
        lists = (column[rows].tolist() for column in columns)
        for row, owner, source, start, nbytes, place, checked in zip(rows.tolist(), *lists, strict=True):
            wanted = self._wanted[owner]
            if place >= 0:
                view = host_view(wanted.target, writable=True)[place : place + nbytes]
            else:
                buffers.append((row, torch.empty(nbytes, dtype=torch.uint8)))
                view = host_view(buffers[-1][1], writable=True)
            ranges.append(Range(source, start, view, row if checked else -1))
        reader.read_many(ranges)
        for row, buffer in buffers:
            part = self._part(reads, row)
            _copy(part, buffer.view(self._wanted[reads.owners[row]].dtype).view(part.shape))
        return int(reads.nbytes[rows].sum())

    def _read_region(self, reader: SourceReader, reads: _Reads, row: int) -> int:
        """Read a region tile by tile through a buffer, and return the number of bytes read.

        A buffer is needed if the dtypes differ, if the target is on a device, if the region is not contiguous in the
        source or in the target, or if the source is compressed.
        """
        target, dtype = self._part(reads, row), self._wanted[reads.owners[row]].dtype
        ndim = target.dim()
        strides = reads.strides[row, reads.strides.shape[1] - ndim :].tolist()
        source, start, read = int(reads.sources[row]), int(reads.starts[row]), 0
        checked = bool(reads.checked[row])
        whole = Box.whole(tuple(target.shape))
        in_one = checked and not reads.dense[row]  # the digest of a strided slice needs its bytes in one go
        for tile in [whole] if in_one else whole.tiles(max(1, _TILE // dtype.itemsize)):
            buffer = torch.empty(tile.sizes, dtype=dtype, pin_memory=target.device.type == "cuda")
            flat: npt.NDArray[Any] = np.frombuffer(host_view(buffer, writable=True), UNITS[dtype.itemsize])
            at = start + dtype.itemsize * sum(o * s for o, s in zip(tile.offsets, strides, strict=True))
            read += reader.read_region(source, at, strides, flat.reshape(tile.sizes), row if checked else -1)
            _copy(part_of(target, tile.offsets, tile.sizes), buffer)
        if reads.origins[source].codec is not None:
            reader.forget(source)
        return read


def _plan(wanted: Sequence[_Wanted], *, check: bool) -> _Reads:
    """Find the parts of slices to read (see `pieces`), for all regions to fill."""
    tensors = [_near(item) if len(item.entry.slices) > _FEW else item.entry.slices for item in wanted]
    known = [recorded(slices) for slices in tensors]
    counts = np.array([len(slices) for slices in tensors], np.int64)
    total, width = int(counts.sum()), 1 + max((len(item.box.sizes) for item in wanted), default=0)
    nothing, origins = np.zeros(0, np.int64), Origins()
    sources = np.concatenate([nothing, *(origins.of(slices) for slices in tensors)])
    starts = np.concatenate([nothing, *(slices.starts for slices in tensors)])
    lengths = np.concatenate([nothing, *(slices.nbytes for slices in tensors)])
    first_bytes, record_bytes = (np.concatenate([nothing, *(item[column] for item in known)]) for column in (1, 2))
    values = np.concatenate([np.zeros(0, np.uint64), *(item[3] for item in known)])
    strides = {
        first + row: (0,) * (width - len(own)) + own
        for first, slices in zip((np.cumsum(counts) - counts).tolist(), tensors, strict=True)
        for row, own in slices.strides.items()
    }
    # `offsets` and `sizes` describe the slices, `low` and `extent` the regions to fill. Each row has the tensor's
    # number first, then dimensions of size 1, then the tensor's own dimensions.
    tensor_of = np.repeat(np.arange(len(wanted)), counts)
    offsets, sizes = np.zeros((total, width), np.int64), np.ones((total, width), np.int64)
    low, extent = np.zeros((len(wanted), width), np.int64), np.ones((len(wanted), width), np.int64)
    offsets[:, 0], low[:, 0] = tensor_of, np.arange(len(wanted))
    ndims = np.array([len(item.box.sizes) for item in wanted], np.int64)
    for ndim in sorted(set(ndims.tolist()) - {0}):
        alike, rows = np.flatnonzero(ndims == ndim).tolist(), np.flatnonzero(ndims[tensor_of] == ndim)
        offsets[rows, -ndim:] = np.concatenate([tensors[i].offsets for i in alike])
        sizes[rows, -ndim:] = np.concatenate([tensors[i].sizes for i in alike])
        low[alike, -ndim:] = [wanted[i].box.offsets for i in alike]
        extent[alike, -ndim:] = [wanted[i].box.sizes for i in alike]
    joined = SliceArray([""], np.zeros(total, np.int32), starts, lengths, offsets, sizes, strides=strides)
    itemsizes = np.array([item.dtype.itemsize for item in wanted], np.int64)
    found = pieces(joined, low, extent, itemsizes)
    owners, rows, numel = found.boxes, found.rows, found.numel()
    covered = np.bincount(owners, numel, len(wanted)).astype(np.int64)
    for i in np.flatnonzero(covered != np.prod(extent, axis=1))[:1].tolist():
        entry, box = wanted[i].entry, wanted[i].box
        raise IncompleteCheckpointError(
            f"tensor {entry.name!r}: the checkpoint has only {covered[i]} of the {box.numel} elements at "
            f"offsets {list(box.offsets)}, sizes {list(box.sizes)}."
        )
    within, steps = found.offsets - low[owners], row_major(extent)[owners]
    dense = is_dense(found.sizes, found.strides)
    raw = dense & np.array([origin.codec is None for origin in origins.all], bool)[sources[rows]]
    in_place = np.array([w.dtype is w.target.dtype and lies_row_major(w.target) for w in wanted], bool)
    direct = raw & in_place[owners] & is_dense(found.sizes, steps)
    records = RecordTable(
        sources[rows], first_bytes[rows], record_bytes[rows], values[rows],
        np.array([item[0] if check else -1 for item in known], np.int64)[owners], owners,
    )  # fmt: skip
    checked = (records.algorithms >= 0) & (found.sizes == sizes[rows]).all(axis=1)
    checked &= (records.starts == starts[rows]) & (records.nbytes == lengths[rows])
    return _Reads(
        origins.all, owners, records.sources, found.starts, numel * itemsizes[owners], within, found.sizes,
        found.strides, np.where(direct, (within * steps).sum(axis=1) * itemsizes[owners], -1), dense, raw, checked,
        records,
    )  # fmt: skip


def _near(item: _Wanted) -> SliceArray:
    """Return only the slices that overlap the region to fill."""
    slices, box = item.entry.slices, item.box
    high = np.minimum(slices.offsets + slices.sizes, box.stops)
    return slices.take(np.flatnonzero((high > np.maximum(slices.offsets, box.offsets)).all(axis=1)))


def read_workers(store: Store) -> int:
    """Return how many reads a rank runs at once.

    On an object store, this is 8. On other storage, this is twice the rank's share of the CPU cores, at most 8.
    """
    if store.asking_costs:
        return 8
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(8, 2 * (os.cpu_count() or 1) // ranks_here))


def read_whole(catalog: Catalog, store: Store, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read full tensors into CPU memory, check the digests of all slices read, and return the tensors by name."""
    filler = Filler(store, verify=Verify.FULL)
    found = {name: filler.add_whole(catalog, name) for name in names}
    filler.run()
    return found


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a view of a region of the tensor."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        if target.dtype is source.dtype and target.dtype.itemsize == 1:
            target, source = target.view(torch.uint8), source.view(torch.uint8)  # torch cannot copy some float8 dtypes
        target.copy_(source)
