"""Key-map rules turned round, so that the inverse map undoes them."""

from __future__ import annotations

import re

from ckptkit.catalog.patterns import NamePattern, placeholders
from ckptkit.catalog.rules import Concat, Rename, RopePermute, Rule, Split, Stack, Transpose, Unstack
from ckptkit.errors import UsageError

__all__ = ["inverse_rules"]


def inverse_rules(name: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules that undo `rules`: the inverse of each, last first.

    Raises:
        UsageError: A rule loses something: a drop, a cast, a regex, a concat of unknown sizes.
    """
    inverted: list[Rule] = []
    for number, rule in enumerate(rules, start=1):
        try:
            inverted.append(_inverse(rule))
        except UsageError as error:
            raise UsageError(f"key map {name!r} can't be turned round: rule {number}: {error}") from error
    return tuple(reversed(inverted))


def _inverse(rule: Rule) -> Rule:
    if isinstance(rule, Rename):
        return Rename(_turned(rule.source, rule.to), _plain(rule.source.template))
    if isinstance(rule, Split):
        patterns = tuple(_turned(rule.source, to) for to in rule.to)
        return Concat(patterns, _plain(rule.source.template), rule.dim, rule.sizes)
    if isinstance(rule, Concat):
        if rule.sizes is None:
            raise UsageError("a concat without sizes does not say where to cut.")
        sources = tuple(_plain(_template(pattern)) for pattern in rule.source)
        return Split(_turned(rule.source[0], rule.to), sources, rule.dim, rule.sizes)
    if isinstance(rule, Stack):
        return Unstack(
            _turned(rule.source, rule.to, lost=rule.index), _plain(_template(rule.source)), rule.dim, rule.index
        )
    if isinstance(rule, Unstack):
        source = _turned(rule.source, rule.to, gained=rule.index)
        return Stack(source, _plain(_template(rule.source)), rule.dim, rule.index)
    if isinstance(rule, Transpose):
        dims = tuple(rule.dims.index(d) for d in range(len(rule.dims)))
        return Transpose(rule.source, dims)
    if isinstance(rule, RopePermute):
        return RopePermute(rule.source, rule.heads, "interleaved" if rule.to == "halves" else "halves")
    raise UsageError(f"a {type(rule).__name__.lower()} loses what it changes.")


def _turned(source: NamePattern, to: str, *, lost: str = "", gained: str = "") -> NamePattern:
    """The pattern that matches what `to` wrote: the same placeholders, of the kinds that `source` gave them.

    `lost` and `gained` name the counter that a stack takes away and an unstack puts in.
    """
    known = placeholders(_template(source))
    gone = set(known) - set(placeholders(to)) - {lost}
    if gone:
        raise UsageError(f"{to!r} does not keep {', '.join(f'{{{x}}}' for x in sorted(gone))} of {source}.")
    return NamePattern(_with_kinds(to, {**known, gained: "d"}))


def _template(pattern: NamePattern) -> str:
    if not pattern.template:
        raise UsageError(f"the regex {pattern} has no inverse; write it as a template.")
    return pattern.template


def _plain(template: str) -> str:
    return re.sub(r"\{(\w+):[^{}]*\}", r"{\1}", template)


def _with_kinds(template: str, kinds: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: f"{{{m[1]}:{kinds[m[1]]}}}" if kinds.get(m[1]) else m[0], template)
