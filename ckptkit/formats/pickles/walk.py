"""Reads pickles without running any code from them.

Interprets the opcodes of protocols 0 to 5, and replaces each allowed global by an inert value. Overriding `find_class`
of `pickle.Unpickler` would not be enough: that class allocates as many memo entries as the file asks for, hashes nested
tuples without a limit, and lets small files build large objects. This module implements each opcode with limits.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ckptkit.errors import CkptkitError, CorruptCheckpointError, LoadError, UnsafePickleError
from ckptkit.formats.pickles.allowed import allowed_global, checked_key
from ckptkit.formats.pickles.inert import (
    ChunkMetadata,
    Function,
    Index,
    Record,
    StateDict,
    StorageInfo,
    Stub,
    unknown_type,
)
from ckptkit.gc_pause import collector_paused

MAX_PICKLE_BYTES = 256 << 20
_MAX_LINE = 1 << 16
_MAX_INTEGER_BYTES = 256
_MAX_TEXT_INTEGER = 640
_NEWEST_PROTOCOL = 5

PersistentLoad = Callable[[Any], Any]
Resolve = Callable[[str, str], Any]
Calls = Mapping[Any, Callable[..., Any]]
States = Sequence[tuple[type[Any], Callable[[Any, Any], None]]]
Unknown = Literal["refuse", "record"]
Table = Mapping[tuple[str, str], Any]


def loads(
    data: bytes | memoryview,
    *,
    file: str,
    functions: Table | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
    max_bytes: int | None = None,
) -> Any:
    """Parse the pickle in `data` into plain Python values. Allowed globals become stand-ins that run no code.

    Args:
        file: Name of the file or item for error messages.
        functions: Additional allowed globals and the values that replace them. Takes precedence over the allow-list.
        persistent_load: Returns the value for a persistent id (a torch storage). If None, persistent ids are refused.
        unknown: With "record", a global that is not allowed becomes an `UnknownGlobal` record. With "refuse", it raises
            an error. No code is run in either case.
        max_bytes: Maximum size of the pickle; by default `MAX_PICKLE_BYTES`.
    """
    return load_prefix(
        data, file=file, functions=functions, persistent_load=persistent_load, unknown=unknown, max_bytes=max_bytes
    )[0]  # fmt: skip


def load_prefix(
    data: bytes | memoryview,
    start: int = 0,
    *,
    file: str,
    functions: Table | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
    max_bytes: int | None = None,
) -> tuple[Any, int]:
    """Return the value of the pickle at `start`, and the position after it."""
    if len(data) - start > (max_bytes or MAX_PICKLE_BYTES):
        raise CorruptCheckpointError(
            f"{file}: a pickle of {len(data) - start} bytes is larger than any checkpoint needs."
        )
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
            f"{file}: its pickle asks for {shown!r}, which is not on the allow-list; none of it was run. "
            "Do not open this file with torch.load or pickle unless you trust where it came from."
        )

    found: tuple[Any, int] = guarded(file, lambda: walk(bytes(data), start, resolve, persistent_load))
    return found


def guarded(file: str, run: Callable[[], Any]) -> Any:
    """Return the result of `run`. Every error names `file`.

    Raises:
        CorruptCheckpointError: The pickle is malformed.
        LoadError: There is not enough memory.
        CkptkitError: `run` raised this error.
    """
    try:
        return run()
    except CkptkitError as error:
        if str(error).startswith(file):
            raise
        error.args = (f"{file}: {error}",)
        raise
    except MemoryError:
        raise LoadError(f"{file}: there is not enough memory to read it.") from None
    except (ArithmeticError, AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError,
            struct.error) as error:  # fmt: skip
        text = str(error)[:200] or type(error).__name__
        raise CorruptCheckpointError(f"{file}: its pickle is damaged or malicious: {text}.") from None


_signed4 = struct.Struct("<i").unpack_from
_unsigned2 = struct.Struct("<H").unpack_from
_unsigned4 = struct.Struct("<I").unpack_from
_unsigned8 = struct.Struct("<Q").unpack_from
_float8 = struct.Struct(">d").unpack_from

_UNSET = object()  # a memo entry that was never set
_NOT_THERE = "it fetches a memo index that was never set"
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_LENGTHS = {1: lambda data, pos: (data[pos],), 4: _unsigned4, 8: _unsigned8}
# Opcodes that push a string or bytes: the width of the length field before it, and how to decode it.
_TEXTS: dict[int, tuple[int, Callable[[bytes], Any]]] = {
    0x8C: (1, lambda raw: raw.decode("utf-8", "surrogatepass")),  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
    ord("X"): (4, lambda raw: raw.decode("utf-8", "surrogatepass")),
    0x8D: (8, lambda raw: raw.decode("utf-8", "surrogatepass")),
    ord("U"): (1, lambda raw: raw.decode("latin1")),  # SHORT_BINSTRING, BINSTRING: a Python 2 string
    ord("T"): (4, lambda raw: raw.decode("latin1")),
    ord("C"): (1, bytes),
    ord("B"): (4, bytes),
    0x8E: (8, bytes),
    0x96: (8, bytearray),
}


def walk(  # noqa: C901, PLR0915 - one loop: a call for each opcode would take twice the time
    data: bytes,
    pos: int,
    resolve: Resolve,
    persistent_load: PersistentLoad | None,
    calls: Calls | None = None,
    states: States = (),
) -> tuple[Any, int]:
    """Return the value of the pickle at `pos`, and the position after it. Must be called within `guarded`.

    Does not check whether the last opcode's argument is truncated. In that case, reading the next opcode raises an
    IndexError.

    Args:
        resolve: Returns the value that replaces a global (module, name). Raises UnsafePickleError.
        calls: For each type that `resolve` may return, the function that makes its instances. Subclasses of `Stub` need
            no function.
        states: (type, function) pairs. The function sets the pickled state of an instance of the type or a subclass.
    """
    calls = calls or {}
    stack: list[Any] = []
    below: list[list[Any]] = []  # one stack per open MARK; items below a mark can't be reached
    memo: list[Any] = []  # not a dict, in which the eight entries for a slice would need as much memory as the slice
    # A container takes up to 64 bytes in memory, but may take a single byte in the file. Real pickles have few empty
    # containers, and have other opcodes around each tuple.
    budget = len(data) // 3 + (3 << 16)
    with collector_paused():
        while True:
            opcode = data[pos]
            pos += 1
            # The first branches handle the opcodes that describe slices, of which there may be millions.
            if opcode == 0x6A:  # LONG_BINGET
                value = memo[_unsigned4(data, pos)[0]]
                if value is _UNSET:
                    raise ValueError(_NOT_THERE)
                stack.append(value)
                pos += 4
            elif opcode == 0x68:  # BINGET
                value = memo[data[pos]]
                if value is _UNSET:
                    raise ValueError(_NOT_THERE)
                stack.append(value)
                pos += 1
            elif opcode == 0x4B:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif opcode == 0x86:  # TUPLE2
                budget -= 1
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif opcode == 0x85:  # TUPLE1
                budget -= 1
                args = (stack[-1],)
                if data[pos : pos + 3] == b"\x94R\x94":  # MEMOIZE, REDUCE, MEMOIZE: a torch.Size
                    value = stack.pop()
                    if stack[-1] is not tuple or type(value) is not tuple:
                        value = _call(stack[-1], args, calls)
                    stack[-1] = value
                    memo.append(args)
                    memo.append(value)
                    pos += 3
                else:
                    stack[-1] = args
            elif opcode == 0x29:  # EMPTY_TUPLE
                if data[pos : pos + 5] == b"\x81\x94}\x94(":  # NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK
                    budget -= 3
                    stack[-1] = value = _new(stack[-1], (), calls)
                    state: dict[Any, Any] = {}
                    stack.append(state)
                    memo.append(value)
                    memo.append(state)
                    below.append(stack)
                    stack = []
                    pos += 5
                else:
                    stack.append(())
            elif opcode == 0x75:  # SETITEMS
                items, stack = stack, below.pop()
                usual = _OF_METADATA.get(type(stack[-2])) if data[pos] == 0x62 and len(stack) > 1 else None  # BUILD
                if usual is not None and stack[-1] == {} and items[::2] == usual:
                    stack.pop()
                    stack[-1].fill(*items[1::2])  # `__setstate__` would also empty the state
                    pos += 1
                else:
                    _put_items(stack[-1], items)
            elif opcode == 0x4D:  # BININT2
                stack.append(_unsigned2(data, pos)[0])
                pos += 2
            elif opcode == 0x4A:  # BININT
                stack.append(_signed4(data, pos)[0])
                pos += 4
            elif opcode in _TEXTS:
                width, decode = _TEXTS[opcode]
                length = _LENGTHS[width](data, pos)[0]
                pos += width + length
                if pos > len(data):
                    raise ValueError("it ends in the middle of an argument")
                stack.append(decode(data[pos - length : pos]))
            elif opcode == 0x28:  # MARK
                below.append(stack)
                stack = []
            elif opcode == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = _call(stack[-1], args, calls)
            elif opcode == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = _new(stack[-1], args, calls)
            elif opcode == 0x62:  # BUILD
                state = stack.pop()
                target = stack[-1]
                if isinstance(target, Stub):
                    target.__setstate__(state)
                else:
                    set_state = next((call for kind, call in states if isinstance(target, kind)), None)
                    if set_state is None:
                        raise ValueError(f"it sets the state of a {type(target).__name__}")
                    set_state(target, state)
            elif opcode == 0x7D:  # EMPTY_DICT
                budget -= 3
                stack.append({})
            elif opcode == 0x74:  # TUPLE
                budget -= 1
                made, stack = tuple(stack), below.pop()
                stack.append(made)
            elif opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            elif opcode == 0x71:  # BINPUT
                _put(memo, data[pos], stack[-1], data)
                pos += 1
            elif opcode == 0x72:  # LONG_BINPUT
                _put(memo, _unsigned4(data, pos)[0], stack[-1], data)
                pos += 4
            elif opcode in (0x8A, 0x8B):  # LONG1, LONG4
                width = 1 if opcode == 0x8A else 4
                length = _LENGTHS[width](data, pos)[0]
                if length > _MAX_INTEGER_BYTES:
                    raise ValueError(f"an integer of {length} bytes")
                pos += width + length
                stack.append(int.from_bytes(data[pos - length : pos], "little", signed=True))
            elif opcode == 0x87:  # TUPLE3
                budget -= 1
                last, middle = stack.pop(), stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif opcode == 0x5D:  # EMPTY_LIST
                budget -= 3
                stack.append([])
            elif opcode == 0x65:  # APPENDS
                items, stack = stack, below.pop()
                _extend(stack[-1], items)
            elif opcode == 0x61:  # APPEND
                last = stack.pop()
                _extend(stack[-1], [last])
            elif opcode == 0x73:  # SETITEM
                items = stack[-2:]
                del stack[-2:]
                _put_items(stack[-1], items)
            elif opcode == 0x63:  # GLOBAL
                module, pos = _line(data, pos)
                name, pos = _line(data, pos)
                stack.append(resolve(module.decode(), name.decode()))
            elif opcode == 0x93:  # STACK_GLOBAL
                text = stack.pop()
                if type(text) is not str or type(stack[-1]) is not str:
                    raise ValueError("the name of a global is not a string")
                stack[-1] = resolve(stack[-1], text)
            elif opcode in (0x51, 0x50):  # BINPERSID, PERSID
                if opcode == 0x51:
                    identity = stack.pop()
                else:
                    line, pos = _line(data, pos)
                    identity = line.decode("latin1")
                if persistent_load is None:
                    raise ValueError("it refers to storages, but this file has none")
                stack.append(persistent_load(identity))
            elif opcode == 0x47:  # BINFLOAT
                stack.append(_float8(data, pos)[0])
                pos += 8
            elif opcode == 0x2E:  # STOP
                return stack.pop(), pos
            elif opcode == 0x95:  # FRAME
                pos += 8
                if _unsigned8(data, pos - 8)[0] > len(data) - pos:
                    raise ValueError("a frame is longer than the file")
            elif opcode == 0x80:  # PROTO
                pos += 1
                if data[pos - 1] > _NEWEST_PROTOCOL:
                    raise ValueError("its protocol is newer than 5")
            elif opcode == 0x92:  # NEWOBJ_EX
                keywords, args = stack.pop(), stack.pop()
                if type(keywords) is not dict or not all(type(key) is str for key in keywords):
                    raise ValueError("keywords are not a dict with string keys")
                stack[-1] = _new(stack[-1], args, calls, keywords)
            elif opcode == 0x69:  # INST
                module, pos = _line(data, pos)
                name, pos = _line(data, pos)
                args, stack = tuple(stack), below.pop()
                stack.append(_new(resolve(module.decode(), name.decode()), args, calls))
            elif opcode == 0x6F:  # OBJ
                items, stack = stack, below.pop()
                stack.append(_new(items[0], tuple(items[1:]), calls))
            elif opcode == 0x6C:  # LIST
                budget -= 3
                items, stack = stack, below.pop()
                stack.append(items)
            elif opcode == 0x64:  # DICT
                budget -= 3
                items, stack = stack, below.pop()
                stack.append({})
                _put_items(stack[-1], items)
            elif opcode == 0x8F:  # EMPTY_SET
                budget -= 3
                stack.append(set())
            elif opcode == 0x90:  # ADDITEMS
                items, stack = stack, below.pop()
                if type(stack[-1]) is not set:
                    raise ValueError(f"it adds to a {type(stack[-1]).__name__}")
                stack[-1].update(map(checked_key, items))
            elif opcode == 0x91:  # FROZENSET
                budget -= 3
                items, stack = stack, below.pop()
                stack.append(frozenset(map(checked_key, items)))
            elif opcode == 0x30:  # POP
                if stack:
                    stack.pop()
                else:
                    stack = below.pop()
            elif opcode == 0x31:  # POP_MARK
                stack = below.pop()
            elif opcode == 0x32:  # DUP
                stack.append(stack[-1])
            elif opcode == 0x67:  # GET
                line, pos = _line(data, pos)
                index = _integer(line)
                if not 0 <= index < len(memo) or memo[index] is _UNSET:
                    raise ValueError(_NOT_THERE)
                stack.append(memo[index])
            elif opcode == 0x70:  # PUT
                line, pos = _line(data, pos)
                _put(memo, _integer(line), stack[-1], data)
            elif opcode in _LINES:
                line, pos = _line(data, pos)
                stack.append(_LINES[opcode](line))
            else:
                raise ValueError(f"byte {pos - 1} is not an allowed opcode (0x{opcode:02x})")
            if budget < 0:
                raise ValueError("it builds too many empty containers for its size")


# --- calls to stubs, and to the functions in `calls`


def _call(function: Any, args: Any, calls: Calls, keywords: dict[str, Any] | None = None) -> Any:
    if type(args) is not tuple:
        raise ValueError("a call's arguments are not a tuple")
    if (function is tuple or type(function) is Function) and not keywords:
        return function(*args)
    if isinstance(function, type) and issubclass(function, Record):
        return function(*args, **keywords) if keywords else function(*args)
    if keywords:
        raise ValueError("a call with keywords is not allowed")
    if calls and function in calls:
        return calls[function](*args)
    raise ValueError(f"it calls something that is not a function: {type(function).__name__}")


# Classes that may have millions of instances, and the keys that their states usually have.
_OF_METADATA: Mapping[Any, list[str]] = {
    ChunkMetadata: ["offsets", "sizes"],
    Index: ["fqn", "offset", "index"],
    StorageInfo: ["relative_path", "offset", "length", "transform_descriptors"],
}


def _new(cls: Any, args: Any, calls: Calls, keywords: dict[str, Any] | None = None) -> Any:
    if type(cls) is type and cls in _OF_METADATA and not args and not keywords:
        return object.__new__(cls)
    if isinstance(cls, type) and issubclass(cls, Stub) and not issubclass(cls, (Record, StateDict, Function)):
        if args or keywords:
            raise ValueError("a class of metadata takes no arguments")
        return object.__new__(cls)
    return _call(cls, args, calls, keywords)


# --- containers and the memo


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) not in (list, collections.deque) and not isinstance(target, Record):
        raise ValueError(f"it appends to a {type(target).__name__}")
    target.extend(items)


def _put_items(target: Any, items: list[Any]) -> None:
    if (type(target) is not dict and not isinstance(target, (dict, Record))) or len(items) % 2:
        raise ValueError(f"it sets items of a {type(target).__name__}")
    pairs = iter(items)
    for key, value in zip(pairs, pairs, strict=True):
        target[key if type(key) is str or type(key) is Index else checked_key(key)] = value


def _put(memo: list[Any], index: int, value: Any, data: bytes) -> None:
    if not 0 <= index <= len(data):
        raise ValueError(f"memo index {index} is not in a pickle of {len(data)} bytes")
    if index < len(memo):
        memo[index] = value
        return
    memo.extend([_UNSET] * (index - len(memo)))  # real picklers count up by one
    memo.append(value)


# --- protocol 0's lines of text


def _line(data: bytes, pos: int) -> tuple[bytes, int]:
    end = data.find(b"\n", pos, pos + _MAX_LINE)
    if end < 0:
        raise ValueError("a line has no end")
    return data[pos:end], end + 1


def _integer(line: bytes) -> int:
    if len(line) > _MAX_TEXT_INTEGER or b"_" in line:
        raise ValueError("a text-format integer is too long")
    return int(line)


def _int_or_bool(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else _integer(line)


def _float(line: bytes) -> float:
    if len(line) > _MAX_TEXT_INTEGER:
        raise ValueError("a text-format float is too long")
    return float(line)


def _quoted(line: bytes) -> str:
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1] or b"\\" in line:
        raise ValueError("a text-format string has a backslash or lacks matching quotes")
    return line[1:-1].decode("latin1")


_LINES: dict[int, Callable[[bytes], Any]] = {
    ord("I"): _int_or_bool,
    ord("L"): lambda line: _integer(line.removesuffix(b"L")),
    ord("F"): _float,
    ord("S"): _quoted,
    ord("V"): lambda line: line.decode("raw-unicode-escape"),
}
