"""The opcodes of pickle protocols 0 to 5 as a machine that builds inert values, every one of them bounded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ckptkit.formats.pickles.allowed import checked_key
from ckptkit.formats.pickles.inert import Function, Record, StateDict, Stub

__all__ = ["Machine", "PersistentLoad"]

_MAX_LINE = 1 << 16
_MAX_INTEGER_BYTES = 256
_MAX_TEXT_INTEGER = 640

PersistentLoad = Callable[[Any], Any]


class Machine:
    """A pickle machine: the opcodes of protocols 0 to 5, over a stack, a list of marks and a memo."""

    __slots__ = ("budget", "data", "marks", "memo", "persistent", "pos", "resolve", "stack")

    def __init__(
        self, data: bytes, start: int, resolve: Callable[[str, str], Any], persistent: PersistentLoad | None
    ) -> None:
        self.data = data
        self.pos = start
        self.resolve = resolve
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # A container costs up to 64 bytes of memory and 1 of file; real pickles hold few empty ones.
        self.budget = len(data) // 8 + (1 << 16)

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            opcode = data[self.pos]
            self.pos += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            table[opcode](self)

    # --- reading arguments

    def take(self, n: int) -> bytes:
        begin = self.pos
        self.pos = begin + n
        if n < 0 or self.pos > len(self.data):
            raise ValueError("it ends in the middle of an argument")
        return self.data[begin : self.pos]

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos, self.pos + _MAX_LINE)
        if end < 0:
            raise ValueError("a line of it has no end")
        return self.take(end + 1 - self.pos)[:-1]

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        if mark > len(self.stack):
            raise ValueError("the stack is below its mark")
        del self.stack[mark:]
        return items

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise ValueError("the stack is empty above its mark")
        return self.stack.pop()

    def allocate(self, made: Any) -> None:
        self.budget -= 1
        if self.budget < 0:
            raise ValueError("it builds more empty containers than its size explains")
        self.stack.append(made)

    # --- calls: only stubs are ever called

    def call(self, function: Any, args: Any, kwargs: Any = None) -> Any:
        if type(args) is not tuple:
            raise ValueError("a call's arguments are no tuple")
        if kwargs:
            if not (isinstance(function, type) and issubclass(function, Record)):
                raise ValueError("a call with keywords is not allowed")
            return function(*args, **kwargs)
        if type(function) is Function:
            return function(*args)
        if function is tuple:
            return tuple(*args)
        if isinstance(function, type) and issubclass(function, Record):
            return function(*args)
        raise ValueError(f"it calls what is no function: {type(function).__name__}")

    def new(self, cls: Any, args: Any, kwargs: Any = None) -> Any:
        if isinstance(cls, type) and issubclass(cls, Stub) and not issubclass(cls, (Record, StateDict, Function)):
            if args or kwargs:
                raise ValueError("a record of metadata takes no arguments")
            return object.__new__(cls)
        made = self.call(cls, args, kwargs)
        if isinstance(made, Record):
            made.by_new = True
        return made


Handler = Callable[[Machine], None]
_TABLE: list[Handler] = []


def _unknown_opcode(m: Machine) -> None:
    raise ValueError(f"byte {m.pos - 1} is no opcode it may use (0x{m.data[m.pos - 1]:02x})")


# --- values


def _constant(value: Any) -> Handler:
    def push(m: Machine) -> None:
        m.stack.append(value)

    return push


def _unsigned(n: int) -> Handler:
    def push(m: Machine) -> None:
        m.stack.append(m.number(n))

    return push


def _signed4(m: Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _long(n: int) -> Handler:
    def push(m: Machine) -> None:
        length = m.number(n)
        if length > _MAX_INTEGER_BYTES:
            raise ValueError(f"an integer of {length} bytes")
        m.stack.append(int.from_bytes(m.take(length), "little", signed=True))

    return push


def _float8(m: Machine) -> None:
    m.stack.append(struct.unpack(">d", m.take(8))[0])


def _text(n: int) -> Handler:
    def push(m: Machine) -> None:
        m.stack.append(m.take(m.number(n)).decode("utf-8", "surrogatepass"))

    return push


def _old_text(n: int) -> Handler:
    """BINSTRING, SHORT_BINSTRING: text of Python 2, ASCII in every checkpoint."""

    def push(m: Machine) -> None:
        m.stack.append(m.take(m.number(n)).decode("latin1"))

    return push


def _raw(n: int) -> Handler:
    def push(m: Machine) -> None:
        m.stack.append(m.take(m.number(n)))

    return push


def _bytearray8(m: Machine) -> None:
    m.stack.append(bytearray(m.take(m.number(8))))


def _integer(line: bytes) -> int:
    if len(line) > _MAX_TEXT_INTEGER or b"_" in line:
        raise ValueError("an integer in text is too long")
    return int(line)


def _int_line(m: Machine) -> None:
    line = m.line()
    m.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else _integer(line))


def _long_line(m: Machine) -> None:
    m.stack.append(_integer(m.line().removesuffix(b"L")))


def _float_line(m: Machine) -> None:
    line = m.line()
    if len(line) > _MAX_TEXT_INTEGER:
        raise ValueError("a float in text is too long")
    m.stack.append(float(line))


def _string_line(m: Machine) -> None:
    line = m.line()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1] or b"\\" in line:
        raise ValueError("a string in text is not quoted plainly")
    m.stack.append(line[1:-1].decode("latin1"))


def _unicode_line(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


# --- containers


def _mark(m: Machine) -> None:
    m.marks.append(len(m.stack))


def _pop(m: Machine) -> None:
    if m.marks and len(m.stack) <= m.marks[-1]:
        m.marks.pop()
    else:
        m.stack.pop()


def _pop_mark(m: Machine) -> None:
    m.pop_to_mark()


def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


def _empty(make: Callable[[], Any]) -> Handler:
    def push(m: Machine) -> None:
        m.allocate(make())

    return push


def _tuple_mark(m: Machine) -> None:
    m.allocate(tuple(m.pop_to_mark()))


def _tuple_of(n: int) -> Handler:
    def push(m: Machine) -> None:
        items = [m.pop() for _ in range(n)]
        m.stack.append(tuple(reversed(items)))

    return push


def _list_mark(m: Machine) -> None:
    m.allocate(m.pop_to_mark())


def _dict_mark(m: Machine) -> None:
    items = m.pop_to_mark()
    made: dict[Any, Any] = {}
    _put_items(made, items)
    m.allocate(made)


def _frozen_mark(m: Machine) -> None:
    m.allocate(frozenset(checked_key(item) for item in m.pop_to_mark()))


def _append(m: Machine) -> None:
    value = m.pop()
    _extend(m.stack[-1], [value])


def _appends(m: Machine) -> None:
    items = m.pop_to_mark()
    _extend(m.stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list and not isinstance(target, Record):
        raise ValueError(f"it appends to a {type(target).__name__}")
    target.extend(items)


def _set_item(m: Machine) -> None:
    value = m.pop()
    key = m.pop()
    _put_items(m.stack[-1], [key, value])


def _set_items(m: Machine) -> None:
    items = m.pop_to_mark()
    _put_items(m.stack[-1], items)


def _put_items(target: Any, items: list[Any]) -> None:
    if not isinstance(target, (dict, Record)) or len(items) % 2:
        raise ValueError(f"it sets items of a {type(target).__name__}")
    for i in range(0, len(items), 2):
        key = items[i]
        target[key if type(key) is str else checked_key(key)] = items[i + 1]


def _add_items(m: Machine) -> None:
    items = m.pop_to_mark()
    target = m.stack[-1]
    if type(target) is not set:
        raise ValueError(f"it adds to a {type(target).__name__}")
    target.update(checked_key(item) for item in items)


# --- memo


def _put(m: Machine, index: int) -> None:
    if not 0 <= index <= len(m.data):
        raise ValueError(f"memo index {index} is no place in a pickle of {len(m.data)} bytes")
    m.memo[index] = m.stack[-1]


def _put_line(m: Machine) -> None:
    _put(m, _integer(m.line()))


def _put_binary(n: int) -> Handler:
    def put(m: Machine) -> None:
        _put(m, m.number(n))

    return put


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _get_line(m: Machine) -> None:
    m.stack.append(m.memo[_integer(m.line())])


def _get_binary(n: int) -> Handler:
    def get(m: Machine) -> None:
        m.stack.append(m.memo[m.number(n)])

    return get


# --- globals and objects


def _global(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    m.stack.append(m.resolve(module, name))


def _stack_global(m: Machine) -> None:
    name = m.pop()
    module = m.pop()
    if type(name) is not str or type(module) is not str:
        raise ValueError("a global is named by what is no text")
    m.stack.append(m.resolve(module, name))


def _reduce(m: Machine) -> None:
    args = m.pop()
    m.stack.append(m.call(m.pop(), args))


def _new(m: Machine) -> None:
    args = m.pop()
    m.stack.append(m.new(m.pop(), args))


def _new_keywords(m: Machine) -> None:
    kwargs = m.pop()
    args = m.pop()
    if type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
        raise ValueError("keywords are no dict of text")
    m.stack.append(m.new(m.pop(), args, kwargs))


def _inst(m: Machine) -> None:
    module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    args = tuple(m.pop_to_mark())
    m.stack.append(m.new(m.resolve(module, name), args))


def _obj(m: Machine) -> None:
    items = m.pop_to_mark()
    m.stack.append(m.new(items[0], tuple(items[1:])))


def _build(m: Machine) -> None:
    state = m.pop()
    target = m.stack[-1]
    if not isinstance(target, Stub):
        raise ValueError(f"it sets the state of a {type(target).__name__}")
    target.__setstate__(state)


def _persistent(m: Machine, identity: Any) -> None:
    if m.persistent is None:
        raise ValueError("it refers to storages, which this file has none of")
    m.stack.append(m.persistent(identity))


def _persistent_line(m: Machine) -> None:
    _persistent(m, m.line().decode("latin1"))


def _persistent_binary(m: Machine) -> None:
    _persistent(m, m.pop())


def _protocol(m: Machine) -> None:
    if m.number(1) > 5:
        raise ValueError("its protocol is newer than 5")


def _frame(m: Machine) -> None:
    if m.number(8) > len(m.data) - m.pos:
        raise ValueError("a frame is longer than the file")


def _table() -> list[Handler]:
    known: dict[int, Handler] = {
        0x80: _protocol, 0x95: _frame,
        ord("N"): _constant(None), 0x88: _constant(True), 0x89: _constant(False), ord(")"): _constant(()),
        ord("K"): _unsigned(1), ord("M"): _unsigned(2), ord("J"): _signed4, 0x8A: _long(1), 0x8B: _long(4),
        ord("I"): _int_line, ord("L"): _long_line, ord("F"): _float_line, ord("G"): _float8,
        ord("S"): _string_line, ord("V"): _unicode_line, ord("U"): _old_text(1), ord("T"): _old_text(4),
        0x8C: _text(1), ord("X"): _text(4), 0x8D: _text(8),
        ord("C"): _raw(1), ord("B"): _raw(4), 0x8E: _raw(8), 0x96: _bytearray8,
        ord("("): _mark, ord("0"): _pop, ord("1"): _pop_mark, ord("2"): _dup,
        ord("]"): _empty(list), ord("}"): _empty(dict), 0x8F: _empty(set),
        ord("t"): _tuple_mark, 0x85: _tuple_of(1), 0x86: _tuple_of(2), 0x87: _tuple_of(3),
        ord("l"): _list_mark, ord("d"): _dict_mark, 0x91: _frozen_mark,
        ord("a"): _append, ord("e"): _appends, ord("s"): _set_item, ord("u"): _set_items, 0x90: _add_items,
        ord("p"): _put_line, ord("q"): _put_binary(1), ord("r"): _put_binary(4), 0x94: _memoize,
        ord("g"): _get_line, ord("h"): _get_binary(1), ord("j"): _get_binary(4),
        ord("c"): _global, 0x93: _stack_global, ord("i"): _inst, ord("o"): _obj,
        ord("R"): _reduce, 0x81: _new, 0x92: _new_keywords, ord("b"): _build,
        ord("P"): _persistent_line, ord("Q"): _persistent_binary,
    }  # fmt: skip
    return [known.get(code, _unknown_opcode) for code in range(256)]


_TABLE.extend(_table())
