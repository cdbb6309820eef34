"""Expressions that take for ever are refused before they run; those that people write are not."""

from __future__ import annotations

import pytest

from ckptkit.catalog.patterns import NamePattern
from ckptkit.catalog.regexes import MAX_TRIES, check_tries, compile_regex, tries
from ckptkit.errors import UsageError

EXPONENTIAL = [
    "(a+)+",
    "(a|a)*",
    "(a*)*b",
    "((a?)+)*",
    "(a{1,9}){1,9}",
    "(?:a|aa)+$",
    "([a-z]+\\.)*",
    "(?P<x>a+){2}",
    "((?:a)|b)+",
    "(a+(?=b))+",
]
HIDDEN = ["(?x)(a+ # [\n)+ # ]", "(?i)a", "(?#(a)b", "(a)(?(1)b|c)", "(?x:a b)"]
POLYNOMIAL = [
    r"\w+" * 8 + "!",
    "a*" * 8 + "b",
    "a?" * 40 + "a" * 40,
    r"\+?" * 40 + r"\+" * 40,
    ".{0,}" * 9,
    "[a-z]+" * 9,
    r"\w+(?:\.a)?" * 9,
    r"(\w+)(\w+)()(\w+)(\w+)(\w+)(\w+)(\w+)",
    r"[\u0660-\u0669]+\d" * 9,
    "a{1,60}" * 9,
    r"(?:ab)*" * 9,
    r"\w+\w" * 9,
    "(.*)" * 9,
    r"\d+?" * 9,
]
ORDINARY = [
    (r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight", 1),
    (r"(.*)\.wq\.(weight|bias)", 2),
    (r"model\.layers\.(?P<i>[0-9]+)\.([^.]+)\.([^.]+)\.([^.]+)\.([^.]+)\.([^.]+)", 1),
    (r"[a-z]+-\d+_[a-z]+-\d+_[a-z]+-\d+", 1),
]


@pytest.mark.parametrize("text", EXPONENTIAL)
def test_a_repeated_repetition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="for ever"):
        compile_regex(text)


@pytest.mark.parametrize("text", HIDDEN)
def test_flags_comments_and_conditions_that_could_hide_one_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="refused"):
        compile_regex(text)


@pytest.mark.parametrize("text", POLYNOMIAL)
def test_very_many_wildcards_on_a_long_name_are_refused_before_they_run(text: str) -> None:
    pattern = NamePattern(regex=text)
    with pytest.raises(UsageError, match="wildcards are too many"):
        pattern.match("a" * 60)


def test_very_many_wildcards_of_a_template_are_refused_too() -> None:
    with pytest.raises(UsageError, match="wildcards are too many"):
        NamePattern("{a}{b}{c}{d}{e}{f}{g}{h}!").match("a" * 60 + "!")


@pytest.mark.parametrize(("text", "unbounded"), ORDINARY)
def test_what_people_write_is_cheap_on_names_of_any_length(text: str, unbounded: int) -> None:
    assert tries(text).unbounded <= unbounded
    assert tries(text).steps(1000) < MAX_TRIES
    compile_regex(text)


def test_the_limit_is_the_callers() -> None:
    check_tries("(.*)x(.*)", 100, most=10_201)
    with pytest.raises(UsageError, match="too many for a name of 100"):
        check_tries("(.*)x(.*)", 100, most=10_200)


@pytest.mark.parametrize("text", ["(", "[", "a{2,1}", "x" * 1001, "*", "(?P<1>a)"])
def test_a_malformed_expression_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(UsageError):
        compile_regex(text)
