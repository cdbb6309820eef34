"""Locates tensors' bytes inside the items of `.distcp` files, on demand and for many items at once.

An item holds one slice of a tensor. Unless the whole file is one safetensors blob, each item is a torch.save zip, about
1.5 KB longer than the slice. This module reads only the first kilobyte of a zip (pickle and storage header) and the
last kilobyte (directory, with the storage's CRC-32). Items with the same dtype, shape and length usually differ only in
the checksums. It is therefore enough to parse one item, and to compare the bytes of the others with it.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import BoxTable
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Codec, Role, SliceArray
from ckptkit.digests import CRC
from ckptkit.errors import (
    UNREADABLE,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.hf.dcp_shards import saved_offsets
from ckptkit.formats.hf.header import read_header
from ckptkit.formats.pickles.objects import decode_zstd
from ckptkit.formats.pickles.tensors import OpaqueTensorError, StoredTensor
from ckptkit.formats.pickles.zip import Archive, Layout, memory_store, read_archive
from ckptkit.storage.store import ReadInto, Store

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]
UInt8 = npt.NDArray[np.uint8]

ENDS = 1024  # bytes read at each end of an item
_BATCH_ROWS = 1 << 16
_BLOCK_ROWS = 1 << 12  # number of items whose two ends are in memory at once
_BLOCK_FILES = 128  # number of files that are open at once
_HEAD = 9  # bytes that identify a safetensors blob: header length, "{"
_ZIP = b"PK\x03\x04"
_FEW = 2  # with fewer items, comparing is not worth it
_MAX_FRAMES = 8  # layouts to try per dtype, shape and length: they differ if pickles name different devices
_SLACK = 1 << 20  # a decompressed item may be this much longer than its tensor


@dataclass(eq=False, slots=True)
class Items:
    """The items of a checkpoint's tensors, as columns with one row per slice. n is the number of slices.

    Attributes:
        ranks: Rank that wrote each file.
        boxes: The box of each slice. A slice is a row of this table.
        files: [n] number of the data file that contains the item.
        places, lengths: [n] byte range of the item in the data file.
        zstd: [n] True if the item is compressed.
        starts, nbytes, digests, digest_starts, digest_nbytes: See `SliceArray`. Filled in when a slice is located.
        checked: [n] True if the slice has a digest.
        strides, codecs: See `SliceArray`. Stored by tensor number.
        opaque: Reason why a tensor's items can't be read as plain memory, by tensor number. Filled in when known.
    """

    store: Store
    paths: Sequence[str]
    ranks: Int32
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    boxes: BoxTable
    files: Int32
    places: Int64
    lengths: Int64
    zstd: npt.NDArray[np.bool_]
    starts: Int64 = field(init=False)
    nbytes: Int64 = field(init=False)
    digests: UInt64 = field(init=False)
    digest_starts: Int64 = field(init=False)
    digest_nbytes: Int64 = field(init=False)
    checked: npt.NDArray[np.bool_] = field(init=False)
    strides: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    codecs: dict[int, dict[int, Codec]] = field(default_factory=dict)
    opaque: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.files)
        self.starts, self.nbytes, self.digest_starts, self.digest_nbytes = (np.zeros(count, np.int64) for _ in range(4))
        self.digests, self.checked = np.zeros(count, np.uint64), np.zeros(count, bool)

    def take(self, keep: npt.NDArray[np.bool_]) -> Items:
        """Return the items of the slices that the mask `keep` selects."""
        return replace(
            self, boxes=self.boxes.take(keep), files=self.files[keep], places=self.places[keep],
            lengths=self.lengths[keep], zstd=self.zstd[keep],
        )  # fmt: skip


_LOCATED = ("starts", "nbytes", "strides", "codecs", "algorithm", "digests", "digest_starts", "digest_nbytes")


class LocatedSlices(SliceArray):
    """The slices of one tensor. The first access to their byte ranges locates a whole batch of tensors.

    Offsets, sizes, files and ranks are known from the start. Other columns are filled in by `__getattr__`. The
    columns are views of those in `Items`.
    """

    __slots__ = ("batch", "items", "rows", "tensor")

    def __init__(self, items: Items, tensor: int, batch: _Batch | None = None) -> None:
        self.items = items
        self.paths = items.paths
        self.tensor = tensor
        self.batch = batch
        self.rows, self.offsets, self.sizes = items.boxes.of(tensor)
        self.files = items.files[self.rows]
        self.ranks = items.ranks[self.files]

    def __len__(self) -> int:
        return len(self.files)

    def under(self, paths: Sequence[str]) -> LocatedSlices:
        moved = LocatedSlices(self.items, self.tensor, self.batch)
        moved.paths = paths
        return moved

    @property
    def opaque(self) -> str:  # type: ignore[override]
        if self.batch is not None:
            self.batch.locate()
        return self.items.opaque.get(self.tensor, "")

    def records(self) -> list[tuple[str, int, int]]:
        items, files = self.items, [self.paths[file] for file in self.files]
        return list(zip(files, items.places[self.rows].tolist(), items.lengths[self.rows].tolist(), strict=True))

    def __getattr__(self, name: str) -> Any:
        """Locate the slices, and fill in the columns that say where their bytes are."""
        if name not in _LOCATED:
            raise AttributeError(name)
        items, rows = self.items, self.rows
        if why := self.opaque:
            raise UnsupportedFormatError(
                f"tensor {items.names[self.tensor]!r:.80} {why}, which ckptkit cannot read. Load it with torch's "
                "FileSystemReader in a job that imports its class, and save a plain tensor (resolve_conj, resolve_neg)."
            )
        self.starts, self.nbytes = items.starts[rows], items.nbytes[rows]
        self.strides, self.codecs = items.strides.get(self.tensor, {}), items.codecs.get(self.tensor, {})
        # Set each column once: another thread must not find None, and skip the check of the bytes.
        checked = len(self) > 0 and bool(items.checked[rows].all())
        self.algorithm, self.digests = (CRC, items.digests[rows]) if checked else (None, None)
        self.digest_starts = items.digest_starts[rows] if checked else None
        self.digest_nbytes = items.digest_nbytes[rows] if checked else None
        return getattr(self, name)


def find_opaque(slices: LocatedSlices) -> bool:
    """Locate a tensor's slices, without the rest of its batch. Return whether only its class can read the tensor."""
    _Locator(slices.items, [slices.tensor]).run()
    return slices.tensor in slices.items.opaque


def item_batches(tensors: Iterable[tuple[Role, SliceArray]]) -> None:
    """Group tensors of the same `Role` into batches of up to 65,536 slices. Each batch is later located as a whole."""
    by_role: dict[Role, _Batch] = {}
    for role, slices in tensors:
        assert isinstance(slices, LocatedSlices)
        batch = by_role.get(role)
        if batch is None or (batch.count and batch.count + len(slices) > _BATCH_ROWS):
            batch = by_role[role] = _Batch(slices.items)
        slices.batch = batch
        batch.tensors.append(slices.tensor)
        batch.count += len(slices)


class _Batch:
    """A group of tensors that are located together."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.tensors: list[int] = []
        self.count = 0
        self._lock = threading.Lock()

    def locate(self) -> None:
        with self._lock:
            if self.tensors:
                _Locator(self.items, self.tensors).run()
                self.tensors = []


class _Locator:
    """Locates the items of some tensors, and fills in the tensors' rows in `Items`."""

    def __init__(self, items: Items, tensors: Sequence[int]) -> None:
        self.items = items
        self.store = items.store
        wanted = np.zeros(len(items.names), bool)
        wanted[tensors] = True
        rows = np.flatnonzero(wanted[items.boxes.owners])
        self.rows = rows[np.lexsort((items.places[rows], items.files[rows]))]

    def run(self) -> None:
        items = self.items
        packed = items.zstd[self.rows]
        for row in self.rows[packed].tolist():
            self._compressed(row)
        rows = self.rows[~packed]
        files, starts = items.files[rows], items.places[rows]
        stops = starts + items.lengths[rows]
        # Items that start at the same byte are either the same item or parts of one safetensors blob.
        bad = (files[1:] == files[:-1]) & (starts[1:] < stops[:-1]) & (starts[1:] != starts[:-1])
        if bad.any():
            row = int(rows[int(np.flatnonzero(bad)[0]) + 1])
            raise CorruptCheckpointError(
                f"{self._path(row)}: the item of {self._name(row)!r:.80} overlaps the one before it."
            )
        blocks = np.cumsum(np.diff(files, prepend=-1) != 0) // _BLOCK_FILES
        for some in np.split(rows, np.flatnonzero(np.diff(blocks)) + 1):
            for at in range(0, len(some), _BLOCK_ROWS):
                self._read(some[at : at + _BLOCK_ROWS])

    # --- what `.metadata` says about an item

    def _tensor(self, row: int) -> int:
        return self.items.boxes.owners.item(row)

    def _name(self, row: int) -> str:
        return self.items.names[self._tensor(row)]

    def _path(self, row: int) -> str:
        return self.items.paths[int(self.items.files[row])]

    def _label(self, row: int) -> str:
        return f"{self._path(row)}: the item of {self._name(row)!r:.80} at byte {int(self.items.places[row])}"

    # --- files that consist of one safetensors blob

    def _safetensors(self, rows: Int64, head: bytes) -> None:
        items, path, start = self.items, self._path(int(rows[0])), int(self.items.places[rows[0]])
        if head[8:9] != b"{":
            raise CorruptCheckpointError(
                f"{path}: expected a torch.save zip or a safetensors header at byte {start}, found neither. "
                "The file is damaged, or belongs to another save."
            )
        if (items.places[rows] != start).any():
            raise CorruptCheckpointError(
                f"{path} is one safetensors file, so .metadata must give all its items the same start, "
                "but their starts differ."
            )
        header = read_header(self.store, path, start=start)
        saved = saved_offsets(header, path)
        for row in rows.tolist():
            name, dtype, (offsets, sizes) = self._name(row), items.dtypes[self._tensor(row)], items.boxes.box(row)
            found = header.tensors.get(name)
            if found is None:
                raise IncompleteCheckpointError(f"{path}: tensor {name!r:.80} is missing, but .metadata lists it.")
            stored = saved.get(name, (0,) * len(found.shape))
            if (stored, found.shape) != (offsets, sizes):
                raise IncompleteCheckpointError(
                    f"{path} has only the part of tensor {name!r:.80} at {list(stored)} of sizes {list(found.shape)}, "
                    f"not the part at {list(offsets)} of sizes {list(sizes)}. In this format, torch stores one part "
                    "per file: the other parts were lost during the save."
                )
            if found.dtype != dtype:
                raise CorruptCheckpointError(f"{path}: tensor {name!r:.80} is {found.dtype}, .metadata says {dtype}.")
            self.items.starts[row], self.items.nbytes[row] = found.start, found.nbytes

    # --- zips

    def _read(self, rows: Int64) -> None:
        """Locate the items in `rows`, which are sorted by file and start.

        Reads both ends of each item. If several items are zips with the same dtype, sizes and length, usually parses
        only one of them.
        """
        items, paths = self.items, self.items.paths
        boxes = items.boxes
        owners, begins, ends = (
            c.tolist() for c in (boxes.owners[rows], boxes.elements[rows], boxes.elements[rows + 1])
        )
        files, starts, lengths = (column[rows].tolist() for column in (items.files, items.places, items.lengths))
        fronts, tails = np.zeros((2, len(rows), ENDS), np.uint8)
        front, tail = fronts.reshape(-1).data, tails.reshape(-1).data
        reads: list[ReadInto] = []
        alike: dict[tuple[str, bytes, int], list[int]] = {}
        for i, (owner, file, start, length) in enumerate(zip(owners, files, starts, lengths, strict=True)):
            at, nbytes = i * ENDS, min(length, ENDS)
            # An item in a safetensors blob may be shorter than the bytes that identify the blob.
            reads.append(ReadInto(paths[file], start, front[at : at + max(nbytes, _HEAD)]))
            reads.append(ReadInto(paths[file], start + length - nbytes, tail[at + ENDS - nbytes : at + ENDS]))
            sizes = boxes.sizes[begins[i] : ends[i]].tobytes()
            alike.setdefault((items.dtypes[owner], sizes, length), []).append(i)
        self.store.read_many(reads)
        is_zip = (fronts[:, :4] == np.frombuffer(_ZIP, np.uint8)).all(axis=1)
        blobs = np.flatnonzero(~is_zip)
        for members in np.split(blobs, np.flatnonzero(np.diff(items.files[rows[blobs]])) + 1) if len(blobs) else ():
            self._safetensors(rows[members], bytes(fronts[members[0]]))
        for same_kind in alike.values():
            left, frames = np.array(same_kind)[is_zip[same_kind]], 0
            while len(left):
                i, left = int(left[0]), left[1:]
                nbytes = min(lengths[i], ENDS)
                frame = self._alone(int(rows[i]), bytes(fronts[i, :nbytes]), bytes(tails[i, ENDS - nbytes :]))
                if frame is not None and len(left) >= _FEW and frames < _MAX_FRAMES:
                    frames += 1
                    same = frame.same(fronts[left], tails[left])
                    fitting = left[same]
                    begins = items.places[rows[fitting]] + frame.begin
                    self._put(rows[fitting], frame.tensor, begins, frame.crcs(tails[fitting]))
                    left = left[~same]

    def _alone(self, row: int, front: bytes, tail: bytes) -> Frame | None:
        """Locate an item by parsing its zip.

        Returns the `Frame` that other items are compared with, or None if there is none (see `Frame.of`).
        """
        path, start, length = self._path(row), int(self.items.places[row]), int(self.items.lengths[row])
        label, tensor = self._label(row), self._tensor(row)
        try:
            found, frame = parse_item(self.store, path, start, front, tail, length, label)
        except (UnsafePickleError, OpaqueTensorError) as error:
            kind = error.kind if isinstance(error, OpaqueTensorError) else self._class_of(path, start, length)
            if kind:
                self.items.opaque[tensor] = f"is a {kind}"
                return None
            name = self.items.names[tensor]
            if repr(name)[:80] in str(error):
                raise
            raise UnsafePickleError(f"tensor {name!r:.80}: {error}") from None
        self._check(row, found, label)
        self._put(np.array([row]), found, found.storage.start, found.storage.crc32 or 0)
        return frame

    def _class_of(self, path: str, start: int, length: int) -> str:
        """Return the name of the tensor subclass that makes an item unreadable, or "" if there is another cause."""
        try:
            read_archive(self.store, path, start, length, unknown="record")
        except OpaqueTensorError as error:
            return error.kind
        except UNREADABLE:
            pass
        return ""

    def _compressed(self, row: int) -> None:
        """Locate a zstd-compressed item by decompressing all of it."""
        items, path, label = self.items, self._path(row), self._label(row)
        start, length = int(items.places[row]), int(items.lengths[row])
        wanted = math.prod(items.boxes.box(row)[1]) * dtype_of(items.dtypes[self._tensor(row)]).itemsize
        data = decode_zstd(self.store.read(path, start, start + length), wanted + _SLACK, file=label)
        found = one_tensor(read_archive(memory_store(label, data), label), label)
        self._check(row, found, label)
        owner = self._tensor(row)
        self.items.codecs.setdefault(owner, {})[row - items.boxes.starts.item(owner)] = Codec("zstd", start, length)
        self._put(np.array([row]), found, found.storage.start, found.storage.crc32 or 0)

    def _check(self, row: int, tensor: StoredTensor, label: str) -> None:
        dtype, sizes = self.items.dtypes[self._tensor(row)], self.items.boxes.box(row)[1]
        if (tensor.dtype, tensor.shape) != (dtype, sizes):
            raise CorruptCheckpointError(
                f"{label} contains {tensor.dtype} {list(tensor.shape)}, but .metadata says {dtype} {list(sizes)}. "
                "Files of two saves may have been mixed."
            )

    def _put(self, rows: Int64, tensor: StoredTensor, begins: Int64 | int, crcs: UInt64 | int) -> None:
        """Fill in `rows`, the rows in `Items` of items that have the layout of `tensor`.

        Args:
            begins: Where each item's storage starts in the file.
            crcs: The CRC-32 of each storage. Without meaning if the CRC-32 of `tensor` is unknown.
        """
        items = self.items
        items.starts[rows], items.nbytes[rows] = begins + tensor.offset * tensor.itemsize, tensor.nbytes
        items.digest_starts[rows], items.digest_nbytes[rows] = begins, tensor.storage.nbytes
        items.checked[rows] = tensor.crc32 is not None
        items.digests[rows] = crcs
        for row in () if tensor.contiguous else rows.tolist():
            owner = self._tensor(row)
            items.strides.setdefault(owner, {})[row - items.boxes.starts.item(owner)] = tensor.strides


# --- parsing one item from its two ends


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed item that other items of the same length are compared with.

    Items with the same dtype, sizes and length usually differ only in the checksums.

    Attributes:
        begin: Byte position of the storage in the item.
        front, tail: Bytes before the storage, and bytes of the zip directory.
        same_front, same_tail: Masks of the bytes that must be equal.
        crc_at: Position of the storage's CRC-32 in `tail`.
    """

    tensor: StoredTensor
    begin: int
    front: UInt8
    tail: UInt8
    same_front: npt.NDArray[np.bool_]
    same_tail: npt.NDArray[np.bool_]
    crc_at: int

    @classmethod
    def of(cls, tensor: StoredTensor, start: int, front: bytes, tail: bytes, layout: Layout) -> Frame | None:
        """Return the frame of an item that starts at byte `start`, given the item's first and last bytes.

        Returns None if `front` does not contain the whole pickle, or `tail` does not contain the whole directory.
        """
        storage, begin = layout.members[f"data/{tensor.storage.key}"], tensor.storage.start - start
        if begin > len(front) or layout.directory_nbytes > len(tail):
            return None
        tail = tail[-layout.directory_nbytes :]
        same_front, same_tail = np.ones(begin, bool), np.ones(len(tail), bool)
        same_front[storage.header + 14 : storage.header + 18] = False  # CRC-32 in a local header (APPNOTE.TXT 4.3.7)
        pos, crc_at = 0, {}
        while tail[pos : pos + 4] == b"PK\x01\x02":  # directory entries (APPNOTE.TXT 4.3.12)
            name, extra, comment = struct.unpack_from("<3H", tail, pos + 28)
            crc_at[tail[pos + 46 : pos + 46 + name].decode()] = pos + 16
            pos += 46 + name + extra + comment
        for name in (storage.name, storage.name.rpartition("data/")[0] + ".data/serialization_id"):
            if name in crc_at:
                same_tail[crc_at[name] : crc_at[name] + 4] = False
        arrays = np.frombuffer(front[:begin], np.uint8), np.frombuffer(tail, np.uint8)
        return cls(tensor, begin, *arrays, same_front, same_tail, crc_at[storage.name])

    def same(self, fronts: UInt8, tails: UInt8) -> npt.NDArray[np.bool_]:
        """Return which items have the layout of the parsed item. Row i of `fronts` and `tails` belongs to item i."""
        tails = tails[:, ENDS - len(self.tail) :]
        front = (fronts[:, : self.begin][:, self.same_front] == self.front[self.same_front]).all(axis=1)
        found: npt.NDArray[np.bool_] = front & (tails[:, self.same_tail] == self.tail[self.same_tail]).all(axis=1)
        return found

    def crcs(self, tails: UInt8) -> UInt64:
        """Return the CRC-32 of each item's storage. `same` must be True for these items."""
        at = ENDS - len(self.tail) + self.crc_at
        return np.ascontiguousarray(tails[:, at : at + 4]).view("<u4").reshape(-1).astype(np.uint64)


class _Ends:
    """A store that has both ends of an item in memory, and reads all other bytes from an underlying store."""

    def __init__(self, store: Store, at: int, front: bytes, tail: bytes, length: int) -> None:
        self.store = store
        self.parts = ((at, front), (at + length - len(tail), tail))

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        for at, data in self.parts:
            if at <= start and start + len(view) <= at + len(data):
                view[:] = data[start - at : start - at + len(view)]
                return
        self.store.read_into(path, start, view)

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        for read in reads:
            self.read_into(read.path, read.start, read.view)


def parse_item(
    store: Store, path: str, start: int, front: bytes, tail: bytes, length: int, label: str
) -> tuple[StoredTensor, Frame | None]:
    """Return the tensor in an item, and a `Frame` (or None), given the bytes at both ends of the item."""
    archive = Archive(cast(Store, _Ends(store, start, front, tail, length)), path, start, length, file=label, tail=ENDS)
    tensor = one_tensor(archive.value(), label)
    return tensor, Frame.of(tensor, start, front, tail, archive.layout)


def one_tensor(value: Any, label: str) -> StoredTensor:
    if not isinstance(value, StoredTensor):
        raise CorruptCheckpointError(f"{label} contains a {type(value).__name__}, but .metadata lists a tensor.")
    return value
