"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import UsageError
from ckptkit.units import counted, first_few, format_count, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(("text", "nbytes"), [
    ("1GB", 10**9), ("1GiB", 2**30), ("512MB", 512 * 10**6), ("1.5 T", 1_500_000_000_000), ("5gb", 5 * 10**9),
    ("0", 0), (".5k", 500), (1024, 1024), ("17 B", 17), ("2Ki", 2048),
])  # fmt: skip
def test_a_size_counts_bytes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "1 GB x", "1iB", -1, float("inf"), float("nan"), True, "1e9"])
def test_an_invalid_size_is_wrong_usage(text):
    with pytest.raises(UsageError):
        parse_size(text)


@given(st.integers(0, 10**18))
def test_a_printed_size_reads_back_within_its_rounding(nbytes):
    unit = 1000 ** ((len(str(nbytes)) - 1) // 3)
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= max(0.051 * unit, 0.05 * nbytes)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("2d", 172800), ("250ms", 0.25), (30, 30)]
)
def test_a_duration_counts_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "-1s", "1y", -1, True])
def test_an_invalid_duration_is_wrong_usage(text):
    with pytest.raises(UsageError):
        parse_duration(text)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0384, "38 ms"), (2.04, "2.0 s"), (75 * 60, "1 h 15 min"), (125, "2 min 5 s"), (90000, "1 d 1 h"),
])  # fmt: skip
def test_durations_are_printed_for_people(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(999, "999 B"), (14_200_000_000, "14.2 GB"), (999_999, "1.0 MB"), (10**16, "10.0 PB")]
)
def test_sizes_are_printed_in_powers_of_ten(nbytes, text):
    assert format_size(nbytes) == text


def test_counts_are_printed_with_a_letter():
    assert [format_count(n) for n in (999, 7_241_732_096, 1_500)] == ["999", "7.24B", "1.50K"]


@pytest.mark.parametrize(("count", "verb", "text"), [
    (1, "", "1 tensor"), (2, "", "2 tensors"), (0, "are", "0 tensors are"), (1, "are", "1 tensor is"),
    (1, "have", "1 tensor has"),
])  # fmt: skip
def test_a_number_agrees_with_its_noun_and_verb(count, verb, text):
    assert counted(count, "tensor", verb) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (2, "t0, t1"), (5, "t0, t1, t2, t3, t4"), (7, "t0, t1, t2, t3, t4 and 2 more")]
)
def test_long_lists_of_names_show_the_first_five(count, text):
    assert first_few([f"t{i}" for i in range(count)]) == text
