"""Objects as torch.save bytes, in a job: the one place where torch unpickles, with weights_only=True and never without.

Plain data that torch refuses, such as a deque or an array of numpy, are read by our own parser (`exact_pickle`).

Before torch sees a file, its directory is read by our own parser, which refuses what torch would unfold in memory:
compressed members. After it, views that are larger than the bytes they lie on are refused.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptkit.errors import CkptkitError, CorruptCheckpointError, LoadError, SaveError, UnsafePickleError
from ckptkit.formats.pickles.exact_values import MAKERS, TYPES, UNFOLDED, Builder, RefusedError, type_named
from ckptkit.formats.pickles.inert import record_type
from ckptkit.formats.pickles.machine import Machine
from ckptkit.formats.pickles.zip import ShortTailError, parse_directory

__all__ = ["dump_object", "dump_plain", "parse_object", "exact_object"]

_ADVICE = (
    "If you trust where it came from, allow its class with torch.serialization.add_safe_globals: that class then "
    "decides what runs."
)
_MAX_DEPTH = 200


def dump_object(value: Any, *, name: str, advice: str) -> bytes:
    """Return what torch.save makes of the value, once it was read back with weights_only=True.

    Raises:
        SaveError: It can't be saved so that it loads without running code; `advice` says what to do.
    """
    import torch

    return _dumped(value, lambda data: torch.load(io.BytesIO(data), weights_only=True), name, advice)


def dump_plain(value: Any, *, name: str, advice: str) -> bytes:
    """Return what torch.save makes of the value, once `parse_object` has read it back. Raises as `dump_object` does."""
    return _dumped(value, lambda data: parse_object(data, file=name), name, advice)


def _dumped(value: Any, read: Callable[[bytes], Any], name: str, advice: str) -> bytes:
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        read(buffer.getvalue())
    except Exception as error:  # pickling runs the value's own code; the cause is chained
        raise SaveError(
            f"{name}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be saved so that it "
            f"loads without running code. Save its plain values instead, {advice}"
        ) from error
    return buffer.getvalue()


def parse_object(data: bytes | bytearray | memoryview, *, file: str, name: str = "") -> Any:
    """Return the value in bytes of torch.save, on the CPU.

    Raises:
        UnsafePickleError: It names a class that torch's weights_only loader refuses, and that is no plain data;
            nothing of it was run.
        CorruptCheckpointError: Its archive is damaged, compressed, or has tensors larger than what is stored.
        LoadError: torch can't load it.
    """
    import torch

    label = f"{file}: the object {name!r:.120}" if name else file
    raw = bytes(data)
    if raw[:2] == b"PK":
        _check_archive(raw, label)
    try:
        value = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if raw[:2] == b"PK":
            return exact_object(raw, label=label, advice=_ADVICE)
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {found[1]!r}" if found else "is refused by torch's weights_only loader"
        raise UnsafePickleError(f"{label} is not loaded: its pickle {what}; nothing of it was run. {_ADVICE}") from None
    except CkptkitError:
        raise
    except (MemoryError, zipfile.BadZipFile) as error:
        raise CorruptCheckpointError(f"{label} is damaged: {str(error)[:200]}") from error
    except Exception as error:  # whatever torch runs into on bytes that torch.save did not write
        raise LoadError(f"{label}: torch can't load it: {' '.join(str(error).split())[:200]}") from error
    _check_views(value, label)
    return value


def _check_archive(raw: bytes, label: str) -> None:
    tail = 64 << 10
    while True:
        try:
            parse_directory(raw[-tail:], len(raw), file=label)
        except ShortTailError as error:
            tail = error.nbytes
        else:
            return


def _check_views(value: Any, label: str) -> None:
    import torch

    for tensor in _tensors(value, 0):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            continue
        nbytes, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if nbytes > max(stored, UNFOLDED):
            raise CorruptCheckpointError(f"{label}: a tensor of {nbytes} bytes lies on {stored} stored ones.")


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    import torch

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


# Plain data that torch's weights_only loader refuses: what Python, numpy and torch themselves have types for.
#
# Two steps, neither of which runs anything of the pickle: the machine of `_pickle_machine` turns it into inert records,
# then each record is made into the value that it stands for, exactly, types included, by a maker on our own list.


_CONSTANTS = {"builtins.Ellipsis": Ellipsis, "builtins.NotImplemented": NotImplemented}
_DAMAGED = "is neither what torch's weights_only loader takes nor plain data"
_FAULTS = (
    CkptkitError, zipfile.BadZipFile, ArithmeticError, AttributeError, AssertionError, ImportError, LookupError,
    MemoryError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def exact_object(data: bytes, *, label: str, advice: str) -> Any:
    """Return the value in an archive of torch.save. Runs nothing of it but classes that the caller allowed with
    `torch.serialization.add_safe_globals`.

    Args:
        data: Its zip directory was checked, and has no compressed members.

    Raises:
        UnsafePickleError: It holds more than plain data; the message names what.
    """
    try:
        return _made(data)
    except RefusedError as error:
        reason = f"asks for {str(error)[:200]!r}"
    except _FAULTS:
        reason = _DAMAGED
    raise UnsafePickleError(f"{label} is not loaded: its pickle {reason}; nothing of it was run. {advice}")


def _made(data: bytes) -> Any:
    from ckptkit.formats.pickles.exact_torch import DTYPES, QSCHEMES, STORAGES, TORCH_MAKERS, StoredBytes, storages
    from ckptkit.formats.pickles.exact_values import BIT_GENERATORS, NUMPY_MAKERS

    makers = {**MAKERS, **NUMPY_MAKERS, **TORCH_MAKERS}
    values = {**_CONSTANTS, **DTYPES, **QSCHEMES}
    known = {*makers, *TYPES, *STORAGES, *BIT_GENERATORS, "torch.UntypedStorage", "torch.storage.UntypedStorage"}
    allowed = _allowed()

    def resolve(module: str, name: str) -> Any:
        module, name = _modern(module, name)
        kind = f"{module}.{name}"
        if kind not in known and kind not in allowed and kind not in values:
            type_named(kind)
        return record_type(kind)

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        (pickled,) = (name for name in names if name.endswith("/data.pkl"))
        root = pickled.removesuffix("data.pkl")
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("big-endian")
        machine = Machine(archive.read(pickled), 0, resolve, StoredBytes)
        builder = Builder(makers, values, allowed, storages(lambda key: archive.read(f"{root}data/{key}")))
        return builder.of(machine.run())


def _modern(module: str, name: str) -> tuple[str, str]:
    """The name of today for what protocol 2 calls by a name of Python 2."""
    found = _compat_pickle.NAME_MAPPING.get((module, name))
    return found or (_compat_pickle.IMPORT_MAPPING.get(module, module), name)


def _allowed() -> dict[str, Any]:
    import torch

    found = {}
    for item in torch.serialization.get_safe_globals():
        value, name = item if isinstance(item, tuple) else (item, f"{item.__module__}.{item.__qualname__}")
        found[name] = value
    return found
