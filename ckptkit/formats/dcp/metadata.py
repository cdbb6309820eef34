"""How `.metadata` of a DCP checkpoint is written: torch's pickle, opcode by opcode, without torch.

`pickle.load` with torch gives the objects of `torch.distributed.checkpoint.metadata`. The parts that grow with
the number of slices have a fixed width, so a million of them are filled in as columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MetadataWriter", "RecordColumns", "encode_metadata"]

Int64 = npt.NDArray[np.int64]
_MODULE = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py CURRENT_DCP_VERSION
_FLUSH = 1 << 20
_FEW = 8  # below, one call a slice is cheaper than numpy's fixed cost


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """One tensor of `.metadata`, its slices as columns.

    Attributes:
        offsets, sizes: [n, ndim] elements.
        files: [n] index into the list of paths.
        starts, lengths: [n] bytes of the whole record in its file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: Int64
    sizes: Int64
    files: npt.NDArray[np.int32]
    starts: Int64
    lengths: Int64


def encode_metadata(
    tensors: Sequence[RecordColumns],
    paths: Sequence[str],
    *,
    objects: Mapping[str, tuple[int, int, int]],
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None,
    checkpoint_id: str = "",
    save_id: str = "",
) -> Iterator[bytes]:
    """Yield the bytes of `.metadata`, about a megabyte at a time.

    Args:
        objects: (file, start, length) of each BYTE item, by name.
        planner_data: The path of each key in the nested state dict; None writes none.
    """
    return MetadataWriter(tensors, paths, objects, planner_data, checkpoint_id, save_id).chunks()


class MetadataWriter:
    """One pickle in the making: an output buffer and the memo of what was written."""

    def __init__(
        self,
        tensors: Sequence[RecordColumns],
        paths: Sequence[str],
        objects: Mapping[str, tuple[int, int, int]],
        planner_data: Mapping[str, tuple[str | int, ...]] | None,
        checkpoint_id: str,
        save_id: str,
    ) -> None:
        self.tensors = tensors
        self.paths = paths
        self.objects = objects
        self.planner_data = planner_data
        self.checkpoint_id = checkpoint_id
        self.save_id = save_id
        self._out = bytearray()
        self._memo: dict[Any, int] = {}
        self._next = 0
        self._path_ids = np.zeros(0, np.int64)
        self._rows: dict[tuple[int, bool] | None, _Row] = {}
        self._first_offset: list[int] = []  # memo index of the first slice's offsets, by tensor

    def chunks(self) -> Iterator[bytes]:
        """Yield the pickle."""
        out = self._out
        out += b"\x80\x04"
        self._remember()
        self._new("Metadata")
        self._text("state_dict_metadata")
        out += b"}("
        yield from self._flushing(self._tensor_metadata())
        out += b"u"
        self._text("planner_data")
        yield from self._flushing(self._planner())
        self._text("storage_data")
        out += b"}("
        self._path_ids = np.array([self._memo[path] for path in self.paths], np.int64)
        yield from self._flushing(self._storage())
        out += b"u"
        self._text("storage_meta")
        self._storage_meta()
        self._text("version")
        self._text(_VERSION)
        out += b"ub."
        yield bytes(out)

    def _flushing(self, steps: Iterable[None]) -> Iterator[bytes]:
        for _ in steps:
            if len(self._out) >= _FLUSH:
                yield bytes(self._out)
                self._out.clear()

    # --- the four parts

    def _tensor_metadata(self) -> Iterator[None]:
        for tensor in self.tensors:
            self._text(tensor.name)
            self._new("TensorStorageMetadata")
            self._text("properties")
            self._new("TensorProperties", state=b"(")
            self._properties(tensor.dtype)
            self._text("size")
            self._size(tensor.shape)
            self._text("chunks")
            self._out += b"]("
            self._chunks(tensor)
            self._out += b"eub"
            yield
        for name in self.objects:
            self._text(name)
            self._new("BytesStorageMetadata", state=b"")
            self._out += b"}b"
            yield

    def _planner(self) -> Iterator[None]:
        if self.planner_data is None:
            self._out += b"N"
            return
        self._out += b"}("
        for name, path in self.planner_data.items():
            self._text(name)
            self._out += b"("
            for part in path:
                if isinstance(part, str):
                    self._text(part)
                else:
                    self._out += _int(part)
            self._out += b"t"
            yield
        self._out += b"u"

    def _storage(self) -> Iterator[None]:
        for tensor, first in zip(self.tensors, self._first_offset, strict=True):
            self._slice_places(tensor, first)
            yield
        for name, (file, start, length) in self.objects.items():
            self._new("MetadataIndex")
            self._text("fqn")
            self._text(name)
            self._text("index")
            self._out += b"Nub"
            self._new("_StorageInfo")
            self._text("relative_path")
            self._text(self.paths[file])
            self._text("offset")
            self._out += _int(start)
            self._text("length")
            self._out += _int(length) + b"ub"
            yield

    def _storage_meta(self) -> None:
        self._new("StorageMeta")
        for key, value in (("checkpoint_id", self.checkpoint_id), ("save_id", self.save_id)):
            self._text(key)
            self._text(value)
        self._text("load_id")
        self._out += b"N"
        self._text("modules")
        self._out += b"]ub"

    # --- columns

    def _chunks(self, tensor: RecordColumns) -> None:
        """One ChunkStorageMetadata a slice; its offsets are memoised, MetadataIndex gets them back."""
        ndim, count = len(tensor.shape), len(tensor.starts)
        self._first_offset.append(self._next)
        self._next += count
        row = self._chunk_row(ndim, ndim > 0 and max(tensor.shape) > 0x7FFFFFFF)
        columns = [*tensor.offsets.T, *tensor.sizes.T]
        self._out += row.fill(columns, count)

    def _chunk_row(self, ndim: int, wide: bool) -> _Row:
        row = self._rows.get((ndim, wide))
        if row is None:
            size = self._captured(lambda: self._global("torch", "Size"))
            opening = self._captured(lambda: self._new("ChunkStorageMetadata"))
            offsets = opening + self._captured(lambda: self._text("offsets")) + size
            sizes = self._captured(lambda: self._text("sizes")) + size
            fields = _tuple_fields(ndim, wide)
            row = _Row([offsets, *fields, b"\x85R\x94" + sizes, *fields, b"\x85Rub"])
            self._rows[ndim, wide] = row
        return row

    def _slice_places(self, tensor: RecordColumns, first_offset: int) -> None:
        """One MetadataIndex -> _StorageInfo a slice."""
        order = np.arange(len(tensor.starts), dtype=np.int64)
        name_id = np.full(len(order), self._memo[tensor.name])
        columns = [name_id, first_offset + order, order, self._path_ids[tensor.files], tensor.starts, tensor.lengths]
        self._out += self._place_row().fill(columns, len(order))

    def _place_row(self) -> _Row:
        row = self._rows.get(None)
        if row is None:
            keys = ("fqn", "offset", "index", "relative_path", "length")
            key = {text: self._captured(lambda text=text: self._text(text)) for text in keys}  # type: ignore[misc]
            index = self._captured(lambda: self._new("MetadataIndex")) + key["fqn"] + b"j"
            info = self._captured(lambda: self._new("_StorageInfo")) + key["relative_path"] + b"j"
            parts: list[bytes | str] = [
                index,
                "<u4",
                key["offset"] + b"j",
                "<u4",
                key["index"] + b"J",
                "<i4",
                b"ub" + info,
                "<u4",
            ]
            row = _Row([*parts, key["offset"] + b"\x8a\x08", "<i8", key["length"] + b"\x8a\x08", "<i8", b"ub"])
            self._rows[None] = row
        return row

    def _captured(self, write: Callable[[], None]) -> bytes:
        """What `write` emits, taken out of the buffer: all it names must be in the memo by now."""
        mark = len(self._out)
        write()
        text = bytes(self._out[mark:])
        del self._out[mark:]
        return text

    def _remember(self) -> None:
        """Put into the memo what every slice names: MARK, the values, POP_MARK."""
        self._out += b"("
        for name in ("ChunkStorageMetadata", "MetadataIndex"):
            self._global(_MODULE, name)
        self._global(_FILESYSTEM, "_StorageInfo")
        self._global("torch", "Size")
        for text in ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", *self.paths):
            self._text(text)
        self._out += b"1"

    # --- values

    def _new(self, name: str, *, state: bytes = b"}(") -> None:
        self._global(_FILESYSTEM if name == "_StorageInfo" else _MODULE, name)
        self._out += b")\x81" + state

    def _global(self, module: str, name: str) -> None:
        if not self._get((module, name)):
            self._text(module)
            self._text(name)
            self._out += b"\x93"
            self._put((module, name))

    def _properties(self, dtype: str) -> None:
        """(dtype, layout, requires_grad, memory format, pin_memory), then BUILD; `(` is already out."""
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

    def _size(self, values: tuple[int, ...]) -> None:
        self._global("torch", "Size")
        self._out += b"(" + b"".join(map(_int, values)) + b"t\x85R"

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
        self._out += b"\x94"  # MEMOIZE: under the next number. LONG_BINPUT names one, which a reader must not trust
        self._next += 1


class _Row:
    """A run of opcodes with number fields (numpy type codes) at fixed places, filled for one slice or for many."""

    def __init__(self, parts: list[bytes | str]) -> None:
        codes = {"<u4": "I", "<i4": "i", "<i8": "q"}
        self._fields = [i for i, part in enumerate(parts) if isinstance(part, str)]
        self._parts = parts
        self._pack = struct.Struct("<" + "".join(codes[p] if isinstance(p, str) else f"{len(p)}s" for p in parts)).pack
        types = [(f"f{i}", p if isinstance(p, str) else f"V{len(p)}") for i, p in enumerate(parts)]
        values = tuple(0 if isinstance(p, str) else p for p in parts)
        self._template = np.array([values], np.dtype(types))

    def fill(self, columns: Sequence[Int64], count: int) -> bytes:
        """Return `count` rows; columns in the order of the fields."""
        if count < _FEW:
            arguments: list[Any] = list(self._parts)
            rows = []
            for i in range(count):
                for field, column in zip(self._fields, columns, strict=True):
                    arguments[field] = column[i]
                rows.append(self._pack(*arguments))
            return b"".join(rows)
        table = np.repeat(self._template, count)
        for field, column in zip(self._fields, columns, strict=True):
            table[f"f{field}"] = column
        return table.tobytes()


def _tuple_fields(ndim: int, wide: bool) -> list[bytes | str]:
    fields: list[bytes | str] = [b"("]
    for _ in range(ndim):
        fields += [b"\x8a\x08", "<i8"] if wide else [b"J", "<i4"]
    return [*fields, b"t"]


def _int(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
