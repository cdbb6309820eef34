"""Arrays, scalars, dtypes and random generators of numpy, made again exactly from what a pickle says of them.

numpy's own `__setstate__` trusts what it is given: nothing reaches it before its shape, size and range were checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptkit.formats._pickle_stubs import Record
from ckptkit.formats.exact_values import Builder, Maker, RefusedError, checked

__all__ = ["BIT_GENERATORS", "NUMPY_MAKERS"]

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
