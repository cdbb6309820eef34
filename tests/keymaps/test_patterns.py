"""Patterns over tensor names: templates, and untrusted regular expressions."""

import pytest

from ckptkit.errors import UsageError
from ckptkit.keymaps import patterns
from ckptkit.keymaps.patterns import NamePattern, compile_regex

REGEXES = r"(\w|\w\w)+[!?]", r"(a+)+[!?]", r"\w+" * 12 + "[!?]", r"(.*a){12}[!?]", r"(.*)(.*)(.*)(.*)(.*)[xy]\1"


@pytest.mark.parametrize(("pattern", "name"), [
    *((NamePattern(regex=text), "a" * 5000) for text in REGEXES),
    (NamePattern("{a}{b}{c}{d}{e}{f}{g}{h}!"), "a" * 2000 + "." + "a!"),
])  # fmt: skip
def test_a_pattern_that_backtracks_for_ever_is_refused(pattern, name, monkeypatch):
    monkeypatch.setattr(patterns, "_TIMEOUT_S", 0.05)
    with pytest.raises(UsageError, match=r"timed out after 0\.05 s on the name 'aaa.*template"):
        pattern.match(name)


@pytest.mark.parametrize("text", ["(", "[", "x" * 1001, "*", "(?P<1>a)"])
def test_a_malformed_regex_is_an_error(text):
    with pytest.raises(UsageError, match=r"malformed|refused"):
        compile_regex(text)


def test_a_placeholder_matches_one_component_and_a_star_any_text():
    assert NamePattern("a.{n}.c").match("a.b.c") == {"n": "b"}
    assert NamePattern("a.{n}.c").match("a.b.b.c") is None
    assert NamePattern("a.{n:*}.c").match("a.b.b.c") == {"n": "b.b"}
