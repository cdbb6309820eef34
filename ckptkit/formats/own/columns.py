"""Reads and writes numpy columns and a JSON header as one safetensors block, with strict validation.

The layout is that of safetensors: the header length in eight bytes, a JSON header, and the columns. All columns are
one-dimensional arrays of integers, so no pickle or other parser is needed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.own.json import parse

Column = npt.NDArray[Any]

_NAMES = {"uint8": "U8", "int32": "I32", "int64": "I64", "uint64": "U64"}
_DTYPES = {short: np.dtype(name).newbyteorder("<") for name, short in _NAMES.items()}
_KEY = "ckptkit"
_MAX_HEADER = 1 << 30
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Columns:
    """The result of `unpack`: the columns by name, as views of the bytes, and the JSON header."""

    arrays: Mapping[str, Column]
    header: Mapping[str, Any]
    file: str

    def get(self, name: str, dtype: str, count: int | None = None) -> Column:
        """Return a column. Raises CorruptCheckpointError if the column is missing or has a wrong dtype or length."""
        found = self.arrays.get(name)
        if found is None:
            raise CorruptCheckpointError(f"{self.file}: the column {name!r} is missing.")
        if found.dtype != np.dtype(dtype).newbyteorder("<"):
            raise CorruptCheckpointError(f"{self.file}: column {name!r} is {found.dtype}, expected {dtype}.")
        if count is not None and len(found) != count:
            raise CorruptCheckpointError(f"{self.file}: column {name!r} has {len(found)} rows, expected {count}.")
        return found

    def field(self, name: str, kind: type[Any]) -> Any:
        """Return a field of the header. Raises CorruptCheckpointError if the field is missing or has a wrong type."""
        value = self.header.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CorruptCheckpointError(
                f"{self.file}: {name!r} in its header is {type(value).__name__}, expected {kind.__name__}."
            )
        return value


def pack(arrays: Mapping[str, Column], header: Mapping[str, Any]) -> bytes:
    """Pack columns and a JSON header into bytes. Wider columns come first, so that all columns are aligned."""
    widths = {name: arrays[name].dtype.itemsize for name in sorted(arrays)}
    order = sorted(widths, key=widths.__getitem__, reverse=True)  # stable: columns of equal width stay sorted by name
    fields: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(header, separators=(",", ":"), allow_nan=False)}}
    at, parts = 0, []
    for name in order:
        column = np.ascontiguousarray(arrays[name])
        short = _NAMES[column.dtype.name]
        fields[name] = {"dtype": short, "shape": [len(column)], "data_offsets": [at, at + column.nbytes]}
        at += column.nbytes
        parts.append(column.astype(_DTYPES[short], copy=False).data.cast("B") if len(column) else b"")
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return b"".join((struct.pack("<Q", len(text)), text, *parts))


def unpack(data: bytes | bytearray | memoryview, *, file: str) -> Columns:
    """Return the columns in `data` as views of `data`.

    Args:
        file: Name of the data for error messages.

    Raises:
        CorruptCheckpointError: `data` is not a result of `pack`.
    """
    view = memoryview(data)
    if len(view) < 8:
        raise CorruptCheckpointError(f"{file}: {len(view)} bytes, too few for a header. It is truncated.")
    (length,) = struct.unpack("<Q", view[:8])
    if length > min(_MAX_HEADER, len(view) - 8):
        raise CorruptCheckpointError(
            f"{file}: the header claims {length} bytes, but the file has {len(view)}. It is truncated."
        )
    fields, header = fields_of(bytes(view[8 : 8 + length]), file)
    body = view[8 + length :]
    arrays = {name: _column(name, spec, body, file) for name, spec in fields.items()}
    if sum(array.nbytes for array in arrays.values()) != len(body):
        raise CorruptCheckpointError(f"{file}: its columns do not fill its {len(body)} bytes of data exactly.")
    return Columns(arrays, header, file)


def fields_of(text: bytes, file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the descriptions of the columns, and the header that was passed to `pack`.

    Raises:
        CorruptCheckpointError: `text` is not the header of a result of `pack`.
    """
    fields = parse(text, file=f"{file}: its header")
    metadata = fields.pop("__metadata__", None) if isinstance(fields, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get(_KEY), str):
        raise CorruptCheckpointError(f"{file}: this safetensors file was not written by ckptkit.")
    header = parse(metadata[_KEY], file=f"{file}: its header")
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{file}: its header is not a JSON object.")
    return fields, header


def _column(name: str, spec: Any, body: memoryview, file: str) -> Column:
    try:
        dtype = _DTYPES[spec["dtype"]]
        (count,) = spec["shape"]
        start, stop = spec["data_offsets"]
        ints = all(type(v) is int for v in (count, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(f"{file}: column {name!r} is not an integer column.") from error
    if not ints or not 0 <= start <= stop <= len(body) or count < 0 or stop - start != count * dtype.itemsize:
        raise CorruptCheckpointError(f"{file}: column {name!r} is outside the file, or its length is wrong.")
    return np.frombuffer(body, dtype, count, start) if count else np.zeros(0, dtype)


def pack_texts(texts: Sequence[str], name: str) -> dict[str, Column]:
    """Pack a list of strings into two columns: `name` (concatenated UTF-8) and `name.ends` (end of each string)."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), dtype=np.int64)
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}.ends": ends}


def unpack_texts(columns: Columns, name: str) -> list[str]:
    """Return the list of strings that `pack_texts` stored. Raises CorruptCheckpointError if a column is damaged."""
    data = columns.get(name, "uint8").tobytes()
    ends = columns.get(f"{name}.ends", "int64")
    if (len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any())) or (int(ends[-1]) if len(ends) else 0) != len(data):
        raise CorruptCheckpointError(f"{columns.file}: the string table {name!r} is damaged.")
    try:
        start, texts = 0, []
        for end in ends.tolist():
            texts.append(data[start:end].decode("utf-8", "surrogatepass"))
            start = end
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{columns.file}: the string table {name!r} is not valid UTF-8.") from error
    return texts
