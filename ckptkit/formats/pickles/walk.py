"""Reads pickles without running anything from them: an unpickler of our own, over an allow-list of inert stubs.

Not `pickle.Unpickler` with a `find_class`: that one sizes its memo by an index from the file, hashes nested
tuples without a limit, and builds cheaply what is costly to hold. Here every opcode is ours and bounded. Only
`.metadata` files too large for Python's speed go through the C unpickler, after `_pickle_scan` has walked them.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

from ckptkit.errors import CkptkitError, CorruptCheckpointError, UnsafePickleError
from ckptkit.formats.pickles.allowed import allowed_global
from ckptkit.formats.pickles.inert import Function, unknown_type
from ckptkit.formats.pickles.machine import Machine, PersistentLoad
from ckptkit.gc_pause import collector_paused

__all__ = ["loads", "load_prefix", "MAX_PICKLE_BYTES", "load_archived", "load_metadata"]

MAX_PICKLE_BYTES = 256 << 20

Unknown = Literal["refuse", "record"]
Table = Mapping[tuple[str, str], Any]


def loads(
    data: bytes | memoryview,
    *,
    file: str,
    functions: Table | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
) -> Any:
    """Return what the pickle in `data` describes, made of plain Python values and inert stubs.

    Args:
        file: What error messages name: a file, or an item of one.
        functions: More globals that are allowed, and what they become; looked up first.
        persistent_load: Makes a value of a persistent id (a torch storage); without it they are refused.
        unknown: "record" turns globals that are not allowed into `UnknownGlobal` records instead of an error.
            Nothing is run either way.

    Raises:
        UnsafePickleError: It names a global that is not on the allow-list.
        CorruptCheckpointError: It is no valid pickle, or larger or deeper than any checkpoint needs.
    """
    return load_prefix(
        data, file=file, functions=functions, persistent_load=persistent_load, unknown=unknown
    )[0]  # fmt: skip


def load_prefix(
    data: bytes | memoryview,
    start: int = 0,
    *,
    file: str,
    functions: Table | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
) -> tuple[Any, int]:
    """Return the value of the pickle that begins at `start`, and where it ends. Raises as `loads` does."""
    if len(data) - start > MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(
            f"{file}: a pickle of {len(data) - start} bytes is larger than any checkpoint needs."
        )
    resolve = resolver(file, functions, unknown)
    machine = Machine(bytes(data), start, resolve, persistent_load)
    return guarded(file, machine.run), machine.pos


def resolver(file: str, functions: Table | None, unknown: Unknown) -> Callable[[str, str], Any]:
    """Return the look-up of globals: module and name -> stub. It raises UnsafePickleError."""
    extra = functions or {}

    def resolve(module: str, name: str) -> Any:
        found = extra.get((module, name))
        if found is None:
            found = allowed_global(module, name)
        if found is not None:
            return found
        shown = f"{module}.{name}"[:200]
        if unknown == "record":
            return unknown_type(shown)
        raise UnsafePickleError(
            f"{file}: its pickle asks for {shown!r}, which is not on the allow-list; nothing of it was run. "
            "Do not open this file with torch.load or pickle unless you trust where it came from."
        )

    return resolve


def guarded(file: str, run: Callable[[], Any]) -> Any:
    """Return run(), with all that a malformed pickle can raise turned into our errors, which name `file`."""
    try:
        return run()
    except CkptkitError as error:
        if str(error).startswith(file):
            raise
        error.args = (f"{file}: {error}",)
        raise
    except (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, TypeError,
            ValueError, struct.error) as error:  # fmt: skip
        text = str(error)[:200] or type(error).__name__
        raise CorruptCheckpointError(f"{file}: its pickle is damaged or was made to deceive: {text}.") from None


# Reads large pickles, of `.metadata` and of torch.save: by C's unpickler after a walk over them, the others by ours.
# A million slices are some forty million opcodes: half a minute in Python, seconds in C. What C's unpickler leaves
# open is closed by the walk: opcodes that no such pickle has, memo indices that only cost memory, integers and
# containers out of proportion. Whatever is unusual goes the slow way. One thing the walk over `.metadata` can't see
# is a dict key that is a tuple of tuples made to take for ever to hash: a hostile file of over 1 MB can cost time,
# never run code. In smaller ones, and in those of torch.save, no tuple may be in two places: hashing any takes no
# longer than reading it.


Resolve: TypeAlias = Callable[[str, str], Any]

_BULK_BYTES = 1 << 20  # four tenths of a second in Python
_LEAST_BYTES = 1 << 15  # a hundredth

# Runs of opcodes whose length is known without looking at lengths: constants, small integers, memo, tuples, calls.
_RUN = re.compile(
    rb"(?:[N1\x88\x89)(\]}t\x85\x86\x87aesu\x94\x93R\x81b]+|[Kh][\x00-\xff]|M[\x00-\xff]{2}|[Jj][\x00-\xff]{4}"
    rb"|\x8a(?:\x05[\x00-\xff]{5}|\x06[\x00-\xff]{6}|\x07[\x00-\xff]{7}|\x08[\x00-\xff]{8}))*"
)
_FRAME = 0x95

_OLD_PROTOCOL = b"\x80\x02"

# The same of protocol 2, by which torch.save pickles: a memo index is named in the file, and is bounded by its length.
_CONSTANT = (
    rb"[N\x88\x89)(\]}aesuR\x81bQ]|K[\x00-\xff]|M[\x00-\xff]{2}|J[\x00-\xff]{4}|G[\x00-\xff]{8}"
    rb"|\x8a(?:\x05[\x00-\xff]{5}|\x06[\x00-\xff]{6}|\x07[\x00-\xff]{7}|\x08[\x00-\xff]{8})"
    rb"|c[A-Za-z0-9_.]{1,200}\n[A-Za-z0-9_.]{1,200}\n"
)
_GET = rb"h[\x00-\xff]|j[\x00-\xff]{4}"
_PUT = rb"q[\x00-\xff]|r[\x00-\xff]{4}"
_BOUNDED_PUT = rb"q[\x00-\xff]|r[\x00-\xff]{2}[\x00-%s]\x00"
_TUPLE = rb"[t\x85\x86\x87]"
# What is passed over, opcode by opcode so that no argument is taken for one, then what is wanted, or the end. Compiled
# where they are used: that takes milliseconds.
_TUPLE_PUTS = rb"(?:%s|%s|%s|%s(?![qr]))*(?:%s(%s)|\Z)" % (_CONSTANT, _GET, _PUT, _TUPLE, _TUPLE, _PUT)
_GETS = rb"(?:%s|%s|%s)*(?:(%s)|\Z)" % (_CONSTANT, _PUT, _TUPLE, _GET)

# Runs of opcodes and of short texts, as long as nothing is kept for going back in them; then what is looked for.
_SHORT_TEXTS = b"|".join(re.escape(bytes([n])) + rb"\0{3}[\x00-\xff]{%d}" % n for n in range(80))
_SKIPPED = rb"(?:%%s|%%s|%s|X(?:%s)){1,1000}|(%%s)" % (
    _CONSTANT.replace(b"%", b"%%"),
    _SHORT_TEXTS.replace(b"%", b"%%"),
)
_BEGINNING = 20_000
_MAX_FETCHED = 200

# And of protocol 4, for the smaller ones of `.metadata`.
_VALUE = rb"1|%s|\x93" % _CONSTANT
_MEMOIZED = rb"(?:%s|%s|%s(?!\x94))*(%s?\x94|\Z)" % (_VALUE, _GET, _TUPLE, _TUPLE)
_FETCHED = rb"(?:%s|\x94|%s)*(?:(%s)|\Z)" % (_VALUE, _TUPLE, _GET)
_SHORT_TEXT, _TEXT = 0x8C, ord("X")
_PROTO, _STOP = 0x80, ord(".")
_CONTAINERS = b"]}\x85\x86\x87"


def load_metadata(data: bytes, *, file: str) -> Any:
    """Return what the pickle of a metadata file describes. Raises as `_restricted_pickle.loads` does."""
    strict = len(data) < _BULK_BYTES
    if (strict and len(data) < _LEAST_BYTES) or copyreg._extension_registry:  # type: ignore[attr-defined]
        return loads(data, file=file)
    if not _is_usual(data, strict=strict):
        return loads(data, file=file)
    if len(data) > 16 * MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(f"{file}: {len(data)} bytes of metadata are more than any checkpoint needs.")
    resolve = resolver(file, None, "refuse")
    if strict:
        return _flatly(data, file, resolve, None, partial(loads, data, file=file))
    return guarded(file, lambda: _load_in_c(data, resolve))


def _is_usual(data: bytes, *, strict: bool = False) -> bool:
    """Tell whether the pickle has only the opcodes that a pickler writes for DCP metadata (protocol 4 or 5).

    That leaves no memo index from the file (MEMOIZE counts by itself), no extension codes, no persistent ids,
    no integers over 8 bytes, no sets, lengths that end inside the file, and no more containers than a description
    of slices has (a container costs 50 bytes of memory for a byte of file).
    `strict`: Nor a tuple that is fetched again.
    """
    if len(data) - len(data.translate(None, _CONTAINERS)) > len(data) // 8:
        return False
    pos, end = 0, len(data)
    match = _RUN.match
    if data[:1] != b"\x80" or data[1:2] not in (b"\x04", b"\x05"):
        return False
    pos = 2
    runs: list[bytes] = []
    while True:
        found = match(data, pos)
        if found:
            pos = found.end()
            if strict:
                runs.append(found[0])
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
            return opcode == _STOP and (not strict or _memoizes_no_tuple(b"N".join(runs)))


def load_archived(
    data: bytes, *, file: str, functions: Table, persistent_load: PersistentLoad, unknown: Unknown
) -> Any:
    """Return what the pickle of a torch.save archive describes. Raises as `_restricted_pickle.loads` does."""
    slowly = partial(loads, data, file=file, functions=functions, persistent_load=persistent_load, unknown=unknown)
    if len(data) < _BULK_BYTES or copyreg._extension_registry or not _is_usual_archive(data):  # type: ignore[attr-defined]
        return slowly()
    return _flatly(data, file, resolver(file, functions, unknown), persistent_load, slowly)


def _flatly(
    data: bytes, file: str, resolve: Resolve, persistent_load: PersistentLoad | None, slowly: Callable[[], Any]
) -> Any:
    """Unpickle in C, where calls make no tuples but of integers; what needs others is read `slowly`."""

    def flat(module: str, name: str) -> Any:
        found = resolve(module, name)
        return _FLAT_TUPLE if found is tuple else found

    try:
        return guarded(file, lambda: _load_in_c(data, flat, persistent_load))
    except _UnusualError:
        return slowly()


class _UnusualError(Exception):
    """To be read by our own unpickler."""


def _flat_tuple(values: Any = ()) -> tuple[int, ...]:
    """torch.Size: of integers alone, so that no tuple comes to be in two places this way."""
    if not all(type(value) is int for value in values):
        raise _UnusualError
    return tuple(values)


_FLAT_TUPLE = Function("torch.Size", _flat_tuple)


def _is_usual_archive(data: bytes) -> bool:
    """Tell whether the pickle has only the opcodes that a pickler writes for torch.save (protocol 2).

    Beside what `_is_usual` says: memo indices below a quarter of the length, and no tuple that is fetched again.
    """
    if data[:2] != _OLD_PROTOCOL or len(data) - len(data.translate(None, _CONTAINERS)) > len(data) // 8:
        return False
    if _fetches_only_what_begins(data):
        return True
    most = re.escape(bytes([min(len(data) >> 18, 0xFF)]))
    match = re.compile(b"(?:" + b"|".join((_CONSTANT, _GET, _TUPLE, _BOUNDED_PUT % most)) + b")*").match
    runs: list[bytes] = []
    pos, end = 2, len(data)
    while True:
        found = match(data, pos)
        assert found is not None
        runs.append(found[0])
        pos = found.end()
        if pos >= end or data[pos] != _TEXT:
            return pos < end and data[pos] == _STOP and _shares_no_tuple(b"N".join(runs))
        pos += 5 + int.from_bytes(data[pos + 1 : pos + 5], "little")


def _fetches_only_what_begins(data: bytes) -> bool:
    """Tell whether the pickle is usual, and fetches nothing but what its beginning does: classes, mostly.

    So there are few memo indices under which no tuple may be put, and one walk sees to it all. False says nothing.
    """
    found = re.findall(_SKIPPED % (_PUT, _TUPLE, _GET), data[2:_BEGINNING])
    gets = sorted({int.from_bytes(get[1:], "little") for get in found if get})
    if len(gets) > _MAX_FETCHED:
        return False
    most = re.escape(bytes([min(len(data) >> 18, 0xFF)]))
    wide = [re.escape(index.to_bytes(4, "little")) for index in gets]
    short = [re.escape(bytes([index])) for index in gets if index < 256]
    known, fetched = (
        b"|".join([small + index for index in short] + [large + index for index in wide]) or b"(?!)"
        for small, large in ((b"h", b"j"), (b"q", b"r"))
    )
    steps = b"%s|%s" % (_BOUNDED_PUT % most, known), b"%s(?!%s)" % (_TUPLE, fetched)
    match = re.compile(_SKIPPED % (*steps, b"(?!)")).match
    pos, end = 2, len(data)
    while pos < end:
        here = match(data, pos)
        if here:
            pos = here.end()
        elif data[pos] == _TEXT:
            pos += 5 + int.from_bytes(data[pos + 1 : pos + 5], "little")
        else:
            return data[pos] == _STOP
    return False


def _shares_no_tuple(opcodes: bytes) -> bool:
    """Tell whether no memo index under which a tuple is put is fetched. `opcodes`: a pickle's without its texts."""
    puts = set(re.findall(_TUPLE_PUTS, opcodes))
    for get in set(re.findall(_GETS, opcodes)) - {b""}:
        index = int.from_bytes(get[1:], "little")
        if b"r" + index.to_bytes(4, "little") in puts or (index < 256 and b"q" + bytes([index]) in puts):
            return False
    return True


def _memoizes_no_tuple(opcodes: bytes) -> bool:
    """The same where memo indices are counted: by MEMOIZE, of protocol 4."""
    memo = re.findall(_MEMOIZED, opcodes)
    gets = {int.from_bytes(get[1:], "little") for get in set(re.findall(_FETCHED, opcodes)) - {b""}}
    return not any(len(memo[index]) == 2 for index in gets if index < len(memo))


class _Unpickler(pickle.Unpickler):
    """C's unpickler over the same allow-list."""

    def __init__(self, data: bytes, resolve: Resolve, persistent_load: PersistentLoad | None) -> None:
        # Buffered: without peek() the C code asks for every opcode by itself.
        super().__init__(io.BufferedReader(io.BytesIO(data), 1 << 20))
        self._resolve = resolve
        self._persistent_load = persistent_load

    def find_class(self, module: str, name: str) -> Any:
        return self._resolve(module, name)

    def persistent_load(self, identity: Any) -> Any:
        if self._persistent_load is None:
            raise ValueError("it refers to storages, which this file has none of")
        return self._persistent_load(identity)


def _load_in_c(data: bytes, resolve: Resolve, persistent_load: PersistentLoad | None = None) -> Any:
    try:
        with collector_paused():
            return _Unpickler(data, resolve, persistent_load).load()
    except (pickle.UnpicklingError, struct.error) as error:
        raise ValueError(str(error)) from None
