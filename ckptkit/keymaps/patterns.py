"""Matches tensor names with patterns. Fills templates with the matched parts to build new names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import regex

from ckptkit.errors import UsageError

_MAX_REGEX = 1000  # characters
_TIMEOUT_S = 1.0

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(?::([^{}]*))?\}")
_KINDS = {"": r"[^.]+", "d": r"[0-9]+", "*": r".*"}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A rule's pattern for tensor names. It must match a whole name.

    Give either a `template` or a `regex`.

    A template is text with placeholders, such as "layers.{i:d}.wq.weight". {x} matches one name component (no dots),
    {x:d} matches digits, and {x:*} matches any string, including dots and the empty string.

    A regex is a Python regular expression. The template of the new name refers to its groups as {1}, {2}... or {name}.
    A rule with a regex cannot be inverted.
    """

    template: str = ""
    regex: str = ""

    def __post_init__(self) -> None:
        if bool(self.template) == bool(self.regex):
            raise UsageError("a name pattern must be either a template or a regex, and not empty.")
        compiled(self)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the part of `name` that each placeholder matches, or None if the pattern does not match `name`."""
        return self.matcher()(name)

    def matcher(self) -> Callable[[str], dict[str, str] | None]:
        """Return a function that does the same as `match`, but is faster for many names."""
        pattern = compiled(self)
        head, tail = _literal_ends(self.template) if self.template else ("", "")
        numbered = bool(self.regex)

        def match(name: str) -> dict[str, str] | None:
            if not name.endswith(tail) or not name.startswith(head):
                return None
            found = fullmatch(pattern, name)
            if found is None:
                return None
            bound = {key: value or "" for key, value in found.groupdict().items()}
            if numbered:
                bound.update({str(i): value or "" for i, value in enumerate(found.groups(), start=1)})
            return bound

        return match

    def names(self) -> frozenset[str]:
        """Return the names of the template's placeholders or of the regex's groups."""
        if self.template:
            return frozenset(placeholders(self.template))
        pattern = compiled(self)
        return frozenset(pattern.groupindex) | {str(i) for i in range(1, pattern.groups + 1)}

    def __str__(self) -> str:
        return self.template or f"/{self.regex}/"


def compile_regex(text: str) -> regex.Pattern[str]:
    """Compile a regular expression from a key-map file. Raises UsageError if it is malformed."""
    if len(text) > _MAX_REGEX:
        raise UsageError(f"a regex of {len(text)} characters is refused; at most {_MAX_REGEX} are allowed.")
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError) as error:
        raise UsageError(f"regex {text!r} is malformed: {error}.") from error


def fullmatch(pattern: regex.Pattern[str], name: str) -> regex.Match[str] | None:
    """Match the whole name. Returns None if it does not match.

    Uses the package `regex`, because `re` has no timeout.

    Raises:
        UsageError: The match takes more than a second (catastrophic backtracking).
    """
    try:
        return pattern.fullmatch(name, timeout=_TIMEOUT_S)
    except TimeoutError:
        raise UsageError(
            f"regex {pattern.pattern!r:.200} timed out after {_TIMEOUT_S:g} s on the name {name!r:.100}: it has "
            "too many repetitions. Use a template such as 'layers.{i:d}.{rest:*}', or several rules."
        ) from None


def placeholders(template: str) -> dict[str, str]:
    """Return each placeholder's kind, by its name: "" (one name component), "d" (digits) or "*" (anything)."""
    return {match[1]: match[2] or "" for match in _PLACEHOLDER.finditer(template)}


_MAX_NAME = 1 << 16  # without a limit, a few rules that each double a name could produce a name of any length


def render(template: str, bound: Mapping[str, str]) -> str:
    """Fill in a template's placeholders.

    Raises:
        UsageError: `bound` has no value for a placeholder, or the result is too long.
    """
    text = ""
    for literal, name in _parts(template):
        text += literal
        if name:
            if name not in bound:
                raise UsageError(f"{template!r} uses {{{name}}}, which its pattern does not bind.")
            text += bound[name]
    if len(text) > _MAX_NAME:
        raise UsageError(f"{template!r:.80} makes a name of {len(text)} characters; {_MAX_NAME} are allowed.")
    return text


@lru_cache(maxsize=4096)
def _parts(template: str) -> tuple[tuple[str, str], ...]:
    """Split a template into pairs (text, name of the placeholder that follows it; "" in the last pair)."""
    parts: list[tuple[str, str]] = []
    end = 0
    for match in _PLACEHOLDER.finditer(template):
        parts.append((template[end : match.start()], match[1]))
        end = match.end()
    return (*parts, (template[end:], ""))


def _literal_ends(template: str) -> tuple[str, str]:
    """Return the text before the first placeholder, and the text after the last placeholder.

    If the template has no placeholders, both texts are the whole template.
    """
    found = list(_PLACEHOLDER.finditer(template))
    return (template[: found[0].start()], template[found[-1].end() :]) if found else (template, template)


@lru_cache(maxsize=4096)
def compiled(pattern: NamePattern) -> regex.Pattern[str]:
    """Return the regular expression for a pattern. Raises UsageError if the template or regex is malformed."""
    if pattern.regex:
        return compile_regex(pattern.regex)
    text, end, seen = "", 0, set[str]()
    template = pattern.template
    for match in _PLACEHOLDER.finditer(template):
        name, kind = match[1], match[2] or ""
        if kind not in _KINDS:
            raise UsageError(
                f"{template!r}: {{{name}:{kind}}} is not one of {{x}}, {{x:d}} (digits), {{x:*}} (anything)."
            )
        if name.isdigit():
            raise UsageError(f"{template!r}: {{{name}}} means a regex group; use a name for the placeholder.")
        text += re.escape(template[end : match.start()])
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{_KINDS[kind]})"
        seen.add(name)
        end = match.end()
    rest = template[end:]
    if "{" in rest or "}" in rest or "{" in re.sub(_PLACEHOLDER, "", template):
        raise UsageError(f"{template!r} has a brace that belongs to no placeholder such as {{i}}, {{i:d}} or {{i:*}}.")
    return regex.compile(text + re.escape(rest))
