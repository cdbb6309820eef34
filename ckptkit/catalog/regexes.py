"""Regular expressions that somebody else wrote: refused where Python's backtracking could take for ever.

Every repetition multiplies the ways in which a name can be cut up, unless what follows it says where it ends: `\\d+\\.`
has one way, `\\w+\\w+` as many as the name has characters. `tries` bounds their product for a name of a given length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ckptkit.errors import UsageError

__all__ = ["MAX_TRIES", "check_tries", "compile_regex", "tries"]

MAX_TRIES = 10**8  # about a second
_MAX_REGEX = 1000
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?P=\w+\)|\(\?<[=!]|\(\?[:=!>]|\(\?[^)]*\)?|[()*+|?]|\{\d*,?\d*\}|.",
    re.DOTALL,
)
_GROUP = re.compile(r"\(|\(\?P<\w+>|\(\?:")
_LOOK = re.compile(r"\(\?<?[=!]|\(\?>")
# One of every kind that a class such as \w or [^a] tells apart; classes that name others are taken to overlap.
_SAMPLES = [chr(code) for code in range(128)] + ["\u00e9", "\u4e2d", "\u0663", "\u2003", "\u2013"]
_NAMES_OTHERS = re.compile(r"[^\x00-\x7f]|\\[uUxN0-9]")


def compile_regex(text: str) -> re.Pattern[str]:
    """Return the compiled expression.

    Raises:
        UsageError: It is malformed or too long, has flags or comments, or repeats what is itself a repetition:
            "(a+)+" takes twice as long for each character.
    """
    if len(text) > _MAX_REGEX:
        raise UsageError(f"a regex of {len(text)} characters is refused; {_MAX_REGEX} are allowed.")
    odd = next((token for token in _tokens(text) if token.startswith("(?") and not _is_known(token)), None)
    if odd is not None:
        raise UsageError(
            f"regex {text!r} is refused: {odd!r} is a flag, a comment or a condition, which are not taken."
        )
    if _repeats_a_repetition(text):
        raise UsageError(
            f"regex {text!r} is refused: it repeats a group that itself holds a repetition or alternatives, which can "
            "take for ever. Use a template such as 'layers.{i:d}.{rest:*}', or several rules."
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"regex {text!r} is malformed: {error}.") from error


def check_tries(text: str, length: int, *, most: int = MAX_TRIES, why: str = "") -> None:
    """Raise UsageError where matching `text` on a name of `length` characters may take more than `most` steps."""
    found = tries(text)
    if found.steps(length) > most:
        raise UsageError(
            f"{why or text}: its wildcards are too many for a name of {length} characters. Let each be followed by a "
            "character that it does not match itself, or use several rules."
        )


@dataclass(frozen=True, slots=True)
class Tries:
    """In how many ways an expression may cut up a name: `constant` times length to the power of `unbounded`."""

    constant: int
    unbounded: int

    def steps(self, length: int) -> int:
        return self.constant * int((length + 1) ** self.unbounded)


@lru_cache(maxsize=4096)
def tries(text: str) -> Tries:
    """Return the bound for an expression that `compile_regex` accepts."""
    tokens = list(_tokens(text))
    constant, unbounded = 1, 0
    for at, token in enumerate(tokens):
        if token == "|":
            constant += 1
        elif token in ("*", "+") or (token[0] == "{" and _bounds(token) is not None):
            if token == "+" and at and _is_repetition(tokens[at - 1]):
                continue  # possessive: it never gives back
            if at and not _ends_where_the_next_begins(tokens, at):
                low, high = _bounds(token) or (0, None)
                if high is None:
                    unbounded += 1
                else:
                    constant *= max(1, high - low + 1)
        elif token == "?" and at and not _is_repetition(tokens[at - 1]):
            constant *= 2
    return Tries(min(constant, 1 << 62), unbounded)


def _tokens(text: str) -> Iterator[str]:
    return (found[0] for found in _TOKEN.finditer(text))


def _is_known(token: str) -> bool:
    return bool(_GROUP.fullmatch(token) or _LOOK.fullmatch(token) or token.startswith("(?P="))


def _is_repetition(token: str) -> bool:
    return token in ("*", "+", "?") or re.fullmatch(r"\{\d*,?\d*\}", token) is not None


def _bounds(token: str) -> tuple[int, int | None] | None:
    """(least, most) of "{m,n}"; None where the braces are plain text, or a fixed count, which is no choice."""
    match = re.fullmatch(r"\{(\d*)(,?)(\d*)\}", token)
    if match is None or not match[2]:
        return None
    return int(match[1] or 0), int(match[3]) if match[3] else None


def _ends_where_the_next_begins(tokens: list[str], at: int) -> bool:
    """Whether the repetition of one character at `at` is followed by one that it can't match: then it ends there."""
    atom = _characters(tokens[at - 1])
    if atom is None or "|" in tokens:
        return False
    following = at + 1
    if tokens[following : following + 1] == ["?"]:
        following += 1  # lazy: the same ways, in another order
    while following < len(tokens) and (tokens[following] == ")" or _GROUP.fullmatch(tokens[following])):
        if _is_optional(tokens, following if tokens[following] == ")" else _close(tokens, following)):
            return False
        following += 1
    if following >= len(tokens) or _is_optional(tokens, following):
        return False
    nearby = _characters(tokens[following])
    return nearby is not None and not atom & nearby


def _is_optional(tokens: list[str], at: int) -> bool:
    """Whether what ends at `at` may be left out, or repeated."""
    return at + 1 < len(tokens) and tokens[at + 1][0] in "*+?{" and not (tokens[at + 1] == "+" and tokens[at] != ")")


def _close(tokens: list[str], at: int) -> int:
    """The index of the ")" of the group that begins at `at`."""
    depth = 0
    for i in range(at, len(tokens)):
        depth += tokens[i].startswith("(") and not tokens[i].startswith("(?P=")
        depth -= tokens[i] == ")"
        if not depth:
            return i
    return len(tokens)


@lru_cache(maxsize=1024)
def _characters(token: str) -> frozenset[str] | None:
    """The characters, of a sample, that one token matches; None for what is no single character."""
    if token[0] in "()*+?|{" or token in ("^", "$", r"\A", r"\b", r"\B", r"\Z") or _NAMES_OTHERS.search(token):
        return None
    try:
        pattern = re.compile(token)
    except re.error:
        return None
    return frozenset(c for c in _SAMPLES if pattern.fullmatch(c)) or None


def _repeats_a_repetition(text: str) -> bool:
    varies = [False]  # whether the group at each depth can match in several ways
    closed = False  # whether the last token closed a group that can
    for token in _tokens(text):
        if token[0] == "(" and not token.startswith("(?P="):
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
