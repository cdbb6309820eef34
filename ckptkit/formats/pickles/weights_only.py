"""Reads and writes objects as torch.save bytes in a training job.

This is the only module that calls torch's unpickler, always with weights_only=True. torch refuses dates, paths,
collections and numpy arrays. If an archive contains such values, and otherwise only plain data and dense tensors,
`walk` reads the archive instead, with functions that check every argument.

Before torch loads an archive, our zip reader refuses compressed members, because torch would expand them in memory.
After torch has loaded an archive, tensors that are larger than their storage are refused.
"""

from __future__ import annotations

import _compat_pickle
import collections
import datetime
import io
import pathlib
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from ckptkit.errors import (
    CkptkitError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.pickles.allowed import ALLOWED
from ckptkit.formats.pickles.inert import Function, StorageType, TorchDType
from ckptkit.formats.pickles.tensors import Storage, StoredTensor, TensorRebuilder
from ckptkit.formats.pickles.values import MOMENTS, check_array, numpy_array, numpy_dtype, numpy_scalar, typed
from ckptkit.formats.pickles.walk import guarded, walk
from ckptkit.formats.pickles.zip import Archive, memory_store, storage_of
from ckptkit.units import first_few

_ADVICE = (
    "ckptkit never runs code from pickles. If you trust the source of the file, allow the class with "
    "torch.serialization.add_safe_globals, or load it in your own job with torch.load(weights_only=False) and "
    "save it again as plain values."
)
_MAX_DEPTH = 200
_UNFOLDED = 16 << 20  # bytes; up to this size, a tensor may exceed its storage (`expand` repeats elements)


def dump_object(value: Any, *, name: str, advice: str) -> bytes:
    """Encode a value with torch.save, after checking that torch.load with weights_only=True can load the result.

    Raises:
        SaveError: The value can't be saved in a way that loads without running code. The message ends with `advice`.
    """
    return _dumped(value, lambda data: torch.load(io.BytesIO(data), weights_only=True), name, advice)


def dump_plain(value: Any, *, name: str, advice: str) -> bytes:
    """Encode a value with torch.save, after checking that `parse_object` can load the result.

    Raises the same errors as `dump_object`.
    """
    return _dumped(value, lambda data: parse_object(data, file=name), name, advice)


def _dumped(value: Any, read: Callable[[bytes], Any], name: str, advice: str) -> bytes:
    buffer, contained = io.BytesIO(), ""
    try:
        torch.save(value, buffer)
        try:
            read(buffer.getvalue())
        except Exception:
            buffer.seek(0)
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(buffer))
            contained = f" It contains {first_few(refused)}." if refused else ""
            raise
    except MemoryError:
        raise
    except Exception as error:  # pickling runs the value's own code, which may raise anything
        if _is_lack_of_memory(error) or _is_lack_of_memory(error.__context__):  # the context of a LoadError
            raise SaveError(f"{name}: not enough memory to save it: {error}") from error
        raise SaveError(
            f"{name}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be saved so that it "
            f"loads without running code.{contained} Save its plain values instead, {advice}"
        ) from error
    return buffer.getvalue()


def _is_lack_of_memory(error: BaseException | None) -> bool:
    # torch's allocators raise RuntimeErrors: OutOfMemoryError on a device, and "can't allocate memory" on the CPU.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def parse_object(data: bytes | bytearray | memoryview, *, file: str, name: str = "") -> Any:
    """Load the value from torch.save bytes, on the CPU.

    Raises:
        UnsafePickleError: The pickle refers to a class that torch's weights_only loader refuses and that is not plain
            data. No code from the pickle was run.
        UnsupportedFormatError: A value can't be read without loss.
        CorruptCheckpointError: The archive is damaged or compressed, or has tensors larger than their storage.
        LoadError: torch can't load the archive.
    """
    label = f"{file}: the object {name!r:.120}" if name else file
    raw = bytes(data)
    archive = Archive(memory_store(label, raw), label) if raw[:2] == b"PK" else None
    if archive is not None:  # torch.load does not check the CRC-32s
        archive.check()
    try:
        value = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if archive is not None:
            return _plain_object(archive)
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise _refusal(label, found[1] if found else "") from None
    except CkptkitError:
        raise
    except zipfile.BadZipFile as error:
        raise CorruptCheckpointError(f"{label} is damaged: {str(error)[:200]}") from error
    except Exception as error:  # torch may raise anything for bytes that torch.save did not write
        if _is_lack_of_memory(error):
            raise LoadError(f"{label}: there is not enough memory to load it.") from error
        raise LoadError(f"{label}: torch can't load it: {' '.join(str(error).split())[:200]}") from error
    for tensor in _tensors(value, 0):
        if tensor.layout is torch.strided and not tensor.is_quantized:
            nbytes, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
            if nbytes > max(stored, _UNFOLDED):
                raise CorruptCheckpointError(f"{label}: a tensor has {nbytes} bytes, but only {stored} are stored.")
    return value


def _refusal(label: str, kind: str) -> UnsafePickleError:
    what = f"asks for {kind[:200]!r}" if kind else "is refused by torch's weights_only loader"
    return UnsafePickleError(f"{label} is not loaded: its pickle {what}; none of it was run. {_ADVICE}")


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > _MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            yield from _tensors(inner, depth + 1)


# --- plain data that torch's weights_only loader refuses


def _plain_object(archive: Archive) -> Any:
    """Return the value in an archive that contains only plain data and dense tensors."""
    label, tensors = archive.file, _Tensors(archive)

    def resolve(module: str, name: str) -> Any:
        # Protocol 2 uses Python 2's names for builtins.
        module, name = _compat_pickle.NAME_MAPPING.get(
            (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
        )
        found = tensors.functions.get((module, name)) or _FUNCTIONS.get((module, name))
        if found is not None:
            return found
        kind = f"{module}.{name}"
        if kind in _TYPES:
            return _TYPES[kind]
        listed = ALLOWED.get((module, name))
        if isinstance(listed, TorchDType):
            return getattr(torch, listed.name)
        if not isinstance(listed, StorageType):
            raise _refusal(label, kind)
        return listed

    try:
        return guarded(label, lambda: walk(archive.pickled(), 0, resolve, tensors.storage, _CALLS, _STATES)[0])
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{error} {_ADVICE}") from None


class _Tensors:
    """Creates the dense tensors of an archive. Each storage is created only once."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._memory: dict[str, Any] = {}
        rebuild = TensorRebuilder(lazy=True).functions
        home = "torch._utils"
        makers: dict[str, Callable[..., Any]] = {
            "_rebuild_tensor": lambda *args: self._made(rebuild[home, "_rebuild_tensor"](*args)),
            "_rebuild_tensor_v2": lambda *args: self._made(rebuild[home, "_rebuild_tensor_v2"](*args), args[4]),
            "_rebuild_tensor_v3": lambda *args: self._made(
                rebuild[home, "_rebuild_tensor_v3"](*args[:6], TorchDType(_name_of(args[6])), *args[7:]), args[4]
            ),
            "_rebuild_parameter": _parameter,
        }
        self.functions = {(home, name): Function(name, make) for name, make in makers.items()}

    def storage(self, identity: Any) -> Storage:
        found = storage_of(identity, self._archive.stored, self._archive.path)
        if found.key not in self._memory:
            data = bytearray(self._archive.member(f"data/{found.key}"))
            memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            self._memory[found.key] = memory.untyped_storage()
        return found

    def _made(self, tensor: StoredTensor, requires_grad: Any = False) -> Any:
        made = torch.empty(0, dtype=getattr(torch, tensor.dtype))
        made.set_(self._memory[tensor.storage.key], tensor.offset, tensor.shape, tensor.strides)
        for mark in sorted(tensor.marks):
            made = {"conj": torch.conj, "neg": torch._neg_view}[mark](made)
        return made.requires_grad_() if requires_grad is True else made


def _parameter(data: Any, requires_grad: Any = True, *_: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        raise ValueError("a parameter is not a tensor")
    return torch.nn.Parameter(data, requires_grad=requires_grad is True)


def _name_of(dtype: Any) -> str:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor's dtype is not known")
    return str(dtype).removeprefix("torch.")


def _sequence(value: Any) -> Any:
    if type(value) not in (list, tuple):
        raise ValueError("expected one list or tuple")
    return value


_ordered = ALLOWED["collections", "OrderedDict"]


def _counter(counts: Any = None) -> Any:
    made: Any = collections.Counter()
    dict.update(made, _ordered(counts))
    return made


def _default(factory: Any = None) -> Any:
    if factory is not None and not isinstance(factory, type):
        raise ValueError("the factory of a defaultdict is not a type")
    return collections.defaultdict(factory)


def _deque(items: Any = (), limit: Any = None) -> Any:
    if limit is not None and type(limit) is not int:
        raise ValueError("the length of a deque is not a number")
    return collections.deque(_sequence(items), limit)


def _zone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not all(type(text) is str for text in name):
        raise ValueError("a time zone is malformed")
    return datetime.timezone(offset, *name) if name or offset else datetime.timezone.utc


def _empty_array(kind: Any, *_: Any) -> Any:
    if kind is not np.ndarray:
        raise ValueError("an array is not a numpy.ndarray")
    return np.empty(0, np.int8)


def _fill_array(made: Any, state: Any) -> None:
    _, shape, dtype, fortran, raw = state
    check_array(shape, _numpy(dtype), raw)
    made.__setstate__((1, shape, dtype, fortran is True, bytes(raw)))


def _numpy(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype):
        raise ValueError("a numpy dtype is not known")
    return dtype


def _order_bytes(made: Any, state: Any) -> None:
    """Set a numpy dtype's byte order from its pickled state (version, byte order, ...)."""
    if state[1] == ">":
        made.__setstate__(np.dtype(made.newbyteorder(">")).__reduce__()[2])


def _set_attributes(made: Any, state: Any) -> None:
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise ValueError("attributes are malformed")
    made.__dict__.update(state)


_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))

_NUMPY: set[type[Any]] = {np.dtype, np.ndarray, *np.sctypeDict.values()}

# The value that replaces each global. A type is replaced by itself; `_CALLS` has the function that makes its instances.
_TYPES: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, complex, bool, str, bytes, bytearray, list, tuple,
                                                      dict, set, frozenset)},
    **{f"collections.{kind.__name__}": kind for kind in (collections.OrderedDict, collections.Counter,
                                                         collections.defaultdict, collections.deque)},
    **{f"datetime.{kind.__name__}": kind for kind in (*MOMENTS, datetime.timezone)},
    **{f"{home}.{kind.__name__}": kind for home in ("pathlib", "pathlib._local") for kind in _PATHS},
    **{f"numpy.{kind.__name__}": kind for kind in _NUMPY},
    "torch.torch_version.TorchVersion": TorchVersion,  # the type of torch.__version__, which users save
}  # fmt: skip
_CALLS: dict[Any, Callable[..., Any]] = {
    **{kind: ALLOWED["builtins", kind.__name__] for kind in (complex, bytes, bytearray, list, set, frozenset)},
    collections.OrderedDict: lambda *pairs: collections.OrderedDict(_ordered(*pairs)),
    collections.Counter: _counter,
    collections.defaultdict: _default,
    collections.deque: _deque,
    **MOMENTS,
    datetime.timezone: _zone,
    **{kind: typed(kind, "a part of a path is not a string", rest=str) for kind in _PATHS},
    np.dtype: lambda name, *_: np.dtype(numpy_dtype(name), copy=True),  # a new object: its state may be set later
    torch.Size: lambda sizes: torch.Size(_sequence(sizes)),
    torch.device: typed(torch.device, "a device is malformed", str, rest=int),
    TorchVersion: typed(TorchVersion, "a version is not a string", str),
}
_STATES = ((np.ndarray, _fill_array), (np.dtype, _order_bytes), (collections.OrderedDict, _set_attributes))
_FUNCTIONS: dict[tuple[str, str], Function] = {
    ("_codecs", "encode"): ALLOWED["_codecs", "encode"],
    **{
        (f"numpy.{core}.{home}", name): Function(name, make)
        for core in ("core", "_core")
        for home, name, make in (
            ("multiarray", "_reconstruct", _empty_array),
            ("multiarray", "scalar", lambda dtype, raw: numpy_scalar(_numpy(dtype), raw)),
            ("numeric", "_frombuffer", lambda raw, dtype, shape, order: numpy_array(
                shape, _numpy(dtype), order == "F", raw)),
        )
    },
}  # fmt: skip
