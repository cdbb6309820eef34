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
from typing import Any, TypeAlias

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
        raise UsageError(f"{file}: a key map is a table with 'rules', not {_shown(data)}.")
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
        raise UsageError(f"{where}: a rule is a table, not {_shown(data)}.")
    op = data.get("op")
    if not isinstance(op, str) or op not in _OPS:
        raise UsageError(f"{where}: op = {op!r:.80} is not one of {', '.join(_OPS)}.")
    kind, keys = _OPS[op]
    sources = {"from"} if op == "concat" else {"from", "match"}
    _only(data, {"op"} | sources | keys.keys(), where)
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    try:
        values = {key: _value(data, key, what, where) for key, what in keys.items() if key in needed or _has(data, key)}
        sizes, names = values.get("sizes"), "from" if op == "concat" else "to"
        if isinstance(sizes, tuple) and len(sizes) != (count := len(_value(data, names, _NAMES, where))):
            raise UsageError(f"{where}: expected {count} 'sizes', one per name in {names!r}, found {len(sizes)}.")
        made: Rule = kind(source=_source(data, op, where), **values)
        return made
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith(where) else f"{where}: {text}") from error


def _source(data: Mapping[str, Any], op: str, where: str) -> NamePattern | tuple[NamePattern, ...]:
    if op == "concat":
        return tuple(NamePattern(text) for text in _value(data, "from", _NAMES, where))
    if ("from" in data) == ("match" in data):
        raise UsageError(f"{where}: give either 'from' (a template) or 'match' (a regex).")
    if "from" in data:
        return NamePattern(_value(data, "from", _TEXT, where))
    return NamePattern(regex=_value(data, "match", _TEXT, where))


# --- kinds of values in a rule: a description for messages, and a function that returns whether a value is accepted


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_float_dtype(value: Any) -> bool:
    try:
        return isinstance(value, str) and dtype_of(value).kind == "float"
    except UnsupportedFormatError:
        return False


def _list_of(is_item: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(map(is_item, value))


def _is_size(value: Any) -> bool:
    return type(value) in (int, str)


_Kind: TypeAlias = tuple[str, Callable[[Any], bool]]
_TEXT: _Kind = ("text", _is_text)
_NAMES: _Kind = ("a list of two names or more", _list_of(_is_text, 2))
_INTEGER: _Kind = ("an integer", lambda value: type(value) is int)
_INTEGERS: _Kind = ("a list of integers", _list_of(lambda value: type(value) is int))
_SIZE: _Kind = ("a number or a key of config.json such as 'num_attention_heads'", _is_size)
_SIZES: _Kind = (
    "'equal' or a list of numbers and keys of config.json",
    lambda value: value == "equal" or _list_of(_is_size)(value),
)
_LAYOUT: _Kind = ("'halves' (transformers) or 'interleaved' (Meta's code)", lambda v: v in ("halves", "interleaved"))
_FLOAT_DTYPE: _Kind = ("a float dtype such as 'bf16' or 'fp32'", _is_float_dtype)


def _has(data: Mapping[str, Any], key: str) -> bool:
    return data.get(key) is not None  # null in JSON means the default


def _value(data: Mapping[str, Any], key: str, kind: _Kind, where: str) -> Any:
    value, (what, accepts) = data.get(key), kind
    if not accepts(value):
        raise UsageError(f"{where}: {key!r} must be {what}, not {_shown(value)}.")
    return tuple(value) if isinstance(value, list) else value


def _only(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r:.80}; known are {', '.join(sorted(known))}.")


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {value!r:.80}"


def _rule_lines(text: str, file: str) -> list[int]:
    """Return the line numbers on which the rules ([[rules]]) of a TOML file start. [] for JSON."""
    if file.endswith(".json"):
        return []
    return [n for n, line in enumerate(text.splitlines(), start=1) if line.strip().startswith("[[rules]]")]


# For each op, its rule, and the values of the rule's keys. The keys are the names of the rule's fields.
_OPS: dict[str, tuple[type[Any], dict[str, _Kind]]] = {
    "rename": (Rename, {"to": _TEXT}),
    "drop": (Drop, {"why": _TEXT}),
    "split": (Split, {"to": _NAMES, "dim": _INTEGER, "sizes": _SIZES}),
    "concat": (Concat, {"to": _TEXT, "dim": _INTEGER, "sizes": _SIZES}),
    "stack": (Stack, {"to": _TEXT, "dim": _INTEGER, "index": _TEXT}),
    "unstack": (Unstack, {"to": _TEXT, "dim": _INTEGER, "index": _TEXT}),
    "transpose": (Transpose, {"dims": _INTEGERS}),
    "rope_permute": (RopePermute, {"to": _LAYOUT, "heads": _SIZE}),
    "cast": (Cast, {"dtype": _FLOAT_DTYPE}),
    "pad": (Pad, {"size": _SIZE, "dim": _INTEGER}),
}
