"""Sizes and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import UsageError
from ckptkit.units import counted, first_few, format_count, format_duration, format_size, parse_duration, parse_size

SIZES = [
    ("1GB", 10**9), ("1GiB", 2**30), ("512MB", 512 * 10**6), ("1.5 T", 1_500_000_000_000), ("5gb", 5 * 10**9),
    ("0", 0), (".5k", 500), (1024, 1024), ("17 B", 17), ("2Ki", 2048),
]  # fmt: skip
DURATIONS = [("90s", 90), ("5m", 300), ("1.5h", 5400), ("2d", 172800), ("250ms", 0.25), (30, 30)]
INVALID = {
    parse_size: ["", "GB", "-1", "1XB", "1 GB x", "1iB", -1, float("inf"), float("nan"), True, "1e9"],
    parse_duration: ["", "h", "-1s", "1y", -1, True],
}


def test_a_size_counts_bytes_and_a_duration_seconds():
    assert [parse_size(text) for text, _ in SIZES] == [nbytes for _, nbytes in SIZES]
    assert [parse_duration(text) for text, _ in DURATIONS] == pytest.approx([seconds for _, seconds in DURATIONS])


@pytest.mark.parametrize(("parse", "text"), [(parse, text) for parse, texts in INVALID.items() for text in texts])
def test_an_invalid_size_or_duration_is_wrong_usage(parse, text):
    with pytest.raises(UsageError):
        parse(text)


@given(st.integers(0, 10**18))
def test_a_printed_size_reads_back_within_its_rounding(nbytes):
    unit = 1000 ** ((len(str(nbytes)) - 1) // 3)
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= max(0.051 * unit, 0.05 * nbytes)


PRINTED = [
    (format_duration, [0.0384], "38 ms"), (format_duration, [2.04], "2.0 s"), (format_duration, [125], "2 min 5 s"),
    (format_duration, [75 * 60], "1 h 15 min"), (format_duration, [90000], "1 d 1 h"),
    (format_size, [999], "999 B"), (format_size, [14_200_000_000], "14.2 GB"), (format_size, [999_999], "1.0 MB"),
    (format_size, [10**16], "10.0 PB"),
    (format_count, [999], "999"), (format_count, [7_241_732_096], "7.24B"), (format_count, [1_500], "1.50K"),
    (counted, [1, "tensor"], "1 tensor"), (counted, [2, "tensor"], "2 tensors"),
    (counted, [0, "tensor", "are"], "0 tensors are"), (counted, [1, "tensor", "are"], "1 tensor is"),
    (counted, [1, "tensor", "have"], "1 tensor has"),
    (first_few, [""], ""), (first_few, ["01"], "0, 1"), (first_few, ["01234"], "0, 1, 2, 3, 4"),
    (first_few, ["0123456"], "0, 1, 2, 3, 4 and 2 more"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "text"), PRINTED)
def test_values_are_printed_for_people(function, given, text):
    assert function(*given) == text
