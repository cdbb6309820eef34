"""Writes a DCP checkpoint's `.metadata` pickle without torch, opcode by opcode.

torch unpickles the file to objects from `torch.distributed.checkpoint.metadata`. In the pickle, all slices of a tensor
take the same number of bytes. Numpy can therefore fill in the numbers of a million slices column by column.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.formats.dcp.records import pickled_int

Int64 = npt.NDArray[np.int64]
_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # CURRENT_DCP_VERSION in torch/distributed/checkpoint/filesystem.py
_FLUSH = 1 << 20
_BATCH = 1 << 14  # slices


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """A tensor in `.metadata`, with its slices as columns.

    Attributes:
        offsets, sizes: [n, ndim] offsets and sizes of the slices, in elements.
        files: [n] index of each slice's file in the list of paths.
        starts, lengths: [n] byte range of each slice's record in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: Int64
    sizes: Int64
    files: npt.NDArray[np.int32]
    starts: Int64
    lengths: Int64


@dataclass(slots=True)
class MetadataPickle:
    """Writes `.metadata` into a buffer, and keeps track of the pickle's memo.

    Attributes:
        objects: Location (path, start, length) of each object, by name.
        planner_data: Path of each key in the nested state dict, or None if the paths are unknown.
    """

    tensors: Sequence[RecordColumns]
    paths: Sequence[str]
    objects: Mapping[str, tuple[str, int, int]]
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    checkpoint_id: str = ""
    save_id: str = ""
    _out: bytearray = field(default_factory=bytearray)
    _memo: dict[Any, int] = field(default_factory=dict)
    _next: int = 0
    _heads: dict[str, bytes] = field(default_factory=dict)
    _rows: dict[tuple[int, bool] | None, _Row] = field(default_factory=dict)

    def chunks(self) -> Iterator[bytes]:
        """Yield the pickle in pieces of about a megabyte."""
        out = self._out
        out += b"\x80\x04("  # memoize the values that every slice refers to: MARK, the values, POP_MARK
        for name in ("ChunkStorageMetadata", "MetadataIndex"):
            self._global(_MODULE, name)
        self._global(_FILESYSTEM, "_StorageInfo")
        self._global("torch", "Size")
        for text in ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", *self.paths):
            self._text(text)
        out += b"1"
        self._new("Metadata")
        self._text("state_dict_metadata")
        out += b"}("
        first_offset: list[int] = []  # memo index of the offsets of each tensor's first slice
        yield from self._described(first_offset)
        out += b"u"
        self._text("planner_data")
        out += b"N" if self.planner_data is None else b"}("
        for name, path in (self.planner_data or {}).items():
            self._text(name)
            out += b"("
            for part in path:
                if isinstance(part, str):
                    self._text(part)
                else:
                    out += pickled_int(part)
            out += b"t"
            if len(out) >= _FLUSH:
                yield bytes(out)
                out.clear()
        out += b"" if self.planner_data is None else b"u"
        self._text("storage_data")
        out += b"}("
        yield from self._located(first_offset)
        out += b"u"
        self._text("storage_meta")
        self._new("StorageMeta")
        for key, value in (("checkpoint_id", self.checkpoint_id), ("save_id", self.save_id)):
            self._text(key)
            self._text(value)
        self._text("load_id")
        out += b"N"
        self._text("modules")
        out += b"]ub"
        self._text("version")
        self._text(_VERSION)
        out += b"ub."
        yield bytes(out)

    def _described(self, first_offset: list[int]) -> Iterator[bytes]:
        """Yield the entries of `state_dict_metadata`.

        For each tensor, appends the memo index of the first slice's offsets to `first_offset`, so that `_located` can
        refer to the offsets.
        """
        out = self._out
        for batch in self._batches():
            for tensor, chunks in zip(batch, self._chunks_of(batch), strict=True):
                self._text(tensor.name)
                self._head(tensor.dtype)
                out += b"(" + b"".join(map(pickled_int, tensor.shape)) + b"t\x85R"
                self._text("chunks")
                out += b"]("
                # One ChunkStorageMetadata per slice. Its offsets are memoized for the MetadataIndex below.
                first_offset.append(self._next)
                self._next += len(tensor.starts)
                out += chunks
                out += b"eub"
                if len(out) >= _FLUSH:
                    yield bytes(out)
                    out.clear()
        for name in self.objects:
            self._text(name)
            self._new("BytesStorageMetadata", state=b"")
            out += b"}b"

    def _located(self, first_offset: list[int]) -> Iterator[bytes]:
        """Yield the entries of `storage_data`. `first_offset` is the list that `_described` has filled."""
        out = self._out
        path_ids = np.array([self._memo[path] for path in self.paths], np.int64)
        firsts = iter(first_offset)
        for batch in self._batches():
            # Write one MetadataIndex -> _StorageInfo pair per slice.
            counts = [len(tensor.starts) for tensor in batch]
            ends = np.cumsum(counts)
            order = np.arange(sum(counts), dtype=np.int64) - np.repeat(ends - counts, counts)
            name_ids = np.repeat(np.array([self._memo[tensor.name] for tensor in batch], np.int64), counts)
            offset_ids = np.repeat(np.array([next(firsts) for _ in batch], np.int64), counts) + order
            files = path_ids[np.concatenate([tensor.files for tensor in batch])]
            starts = np.concatenate([tensor.starts for tensor in batch])
            lengths = np.concatenate([tensor.lengths for tensor in batch])
            yield bytes(out)
            out.clear()
            yield self._place_row().fill([name_ids, offset_ids, order, files, starts, lengths], len(order))
        for name, (path, start, length) in self.objects.items():
            self._new("MetadataIndex")
            self._text("fqn")
            self._text(name)
            self._text("index")
            out += b"Nub"
            self._new("_StorageInfo")
            self._text("relative_path")
            self._text(path)
            self._text("offset")
            out += pickled_int(start)
            self._text("length")
            out += pickled_int(length) + b"ub"

    # --- columns

    def _batches(self) -> Iterator[Sequence[RecordColumns]]:
        """Yield the tensors in batches. A batch has about `_BATCH` slices, because numpy is slow with small arrays."""
        first = slices = 0
        for i, tensor in enumerate(self.tensors):
            slices += len(tensor.starts)
            if slices >= _BATCH:
                yield self.tensors[first : i + 1]
                first, slices = i + 1, 0
        if first < len(self.tensors):
            yield self.tensors[first:]

    def _chunks_of(self, tensors: Sequence[RecordColumns]) -> Iterator[bytes]:
        """Yield, for each tensor, the opcodes that describe the tensor's slices."""
        rows = [self._chunk_row(tensor.shape) for tensor in tensors]
        filled: dict[_Row, memoryview] = {}
        for row in dict.fromkeys(rows):
            own = [tensor for tensor, of in zip(tensors, rows, strict=True) if of is row]
            offsets = np.concatenate([tensor.offsets for tensor in own])
            sizes = np.concatenate([tensor.sizes for tensor in own])
            filled[row] = memoryview(row.fill([*offsets.T, *sizes.T], len(offsets)))
        for tensor, row in zip(tensors, rows, strict=True):
            nbytes = len(tensor.starts) * row.nbytes
            yield bytes(filled[row][:nbytes])
            filled[row] = filled[row][nbytes:]

    def _chunk_row(self, shape: tuple[int, ...]) -> _Row:
        key = len(shape), bool(shape) and max(shape) > 0x7FFFFFFF
        if key not in self._rows:
            mark = len(self._out)
            self._new("ChunkStorageMetadata")
            self._text("offsets")
            self._global("torch", "Size")
            offsets = self._taken(mark)
            self._text("sizes")
            self._global("torch", "Size")
            sizes = self._taken(mark)
            number: list[bytes | str] = [b"\x8a\x08", "<i8"] if key[1] else [b"J", "<i4"]
            fields: list[bytes | str] = [b"(", *(number * len(shape)), b"t"]
            self._rows[key] = _Row([offsets, *fields, b"\x85R\x94" + sizes, *fields, b"\x85Rub"])
        return self._rows[key]

    def _place_row(self) -> _Row:
        if None not in self._rows:
            mark, key = len(self._out), {}
            for text in ("fqn", "offset", "index", "relative_path", "length"):
                self._text(text)
                key[text] = self._taken(mark)
            self._new("MetadataIndex")
            index = self._taken(mark) + key["fqn"] + b"j"
            self._new("_StorageInfo")
            info = self._taken(mark) + key["relative_path"] + b"j"
            parts: list[bytes | str] = [index, "<u4", key["offset"] + b"j", "<u4", key["index"] + b"J", "<i4"]
            parts += [
                b"ub" + info,
                "<u4",
                key["offset"] + b"\x8a\x08",
                "<i8",
                key["length"] + b"\x8a\x08",
                "<i8",
                b"ub",
            ]
            self._rows[None] = _Row(parts)
        return self._rows[None]

    def _taken(self, mark: int) -> bytes:
        """Remove the bytes written since `mark` from the buffer, and return them."""
        text = bytes(self._out[mark:])
        del self._out[mark:]
        return text

    # --- values

    def _new(self, name: str, *, state: bytes = b"}(") -> None:
        self._global(_FILESYSTEM if name == "_StorageInfo" else _MODULE, name)
        self._out += b")\x81" + state

    def _head(self, dtype: str) -> None:
        """Write the opcodes between a tensor's name and shape. They are cached for each dtype."""
        if dtype in self._heads:
            self._out += self._heads[dtype]
            return
        for is_first in (True, False):  # the first description adds its values to the memo; the second refers to them
            mark = len(self._out)
            self._new("TensorStorageMetadata")
            self._text("properties")
            self._new("TensorProperties", state=b"(")
            # (dtype, layout, requires_grad, memory format, pin_memory) and BUILD
            self._global("torch", dtype)
            if not self._get("strided"):
                self._global("torch.serialization", "_get_layout")
                self._text("torch.strided")
                self._out += b"\x85R"
                self._put("strided")
            self._out += b"\x89"
            if not self._get("contiguous"):
                self._global(_MODULE, "_MEM_FORMAT_ENCODING")
                self._out += b"K\x00\x85R"
                self._put("contiguous")
            self._out += b"\x89tb"
            self._text("size")
            self._global("torch", "Size")
            if not is_first:
                self._heads[dtype] = self._taken(mark)

    def _global(self, module: str, name: str) -> None:
        if not self._get((module, name)):
            self._text(module)
            self._text(name)
            self._out += b"\x93"
            self._put((module, name))

    def _text(self, text: str) -> None:
        if not self._get(text):
            data = text.encode("utf-8", "surrogatepass")
            self._out += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
            self._out += data
            self._put(text)

    def _get(self, key: Any) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self._out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        return True

    def _put(self, key: Any) -> None:
        self._memo[key] = self._next
        self._out += b"\x94"  # MEMOIZE: unlike LONG_BINPUT, it states no number that readers would have to check
        self._next += 1


class _Row:
    """A template of opcodes with number fields at fixed positions, which are filled in later.

    In `parts`, opcodes are bytes, and each string is the numpy type code of a number field.
    """

    def __init__(self, parts: list[bytes | str]) -> None:
        self._fields = [f"f{i}" for i, part in enumerate(parts) if isinstance(part, str)]
        types = [(f"f{i}", p if isinstance(p, str) else f"V{len(p)}") for i, p in enumerate(parts)]
        values = tuple(0 if isinstance(p, str) else p for p in parts)
        self._template = np.array([values], np.dtype(types))
        self.nbytes = self._template.itemsize

    def fill(self, columns: Sequence[Int64], count: int) -> bytes:
        """Return `count` copies of the template, filled in from one column per number field."""
        table = np.repeat(self._template, count)
        for name, column in zip(self._fields, columns, strict=True):
            table[name] = column
        return table.tobytes()
