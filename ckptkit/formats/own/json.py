"""Parses untrusted JSON, and checks values that will be written as JSON.

Refuses documents that would need too much memory, before parsing them. Refuses ambiguous documents, such as those with
duplicate keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.errors import CorruptCheckpointError, UsageError

# A list or object takes 64 bytes in memory, but may take only two bytes in a file. Real files have at most one list or
# object per 17 bytes (a safetensors header with very short tensor names).
_FREE = 1 << 20
_BYTES_A_CONTAINER = 12
_BYTES_A_VALUE = 2.5


def parse(data: bytes | str, *, file: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse the JSON in `data`.

    The JSON must be UTF-8, without duplicate keys, NaN, or numbers beyond the range of a float.

    Args:
        file: File name for error messages.
        pairs: Builds the value of a JSON object from the object's key-value pairs. By default, returns a dict and
            refuses duplicate keys.

    Raises:
        CorruptCheckpointError: `data` is not valid, or would need far more memory than its size suggests.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    check_density(raw, file=file)
    try:
        text = data if isinstance(data, str) else raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=pairs or _unique, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{file} is not JSON: {error}. It is truncated or damaged.") from error


def check_density(raw: bytes, *, file: str) -> None:
    """Raise CorruptCheckpointError if JSON is too dense, or contains NUL bytes.

    JSON is too dense if it has more lists, objects or values than any real file of the same size.
    """
    if b"\0" in raw:  # before decoding: a hole in a sparse file reads as NUL bytes
        raise CorruptCheckpointError(f"{file} is not JSON: it contains NUL bytes. It is truncated or damaged.")
    if len(raw) < _FREE:
        return
    containers = raw.count(b"[") + raw.count(b"{")
    values = raw.count(b",")
    if containers > _FREE + len(raw) / _BYTES_A_CONTAINER or values > _FREE + len(raw) / _BYTES_A_VALUE:
        raise CorruptCheckpointError(
            f"{file}: {containers} lists and objects with {values} values in {len(raw)} bytes are more than any "
            "checkpoint has. It was not parsed."
        )


def check_json(value: Any, place: str, advice: str = "") -> None:
    """Check that a value can be written as JSON and read back unchanged, except that tuples become lists.

    Args:
        place: Name of the value for the error message, which ends with `advice`.

    Raises:
        UsageError: The value cannot be stored as JSON.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):  # JSON would silently turn {1: ...} into {"1": ...}
                raise UsageError(f"{place} has the key {key!r:.80}; JSON keys must be strings.{advice}")
            check_json(inner, f"{place}.{key:.80}", advice)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            check_json(inner, f"{place}[{index}]", advice)
    elif not (value is None or isinstance(value, (str, int, float))) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise UsageError(
            f"{place} can't be written as JSON: it is {value!r:.80} ({type(value).__name__}). JSON has strings, finite "
            f"numbers, lists, dicts with string keys, None.{advice}"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large for a float")
    return value


# --- fields of parsed JSON objects

Check = tuple[str, tuple[type, ...], Callable[[Any], Any] | None]
"""What a field must be: a description, its Python types, and a test that returns None or False for a wrong value."""


def field_of(body: Mapping[str, Any], name: str, check: Check, file: str) -> Any:
    """Return a field of a JSON object.

    Raises:
        CorruptCheckpointError: The field is missing, or has a wrong type or value.
    """
    if name not in body:
        raise CorruptCheckpointError(f"{file}: the field {name!r} is missing.")
    value, (expected, types, test) = body[name], check
    found = test(value) if test is not None and value is not None and type(value) in types else True
    if type(value) not in types or found is None or found is False:
        raise CorruptCheckpointError(f"{file}: {name} is {value!r:.120}, expected {expected}.")
    return value


def whole_number(most: int) -> Check:
    return f"a whole number from 0 to {most}", (int,), range(most + 1).__contains__


def matching(pattern: str) -> Check:
    return f"a string that matches {pattern}", (str,), re.compile(pattern).fullmatch


def is_texts(values: Any) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _is_mesh(mesh: Any) -> bool:
    shape, names = mesh.get("shape"), mesh.get("names")
    if not isinstance(shape, list) or not is_texts(names) or len(shape) != len(names):
        return False
    return all(type(size) is int and 0 < size < 2**31 for size in shape)


NULL = type(None)
TEXT: Check = "a string", (str,), None
TEXT_OR_NONE: Check = "a string or null", (str, NULL), None
TEXTS: Check = "a list of strings", (list,), is_texts
TABLE: Check = "an object", (dict,), None
MESH: Check = 'one size per name: {"shape": [2, 4], "names": ["replicate", "shard"]}', (dict, NULL), _is_mesh
