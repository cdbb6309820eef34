"""Values that torch's weights_only loader refuses though they are plain data: arrays of numpy, frozensets, dates.

They are read by our own parser, which runs nothing of them, and only where what it returns is exactly, types included,
what unpickling would have returned.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptkitError
from ckptkit.formats._restricted_pickle import loads
from ckptkit.formats.objects import Inert, plain

__all__ = ["NOT_EXACT", "exact_object"]

NOT_EXACT = object()

_CORES = ("numpy.core", "numpy._core")
_BUILTINS = ("set", "frozenset", "complex", "slice", "bytes")
_OTHER = frozenset(("STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "BYTEARRAY8", "NEXT_BUFFER"))
_EXACT = frozenset(
    (
        *(f"{core}.multiarray {name}" for core in _CORES for name in ("_reconstruct", "scalar")),
        *(f"{core}.numeric _frombuffer" for core in _CORES),
        *("numpy ndarray", "numpy dtype", "_codecs encode"),
        *(f"{home} {name}" for home in ("builtins", "__builtin__") for name in _BUILTINS),
        *(f"datetime {name}" for name in ("datetime", "date", "time", "timedelta")),
    )
)
"""Globals that `plain` turns into the very thing; not those of which it keeps the values alone, such as OrderedDict."""


def exact_object(data: bytes, *, file: str) -> Any:
    """Return the value in an archive of torch.save, `NOT_EXACT` where it holds more than plain data. Runs nothing.

    Args:
        data: Its zip directory was checked, and has no compressed members.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            pickled = archive.read(name)
        if not _is_plain_data(pickled):
            return NOT_EXACT
        value = plain(loads(pickled, file=file), file=file)
    except (CkptkitError, ValueError, LookupError, EOFError, struct.error, zipfile.BadZipFile):
        # torch's refusal stands, and is said
        return NOT_EXACT
    return value if _is_exact(value) else NOT_EXACT


def _is_plain_data(pickled: bytes) -> bool:
    """Tell whether all globals are on the list. torch writes protocol 2, which names them where they are asked for."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST"):
            if argument not in _EXACT:
                return False
        elif opcode.name in (
            "STACK_GLOBAL",
            "EXT1",
            "EXT2",
            "EXT4",
            "PERSID",
            "BINPERSID",
            "BYTEARRAY8",
            "NEXT_BUFFER",
        ):
            return False
    return True


def _is_exact(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_exact, value)) and all(map(_is_exact, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_exact, value))
    return not isinstance(value, Inert)
