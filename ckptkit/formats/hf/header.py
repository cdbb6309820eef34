"""Parses the header of a safetensors file, and validates the header strictly.

The file consists of the header length n (8 bytes, little-endian), n bytes of JSON, and the data. The rules follow the
reference implementation (huggingface/safetensors, tensor.rs):

- n is at most 100 MB, and the JSON ends inside the file.
- The JSON is one object without duplicate keys.
- Every tensor's byte range has exactly the length that its dtype and shape require.
- The ranges cover the data completely, without gaps.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import from_safetensors
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.own.json import parse
from ckptkit.storage import Store
from ckptkit.storage.pool import WorkerPool

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 64  # torch's own limit; it also bounds the product of a hostile shape
_MAX_EXTENT = 2**63 - 1
_MOST_NUMEL = 2.0**50  # most elements that a tensor may have; with more, 64-bit products overflow
_FIELDS = ("dtype", "shape", "data_offsets")
_FIRST_READ = 64 << 10
_HALF = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")  # a lone surrogate, as repr writes it
_first, _second = itemgetter(0), itemgetter(1)
UInt64 = npt.NDArray[np.uint64]  # offsets are below 2^63 relative to the data, but not necessarily relative to the file
_THREADS = 8  # headers are small, so latency dominates on object stores


class HeaderTensor(NamedTuple):
    """A tensor in a header: torch's dtype name, the shape, and the bytes [start, start + nbytes) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class HeaderTensors(Mapping[str, HeaderTensor]):
    """The tensors in a header by name, stored as columns.

    A header may have 300,000 tensors, so an object is created only for a tensor that is looked up.

    Attributes:
        dtypes, shapes: torch's dtype name and the shape of each tensor, in header order.
        starts, nbytes: [n] start of each tensor in the file, and size of each tensor in bytes.
    """

    __slots__ = ("_rows", "dtypes", "nbytes", "shapes", "starts")

    def __init__(
        self,
        names: Iterable[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        starts: UInt64,
        nbytes: UInt64,
    ) -> None:
        self._rows = dict(zip(names, itertools.count()))
        self.dtypes, self.shapes = dtypes, shapes
        self.starts, self.nbytes = starts, nbytes

    def __getitem__(self, name: str) -> HeaderTensor:
        row = self._rows[name]
        return HeaderTensor(self.dtypes[row], tuple(self.shapes[row]), self.starts.item(row), self.nbytes.item(row))

    def columns(self) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        """Yield (name, dtype, shape, start, nbytes) of each tensor, in header order."""
        shapes = map(tuple, self.shapes)
        return zip(self._rows, self.dtypes, shapes, self.starts.tolist(), self.nbytes.tolist(), strict=True)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A parsed header.

    Attributes:
        tensors: Tensors by name. Byte ranges are counted from the start of the file.
        metadata: The `__metadata__` strings.
        nbytes: Size of the file, or of the safetensors blob in a larger file.
    """

    tensors: HeaderTensors
    metadata: Mapping[str, str]
    nbytes: int


def read_header(store: Store, path: str, *, start: int = 0) -> SafetensorsHeader:
    """Read and check the header of `path`. Reads no tensor bytes.

    Args:
        start: Byte position of the safetensors blob in the file. The blob extends to the end of the file.

    Raises:
        IncompleteCheckpointError: The file is shorter than its header says.
        CorruptCheckpointError: The header violates the format.
        UnsupportedFormatError: A dtype is unknown.
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
    tensors = _columns(members, data_start)
    if tensors is None:
        found = [_tensor(name, value, data_start, path) for name, value in members.items()]
        dtypes, shapes, starts, nbytes = zip(*found, strict=True) if found else ((), (), (), ())
        tensors = HeaderTensors(members, dtypes, shapes, np.array(starts, np.uint64), np.array(nbytes, np.uint64))
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


def _columns(members: Mapping[str, Any], data_start: int) -> HeaderTensors | None:
    """Parse the entries of all tensors at once, which is faster than one by one.

    Returns None if an entry is unusual or invalid. The caller then parses each entry with `_tensor`, which reports
    errors.
    """
    entries = list(members.values())
    if not _all_of(entries, tuple) or set(map(len, entries)) - {len(_FIELDS)}:
        return None
    pairs = list(itertools.chain.from_iterable(entries))
    keys = list(map(_first, pairs))
    if keys != list(_FIELDS) * len(entries):
        return None
    values = list(map(_second, pairs))
    stated, shapes, offsets = values[0::3], values[1::3], values[2::3]
    if not (_all_of(stated, str) and _all_of(shapes, list) and _all_of(offsets, list)):
        return None
    try:
        known = {name: from_safetensors(name) for name in set(stated)}
    except UnsupportedFormatError:
        return None
    if any(dtype.bits < 8 for dtype in known.values()):
        return None
    sizes, spans = _numbers(shapes), _numbers(offsets)
    ndims = np.fromiter(map(len, shapes), np.int64, len(shapes))
    if sizes is None or spans is None or set(map(len, offsets)) - {2} or ndims.max(initial=0) > _MAX_DIMS:
        return None
    begins, ends = spans.reshape(-1, 2).T
    first = np.cumsum(ndims) - ndims
    numels, most = np.ones(len(shapes), np.uint64), np.ones(len(shapes))
    with np.errstate(over="ignore", invalid="ignore"):
        for dim in range(int(ndims.max(initial=0))):
            rows = np.flatnonzero(ndims > dim)
            column = sizes[first[rows] + dim]
            numels[rows] *= column
            most[rows] *= column
    nbytes = numels * np.array([known[name].itemsize for name in stated], np.uint64)
    if not (most < _MOST_NUMEL).all() or (begins > ends).any() or (ends - begins != nbytes).any():
        return None
    return HeaderTensors(members, [known[name].name for name in stated], shapes, begins + np.uint64(data_start), nbytes)


def _all_of(values: Iterable[Any], kind: type[Any]) -> bool:
    return not set(map(type, values)) - {kind}


def _numbers(lists: Sequence[list[Any]]) -> UInt64 | None:
    """Return the concatenated lists, or None if an item is not an integer in [0, 2^63)."""
    values = list(itertools.chain.from_iterable(lists))
    if not _all_of(values, int) or (values and (min(values) < 0 or max(values) > _MAX_EXTENT)):
        return None  # JSON true is a bool
    return np.array(values, np.uint64)


def _tensor(name: str, value: Any, data_start: int, path: str) -> HeaderTensor:
    if not isinstance(value, tuple):
        raise CorruptCheckpointError(f"{path}: header entry {name!r} is not an object.")
    fields = dict(value)
    if len(fields) != len(value):
        _unique(value, path, f" of {name!r}")
    if fields.keys() != set(_FIELDS):
        raise CorruptCheckpointError(
            f"{path}: header entry {name!r} has the keys {sorted(fields)}; expected dtype, shape and data_offsets."
        )
    if not isinstance(fields["dtype"], str):
        raise CorruptCheckpointError(f"{path}: dtype of tensor {name!r} is not a string.")
    shape = _naturals(fields["shape"], "shape", name, path)
    offsets = _naturals(fields["data_offsets"], "data_offsets", name, path)
    if len(shape) > _MAX_DIMS or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r} has {len(shape)} dimensions and data_offsets {list(offsets[:8])}; expected at "
            f"most {_MAX_DIMS} dimensions and [begin, end] with begin <= end."
        )
    stated = shape
    try:
        dtype = from_safetensors(fields["dtype"])
        shape = dtype.in_bytes(stated)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{path}: tensor {name!r}: {error}") from error
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r} of dtype {dtype.safetensors} and shape {list(stated)} needs {nbytes} bytes, but "
            f"its data_offsets {list(offsets)} give it {offsets[1] - offsets[0]}."
        )
    return HeaderTensor(dtype.name, shape, data_start + offsets[0], nbytes)


def _naturals(value: Any, what: str, name: str, path: str) -> tuple[int, ...]:
    # `type(x) is int` excludes JSON's true, which is an int to isinstance.
    if isinstance(value, list):
        for x in value:
            if type(x) is not int or not 0 <= x <= _MAX_EXTENT:
                break
        else:
            return tuple(value)
    raise CorruptCheckpointError(f"{path}: {what} of {name!r} must be a list of integers from 0 to 2^63 - 1.")


def _check_contiguous(tensors: HeaderTensors, data_start: int, path: str) -> int:
    """Check that the byte ranges have no gaps or overlaps, and return the end of the last range."""
    order = np.lexsort((tensors.nbytes, tensors.starts))
    starts, nbytes = tensors.starts[order], tensors.nbytes[order]
    ends = np.concatenate([np.array([data_start], np.uint64), starts + nbytes])
    wrong = np.flatnonzero(starts != ends[:-1])
    if len(wrong):
        row = int(wrong[0])
        start, end, name = int(starts[row]), int(ends[row]), list(tensors)[int(order[row])]
        what = "a hole" if start > end else "an overlap"
        raise CorruptCheckpointError(
            f"{path}: {what} in the data before tensor {name!r}: it begins at byte {start - data_start} "
            f"of the data, but the tensors before it end at {end - data_start}."
        )
    return int(ends[-1])


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
    """Encode a header's JSON `text` as UTF-8.

    Raises:
        UnsupportedFormatError: A name has a lone surrogate, which UTF-8 can't represent.
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
