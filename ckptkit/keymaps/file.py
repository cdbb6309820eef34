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
        file: The file's name, for error messages and as the map's name.

    Raises:
        UsageError: The file is invalid, or is TOML on Python 3.10, which can't parse TOML. The message names the file,
            the rule's number and the key.
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
    build, keys = _OPS[op]
    sources = {"from"} if op == "concat" else {"from", "match"}
    _only(data, {"op"} | sources | keys, where)
    try:
        return build(data, where)
    except UsageError as error:
        text = str(error)
        raise UsageError(text if text.startswith(where) else f"{where}: {text}") from error


def _pattern(data: Mapping[str, Any], where: str) -> NamePattern:
    if ("from" in data) == ("match" in data):
        raise UsageError(f"{where}: give either 'from' (a template) or 'match' (a regex).")
    if "from" in data:
        return NamePattern(_text(data, "from", where))
    return NamePattern(regex=_text(data, "match", where))


def _rename(data: Mapping[str, Any], where: str) -> Rule:
    return Rename(_pattern(data, where), _text(data, "to", where))


def _drop(data: Mapping[str, Any], where: str) -> Rule:
    pattern = _pattern(data, where)
    return Drop(pattern, _text(data, "why", where)) if "why" in data else Drop(pattern)


def _split(data: Mapping[str, Any], where: str) -> Rule:
    to = _texts(data, "to", where)
    sizes = _sizes(data, where)
    if isinstance(sizes, tuple) and len(sizes) != len(to):
        raise UsageError(f"{where}: expected {len(to)} 'sizes', one per name in 'to', found {len(sizes)}.")
    return Split(_pattern(data, where), to, _int(data, "dim", where), "equal" if sizes is None else sizes)


def _concat(data: Mapping[str, Any], where: str) -> Rule:
    sources = tuple(NamePattern(text) for text in _texts(data, "from", where))
    sizes = _sizes(data, where)
    if isinstance(sizes, tuple) and len(sizes) != len(sources):
        raise UsageError(f"{where}: expected {len(sources)} 'sizes', one per name in 'from', found {len(sizes)}.")
    return Concat(sources, _text(data, "to", where), _int(data, "dim", where), sizes)


def _stack(data: Mapping[str, Any], where: str) -> Rule:
    return Stack(_pattern(data, where), _text(data, "to", where), _int(data, "dim", where), _index(data, where))


def _unstack(data: Mapping[str, Any], where: str) -> Rule:
    return Unstack(_pattern(data, where), _text(data, "to", where), _int(data, "dim", where), _index(data, where))


def _transpose(data: Mapping[str, Any], where: str) -> Rule:
    dims = data.get("dims", [])
    if not isinstance(dims, list) or any(not isinstance(d, int) or isinstance(d, bool) for d in dims):
        raise UsageError(f"{where}: 'dims' must be a list of integers.")
    return Transpose(_pattern(data, where), tuple(dims))


def _rope_permute(data: Mapping[str, Any], where: str) -> Rule:
    heads = _size(data, "heads", "num_attention_heads", where)
    to = data.get("to", "halves")
    if to not in ("halves", "interleaved"):
        raise UsageError(
            f"{where}: to = {to!r:.80} is not one of 'halves' (transformers), 'interleaved' (Meta's code)."
        )
    return RopePermute(_pattern(data, where), heads, to)


def _cast(data: Mapping[str, Any], where: str) -> Rule:
    name = _text(data, "dtype", where)
    try:
        known = dtype_of(name).kind == "float"
    except UnsupportedFormatError:
        known = False
    if not known:
        raise UsageError(f"{where}: dtype = {name!r:.80} is not a float dtype such as 'bf16' or 'fp32'.")
    return Cast(_pattern(data, where), name)


def _pad(data: Mapping[str, Any], where: str) -> Rule:
    return Pad(_pattern(data, where), _size(data, "size", "vocab_size", where), _int(data, "dim", where))


def _size(data: Mapping[str, Any], key: str, example: str, where: str) -> int | str:
    size = data.get(key)
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise UsageError(f"{where}: {key!r} must be a number or a key of config.json such as {example!r}.")
    return size


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
    value = data.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where}: {key!r} must be an integer, not {_kind(value)}.")
    return value


def _index(data: Mapping[str, Any], where: str) -> str:
    return _text(data, "index", where) if "index" in data else "i"


def _sizes(data: Mapping[str, Any], where: str) -> Any:
    sizes = data.get("sizes")
    if sizes is None or sizes == "equal":
        return sizes
    if not isinstance(sizes, list) or any(isinstance(s, bool) or not isinstance(s, (int, str)) for s in sizes):
        raise UsageError(f"{where}: 'sizes' must be 'equal' or a list of numbers and keys of config.json.")
    return tuple(sizes)


def _only(data: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in data:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r:.80}; known are {', '.join(sorted(known))}.")


def _kind(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {value!r:.80}"


def _rule_lines(text: str, file: str) -> list[int]:
    """Return the line number on which each rule ([[rules]]) in a TOML file starts."""
    if file.endswith(".json"):
        return []
    return [n for n, line in enumerate(text.splitlines(), start=1) if line.strip().startswith("[[rules]]")]


_OPS: dict[str, tuple[Callable[[Mapping[str, Any], str], Rule], set[str]]] = {
    "rename": (_rename, {"to"}),
    "drop": (_drop, {"why"}),
    "split": (_split, {"to", "dim", "sizes"}),
    "concat": (_concat, {"to", "dim", "sizes"}),
    "stack": (_stack, {"to", "dim", "index"}),
    "unstack": (_unstack, {"to", "dim", "index"}),
    "transpose": (_transpose, {"dims"}),
    "rope_permute": (_rope_permute, {"heads", "to"}),
    "cast": (_cast, {"dtype"}),
    "pad": (_pad, {"size", "dim"}),
}
