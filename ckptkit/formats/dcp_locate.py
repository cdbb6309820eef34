"""Where the bytes of each tensor lie inside its item of a `.distcp` file: found on demand, many items at once.

An item is a torch.save zip of its own, about 1.5 KB longer than the tensor in it; a file may instead be one
safetensors blob. For a zip, its first kilobyte (pickle, header of the storage) and its last (the directory,
with the CRC-32 of the storage) are read; neighbours share a read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Codec, Role, SliceArray
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats._torch_records import StoredTensor
from ckptkit.formats._torch_zip import TorchArchive, read_archive
from ckptkit.formats.dcp_columns import TensorColumns
from ckptkit.formats.dcp_found import Found, check_tensor, decoded_ends, in_header
from ckptkit.formats.dcp_frames import Frame, FramedItems
from ckptkit.formats.dcp_items import ItemEnds, ItemParser
from ckptkit.formats.objects import memory_store, zstd_chunks
from ckptkit.formats.safetensors_dcp import saved_offsets
from ckptkit.formats.safetensors_parse import read_header
from ckptkit.storage.store import ReadInto, Store

__all__ = ["Items", "LocatedSlices", "item_batches"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]

_BATCH_ROWS = 1 << 16
_BLOCK_ROWS = 1 << 12  # items whose ends are held at once
_NO_STRIDES: Mapping[int, tuple[int, ...]] = {}
_NO_CODECS: Mapping[int, Codec] = {}
_BLOCK_FILES = 128  # files that are open at once
_HEAD = 9
_ZIP = b"PK\x03\x04"
_FEW = 16  # items for which numpy is worth its fixed cost
_MAX_FRAMES = 8
_SLACK = 1 << 20  # what an item may be longer than its tensor, when it is decompressed


class Items:
    """Every tensor item of a checkpoint as columns; rows [bounds[i], bounds[i + 1]) are those of tensor i.

    Attributes:
        columns: What `.metadata` says of them.
        starts, nbytes, digests, digest_starts, digest_nbytes: As `SliceArray` has them, once located.
        checked: [t] whether all slices of a tensor have digests.
        strides, codecs: By tensor, as `SliceArray` has them.
    """

    def __init__(self, store: Store, paths: Sequence[str], ranks: Int32, columns: TensorColumns) -> None:
        self.store = store
        self.paths = paths
        self.ranks = ranks
        self.columns = columns
        self.elements = columns.elements()
        count = len(columns.files)
        self.starts, self.nbytes, self.digest_starts, self.digest_nbytes = (np.zeros(count, np.int64) for _ in range(4))
        self.digests = np.zeros(count, np.uint64)
        self.checked = np.zeros(len(columns.names), bool)
        self.strides: dict[int, Mapping[int, tuple[int, ...]]] = {}
        self.codecs: dict[int, Mapping[int, Codec]] = {}

    @classmethod
    def of(cls, store: Store, paths: Sequence[str], ranks: Sequence[int], columns: TensorColumns) -> Items:
        """Return the items of these columns. `ranks`: who wrote each file."""
        return cls(store, paths, np.array(ranks, np.int32)[columns.files], columns)


class LocatedSlices(SliceArray):
    """Slices whose byte ranges are found when one of them is asked for, together with those of its batch.

    Boxes, files and ranks are there from the start; `starts`, `nbytes`, `strides`, digests and codecs are not. All are
    views of the columns of all tensors, made when they are asked for.
    """

    __slots__ = ("batch", "hi", "items", "lo", "tensor")

    def __init__(self, items: Items, tensor: int) -> None:
        self.items = items
        self.tensor = tensor
        self.lo: int = int(items.columns.bounds[tensor])
        self.hi: int = int(items.columns.bounds[tensor + 1])
        self.batch: _Batch | None = None

    def __len__(self) -> int:
        return self.hi - self.lo

    @property
    def name(self) -> str:
        return self.items.columns.names[self.tensor]

    @property
    def dtype(self) -> str:
        return self.items.columns.dtypes[self.tensor]

    @property
    def paths(self) -> Sequence[str]:  # type: ignore[override]
        return self.items.paths

    @property
    def files(self) -> Int32:  # type: ignore[override]
        return self.items.columns.files[self.lo : self.hi]

    @property
    def ranks(self) -> Int32:  # type: ignore[override]
        return self.items.ranks[self.lo : self.hi]

    @property
    def offsets(self) -> Int64:  # type: ignore[override]
        return self._box(self.items.columns.offsets)

    @property
    def sizes(self) -> Int64:  # type: ignore[override]
        return self._box(self.items.columns.sizes)

    def _box(self, table: Int64) -> Int64:
        items, ndim = self.items, len(self.items.columns.shapes[self.tensor])
        first = int(items.elements[self.lo])
        return table[first : first + (self.hi - self.lo) * ndim].reshape(self.hi - self.lo, ndim)

    def _located(self) -> Items:
        if self.batch is not None:
            self.batch.locate()
        return self.items

    @property
    def starts(self) -> Int64:  # type: ignore[override]
        return self._located().starts[self.lo : self.hi]

    @property
    def nbytes(self) -> Int64:  # type: ignore[override]
        return self._located().nbytes[self.lo : self.hi]

    @property
    def strides(self) -> Mapping[int, tuple[int, ...]]:  # type: ignore[override]
        return self._located().strides.get(self.tensor, _NO_STRIDES)

    @property
    def codecs(self) -> Mapping[int, Codec]:  # type: ignore[override]
        return self._located().codecs.get(self.tensor, _NO_CODECS)

    @property
    def algorithm(self) -> str | None:  # type: ignore[override]
        return "crc32" if self._located().checked[self.tensor] else None

    @property
    def digests(self) -> UInt64 | None:  # type: ignore[override]
        return self._digest_column(self._located().digests)

    @property
    def digest_starts(self) -> Int64 | None:  # type: ignore[override]
        return self._digest_column(self._located().digest_starts)

    @property
    def digest_nbytes(self) -> Int64 | None:  # type: ignore[override]
        return self._digest_column(self._located().digest_nbytes)

    def _digest_column(self, column: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        return column[self.lo : self.hi] if self.items.checked[self.tensor] else None


def item_batches(tensors: Iterable[tuple[Role, SliceArray]]) -> None:
    """Group the slices so that those of one role are located some ten thousand at a time."""
    by_role: dict[Role, _Batch] = {}
    for role, slices in tensors:
        assert isinstance(slices, LocatedSlices)
        batch = by_role.get(role)
        if batch is None or (batch.count and batch.count + len(slices) > _BATCH_ROWS):
            batch = by_role[role] = _Batch(slices.items)
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
                _Locator(self.items, np.array([member.tensor for member in self.members], np.int64)).run()
                for member in self.members:
                    member.batch = None
                self.members = []


class _Locator:
    """Args:
    tensors: Which of the items' tensors are located.
    """

    def __init__(self, items: Items, tensors: Int64) -> None:
        columns = items.columns
        self.items = items
        self.store = items.store
        self.paths = items.paths
        self.tensors = tensors
        counts = columns.bounds[tensors + 1] - columns.bounds[tensors]
        self.bounds = np.concatenate([[0], np.cumsum(counts)])
        self.rows = np.repeat(columns.bounds[tensors] - self.bounds[:-1], counts) + np.arange(int(self.bounds[-1]))
        self.files = columns.files[self.rows]
        self.starts = columns.starts[self.rows]
        self.lengths = columns.lengths[self.rows]
        self.zstd = columns.zstd[self.rows]
        self.found = Found.empty(len(self.rows))
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
        return LocatedSlices(self.items, int(self.tensors[member])), row - int(self.bounds[member])

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
            self.found.starts[row], self.found.nbytes[row] = in_header(header, offsets, path, member, at)

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
        check_tensor(tensor, member, at, label)
        self.found.put(row, tensor)
        return frame

    def _framed(self, frame: Frame, ends: ItemEnds, rows: Int64, left: Int64) -> Int64:
        """Locate those items of `left` that fit the frame; return the others."""
        lengths = self.lengths[rows[left]]
        long = lengths >= frame.nbytes
        tried, others = left[long], left[~long]
        if not len(tried):
            return left
        parsed = frame.parse(ends.fronts(tried), ends.tails(tried, frame.nbytes), lengths[long])
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

    def _check_templates(self) -> None:
        """Framed items hold what `.metadata` says, compared once for each kind of item."""
        numbers = self.found.templates
        order = np.argsort(numbers, kind="stable")
        order = order[numbers[order] >= 0]
        columns = self.items.columns
        owners = np.repeat(self.tensors, np.diff(self.bounds))
        for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else ():
            template = self.templates[int(numbers[rows[0]])]
            shape = np.array(template.shape, np.int64)
            alike = columns.ndims[owners[rows]] == len(shape)
            kinds = distinct(owners[rows])
            other = kinds[[columns.dtypes[tensor] != template.dtype for tensor in kinds.tolist()]]
            alike &= ~np.isin(owners[rows], other)
            begins = self.items.elements[self.rows[rows[alike]]]
            sizes = columns.sizes[begins[:, None] + np.arange(len(shape))]
            alike[alike] = (sizes == shape).all(axis=1)
            if not alike.all():
                row = int(rows[~alike].min())
                member, at = self._member(row)
                check_tensor(template, member, at, self._label(row))

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
        check_tensor(tensor, member, at, label)
        if tensor.marks:
            raise UnsupportedFormatError(f"{label} is compressed, and still to be conjugated or negated.")
        self.found.put(row, tensor)
        self.found.codecs[row] = Codec("zstd", start, length)

    def _hand_out(self) -> None:
        self._check_templates()
        found, items, counts = self.found, self.items, np.diff(self.bounds)
        items.starts[self.rows], items.nbytes[self.rows] = found.starts, found.nbytes
        items.digests[self.rows] = found.crc
        items.digest_starts[self.rows], items.digest_nbytes[self.rows] = found.crc_starts, found.crc_nbytes
        missing = np.bincount(np.repeat(np.arange(len(counts)), counts)[~found.checked], minlength=len(counts))
        items.checked[self.tensors] = (missing == 0) & (counts > 0)
        for values, table in ((found.strides, items.strides), (found.codecs, items.codecs)):
            for member, own in _split(values, self.bounds).items():
                table[int(self.tensors[member])] = own


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
