"""Values of Python's own types, made again exactly from what a pickle says of them, every argument checked first.

A maker is called with the builder and the inert record of one object; it must run nothing that the pickle chose. The
makers of torch's types are in `exact_torch`.
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
import math
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckptkit.formats.pickles.inert import Record

__all__ = [
    "MAKERS",
    "TYPES",
    "UNFOLDED",
    "Builder",
    "Maker",
    "RefusedError",
    "checked",
    "enum_member",
    "type_named",
    "BIT_GENERATORS",
    "NUMPY_MAKERS",
]

UNFOLDED = 16 << 20
"""Bytes that a view may have though less is stored: an expanded tensor takes no memory until it is copied."""

Maker = Callable[["Builder", Record], Any]

_MAX_VALUE_DEPTH = 120
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
        if self.depth > _MAX_VALUE_DEPTH or id(value) in self._open:
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


def _random_object(builder: Builder, record: Record) -> random.Random:
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
    "random.Random": _random_object,
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


# Arrays, scalars, dtypes and random generators of numpy, made again exactly from what a pickle says of them.
#
# numpy's own `__setstate__` trusts what it is given: nothing reaches it before its shape, size and range were checked.


_PLAIN = re.compile(r"[biufc](?:1|2|4|8|16|32)|b1|O8?|[SUV]\d{1,7}|[mM]8")
_UNITS = ("generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
_ALIGNED = 0x80
_GENERATORS = {"MT19937": "mt19937", "PCG64": "pcg64", "PCG64DXSM": "pcg64", "Philox": "philox", "SFC64": "sfc64"}
_MAX_DIMS = 64


# --- dtypes


def _dtype(builder: Builder, record: Record) -> np.dtype[Any]:
    base = builder.of(record.args[0])
    state = builder.of(record.state) if record.state is not None else (3, "=", None, None, None, -1, -1, 0)
    _, order, sub, names, fields, itemsize, _, flags = state[:8]
    if names is not None:
        return _structure(base, names, fields, itemsize, flags)
    if sub is not None:
        inner, shape = sub
        if not isinstance(inner, np.dtype):
            raise ValueError("no dtype")
        return np.dtype((inner, _shape((shape,) if type(shape) is int else shape)))
    if type(base) is not str or not _PLAIN.fullmatch(base):
        raise ValueError("no dtype")
    found: np.dtype[Any] = np.dtype(_with_unit(base, state))
    return np.dtype(found.newbyteorder(">")) if order == ">" else found


def _with_unit(base: str, state: tuple[Any, ...]) -> str:
    """Dates and spans have a unit, which their state gives as ({}, (unit, count, ...))."""
    if base not in ("M8", "m8"):
        return base
    unit, count = state[8][1][:2]
    unit = unit.decode() if isinstance(unit, bytes) else unit
    if unit not in _UNITS or type(count) is not int or count < 1:
        raise ValueError("no unit of time")
    return base if unit == "generic" else f"{base}[{count}{unit}]"


def _structure(base: Any, names: Any, fields: Any, itemsize: Any, flags: Any) -> np.dtype[Any]:
    checked((names, fields, itemsize, flags), tuple, dict, int, int)
    checked(names, *(str for _ in names))
    places = [fields[name] for name in names]
    for place in places:
        inner, at = place  # those of three have titles
        if not isinstance(inner, np.dtype) or type(at) is not int or not 0 <= at <= at + inner.itemsize <= itemsize:
            raise ValueError("a field outside its structure")
    parts = {"names": list(names), "formats": [p[0] for p in places], "offsets": [p[1] for p in places]}
    found: np.dtype[Any] = np.dtype({**parts, "itemsize": itemsize}, align=bool(flags & _ALIGNED))  # type: ignore[call-overload]
    return np.dtype((np.record, found)) if base is np.record else found


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > _MAX_DIMS:
        raise ValueError("no shape")
    checked(shape, *(int for _ in shape))
    if any(n < 0 or n >= 1 << 40 for n in shape):
        raise ValueError("no shape")
    return shape


# --- arrays


def _array(builder: Builder, record: Record) -> np.ndarray[Any, Any]:
    kind = builder.of(record.args[0])
    _, shape, dtype, fortran, raw = builder.of(record.state)
    made = _filled(_shape(shape), dtype, bool(fortran), raw)
    if kind is np.ndarray:
        return made
    if kind not in (np.recarray, np.matrix):
        raise RefusedError(record.args[0].kind)
    return made.view(kind)


def _filled(shape: tuple[int, ...], dtype: Any, fortran: bool, raw: Any) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, np.dtype):
        raise ValueError("no dtype")
    order: Any = "F" if fortran else "C"
    if dtype.hasobject:
        if dtype != np.dtype(object) or type(raw) is not list or len(raw) != math.prod(shape):
            raise ValueError("objects that do not fit their array")
        flat = np.empty(len(raw), object)
        for i, item in enumerate(raw):
            flat[i] = item
        return flat.reshape(shape, order=order)
    if not isinstance(raw, (bytes, bytearray)) or len(raw) != math.prod((*shape, dtype.itemsize)):
        raise ValueError("data that do not fit their array")
    if not raw:
        return np.empty(shape, dtype, order=order)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order=order)  # one that can be written


def _from_buffer(builder: Builder, record: Record) -> np.ndarray[Any, Any]:
    raw, dtype, shape, order = builder.args(record)
    return _filled(_shape(shape), dtype, order == "F", raw)


def _masked(builder: Builder, record: Record) -> Any:
    if [builder.of(arg) for arg in record.args[:2]] != [np.ma.MaskedArray, np.ndarray]:
        raise ValueError("a mask of another class")
    _, shape, dtype, fortran, raw, mask, fill = builder.of(record.state)
    data = _filled(_shape(shape), dtype, bool(fortran), raw)
    hidden = _filled(_shape(shape), np.ma.make_mask_descr(data.dtype), bool(fortran), mask)
    return np.ma.MaskedArray(data, mask=hidden, fill_value=fill)


def _scalar(builder: Builder, record: Record) -> Any:
    dtype, raw = builder.args(record)
    checked((raw,), bytes)
    if not isinstance(dtype, np.dtype) or dtype.hasobject or len(raw) != dtype.itemsize:
        raise ValueError("a scalar that does not fit its dtype")
    return np.frombuffer(bytearray(raw), dtype)[0] if raw else np.zeros((), dtype)[()]


# --- random numbers


def _bit_generator(builder: Builder, record: Record) -> Any:
    (given,) = record.args or ("MT19937",)
    name = given if type(given) is str else getattr(given, "kind", "").rpartition(".")[2]
    if name not in _GENERATORS:
        raise RefusedError(str(getattr(given, "kind", given)))
    made = getattr(np.random, name)(0)
    if record.state is not None:
        state = builder.of(record.state)
        inner, seed = state if type(state) is tuple else (state, None)
        _check_state(name, inner)
        if seed is None:
            made.state = inner
        elif type(seed) is np.random.SeedSequence:
            made.__setstate__((inner, seed))
        else:
            raise ValueError("no seed")
    return made


def _check_state(name: str, state: Any) -> None:
    """Check the numbers that the generators in C take for granted."""
    if state["bit_generator"] != name:
        raise ValueError("the state of another generator")
    inner = state["state"]
    if name == "MT19937":
        _check_words(inner, {"key": ("uint32", 624)})
        _check_range(inner, {"pos": 625})
        return
    _check_range(state, {"has_uint32": 2, "uinteger": 1 << 32})
    if name == "Philox":
        _check_words(inner, {"counter": ("uint64", 4), "key": ("uint64", 2)})
        _check_words(state, {"buffer": ("uint64", 4)})
        _check_range(state, {"buffer_pos": 5})
    elif name == "SFC64":
        _check_words(inner, {"state": ("uint64", 4)})
    else:
        _check_range(inner, {"state": 1 << 128, "inc": 1 << 128})


def _check_words(values: Mapping[str, Any], wanted: Mapping[str, tuple[str, int]]) -> None:
    for key, (dtype, count) in wanted.items():
        found = values[key]
        if type(found) is not np.ndarray or found.dtype != np.dtype(dtype) or found.shape != (count,):
            raise ValueError("a state of another size")


def _check_range(values: Mapping[str, Any], wanted: Mapping[str, int]) -> None:
    for key, stop in wanted.items():
        if type(values[key]) is not int or not 0 <= values[key] < stop:
            raise ValueError("a state out of range")


def _generator(builder: Builder, record: Record) -> Any:
    (source,) = builder.args(record)
    if not isinstance(source, np.random.BitGenerator):
        raise ValueError("no source of random numbers")
    return np.random.Generator(source)


def _random_state(builder: Builder, record: Record) -> Any:
    source: Any = builder.of(record.args[0]) if record.args else "MT19937"
    if source != "MT19937" and type(source) is not np.random.MT19937:
        raise ValueError("another source of random numbers")
    state = builder.of(record.state)
    _check_state("MT19937", state)
    _check_range(state, {"has_gauss": 2})
    checked((state["gauss"],), float)
    made = np.random.RandomState(0 if type(source) is str else source)
    made.set_state(state)
    return made


def _seed(builder: Builder, record: Record) -> Any:
    entropy, spawned, pool, size, key = builder.of(record.state)
    checked((spawned, size, key), int, int, tuple)
    checked(key, *(int for _ in key))
    numbers = entropy if type(entropy) is list else [entropy]
    if not all(n is None or (type(n) is int and n >= 0) for n in numbers) or not 4 <= size <= 64:
        raise ValueError("no seed")
    made = np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)
    if not np.array_equal(made.pool, pool):
        raise ValueError("a seed of another pool")
    return made


NUMPY_MAKERS: dict[str, Maker] = {
    "numpy.dtype": _dtype,
    "numpy.ma.core._mareconstruct": _masked,
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random._pickle.__generator_ctor": _generator,
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed,
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
}
BIT_GENERATORS = frozenset(f"numpy.random._{home}.{name}" for name, home in _GENERATORS.items())
