"""Where the bytes of each tensor lie inside its item of a `.distcp` file: found on demand, many items at once.

An item is a torch.save zip of its own, about 1.5 KB longer than the tensor in it; a file may instead be one
safetensors blob. For a zip, its first kilobyte (pickle, header of the storage) and its last (the directory,
with the CRC-32 of the storage) are read; neighbours share a read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Codec, Role, SliceArray
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError
from ckptkit.formats._torch_records import StoredTensor
from ckptkit.formats._torch_zip import TorchArchive, read_archive
from ckptkit.formats.dcp_frames import Frame, FramedItems
from ckptkit.formats.dcp_items import FRONT_BYTES, TAIL_BYTES, ItemEnds, ItemParser
from ckptkit.formats.objects import memory_store, zstd_chunks
from ckptkit.formats.safetensors_dcp import saved_offsets
from ckptkit.formats.safetensors_parse import SafetensorsHeader, read_header
from ckptkit.storage.store import ReadInto, Store

__all__ = ["Items", "LocatedSlices", "item_batches"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

_BATCH_ROWS = 1 << 16
_BLOCK_ROWS = 1 << 13  # items whose ends are held at once
_LAZY = frozenset(("starts", "nbytes", "algorithm", "digests", "digest_starts", "digest_nbytes", "strides", "codecs"))
_BLOCK_FILES = 128  # files that are open at once
_HEAD = 9
_ZIP = b"PK\x03\x04"
_FEW = 16  # items for which numpy is worth its fixed cost
_MAX_FRAMES = 8
_SLACK = 1 << 20  # what an item may be longer than its tensor, when it is decompressed


@dataclass(frozen=True, slots=True)
class Items:
    """Every tensor item of a checkpoint as columns; rows [bounds[i], bounds[i + 1]) are those of tensor i."""

    store: Store
    paths: Sequence[str]
    files: Int32
    starts: Int64
    lengths: Int64
    zstd: npt.NDArray[np.bool_]
    bounds: Int64


class LocatedSlices(SliceArray):
    """Slices whose byte ranges are found when one of them is asked for, together with those of its batch.

    Boxes, files and ranks are there from the start; `starts`, `nbytes`, `strides`, digests and codecs are not.
    """

    __slots__ = ("batch", "dtype", "items", "name", "rows")

    def __init__(
        self, name: str, dtype: str, items: Items, rows: Int64, offsets: Int64, sizes: Int64, ranks: Int32
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.items = items
        self.rows = rows
        self.paths = items.paths
        self.files = items.files[rows]
        self.offsets = offsets
        self.sizes = sizes
        self.ranks = ranks
        self.batch: _Batch | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getattr__(self, name: str) -> Any:
        # Reached only where a slot of the base class is still empty.
        if name not in _LAZY or self.batch is None:
            raise AttributeError(name)
        self.batch.locate()
        return object.__getattribute__(self, name)


def item_batches(items: Items, tensors: Iterable[tuple[Role, LocatedSlices]]) -> None:
    """Group the slices so that those of one role are located some ten thousand at a time."""
    by_role: dict[Role, _Batch] = {}
    for role, slices in tensors:
        batch = by_role.get(role)
        if batch is None or (batch.count and batch.count + len(slices) > _BATCH_ROWS):
            batch = by_role[role] = _Batch(items)
        batch.add(slices)


class _Batch:
    def __init__(self, items: Items) -> None:
        self.items = items
        self.members: list[LocatedSlices] = []
        self.count = 0
        self._lock = threading.Lock()

    def add(self, slices: LocatedSlices) -> None:
        slices.batch = self
        self.members.append(slices)
        self.count += len(slices)

    def locate(self) -> None:
        """Fill in the columns of all members. Does nothing the second time."""
        with self._lock:
            if self.members:
                _Locator(self.items, self.members).run()
                self.members = []


@dataclass(slots=True)
class _Found:
    """The columns that are being found, one row an item of the batch."""

    starts: Int64
    nbytes: Int64
    crc: npt.NDArray[np.uint64]
    crc_starts: Int64
    crc_nbytes: Int64
    checked: npt.NDArray[np.bool_]
    templates: Int64  # index of the parsed pickle of a framed item; -1 for others, which were checked one by one
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    codecs: dict[int, Codec] = field(default_factory=dict)

    @classmethod
    def empty(cls, n: int) -> _Found:
        zeros = [np.zeros(n, np.int64) for _ in range(4)]
        return cls(
            zeros[0], zeros[1], np.zeros(n, np.uint64), zeros[2], zeros[3], np.zeros(n, np.bool_), np.full(n, -1)
        )

    def put(self, row: int, tensor: StoredTensor) -> None:
        storage = tensor.storage
        self.starts[row], self.nbytes[row] = tensor.start, tensor.nbytes
        self.crc_starts[row], self.crc_nbytes[row] = storage.start, storage.nbytes
        if storage.crc32 is not None:
            self.crc[row], self.checked[row] = storage.crc32, True
        if not tensor.contiguous:
            self.strides[row] = tensor.strides


class _Locator:
    def __init__(self, items: Items, members: Sequence[LocatedSlices]) -> None:
        self.store = items.store
        self.paths = items.paths
        self.members = members
        rows = np.concatenate([m.rows for m in members])
        self.files = items.files[rows]
        self.starts = items.starts[rows]
        self.lengths = items.lengths[rows]
        self.zstd = items.zstd[rows]
        self.bounds = np.cumsum([0, *(len(m) for m in members)])
        self.found = _Found.empty(len(rows))
        self.parser = ItemParser()
        self.frames: list[Frame] = []
        self.templates: list[StoredTensor] = []

    def run(self) -> None:
        order = np.lexsort((self.starts, self.files))
        plain: list[tuple[str, Int64]] = []
        for rows in _by_file(order, self.files):
            path = self.paths[int(self.files[rows[0]])]
            for row in rows[self.zstd[rows]].tolist():
                self._compressed(row, path)
            if not self.zstd[rows].all():
                plain.append((path, rows[~self.zstd[rows]]))
        zips: list[Int64] = []
        for (path, rows), head in zip(plain, self._heads(plain), strict=True):
            if self._is_safetensors(path, rows, head):
                self._safetensors(path, rows)
            else:
                zips.append(rows)
        for block in _blocks(zips):
            self._zips(block)
        self._hand_out()

    def _heads(self, files: Sequence[tuple[str, Int64]]) -> list[bytes]:
        """The first bytes of the first item of each file."""
        heads = [bytearray(_HEAD) for _ in files]
        reads = [
            ReadInto(path, int(self.starts[rows[0]]), memoryview(head))
            for (path, rows), head in zip(files, heads, strict=True)
        ]
        for begin in range(0, len(reads), _BLOCK_FILES):
            self.store.read_many(reads[begin : begin + _BLOCK_FILES])
        return [bytes(head) for head in heads]

    def _member(self, row: int) -> tuple[LocatedSlices, int]:
        member = int(np.searchsorted(self.bounds, row, side="right")) - 1
        return self.members[member], row - int(self.bounds[member])

    # --- one safetensors blob a file

    def _is_safetensors(self, path: str, rows: Int64, head: bytes) -> bool:
        """A zip begins with its magic number; a blob with the length of its JSON header."""
        start = int(self.starts[rows[0]])
        if head[:4] == _ZIP:
            self._check_disjoint(path, rows)
            return False
        if head[8:9] == b"{":
            return True
        raise CorruptCheckpointError(
            f"{path}: at byte {start} begins neither a torch.save zip nor a safetensors header. "
            "The file is damaged, or belongs to another save."
        )

    def _check_disjoint(self, path: str, rows: Int64) -> None:
        starts, stops = self.starts[rows], self.starts[rows] + self.lengths[rows]
        bad = (starts[1:] < stops[:-1]) & ((starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1]))
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            name = self._member(int(rows[at + 1]))[0].name
            raise CorruptCheckpointError(f"{path}: the item of {name!r:.80} overlaps the one before it.")

    def _safetensors(self, path: str, rows: Int64) -> None:
        start = int(self.starts[rows[0]])
        if (self.starts[rows] != start).any():
            raise CorruptCheckpointError(f"{path}: its items are a safetensors blob, but begin at different bytes.")
        header = read_header(self.store, path, start=start)
        offsets = saved_offsets(header, path)
        for row in rows.tolist():
            member, at = self._member(row)
            self.found.starts[row], self.found.nbytes[row] = _in_header(header, offsets, path, member, at)

    # --- zips

    def _zips(self, rows: Int64) -> None:
        """Locate items sorted by file and start: read their first and last kilobyte, and parse."""
        ends = ItemEnds(self.store, self.paths, self.files[rows], self.starts[rows], self.lengths[rows])
        left = np.arange(len(rows))
        for frame in self.frames:
            left = self._framed(frame, ends, rows, left)
        while len(left):
            shared = self._alone(ends, int(left[0]), int(rows[left[0]]))
            left = left[1:]
            if shared is not None and len(left) >= _FEW and len(self.frames) < _MAX_FRAMES:
                self.frames.append(shared)
                left = self._framed(shared, ends, rows, left)

    def _alone(self, ends: ItemEnds, i: int, row: int) -> Frame | None:
        """Parse one item in full; the frame that others may share with it."""
        member, at = self._member(row)
        start, length = int(self.starts[row]), int(self.lengths[row])
        label = self._label(row)
        path = self.paths[int(self.files[row])]

        def whole() -> TorchArchive:
            return read_archive(self.store, path, start, length)

        tensor, frame = self.parser.parse(ends.front(i), ends.tail(i), path, start, length, label, whole)
        _check_tensor(tensor, member, at, label)
        self.found.put(row, tensor)
        return frame

    def _framed(self, frame: Frame, ends: ItemEnds, rows: Int64, left: Int64) -> Int64:
        """Locate those items of `left` that fit the frame; return the others."""
        lengths = self.lengths[rows[left]]
        long = lengths >= max(FRONT_BYTES, frame.nbytes)
        tried, others = left[long], left[~long]
        if not len(tried):
            return left
        parsed = frame.parse(
            [ends.front(i) for i in tried.tolist()], [ends.tail(i) for i in tried.tolist()], lengths[long]
        )
        fits = parsed.fits
        templates = [self.parser.template(raw, self._label(int(rows[tried[0]]))) for raw in parsed.distinct]
        for number, template in enumerate(templates):
            if template is None:
                fits = fits & (parsed.pickles != number)
            else:
                same = fits & (parsed.pickles == number)
                fits = fits & ~(same & (parsed.nbytes < template.storage.nbytes))
        for number, template in enumerate(templates):
            chosen = np.flatnonzero(fits & (parsed.pickles == number))
            if template is not None and len(chosen):
                self._put_framed(template, rows[tried[chosen]], parsed, chosen)
        return np.sort(np.concatenate([others, tried[~fits]]))

    def _put_framed(self, template: StoredTensor, rows: Int64, parsed: FramedItems, chosen: Int64) -> None:
        found = self.found
        storage = self.starts[rows] + parsed.starts[chosen]
        found.starts[rows] = storage + template.offset * template.itemsize
        found.nbytes[rows] = template.nbytes
        found.crc[rows] = parsed.crc[chosen].astype(np.uint64)
        found.crc_starts[rows] = storage
        found.crc_nbytes[rows] = parsed.nbytes[chosen]
        found.checked[rows] = True
        found.templates[rows] = len(self.templates)
        self.templates.append(template)
        if not template.contiguous:
            found.strides.update(dict.fromkeys(rows.tolist(), template.strides))

    def _check_templates(self, member: LocatedSlices, first: int) -> None:
        """Framed items hold what `.metadata` says, compared once for each kind of item a tensor has."""
        numbers = self.found.templates[first : first + len(member)]
        for number in distinct(numbers).tolist():
            if number < 0:
                continue
            template, rows = self.templates[number], np.flatnonzero(numbers == number)
            same = len(template.shape) == member.sizes.shape[1] and template.dtype == member.dtype
            bad = rows[~(member.sizes[rows] == np.array(template.shape, np.int64)).all(axis=1)] if same else rows
            if len(bad):
                _check_tensor(template, member, int(bad[0]), self._label(first + int(bad[0])))

    def _label(self, row: int) -> str:
        path, start = self.paths[int(self.files[row])], int(self.starts[row])
        return f"{path}: the item of {self._member(row)[0].name!r:.80} at byte {start}"

    def _compressed(self, row: int, path: str) -> None:
        """A zstd item: decoded as a stream, of which only the first and last kilobytes are kept."""
        member, at = self._member(row)
        start, length = int(self.starts[row]), int(self.lengths[row])
        label = self._label(row)
        wanted = math.prod(member.sizes[at].tolist()) * dtype_of(member.dtype).itemsize
        packed = self.store.read(path, start, start + length)
        front, tail, size = decoded_ends(packed, wanted + _SLACK, file=label)

        def whole() -> TorchArchive:
            data = b"".join(zstd_chunks(packed, wanted + _SLACK, file=label))
            return read_archive(memory_store(path, data), path, 0, size)

        tensor, _ = self.parser.parse(front, tail, path, 0, size, label, whole)
        _check_tensor(tensor, member, at, label)
        self.found.put(row, tensor)
        self.found.codecs[row] = Codec("zstd", start, length)

    def _hand_out(self) -> None:
        found = self.found
        strides, codecs = _split(found.strides, self.bounds), _split(found.codecs, self.bounds)
        for i, member in enumerate(self.members):
            rows = slice(int(self.bounds[i]), int(self.bounds[i + 1]))
            self._check_templates(member, rows.start)
            checked = bool(found.checked[rows].all()) and len(member) > 0
            member.algorithm = "crc32" if checked else None
            member.digests = found.crc[rows] if checked else None
            member.digest_starts = found.crc_starts[rows] if checked else None
            member.digest_nbytes = found.crc_nbytes[rows] if checked else None
            member.strides = strides.get(i, {})
            member.codecs = codecs.get(i, {})
            member.nbytes = found.nbytes[rows]
            member.starts = found.starts[rows]
            member.batch = None


def _by_file(order: Int64, files: Int32) -> list[Int64]:
    if len(order) == 0:
        return []
    return np.split(order, np.flatnonzero(np.diff(files[order])) + 1)


def _blocks(files: Iterable[Int64]) -> Iterator[Int64]:
    """Join the rows of files, in order, into blocks of limited size that span a limited number of files."""
    block: list[Int64] = []
    count = 0
    for rows in files:
        for begin in range(0, len(rows), _BLOCK_ROWS):
            piece = rows[begin : begin + _BLOCK_ROWS]
            if block and (count + len(piece) > _BLOCK_ROWS or len(block) >= _BLOCK_FILES):
                yield np.concatenate(block)
                block, count = [], 0
            block.append(piece)
            count += len(piece)
    if block:
        yield np.concatenate(block)


def _split(values: dict[int, Any], bounds: Int64) -> dict[int, dict[int, Any]]:
    out: dict[int, dict[int, Any]] = {}
    for row, value in values.items():
        member = int(np.searchsorted(bounds, row, side="right")) - 1
        out.setdefault(member, {})[row - int(bounds[member])] = value
    return out


def _in_header(
    header: SafetensorsHeader, offsets: dict[str, tuple[int, ...]], path: str, member: LocatedSlices, at: int
) -> tuple[int, int]:
    found = header.tensors.get(member.name)
    box = tuple(member.offsets[at].tolist()), tuple(member.sizes[at].tolist())
    if found is None:
        raise IncompleteCheckpointError(f"{path}: tensor {member.name!r:.80} is not in it, though .metadata says so.")
    stored = offsets.get(member.name, (0,) * len(found.shape)), found.shape
    if stored != box:
        raise IncompleteCheckpointError(
            f"{path}: tensor {member.name!r:.80} has only its part at {list(stored[0])} of sizes {list(stored[1])}, "
            f"not the one at {list(box[0])} of sizes {list(box[1])}. torch keeps one part a file in this format: the "
            "rest was lost when it was saved."
        )
    if found.dtype != member.dtype:
        raise CorruptCheckpointError(
            f"{path}: tensor {member.name!r:.80} is {found.dtype}, .metadata says {member.dtype}."
        )
    return found.start, found.nbytes


def _check_tensor(tensor: StoredTensor, member: LocatedSlices, at: int, label: str) -> None:
    sizes = tuple(member.sizes[at].tolist())
    if tensor.dtype != member.dtype or tensor.shape != sizes:
        raise CorruptCheckpointError(
            f"{label} holds {tensor.dtype} {list(tensor.shape)}, but .metadata says {member.dtype} {list(sizes)}. "
            "Files of two saves may have been mixed."
        )


def decoded_ends(packed: bytes, limit: int, *, file: str) -> tuple[memoryview, memoryview, int]:
    """Return the first and last bytes of what zstd decodes to, and its length; at most `limit`."""
    front, tail, size = bytearray(), b"", 0
    for chunk in zstd_chunks(packed, limit, file=file):
        front += chunk[: max(0, FRONT_BYTES - len(front))]
        tail = (tail + chunk)[-TAIL_BYTES:]
        size += len(chunk)
    return memoryview(bytes(front)), memoryview(tail), size
