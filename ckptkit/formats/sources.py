"""Reads byte ranges, strided regions and tensor regions from local files, remote files and compressed records.

Bytes with a digest are passed to a `Verifier` as soon as they are read, while they are still in the CPU cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Codec, SliceArray, TensorEntry
from ckptkit.catalog.tiles import pieces
from ckptkit.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingExtraError,
)
from ckptkit.formats.checks import Verifier
from ckptkit.storage.coalesce import BlockReader
from ckptkit.storage.local import is_directory
from ckptkit.storage.store import ReadInto, Store

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]

UNITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""For each itemsize, a numpy dtype that copies elements without changing a bit."""
_PIECE = 512 << 10  # bytes that are read, and then hashed, at once; larger pieces leave the cache on a busy machine
_GAP = 16 << 10  # a gap of at most this size is read and discarded, because a call costs more
_VECTOR = 512  # buffers per preadv call; the system allows up to 1,024
_WINDOW = 64 << 20  # bytes that are read from a remote store, and then hashed, at once
_SPAN = 32 << 20  # largest buffer for a strided region
_FAR = 32 << 10  # runs of a strided region that begin at least this far apart are read without the gaps
_COMPRESSED = 1 << 20  # compressed bytes read at a time
_MOST_OPEN = 256  # descriptors


class Origin(NamedTuple):
    """What slices are read from: a file, or the decoded bytes of a compressed record in a file."""

    path: str
    codec: Codec | None = None


class Range(NamedTuple):
    """A read that fills `view` from byte `start` of an origin. `record` is the index of the range's digest, or -1."""

    origin: int
    start: int
    view: memoryview
    record: int = -1


@dataclass(frozen=True, slots=True)
class EntryMap:
    """For each slice of a tensor, the index of its `Origin` and the index of its digest (-1 if it has none)."""

    entry: TensorEntry
    origins: Int64
    records: Int64


class Origins:
    """Assigns a number to each file or compressed record from which slices are read (see `Origin`)."""

    def __init__(self) -> None:
        self._index: dict[Origin, int] = {}
        self._tables: dict[int, tuple[Sequence[str], Int64]] = {}

    def of(self, slices: SliceArray) -> Int64:
        """Return, for each slice, the number of the `Origin` from which the slice is read."""
        result: Int64 = self.of_paths(slices.paths)[slices.files]
        for row, codec in slices.codecs.items():
            result[row] = self._index.setdefault(Origin(slices.paths[int(slices.files[row])], codec), len(self._index))
        return result

    def of_paths(self, paths: Sequence[str]) -> Int64:
        """Return the `Origin` number of each file. Cached, because all tensors of a catalog share one list of paths."""
        known = self._tables.get(id(paths))
        if known is None:  # `_tables` keeps `paths` alive, so that its id is not reused
            numbers = [self._index.setdefault(Origin(path), len(self._index)) for path in paths]
            known = self._tables[id(paths)] = paths, np.array(numbers, np.int64)
        return known[1]

    @property
    def all(self) -> list[Origin]:
        """The origins, in order of their numbers."""
        return list(self._index)


class Descriptors:
    """Holds open file descriptors by path. If more than 256 are open, closes those that are not in use."""

    def __init__(self, opener: Callable[[str], int]) -> None:
        self._opener = opener
        self._open: dict[str, list[int]] = {}  # path -> [descriptor, users], least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def using(self, path: str) -> Iterator[int]:
        with self._lock:
            held = self._open.pop(path, None) or [self._opener(path), 0]
            held[1] += 1
            self._open[path] = held
            if len(self._open) > _MOST_OPEN:
                unused = [name for name, (_, users) in self._open.items() if not users]
                for name in unused[: len(self._open) - _MOST_OPEN]:
                    os.close(self._open.pop(name)[0])
        try:
            yield held[0]
        finally:
            with self._lock:
                held[1] -= 1

    def close(self) -> None:
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


class SourceReader:
    """Reads byte ranges of a checkpoint's files and compressed records (see `Origin`). Thread-safe.

    Args:
        verifier: Receives the bytes of each range that has a digest record.
        cached: Serve small remote reads from cached blocks. Use this if neighbouring ranges will be read later.
        span: Largest buffer for a strided region, in bytes; 0 for the default.

    Attributes:
        nbytes: Number of bytes read so far. Bytes of compressed records are counted after decompression.
    """

    def __init__(
        self,
        store: Store,
        origins: Sequence[Origin],
        verifier: Verifier | None = None,
        *,
        cached: bool = True,
        span: int = 0,
    ) -> None:
        self._store = store
        self._origins = origins
        self._verifier = verifier
        self._span = span or _SPAN
        self._local = store if is_directory(store) else None
        self.descriptors = Descriptors(self._local.open_file) if self._local is not None else None
        self._remote = BlockReader(store, len({origin.path for origin in origins})) if cached else store
        self._gap = memoryview(bytearray(_GAP))  # for unused bytes between ranges; all threads write to it
        self._decoders: dict[int, _Decoder] = {}
        self._lock = threading.Lock()
        self.nbytes = 0

    @property
    def is_local(self) -> bool:
        return self._local is not None

    def read(self, origin: int, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of origin number `origin`, from byte `start` on."""
        self.read_many([Range(origin, start, view)])

    def read_many(self, ranges: Sequence[Range]) -> None:
        """Fill the view of each range, and check the digests.

        Neighbouring ranges of a local file are read in one call if they are given in file order. Reads of a remote
        store are batched.

        Raises:
            IncompleteCheckpointError: A file is missing or truncated.
            IntegrityError: Bytes differ from their digest.
        """
        nbytes = 0
        for item in ranges:
            nbytes += len(item.view)
        with self._lock:
            self.nbytes += nbytes
        for group in self._groups(ranges):
            first, run = group[0], None
            where = self._origins[first.origin]
            # A single range of a file is read in pieces, each of which is hashed while it is in the CPU cache.
            alone = len(group) == 1 and self.descriptors is not None and where.codec is None
            if alone and self._verifier is not None and first.record >= 0:
                run = self._verifier.begin(first.record, first.start)
            if where.codec is not None:
                self._decode(first.origin, where.codec, first.start, first.view)
            elif self.descriptors is None:
                self._remote.read_many([ReadInto(self._origins[r.origin].path, r.start, r.view) for r in group])
            else:
                at, rest = first.start, [item.view for item in group]
                with self.descriptors.using(where.path) as descriptor:
                    while rest:
                        vector = [rest[0][:_PIECE]] if alone else rest
                        got = os.preadv(descriptor, vector, at)
                        if got == 0:
                            raise IncompleteCheckpointError(
                                f"{where.path} is truncated: it has {os.fstat(descriptor).st_size} bytes, but bytes up "
                                f"to {group[-1].start + len(group[-1].view)} are needed."
                            )
                        if run is not None:
                            run[1].update(vector[0][:got])
                        at += got
                        while rest and got >= len(rest[0]):
                            got -= len(rest.pop(0))
                        if got:
                            rest[0] = rest[0][got:]
            if self._verifier is None:
                continue
            if run is not None:
                self._verifier.end(first.record, run, first.start + len(first.view))
            for item in () if alone else group:
                if item.record >= 0:
                    self._verifier.feed(item.record, item.start, item.view)

    def _groups(self, ranges: Sequence[Range]) -> Iterator[list[Range]]:
        """Yield groups of ranges that are read in one call.

        A group is one of these: neighbouring ranges of a local file, any ranges of remote files, or a single range.
        """
        group: list[Range] = []
        origin = begin = stop = nbytes = 0
        most = _WINDOW if self.descriptors is None else _PIECE
        for item in ranges:
            decoded = self._origins[item.origin].codec is not None
            cut = most if decoded or self.descriptors is None else len(item.view)
            for done in range(0, len(item.view), cut or 1):
                piece = item if len(item.view) <= cut else item._replace(
                    start=item.start + done, view=item.view[done : done + cut]
                )  # fmt: skip
                size, gap = len(piece.view), piece.start - stop
                if self.descriptors is None:
                    joins = not decoded and nbytes + size <= most
                else:
                    joins = not decoded and piece.origin == origin and 0 <= gap <= _GAP
                    joins = joins and piece.start + size - begin <= most and len(group) < _VECTOR
                if group and not joins:
                    yield group
                    group, nbytes = [], 0
                if not group:
                    origin, begin = piece.origin, piece.start
                elif gap and self.descriptors is not None:
                    group.append(Range(origin, stop, self._gap[:gap]))
                group.append(piece)
                stop = piece.start + size
                nbytes += size
            if decoded and group:
                yield group
                group, nbytes = [], 0
        if group:
            yield group

    def read_region(self, origin: int, start: int, strides: Sequence[int], out: Array, record: int = -1) -> int:
        """Read a strided region into `out`, and return the number of bytes read.

        Args:
            start: Byte position of the region's first element.
            strides: Strides in elements.
            record: Index of the digest that covers exactly the bytes from the region's first element to its last.
        """
        sizes, itemsize = out.shape, out.itemsize
        if not out.size:
            return 0
        run, outer = 1, out.ndim  # `run` elements are contiguous; the dimensions before `outer` are not
        while outer and (sizes[outer - 1] == 1 or strides[outer - 1] == run):
            outer -= 1
            run *= sizes[outer]
        far = record < 0 and all(strides[dim] * itemsize >= _FAR for dim in range(outer) if sizes[dim] > 1)
        if out.flags.c_contiguous and (far or run == out.size):
            view, nbytes = out.reshape(-1).view(np.uint8).data, run * itemsize
            starts = np.zeros(1, np.int64)
            for size, stride in zip(sizes[:outer], strides[:outer], strict=True):
                starts = (starts[:, None] + np.arange(size) * stride * itemsize).reshape(-1)
            self.read_many(
                [Range(origin, start + at, view[i * nbytes : (i + 1) * nbytes], record)
                 for i, at in enumerate(starts.tolist())]
            )  # fmt: skip
            return out.nbytes
        span = (1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))) * itemsize
        if span <= self._span or record >= 0:  # short runs are read together with the gaps between them
            data = np.empty(span, np.uint8)
            self.read_many([Range(origin, start, data.data, record)])
            out[...] = strided(data, 0, sizes, strides, itemsize)
            return int(span)
        dim = max((dim for dim in range(out.ndim) if sizes[dim] > 1), key=strides.__getitem__)
        count = min(sizes[dim], -(-span // self._span))
        bounds = [i * sizes[dim] // count for i in range(count + 1)]
        return sum(
            self.read_region(
                origin, start + a * strides[dim] * itemsize, strides, out[(slice(None),) * dim + (slice(a, b),)]
            )
            for a, b in pairwise(bounds)
        )

    def read_box(self, where: EntryMap, box: Box, out: Bytes) -> None:
        """Fill `out` with the row-major bytes of a tensor's region, in the dtype of the stored tensor.

        Raises:
            IncompleteCheckpointError: The tensor's slices do not cover the region, or a file is missing or truncated.
            IntegrityError: Bytes differ from their digest.
        """
        itemsize = dtype_of(where.entry.dtype).itemsize
        offsets, sizes = (np.array([row], np.int64).reshape(1, box.ndim) for row in (box.offsets, box.sizes))
        found = pieces(where.entry.slices, offsets, sizes, itemsize)
        if int(found.numel().sum()) != box.numel:
            raise IncompleteCheckpointError(
                f"tensor {where.entry.name!r}: its slices cover {int(found.numel().sum())} of {box.numel} elements."
            )
        steps = row_major(sizes)
        firsts = ((found.offsets - offsets) * steps).sum(axis=1) * itemsize
        dense = is_dense(found.sizes, found.strides)
        direct = dense & is_dense(found.sizes, np.broadcast_to(steps, found.sizes.shape))
        rows = zip(
            where.origins[found.rows].tolist(), found.starts.tolist(), firsts.tolist(),
            (found.numel() * itemsize).tolist(), np.where(dense, where.records[found.rows], -1).tolist(),
            direct.tolist(), strict=True,
        )  # fmt: skip
        ranges: list[Range] = []
        for i, (origin, start, first, nbytes, record, is_direct) in enumerate(rows):
            if is_direct:
                ranges.append(Range(origin, start, out[first : first + nbytes].data, record))
                continue
            target = strided(out, first, found.sizes[i].tolist(), steps[0].tolist(), itemsize)
            self.read_region(origin, start, found.strides[i].tolist(), target, record)
        self.read_many(ranges)

    def _decode(self, origin: int, codec: Codec, start: int, view: memoryview) -> None:
        # A record is mostly read forwards, so its decoder is kept between reads. Going back requires a new decoder.
        with self._lock:
            decoder = self._decoders.pop(origin, None)
        if decoder is None or decoder.at > start:
            decoder = _Decoder(self._store, self._origins[origin].path, codec)
        decoder.read(start, view)
        with self._lock:
            self._decoders[origin] = decoder

    def forget(self, origin: int) -> None:
        """Drop the decoder of compressed record number `origin`."""
        with self._lock:
            self._decoders.pop(origin, None)

    def close(self) -> None:
        with self._lock:
            self._decoders.clear()
        if self.descriptors is not None:
            self.descriptors.close()


def read_box(store: Store, entry: TensorEntry, box: Box) -> Bytes:
    """Return a region of one tensor as row-major bytes, [*sizes, itemsize]. Does not check digests."""
    origins = Origins()
    where = EntryMap(entry, origins.of(entry.slices), np.full(len(entry.slices), -1, np.int64))
    itemsize = dtype_of(entry.dtype).itemsize
    out = np.empty(box.numel * itemsize, np.uint8)
    with closing(SourceReader(store, origins.all, cached=False)) as reader:
        reader.read_box(where, box, out)
    return out.reshape(*box.sizes, itemsize)


def strided(buffer: Bytes, first: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> Array:
    """Return a strided view of `buffer` that starts at byte `first`. Strides count elements."""
    view: Array = np.ndarray(
        sizes, UNITS[itemsize], buffer=buffer, offset=first, strides=tuple(stride * itemsize for stride in strides)
    )
    return view


_MAX_WINDOW = 128 << 20  # bytes; zstd's default limit, because a damaged or hostile frame may ask for gigabytes


@dataclass(slots=True)
class _Compressed:
    """The bytes [start, stop) of a file as a stream, for the decompressor."""

    store: Store
    path: str
    start: int
    stop: int

    def read(self, nbytes: int) -> bytes:
        data = self.store.read(self.path, self.start, min(self.start + nbytes, self.stop))
        self.start += len(data)
        return data


class ZstdStream:
    """Decompresses bytes from start to end. `source` is bytes, or has the method `read`."""

    def __init__(self, source: Any, *, file: str, read_size: int = _COMPRESSED) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError(
                f"{file} is compressed with zstd. Install it from the checkout with: pip install -e '.[zstd]'"
            ) from error
        self._file = file
        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._stream = decompressor.stream_reader(source, read_size=read_size, read_across_frames=True)

    def readinto(self, view: memoryview) -> int:
        """Fill a part of `view`, and return how many bytes were decompressed; 0 at the end."""
        try:
            got: int = self._stream.readinto(view)
        except self._error as error:
            raise CorruptCheckpointError(f"{self._file}: its zstd data is damaged: {error}.") from error
        return got


class _Decoder:
    """Decodes one compressed record from start to end."""

    def __init__(self, store: Store, path: str, codec: Codec) -> None:
        source = _Compressed(store, path, codec.start, codec.start + codec.nbytes)
        read_size = _COMPRESSED << 4 if store.asking_costs else _COMPRESSED
        self._stream = ZstdStream(source, file=path, read_size=read_size)
        self._path = path
        self.at = 0  # position in the decoded bytes

    def read(self, start: int, view: memoryview) -> None:
        while self.at < start:  # decode and discard
            self._fill(memoryview(bytearray(min(_COMPRESSED, start - self.at))))
        self._fill(view)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            got = self._stream.readinto(view)
            if not got:
                raise IncompleteCheckpointError(
                    f"{self._path}: a zstd record ends at byte {self.at}, but {len(view)} more are needed."
                )
            self.at += got
            view = view[got:]
