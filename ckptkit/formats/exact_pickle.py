"""Plain data that torch's weights_only loader refuses: what Python, numpy and torch themselves have types for.

Two steps, neither of which runs anything of the pickle: the machine of `_pickle_machine` turns it into inert records,
then each record is made into the value that it stands for, exactly, types included, by a maker on our own list.
"""

from __future__ import annotations

import _compat_pickle
import io
import zipfile
from typing import Any

from ckptkit.errors import CkptkitError, UnsafePickleError
from ckptkit.formats._pickle_machine import Machine
from ckptkit.formats._pickle_stubs import record_type
from ckptkit.formats.exact_values import MAKERS, TYPES, Builder, RefusedError, type_named

__all__ = ["exact_object"]

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
    from ckptkit.formats.exact_numpy import BIT_GENERATORS, NUMPY_MAKERS
    from ckptkit.formats.exact_torch import DTYPES, QSCHEMES, STORAGES, TORCH_MAKERS, StoredBytes, storages

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
