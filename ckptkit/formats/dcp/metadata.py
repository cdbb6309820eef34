"""Writes a DCP checkpoint's `.metadata` pickle without torch, opcode by opcode.

torch unpickles the file to objects from `torch.distributed.checkpoint.metadata`. In the pickle, all slices of a tensor
take the same number of bytes. Numpy can therefore fill in the numbers of a million slices column by column.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.formats.dcp.records import pickled_int

Int64 = npt.NDArray[np.int64]
_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # CURRENT_DCP_VERSION in torch/distributed/checkpoint/filesystem.py
_FLUSH = 1 << 20
_BATCH = 1 << 14  # slices


class _Class(NamedTuple):
    """A class or function, by its module and name."""

    module: str
    name: str


class _Call(NamedTuple):
    """The result of a function of torch."""

    function: _Class
    argument: str | int


_NEW = b")\x81}("  # after a class: makes an object, and begins the dict of its attributes
_CHUNK, _INDEX = _Class(_MODULE, "ChunkStorageMetadata"), _Class(_MODULE, "MetadataIndex")
_TENSOR, _PROPERTIES = _Class(_MODULE, "TensorStorageMetadata"), _Class(_MODULE, "TensorProperties")
_PLACE, _SIZE = _Class(_FILESYSTEM, "_StorageInfo"), _Class("torch", "Size")
_STRIDED = _Call(_Class("torch.serialization", "_get_layout"), "torch.strided")
_CONTIGUOUS = _Call(_Class(_MODULE, "_MEM_FORMAT_ENCODING"), 0)


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
    _memo: dict[str | _Class | _Call, int] = field(default_factory=dict)
    _next: int = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield the pickle in pieces of about a megabyte."""
        out, code = self._out, self._code
        # Memoize the values that every slice refers to: MARK, the values, POP_MARK
        names = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
        out += b"\x80\x04(" + code(_CHUNK, _INDEX, _PLACE, _SIZE, *names, *self.paths) + b"1"
        out += code(_Class(_MODULE, "Metadata"), _NEW, "state_dict_metadata", b"}(")
        first_offset: list[int] = []  # memo index of the offsets of each tensor's first slice
        yield from self._described(first_offset)
        out += b"u" + code("planner_data", b"N" if self.planner_data is None else b"}(")
        for name, path in (self.planner_data or {}).items():
            out += code(name, b"(", *path, b"t")
            if len(out) >= _FLUSH:
                yield bytes(out)
                out.clear()
        out += b"" if self.planner_data is None else b"u"
        out += code("storage_data", b"}(")
        yield from self._located(first_offset)
        out += b"u" + code("storage_meta", _Class(_MODULE, "StorageMeta"), _NEW)
        out += code("checkpoint_id", self.checkpoint_id, "save_id", self.save_id, "load_id", b"N", "modules", b"]ub")
        out += code("version", _VERSION, b"ub.")
        yield bytes(out)

    def _described(self, first_offset: list[int]) -> Iterator[bytes]:
        """Yield the entries of `state_dict_metadata`.

        For each tensor, appends the memo index of the first slice's offsets to `first_offset`, so that `_located` can
        refer to the offsets.
        """
        out, code = self._out, self._code
        heads: dict[str, bytes] = {}  # by dtype: the opcodes between a tensor's name and shape
        for batch in self._batches():
            for tensor, chunks in zip(batch, self._chunks_of(batch), strict=True):
                out += code(tensor.name)
                if tensor.dtype not in heads:
                    # dtype, layout, requires_grad, memory format, pin_memory
                    values = (_Class("torch", tensor.dtype), _STRIDED, b"\x89", _CONTIGUOUS, b"\x89")
                    head = (_TENSOR, _NEW, "properties", _PROPERTIES, b")\x81(", *values, b"tb", "size", _SIZE)
                    out += code(*head)  # adds the values to the memo
                    heads[tensor.dtype] = code(*head)  # refers to them
                else:
                    out += heads[tensor.dtype]
                out += code(b"(", *tensor.shape, b"t\x85R", "chunks", b"](")
                # One ChunkStorageMetadata per slice. Its offsets are memoized for the MetadataIndex below.
                first_offset.append(self._next)
                self._next += len(tensor.starts)
                out += chunks
                out += b"eub"
                if len(out) >= _FLUSH:
                    yield bytes(out)
                    out.clear()
        for name in self.objects:
            out += code(name, _Class(_MODULE, "BytesStorageMetadata"), b")\x81}b")

    def _located(self, first_offset: list[int]) -> Iterator[bytes]:
        """Yield the entries of `storage_data`. `first_offset` is the list that `_described` has filled."""
        out, code = self._out, self._code
        path_ids = np.array([self._memo[path] for path in self.paths], np.int64)
        firsts = iter(first_offset)
        # One MetadataIndex -> _StorageInfo pair per slice.
        row: list[bytes | str] = [code(_INDEX, _NEW, "fqn", b"j"), "<u4", code("offset", b"j"), "<u4"]
        row += [code("index", b"J"), "<i4", code(b"ub", _PLACE, _NEW, "relative_path", b"j"), "<u4"]
        row += [code("offset", b"\x8a\x08"), "<i8", code("length", b"\x8a\x08"), "<i8", b"ub"]
        for batch in self._batches():
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
            yield _filled(row, [name_ids, offset_ids, order, files, starts, lengths], len(order))
        for name, (path, start, length) in self.objects.items():
            out += code(_INDEX, _NEW, "fqn", name, "index", b"Nub")
            out += code(_PLACE, _NEW, "relative_path", path, "offset", start, "length", length, b"ub")

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
        kinds = [(len(t.shape), bool(t.shape) and max(t.shape) > 0x7FFFFFFF) for t in tensors]
        filled: dict[tuple[int, bool], memoryview] = {}
        widths: dict[tuple[int, bool], int] = {}
        for kind in dict.fromkeys(kinds):
            own = [tensor for tensor, of in zip(tensors, kinds, strict=True) if of == kind]
            offsets = np.concatenate([tensor.offsets for tensor in own])
            sizes = np.concatenate([tensor.sizes for tensor in own])
            ndim, is_wide = kind
            number: list[bytes | str] = [b"\x8a\x08", "<i8"] if is_wide else [b"J", "<i4"]
            fields: list[bytes | str] = [b"(", *(number * ndim), b"t"]
            row = [self._code(_CHUNK, _NEW, "offsets", _SIZE), *fields]
            row += [b"\x85R\x94" + self._code("sizes", _SIZE), *fields, b"\x85Rub"]
            filled[kind] = memoryview(_filled(row, [*offsets.T, *sizes.T], len(offsets)))
            widths[kind] = len(filled[kind]) // max(1, len(offsets))
        for tensor, kind in zip(tensors, kinds, strict=True):
            nbytes = len(tensor.starts) * widths[kind]
            yield bytes(filled[kind][:nbytes])
            filled[kind] = filled[kind][nbytes:]

    def _code(self, *values: bytes | int | str | _Class | _Call) -> bytes:
        """Return the opcodes that push values.

        Bytes are opcodes already, and are inserted as they are. Strings, classes and calls are added to the memo, and
        later uses refer to the memo. Integers are not memoized.
        """
        out = bytearray()
        for value in values:
            if isinstance(value, bytes):
                out += value
                continue
            if isinstance(value, int):
                out += pickled_int(value)
                continue
            index = self._memo.get(value)
            if index is not None:
                out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
                continue
            if isinstance(value, str):
                data = value.encode("utf-8", "surrogatepass")
                out += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
                out += data
            else:
                out += self._code(*value) + (b"\x93" if isinstance(value, _Class) else b"\x85R")
            self._memo[value] = self._next
            self._next += 1
            out += b"\x94"  # MEMOIZE: unlike LONG_BINPUT, it states no number that readers would have to check
        return bytes(out)


def _filled(parts: Sequence[bytes | str], columns: Sequence[Int64], count: int) -> bytes:
    """Return `count` rows of opcodes with number fields, which are filled in from one column per field.

    In `parts`, opcodes are bytes, and each string is the numpy type code of a number field.
    """
    types = [(f"f{i}", part if isinstance(part, str) else f"V{len(part)}") for i, part in enumerate(parts)]
    table = np.repeat(np.array([tuple(0 if isinstance(p, str) else p for p in parts)], np.dtype(types)), count)
    for i, column in zip((i for i, part in enumerate(parts) if isinstance(part, str)), columns, strict=True):
        table[f"f{i}"] = column
    return table.tobytes()
