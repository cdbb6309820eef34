"""Patterns over tensor names, and the templates that write new names from what they matched."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ckptkit.errors import UsageError

__all__ = ["NamePattern", "compile_regex", "placeholders", "render"]

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(?::([^{}]*))?\}")
_WILDCARD = re.compile(r"(?<!\\)(?:\.|\])[*+]")
_MAX_TRIALS = 10**8  # places where the wildcards of a pattern may end, together
_MAX_REGEX = 1000
_KINDS = {"": r"[^.]+", "d": r"[0-9]+", "*": r".*"}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Which names a rule applies to; it must match the whole name.

    Either `template`, plain text with placeholders: "layers.{i:d}.wq.weight", where {x} is one part
    without dots, {x:d} is digits, {x:*} is anything, dots and nothing at all included. Such rules can be
    turned round. Or `regex`, a Python regular expression, whose groups are {1}, {2}... or {name} in templates.
    """

    template: str = ""
    regex: str = ""

    def __post_init__(self) -> None:
        if bool(self.template) == bool(self.regex):
            raise UsageError("a name pattern is either a template or a regex, and not empty.")
        compiled(self)

    def match(self, name: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in `name`; None where it does not match."""
        return self.matcher()(name)

    def matcher(self) -> Callable[[str], dict[str, str] | None]:
        """Return `match` as a function that is quick for many names."""
        fullmatch = compiled(self).fullmatch
        head, tail = _literal_ends(self.template) if self.template else ("", "")
        numbered = bool(self.regex)
        wildcards = len(_WILDCARD.findall(self.regex)) if self.regex else self.template.count(":*}")

        def match(name: str) -> dict[str, str] | None:
            if not name.endswith(tail) or not name.startswith(head):
                return None
            if wildcards > 1 and len(name) ** wildcards > _MAX_TRIALS:
                raise UsageError(f"{self}: {wildcards} wildcards are too many for a name of {len(name)} characters.")
            found = fullmatch(name)
            if found is None:
                return None
            bound = {key: value or "" for key, value in found.groupdict().items()}
            if numbered:
                bound.update({str(i): value or "" for i, value in enumerate(found.groups(), start=1)})
            return bound

        return match

    def names(self) -> frozenset[str]:
        """Return the placeholders that a match gives a value to."""
        if self.template:
            return frozenset(placeholders(self.template))
        pattern = compiled(self)
        return frozenset(pattern.groupindex) | {str(i) for i in range(1, pattern.groups + 1)}

    def __str__(self) -> str:
        return self.template or f"/{self.regex}/"


def placeholders(template: str) -> dict[str, str]:
    """Return the placeholders of a template with their kinds: "" (one part), "d" (digits), "*" (anything)."""
    return {match[1]: match[2] or "" for match in _PLACEHOLDER.finditer(template)}


def render(template: str, bound: Mapping[str, str]) -> str:
    """Return the template with its placeholders filled. Raises UsageError for one that has no value."""
    text = ""
    for literal, name in _parts(template):
        text += literal
        if name:
            if name not in bound:
                raise UsageError(f"{template!r} uses {{{name}}}, which its pattern does not bind.")
            text += bound[name]
    return text


@lru_cache(maxsize=4096)
def _parts(template: str) -> tuple[tuple[str, str], ...]:
    """The template as (text, placeholder after it), the last without a placeholder."""
    parts: list[tuple[str, str]] = []
    end = 0
    for match in _PLACEHOLDER.finditer(template):
        parts.append((template[end : match.start()], match[1]))
        end = match.end()
    return (*parts, (template[end:], ""))


def _literal_ends(template: str) -> tuple[str, str]:
    """The text before the first and after the last placeholder; the whole text twice where there is none."""
    found = list(_PLACEHOLDER.finditer(template))
    return (template[: found[0].start()], template[found[-1].end() :]) if found else (template, template)


@lru_cache(maxsize=4096)
def compiled(pattern: NamePattern) -> re.Pattern[str]:
    """Return the regular expression of a pattern. Raises UsageError where it is malformed."""
    if pattern.regex:
        return compile_regex(pattern.regex)
    text, end, seen = "", 0, set[str]()
    template = pattern.template
    for match in _PLACEHOLDER.finditer(template):
        name, kind = match[1], match[2] or ""
        if kind not in _KINDS:
            raise UsageError(f"{template!r}: {{{name}:{kind}}} is none of {{x}}, {{x:d}} (digits), {{x:*}} (anything).")
        if name.isdigit():
            raise UsageError(f"{template!r}: {{{name}}} stands for a regex group; name a placeholder of a template.")
        text += re.escape(template[end : match.start()])
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{_KINDS[kind]})"
        seen.add(name)
        end = match.end()
    rest = template[end:]
    if "{" in rest or "}" in rest or "{" in re.sub(_PLACEHOLDER, "", template):
        raise UsageError(f"{template!r} has a brace that belongs to no placeholder such as {{i}}, {{i:d}} or {{i:*}}.")
    return re.compile(text + re.escape(rest))


def compile_regex(text: str) -> re.Pattern[str]:
    """Return a regular expression that somebody else wrote. Raises UsageError where it is malformed, or can take for
    ever: Python's `re` backtracks, and what repeats a repetition, "(a+)+", takes twice as long for each character."""
    if len(text) > _MAX_REGEX:
        raise UsageError(f"a regex of {len(text)} characters is refused; {_MAX_REGEX} are allowed.")
    if _repeats_a_repetition(text):
        raise UsageError(
            f"regex {text!r} is refused: it repeats a group that itself holds a repetition or alternatives, which can "
            "take for ever. Use a template such as 'layers.{i:d}.{rest:*}', or several rules."
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"regex {text!r} is malformed: {error}.") from error


_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[^)]?)?|\)|[*+|]|\?|\{\d*,?\d*\}|.", re.DOTALL)


def _repeats_a_repetition(text: str) -> bool:
    varies = [False]  # whether the group at each depth can match in several ways
    closed = False  # whether the last token closed a group that can
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token[0] == "(":
            varies.append(False)
        elif token == ")":
            closed = varies.pop() if len(varies) > 1 else False
            varies[-1] = varies[-1] or closed
            continue
        elif token in ("*", "+", "|", "?") or (token[0] == "{" and token[-1] == "}" and len(token) > 2):
            if closed and token not in ("?", "|"):
                return True
            varies[-1] = True
        closed = False
    return False
