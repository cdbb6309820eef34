"""Reads `.metadata`: by our own unpickler, or where it describes very many slices, by C's after a walk over it.

A million slices are some forty million opcodes: half a minute in Python, seconds in C. What C's unpickler leaves
open is closed by the walk: opcodes that no DCP metadata has, memo indices that only cost memory, integers and
containers out of proportion. Whatever is unusual goes the slow way. One thing the walk can't see is a dict key that
is a tuple of tuples made to take for ever to hash: a hostile file of over 1 MB can cost time, never run code.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats._restricted_pickle import MAX_PICKLE_BYTES, guarded, loads, resolver
from ckptkit.formats.collector import collector_paused

__all__ = ["load_metadata"]

_BULK_BYTES = 1 << 20  # four tenths of a second in Python

# Runs of opcodes whose length is known without looking at lengths: constants, small integers, memo, tuples, calls.
_RUN = re.compile(
    rb"(?:[N1\x88\x89)(\]}t\x85\x86\x87aesu\x94\x93R\x81b]+|[Kh][\x00-\xff]|M[\x00-\xff]{2}|[Jj][\x00-\xff]{4}"
    rb"|\x8a(?:\x05[\x00-\xff]{5}|\x06[\x00-\xff]{6}|\x07[\x00-\xff]{7}|\x08[\x00-\xff]{8}))*"
)
_FRAME = 0x95
_SHORT_TEXT, _TEXT = 0x8C, ord("X")
_PROTO, _STOP = 0x80, ord(".")
_CONTAINERS = b"]}\x85\x86\x87"


def load_metadata(data: bytes, *, file: str) -> Any:
    """Return what the pickle of a metadata file describes. Raises as `_restricted_pickle.loads` does."""
    if len(data) < _BULK_BYTES:
        return loads(data, file=file)
    if copyreg._extension_registry or not _is_usual(data):  # type: ignore[attr-defined]
        return loads(data, file=file)
    return guarded(file, lambda: _load_in_c(data, file))


def _is_usual(data: bytes) -> bool:
    """Tell whether the pickle has only the opcodes that a pickler writes for DCP metadata (protocol 4 or 5).

    That leaves no memo index from the file (MEMOIZE counts by itself), no extension codes, no persistent ids,
    no integers over 8 bytes, no sets, lengths that end inside the file, and no more containers than a description
    of slices has (a container costs 50 bytes of memory for a byte of file).
    """
    if len(data) - len(data.translate(None, _CONTAINERS)) > len(data) // 8:
        return False
    pos, end = 0, len(data)
    match = _RUN.match
    if data[:1] != b"\x80" or data[1:2] not in (b"\x04", b"\x05"):
        return False
    pos = 2
    while True:
        found = match(data, pos)
        pos = found.end() if found else pos
        if pos >= end:
            return False
        opcode = data[pos]
        if opcode == _SHORT_TEXT and pos + 1 < end:
            pos += 2 + data[pos + 1]
        elif opcode == _TEXT and pos + 5 <= end:
            pos += 5 + int.from_bytes(data[pos + 1 : pos + 5], "little")
        elif opcode == _FRAME:
            pos += 9
        else:
            return opcode == _STOP


class _Unpickler(pickle.Unpickler):
    """C's unpickler over the same allow-list."""

    def __init__(self, data: bytes, resolve: Callable[[str, str], Any]) -> None:
        # Buffered: without peek() the C code asks for every opcode by itself.
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 20))
        self._resolve = resolve

    def find_class(self, module: str, name: str) -> Any:
        return self._resolve(module, name)


def _load_in_c(data: bytes, file: str) -> Any:
    if len(data) > 16 * MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(f"{file}: {len(data)} bytes of metadata are more than any checkpoint needs.")
    try:
        with collector_paused():
            return _Unpickler(data, resolver(file, None, "refuse")).load()
    except (pickle.UnpicklingError, struct.error) as error:
        raise ValueError(str(error)) from None
