"""Values of Python's own types, made again exactly from what a pickle says of them, every argument checked first.

A maker is called with the builder and the inert record of one object; it must run nothing that the pickle chose. The
makers of numpy's and torch's types are in `exact_numpy` and `exact_torch`.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import ipaddress
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptkit.formats._pickle_stubs import Record

__all__ = ["MAKERS", "TYPES", "Builder", "Maker", "RefusedError", "checked", "enum_member", "type_named"]

Maker = Callable[["Builder", Record], Any]

_MAX_DEPTH = 120
_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_DIGITS = re.compile(r"-?\d{1,4000}(?:/\d{1,4000})?")
_ENUM_HOMES = frozenset(("enum", "http", "inspect", "re", "signal", "socket", "ssl", "uuid"))


class RefusedError(Exception):
    """Its text is the global that the value asks for."""


class Builder:
    """Makes the values of one pickle. What is shared in it stays shared, circles through containers included.

    Args:
        makers, values: By "module.Name": what makes objects, and globals that are values.
        allowed: Classes and functions that the caller trusts: they are called as pickle would call them.
        storage: Makes a torch storage of what stands for one.
    """

    def __init__(
        self,
        makers: Mapping[str, Maker],
        values: Mapping[str, Any],
        allowed: Mapping[str, Any],
        storage: Callable[[Any], Any],
    ) -> None:
        self.makers = makers
        self.values = values
        self.allowed = allowed
        self.storage = storage
        self.depth = 0
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return what `value` stands for. Raises RefusedError, and ValueError, TypeError or LookupError where it stands
        for nothing."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        if self.depth > _MAX_DEPTH or id(value) in self._open:
            raise ValueError("nested too deeply, or within itself")
        self._open.add(id(value))
        self.depth += 1
        made = self._made(value, kind)
        self.depth -= 1
        self._open.discard(id(value))
        return self.keep(value, made)

    def keep(self, value: Any, made: Any) -> Any:
        """Remember what `value` stands for, before its contents are made."""
        self._done[id(value)] = made
        return made

    def all(self, values: Sequence[Any]) -> list[Any]:
        return [self.of(value) for value in values]

    def args(self, record: Record) -> tuple[Any, ...]:
        return tuple(self.all(record.args))

    def _made(self, value: Any, kind: type[Any]) -> Any:
        if kind is list:
            made = self.keep(value, [])
            made.extend(self.all(value))
            return made
        if kind is dict:
            made = self.keep(value, {})
            return self.fill(made, value)
        if kind in (tuple, set, frozenset):
            return kind(self.all(list(value)))
        if isinstance(value, type):
            return self._global(value)
        if isinstance(value, Record):
            return self._record(value)
        return self.storage(value)

    def fill(self, made: Any, items: Mapping[Any, Any]) -> Any:
        """Put the items into a mapping that was made."""
        for key, item in items.items():
            made[self.of(key)] = self.of(item)
        return made

    def _global(self, value: type[Any]) -> Any:
        kind = getattr(value, "kind", "")
        for table in (self.values, self.allowed):
            if kind in table:
                return table[kind]
        return type_named(kind)

    def _record(self, record: Record) -> Any:
        maker = self.makers.get(record.kind)
        if maker is not None:
            has_more = record.state is not None or record.items or record.entries
            if record.kwargs or (has_more and record.kind not in _WITH_MORE):
                raise ValueError("more than an object of this type has")
            return maker(self, record)
        if record.kind in self.allowed:
            return self._trusted(self.allowed[record.kind], record)
        return enum_member(record.kind, *self.args(record))

    def _trusted(self, call: Any, record: Record) -> Any:
        """An object of a class that the caller allows: it decides what runs."""
        args, kwargs = self.args(record), {key: self.of(value) for key, value in record.kwargs.items()}
        made = self.keep(record, call.__new__(call, *args, **kwargs) if record.by_new else call(*args, **kwargs))
        if record.state is not None:
            state = self.of(record.state)
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                set_attributes(made, state)
        if record.entries:
            made.extend(self.all(record.entries))
        return self.fill(made, record.items)


def checked(args: Sequence[Any], *kinds: type[Any] | tuple[type[Any], ...], least: int | None = None) -> Any:
    """Return the arguments, once each is of its kind exactly; the last ones may be left out down to `least`."""
    if not (len(kinds) if least is None else least) <= len(args) <= len(kinds):
        raise ValueError("another number of arguments")
    for arg, kind in zip(args, kinds, strict=False):
        if type(arg) not in (kind if isinstance(kind, tuple) else (kind,)):
            raise ValueError(f"an argument is a {type(arg).__name__}")
    return args


def set_attributes(made: Any, state: Any) -> None:
    """What pickle does with the state of an object that has no `__setstate__`."""
    state, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if state is not None:
        made.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def enum_member(kind: str, *args: Any) -> enum.Enum:
    """Return the member of an enum of the standard library, or of torch; RefusedError where it is none of these."""
    found = _enum(kind)
    if not isinstance(found, enum.EnumMeta) or len(args) != 1:
        raise RefusedError(kind)
    member: enum.Enum = found(args[0])  # looks it up
    return member


def _enum(kind: str) -> Any:
    home, _, name = kind.rpartition(".")
    top = home.partition(".")[0]
    if home in _ENUM_HOMES:
        importlib.import_module(home)
    if top != "torch" and top not in sys.stdlib_module_names:
        return None
    found = vars(sys.modules[home]).get(name) if home in sys.modules else None
    return found if isinstance(found, (enum.EnumMeta, enum.Enum)) else None


def type_named(kind: str) -> Any:
    """Return a type, or a member of an enum, that a pickle may hold as a value; RefusedError where it may not."""
    home, _, name = kind.rpartition(".")
    if kind in TYPES:
        return getattr(importlib.import_module(home), name)
    found = _enum(kind)
    if found is None:
        raise RefusedError(kind)
    return found


# --- containers


def _ordered(builder: Builder, record: Record) -> Any:
    made: Any = builder.keep(record, collections.OrderedDict())
    if record.args:
        made.update(builder.of(record.args[0]))
    if record.state is not None:
        set_attributes(made, _attributes(builder.of(record.state)))
    return builder.fill(made, record.items)


def _default(builder: Builder, record: Record) -> Any:
    (factory,) = checked_factory(builder, builder.args(record) or (None,))
    return builder.fill(builder.keep(record, collections.defaultdict(factory)), record.items)


def checked_factory(builder: Builder, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments, once the first is None, a plain type, or something that the caller allows."""
    if not (args[0] is None or isinstance(args[0], type) or any(args[0] is a for a in builder.allowed.values())):
        raise ValueError("a factory that is no type")
    return args


def _counter(builder: Builder, record: Record) -> Any:
    made: Any = builder.keep(record, collections.Counter())
    for counts in builder.args(record):
        dict.update(made, checked((counts,), dict)[0])
    return builder.fill(made, record.items)


def _deque(builder: Builder, record: Record) -> Any:
    items, limit = checked((*builder.args(record), *((), None)[len(record.args) :]), (tuple, list), (int, type(None)))
    made = builder.keep(record, collections.deque(items, limit))
    made.extend(builder.all(record.entries))
    return made


def _chain(builder: Builder, record: Record) -> Any:
    checked(record.args)
    made: Any = builder.keep(record, collections.ChainMap())
    (maps,) = _attributes(builder.of(record.state)).values()
    made.maps = checked((maps,), list)[0]
    return made


def _namespace(kind: type[Any]) -> Maker:
    def make(builder: Builder, record: Record) -> Any:
        checked(record.args)
        made = builder.keep(record, kind())
        made.__dict__.update(_attributes(builder.of(record.state or {})))
        return made

    return make


def _attributes(state: Any) -> dict[str, Any]:
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise ValueError("attributes that are none")
    return state


def _collected(kind: type[Any]) -> Maker:
    """set(), frozenset(), list(), tuple(): of one sequence."""

    def make(builder: Builder, record: Record) -> Any:
        return kind(*checked(builder.args(record), (list, tuple), least=0))

    return make


# --- scalars


def _encoded(builder: Builder, record: Record) -> bytes:
    text, encoding = checked(builder.args(record), str, str)
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise ValueError("an encoding that is not allowed")
    found: bytes = text.encode(encoding)
    return found


def _bytes(kind: type[Any]) -> Maker:
    def make(builder: Builder, record: Record) -> Any:
        if len(record.args) == 2:
            return kind(_encoded(builder, record))
        return kind(*checked(builder.args(record), (bytes, bytearray), least=0))

    return make


def _of(make: Callable[..., Any], *kinds: type[Any] | tuple[type[Any], ...], least: int | None = None) -> Maker:
    """A maker for what needs no more than its arguments to be of these types."""
    return lambda builder, record: make(*checked(builder.args(record), *kinds, least=least))


_Number = (int, float, type(None))


def _type(builder: Builder, record: Record) -> Any:
    (value,) = builder.args(record)
    if value is not None and value is not Ellipsis and value is not NotImplemented:
        raise ValueError("the type of a value")
    return type(value)


def _slice(builder: Builder, record: Record) -> slice:
    if not 1 <= len(record.args) <= 3:
        raise ValueError("a slice of none")
    return slice(*builder.args(record))


def _moment(kind: Any, nbytes: int) -> Maker:
    """datetime and time: their bytes, and a zone."""

    def make(builder: Builder, record: Record) -> Any:
        args = builder.args(record)
        checked(args[:1], bytes)
        if len(args) > 2 or len(args[0]) != nbytes or not all(isinstance(zone, datetime.tzinfo) for zone in args[1:]):
            raise ValueError("no moment")
        return kind(*args)

    return make


def _zone(builder: Builder, record: Record) -> datetime.timezone:
    args = checked(builder.args(record), datetime.timedelta, str, least=1)
    return datetime.timezone(*args) if len(args) > 1 or args[0] else datetime.timezone.utc


def _fraction(builder: Builder, record: Record) -> fractions.Fraction:
    args = checked(builder.args(record), (int, str), int, least=1)
    if type(args[0]) is str and not (_DIGITS.fullmatch(args[0]) and len(args) == 1):
        raise ValueError("no fraction")
    return fractions.Fraction(*args)


def _uuid(builder: Builder, record: Record) -> uuid.UUID:
    state = _attributes(builder.of(record.state))
    return uuid.UUID(int=state["int"], is_safe=uuid.SafeUUID(state.get("is_safe", uuid.SafeUUID.unknown.value)))


def _path(kind: type[pathlib.PurePath]) -> Maker:
    def make(builder: Builder, record: Record) -> Any:
        parts = builder.args(record)
        return kind(*checked(parts, *(str for _ in parts)))

    return make


def _partial(builder: Builder, record: Record) -> Any:
    """A function with arguments: kept, not called; and only where it is a type, or what the caller allows."""
    function, args, keywords, attributes = builder.of(record.state)
    checked_factory(builder, (function,))
    checked((args, keywords), tuple, dict)
    if function is None or function is not builder.of(record.args[0]):
        raise ValueError("no function")
    made = functools.partial(function, *args, **_attributes(keywords))
    made.__dict__.update(_attributes(attributes or {}))
    return made


def _pattern(builder: Builder, record: Record) -> re.Pattern[Any]:
    text, flags = checked(builder.args(record), (str, bytes), int)
    found: re.Pattern[Any] = re.compile(text, flags)
    return found


def _numbers(builder: Builder, record: Record) -> array.array[Any]:
    code, items = checked(builder.args(record), str, list)
    if code not in tuple("bBhHiIlLqQfd"):
        raise ValueError("an array of another type")
    return array.array(code, items)


def _bytes_file(builder: Builder, record: Record) -> io.BytesIO:
    data, position, attributes = checked(builder.of(record.state), bytes, int, (type(None), dict))
    made = io.BytesIO(data)
    made.seek(position)
    made.__dict__.update(_attributes(attributes or {}))
    return made


def _text_file(builder: Builder, record: Record) -> io.StringIO:
    none = type(None)
    text, newline, position, attributes = checked(builder.of(record.state), str, (str, none), int, (none, dict))
    made = io.StringIO(newline=newline)
    made.__setstate__((text, newline, position, None))  # type: ignore[attr-defined]
    made.__dict__.update(_attributes(attributes or {}))
    return made


def _random(builder: Builder, record: Record) -> random.Random:
    made = random.Random(0)
    made.setstate(builder.of(record.state))
    return made


_PATHS = {
    f"{home}.{kind.__name__}": kind
    for home in ("pathlib", "pathlib._local")
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
}

MAKERS: dict[str, Maker] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _default,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "collections.ChainMap": _chain,
    "types.SimpleNamespace": _namespace(types.SimpleNamespace),
    "argparse.Namespace": _namespace(argparse.Namespace),
    **{f"builtins.{kind.__name__}": _collected(kind) for kind in (set, frozenset, list, tuple)},
    "builtins.bytes": _bytes(bytes),
    "builtins.bytearray": _bytes(bytearray),
    "_codecs.encode": _encoded,
    "builtins.complex": _of(complex, _Number[:2], _Number[:2], least=0),
    "builtins.range": _of(range, int, int, int, least=1),
    "builtins.slice": _slice,
    "builtins.type": _type,
    "datetime.datetime": _moment(datetime.datetime, 10),
    "datetime.time": _moment(datetime.time, 6),
    "datetime.date": _moment(datetime.date, 4),
    "datetime.timedelta": _of(datetime.timedelta, int, int, int, least=0),
    "datetime.timezone": _zone,
    "decimal.Decimal": _of(decimal.Decimal, str),
    "fractions.Fraction": _fraction,
    "uuid.UUID": _uuid,
    "ipaddress.IPv4Address": _of(ipaddress.IPv4Address, int),
    "ipaddress.IPv6Address": _of(ipaddress.IPv6Address, (int, str)),
    **{kind: _path(made) for kind, made in _PATHS.items()},
    "functools.partial": _partial,
    "re._compile": _pattern,
    "array.array": _numbers,
    "_io.BytesIO": _bytes_file,
    "_io.StringIO": _text_file,
    "random.Random": _random,
}

_WITH_MORE = frozenset(
    (
        *(f"collections.{name}" for name in ("OrderedDict", "defaultdict", "Counter", "deque", "ChainMap")),
        *(
            "types.SimpleNamespace",
            "argparse.Namespace",
            "uuid.UUID",
            "functools.partial",
            "_io.BytesIO",
            "_io.StringIO",
        ),
        *("random.Random", "numpy.dtype", "numpy.ma.core._mareconstruct", "torch._C.Generator"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *(f"numpy.random._pickle.__{name}_ctor" for name in ("bit_generator", "randomstate")),
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    )
)
"""What has a state, or items, besides its arguments."""

TYPES = frozenset(
    (
        *(f"builtins.{kind.__name__}" for kind in (dict, object, *_SCALARS - {type(None)})),
        *(kind for kind in MAKERS if kind not in ("_codecs.encode", "re._compile", "builtins.type")),
        *(f"numpy.{name}" for name in ("ndarray", "dtype", "record", "recarray", "matrix", "rec.recarray")),
        *(f"numpy.{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *(f"numpy.{name}" for name in ("float16", "float32", "float64", "longdouble", "complex64", "complex128", "bool",
                                       "bool_", "str_", "bytes_", "object_", "void", "datetime64", "timedelta64")),
        *("numpy.ma.MaskedArray", "numpy.ma.core.MaskedArray", "numpy.random.bit_generator.SeedSequence"),
        *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.Size", "torch.device", "torch.dtype"),
    )
)  # fmt: skip
"""Types that may be values themselves, such as the factory of a defaultdict."""
