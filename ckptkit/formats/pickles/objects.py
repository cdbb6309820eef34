"""Decodes the objects of a catalog to plain Python values or, in a training job, with torch's own loader."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckptkit.catalog.entry import Codec, ObjectEntry
from ckptkit.errors import (
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from ckptkit.formats.own.json import check_density
from ckptkit.formats.pickles.inert import NDArray, Record, TorchDType, UnknownGlobal
from ckptkit.formats.pickles.legacy import is_legacy, read_legacy
from ckptkit.formats.pickles.tensors import DTensorRecord, ShardedTensorRecord, Storage, StoredTensor
from ckptkit.formats.pickles.values import MOMENTS, numpy_array, numpy_dtype, numpy_scalar
from ckptkit.formats.pickles.walk import Unknown, guarded, loads
from ckptkit.formats.pickles.zip import file_size, memory_store, read_archive
from ckptkit.formats.sources import ZstdStream
from ckptkit.storage.store import Store

_MAX_OBJECT_BYTES = 4 << 30
_MAX_JSON_BYTES = 256 << 20
_MAX_DEPTH = 100
_HDF5 = b"\x89HDF\r\n\x1a\n"
_MAX_NODES = 4_000_000
_NUMPY = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
     "bool", "complex64", "complex128")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor inside an object, with a dtype that numpy lacks. `data` is row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Inert:
    """Replaces a pickled instance of a class that is not rebuilt. Stores the class name and the arguments.

    Attributes:
        kind: Full name of the class: "module.Class".
        known: Whether the class is on the allow-list. An instance of any other class is kept only if the caller has set
            `allow_pickle`.
    """

    kind: str
    args: tuple[Any, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    items: Sequence[Any] = ()
    known: bool = True


_PLAIN = (np.ndarray, np.generic, TensorValue, Inert, *MOMENTS)


def read_object(
    store: Store,
    entry: ObjectEntry,
    *,
    allow_pickle: bool = False,
    tensor: Callable[[np.ndarray[Any, Any] | TensorValue], Any] | None = None,
) -> Any:
    """Return an entry's value as plain Python values.

    Tensors become numpy arrays, and instances of classes that ckptkit does not rebuild become `Inert`. Runs no code
    from the entry, and does not import torch.

    Args:
        tensor: Converts the array of each tensor, for example to a torch tensor. By default, arrays stay arrays.
        allow_pickle: Keep instances of classes that are not on the allow-list as `Inert`. If False, raise an error.

    Raises:
        UnsafePickleError: The entry has an instance of a class that is not on the allow-list.
        UnsupportedFormatError: The entry is too large, or part of it can't be read without loss.
        CorruptCheckpointError: The bytes are damaged.
    """
    label = f"{entry.path} ({entry.name})" if entry.path and entry.name else entry.path or entry.name

    def read(stored: StoredTensor) -> Any:
        array = read_tensor(store, stored)
        return array if tensor is None else tensor(array)

    if entry.encoding == "value":
        return plain(entry.value, file=label, read=read)
    if entry.encoding == "json":
        label = f"{entry.path} ({entry.name})"
        end = entry.start + min(entry.nbytes or _MAX_JSON_BYTES + 1, _MAX_JSON_BYTES + 1)
        raw = store.read(entry.path, entry.start, end)
        if len(raw) > _MAX_JSON_BYTES:
            raise CorruptCheckpointError(
                f"{label}: more than {_MAX_JSON_BYTES} bytes of JSON, too much for any checkpoint."
            )
        check_density(raw, file=label)
        try:
            return json.loads(raw)  # not our strict parser, because trainer_state.json may contain NaN
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{label}: it is not JSON: {error}.") from None
    if entry.codec is not None:
        stop = entry.start + entry.nbytes if entry.nbytes else None
        data = decode_record(store, entry.path, entry.codec, limit=stop)
        store = memory_store(entry.path, data)
        start, nbytes = entry.start, entry.nbytes or len(data) - entry.start
    else:
        start, nbytes = entry.start, entry.nbytes or file_size(store, entry.path) - entry.start
    if nbytes > _MAX_OBJECT_BYTES:
        limit = _MAX_OBJECT_BYTES >> 30
        raise UnsupportedFormatError(f"{label}: an object of {nbytes} bytes; at most {limit} GiB are read.")
    unknown: Unknown = "record" if allow_pickle else "refuse"
    value = read_pickled(store, entry.path, start, nbytes, file=label, unknown=unknown)
    return plain(value, file=label, read=read)


def read_pickled(
    store: Store, path: str, start: int = 0, nbytes: int | None = None, *, file: str, unknown: Unknown
) -> Any:
    """Return what torch.save or pickle wrote to bytes [start, start + nbytes) of a file, with stubs for tensors.

    Args:
        nbytes: By default, up to the end of the file.
        file: Name for error messages.
        unknown: See `walk.loads`.
    """
    stop = None if nbytes is None else start + nbytes
    head = store.read(path, start, min(start + 512, start + 512 if stop is None else stop))
    if head[:2] == b"PK":
        return read_archive(store, path, start, nbytes, unknown=unknown)
    if start == 0 and is_legacy(head):
        return read_legacy(store, path, unknown=unknown)
    if head[:1] == b"\x80":
        data = store.read(path, start, stop)
        if data[-22:-18] == b"PK\x05\x06":
            raise CorruptCheckpointError(
                f"{file}: its first bytes are missing: it ends like a zip archive of torch.save, but begins with the "
                "pickle inside."
            )
        return loads(data, file=file, unknown=unknown)
    if not head:
        raise CorruptCheckpointError(f"{file} is empty (0 bytes). Was its write interrupted?")
    if head.startswith(_HDF5):
        raise UnsupportedFormatError(
            f"{file} is an HDF5 file, as Keras writes. ckptkit does not read HDF5: load it in Keras, and save the "
            "weights with torch.save or safetensors."
        )
    if head[257:262] == b"ustar":
        raise UnsupportedFormatError(
            f"{file} is a tar archive. ckptkit does not read those of torch 0.1: if you trust the file, load it with "
            "torch.load(weights_only=False), and save it again."
        )
    raise CorruptCheckpointError(
        f"{file}: it begins with {head[:8]!r}. Expected a torch.save file, or a pickle of protocol 2 or newer."
    )


def load_object_torch(store: Store, entry: ObjectEntry) -> Any:
    """Load an entry's value with torch's own weights_only loader. Imports torch.

    Entries that are not torch.save files are read by `read_object` instead.
    """
    if entry.encoding != "torch_save":
        return read_object(store, entry)
    from ckptkit.formats.pickles.weights_only import parse_object

    stop = entry.start + entry.nbytes if entry.nbytes else None
    if entry.codec:
        data = decode_record(store, entry.path, entry.codec, limit=stop)
    else:
        data = store.read(entry.path, entry.start, stop)
    return parse_object(data, file=entry.path, name=entry.name)


def decode_record(store: Store, path: str, codec: Codec, *, limit: int | None = None) -> bytes:
    """Decompress a record into memory.

    Args:
        limit: Maximum decompressed size. By default 64 times the stored size, but at least 64 MiB and at most 4 GiB.
    """
    if limit is None:
        limit = min(_MAX_OBJECT_BYTES, max(64 << 20, 64 * codec.nbytes))
    packed = store.read(path, codec.start, codec.start + codec.nbytes)
    return decode_zstd(packed, limit, file=f"{path} at byte {codec.start}")


def decode_zstd(packed: bytes, limit: int, *, file: str) -> bytes:
    """Decompress bytes. Raises CorruptCheckpointError if the result has more than `limit` bytes."""
    stream, done, block = ZstdStream(packed, file=file), bytearray(), memoryview(bytearray(1 << 20))
    while got := stream.readinto(block):
        done += block[:got]
        if len(done) > limit:
            raise CorruptCheckpointError(f"{file}: it decodes to more than the {limit} bytes it should have.")
    return bytes(done)


def read_tensor(store: Store, tensor: StoredTensor) -> np.ndarray[Any, Any] | TensorValue:
    """Read a tensor as a numpy array, or as a `TensorValue` if numpy lacks the dtype.

    All tensors of a pickle together are at most 16 MiB larger than their storages, because the parser refuses views
    that expand a storage further.
    """
    raw = bytearray(tensor.nbytes)
    if raw:
        store.read_into(tensor.path, tensor.start, memoryview(raw))
    element = np.dtype(tensor.dtype) if tensor.dtype in _NUMPY else np.dtype(f"V{tensor.itemsize}")
    if tensor.numel == 0:
        array = np.empty(tensor.shape, element)
    else:
        flat = np.frombuffer(raw, element)
        steps = [s * tensor.itemsize for s in tensor.strides]
        array = np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, steps)).reshape(tensor.shape)
    if tensor.dtype in _NUMPY:
        return array
    return TensorValue(tensor.dtype, tensor.shape, array.tobytes())


def plain(value: Any, *, file: str, read: Callable[[StoredTensor], Any] | None = None) -> Any:
    """Return `value` with the stand-ins for pickled objects (`inert.Stub`) converted to plain Python values.

    Values that are already plain stay as they are. Shared objects stay shared.

    Args:
        read: Returns a tensor's value. Without `read`, tensors stay `StoredTensor`s.
    """
    return guarded(file, lambda: _Plain(read).of(value, 0)[0])


class _Plain:
    """Converts one value for `plain`, and counts how many values the result would have if nothing were shared."""

    def __init__(self, read: Callable[[StoredTensor], Any] | None) -> None:
        self.read = read
        self.done: dict[int, tuple[Any, int]] = {}
        self.open: set[int] = set()
        self.made: list[Any] = []  # keeps new containers alive, so that no id in `done` is reused

    def of(self, value: Any, depth: int) -> tuple[Any, int]:
        if value is None or type(value) in (str, int, float, bool, bytes, complex):
            return value, 1
        known = self.done.get(id(value))
        if known is not None:
            return known
        if depth > _MAX_DEPTH or id(value) in self.open:
            raise ValueError("it is nested too deeply, or contains itself")
        self.open.add(id(value))
        made, size = self._convert(value, depth + 1)
        self.open.discard(id(value))
        if size > _MAX_NODES:
            raise UnsupportedFormatError(f"it unfolds to more than {_MAX_NODES} values")
        self.done[id(value)] = (made, size)
        return made, size

    def _of_made(self, value: Any, depth: int) -> tuple[Any, int]:
        self.made.append(value)
        return self.of(value, depth)

    def _convert(self, value: Any, depth: int) -> tuple[Any, int]:
        if isinstance(value, dict):
            keys, n = self._all(list(value.keys()), depth)
            values, m = self._all(list(value.values()), depth)
            return dict(zip(keys, values, strict=True)), n + m
        if isinstance(value, (list, tuple)):
            items, n = self._all(value, depth)
            return (tuple(items) if isinstance(value, tuple) else items), n
        if isinstance(value, (set, frozenset)):
            items, n = self._all(list(value), depth)
            return type(value)(items), n
        if isinstance(value, (DTensorRecord, ShardedTensorRecord)):
            return value, 1
        if isinstance(value, Record) and not isinstance(value, NDArray):
            return self._record(value, depth)
        return self._leaf(value), 1

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, StoredTensor):
            return value if self.read is None else self.read(value)
        if isinstance(value, TorchDType):
            return f"torch.{value.name}"
        if isinstance(value, NDArray):
            if not isinstance(value.state, tuple) or len(value.state) != 5:
                raise ValueError("a numpy array has no data")
            _, shape, dtype, fortran, raw = value.state
            return numpy_array(shape, _dtype(dtype), fortran, raw)
        if isinstance(value, type) and issubclass(value, Record):
            return Inert(value.kind or "object", known=not issubclass(value, UnknownGlobal))
        if isinstance(value, Storage):
            return Inert("torch.Storage", (value.dtype, value.nbytes))
        return value if isinstance(value, _PLAIN) else Inert(type(value).__name__)

    def _all(self, values: Sequence[Any], depth: int) -> tuple[list[Any], int]:
        items, total = [], 1
        for value in values:
            item, size = self.of(value, depth)
            items.append(item)
            total += size
        return items, total

    def _record(self, value: Record, depth: int) -> tuple[Any, int]:
        made = _REBUILD[value.kind](value) if value.kind in _REBUILD else NotImplemented
        if made is not NotImplemented:
            return made, 1
        args, a = self.of(value.args, depth)
        if value.fields:
            # An OmegaConf node refers to its parent. Following that reference would be a cycle.
            fields, b = self._of_made({k: v for k, v in value.fields.items() if k != "_parent"}, depth)
        else:
            state, b = self.of(value.state, depth)
            fields = {} if state is None else {"state": state}
        items, c = self._of_made(list(value.items.items()) or value.entries, depth)
        if value.kind in ("argparse.Namespace", "types.SimpleNamespace"):
            return fields, b
        return Inert(value.kind, args, fields, items, not isinstance(value, UnknownGlobal)), a + b + c


# --- values that are safe to build, because every argument is checked first


def _dtype(value: Any) -> np.dtype[Any]:
    if not isinstance(value, Record) or value.kind != "numpy.dtype" or not value.args:
        raise ValueError("a numpy dtype is not known")
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "="
    return numpy_dtype(value.args[0], order)


def _scalar(value: Record) -> Any:
    return numpy_scalar(_dtype(value.args[0]), value.args[1])


def _path(value: Record) -> Any:
    parts = [part for part in value.args if isinstance(part, str)]
    return posixpath.join(*parts) if parts else "."


def _buffer(value: Record) -> Any:
    """Return the bytes of an io.BytesIO, which Megatron uses for `_extra_state`.

    The pickled state is (bytes, position, attributes).
    """
    state = value.state
    return state[0] if isinstance(state, tuple) and state and isinstance(state[0], bytes) else NotImplemented


def _checked(make: Callable[..., Any]) -> Callable[[Record], Any]:
    """Return a function that calls `make` with a record's arguments.

    That function returns NotImplemented if `make` refuses the arguments.
    """

    def of(value: Record) -> Any:
        try:
            return make(*value.args)
        except (TypeError, ValueError):
            return NotImplemented

    return of


def _text(value: Record) -> Any:
    return value.args[0] if len(value.args) == 1 and type(value.args[0]) is str else NotImplemented


def _slice(value: Record) -> Any:
    if 1 <= len(value.args) <= 3 and all(arg is None or type(arg) is int for arg in value.args):
        return slice(*value.args)
    return NotImplemented


_REBUILD: dict[str, Callable[[Record], Any]] = {
    **{
        f"{home}.{name}": _path
        for home in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "torch.device": lambda value: ":".join(str(arg)[:32] for arg in value.args) or "cpu",
    "torch.torch_version.TorchVersion": _text,
    "_io.BytesIO": _buffer,
    **{f"datetime.{kind.__name__}": _checked(make) for kind, make in MOMENTS.items()},
    "builtins.slice": _slice,
    "__builtin__.slice": _slice,
}
