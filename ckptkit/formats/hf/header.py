"""Parses the header of a safetensors file, and validates the header strictly.

The file consists of the header length n (8 bytes, little-endian), n bytes of JSON, and the data. The rules follow the
reference implementation (huggingface/safetensors, tensor.rs):

- n is at most 100 MB, and the JSON ends inside the file.
- The JSON is one object without duplicate keys.
- Every tensor's byte range has exactly the length that its dtype and shape require.
- The ranges cover the data completely, without gaps.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import from_safetensors
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.own.json import parse
from ckptkit.gc_pause import collector_paused
from ckptkit.storage import Store
from ckptkit.storage.pool import WorkerPool

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 64  # torch's own limit; it also bounds the product of a hostile shape
_MAX_EXTENT = 2**63 - 1
_FIRST_READ = 64 << 10
_HALF = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")  # a lone surrogate, as repr writes it
_THREADS = 8  # headers are small, so latency dominates on object stores


class HeaderTensor(NamedTuple):
    """A tensor in a header: torch's dtype name, the shape, and the bytes [start, start + nbytes) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A parsed header.

    Attributes:
        tensors: Tensors by name. Byte ranges are counted from the start of the file.
        metadata: The `__metadata__` strings.
        nbytes: Size of the file, or of the safetensors blob in a larger file.
    """

    tensors: Mapping[str, HeaderTensor]
    metadata: Mapping[str, str]
    nbytes: int


def read_header(store: Store, path: str, *, start: int = 0) -> SafetensorsHeader:
    """Read and check the header of `path`. Reads no tensor bytes.

    Args:
        start: Byte position of the safetensors blob in the file. The blob extends to the end of the file.
    """
    head = store.read(path, start, start + _FIRST_READ)
    if len(head) < 8:
        raise IncompleteCheckpointError(
            f"{path}: {len(head)} bytes are too few for a safetensors file. It is truncated."
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptCheckpointError(
            f"{path}: the safetensors header claims {length} bytes; {MAX_HEADER_BYTES} are allowed. "
            "The file is damaged, or is not a safetensors file."
        )
    raw = head[8 : 8 + length]
    if len(raw) < length:
        raw += store.read(path, start + len(head), start + 8 + length)
    if len(raw) < length:
        raise IncompleteCheckpointError(
            f"{path}: the header is {length} bytes long, but the file ends after {len(raw)} of them. It is truncated."
        )
    if not raw.startswith(b"{"):
        raise CorruptCheckpointError(f"{path} is not a safetensors file: its header does not start with '{{'.")
    members = _load_json(raw, path)
    metadata = _metadata(members.pop("__metadata__", None), path)
    data_start = start + 8 + length
    with collector_paused():
        tensors = {name: _tensor(name, value, data_start, path) for name, value in members.items()}
    end = _check_contiguous(tensors, data_start, path)
    _check_end(store, path, end)
    return SafetensorsHeader(tensors, metadata, end - start)


def read_headers(store: Store, paths: Iterable[str]) -> dict[str, SafetensorsHeader]:
    """Read and check the headers of several files. The result has the order of `paths`."""
    paths = list(paths)
    if len(paths) < 3:
        return {path: read_header(store, path) for path in paths}
    with WorkerPool(min(_THREADS, len(paths)), thread_name_prefix="ckptkit-header") as pool:
        return dict(zip(paths, pool.map(lambda path: read_header(store, path), paths), strict=True))


def _load_json(raw: bytes, path: str) -> dict[str, Any]:
    # Nested objects are kept as tuples of pairs, because a tuple per tensor is cheaper than a dict.
    pairs = parse(raw, file=f"{path}: the safetensors header", pairs=tuple)
    if b"\\u" in raw and _HALF.search(repr(pairs)):
        raise CorruptCheckpointError(f"{path}: the safetensors header has a lone surrogate, which is not valid UTF-8.")
    if not isinstance(pairs, tuple):
        raise CorruptCheckpointError(f"{path}: the safetensors header is not a JSON object.")
    return _unique(pairs, path, "")


def _unique(pairs: tuple[tuple[str, Any], ...], path: str, where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise CorruptCheckpointError(f"{path}: the safetensors header has the key {twice!r:.200}{where} twice.")
    return found


def _metadata(value: Any, path: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, tuple) or not all(isinstance(text, str) for _, text in value):
        raise CorruptCheckpointError(f"{path}: __metadata__ of the safetensors header must map strings to strings.")
    return _unique(value, path, " of __metadata__")


def _tensor(name: str, entry: Any, data_start: int, path: str) -> HeaderTensor:
    fields: dict[str, Any] = dict(entry) if isinstance(entry, tuple) and len(entry) == 3 else {}
    stated, shape, offsets = fields.get("dtype", ()), fields.get("shape", ()), fields.get("data_offsets", ())
    if not (isinstance(stated, str) and _are_sizes(shape, _MAX_DIMS) and _are_sizes(offsets, 2) and len(offsets) == 2):
        raise CorruptCheckpointError(
            f"{path}: the header's entry of tensor {name!r:.200} is {reprlib.repr(entry)}; expected a dtype, a shape "
            f"of at most {_MAX_DIMS} dimensions, and data_offsets [begin, end], with integers from 0 to 2^63 - 1."
        )
    try:
        dtype = from_safetensors(stated)
        stored = dtype.in_bytes(shape)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{path}: tensor {name!r}: {error}") from error
    nbytes = math.prod(stored) * dtype.itemsize
    begin, end = offsets
    if end - begin != nbytes:
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r} of dtype {stated} and shape {shape} needs {nbytes} bytes, but its data_offsets "
            f"{offsets} give it {end - begin}."
        )
    return HeaderTensor(dtype.name, stored, data_start + begin, nbytes)


def _are_sizes(values: Any, most: int) -> bool:
    if type(values) is not list or len(values) > most:
        return False
    for x in values:  # noqa: SIM110 - `all` takes three times as long
        if type(x) is not int or not 0 <= x <= _MAX_EXTENT:
            return False
    return True


def _check_contiguous(tensors: Mapping[str, HeaderTensor], data_start: int, path: str) -> int:
    """Check that the byte ranges have no gaps or overlaps, and return the end of the last range."""
    end = data_start
    for tensor in sorted(tensors.values(), key=itemgetter(2, 3)):  # start, nbytes
        start = tensor[2]
        if start != end:
            name = next(name for name, one in tensors.items() if one is tensor)
            what = "a hole" if start > end else "an overlap"
            raise CorruptCheckpointError(
                f"{path}: {what} in the data before tensor {name!r}: it begins at byte {start - data_start} of the "
                f"data, but the tensors before it end at {end - data_start}."
            )
        end += tensor[3]
    return end


def _check_end(store: Store, path: str, end: int) -> None:
    info = store.info(path)
    if info is not None and info.kind == "file":
        expected = info.size
    else:  # a symlink's size is unknown: read the last byte and the one after it
        expected = end - 1 + len(store.read(path, end - 1, end + 1))
    if expected < end:
        raise IncompleteCheckpointError(
            f"{path}: the header describes {end} bytes, but the file has {expected}. It is truncated."
        )
    if expected > end:
        raise CorruptCheckpointError(
            f"{path}: the file continues after byte {end}, where it should end. It is damaged."
        )


# --- writing headers, and distributing a Hugging Face model's tensors over shards


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor to write to a file, with the name, dtype and shape for the file's header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a file to write.

    Attributes:
        literals: (start, bytes) of everything except the tensors.
        starts: Byte offset of each tensor in the file, in the order in which the tensors were passed.
        nbytes: Size of the whole file.
        crcs: CRC-32 fields to fill in: (positions of the field, first byte covered, number of bytes covered).
    """

    literals: tuple[tuple[int, bytes], ...]
    starts: tuple[int, ...]
    nbytes: int
    crcs: tuple[tuple[tuple[int, ...], int, int], ...] = ()


def encode_names(text: str, names: Iterable[str]) -> bytes:
    """Encode a header's JSON `text`, which contains the tensors' `names`, as UTF-8.

    Raises:
        UnsupportedFormatError: A name is not valid Unicode.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = next((name for name in names if _HALF.search(repr(name))), "")
        raise UnsupportedFormatError(
            f"tensor name {bad!r} has a lone surrogate, which UTF-8 and safetensors cannot store. Rename it."
        ) from error


def encode_header(
    tensors: Sequence[TensorToWrite], starts: Sequence[int], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header for tensors that start at the byte offsets `starts` in the data.

    Raises:
        UnsupportedFormatError: safetensors does not support a dtype, or a name is not allowed or occurs twice.
    """
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for tensor, start in zip(tensors, starts, strict=True):
        if tensor.name in fields or tensor.name == "__metadata__":
            raise UnsupportedFormatError(f"tensor name {tensor.name!r} is duplicate, or not allowed in safetensors.")
        dtype = dtype_of(tensor.dtype)
        if dtype.safetensors is None:
            raise UnsupportedFormatError(f"tensor {tensor.name!r}: safetensors has no dtype {tensor.dtype}.")
        span, shape = [start, start + tensor.nbytes], list(dtype.in_numbers(tensor.shape))
        fields[tensor.name] = {"dtype": dtype.safetensors, "shape": shape, "data_offsets": span}
    text = encode_names(json.dumps(fields, separators=(",", ":"), ensure_ascii=False), fields)
    text += b" " * (-len(text) % 8)  # like the reference implementation, aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text


def lay_out(tensors: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Lay out a file. Tensors with larger elements come first, so that each tensor is aligned.

    Tensors whose elements have the same size keep the given order.
    """
    widths = {name: min(8, dtype_of(name).itemsize) for name in {tensor.dtype for tensor in tensors}}
    order = sorted(range(len(tensors)), key=lambda i: -widths[tensors[i].dtype])
    starts = [0] * len(tensors)
    at = 0
    for i in order:
        starts[i] = at
        at += tensors[i].nbytes
    header = encode_header([tensors[i] for i in order], [starts[i] for i in order], metadata)
    return FileLayout(((0, header),), tuple(len(header) + start for start in starts), len(header) + at)


def split_into_shards(nbytes: Sequence[int], max_shard_size: int) -> list[list[int]]:
    """Distribute tensors over shards in the given order. Returns the indices of the tensors in each shard.

    If the next tensor does not fit into a shard, a new shard begins. A tensor larger than `max_shard_size` gets its own
    shard.
    """
    shards: list[list[int]] = [[]]
    size = 0
    for i, count in enumerate(nbytes):
        if shards[-1] and size + count > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(i)
        size += count
    return shards


def shard_names(count: int) -> list[str]:
    """Return the file names of `count` shards: "model.safetensors", or "model-00001-of-00002.safetensors", ..."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def encode_index(weight_map: Mapping[str, str], *, total_size: int, total_parameters: int) -> bytes:
    """Return the contents of `model.safetensors.index.json`."""
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    document = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()
