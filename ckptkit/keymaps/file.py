"""Parses TOML or JSON key-map files into a `NameMap`. Errors name the rule and the key.

name = "mine"          # optional
rest = "keep"          # or "refuse", "drop": for tensors that no rule matches
[[rules]]
op = "rename"          # drop, split, concat, stack, unstack, transpose, rope_permute, cast, pad
from = "layers.{i:d}.wq.{what}"     # or match = "a regex"; for concat, a list of names
to = "model.layers.{i}.q_proj.{what}"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError, UsageError
from ckptkit.keymaps.keymap import NameMap
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import Cast, Concat, Drop, Pad, Rename, RopePermute, Rule, Split, Stack, Transpose, Unstack

_TOP = {"name", "rest", "note", "rules"}


def parse_key_map(text: str, *, file: str) -> NameMap:
    """Parse a key-map file: JSON if its name ends in .json, otherwise TOML.

    Args:
        file: The file's name, for error messages. Also the map's name if the file contains no `name`.

    Raises:
        UsageError: The file is invalid. The message names the file, the rule's number and the key. Also raised for TOML
            files in Python 3.10, which has no TOML parser.
    """
    data = _load(text, file)
    if not isinstance(data, Mapping):
        raise UsageError(f"{file}: a key map is a table with 'rules', not {_kind(data)}.")
    _only(data, _TOP, file)
    rules = data.get("rules")
    if not isinstance(rules, list) or not rules:
        raise UsageError(f"{file}: 'rules' must be a list of at least one rule.")
    rest = data.get("rest", "keep")
    if rest not in ("keep", "drop", "refuse"):
        raise UsageError(f"{file}: rest = {rest!r:.80} is not one of 'keep', 'drop', 'refuse'.")
    lines = _rule_lines(text, file)
    parsed: list[Rule] = []
    for number, rule in enumerate(rules, start=1):
        line = f", line {lines[number - 1]}" if len(lines) == len(rules) else ""
        parsed.append(_rule(rule, f"{file}, rule {number}{line}"))
    name, note = data.get("name", file), data.get("note", "")
    if not isinstance(name, str) or not isinstance(note, str):
        raise UsageError(f"{file}: 'name' and 'note' must be text.")
    return NameMap(name, tuple(parsed), rest, note)


def _load(text: str, file: str) -> Any:
    if file.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file} is not valid JSON: {error}.") from error
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError(f"{file}: reading TOML needs Python 3.11 or later. Write the map as JSON instead.") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number with too many digits
        raise UsageError(f"{file} is not valid TOML: {error}.") from error


def _rule(data: Any, where: str) -> Rule:
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: a rule is a table, not {_kind(data)}.")
    op = data.get("op")
    if not isinstance(op, str) or op not in _OPS:
        raise UsageError(f"{where}: op = {op!r:.80} is not one of {', '.join(_OPS)}.")
    kind, keys = _OPS[op]
    sources = {"from"} if op == "concat" else {"from", "match"}
    _only(data, {"op"} | sources | keys.keys(), where)
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    try:
        values = {key: parse(data, key, where) for key, parse in keys.items() if key in data or key in needed}
        if "sizes" in values and values["sizes"] is None:
            del values["sizes"]  # null in JSON means the default of the rule; a split then makes equal parts
        sizes, names = values.get("sizes"), "from" if op == "concat" else "to"
        if isinstance(sizes, tuple) and len(sizes) != (count := len(_texts(data, names, where))):
            raise UsageError(f"{where}: expected {count} 'sizes', one per name in {names!r}, found {len(sizes)}.")
        made: Rule = kind(source=_source(data, op, where), **values)
        return made
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith(where) else f"{where}: {text}") from error


def _source(data: Mapping[str, Any], op: str, where: str) -> NamePattern | tuple[NamePattern, ...]:
    if op == "concat":
        return tuple(NamePattern(text) for text in _texts(data, "from", where))
    if ("from" in data) == ("match" in data):
        raise UsageError(f"{where}: give either 'from' (a template) or 'match' (a regex).")
    if "from" in data:
        return NamePattern(_text(data, "from", where))
    return NamePattern(regex=_text(data, "match", where))


# --- the values of a rule's keys


def _direction(data: Mapping[str, Any], key: str, where: str) -> str:
    to = data[key]
    if to not in ("halves", "interleaved"):
        raise UsageError(
            f"{where}: to = {to!r:.80} is not one of 'halves' (transformers), 'interleaved' (Meta's code)."
        )
    return str(to)


def _float_dtype(data: Mapping[str, Any], key: str, where: str) -> str:
    name = _text(data, key, where)
    try:
        known = dtype_of(name).kind == "float"
    except UnsupportedFormatError:
        known = False
    if not known:
        raise UsageError(f"{where}: dtype = {name!r:.80} is not a float dtype such as 'bf16' or 'fp32'.")
    return name


def _dims(data: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    dims = data[key]
    if not isinstance(dims, list) or any(not isinstance(d, int) or isinstance(d, bool) for d in dims):
        raise UsageError(f"{where}: 'dims' must be a list of integers.")
    return tuple(dims)


def _size(data: Mapping[str, Any], key: str, where: str) -> int | str:
    size = data.get(key)
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        example = "num_attention_heads" if key == "heads" else "vocab_size"
        raise UsageError(f"{where}: {key!r} must be a number or a key of config.json such as {example!r}.")
    return size


def _sizes(data: Mapping[str, Any], key: str, where: str) -> Any:
    sizes = data[key]
    if sizes is None or sizes == "equal":
        return sizes
    if not isinstance(sizes, list) or any(isinstance(s, bool) or not isinstance(s, (int, str)) for s in sizes):
        raise UsageError(f"{where}: 'sizes' must be 'equal' or a list of numbers and keys of config.json.")
    return tuple(sizes)


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: {key!r} must be text, not {_kind(value)}.")
    return value


def _texts(data: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = data.get(key)
    if not isinstance(value, list) or len(value) < 2 or any(not isinstance(v, str) or not v for v in value):
        raise UsageError(f"{where}: {key!r} must be a list of two names or more.")
    return tuple(value)


def _int(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {key!r} must be an integer, not {_kind(value)}.")
    return value


def _only(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r:.80}; known are {', '.join(sorted(known))}.")


def _kind(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {value!r:.80}"


def _rule_lines(text: str, file: str) -> list[int]:
    """Return the line numbers on which the rules ([[rules]]) of a TOML file start. [] for JSON."""
    if file.endswith(".json"):
        return []
    return [n for n, line in enumerate(text.splitlines(), start=1) if line.strip().startswith("[[rules]]")]


# For each op, its rule, and how to parse the rule's keys. The keys are the names of the rule's fields.
_OPS: dict[str, tuple[type[Any], dict[str, Callable[[Mapping[str, Any], str, str], Any]]]] = {
    "rename": (Rename, {"to": _text}),
    "drop": (Drop, {"why": _text}),
    "split": (Split, {"to": _texts, "dim": _int, "sizes": _sizes}),
    "concat": (Concat, {"to": _text, "dim": _int, "sizes": _sizes}),
    "stack": (Stack, {"to": _text, "dim": _int, "index": _text}),
    "unstack": (Unstack, {"to": _text, "dim": _int, "index": _text}),
    "transpose": (Transpose, {"dims": _dims}),
    "rope_permute": (RopePermute, {"to": _direction, "heads": _size}),
    "cast": (Cast, {"dtype": _float_dtype}),
    "pad": (Pad, {"size": _size, "dim": _int}),
}
